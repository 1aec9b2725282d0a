"""A device's run from its enrolment to its personal model, and what it refuses before it trains."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import client_rig
import httpx
import numpy as np
import pytest
import typer
from client_rig import METHODS, URL, Coordinator, conclude, device, numpy_trainer, problem, samples  # noqa: F401
from numpy.typing import NDArray
from numpy_mlp import NumpyMlp

from edge_client.bundle import F32, digest
from edge_client.cli import join
from edge_client.commands.exit_codes import ExitCode, exit_code
from edge_client.data import DataFile, DeviceData, read
from edge_client.device.client import Client
from edge_client.device.local import Chosen, choose_model
from edge_client.errors import (
    BundleError,
    ConfigError,
    DataError,
    MaskfleetError,
    PayloadError,
    ServerError,
    StateError,
)
from edge_client.events import Event
from edge_client.methods.fedavg import FedAvg
from edge_client.protocol.messages import Enrolled, Receipt, Report, Wait
from edge_client.protocol.metrics import split_metrics
from edge_client.protocol.payload import decode
from edge_client.task import Task


def test_a_device_trains_every_round_and_reports_its_personal_model(tmp_path: Path) -> None:
    coordinator, said = Coordinator(), list[Event]()
    result = device(tmp_path, coordinator).run(on_event=said.append)
    assert (result.ended, result.rounds, sorted(coordinator.updates)) == ("finished", 3, [1, 2, 3])
    assert coordinator.report is not None
    assert Report.model_validate_json(coordinator.report) == result.report
    assert (tmp_path / "personal.onnx").read_bytes() == coordinator.state.parameters.tobytes()
    assert [e.round for e in said if e.kind == "sent"] == [1, 2, 3]
    losses = [split_metrics(decode(coordinator.updates[r]))[1].loss for r in (1, 2, 3)]
    assert all(0 < loss == float(f"{loss:.4g}") for loss in losses)
    assert not list(tmp_path.glob("pending-*"))
    # A second run of the same command asks whether there is more to do, and sends the report again.
    before = len(coordinator.requests)
    assert device(tmp_path, coordinator).run().ended == "finished"
    assert len(coordinator.requests) == before + 2


def test_an_update_that_is_acknowledged_with_another_digest_stays_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_rig, "Receipt", lambda **said: Receipt(**{**said, "sha256": "0" * 64}))
    with pytest.raises(PayloadError, match=r"SHA-256 000000000000\.\.\., not the one sent"):
        device(tmp_path, Coordinator()).run()
    assert list(tmp_path.glob("pending-*"))
    assert not list(tmp_path.glob("kept-*"))


def test_the_arrays_of_a_file_do_not_outlive_the_samples_made_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = samples().x, samples().y
    np.savez(tmp_path / "mine.npz", x=np.tile(x.astype(np.float64), (4, 1)), y=np.tile(y, 4))
    given: list[ReferenceType[DataFile]] = []

    def noted(path: Path) -> DataFile:
        file = read(path)
        given.append(ref(file))
        return file

    monkeypatch.setattr("edge_client.device.client.read", noted)
    coordinator, kept = Coordinator(), list[bool]()
    coordinator.fault = lambda r: kept.append(given[0]() is not None) if r.url.path.endswith("/work") else None
    assert device(tmp_path / "state", coordinator, data=tmp_path / "mine.npz").run().ended == "finished"
    assert kept
    assert not any(kept)


def test_work_that_a_receipt_brings_is_not_asked_for(tmp_path: Path) -> None:
    asking, eager = Coordinator(), Coordinator(eager=True)
    assert device(tmp_path / "asking", asking).run().rounds == 3
    assert device(tmp_path / "eager", eager).run().rounds == 3
    assert eager.updates == asking.updates
    assert eager.report == asking.report
    work = ("GET", "/v1/federations/f1/work")
    assert (asking.requests.count(work), eager.requests.count(work)) == (4, 1)
    # A device that leaves after a round waits for nothing with its upload, and asks when it is back.
    leaving, waits = Coordinator(eager=True), list[bool]()
    leaving.fault = lambda r: (
        waits.append("wait" in r.url.params) if r.method == "PUT" and "rounds" in r.url.path else None
    )
    for _ in range(2):
        assert device(tmp_path / "leaving", leaving).run(rounds=1).rounds == 1
    assert device(tmp_path / "leaving", leaving).run(once=True).rounds == 1
    assert (waits, leaving.requests.count(work)) == ([False] * 3, 3)


def test_an_event_a_message_and_the_exit_code_say_that_a_model_was_not_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dense(*given: Any) -> Report:
        return conclude(*given).model_copy(update={"uncompacted": "logits differ by 1"})

    monkeypatch.setattr("edge_client.device.conclude.conclude", dense)
    said = list[Event]()
    result = device(tmp_path, Coordinator(rounds=1)).run(on_event=said.append)
    assert [e.text for e in said if "logits differ by 1" in e.text]
    monkeypatch.setattr(Client, "run", lambda *_: result)
    monkeypatch.setattr("edge_client.cli.end_on_signals", lambda: None)
    with pytest.raises(typer.Exit) as ended:
        join(URL, "good", tmp_path / "mine.npz")
    assert ended.value.exit_code == ExitCode.COMPACTION
    assert "not compacted: logits differ by 1" in capsys.readouterr().err


def test_the_card_of_a_model_has_the_rounds_that_were_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards: list[Any] = []

    def noted(*given: Any) -> Report:
        cards.append(given[-1])
        return conclude(*given)

    monkeypatch.setattr("edge_client.device.conclude.conclude", noted)
    coordinator = Coordinator(rounds=3)
    device(tmp_path, coordinator).run(rounds=1)
    coordinator.rounds = 2  # as an operator changes it
    assert device(tmp_path, coordinator).run().ended == "finished"
    assert cards[0]["rounds"] == 2


def test_a_device_says_that_its_samples_may_not_be_what_the_model_is_made_for(tmp_path: Path) -> None:
    for scale in (1, 200):
        given, said = replace(samples(), x=scale * samples().x), list[Event]()
        coordinator = Coordinator(rounds=1)
        takes = coordinator.manifest.input.model_copy(update={"between": (-0.5, 0.5)})
        coordinator.manifest = coordinator.manifest.model_copy(update={"input": takes})
        coordinator.bundle = digest(coordinator.manifest.to_bytes())
        device(tmp_path / str(scale), coordinator, data=given).run(on_event=said.append)
        warned = [e.text for e in said if "as the model takes them" in e.text]
        assert len(warned) == (scale > 1)
        assert all(text.startswith("warning: the data: ") for text in warned)


def test_a_device_says_when_its_model_is_worse_than_the_bundles_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start, warned in ((-1e5, False), (1.0, True)):
        monkeypatch.setattr(Task, "score_start", lambda _, start=start: start)
        said = list[Event]()
        device(tmp_path / str(warned), Coordinator(rounds=1)).run(on_event=said.append)
        (last,) = [e.text for e in said[-2:] if e.text.startswith("warning")] or [""]
        assert ("below the bundle's own start (1.000)" in last) is warned
        assert ("what most often helps: lr" in last) is warned


@pytest.mark.parametrize(("mask", "warned"), [(None, True), ([True] * 8, True), ([True] * 7 + [False], False)])
def test_a_device_says_when_the_method_should_have_pruned_and_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: list[bool] | None, warned: bool
) -> None:
    def ended(*given: Any) -> Chosen:
        chosen = choose_model(*given)
        own = replace(chosen.personal, mask=None if mask is None else np.array(mask))
        return replace(chosen, personal=own)

    monkeypatch.setattr("edge_client.device.client.choose_model", ended)
    monkeypatch.setattr(FedAvg, "unpruned", lambda _: "nothing was pruned: the gate stayed closed")
    said = list[Event]()
    device(tmp_path, Coordinator(rounds=1)).run(on_event=said.append)
    assert ("warning: nothing was pruned: the gate stayed closed" in [e.text for e in said]) is warned
    said.clear()
    late = Coordinator(rounds=1)
    late.round = 2  # the rounds are over, so this device never had a chance to prune
    device(tmp_path / "late", late).run(on_event=said.append)
    assert said[-1].kind == "done"
    assert not [e.text for e in said if "nothing was pruned" in e.text]


def test_rounds_and_once_stop_early_and_the_next_run_goes_on(tmp_path: Path) -> None:
    whole = Coordinator()
    device(tmp_path / "whole", whole).run()
    parts = Coordinator()
    said = list[Event]()
    assert device(tmp_path / "parts", parts).run(once=True, on_event=said.append).rounds == 1
    assert (said[-1].kind, said[-1].text) == ("done", "1 round done; run the same command again to go on")
    assert device(tmp_path / "parts", parts).run(rounds=2).ended == "paused"
    assert device(tmp_path / "parts", parts).run().ended == "finished"
    assert parts.updates == whole.updates


def test_once_without_work_returns_and_waits_for_nothing(tmp_path: Path) -> None:
    wait = Wait(reason="2 more devices have to join", poll_after=30.0).model_dump_json()
    coordinator = Coordinator()
    coordinator.fault = lambda r: httpx.Response(200, content=wait) if r.url.path.endswith("/work") else None
    said = list[Event]()
    result = device(tmp_path, coordinator).run(once=True, on_event=said.append)
    assert (result.rounds, result.ended) == (0, "paused")
    assert any("2 more devices" in e.text for e in said)


def test_a_wait_says_for_what_and_how_long(tmp_path: Path) -> None:
    waits = [Wait(reason=f"{n} more devices have to join", poll_after=30.0).model_dump_json() for n in (1, 2)]
    coordinator = Coordinator()
    coordinator.fault = lambda r: (
        httpx.Response(200, content=waits.pop()) if r.url.path.endswith("/work") and waits else None
    )
    said = list[Event]()
    device(tmp_path, coordinator).run(on_event=said.append)
    assert [(e.text, e.seconds) for e in said if e.kind == "wait"] == [
        ("no work yet: 2 more devices have to join; asking again for up to 25 s", 25.0),
        ("no work yet: 1 more devices have to join; asking again in 30 s, for up to 25 s", 55.0),
    ]


# --- bad input


def test_a_wrong_token_a_wrong_method_and_wrong_data_have_their_own_errors(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="ask the operator") as refused:
        device(tmp_path / "a", Coordinator(), token="bad").run()
    assert exit_code(refused.value) == ExitCode.REFUSED
    d = samples()
    bad = DeviceData(d.x, d.y + 1, d.x_val, d.y_val, d.x_test, d.y_test)
    with pytest.raises(MaskfleetError, match=r"label 2 .* outside 0\.\.1") as wrong:
        device(tmp_path / "b", Coordinator(), data=bad).run()
    assert exit_code(wrong.value) == ExitCode.DATA


def _arrays(**changed: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
    """A device's file, some of its arrays changed or left out."""
    x, y = np.zeros((4, 3), np.float32), np.arange(4) % 2
    return {k: v for k, v in {"x": x, "y": y, **changed}.items() if v is not None}


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (None, "there is no data file"),
        (_arrays(y=None), r"lacks y;"),
        (_arrays(y=np.zeros(3, np.int64)), r"samples of shape \(4, 3\) but labels of shape \(3,\)"),
        (_arrays(x=np.zeros((1, 3)), y=np.zeros(1, np.int64)), "holds 1 sample;"),
        (_arrays(x_test=np.zeros((1, 3))), "has x_test but no y_test"),
        (_arrays(x_test=np.zeros((1, 3)), y_test=np.zeros(2, np.int64)), r"\(test\): .* give one label a sample"),
        (_arrays(group=np.zeros(5)), r"`group` has shape \(5,\)"),
    ],
)
def test_data_that_fits_no_model_is_refused_before_a_token_is_used_up(
    tmp_path: Path, arrays: dict[str, NDArray[Any]] | None, said: str
) -> None:
    coordinator, path = Coordinator(), tmp_path / "mine.npz"
    if arrays is not None:
        np.savez(path, **arrays)
    with pytest.raises(DataError, match=said):
        device(tmp_path / "state", coordinator, data=path).run()
    assert coordinator.requests == []


