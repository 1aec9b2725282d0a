"""Every option of `maskfleet join` reaches its part of the client and means there what the help says.

The coordinator here enrols, gives fixed answers and takes the report; whole runs are in test_client.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime as ort
import pytest
from numpy_mlp import NumpyMlp, clusters, mlp

from edge_client import cli
from edge_client.bundle import Bundle, Part, digest
from edge_client.device import client as client_module
from edge_client.device.client import HOLD, Client, Result
from edge_client.link.remote_bundle import MAX_PARAMETERS
from edge_client.protocol.messages import Enrolled, Finish, Report, Stopped, Wait
from edge_client.protocol.payload import Payload, encode
from edge_client.training.onnxruntime import OnnxRuntimeTrainer

URL, TOKEN = "http://127.0.0.1:1", "the-token"
PARTS = {name: Part(sha256=digest(b""), size=0) for name in ("train.onnx", "eval.onnx", "model.pt2", "model-eval.pt2")}
M = mlp(3, 2).model_copy(update={"parts": PARTS})
MANIFEST = M.to_bytes()
DOWNLINK = encode(Payload())
OPTIONS: dict[str, tuple[str, Any]] = {
    "device": ("pi-07", "pi-07"),
    "state": ("state", Path("state")),
    "backend": ("torch", "torch"),
    "threads": ("3", 3),
    "poll": ("7.5", 7.5),
    "patience": ("11", 11.0),
    "out": ("mine.onnx", Path("mine.onnx")),
    "personalise": ("local", "local"),
    "max-parameters": ("1000", 1000),
    "secret": ("7", 7),
    "meter": ("none", "none"),
    "align": ("none", "none"),
}
DEFAULTS = {"device": None, "state": None, "backend": None, "threads": 1, "poll": HOLD, "patience": 3600.0,
            "out": None, "personalise": None, "max_parameters": MAX_PARAMETERS, "secret": None, "meter": "auto",
            "align": "rule"}  # fmt: skip


# --- from the command line to the client


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What `maskfleet join ARGUMENTS` gives to the client and to its run."""
    seen: dict[str, Any] = {}

    class Recorder:
        def __init__(self, url: str, token: str, data: Path, **options: Any) -> None:
            seen.update(url=url, token=token, data=data, options=options)

        def run(self, rounds: int | None, once: bool, say: Any) -> Result:
            seen.update(rounds=rounds, once=once)
            return Result("pi-07", 0, "paused")

    monkeypatch.setattr(client_module, "Client", Recorder)
    # For this process they would last beyond the test.
    monkeypatch.setattr(cli, "end_on_signals", lambda: None)
    monkeypatch.setattr("edge_client.logs.set_up", lambda *_: None)

    def join(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["maskfleet", "join", URL, "--data", "mine.npz", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        return seen

    return join


def test_without_options_the_client_gets_the_defaults_of_the_manual(joined: Callable[..., dict[str, Any]]) -> None:
    seen = joined("--token", TOKEN)
    assert (seen["url"], seen["token"], seen["data"]) == (URL, TOKEN, Path("mine.npz"))
    assert seen["options"] == DEFAULTS
    assert (seen["rounds"], seen["once"]) == (None, False)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_changes_what_it_names_and_nothing_else(option: str, joined: Callable[..., dict[str, Any]]) -> None:
    given, value = OPTIONS[option]
    assert joined("--token", TOKEN, f"--{option}", given)["options"] == {**DEFAULTS, option.replace("-", "_"): value}


def test_rounds_and_once_are_for_the_run_and_the_token_may_come_from_the_environment(
    joined: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASKFLEET_TOKEN", "from-outside")
    seen = joined("--rounds", "4", "--once")
    assert (seen["rounds"], seen["once"], seen["token"]) == (4, True, "from-outside")
    assert joined("--token", " pasted\n")["token"] == "pasted"


# --- from the client to what does the work


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(backend, threads) of every trainer that a client has opened; each trains with numpy."""
    seen: list[tuple[str, int]] = []

    def open_trainer(backend: str, bundle: Bundle, threads: int) -> NumpyMlp:
        seen.append((backend, threads))
        return NumpyMlp(bundle.manifest)

    monkeypatch.setattr("edge_client.device.session.open_trainer", open_trainer)
    monkeypatch.setattr("edge_client.link.retry.time.sleep", lambda _: None)
    return seen


def federation(
    *works: Wait | Finish | Stopped, wish: str | None = None, holds: list[float] | None = None
) -> httpx.MockTransport:
    """A coordinator that answers with `works` and then repeats the last; `holds` collects each request's `wait`."""
    left = list(works)

    def handle(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/enrol":
            enrolled = Enrolled(federation="fed", device="pi-07", bundle=digest(MANIFEST),
                                method={"name": "standalone"}, rounds=1, cohort=1, seed=0, backend=wish)  # fmt: skip
            return httpx.Response(200, content=enrolled.model_dump_json())
        if path.endswith("/work"):
            if holds is not None:
                holds.append(float(request.url.params.get("wait", 0)))
            return httpx.Response(200, content=(left.pop(0) if len(left) > 1 else left[0]).model_dump_json())
        if path.endswith("/report"):
            return httpx.Response(204)
        return httpx.Response(200, content=MANIFEST if "bundles" in path else DOWNLINK)

    return httpx.MockTransport(handle)


STOPPED = Stopped(reason="enough")
FINISH = Finish(round=2, downlink=digest(DOWNLINK), downlink_size=len(DOWNLINK))


def test_the_threads_asked_for_are_the_trainer_s(tmp_path: Path, opened: list[tuple[str, int]]) -> None:
    Client(URL, TOKEN, clusters(M, 1), state=tmp_path, threads=3, transport=federation(STOPPED)).run()
    assert opened == [("onnxruntime", 3)]


@pytest.mark.parametrize(
    ("own", "wish", "taken"),
    [(None, None, "onnxruntime"), (None, "torch", "torch"), ("onnxruntime", "torch", "onnxruntime")],
)
def test_the_backend_is_the_device_s_else_the_federation_s_else_onnx_runtime(
    tmp_path: Path, opened: list[tuple[str, int]], own: str | None, wish: str | None, taken: str
) -> None:
    Client(URL, TOKEN, clusters(M, 1), state=tmp_path, backend=own, transport=federation(STOPPED, wish=wish)).run()
    assert opened == [(taken, 1)]


def test_the_first_request_for_work_is_not_held_and_later_ones_as_long_as_poll_says(
    tmp_path: Path, opened: list[tuple[str, int]]
) -> None:
    wait, holds = Wait(reason="2 more devices have to join", poll_after=1.0), list[float]()
    transport = federation(wait, wait, STOPPED, holds=holds)
    Client(URL, TOKEN, clusters(M, 1), state=tmp_path, poll=7.5, transport=transport).run()
    assert holds == [0, 7.5, 7.5]


def test_the_personal_model_goes_where_it_is_asked_to_and_is_timed_with_the_threads_asked_for(
    tmp_path: Path, opened: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Path, int]] = []

    def conclude(bundle: Bundle, task: Any, personal: Any, path: Path, threads: int, *_: Any) -> Report:
        seen.append((path, threads))
        return Report(score=1.0, test_samples=1, parameters_dense=8, parameters_compact=8)

    monkeypatch.setattr("edge_client.device.conclude.conclude", conclude)
    asked = tmp_path / "elsewhere" / "mine.onnx"
    for folder, options, path in (
        ("given", {"out": asked, "threads": 2}, asked),
        ("folder", {"out": tmp_path / "models", "threads": 2}, tmp_path / "models" / "personal.onnx"),
        ("default", {"threads": 2}, tmp_path / "default" / "personal.onnx"),
    ):
        made = Client(URL, TOKEN, clusters(M, 1), state=tmp_path / folder, transport=federation(FINISH), **options)
        result = made.run()
        assert (result.ended, result.personal, seen.pop()) == ("finished", path, (path, 2))


def test_onnx_runtime_opens_its_sessions_with_the_threads_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(Path(__file__).parent.parent / "benchmarks" / "edge_bench" / "bundles" / "digits")
    model, x = bundle.model(), np.zeros((2, *bundle.manifest.input.shape), np.float32)
    seen: list[int] = []
    session = ort.InferenceSession

    def recorded(graph: Any, options: Any, **more: Any) -> Any:
        seen.append(options.intra_op_num_threads)
        return session(graph, options, **more)

    monkeypatch.setattr("edge_client.training.onnxruntime.ort.InferenceSession", recorded)
    trainer = OnnxRuntimeTrainer(bundle, 2)
    trainer.gradient(model.parameters, model.buffers, x, np.zeros(2, np.int64))
    trainer.logits(model.parameters, model.buffers, x)
    assert seen == [2, 2]
