"""Files of settings: what is refused before a setting is looked at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edge_client import toml
from edge_client.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('bundle = "a\\u0000b"', "'bundle'"),
        ('[data]\npath = "a\\u0000b"', "'data'"),
        ('[[parts]]\nfiles = ["a", "b\\u0000"]', "'parts'"),
        ('"odd\\u0000" = 1', "'odd\\x00'"),
        ('[data]\n"odd\\u0000" = 1', "'data'"),
    ],
)
def test_a_setting_with_a_nul_is_refused_wherever_it_is(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "settings.toml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"settings.toml: setting {name} holds the character NUL; ")):
        toml.read(tmp_path / "settings.toml")
