"""A device that cannot do a round reports why and asks for work again; only what cannot be mended ends its run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from client_rig import PART, Coordinator, device, numpy_trainer, problem, samples, trainer  # noqa: F401
from numpy.typing import NDArray
from numpy_mlp import NumpyMlp

from edge_client.bundle import F32, Bundle
from edge_client.commands.exit_codes import RESTARTED, ExitCode, exit_code
from edge_client.data import DeviceData
from edge_client.device.local import failure_of, run_round
from edge_client.errors import (
    DataError,
    DivergedError,
    LostError,
    MaskfleetError,
    PayloadError,
    ServerError,
    StateError,
    UnreachableError,
)
from edge_client.events import Event
from edge_client.protocol.messages import REASON_MOST, FailureKind
from edge_client.task import Assignment, Task
from edge_client.training import Gradient


def once(error: Exception) -> Callable[..., Any]:
    """A round that fails with `error` the first time and is trained the second."""
    left = [error]

    def trained(*given: Any) -> Any:
        if left:
            raise left.pop()
        return run_round(*given)

    return trained


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LostError("the reference mask is gone"), "lost"),
        (DivergedError("the loss overflowed in step 1", at_start=True), "downlink"),
        (DivergedError("the loss overflowed in step 9", at_start=False), "diverged"),
        (MemoryError(), "out-of-memory"),
        (RuntimeError("Failed to allocate memory for requested buffer of size 268435456"), "out-of-memory"),
        (RuntimeError("Non-zero status code returned while running Gemm"), "backend"),
        (DataError("no validation samples"), "data"),
    ],
)
def test_a_round_that_fails_is_reported_with_its_reason_and_the_next_one_is_trained(
    error: Exception, kind: FailureKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_client.device.client.run_round", once(error))
    coordinator, said = Coordinator(), list[Event]()
    result = device(tmp_path, coordinator).run(on_event=said.append)
    assert (result.ended, result.rounds, sorted(coordinator.updates)) == ("finished", 3, [1, 2, 3])
    ((round_, lease, failure),) = coordinator.failures
    assert (round_, lease, failure.kind) == (1, "lease1", kind)
    assert str(error) in failure.reason
    assert [(e.round, kind in e.text) for e in said if e.kind == "failed"] == [(1, True)]


def test_a_model_without_a_finite_loss_is_not_blamed_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of a round that starts from a broken model, and a later step of one that does not."""
    real, broken = NumpyMlp.gradient, {1: [0], 2: [3]}  # steps without a finite loss, by round
    coordinator, steps = Coordinator(), dict[int, int]()

    def gradient(self: NumpyMlp, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[np.int64]) -> Gradient:
        g = real(self, parameters, buffers, x, y)
        if ("GET", "/v1/federations/f1/work") not in coordinator.requests:
            return g  # the step that tries the model out
        step = steps[coordinator.round] = steps.get(coordinator.round, -1) + 1
        return g if step not in broken.get(coordinator.round, ()) else Gradient(float("nan"), g.parameters, g.buffers)

    monkeypatch.setattr(NumpyMlp, "gradient", gradient)
    assert device(tmp_path, coordinator).run().ended == "finished"
    assert [(r, f.kind) for r, _, f in coordinator.failures] == [(1, "downlink"), (2, "diverged")]


def test_failures_in_a_row_are_spaced_further_and_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()

    def noted(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 12:
            raise KeyboardInterrupt

    monkeypatch.setattr("edge_client.link.retry.time.sleep", noted)
    monkeypatch.setattr("edge_client.device.client.run_round", lambda *_: 1 / 0)
    coordinator = Coordinator()
    with pytest.raises(KeyboardInterrupt):
        device(tmp_path, coordinator).run()
    assert len(coordinator.failures) == 12
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60]
    assert "ZeroDivisionError: division by zero" in coordinator.failures[0][2].reason


