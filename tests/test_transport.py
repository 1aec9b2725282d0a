"""Requests are repeated as they should be, and downloads are what was announced."""

from __future__ import annotations

import gzip
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from client_rig import PART, URL, Coordinator, Time, device, manifest, numpy_trainer, problem, remote  # noqa: F401

from edge_client.bundle import MANIFEST, Part, digest
from edge_client.commands.exit_codes import RESTARTED, ExitCode, exit_code
from edge_client.errors import BundleError, ConfigError, ServerError, StateError, UnreachableError
from edge_client.events import Event
from edge_client.link.remote_bundle import open_remote
from edge_client.link.retry import BUSY_MOST, longest
from edge_client.link.transport import PIECE, Transport, broken, redirected
from edge_client.protocol.messages import Receipt, Wait


def test_connection_errors_and_5xx_are_repeated_with_growing_random_waits_until_patience_ends() -> None:
    time, calls = Time(), Counter[str]()

    def handler(request: httpx.Request) -> httpx.Response:
        calls["n"] += 1
        if calls["n"] % 2:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(502)

    with pytest.raises(UnreachableError, match="100 s") as caught:
        remote(handler, time).ask("GET", "/x", Receipt, "asking")
    assert exit_code(caught.value) == ExitCode.UNREACHABLE
    assert 100 <= time.now < 105
    assert all(s <= 0.5 * 2**i for i, s in enumerate(time.slept))
    assert len(set(time.slept)) == len(time.slept)


@pytest.mark.parametrize("busy", [False, True], ids=["no answer", "told when to return"])
def test_devices_that_failed_together_do_not_return_together(busy: bool) -> None:
    waits = []
    wait = Wait(reason="r", poll_after=1.0)
    for _ in range(40):
        time, answers = Time(), [503]

        def handler(_: httpx.Request, answers: list[int] = answers) -> httpx.Response:
            if answers:
                return problem(answers.pop(), "busy", "busy", {"Retry-After": "70"} if busy else {})
            return httpx.Response(200, content=wait.model_dump_json())

        remote(handler, time).ask("GET", "/x", Wait, "asking")
        waits += time.slept
    assert len(set(waits)) == 40
    assert max(waits) - min(waits) > 0.25  # all of them within half a second


def test_a_coordinator_that_is_away_for_a_day_is_asked_until_it_is_back() -> None:
    """After 1024 failures in a row the doubled wait would be no float."""
    time, away, wait = Time(), [503] * 1100, Wait(reason="r", poll_after=1.0)

    def handler(_: httpx.Request) -> httpx.Response:
        return problem(away.pop(), "busy", "busy") if away else httpx.Response(200, content=wait.model_dump_json())

    assert remote(handler, time, patience=1e6).ask("GET", "/x", Wait, "asking") == wait
    assert max(time.slept) <= longest(10**9) == 60


def test_retry_after_is_honoured_and_does_not_use_up_patience() -> None:
    time, answers = Time(), [503, 429, 429]
    wait = Wait(reason="r", poll_after=1.0)

    def handler(_: httpx.Request) -> httpx.Response:
        if answers:
            return problem(answers.pop(), "busy", "busy", {"Retry-After": "70"})
        return httpx.Response(200, content=wait.model_dump_json())

    assert remote(handler, time, patience=5.0).ask("GET", "/x", Wait, "asking") == wait
    assert len(time.slept) == 3
    assert all(70 <= s <= 70.5 for s in time.slept)


def test_a_coordinator_that_is_always_busy_uses_up_patience_after_an_hour() -> None:
    time = Time()
    busy = problem(503, "busy", "busy", {"Retry-After": "600"})
    with pytest.raises(UnreachableError, match=r"gave no usable answer for 1000 s .*503"):
        remote(lambda _: busy, time, patience=1000.0).ask("GET", "/x", Wait, "asking")
    assert BUSY_MOST + 1000 <= time.now < BUSY_MOST + 1000 + 600
    assert min(time.slept[:-1]) >= 600  # it stays away as long as asked until its patience ends


