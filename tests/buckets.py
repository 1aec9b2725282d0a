"""A bucket of S3 in this process: it answers the coordinator's requests over HTTP, so that boto3 itself is tested."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest

PAGE = 2  # objects and folders a page: so few that each list has several


class Server(ThreadingHTTPServer):
    """`objects` by "BUCKET/KEY"; `fault` is "refuses", "is silent" or "cuts" for every answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.fault = ""
        self.listings: list[str] = []  # the prefix of each list that was asked for

    def found(self, bucket: str) -> dict[str, bytes]:
        """The objects of a bucket by their keys."""
        return {k.removeprefix(f"{bucket}/"): v for k, v in self.objects.items() if k.startswith(f"{bucket}/")}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def answer(self, status: int, data: bytes = b"", size: int | None = None) -> None:
        """Send an answer; of a HEAD only the `size`."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if size is None else size))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if self.server.fault == "cuts" else data)
        self.close_connection |= self.server.fault == "cuts"

    def fail(self, status: int, code: str) -> None:
        """Send an error in S3's form."""
        self.answer(status, b"" if self.command == "HEAD" else f"<Error><Code>{code}</Code></Error>".encode())

    def handle_one(self) -> None:
        """Answer any method."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        key, asked = unquote(url.path)[1:], {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        objects = self.server.objects
        if self.server.fault == "is silent":
            self.close_connection = True
        elif self.server.fault == "refuses":
            self.fail(403, "AccessDenied")
        elif self.command == "PUT":
            right = self.headers.get("x-amz-checksum-sha256", b64encode(hashlib.sha256(body).digest()).decode())
            if b64encode(hashlib.sha256(body).digest()).decode() != right:
                self.fail(400, "BadDigest")
                return
            if self.headers.get("If-None-Match") == "*" and key in objects:
                self.fail(412, "PreconditionFailed")
                return
            objects[key] = body
            self.answer(200)
        elif self.command == "POST":
            for each in ElementTree.fromstring(body).iter("{http://s3.amazonaws.com/doc/2006-03-01/}Key"):
                objects.pop(f"{key.rstrip('/')}/{each.text}", None)
            self.answer(200, b"<DeleteResult></DeleteResult>")
        elif "list-type" in asked:
            self.server.listings.append(asked["prefix"])
            self.answer(200, self.listed(key.rstrip("/"), asked).encode())
        elif key not in objects:
            self.fail(404, "NoSuchKey")
        elif self.command == "HEAD":
            self.answer(200, size=len(objects[key]))
        else:
            low, _, high = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            part = objects[key][int(low) : int(high) + 1 if high else None]
            self.answer(206 if "Range" in self.headers else 200, part)

    do_GET = do_HEAD = do_PUT = do_POST = handle_one

    def listed(self, bucket: str, asked: dict[str, str]) -> str:
        """A page of keys below a prefix, those with a delimiter after it as folders."""
        prefix, delimiter, entries = asked.get("prefix", ""), asked.get("delimiter", ""), set[tuple[str, bool]]()
        for key in self.server.found(bucket):
            if key.startswith(prefix):
                first, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key[len(prefix) :], "", "")
                entries.add((prefix + first + cut, bool(cut)))
        rest = [e for e in sorted(entries) if e[0] > asked.get("continuation-token", "")]
        text = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            if folder
            else f"<Contents><Key>{escape(name)}</Key></Contents>"
            for name, folder in rest[:PAGE]
        )
        if more := len(rest) > PAGE:
            text += f"<NextContinuationToken>{escape(rest[PAGE - 1][0])}</NextContinuationToken>"
        return f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{text}</ListBucketResult>"


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A bucket that boto3 finds by its environment."""
    pytest.importorskip("boto3")
    with Server() as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
        for name in ("CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(f"AWS_{name}", "/dev/null")  # a user's own settings
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION"):
            monkeypatch.setenv(f"AWS_{name}", "us-east-1")
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        yield server
        server.shutdown()
