"""A coordinator that means harm cannot fill a device's disk or memory, keep it busy, or keep it from ending."""

from __future__ import annotations

import gzip
import shutil
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import onnx
import pytest
from client_rig import PART, Coordinator, Time, device, manifest, numpy_trainer, problem, remote  # noqa: F401
from onnx import GraphProto, NodeProto, TensorProto, helper

from edge_client.bundle import Bundle, Part, digest
from edge_client.commands.exit_codes import RESTARTED, ExitCode, exit_code
from edge_client.errors import BundleError, ConfigError, StorageFullError, UnreachableError
from edge_client.files import RESERVE
from edge_client.graph.check import GRAPH_MOST, check_graph
from edge_client.link.remote import Remote
from edge_client.link.remote_bundle import most_bytes, open_remote
from edge_client.link.retry import Retry
from edge_client.link.transport import Limit, Transport
from edge_client.protocol.messages import Wait

BUNDLES = Path(__file__).parents[1] / "benchmarks" / "edge_bench" / "bundles"
REAL_CHECK = check_graph  # the rig replaces the module's


# --- sizes


def endless() -> Iterator[bytes]:
    """A body without end."""
    while True:
        yield bytes(1 << 16)


def test_a_model_with_too_many_parameters_is_refused_before_memory_is_taken_for_it(tmp_path: Path) -> None:
    coordinator = Coordinator()
    with pytest.raises(BundleError, match=r"has 8 parameters and 0 statistics, this device accepts 7; .*--max-param"):
        device(tmp_path, coordinator, max_parameters=7).run()
    assert not [path for _, path in coordinator.requests if "parts" in path]
    assert device(tmp_path, coordinator, max_parameters=8).run(rounds=1).rounds == 1


def test_a_part_out_of_proportion_to_the_model_is_not_asked_for(tmp_path: Path) -> None:
    m = manifest()
    large = m.model_copy(update={"parts": {"train.onnx": Part(sha256=digest(b""), size=most_bytes(m) + 1)}}).to_bytes()
    asked = list[str]()

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, content=large)

    bundle = open_remote(remote(handler), digest(large), tmp_path)
    with pytest.raises(BundleError, match=r"train\.onnx of model 'tiny' has .* bytes, for this model at most"):
        bundle.part("train.onnx")
    assert asked == [f"/v1/bundles/{digest(large)}"]


def test_a_downlink_out_of_proportion_to_the_model_is_reported_and_not_fetched(tmp_path: Path) -> None:
    coordinator = Coordinator()
    work = {**coordinator.work(), "downlink_size": 2**40}
    coordinator.fault = lambda r: httpx.Response(200, json=work) if r.url.path.endswith("/work") else None
    with pytest.raises(UnreachableError, match="announces a payload of 1099511627776 bytes"):
        device(tmp_path, coordinator).run()
    assert not [path for _, path in coordinator.requests if "payloads" in path]
    assert [f.kind for _, _, f in coordinator.failures] == ["downlink"] * 3


def test_a_part_that_would_fill_the_disk_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    free = [RESERVE + len(PART) - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, free[0]))
    asked = list[str]()

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, content=PART)

    part = Part(sha256=digest(PART), size=len(PART))
    with pytest.raises(StorageFullError, match=r"its disk has only \d+; free some space") as full:
        remote(handler).fetch_file("/p", part, tmp_path / "p.partial", "fetching")
    assert (asked, exit_code(full.value) in RESTARTED) == ([], True)
    free[0] += 1
    remote(handler).fetch_file("/p", part, tmp_path / "p.partial", "fetching")
    assert (tmp_path / "p.partial").read_bytes() == PART


def test_a_part_without_end_is_cut_off_just_after_its_size(tmp_path: Path) -> None:
    largest = [0]

    def measured() -> Iterator[bytes]:
        for chunk in endless():
            largest[0] = max([largest[0], *(p.stat().st_size for p in tmp_path.iterdir())])
            yield chunk

    part = Part(sha256=digest(PART), size=len(PART))
    coordinator = remote(lambda _: httpx.Response(200, content=measured()))
    with pytest.raises(UnreachableError, match="do not match their SHA-256"):
        coordinator.fetch_file("/p", part, tmp_path / "p", "fetching")
    assert largest[0] <= len(PART) + (1 << 16)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_client.link.remote_bundle.MAX_MANIFEST", 1 << 20)
    with pytest.raises(UnreachableError, match="do not match their SHA-256"):
        open_remote(remote(lambda _: httpx.Response(200, content=endless())), "0" * 64, tmp_path)