@pytest.mark.parametrize(
    ("status", "again", "said"),
    [
        (507, "10", f"asking: {URL} is busy (it answered 507 Insufficient Storage: /data is full); asking again in "),
        (429, None, f"asking: {URL} is busy (it answered 429 Too Many Requests: /data is full); asking again in "),
        (500, None, f"asking: no usable answer from {URL} (it answered 500 Internal Server Error: /data is full); "),
    ],
)
def test_a_wait_says_what_the_coordinator_said_is_in_the_way(status: int, again: str | None, said: str) -> None:
    wait, events = Wait(reason="r", poll_after=1.0), list[Event]()
    answers = [
        httpx.Response(200, content=wait.model_dump_json()),
        problem(status, "any", "/data is full", {} if again is None else {"Retry-After": again}),
    ]
    assert remote(lambda _: answers.pop(), on_event=events.append).ask("GET", "/x", Wait, "asking") == wait
    assert [e.text[: len(said)] for e in events] == [said]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422])
def test_a_refusal_is_final_and_carries_the_problem(status: int) -> None:
    time = Time()
    with pytest.raises(ServerError, match="say what to do") as caught:
        remote(lambda _: problem(status, "some-kind", "say what to do"), time).ask("GET", "/x", Wait, "asking")
    assert (caught.value.status, caught.value.kind, time.slept) == (status, "some-kind", [])


@pytest.mark.parametrize(
    ("asked", "location", "base"),
    [
        ("http://h/v1/health", "https://h/v1/health", "https://h"),
        ("http://h/fleet/v1/federations/v1/work?wait=5", "/f/v1/federations/v1/work?wait=5", "http://h/f"),
        ("http://h/v1/health", "https://login.example/", "https://login.example/"),
        ("http://h/x", "https://h/x", "https://h/x"),
    ],
)
def test_a_redirect_names_the_coordinators_address_without_the_asked_path(asked: str, location: str, base: str) -> None:
    assert redirected(httpx.URL(asked), location)[1] == base


def test_a_login_page_and_a_redirect_are_not_taken_for_a_coordinator() -> None:
    with pytest.raises(UnreachableError, match="not a coordinator's"):
        remote(lambda _: httpx.Response(200, text="<html>log in"), patience=1.0).ask("GET", "/x", Wait, "asking")
    moved = httpx.Response(301, headers={"Location": "https://other.example"})
    with pytest.raises(ServerError, match=r"https://other\.example"):
        remote(lambda _: moved).ask("GET", "/x", Wait, "asking")


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("certificate has expired", "the clock here says 20"),
        ("certificate is not yet valid", "the clock here says 20"),
        ("unable to get local issuer certificate", "set SSL_CERT_FILE"),
    ],
)
def test_a_certificate_out_of_its_time_points_to_the_clock(said: str, advice: str) -> None:
    error = httpx.ConnectError(f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {said} (_ssl.c:1006)")
    assert advice in broken(error)
    assert broken(error).count("; ") == 1


def test_https_to_a_server_without_tls_points_to_the_address() -> None:
    error = httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)")
    assert "is its address http:// and not https://?" in broken(error)


@pytest.mark.parametrize("what", ["report", "payload", "part"])
def test_the_web_page_of_a_network_that_asks_to_log_in_is_waited_out(tmp_path: Path, what: str) -> None:
    page = httpx.Response(200, headers={"Content-Type": "Text/HTML"}, text="<html>log in</html>")
    left, seen, time = [page] * 8, list[str](), Time()
    partial = tmp_path / "part"
    partial.write_bytes(PART[:1000])

    def handler(request: httpx.Request) -> httpx.Response:
        if left:
            return left.pop()
        seen.append(request.headers.get("Range", ""))
        if what == "report":
            return httpx.Response(204)
        return httpx.Response(206 if seen[-1] else 200, content=PART[1000:] if seen[-1] else PART)

    asked = remote(handler, time)
    if what == "report":
        asked.tell("PUT", "/x", Wait(reason="r", poll_after=1.0), "reporting")
    elif what == "payload":
        assert asked.fetch("/x", len(PART), digest(PART), "fetching") == PART
    else:
        asked.fetch_file("/x", Part(sha256=digest(PART), size=len(PART)), partial, "fetching")
        assert partial.read_bytes() == PART
        assert seen == ["bytes=1000-"]  # what was there before is not fetched again
    assert len(time.slept) == 8