def test_a_finished_device_says_when_its_model_is_not_there_any_more(tmp_path: Path) -> None:
    coordinator, said = Coordinator(rounds=1), list[str]()
    assert device(tmp_path, coordinator).run().personal == tmp_path / "personal.onnx"
    (tmp_path / "personal.onnx").rename(tmp_path / "mine.onnx")
    result = device(tmp_path, coordinator).run(on_event=lambda event: said.append(event.text))
    assert (result.ended, result.personal) == ("finished", None)
    model, end = tmp_path / "personal.onnx", tmp_path / "done.json"
    again = f"{model} is not there; to have it made, remove {end} and join again"
    assert said[-1] == f"the federation was finished before; {again}"


def test_a_finished_device_goes_on_where_its_coordinator_was_restored_from_an_earlier_backup(tmp_path: Path) -> None:
    coordinator = Coordinator()
    device(tmp_path, coordinator).run(rounds=2)
    backup = {"round": 3, "state": coordinator.state, "record": coordinator.record, "updates": {**coordinator.updates}}
    assert device(tmp_path, coordinator).run().ended == "finished"
    vars(coordinator).update(backup, report=None)
    assert device(tmp_path, coordinator).run().ended == "finished"
    assert (coordinator.round, coordinator.report is not None) == (4, True)


