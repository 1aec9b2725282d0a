"""Hostile bytes against every decoder: memory bounded by d at a million positions (mutations: test_fuzz.py)."""

from __future__ import annotations

import importlib.util
import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from edge_kernels import codecs, counter
from edge_kernels.codecs import CodecError

D = 1_000_000


@pytest.fixture(scope="module")
def fuzzer() -> ModuleType:
    path = Path(__file__).parent.parent / "fuzz" / "fuzz_codecs.py"
    spec = importlib.util.spec_from_file_location("fuzz_codecs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_codecs"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def peak(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
    except CodecError:
        pass
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most


@pytest.mark.parametrize("rate", [0.0005, 0.02, 0.25, 0.5, 0.97, 1.0])
def test_decoding_takes_at_most_four_times_the_mask_and_its_positions(rate: float) -> None:
    mask = counter.uniform(6, D) < rate
    for name in codecs.names():
        payload = codecs.encode(name, mask, D)
        found = codecs.decode(name, payload, D)
        assert peak(lambda: codecs.decode(name, payload, D)) <= 4 * (D + found.nbytes), name  # noqa: B023


def test_huge_payloads_and_huge_claims_allocate_next_to_nothing() -> None:
    claims = [b"\xff" * 40, b"\x10" + b"\xff\xff\xff\xff\x0f" * 8, b"\x0f" + b"\0" * 100 + b"\xff" * 40,
              bytes([0x8F, 0x80, 0x80, 0x80, 0x80, 0x08, 0x1F, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F])]  # fmt: skip
    for name in codecs.names():
        for claim in claims:
            assert peak(lambda: codecs.decode(name, claim, D)) < 1_000_000, name  # noqa: B023
        for huge in (b"\0" * 30_000_000, b"\xff" * 30_000_000):  # the network layer bounds the bytes; we add no copy
            assert peak(lambda: codecs.decode(name, huge, 1000)) < 1_000_000, name  # noqa: B023


def test_the_mutator_is_seeded(fuzzer: ModuleType) -> None:
    first, second = (fuzzer.mutate(b"abcdefgh" * 9, b"12345678", random.Random(3)) for _ in range(2))
    assert first == second
    changed = [fuzzer.mutate(b"abcdefgh" * 9, b"12345678", random.Random(i)) != b"abcdefgh" * 9 for i in range(200)]
    assert np.mean(changed) > 0.9