def test_a_report_is_not_taken_for_delivered_by_an_answer_with_a_body() -> None:
    answers = [httpx.Response(204), httpx.Response(200, text="welcome")]
    remote(lambda _: answers.pop()).tell("PUT", "/x", Wait(reason="r", poll_after=1.0), "reporting")
    assert not answers


def test_an_answer_without_a_body_is_no_web_page_whatever_type_a_proxy_adds_to_it() -> None:
    answers = [httpx.Response(204, headers={"Content-Type": "text/html"})]
    remote(lambda _: answers.pop()).tell("PUT", "/x", Wait(reason="r", poll_after=1.0), "reporting")
    assert not answers


def test_a_redirect_to_what_is_no_address_is_no_answer() -> None:
    moved = httpx.Response(301, headers={"Location": "mailto:x"})
    with pytest.raises(UnreachableError, match="gave no usable answer"):
        remote(lambda _: moved, patience=1.0).ask("GET", "/x", Wait, "asking")


def test_the_words_beside_a_status_are_not_quoted_they_may_repeat_the_request() -> None:
    echo = httpx.Response(501, extensions={"reason_phrase": b'no method {"credential":"5ec2e7"}POST'})
    with pytest.raises(UnreachableError, match=r"it answered 501 Not Implemented\)"):
        remote(lambda _: echo, patience=1.0).ask("GET", "/x", Wait, "asking")


@pytest.mark.parametrize("status", [302, 401, 403, 404, 407])
def test_the_page_of_a_proxy_is_not_the_coordinator_s_word_and_is_asked_again(status: int) -> None:
    wait = Wait(reason="r", poll_after=1.0)
    answers = [httpx.Response(200, content=wait.model_dump_json()), httpx.Response(status, text="<html>")]
    assert remote(lambda _: answers.pop()).ask("GET", "/x", Wait, "asking") == wait
    with pytest.raises(UnreachableError, match="is it a maskfleet coordinator"):
        remote(lambda _: httpx.Response(status, text="<html>")).ask("GET", "/x", Wait, "asking")


