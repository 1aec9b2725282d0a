"""Setting `up` of every method that averages values: a lossless codec changes nothing, what is lost is sent later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from edge_kernels import counter
from edge_kernels.codecs import values
from numpy.typing import NDArray
from numpy_mlp import course, grouped, mlp
from rounds import Rounds

from edge_client.errors import ConfigError, DivergedError, LostError, PayloadError
from edge_client.methods import Method, make_method
from edge_client.methods.shared.pruned import alive
from edge_client.methods.shared.pruned import unpacked as mask_of
from edge_client.methods.shared.units import carried, whole
from edge_client.methods.shared.units import unpacked as units_of
from edge_client.methods.shared.value_changes import Uplink, applied, update_stream
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment

M = grouped(mlp(6, 10, 8, 3))
FREE = np.zeros(300, np.bool_)
HEAD = np.arange(M.tensors["2.w"].offset, M.d)
Places = NDArray[np.int64]

SETTINGS: dict[str, dict[str, Any]] = {
    "fedavg": {"epochs": 1},
    "lgfedavg": {"num_layers": 1, "global_rounds": 2},
    "linear_probing": {},
    "federated_pruning": {"epochs": 2, "every": 1, "keep": 0.5, "lr": 0.3},
    "hermes": {"epochs": 1, "threshold": -1.0, "target": 0.4},  # each device prunes in every round
    "fedmap": {"epochs": 1, "every": 2, "batch": 20, "lr": 0.05},
    "federated_pruning_lamp": {"epochs": 1, "schedule": "continuous", "batch": 20, "lr": 0.05},
}
every_method = pytest.mark.parametrize("name", sorted(SETTINGS))
TRAVELS: dict[str, Callable[[int, Any], Places]] = {
    "fedavg": lambda round_, kept: np.arange(M.d),
    "lgfedavg": lambda round_, kept: np.arange(M.d) if round_ <= 2 else HEAD,
    "linear_probing": lambda round_, kept: HEAD,
    "federated_pruning": lambda round_, kept: units_of(M, kept.units).places,
    "hermes": lambda round_, kept: units_of(M, kept.units).places,
    "fedmap": lambda round_, kept: np.flatnonzero(alive(M, mask_of(M, kept.mask))),
    "federated_pruning_lamp": lambda round_, kept: np.flatnonzero(alive(M, mask_of(M, kept.mask))),
}
"""Where in the flat vector the values lie that a device sent, by the round and what it kept."""


def fleet(name: str, **settings: Any) -> Rounds:
    return Rounds(made(name, **settings), M)


def made(name: str, **settings: Any) -> Method:
    return make_method({"name": name, **SETTINGS.get(name, {}), **settings})


def model(there: Rounds) -> NDArray[np.float32]:
    """The server's parameters, all of them or those that the method has."""
    state = there.state
    found = next(getattr(state, n) for n in ("parameters", "theta", "head") if hasattr(state, n))
    assert isinstance(found, np.ndarray)
    return found


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, {}) for name in sorted(SETTINGS)),
        ("feddr", {"epochs": 1}),
        ("fedmap", {"dr": {"alpha": 0.9}, "momentum": 0}),
    ],
)
def test_a_codec_that_loses_nothing_gives_the_model_of_float32(name: str, more: dict[str, Any]) -> None:
    plain, coded = fleet(name, **more), fleet(name, up="topk:1", **more)
    for _ in range(4):
        plain.play("a", "b", "c")
        coded.play("a", "b", "c")
        assert model(coded) == pytest.approx(model(plain), abs=1e-5)
    assert "change.topk:1" in coded.local["a"].update.arrays
    assert not any("." in array for array in plain.local["a"].update.arrays)


@every_method
@pytest.mark.parametrize("codec", ["topk:0.1", "eden:1"])
def test_what_travels_and_what_is_kept_are_the_changes_of_what_travels_still(name: str, codec: str) -> None:
    there, owed, travelled = fleet(name, up=codec, feedback=True), np.zeros(M.d, np.float32), set()
    for round_ in range(1, 6):
        kept = there.kept.get("a")
        there.play("a", "b")
        task = there.task("a", round_)
        before = there.method.personal(task, kept, there.received["a"]).parameters
        places = TRAVELS[name](round_, there.kept["a"])
        change = (there.local["a"].trained.parameters - before)[places]
        data = there.local["a"].update.arrays[f"change.{codec}"].tobytes()
        sent = values.decode(codec, data, places.size, update_stream(Assignment(there.course, round_, "a")))
        residual = there.kept["a"].residual
        assert np.abs(sent + residual - (change + owed[places])).max() < 1e-5
        assert np.abs(residual).max() > 0
        owed[:] = 0
        owed[places] = residual
        travelled.add(places.tobytes())
    assert len(travelled) > 1 or name in ("fedavg", "linear_probing")


@every_method
def test_without_feedback_a_device_keeps_no_residual_and_without_one_it_starts_at_nothing(name: str) -> None:
    without, feeds = fleet(name, up="topk:0.1"), fleet(name, up="topk:0.1", feedback=True)
    for _ in range(2):
        without.play("a")
        feeds.play("a")
        assert np.array_equal(model(feeds), model(without))
        assert getattr(without.kept["a"], "residual", None) is None
        assert np.abs(feeds.kept["a"].residual).max() > 0
        feeds.kept["a"] = without.kept["a"]


