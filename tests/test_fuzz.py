"""A short run of the fuzzer in CI; `make fuzz` is the long one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[1] / "fuzz" / "fuzz_codecs.py"
MUTATIONS = 20_000


@pytest.mark.parametrize("options", [(), ("--container",)], ids=["codecs", "container"])
def test_mutated_payloads_neither_crash_nor_hang_nor_allocate_too_much(options: tuple[str, ...]) -> None:
    run = subprocess.run(
        [sys.executable, str(FUZZ), "--mutations", str(MUTATIONS), *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    print(run.stdout)  # the count, for `pytest -s`
    said = re.match(r"(\d+) mutated payloads of \d+ targets in \d+ s: (\d+) decoded, (\d+) refused", run.stdout)
    assert said is not None
    total, decoded, refused = map(int, said.groups())
    assert total == MUTATIONS == decoded + refused
    assert decoded > 0
    assert refused > MUTATIONS // 10
