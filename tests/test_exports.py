"""Model files that the coordinator's worker makes: asked for, watched, fetched; killed, late and unknown ones."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import coordinator_process
import httpx
import numpy as np
import onnx
import onnxruntime as ort
import psutil
import pytest
from coordination import LIMIT, OPERATOR, Fleet, bearer, credential, refused, settings, whole
from coordinator_process import coordinator
from edge_bench.simulation.workers import Evaluation
from edge_bench.testing import digits, methods
from every_method import SETTINGS, every_method, made
from exports_of_digits import DIGITS, PATH, ended, with_digits
from processes import HELD, held, release
from processes import ended as over

from coord_server import aggregation, exports, model_file
from coord_server.exports import Exports
from coord_server.operator.client import Operator
from coord_server.operator.export import export_onnx
from edge_client.bundle import Bundle
from edge_client.errors import CompactionError
from edge_client.global_model import global_model
from edge_client.methods import make_method
from edge_client.protocol.messages import Federation, FederationConfig, Report
from edge_client.task import Course
from edge_client.training import open_trainer


def graph(file: bytes) -> bytes:
    """A model without what it says of itself."""
    model = onnx.load_from_string(file)
    del model.metadata_props[:]
    return bytes(model.SerializeToString(deterministic=True))


def test_the_operator_asks_for_a_model_watches_its_making_and_fetches_it(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> tuple[bytes, bytes]:
        asked = await fleet.operator("POST", PATH, json={"kind": "onnx"})
        assert (asked.status_code, int(asked.headers["Retry-After"]) > 0) == (202, True)
        assert asked.url.join(asked.headers["Location"]).path == f"{PATH}/{asked.json()['id']}"
        assert (await fleet.operator("POST", PATH, json={"kind": "onnx"})).json()["id"] == asked.json()["id"]
        first = await ended(fleet, asked.json())
        assert (first["state"], first["round"]) == ("ready", 0)
        state = await whole(fleet, "a", "bb")
        last = await ended(fleet, (await fleet.operator("POST", PATH, json={"kind": "onnx"})).json())
        assert (last["state"], last["round"]) == ("ready", 2)
        again = await fleet.operator("POST", PATH, json={"kind": "onnx"})
        assert (again.status_code, again.json()) == (200, last)
        file = (await fleet.operator("GET", f"{PATH}/{last['id']}/file")).content
        assert len(file) == last["size"]
        known = {"bytes=2-5": file[2:6], "bytes=-3": file[-3:], "lines=0-1": file, "bytes=x": file}
        for asked, body in known.items():
            status = 200 if body is file else 206
            part = await fleet.operator("GET", f"{PATH}/{last['id']}/file", {"Range": asked})
            assert (part.status_code, part.content) == (status, body), asked
        for asked in ("bytes=5-2", f"bytes={len(file)}-"):
            refused(await fleet.operator("GET", f"{PATH}/{last['id']}/file", {"Range": asked}), "bad-range")
        tag = (await fleet.operator("GET", f"{PATH}/{last['id']}/file")).headers["etag"]
        assert (await fleet.operator("GET", f"{PATH}/{last['id']}/file", {"If-None-Match": tag})).status_code == 304
        stale = {"Range": "bytes=2-5", "If-Range": '"another"'}
        assert (await fleet.operator("GET", f"{PATH}/{last['id']}/file", stale)).content == file
        assert (last["source"], last["detail"][:46]) == ("global", "the global model after round 2 of 2, 6570 of 6")
        where, mine = "/v1/federations/fed/devices/bb/model?kind=onnx", bearer(credential("bb"))
        while (await fleet.http.head(where, headers=mine)).status_code == 202:
            await asyncio.sleep(0.05)
        before = await bundle_bytes(fleet, "bb")
        assert (await fleet.http.head(where, headers=mine)).status_code == 200
        assert await bundle_bytes(fleet, "bb") == before  # nothing but headers went down
        own = await fleet.http.get(where, headers=mine)
        assert await bundle_bytes(fleet, "bb") == before + len(own.content)
        assert (own.status_code, own.headers["Maskfleet-Source"]) == (200, "personal")
        assert graph(own.content) == graph(file)  # all devices have the global model
        return state, file

    state, file = with_digits(tmp_path, script)
    bundle, method = Bundle.open(DIGITS), make_method({"name": "fedavg"})
    model = global_model(method, Course(bundle.model(), 7, 2, 2), aggregation.unpack(method.state_type, state), 2)
    x = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32)
    (found,) = ort.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    h = x
    values = {t.name: model.parameters[t.span].reshape(t.shape) for t in bundle.manifest.parameters}
    for layer in ("0", "2", "4"):
        h = h @ values[f"{layer}.weight"].T + values[f"{layer}.bias"]
        h = np.maximum(h, 0) if layer != "4" else h
    np.testing.assert_allclose(found, h, rtol=1e-4, atol=1e-4)


async def bundle_bytes(fleet: Fleet, device: str) -> int:
    """What a device has received of bundles and models, as the operator sees it."""
    found = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()
    return next(int(d["messages_down"].get("bundle", 0)) for d in found if d["device"] == device)


def test_the_command_line_writes_the_file_that_the_worker_makes(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        state = await whole(fleet, "a", "bb")
        found = await ended(fleet, (await fleet.operator("POST", PATH, json={"kind": "onnx"})).json())
        file = (await fleet.operator("GET", f"{PATH}/{found['id']}/file")).content
        shown = Federation.model_validate_json((await fleet.operator("GET", "/v1/federations/fed")).content)

        class Asked(Operator):
            def __init__(self) -> None:
                """Nothing is sent."""

            def federation(self, id_: str) -> Federation:
                return shown

            def state_and_round(self, id_: str) -> tuple[bytes, int]:
                return state, shown.round

            def fetch_bundle(self, *_: Any) -> Bundle:
                return Bundle.open(DIGITS)

        said = export_onnx(Asked(), "fed", tmp_path / "own.onnx")
        assert said == f"{tmp_path / 'own.onnx'}: {found['detail']}"
        assert (tmp_path / "own.onnx").read_bytes() == file

    with_digits(tmp_path, script)


def test_the_model_is_that_of_the_cohort_of_the_creation(tmp_path: Path) -> None:
    """Lattice keeps sums: divided by a cohort that the operator has changed, they are another model."""
    there = methods.middle(made("lattice"), digits(), 2)
    course, method, state = there.sim.course, there.sim.method, there.sim.state
    config = FederationConfig(
        name="fed", bundle="0" * 64, method={"name": "lattice", **method.model_dump(mode="json")}, seed=course.seed,
        rounds=course.rounds, cohort=1, min_devices=1, min_updates=1,
    )  # fmt: skip
    assert course.cohort > 1
    held = model_file.Held(config, course.cohort, 2, aggregation.pack(state))
    model_file.write_model(held, digits().bundle, tmp_path / "m.onnx")
    x = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32)
    (found,) = ort.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x})
    model = global_model(method, course, state, 2)
    expected = open_trainer("onnxruntime", digits().bundle).logits(model.parameters, model.buffers, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_an_order_names_the_cohort_of_the_creation(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        changed = (await fleet.operator("PATCH", "/v1/federations/fed", json={"cohort": 1})).json()
        assert (changed["config"]["cohort"], changed["places"]) == (1, 2)
        found = (await fleet.operator("POST", PATH, json={"kind": "onnx"})).json()
        assert exports.Order.model_validate_json(order_of(tmp_path, found).read_text()).places == 2
        await ended(fleet, found)

    with_digits(tmp_path, script, min_updates=1)


def order_of(folder: Path, found: dict[str, Any]) -> Path:
    return folder / "exports" / found["id"] / exports.ORDER


def test_a_device_that_kept_a_model_of_its_own_training_is_not_said_to_have_the_federation_s(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        ours: Exports = fleet.http._transport.app.state.exports  # type: ignore[attr-defined]
        live = fleet.http._transport.app.state.coordinator.federation("fed")  # type: ignore[attr-defined]
        report = Report(score=0.9, test_samples=4, parameters_dense=6570, parameters_compact=6570, source="local")
        await live.devices.report("a", report)
        for device, source, words in (
            ("a", "global", "the federation's model for 'a' after round 0 of 2, since the device kept one of its own"),
            ("bb", "personal", "the model of 'bb' after round 0 of 2"),
        ):
            asked = {"kind": "onnx", "device": device}
            found = await ended(fleet, (await fleet.operator("POST", PATH, json=asked)).json())
            entries = {p.key: p.value for p in onnx.load(ours.file(found["id"])).metadata_props}
            assert (found["source"], entries["maskfleet.source"]) == (source, source)
            assert found["detail"].startswith(words)

    with_digits(tmp_path, script)


def test_a_device_is_told_that_its_model_cannot_be_made_and_starts_no_worker_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.operator("POST", "/v1/federations/fed/stop")
        own = ("/v1/federations/fed/devices/a/model?kind=onnx", bearer(credential("a")))
        while (answer := await fleet.http.get(own[0], headers=own[1])).status_code == 202:
            await asyncio.sleep(0.1)
        assert "has no global model" in refused(answer, "export-failed")
        monkeypatch.setattr(asyncio, "create_subprocess_exec", None)  # nothing can be started
        assert refused(await fleet.http.get(own[0], headers=own[1]), "export-failed")

    with_digits(tmp_path, script, method={"name": "standalone"})


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.subprocess.Process]:
    """The workers that were started; none begins before it is released."""
    started: list[asyncio.subprocess.Process] = []
    create = asyncio.create_subprocess_exec

    async def noted(*command: str, **given: Any) -> asyncio.subprocess.Process:
        started.append(await create(*HELD, *command, **given))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    return started


async def nth(workers: list[asyncio.subprocess.Process], n: int) -> asyncio.subprocess.Process:
    """The worker that is started as the `n`th, counted from 0."""
    while len(workers) <= n:
        await asyncio.sleep(0.01)
    return workers[n]


def test_two_requests_for_one_file_at_once_get_the_same_one_on_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = exports.write_whole

    def slow(*given: Any, **more: Any) -> None:
        time.sleep(0.2)
        written(*given, **more)

    async def script(fleet: Fleet) -> None:
        monkeypatch.setattr(exports, "write_whole", slow)
        asked = [fleet.operator("POST", PATH, json={"kind": "onnx"}) for _ in range(3)]
        found = await asyncio.gather(*asked)
        await ended(fleet, next(answer.json() for answer in found if answer.status_code == 202))
        assert {answer.status_code for answer in found} == {202}, [answer.text for answer in found]
        assert len({answer.json()["id"] for answer in found}) == 1

    with_digits(tmp_path, script)


def test_two_coordinators_make_a_file_once_and_both_say_how_far_it_is(
    tmp_path: Path, workers: list[asyncio.subprocess.Process]
) -> None:
    async def script(fleet: Fleet) -> None:
        ours: Exports = fleet.http._transport.app.state.exports  # type: ignore[attr-defined]
        live = fleet.http._transport.app.state.coordinator.federation("fed")  # type: ignore[attr-defined]
        other = Exports(ours._store)
        found = await ours.ask(live, "onnx")
        for seen in (await other.ask(live, "onnx"), other.show(found.id), *other.of("fed")):
            assert (seen.id, seen.state) == (found.id, "running")
        assert not other._tasks
        release((await nth(workers, 0)).pid)
        made = await ended(fleet, found.model_dump())
        assert other.show(made["id"]).state == "ready"
        assert (await other.ask(live, "onnx")).state == "ready"

    with_digits(tmp_path, script)


def test_a_device_s_file_says_whose_model_it_holds(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        for device in ("a", None):
            wanted = {"kind": "onnx", "device": device}
            found = await ended(fleet, (await fleet.operator("POST", PATH, json=wanted)).json())
            file = (await fleet.operator("GET", f"{PATH}/{found['id']}/file")).content
            entries = {p.key: p.value for p in onnx.load_from_string(file).metadata_props}
            assert (found["source"], entries["maskfleet.source"], "maskfleet.device" in entries) == (
                "global",
                "global",
                False,
            )
            assert ("perfedavg leaves a part of a device's own model" in found["detail"]) == (device is not None)
        await fleet.operator("POST", "/v1/federations/fed/stop")
        own = await fleet.http.get("/v1/federations/fed/devices/a/model?kind=onnx", headers=bearer(credential("a")))
        assert (own.status_code, own.headers["Maskfleet-Source"]) == (200, "global")

    with_digits(tmp_path, script, method={"name": "perfedavg"})


def test_a_model_that_cannot_be_shown_equal_when_compact_has_all_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unequal(*_: Any, **__: Any) -> None:
        raise CompactionError("it differs")

    bundle, method = Bundle.open(DIGITS), make_method({"name": "fedavg"})
    state = aggregation.pack(method.start(Course(bundle.model(), 7, 2, 2)))
    config = FederationConfig(name="fed", bundle="0" * 64, method={"name": "fedavg"}, rounds=2, cohort=2, min_devices=2)
    monkeypatch.setattr("edge_client.compaction.personal.write_personal", unequal)
    made = model_file.write_model(model_file.Held(config, 2, 0, state), bundle, tmp_path / "m.onnx")
    assert made.detail == (
        f"the global model after round 0 of 2, all {bundle.manifest.d} parameters, not compacted: it differs"
    )
    assert ort.InferenceSession(tmp_path / "m.onnx").run(None, {"x": np.zeros((1, 64), np.float32)})[0].shape == (1, 10)


def test_what_cannot_be_made_is_refused_or_fails_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(exports.NEEDS, "pte", ("no_such_engine",))

    async def script(fleet: Fleet) -> None:
        answer = await fleet.operator("POST", PATH, json={"kind": "pte"})
        assert "no_such_engine is not installed here; on a machine with" in refused(answer, "not-installed")
        answer = await fleet.operator("POST", PATH, json={"kind": "onnx", "device": "nobody"})
        assert "no device 'nobody' is enrolled in fed, or it was removed" in refused(answer, "not-found")
        assert refused(await fleet.operator("GET", f"{PATH}/{'0' * 64}"), "not-found")
        assert refused(await fleet.http.post(PATH, json={"kind": "onnx"}), "unauthorized")
        own = "/v1/federations/fed/devices/{}/model?kind=onnx"
        assert refused(await fleet.http.get(own.format("bb"), headers=bearer(credential("a"))), "forbidden")
        assert refused(await fleet.http.get(own.format("a"), headers=bearer(credential("a"))), "wrong-phase")
        for device, sentence in ((None, "has no global model"), ("a", "has no global model")):
            wanted = {"kind": "onnx", "device": device}
            failed = await ended(fleet, (await fleet.operator("POST", PATH, json=wanted)).json())
            assert failed["state"] == "failed"
            assert sentence in failed["detail"]
            assert refused(await fleet.operator("GET", f"{PATH}/{failed['id']}/file"), "not-found")

    with_digits(tmp_path, script, method={"name": "standalone"})


def test_a_worker_that_is_killed_or_too_slow_leaves_a_sentence_and_the_next_request_starts_it_again(
    tmp_path: Path, workers: list[asyncio.subprocess.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(fleet: Fleet) -> None:
        found = (await fleet.operator("POST", PATH, json={"kind": "onnx"})).json()
        (await nth(workers, 0)).kill()
        failed = await ended(fleet, found)
        assert failed["state"] == "failed"
        assert "the worker ended with code -9" in failed["detail"]
        ours: Exports = fleet.http._transport.app.state.exports  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr(exports, "SECONDS", 0.05)
            late = await ended(fleet, (await fleet.operator("POST", PATH, json={"kind": "onnx"})).json())
        assert late["detail"] == "the worker was stopped after 0.05 s; make the file on another machine"
        assert workers[1].returncode == -9
        with monkeypatch.context() as patch:
            patch.setattr(exports, "WAITING", 0)
            assert "files wait for" in refused(await fleet.operator("POST", PATH, json={"kind": "onnx"}), "too-many")
        asked = (await fleet.operator("POST", PATH, json={"kind": "onnx"})).json()
        release((await nth(workers, 2)).pid)
        made = await ended(fleet, asked)
        assert (made["state"], made["id"]) == ("ready", found["id"])
        while ours._tasks:  # it clears up after itself
            await asyncio.sleep(0.01)
        assert {p.name for p in (tmp_path / "exports" / made["id"]).iterdir()} == {
            "lock",
            "order.json",
            "made.json",
            "model",
            "said",
        }

    with_digits(tmp_path, script)


def test_the_files_of_a_deleted_federation_are_gone_and_a_worker_on_one_of_them_ends(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        ours: Exports = fleet.http._transport.app.state.exports  # type: ignore[attr-defined]
        made = await ended(fleet, (await fleet.operator("POST", PATH, json={"kind": "onnx"})).json())
        assert made["state"] == "ready"
        folder, kept = tmp_path / "exports", tmp_path / "kept"
        shutil.copytree(folder / made["id"], kept)
        await fleet.operator("POST", PATH, json={"kind": "onnx", "device": "a"})
        await fleet.operator("POST", "/v1/federations/fed/stop")
        await ours.tidy()  # of a federation that is there nothing goes
        assert (folder / made["id"] / "model").is_file()
        assert (await fleet.operator("DELETE", "/v1/federations/fed")).status_code == 204
        assert not list(folder.iterdir())
        assert not ours._tasks
        shutil.copytree(kept, folder / made["id"])  # as if killed before
        await ours.tidy()
        assert not list(folder.iterdir())

    with_digits(tmp_path, script)


HOLDING = f"""
import asyncio
create = asyncio.create_subprocess_exec
asyncio.create_subprocess_exec = lambda *command, **given: create(*{HELD}, *command, **given)
"""


def test_a_worker_ends_with_the_coordinator_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *python, serve = coordinator_process.SERVE
    monkeypatch.setattr(coordinator_process, "SERVE", [*python, HOLDING + serve])  # it cannot be done before
    data = tmp_path / "data"
    with coordinator(data) as (process, url), Operator(url, OPERATOR) as operator:
        bundle = operator.upload_bundle(DIGITS)
        operator.create(FederationConfig.model_validate(settings(bundle=bundle)))
        shown = bearer(OPERATOR)
        asked = httpx.post(f"{url}{PATH}", json={"kind": "onnx"}, headers=shown, timeout=LIMIT, trust_env=False)
        assert asked.status_code == 202
        while not (workers := psutil.Process(process.pid).children()):
            time.sleep(0.01)
        while not held(workers[0].pid):
            time.sleep(0.01)
        process.kill()
        process.wait()
        release(workers[0].pid)
        end = time.monotonic() + LIMIT
        while not over(workers[0]):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert not (data / "exports" / asked.json()["id"] / "model").exists()


@every_method
def test_a_model_that_the_server_says_it_knows_is_the_device_s_bit_for_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "hermes", {"threshold": -1.0})  # so that it prunes at once
    there = methods.middle(made(name), digits(), 2)
    course, method, state = there.sim.course, there.sim.method, there.sim.state
    if method.stays(course) is not None:
        return
    everyone = global_model(method, course, state, 2)
    known = {d: method.of_device(course, state, there.sim.records.get(d), everyone) for d in digits().devices}
    actual = there.sim.evaluate(3, Evaluation(models=True))
    for device, model in known.items():
        personal = actual[device].personal
        if model is not None and personal is not None:
            assert model.parameters.tobytes() == personal.parameters.tobytes()
            assert model.buffers.tobytes() == personal.buffers.tobytes()
            assert (model.parameters.tobytes() != everyone.parameters.tobytes()) == (name == "hermes")
    own = {"fedcode", "fedmask", "signed", "perfedavg", "perfedavg-hf", "lattice-pruned"}
    assert (None in known.values()) == (name in own)


def test_a_federation_says_why_it_has_no_global_model_as_long_as_it_has_none(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        fed, said = "/v1/federations/fed", "only the last layers are shared, the rest stays on the devices"
        assert (await fleet.operator("GET", fed)).json()["no_global_model"] == said
        changed = await fleet.operator("PATCH", fed, json={"rounds": 1})
        assert changed.json()["no_global_model"] is None
        changed = await fleet.operator("PATCH", fed, json={"rounds": 3})
        assert changed.json()["no_global_model"] == said

    with_digits(tmp_path, script, method={"name": "lgfedavg", "num_layers": 1, "global_rounds": 1}, start="manual")