@every_method
@pytest.mark.parametrize("codec", ["topk:0.1", "eden:1"])
def test_another_codec_s_update_is_refused(name: str, codec: str) -> None:
    plain, coded = fleet(name), fleet(name, up=codec)
    plain.play("a")
    coded.play("a")
    a = Assignment(coded.course, 1, "a")
    fresh = {method: method.start(course(M)) for method in (plain.method, coded.method)}
    good = {there.method: there.local["a"].update for there in (plain, coded)}
    for method, other in ((plain.method, coded.method), (coded.method, plain.method)):
        assert method.read_update(a, fresh[method], None, good[method])
        with pytest.raises(PayloadError, match=r"arrays|missing"):
            method.read_update(a, fresh[method], None, good[other])
        both = Payload({**good[other].arrays, **good[method].arrays}, good[method].meta)
        with pytest.raises(PayloadError, match="arrays"):
            method.read_update(a, fresh[method], None, both)


@every_method
@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"feedback": True}, "feedback returns what a codec loses; name one in up"),
        ({"up": "zip"}, "zip"),
        ({"up": "topk:7"}, "the fraction is"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        made(name, **settings)


def test_a_reflection_has_no_feedback() -> None:
    with pytest.raises(ConfigError, match="with dr a device sends a reflection"):
        made("fedmap", up="topk:0.1", feedback=True, dr={})
    assert made("fedmap", up="eden:1", dr={}).update_limit(course(M)) > 4 * M.d


def test_the_mean_of_many_devices_changes_by_eden_is_the_change() -> None:
    rng = np.random.default_rng(0)
    received, trained = (rng.standard_normal(300).astype(np.float32) for _ in range(2))
    uplink, total, n = Uplink("eden:1"), np.zeros(300), 800
    for i in range(n):
        a = Assignment(course(M), 1, str(i))
        sent, left = uplink.send(a, "head", trained, received, FREE)
        total += uplink.read(a, "head", Payload(sent), received, FREE)
        assert left is None
    error = np.linalg.norm(total / n - trained) / np.linalg.norm(trained - received)
    assert error < 1.3 * np.sqrt((np.pi / 2 - 1) / n)  # the variance of one bit a value, of independent devices


@pytest.mark.parametrize("codec", ["eden:1", "sign", "drive", "qsgd:1", "float16"])
def test_a_codec_leaves_frozen_values_as_they_are(codec: str) -> None:
    """EDEN and signs decode a change of 0 as another number."""
    rng = np.random.default_rng(0)
    received, fixed = rng.standard_normal(300).astype(np.float32), rng.random(300) < 0.3
    trained = np.where(fixed, received, rng.standard_normal(300).astype(np.float32))
    a, uplink = Assignment(course(M), 1, "a"), Uplink(codec, feedback=True)
    sent, left = uplink.send(a, "head", trained, received, fixed)
    read = uplink.read(a, "head", Payload(sent), received, fixed)
    assert np.array_equal(read[fixed], received[fixed])
    assert left is not None
    assert not left[fixed].any()
    assert not np.array_equal(read, received)


@pytest.mark.parametrize("name", sorted(set(SETTINGS) - {"linear_probing"}))
def test_frozen_tensors_never_change_under_a_codec(name: str) -> None:
    frozen = M.model_copy(
        update={"parameters": [t.model_copy(update={"trainable": t.name != "1.b"}) for t in M.parameters]}
    )
    there = Rounds(made(name, up="eden:1"), frozen)
    before = model(there)[frozen.tensors["1.b"].span].copy()
    for _ in range(3):
        there.play("a", "b")
    assert np.array_equal(model(there)[frozen.tensors["1.b"].span], before)


def test_the_stream_of_a_codec_is_of_the_seed_the_round_and_the_device() -> None:
    """As docs/methods/compressed.md promises: another implementation must draw the same numbers."""
    a = Assignment(course(M), 3, "a")
    assert update_stream(a) == counter.key(a.seed, "update values", 3, "a")
    sent, _ = Uplink("eden:1").send(a, "head", np.arange(300, dtype=np.float32), np.zeros(300, np.float32), FREE)
    expected = values.encode("eden:1", np.arange(300, dtype=np.float32), counter.key(a.seed, "update values", 3, "a"))
    assert sent["change.eden:1"].tobytes() == expected


def test_a_change_that_a_codec_cannot_hold_is_the_training_s_fault() -> None:
    with pytest.raises(DivergedError, match=r"codec 'float16' .*; use a smaller learning rate, or another codec"):
        Uplink("float16").send(
            Assignment(course(M), 1, "a"), "head", np.full(300, 1e6, np.float32), np.zeros(300, np.float32), FREE
        )


def test_a_change_that_makes_a_value_infinite_is_refused() -> None:
    most = np.full(2, 3e38, np.float32)
    assert applied(most, -most).tolist() == [0, 0]
    with pytest.raises(PayloadError, match="infinite; lower the learning rate"):
        applied(most, most)


def test_papers_count_the_values_of_top_k_without_their_places() -> None:
    large = course(M)
    assert made("fedavg", up="topk:0.1").paper_bytes(large) == (4 * round(0.1 * M.d),) * 2
    parts = 4 * sum(max(1, round(0.1 * t.size)) for t in M.parameters)
    assert made("fedavg", up="topk:0.1", per_tensor=True).paper_bytes(large) == (parts, parts)
    assert made("fedavg", up="topk").paper_bytes(large) == (4 * round(0.01 * M.d),) * 2
    assert made("fedavg", up="eden:1").paper_bytes(large) is None


@pytest.mark.parametrize("size", [1, 5])
def test_values_kept_of_a_structure_of_another_size_are_lost(size: int) -> None:
    units = whole(M)
    assert carried(np.ones(units.places.size, np.float32), units.packed, units) is not None
    with pytest.raises(LostError, match=f"kept {size} values"):
        carried(np.ones(size, np.float32), units.packed, units)
