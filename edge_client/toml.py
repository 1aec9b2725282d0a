"""Reading TOML on every supported Python: by the standard library, before 3.11 by `tomli`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from edge_client.errors import ConfigError

if sys.version_info >= (3, 11):
    from tomllib import TOMLDecodeError as TOMLDecodeError
    from tomllib import loads as loads
else:
    from tomli import TOMLDecodeError as TOMLDecodeError
    from tomli import loads as loads


def read(path: Path, option: str = "") -> dict[str, Any]:
    """A file's content; `option` is the one that named it, for the message. Raises ConfigError."""
    called = f"{option} {path}".lstrip()
    try:
        content: dict[str, Any] = loads(path.read_text("utf-8-sig"))  # some editors begin a file with a mark
    except OSError as error:
        raise ConfigError(f"{called} cannot be read: {error.strerror}; check its path and permissions") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{called} is not TOML: {error}; save it as UTF-8") from None
    except TOMLDecodeError as error:
        raise ConfigError(f"{called} is not TOML: {error}; correct it there") from None
    for name, value in content.items():
        if _has_nul([name, value]):
            raise ConfigError(f"{called}: setting {name!r} holds the character NUL; no path or name can, take it out")
    return content


def _has_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_nul, (*value, *value.values())))
    if isinstance(value, list):
        return any(map(_has_nul, value))
    return isinstance(value, str) and "\0" in value