@contextmanager
def raw(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that reads one request a connection and then does `answer`."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            answer(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def real(url: str, patience: float = 0.0) -> Remote:
    """A client of a real connection, without patience."""
    return Remote(Transport(url), Retry(url, patience, lambda _: None))


@pytest.mark.parametrize("encoding", ["gzip", "deflate, gzip", "GZIP", "br"])
def test_a_small_compressed_answer_does_not_become_a_large_one(tmp_path: Path, encoding: str) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    assert len(bomb) < 100_000
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(bomb)}\r\n\r\n".encode()
    part = Part(sha256=digest(bytes(64 << 20)), size=64 << 20)
    tracemalloc.start()
    with raw(lambda c: c.sendall(head + bomb)) as url:
        for fetch in (
            lambda: real(url).ask("GET", "/x", Wait, "asking"),
            lambda: real(url).fetch("/x", part.size, part.sha256, "fetching"),
            lambda: real(url).fetch_file("/x", part, tmp_path / "p", "fetching"),
        ):
            with pytest.raises(UnreachableError, match="is compressed, which was not asked for"):
                fetch()
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert list(tmp_path.iterdir()) == []


def test_bytes_beyond_the_announced_size_are_never_written(tmp_path: Path) -> None:
    part = Part(sha256=digest(PART), size=len(PART))
    one_chunk = httpx.ByteStream(PART + bytes(1 << 20))
    remote(lambda _: httpx.Response(200, stream=one_chunk)).fetch_file("/p", part, tmp_path / "p", "fetching")
    assert (tmp_path / "p").read_bytes() == PART


# --- waits


def hints(connection: socket.socket) -> None:
    """Informational answers for ever: each is a byte that came in time."""
    while True:
        connection.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 10)


