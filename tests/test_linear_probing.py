"""Linear probing: the head moves and travels, the backbone does neither."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy_mlp import CountingSteps, NumpyMlp
from rounds import M, Rounds, size

from edge_client.bundle import Init, Tensor
from edge_client.errors import PayloadError
from edge_client.methods.linear_probing import LinearProbing, Update
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment

HEAD = 8 * 3 + 3


def test_only_the_head_travels_and_moves() -> None:
    fleet = Rounds(LinearProbing())
    before = fleet.score("a", "b")
    for _ in range(5):
        fleet.play("a", "b")
    assert size(fleet.down["a"]) == size(fleet.local["a"].update) == 4 * HEAD
    model = fleet.personal("a").parameters
    assert (model[:-HEAD] == fleet.course.model.parameters[:-HEAD]).all()
    assert (model[-HEAD:] == fleet.state.head).all()
    assert fleet.score("a", "b") > before + 0.2
    assert fleet.method.exchanged(fleet.course) == HEAD


def test_a_federation_of_one_device_is_local_training_of_the_head() -> None:
    fleet = Rounds(LinearProbing(epochs=2, lr=0.05, momentum=0))
    own = fleet.course.model.parameters.copy()
    for round_ in (1, 2):
        fleet.play("a")
        for batch in fleet.task("a", round_).batches(2, 32):
            own[-HEAD:] -= np.float32(0.05) * NumpyMlp(M).gradient(own, own[:0], batch.x, batch.y).parameters[-HEAD:]
    assert np.abs(fleet.state.head - own[-HEAD:]).max() < 1e-6


def test_batch_norm_statistics_follow_the_training_and_stay_on_the_device() -> None:
    """A round has two steps: 40 samples in batches of 32."""
    m = M.model_copy(update={"buffers": (Tensor(name="n", shape=(1,), offset=0, init=Init(kind="constant", scale=0)),)})
    fleet = Rounds(LinearProbing(), m, trainer=CountingSteps(m))
    for devices in ("a", "ab"):
        fleet.play(*devices)
        assert size(fleet.local["a"].update) == 4 * HEAD
    assert [fleet.personal(d).buffers.tolist() for d in "abc"] == [[4], [2], [0]]
    everyone = fleet.personal("c")
    assert fleet.method.of_device(fleet.course, fleet.state, None, everyone) is None
    alike = Rounds(LinearProbing())
    assert alike.method.of_device(alike.course, alike.state, None, everyone) is everyone


def test_the_mean_is_weighted_by_samples_whatever_the_order() -> None:
    method, fleet = LinearProbing(), Rounds(LinearProbing())
    a = Assignment(fleet.course, 1, "a")
    heads = [Update(np.full(HEAD, v, np.float32), n) for v, n in ((2.0, 1.0), (6.0, 3.0))]
    for order in (heads, heads[::-1]):
        total = None
        for update in order:
            total, _ = method.fold(a, fleet.state, total, update, None)
        assert total is not None
        assert set(method.finish(fleet.course, 1, ["a"], fleet.state, total)[0].head.tolist()) == {5.0}
    limited = method.limited(a, replace(fleet.state, head=np.zeros(HEAD, np.float32)), heads[0], 0.5, 2.0)
    assert (limited.head[0], limited.samples) == (1.0, 2.0)


@pytest.mark.parametrize("arrays", [{}, {"head": np.zeros(3, np.float32)}, {"x": np.zeros(HEAD, np.float32)},
                                    {"head": np.full(HEAD, np.nan, np.float32)}])  # fmt: skip
def test_a_hostile_downlink_is_refused(arrays: dict[str, np.ndarray]) -> None:
    fleet = Rounds(LinearProbing())
    a = Assignment(fleet.course, 1, "a")
    with pytest.raises(PayloadError):
        fleet.method.receive(a, None, Payload(arrays))