def test_a_finished_device_reports_again_to_a_coordinator_restored_from_before_the_report(tmp_path: Path) -> None:
    coordinator = Coordinator()
    result = device(tmp_path, coordinator).run()
    coordinator.report = None
    assert device(tmp_path, coordinator).run().report == result.report
    assert coordinator.report is not None
    assert Report.model_validate_json(coordinator.report) == result.report


def test_a_finished_device_makes_its_model_again_where_a_restored_coordinator_ended_otherwise(tmp_path: Path) -> None:
    coordinator = Coordinator()
    first, model = device(tmp_path, coordinator).run(), (tmp_path / "personal.onnx").read_bytes()
    coordinator.state, coordinator.report = coordinator.made.start(coordinator.course), None
    result = device(tmp_path, coordinator).run()
    assert (result.ended, result.rounds) == ("finished", 0)
    assert coordinator.report is not None
    assert Report.model_validate_json(coordinator.report) == result.report != first.report
    assert (tmp_path / "personal.onnx").read_bytes() != model
    coordinator.requests = []
    assert device(tmp_path, coordinator).run().report == result.report
    assert [path.rpartition("/")[2] for _, path in coordinator.requests] == ["work", "report"]


@pytest.mark.parametrize("answer", [problem(422, "invalid", "no such field"), problem(503, "too-busy", "later")])
def test_a_finished_device_says_when_its_report_is_not_taken_again(tmp_path: Path, answer: httpx.Response) -> None:
    coordinator, said = Coordinator(), list[str]()
    device(tmp_path, coordinator).run()
    coordinator.fault = lambda request: answer if request.url.path.endswith("/report") else None
    assert device(tmp_path, coordinator).run(on_event=lambda event: said.append(event.text)).ended == "finished"
    assert [text for text in said if "the report was not sent again: " in text]


