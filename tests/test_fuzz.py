"""A short run of the fuzzer. `make fuzz` is the long run."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "fuzz"
MUTATIONS = {"codecs": 12_000, "coupling": 2_500, "lattice": 1_500, "container": 20_000}


def fuzz(*options: str) -> str:
    run = subprocess.run(
        [sys.executable, str(FOLDER / "fuzz_codecs.py"), *options], capture_output=True, text=True, timeout=1800
    )
    assert run.returncode == 0, run.stderr[-3000:]
    print(run.stdout)  # the count, for `pytest -s`
    return run.stdout


@pytest.fixture
def fuzzer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    import fuzz_codecs

    return fuzz_codecs


@pytest.mark.parametrize("group", MUTATIONS)
def test_mutated_payloads_neither_crash_nor_hang_nor_allocate_too_much(group: str, tmp_path: Path) -> None:
    said = fuzz(group, "--mutations", str(MUTATIONS[group]), "--json", str(tmp_path / "fuzz.json"))
    words = re.match(r"(\d+) mutated payloads of \d+ targets .* in \d+ s: (\d+) decoded, (\d+) refused", said)
    assert words is not None
    total, decoded, refused = map(int, words.groups())
    assert total == MUTATIONS[group] == decoded + refused
    assert decoded > 0
    assert refused > total // 10
    assert json.loads((tmp_path / "fuzz.json").read_text())[group]["mutations"]["refused"] == refused


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="pip install 'maskfleet[fuzz]'")
@pytest.mark.parametrize("group", MUTATIONS)
def test_a_few_seconds_guided_by_coverage_find_nothing(group: str) -> None:
    words = re.search(r"(\d+) payloads of \d+ targets .* guided by coverage", fuzz(group, "--atheris", "3"))
    assert words is not None
    assert int(words[1]) >= 100


def test_the_shortest_payloads_take_no_more_memory_than_they_may(fuzzer: ModuleType) -> None:
    for target in fuzzer.fuzz_targets.GROUPS["codecs"](False):
        for size in range(4):
            fuzzer.attempt(target, bytes(size), measured=True)


def test_the_mutator_is_seeded(fuzzer: ModuleType) -> None:
    whole = b"abcdefgh" * 9
    first, second = (fuzzer.mutate(whole, b"12345678", random.Random(3)) for _ in range(2))
    assert first == second
    changed = [fuzzer.mutate(whole, b"12345678", random.Random(i)) != whole for i in range(200)]
    assert np.mean(changed) > 0.9


def test_a_decoder_that_hangs_is_interrupted(fuzzer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(_: bytes) -> object:
        while True:
            pass

    monkeypatch.setattr(fuzzer, "SLOWEST", 0.05)
    with pytest.raises(fuzzer.HungError):
        fuzzer.attempt(fuzzer.Target("hanging", hang, b"", 1), b"", measured=False)


def test_a_decoder_that_allocates_too_much_is_reported(fuzzer: ModuleType) -> None:
    greedy = fuzzer.Target("greedy", lambda _: np.ones(300_000, np.uint8)[:1], b"", 1000)
    with pytest.raises(AssertionError, match="greedy allocated 3"):
        fuzzer.attempt(greedy, b"", measured=True)


def test_crafted_filters_have_valid_checksums_and_consistent_headers(fuzzer: ModuleType) -> None:
    (image,) = (t for t in fuzzer.fuzz_targets.codec_targets() if t.name == "fuse8-png d=4000")
    rng = random.Random(1)
    for _ in range(50):
        data = image.craft(rng)
        assert zlib.crc32(data[12:29]) == int.from_bytes(data[29:33], "big")
