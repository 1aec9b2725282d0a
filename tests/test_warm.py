"""Warm starts: what a state stands for, a bundle with other weights, and federations that go on from others."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coordination import Fleet, manifest, play, refused, settings, whole
from every_method import SETTINGS
from numpy_mlp import grouped, mlp
from rounds import Rounds
from safetensors.numpy import load, save

from coord_server import warm
from coord_server.operator.cli import check_settings
from edge_client.bundle import digest, views
from edge_client.errors import ConfigError
from edge_client.global_model import global_model
from edge_client.methods import make_method
from edge_client.methods.fedavg import FedAvg
from edge_client.protocol.payload import decode
from edge_client.task import Course

FED = "/v1/federations/fed"
NAMES = sorted(e.name for e in entry_points(group="maskfleet.methods"))
DEVICES = ("a", "b")
AVERAGING = ("fedavg", "fedprox", "fedcode", "stc", "lattice", "feddr", "perfedavg", "hermes")


def played(name: str, rounds: int = 2, **settings: Any) -> Rounds:
    """A federation of the method after so many of its four rounds."""
    few = {"epochs": 1} if "epochs" in type(make_method({"name": name})).model_fields else {}
    method = make_method({"name": name, **few, **SETTINGS.get(name, {}), **settings})
    found = Rounds(method, grouped(mlp(6, 16, 8, 3)), 4)
    for _ in range(rounds):
        found.play(*DEVICES)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_every_method_stands_for_a_model_or_a_sentence_says_why_not(name: str) -> None:
    at_the_mean = {"server_momentum": 0.0} if name == "lattice" else {}  # with a momentum the model is beyond it
    rounds = played(name, **at_the_mean)
    if rounds.method.stays(rounds.course) is not None:
        with pytest.raises(ConfigError, match="no global model"):
            global_model(rounds.method, rounds.course, rounds.state, rounds.round)
        return
    model = global_model(rounds.method, rounds.course, rounds.state, rounds.round)
    start = rounds.course.model
    assert model.parameters.shape == start.parameters.shape
    assert np.isfinite(model.parameters).all()
    assert not np.array_equal(model.parameters, start.parameters)
    if name in AVERAGING:
        mean = np.mean([rounds.local[d].trained.parameters for d in DEVICES], 0)
        assert np.linalg.norm(model.parameters - mean) < np.linalg.norm(start.parameters - mean)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("total", [3, 6])
def test_every_method_goes_on_when_the_number_of_rounds_changes_under_way(name: str, total: int) -> None:
    rounds = played(name)
    rounds.course = replace(rounds.course, rounds=total)
    while rounds.round < total:
        rounds.play(*DEVICES)
    for device in DEVICES:
        assert np.isfinite(rounds.personal(device).parameters).all()


# --- over HTTP


def values(d: int = 12, **more: Any) -> dict[str, Any]:
    return {"w": np.linspace(-1, 1, d, dtype=np.float32).reshape(d // 2, 2), **more}


def test_a_federation_starts_from_the_values_of_a_file(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        address = await fleet.bundle()
        made = await fleet.operator("POST", f"/v1/bundles/{address}/weights", content=save(values()))
        assert made.status_code == 201, made.text
        again = await fleet.operator("POST", f"/v1/bundles/{address}/weights", content=save(values()))
        assert made.json() == again.json() == {"digest": made.json()["digest"], "name": "small", "missing": []}
        derived = made.json()["digest"]
        content = (await fleet.operator("GET", f"/v1/bundles/{derived}")).content
        assert digest(content) == derived != address
        config = settings(bundle=derived)
        assert (await fleet.operator("POST", "/v1/federations", json=config)).status_code == 201
        state = decode((await fleet.operator("GET", f"{FED}/state")).content).arrays
        assert np.array_equal(state["parameters"], values()["w"].reshape(-1))

    play(tmp_path, script)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"nonsense", "not a safetensors file"),
        (save({"v": np.zeros(3, np.float32)}), "have none of that name"),
        (save(values(8)), r"have float32[4, 2] of that name"),
        (save({"w": values()["w"].astype(np.float64)}), "float64"),
        (save({"w": values()["w"] * np.float32("nan")}), "not finite"),
        (save(values(v=np.zeros(1, np.float32))), "no tensors ['v']"),
    ],
)
def test_values_that_are_not_the_bundles_are_refused(tmp_path: Path, body: bytes, why: str) -> None:
    async def script(fleet: Fleet) -> None:
        address = await fleet.bundle()
        assert why in refused(
            await fleet.operator("POST", f"/v1/bundles/{address}/weights", content=body), "bad-bundle"
        )
        big = b"x" * (warm.limit(manifest()) + 1)
        refused(await fleet.operator("POST", f"/v1/bundles/{address}/weights", content=big), "too-large")
        assert len((await fleet.operator("GET", "/v1/bundles")).json()) == 1

    play(tmp_path, script)


def test_settings_that_are_refused_leave_no_bundle_of_a_warm_start(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        await whole(fleet, "a", "bb")
        config = settings(name="next", start_from={"federation": "fed"}, method={"name": "fedavg", "epochs": 0})
        refused(await fleet.operator("POST", "/v1/federations", json=config), "bad-config")
        assert len((await fleet.operator("GET", "/v1/bundles")).json()) == 1

    play(tmp_path, script)


def test_a_federation_that_has_closed_no_round_is_no_start_for_another(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        config = settings(name="next", start_from={"federation": "fed"})
        said = refused(await fleet.operator("POST", "/v1/federations", json=config), "bad-config")
        assert "'fed': it has closed no round yet; wait for its first" in said
        assert said.endswith(f"bundle {digest(manifest().to_bytes())}")
        assert [f["id"] for f in (await fleet.operator("GET", "/v1/federations")).json()] == ["fed"]

    play(tmp_path, script)


def test_the_first_state_of_a_warm_start_is_made_once_and_of_the_values_it_begins_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, start = list[Any](), FedAvg.start

    def counted(method: FedAvg, course: Course) -> Any:
        started.append(course.model)
        return start(method, course)

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        final = decode(await whole(fleet, "a", "bb")).arrays["parameters"]
        monkeypatch.setattr(FedAvg, "start", counted)
        config = settings(name="next", start_from={"federation": "fed"})
        made = (await fleet.operator("POST", "/v1/federations", json=config)).json()["config"]
        assert len(started) == 1
        assert np.array_equal(started[0].parameters, final)
        assert started[0].parameters.dtype == np.float32
        assert digest(started[0].manifest.to_bytes()) == made["bundle"]

    play(tmp_path, script)


def test_a_federation_goes_on_from_another_ones_global_model_and_its_devices_fetch_it(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        final = decode(await whole(fleet, "a", "bb")).arrays["parameters"]
        for i, name in enumerate(("fedavg", "stc", "standalone")):
            config = settings(name=f"next{i}", method={"name": name}, start_from={"federation": "fed"})
            made = await fleet.operator("POST", "/v1/federations", json=config)
            assert made.status_code == 201, made.text
            shown = made.json()["config"]
            assert shown["start_from"] == {"federation": "fed"}
            manifest_ = (await fleet.operator("GET", f"/v1/bundles/{shown['bundle']}")).json()
            part = await fleet.operator("GET", f"/v1/bundles/{shown['bundle']}/parts/weights.safetensors")
            assert np.array_equal(load(part.content)["w"].reshape(-1), final)
            assert manifest_["seed"] is None
            found = (await fleet.operator("GET", f"/v1/bundles/{shown['bundle']}/summary")).json()
            assert found["missing"] == []
        state = decode((await fleet.operator("GET", "/v1/federations/next0/state")).content).arrays
        assert np.array_equal(state["parameters"], final)
        for source, kind, why in (("absent", "not-found", "absent"), ("next2", "bad-config", "has no global model")):
            config = settings(name="last", start_from={"federation": source})
            assert why in refused(await fleet.operator("POST", "/v1/federations", json=config), kind)
        config = settings(name="last", start_from={"federation": "fed"}, bundle=await fleet.bundle(14))
        assert "float32[7, 2]" in refused(await fleet.operator("POST", "/v1/federations", json=config), "bad-config")
        assert views(manifest().parameters, final)["w"].shape == (6, 2)

    play(tmp_path, script)


def test_a_source_written_as_a_name_is_answered_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=re.escape('write start_from = { federation = "har" }')):
        check_settings(settings(start_from="har"), "next.toml")


def test_a_method_written_as_a_name_is_answered_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=re.escape('write method = { name = "fedavg" }')):
        check_settings(settings(method="fedavg"), "next.toml")