@pytest.mark.parametrize(
    "answer",
    [
        problem(401, "unauthorized", "it was deleted"),
        problem(503, "too-busy", "later"),
        problem(503, "too-busy", "later", {"Retry-After": "70"}),
        problem(429, "too-many", "later"),
    ],
)
def test_a_finished_device_needs_no_coordinator(tmp_path: Path, answer: httpx.Response) -> None:
    coordinator = Coordinator()
    device(tmp_path, coordinator).run()
    coordinator.fault, coordinator.requests = lambda _: answer, []
    assert device(tmp_path, coordinator).run().ended == "finished"
    assert len(coordinator.requests) == 1


def test_a_finished_device_does_not_read_its_data_again(tmp_path: Path) -> None:
    coordinator = Coordinator()
    device(tmp_path, coordinator).run()
    assert device(tmp_path, coordinator, data=tmp_path / "gone.npz").run().ended == "finished"


@pytest.mark.parametrize("name", ["a b", "", "-pi", "pi/7", "x" * 65, "pi\n"])
def test_a_bad_device_name_is_refused_before_anything_is_written_or_sent(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a device name; give 1 to 64 letters") as refused:
        device(tmp_path / "state", Coordinator(), device=name)
    assert repr(name) in str(refused.value)
    assert exit_code(refused.value) == ExitCode.CONFIG
    assert not (tmp_path / "state").exists()


def test_a_folder_with_the_name_of_an_earlier_version_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "device.json").write_text(
        json.dumps({"device": "a b", "credential": "0" * 64, "token": "0" * 64, "secret": 1})
    )
    with pytest.raises(StateError, match=r"device = 'a b'.* and join again"):
        device(tmp_path, Coordinator(), device="ab").run()