@pytest.mark.parametrize("status", [404, 409, 410])
def test_a_failure_of_a_round_that_is_over_changes_nothing(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_client.device.client.run_round", once(MemoryError()))
    coordinator = Coordinator()
    coordinator.fault = lambda r: (
        problem(status, "wrong-round", "round 1 is over") if "failures" in r.url.path else None
    )
    assert device(tmp_path, coordinator).run().ended == "finished"


def test_a_refused_failure_report_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_client.device.client.run_round", once(MemoryError()))
    coordinator = Coordinator()
    coordinator.fault = lambda r: (
        problem(403, "device-removed", "dev was removed") if "failures" in r.url.path else None
    )
    with pytest.raises(ServerError, match="was removed"):
        device(tmp_path, coordinator).run()


UNFIT = [
    problem(400, "bad-request", "Invalid HTTP request received"),
    problem(413, "too-large", "an update of this method has at most 51174 bytes, Content-Length says 1506424"),
    problem(415, "unsupported", "an update is a safetensors file"),
    problem(422, "bad-payload", "array 'parameters' holds NaN"),
]


def refusing(rounds: set[int], answer: httpx.Response) -> Callable[[httpx.Request], httpx.Response | None]:
    """The coordinator's `answer` to every update of these rounds."""

    def fault(request: httpx.Request) -> httpx.Response | None:
        parts = request.url.path.split("/")
        return answer if "updates" in parts and int(parts[5]) in rounds else None

    return fault


@pytest.mark.parametrize("answer", UNFIT, ids=lambda answer: str(answer.status_code))
def test_an_update_that_the_coordinator_never_takes_is_reported_and_not_sent_again(
    answer: httpx.Response, tmp_path: Path
) -> None:
    coordinator, said = Coordinator(), list[Event]()

    def stopped_after_the_report(request: httpx.Request) -> httpx.Response | None:
        over = coordinator.failures and request.url.path.endswith("/work")
        stopped = {"status": "stopped", "reason": "enough"}
        return httpx.Response(200, json=stopped) if over else refusing({1}, answer)(request)

    coordinator.fault = stopped_after_the_report
    result = device(tmp_path, coordinator).run(on_event=said.append)
    assert (result.ended, result.rounds) == ("stopped", 0)
    ((round_, lease, failure),) = coordinator.failures
    assert (round_, lease, failure.kind) == (1, "lease1", "refused")
    assert failure.reason == answer.json()["detail"]
    assert [e.text for e in said if e.kind == "failed"] == [
        f"round 1 failed on this device (refused): {failure.reason}"
    ]
    assert sum("/updates/" in path for _, path in coordinator.requests) == 1
    assert not list(tmp_path.glob("pending-*"))


def test_refused_updates_in_a_row_are_spaced_like_other_failures_until_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, left = list[float](), [True, True, True, False, True, False, False]
    monkeypatch.setattr("edge_client.link.retry.time.sleep", waits.append)
    coordinator = Coordinator()
    coordinator.fault = lambda r: UNFIT[1] if "/updates/" in r.url.path and left.pop(0) else None
    assert device(tmp_path, coordinator).run().ended == "finished"
    assert waits == [1, 2, 4, 1]
    assert [r for r, _, _ in coordinator.failures] == [1, 1, 1, 2]
    assert sorted(coordinator.updates) == [1, 2, 3]


def test_a_device_whose_every_update_is_refused_ends_after_its_fifth_report(tmp_path: Path) -> None:
    coordinator = Coordinator()
    coordinator.fault = lambda r: UNFIT[3] if "/updates/" in r.url.path else None
    with pytest.raises(ServerError, match="holds NaN"):
        device(tmp_path, coordinator).run()
    assert len(coordinator.failures) == 5
    coordinator.fault = lambda _: None
    assert device(tmp_path, coordinator).run().ended == "finished"


def test_an_update_of_an_earlier_run_that_is_refused_is_reported_with_its_lease(tmp_path: Path) -> None:
    coordinator = Coordinator()
    coordinator.fault = lambda r: httpx.Response(502) if "/updates/" in r.url.path else None
    with pytest.raises(UnreachableError):
        device(tmp_path, coordinator, patience=0.0).run()
    left = [UNFIT[3]]
    coordinator.fault = lambda r: left.pop() if "/updates/" in r.url.path and left else None
    assert device(tmp_path, coordinator).run().ended == "finished"
    assert [(r, lease, f.kind) for r, lease, f in coordinator.failures] == [(1, "lease1", "refused")]


def test_an_update_of_a_removed_device_ends_the_run(tmp_path: Path) -> None:
    coordinator = Coordinator()
    coordinator.fault = refusing({1}, problem(403, "device-removed", "dev was removed"))
    with pytest.raises(ServerError, match="was removed"):
        device(tmp_path, coordinator).run()
    assert coordinator.failures == []


def test_a_downlink_that_cannot_be_read_is_reported_and_the_next_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_client.device.client.run_round", once(PayloadError("array 'theta' is unknown")))
    coordinator = Coordinator()
    assert device(tmp_path, coordinator).run().ended == "finished"
    assert [(r, f.kind) for r, _, f in coordinator.failures] == [(1, "downlink")]


def test_three_downlinks_in_a_row_that_cannot_be_read_end_the_run_until_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, left = PayloadError("array 'theta' is unknown"), list[Exception | None]()
    left += [bad, bad, None, bad, bad, MemoryError(), bad, bad, bad]

    def trained(*given: Any) -> Any:
        error = left.pop(0)
        if error is not None:
            raise error
        return run_round(*given)

    monkeypatch.setattr("edge_client.device.client.run_round", trained)
    coordinator = Coordinator()
    with pytest.raises(UnreachableError, match="3 payloads in a row could not be read: array 'theta'") as ended:
        device(tmp_path, coordinator).run()
    assert left == []
    assert exit_code(ended.value) in RESTARTED
    assert [f.kind for _, _, f in coordinator.failures] == ["downlink"] * 4 + ["out-of-memory"] + ["downlink"] * 3


def unfit(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    d = samples()
    return {"data": DeviceData(d.x, d.y + 1, d.x_val, d.y_val, d.x_test, d.y_test)}


def without_backend(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(NumpyMlp, "logits", lambda *_: 1 / 0)
    return {}


def without_part(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"backend": "torch"}


@pytest.mark.parametrize(
    ("spoil", "kind", "code"),
    [
        (unfit, "data", ExitCode.DATA),
        (without_backend, "backend", ExitCode.MALFORMED),
        (without_part, "backend", ExitCode.CONFIG),
    ],
)
def test_a_device_that_cannot_take_up_its_work_again_reports_it_and_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[pytest.MonkeyPatch], dict[str, Any]],
    kind: FailureKind,
    code: ExitCode,
) -> None:
    coordinator = Coordinator()
    device(tmp_path, coordinator).run(rounds=1)
    with pytest.raises(MaskfleetError) as ended:
        device(tmp_path, coordinator, **spoil(monkeypatch)).run()
    assert exit_code(ended.value) == code
    assert [(r, lease, f.kind) for r, lease, f in coordinator.failures] == [(2, "lease2", kind)]
    assert coordinator.failures[0][2].reason == str(ended.value)


def test_a_data_file_that_is_gone_is_reported_after_the_update_that_was_trained_with_it(tmp_path: Path) -> None:
    coordinator = Coordinator()
    coordinator.fault = lambda r: httpx.Response(502) if "/updates/" in r.url.path else None
    with pytest.raises(UnreachableError):
        device(tmp_path, coordinator, patience=0.0).run()
    coordinator.fault, said = lambda _: None, list[Event]()
    with pytest.raises(DataError, match="there is no data file"):
        device(tmp_path, coordinator, data=tmp_path / "gone.npz").run(on_event=said.append)
    assert Event("info", "round 1: resuming with the update trained before", 1) in said
    assert list(coordinator.updates) == [1]
    assert [(r, f.kind) for r, _, f in coordinator.failures] == [(2, "data")]


def test_a_device_that_cannot_go_on_and_is_not_asked_for_reports_nothing(tmp_path: Path) -> None:
    coordinator = Coordinator()
    device(tmp_path, coordinator).run(rounds=1)
    asked = len(coordinator.requests)
    for answer in (
        httpx.Response(200, json={"status": "wait", "reason": "r", "poll_after": 1.0}),
        problem(403, "a", "b"),
    ):
        coordinator.fault = lambda r, answer=answer: answer if r.url.path.endswith("/work") else None  # type: ignore[misc]
        with pytest.raises(DataError):
            device(tmp_path, coordinator, data=tmp_path / "gone.npz").run()
    assert coordinator.failures == []
    assert [path for _, path in coordinator.requests[asked:]] == ["/v1/federations/f1/work"] * 2


def test_data_of_another_shape_are_refused_before_the_token_is_used(tmp_path: Path) -> None:
    coordinator, sent = Coordinator(), list[dict[str, Any]]()

    def refuses(request: httpx.Request) -> httpx.Response | None:
        sent.append(json.loads(request.content))
        return problem(422, "wrong-samples", "the samples of dev have shape (3,)")

    coordinator.fault = refuses
    with pytest.raises(DataError, match=r"the samples of dev have shape \(3,\)"):
        device(tmp_path, coordinator).run()
    assert [message["sample"] for message in sent] == [[3]]


def test_an_overflow_in_a_second_phase_is_the_device_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each phase counts its batches from 0; only the round's first gradient shows the received model alone."""
    coordinator = Coordinator()
    bundle = Bundle(coordinator.manifest, tmp_path)
    (tmp_path / "train.onnx").write_bytes(PART)
    task = Task(Assignment(coordinator.course, 1, "dev"), trainer(bundle), samples(), 0)
    model = coordinator.course.model
    first, second = (next(task.batches(1, 8, phase)) for phase in ("prune", "train"))
    task.gradient(model.parameters, model.buffers, first)
    with pytest.raises(DivergedError) as later:
        task.gradient(model.parameters * np.float32("nan"), model.buffers, second)
    assert (second.index, later.value.at_start) == (0, False)
    with pytest.raises(DivergedError) as start:
        replace(task).gradient(model.parameters * np.float32("nan"), model.buffers, first)
    assert start.value.at_start


def test_a_fault_of_the_device_s_disk_is_not_reported_as_the_round_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_client.device.client.run_round", once(StateError("disk full")))
    coordinator = Coordinator()
    with pytest.raises(StateError):
        device(tmp_path, coordinator).run()
    assert coordinator.failures == []


def test_damaged_kept_values_are_reported_as_lost_and_the_device_goes_on_like_a_new_one(tmp_path: Path) -> None:
    coordinator = Coordinator("standalone", rounds=4)
    device(tmp_path, coordinator).run(rounds=2)
    for path in tmp_path.glob("kept-*"):
        path.write_bytes(path.read_bytes()[:-400])
    assert device(tmp_path, coordinator).run().ended == "finished"
    assert [(r, f.kind) for r, _, f in coordinator.failures] == [(3, "lost")]
    assert sorted(coordinator.updates) == [1, 2, 3, 4]


def test_values_lost_at_the_end_are_reported_and_the_next_answer_is_the_whole_downlink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator()
    device(tmp_path, coordinator).run(rounds=3)
    real, lost = coordinator.made.receive, [True]

    def receive(self: Any, a: Any, kept: Any, downlink: Any) -> Any:
        if lost and a.round == 4:
            lost.clear()
            raise LostError("the reference mask of round 3 is gone")
        return real(a, kept, downlink)

    monkeypatch.setattr(type(coordinator.made), "receive", receive)
    assert device(tmp_path, coordinator).run().ended == "finished"
    assert [(r, f.kind) for r, _, f in coordinator.failures] == [(4, "lost")]
    assert (tmp_path / "personal.onnx").read_bytes() == coordinator.state.parameters.tobytes()


def test_an_end_that_is_lost_every_time_is_reported_once_and_then_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator()
    real = coordinator.made.receive

    def receive(self: Any, a: Any, kept: Any, downlink: Any) -> Any:
        if a.round == 4:
            raise LostError("the reference mask of round 3 is gone")
        return real(a, kept, downlink)

    monkeypatch.setattr(type(coordinator.made), "receive", receive)
    with pytest.raises(LostError):
        device(tmp_path, coordinator).run()
    assert [r for r, _, _ in coordinator.failures] == [4]


def test_a_reason_is_cut_to_what_a_message_holds() -> None:
    failure = failure_of(RuntimeError("x" * 5000 + "\ud800"))
    assert failure is not None
    assert len(failure.reason) == REASON_MOST
    assert failure_of(RuntimeError("\ud800")) is not None


def test_loss_and_scores_that_cannot_be_reported_are_a_diverged_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = Gradient(1e9, np.zeros(8, np.float32), np.zeros(0, np.float32))
    monkeypatch.setattr(NumpyMlp, "gradient", lambda *_: huge)
    coordinator = Coordinator()
    coordinator.fault = lambda r: httpx.Response(200, json={"status": "stopped", "reason": "enough"}) if (
        coordinator.failures and r.url.path.endswith("/work")
    ) else None  # fmt: skip
    assert device(tmp_path, coordinator).run().ended == "stopped"
    ((_, _, failure),) = coordinator.failures
    assert failure.kind == "diverged"
    assert "loss = 1e+09; lower `lr`" in failure.reason
    assert not coordinator.updates