def drip(connection: socket.socket) -> None:
    """The body of an answer, byte by byte."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n")
    while True:
        connection.sendall(b" ")
        threading.Event().wait(0.01)


@pytest.mark.parametrize("answer", [hints, drip])
def test_an_answer_that_never_ends_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[[socket.socket], None]
) -> None:
    monkeypatch.setattr("edge_client.link.transport.Limit", lambda _, streams: Limit(0.6, streams))
    part = Part(sha256=digest(PART), size=len(PART))
    with raw(answer) as url:
        for fetch in (
            lambda: real(url).ask("GET", "/x", Wait, "asking"),
            lambda: real(url).fetch("/x", 200_000, part.sha256, "fetching"),
            lambda: real(url).fetch_file("/x", part.model_copy(update={"size": 200_000}), tmp_path / "p", "fetching"),
        ):
            with pytest.raises(UnreachableError, match="it was not done after 1 s"):
                fetch()


def test_a_request_has_a_minute_its_wait_and_a_second_for_each_thousand_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = list[float]()

    def noted(seconds: float, streams: list[Any]) -> Limit:
        limits.append(seconds)
        return Limit(seconds, streams)

    monkeypatch.setattr("edge_client.link.transport.Limit", noted)
    wait, part = Wait(reason="r", poll_after=1.0), Part(sha256=digest(PART), size=len(PART))
    message = remote(lambda _: httpx.Response(200, content=wait.model_dump_json()))
    message.ask("GET", "/x", Wait, "asking", wait=25.0)
    message.put("/x", bytes(3000), {}, Wait, "sending")
    (tmp_path / "p").write_bytes(PART[:240])
    remote(lambda _: httpx.Response(200, content=PART)).fetch("/x", 10_240, part.sha256, "fetching")
    remote(lambda _: httpx.Response(206, content=PART[240:])).fetch_file("/x", part, tmp_path / "p", "fetching")
    assert limits == pytest.approx([85.0, 63.0, 70.24, 70.0])


@pytest.mark.parametrize(
    ("asked", "slept"), [("0", 0.5), ("-5", 0.5), ("1e9", 3600.0), ("Fri, 01 Jan 2100 00:00:00 GMT", 3600.0)]
)
def test_retry_after_is_neither_a_busy_loop_nor_a_day(asked: str, slept: float) -> None:
    clock, answers = Time(), [problem(503, "busy", "busy", {"Retry-After": asked})]
    wait = Wait(reason="r", poll_after=1.0)
    ok = httpx.Response(200, content=wait.model_dump_json())
    remote(lambda _: answers.pop() if answers else ok, clock).ask("GET", "/x", Wait, "asking")
    assert slept <= clock.slept[0] <= slept + 0.5


def test_a_date_to_return_at_counts_from_the_answers_own_date_not_from_a_clock_that_begins_in_1970() -> None:
    dates = {"Date": "Thu, 26 Nov 2099 08:00:00 GMT", "Retry-After": "Thu, 26 Nov 2099 08:00:20 GMT"}
    clock, answers = Time(), [problem(503, "busy", "busy", dates)]
    ok = httpx.Response(200, content=Wait(reason="r", poll_after=1.0).model_dump_json())
    remote(lambda _: answers.pop() if answers else ok, clock).ask("GET", "/x", Wait, "asking")
    assert 20 <= clock.slept[0] <= 20.5


def test_answers_that_bring_no_work_at_once_are_not_a_busy_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = list[float]()
    monkeypatch.setattr("edge_client.link.retry.time.sleep", slept.append)
    waits = [Wait(reason="r", poll_after=after).model_dump_json() for after in (0.0, 0.0, 0.1, 3600.0)]
    coordinator = Coordinator()
    coordinator.fault = lambda r: (
        httpx.Response(200, content=waits.pop(0)) if r.url.path.endswith("/work") and waits else None
    )
    assert device(tmp_path, coordinator).run(rounds=1).rounds == 1
    assert slept == [0.0, 0.5, 0.5, 3600.0]  # only the first answer, which is never held, is followed at once


# --- graphs


def graph(*nodes: NodeProto, initializers: tuple[TensorProto, ...] = ()) -> GraphProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    return helper.make_graph(list(nodes), "g", [x], [y], list(initializers))


def check(tmp_path: Path, made: GraphProto, functions: tuple[onnx.FunctionProto, ...] = ()) -> None:
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], functions=list(functions))
    (tmp_path / "train.onnx").write_bytes(model.SerializeToString())
    REAL_CHECK(tmp_path / "train.onnx", "train.onnx", (3,))


BODY = helper.make_graph(
    [helper.make_node("Identity", ["s"], ["r"])],
    "body",
    [helper.make_tensor_value_info("s", TensorProto.FLOAT, None)],
    [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)],
)
OUTSIDE = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
NESTED = helper.make_graph(
    [helper.make_node("Scan", ["s"], ["r"], body=BODY, num_scan_inputs=1)],
    "nested",
    list(BODY.input),
    list(BODY.output),
)


def test_the_graphs_of_committed_bundles_and_a_scan_are_accepted(tmp_path: Path) -> None:
    paths = list(BUNDLES.rglob("*.onnx"))
    assert paths
    for path in paths:
        REAL_CHECK(path, path.name, Bundle.open(path.parent).manifest.input.shape)
    steps_first = helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0])
    check(tmp_path, graph(steps_first, helper.make_node("Scan", ["t"], ["y"], body=BODY, num_scan_inputs=1)))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (graph(helper.make_node("Loop", ["m", "c", "x"], ["y"], body=BODY)), "is a Loop"),
        (graph(helper.make_node("If", ["c"], ["y"], then_branch=BODY, else_branch=BODY)), "is a If"),
        (graph(helper.make_node("SequenceMap", ["x"], ["y"], body=BODY)), "is a SequenceMap"),
        (graph(helper.make_node("Scan", ["x"], ["y"], body=NESTED, num_scan_inputs=1)), "inside a Scan"),
        (graph(helper.make_node("RandomNormal", [], ["y"], shape=[2])), "is a RandomNormal"),
        (graph(helper.make_node("Evil", ["x"], ["y"], domain="com.microsoft")), "of domain 'com.microsoft'"),
        (graph(helper.make_node("Identity", ["w"], ["y"]), initializers=(OUTSIDE,)), "'w' lies in another file"),
        (graph(helper.make_node("Constant", [], ["y"], value=OUTSIDE)), "is a Constant"),
    ],
)
def test_a_graph_that_could_loop_or_reach_out_is_refused(tmp_path: Path, made: GraphProto, why: str) -> None:
    with pytest.raises(BundleError, match=f"train.onnx is refused: .*{why}"):
        check(tmp_path, made)


def test_a_graph_with_functions_a_large_one_and_rubbish_are_refused(tmp_path: Path) -> None:
    opset = [helper.make_opsetid("", 20)]
    function = helper.make_function("own", "F", ["a"], ["b"], [helper.make_node("Identity", ["a"], ["b"])], opset)
    plain = graph(helper.make_node("Identity", ["x"], ["y"]))
    check(tmp_path, plain)
    with pytest.raises(BundleError, match="defines the function 'F'"):
        check(tmp_path, plain, (function,))
    (tmp_path / "rubbish").write_bytes(b"\xff" * 100)
    with pytest.raises(BundleError, match="is not an ONNX graph"):
        REAL_CHECK(tmp_path / "rubbish", "eval.onnx", (3,))
    (tmp_path / "large").write_bytes(bytes(GRAPH_MOST + 1))
    with pytest.raises(BundleError, match=f"more than {GRAPH_MOST} bytes"):
        REAL_CHECK(tmp_path / "large", "eval.onnx", (3,))


def constant(name: str, *values: int) -> TensorProto:
    return helper.make_tensor(name, TensorProto.INT64, [len(values)], values)


def doubled(times: int) -> list[NodeProto]:
    return [helper.make_node("Concat", [f"c{i}", f"c{i}"], [f"c{i + 1}"], axis=0) for i in range(times)]


STEPS = helper.make_node("Expand", ["x", "c0"], ["t"])
SCAN = helper.make_node("Scan", ["t"], ["y"], body=BODY, num_scan_inputs=1)
SQUARED = [helper.make_node("Shape", ["x"], ["s"], end=1), helper.make_node("Concat", ["s"] * 4, ["q"], axis=0)]
HUGE = TensorProto(name="c0", data_type=TensorProto.FLOAT, dims=[2**40])
SPARSE = helper.make_sparse_tensor(helper.make_tensor("c0", TensorProto.FLOAT, [1], [1.0]), constant("i", 0), [2**40])


@pytest.mark.parametrize(
    ("nodes", "stored", "why"),
    [
        (
            [helper.make_node("Expand", ["x", "c0"], ["y"])],
            constant("c0", 2**20, 2**25, 1),
            r"Expand\) has an output",
        ),
        (
            [*SQUARED, helper.make_node("Expand", ["c0", "q"], ["y"])],
            constant("c0", 1),
            "output of .512, 512, 512",
        ),
        ([helper.make_node("Expand", ["c0", "x"], ["y"])], constant("c0", 1), "output of unknown"),
        (doubled(31), constant("c0", 1), "takes too much memory|has an output of"),
        ([STEPS, SCAN], constant("c0", 20, 512, 3), r"steps over .*20, 512, 3.*, at most 19"),
        ([SCAN], helper.make_tensor("t", TensorProto.FLOAT, [20], [0.0] * 20), r"steps over .*20.*, at most 19"),
        ([helper.make_node("Identity", ["x"], ["y"])] * 20_001, constant("c0", 1), "more than 20000 nodes"),
        ([helper.make_node("Identity", ["c0"], ["y"])], HUGE, "'c0' claims the shape"),
        ([helper.make_node("Identity", ["c0"], ["y"])], SPARSE, "a sparse tensor"),
    ],
)
def test_a_small_graph_cannot_ask_for_much_memory_or_many_steps(
    tmp_path: Path, nodes: list[NodeProto], stored: TensorProto | onnx.SparseTensorProto, why: str
) -> None:
    made = graph(*nodes)
    (made.initializer if isinstance(stored, TensorProto) else made.sparse_initializer).append(stored)
    for value in made.output:  # what a graph declares is not believed
        value.type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, [1]))
    with pytest.raises(BundleError, match=why):
        check(tmp_path, made)


def test_a_refused_graph_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is checked before it has its name, so no later run finds it either."""
    monkeypatch.setattr("edge_client.link.remote_bundle.check_graph", REAL_CHECK)
    coordinator = Coordinator()
    for asked in (0, 1):  # the second time it has joined: a round may wait for it
        with pytest.raises(BundleError, match=r"train\.onnx is refused: it is not an ONNX graph"):
            device(tmp_path, coordinator).run()
        assert len([path for _, path in coordinator.requests if path.endswith("/work")]) == asked
    assert not (tmp_path / "bundles" / coordinator.bundle / "train.onnx").exists()
    assert [f.kind for _, _, f in coordinator.failures] == ["backend"]


# --- ending


DEAF = """
while True:
    try:
        ready()
        hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)
    except KeyboardInterrupt:
        pass
"""
BUSY = {
    "a computation that sees no signal": DEAF,
    "a wait": "ready()\ntime.sleep(600)",
    "a connection": "server = socket.create_server(('127.0.0.1', 0))\nready()\nserver.accept()",
    "a loop": "ready()\nwhile True: pass",
}


@pytest.mark.parametrize("busy", BUSY.values(), ids=BUSY)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_client_whatever_it_is_doing(busy: str, number: signal.Signals, code: ExitCode) -> None:
    program = (
        "import hashlib, socket, time\n"
        "from edge_client.commands.stopping import end_on_signals\n"
        "def ready(): print('ready', flush=True)\n"
        "end_on_signals()\n"
        f"exec({busy!r})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        _, error = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == code
    assert b"nothing is lost" in error


@pytest.mark.parametrize("secret", [-1, 2**64, True, "7"])
def test_a_secret_that_is_not_64_bits_is_refused(tmp_path: Path, secret: int) -> None:
    with pytest.raises(ConfigError, match="is not a secret"):
        device(tmp_path, Coordinator(), secret=secret)