def test_a_backend_that_is_not_installed_is_refused_before_a_token_is_used_up(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"choose one of executorch, onnxruntime, torch") as refused:
        device(tmp_path, Coordinator(), backend="abacus")
    assert exit_code(refused.value) == ExitCode.CONFIG


def test_a_backend_without_its_package_is_refused_before_a_token_is_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "edge_client.training.torch", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match="training backend 'torch' needs torch, which is not installed"):
        device(tmp_path, Coordinator(), backend="torch")


def test_a_device_whose_backend_cannot_run_the_model_never_asks_for_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> F32:
        raise RuntimeError("Fail: no node")

    asked: list[tuple[str, str]] = []
    with pytest.raises(ConfigError, match=r"'torch' needs model-eval\.pt2, model\.pt2 of bundle 'tiny'") as refused:
        device(tmp_path / "part", first := Coordinator(), backend="torch").run()
    assert exit_code(refused.value) == ExitCode.CONFIG
    asked += first.requests
    for half in ("gradient", "logits"):
        with monkeypatch.context() as m:
            m.setattr(NumpyMlp, half, broken)
            with pytest.raises(BundleError, match=r"cannot run model 'tiny' \(RuntimeError: Fail: no node\)"):
                device(tmp_path / half, second := Coordinator()).run()
            asked += second.requests
    assert ("POST", "/v1/enrol") in asked
    assert not [path for _, path in asked if path.endswith("/work")]


def test_a_setting_of_another_version_ends_the_run_with_what_to_install(tmp_path: Path) -> None:
    coordinator = Coordinator()
    method = {**METHODS["fedavg"], "warmup": 3}
    enrolled = Enrolled(
        federation="f1", device="dev", bundle=coordinator.bundle, rounds=1, cohort=1, seed=7, method=method
    )

    def newer(request: httpx.Request) -> httpx.Response | None:
        if request.url.path == "/v1/enrol":
            coordinator.credential = json.loads(request.content)["credential"]
            return httpx.Response(200, content=enrolled.model_dump_json())
        return None

    coordinator.fault = newer
    with pytest.raises(ConfigError, match=r"'fedavg', setting warmup = 3: .* that its coordinator has: install"):
        device(tmp_path, coordinator).run()


def test_a_damaged_upload_is_sent_again(tmp_path: Path) -> None:
    coordinator, damaged = Coordinator(), [True]

    def flip(request: httpx.Request) -> httpx.Response | None:
        if "/rounds/" in request.url.path and damaged:
            damaged.clear()
            return problem(422, "bad-digest", "the body does not match its Content-Digest")
        return None

    coordinator.fault = flip
    assert device(tmp_path, coordinator).run().rounds == 3