def test_an_upload_goes_out_in_pieces_of_which_no_write_copies_the_rest() -> None:
    content, seen = bytes(range(256)) * 3000, list[int]()

    class Wire(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            assert isinstance(request.stream, httpx.SyncByteStream)
            pieces = list(request.stream)
            seen.extend(map(len, pieces))
            assert b"".join(pieces) == content
            assert request.headers["Content-Length"] == str(len(content))
            assert "Transfer-Encoding" not in request.headers
            return httpx.Response(204)

    with Transport(URL, Wire()).send("PUT", "/v1/x", {}, content):
        pass
    assert max(seen) <= PIECE < len(content)


@pytest.mark.parametrize("url", ["ftp://x", "fleet.example.org", "", "http://"])
def test_an_address_that_is_none_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(ConfigError, match="not the address"):
        Transport(url)


def test_a_download_that_is_damaged_once_is_fetched_again_and_damaged_for_good_is_an_error() -> None:
    good, bad = b"x" * 1000, b"x" * 999 + b"y"
    answers = [bad, good]
    time = Time()
    one = remote(lambda _: httpx.Response(200, content=answers.pop(0)), time)
    assert one.fetch("/p", len(good), digest(good), "fetching") == good
    assert len(time.slept) == 1
    with pytest.raises(UnreachableError, match="do not match their SHA-256 after 5 downloads") as caught:
        remote(lambda _: httpx.Response(200, content=bad), time).fetch("/p", len(good), digest(good), "fetching")
    assert exit_code(caught.value) in RESTARTED
    assert len(time.slept) == 1 + 4
    assert all(s >= 1 for s in time.slept)


def test_a_download_longer_than_announced_is_not_read_to_its_end() -> None:
    given = Counter[str]()

    def endless() -> Iterator[bytes]:
        while True:
            given["chunks"] += 1
            yield bytes(1000)

    coordinator = remote(lambda _: httpx.Response(200, content=endless()))
    with pytest.raises(UnreachableError):
        coordinator.fetch("/p", 2500, digest(b""), "fetching")
    assert given["chunks"] == 15  # three each time
    long = {"Content-Length": "2501"}
    coordinator = remote(lambda _: httpx.Response(200, headers=long, content=endless()))
    with pytest.raises(UnreachableError):
        coordinator.fetch("/p", 2500, digest(b""), "fetching")
    assert given["chunks"] == 15  # not one more


def test_a_bundle_part_resumes_where_the_link_broke(tmp_path: Path) -> None:
    ranges: list[str | None] = []

    def broken(content: bytes) -> Iterator[bytes]:
        yield content[:3000]
        raise httpx.ReadError("link lost")

    def handler(request: httpx.Request) -> httpx.Response:
        asked = request.headers.get("Range")
        ranges.append(asked)
        start = int(asked[6:-1]) if asked else 0
        rest = PART[start:]
        return httpx.Response(206 if asked else 200, content=rest if len(rest) <= 4240 else broken(rest))

    part = Part(sha256=digest(PART), size=len(PART))
    remote(handler).fetch_file("/p", part, tmp_path / "train.onnx", "fetching")
    assert (tmp_path / "train.onnx").read_bytes() == PART
    assert ranges == [None, "bytes=3000-", "bytes=6000-"]
    assert [p.name for p in tmp_path.iterdir()] == ["train.onnx"]


def test_a_part_with_a_path_in_its_name_is_refused(tmp_path: Path) -> None:
    evil = manifest().model_copy(update={"parts": {"../evil": Part(sha256=digest(b""), size=0)}}).to_bytes()
    with pytest.raises(BundleError, match=r"parts\.\.\./evil"):
        open_remote(remote(lambda _: httpx.Response(200, content=evil)), digest(evil), tmp_path)


def test_only_the_parts_that_the_backend_asks_for_are_fetched_and_only_once(tmp_path: Path) -> None:
    coordinator = Coordinator()
    device(tmp_path, coordinator).run(rounds=1)
    device(tmp_path, coordinator).run(rounds=1)
    fetched = [path for _, path in coordinator.requests if "/bundles/" in path]
    assert len(fetched) == 2  # the manifest and train.onnx
    cached = tmp_path / "bundles" / coordinator.bundle / "train.onnx"
    cached.write_bytes(PART[:-1] + b"?")  # decayed on disk
    device(tmp_path, coordinator).run(rounds=1)
    assert cached.read_bytes() == PART
    assert (cached.parent / MANIFEST).read_bytes() == coordinator.manifest.to_bytes()


def test_a_full_disk_while_a_model_downloads_is_a_sentence(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    part = Part(sha256=digest(PART), size=len(PART))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(StateError, match="free some space"):
            remote(lambda _: httpx.Response(200, content=PART)).fetch_file("/p", part, tmp_path / "p", "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (httpx.Response(200, content=b" " * (1 << 20)), "longer than 262144 bytes"),
        (httpx.Response(500, content=b"x" * (1 << 20)), "longer than 262144 bytes"),
        (httpx.Response(404, content=b"[" * 200_000), "no explanation"),
        (httpx.Response(200, headers={"Content-Encoding": "gzip"}, content=gzip.compress(b"{}")), "compressed"),
    ],
)
def test_an_answer_that_is_no_message_is_not_read_to_its_end(answer: httpx.Response, word: str) -> None:
    with pytest.raises((UnreachableError, ServerError), match=word):
        remote(lambda _: answer).ask("GET", "/x", Receipt, "asking")
