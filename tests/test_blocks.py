"""Parts of the parameter vector: gathered and scattered in order, tensors and gates by name."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy_mlp import mlp

from edge_client.blocks import Block, Blocks, rest, tensors, weights
from edge_client.bundle import Init, Input, Layer, Manifest, Tensor
from edge_client.targets import Classification

M = mlp(3, 4, 2)
FLAT = np.arange(M.d, dtype=np.float32)


def lstm() -> Manifest:
    init = Init(kind="constant", scale=0.0)
    tables = (("ih", (8, 3), 0), ("hh", (8, 2), 24), ("b", (8,), 40), ("out", (2, 2), 48))
    return Manifest(
        name="lstm",
        input=Input(shape=(4, 3)),
        target=Classification(classes=2),
        parameters=tuple(Tensor(name=n, shape=s, offset=o, init=init, trainable=n != "b") for n, s, o in tables),
        layers=(
            Layer(name="lstm", kind="lstm", weights=("ih", "hh"), biases=("b",), gates=("i", "f", "g", "o")),
            Layer(name="out", kind="linear", weights=("out",)),
        ),
        seed=1,
    )


def test_tensors_are_gathered_in_the_order_of_the_table() -> None:
    part = tensors(M, {"1.w", "0.b"})
    assert [b.name for b in part.blocks] == ["0.b", "1.w"]
    assert part.size == 4 + 8
    assert part.gather(FLAT).tolist() == [*range(12, 16), *range(16, 24)]
    assert [FLAT[12:24][p].tolist() for p in part.places] == [list(range(12, 16)), list(range(16, 24))]


def test_an_empty_part_gathers_nothing_of_the_same_dtype() -> None:
    part = tensors(M, set())
    assert part.size == 0
    assert part.gather(FLAT).dtype == np.float32
    assert part.gather(FLAT).shape == (0,)
    part.scatter(np.zeros(0, np.float32), FLAT)


def test_scattering_writes_the_part_and_nothing_else() -> None:
    part, flat = tensors(M, {"0.w", "1.b"}), FLAT.copy()
    part.scatter(-np.ones(part.size, np.float32), flat)
    assert (flat == np.where(np.isin(FLAT, [*range(12), *range(24, 26)]), -1, FLAT)).all()


def test_a_gathered_part_is_a_copy() -> None:
    got = tensors(M, {"0.w"}).gather(FLAT)
    got[:] = 9
    assert FLAT[0] == 0


def test_the_weights_of_a_recurrent_layer_are_a_block_a_gate() -> None:
    m = lstm()
    part = weights(m, m.layers)
    assert [(b.name, b.shape) for b in part.blocks] == [("ih", (2, 3))] * 4 + [("hh", (2, 2))] * 4 + [("out", (2, 2))]
    without = weights(m, m.layers, ("o",))
    flat = np.arange(m.d)
    assert set(part.gather(flat)) - set(without.gather(flat)) == {*range(18, 24), *range(36, 40)}


def test_the_rest_is_what_is_trainable_and_in_no_other_part() -> None:
    m = lstm()
    assert [b.name for b in rest(m, tensors(m, {"hh"})).blocks] == ["ih", "out"]
    assert [b.name for b in rest(m, weights(m, m.layers[:1], ("o",))).blocks] == ["out"]  # half of ih is taken


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=6), st.integers(0, 2**31))
def test_what_is_scattered_is_gathered_again(gaps: list[tuple[int, int]], seed: int) -> None:
    blocks, end = [], 0
    for i, (gap, size) in enumerate(gaps):
        blocks.append(Block(str(i), slice(end + gap, end + gap + size), (size,)))
        end += gap + size
    part, rng = Blocks(tuple(blocks)), np.random.default_rng(seed)
    flat, values = rng.standard_normal(end + 3), rng.standard_normal(part.size)
    before = flat.copy()
    part.scatter(values, flat)
    assert (part.gather(flat) == values).all()
    part.scatter(part.gather(before), flat)
    assert (flat == before).all()
