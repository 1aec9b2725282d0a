"""Interleaved rANS: what is coded is read again, and the compiled loops give the words of the numpy ones."""

from __future__ import annotations

from types import ModuleType
from unittest import mock

import numpy as np
import pytest
from edge_kernels import compiled, lattice_model
from edge_kernels.codecs import CodecError, arrivals, rans
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_client.training import steps

TABLES = rans.geometric_tables([int(x * 2**32) for x in (0.0001, 0.1, 0.5, 0.9, 0.99)])


def case(seed: int, lanes: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint64]]:
    """The number of symbols of each table, their entries, and the states to begin with."""
    rng = np.random.default_rng(seed)
    runs = rng.multinomial(size, np.full(5, 0.2)).astype(np.int64)
    first = TABLES.first.astype(np.int64)
    entries = [rng.integers(first[t], first[t + 1], n) for t, n in enumerate(runs)]
    states = rng.integers(rans.LOW, 2 * rans.LOW, lanes).astype(np.uint64)
    return runs, np.concatenate(entries).astype(np.uint32), states


def coded(entries: NDArray[np.uint32], states: NDArray[np.uint64]) -> tuple[NDArray[np.uint16], NDArray[np.uint64]]:
    """The words, and the states after them."""
    states = states.copy()
    return rans.encode(entries, TABLES, states), states


@pytest.fixture(params=["compiled", "numpy"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either way to code."""
    if request.param == "compiled":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(rans, "loops", lambda _: None)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("lanes", [1, 3, 16])
@pytest.mark.parametrize("size", [0, 1, 7, 3000])
def test_symbols_come_back_and_the_states_end_as_they_began(lanes: int, size: int) -> None:
    runs, entries, states = case(size + lanes, lanes, size)
    words, ended = coded(entries, states)
    symbols, used = rans.decode(runs, TABLES, ended, words)
    assert used == len(words)
    assert symbols.tolist() == (entries - np.repeat(TABLES.first[:-1], runs)).tolist()
    assert ended.tolist() == states.tolist()


@pytest.mark.usefixtures("loops")
def test_words_that_run_out_are_an_error() -> None:
    runs, entries, states = case(1, 4, 500)
    words, ended = coded(entries, states)
    with pytest.raises(CodecError, match="ends within its coded symbols"):
        rans.decode(runs, TABLES, ended, words[:-1])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 40), st.integers(0, 400))
def test_compiled_loops_write_and_read_the_bytes_of_the_numpy_ones(seed: int, lanes: int, size: int) -> None:
    pytest.importorskip("numba")
    runs, entries, states = case(seed, lanes, size)
    words, ended = coded(entries, states)
    damaged = words ^ np.uint16(seed & 0xFF)
    with mock.patch.object(rans, "loops", return_value=None):
        plain, plain_ended = coded(entries, states)
        assert (plain.tolist(), plain_ended.tolist()) == (words.tolist(), ended.tolist())
        expected = _read(runs, ended, damaged)
    assert _read(runs, ended, damaged) == expected


def _read(runs: NDArray[np.int64], states: NDArray[np.uint64], words: NDArray[np.uint16]) -> object:
    """What decoding gives, with the states at the end; the error's text where it fails."""
    states = states.copy()
    try:
        symbols, used = rans.decode(runs, TABLES, states, words)
    except CodecError as error:
        return str(error)
    return symbols.tolist(), used, states.tolist()


@pytest.mark.parametrize("module", [rans, arrivals, lattice_model, steps])
def test_a_module_finds_its_compiled_loops(module: ModuleType) -> None:
    pytest.importorskip("numba")
    assert compiled.loops(module.__name__) is not None
