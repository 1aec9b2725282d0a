"""Watching: a federation's events as server-sent events (WHATWG HTML, 9.2), and `/metrics` for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Annotated, Any

from anyio import move_on_after
from fastapi import APIRouter, Header, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coord_server import metrics
from coord_server.connections import Connection
from coord_server.http.access import CALL, Call, FederationId, OperatorHeader, Served, Viewed, check_reads
from coord_server.http.openapi import COMPONENTS
from coord_server.http.problems import METHODS, documented
from coord_server.live.federation import LiveFederation
from coord_server.problems import Refusal
from edge_client.protocol.changes import AnyChange, Faulted, Snapshot
from edge_client.protocol.messages import Federation

MEDIA_TYPE = "text/event-stream"
HEARTBEAT = 15.0  # seconds without an event until a comment is sent, so that a broken connection is noticed
SLOW = 20.0  # seconds that a reader has to take what was sent; after that its connection is closed
STREAMS = 64  # streams at a time, at most; and at most a quarter of the connections
LONGEST = 40  # characters of the last id seen
RETRY = 3000  # milliseconds until a reader connects again

TEXT = "text/plain; version=0.0.4"

router = APIRouter(prefix="/v1", tags=["operator"])
figures = APIRouter(tags=["operator"])

KINDS = (Snapshot, *AnyChange.__args__)
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events without end: `event` is a `kind`, `data` JSON, `id` the federation's version.",
        "content": {MEDIA_TYPE: {"schema": {"oneOf": [{"$ref": f"{COMPONENTS}{k.__name__}"} for k in KINDS]}}},
    }
}


@router.get(
    "/federations/{federation}/events",
    response_class=Response,
    responses=_STREAM | documented("too-many"),
)
async def watch_federation(
    request: Request,
    served: Viewed,
    federation: FederationId,
    last_event_id: Annotated[str, Header(description="The last `id` seen: go on after it.", max_length=LONGEST)] = "",
) -> Response:
    """What is committed, as it happens, at whichever coordinator.

    A stream that cannot go on from `Last-Event-ID` (none was sent, the coordinator was restarted, too much has happened
    since) begins with a `snapshot`; what happened before is in the rounds' records. A reader that does not keep up gets
    a snapshot too, one that takes nothing for 20 s is cut off.
    """
    live = await served.find(federation)
    shown = request.headers.get("authorization", "").partition(" ")[2]
    return await follow(request, live, last_event_id, lambda: served.roles.of(shown) is not None)


async def follow(request: Request, live: LiveFederation, last_event_id: str, allowed: Callable[[], bool]) -> Response:
    """The stream of a federation for as long as its reader is `allowed`. Raises Refusal, StateError."""
    call: Call = request.scope[CALL]
    version = last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) <= LONGEST
    seen = int(last_event_id) if version else None
    if seen is not None and seen > live.feed.version:
        await live.refresh()  # it comes from another coordinator, which is ahead
    streams: list[Response] = request.app.state.streams
    most = min(STREAMS, max(call.places.most // 4, 1))
    most = most if call.role == "operator" else max(most // 2, 1)  # viewers leave room for the operator
    if len(streams) >= most:
        raise Refusal(
            "too-many", f"{len(streams)} streams of events are open at this coordinator, {most} may be; close one"
        )
    return Stream(events(live, seen, allowed), streams, call.connection)


async def events(live: LiveFederation, seen: int | None, allowed: Callable[[], bool]) -> AsyncIterator[str]:
    """The stream's text, piece by piece, until the reader is no longer allowed to read."""
    feed = live.feed
    place, fault = feed.place(seen), live.summary().fault
    yield f"retry: {RETRY}\n\n"
    while not feed.closed and allowed():
        if place is None or (happened := feed.since(place)) is None:
            place, fault = feed.end, live.summary().fault
            yield _event(Snapshot(federation=live.summary()), feed.version)
            continue
        for i, h in enumerate(happened):
            # All of one version have to be seen before a reader may go on after it.
            last = i + 1 == len(happened) or happened[i + 1].version != h.version
            yield _event(h.change, h.version if last else None)
            if isinstance(h.change, Faulted):
                fault = h.change.fault
        place += len(happened)
        if live.summary().fault != fault:  # of this coordinator, as a full disk
            fault = live.summary().fault
            yield _event(Faulted(fault=fault), None)
        if place == feed.end and not feed.closed:
            await feed.wait(HEARTBEAT)
            if place == feed.end and not feed.closed:
                yield ": nothing new\n\n"


def _event(said: Snapshot | AnyChange, version: int | None) -> str:
    id_ = "" if version is None else f"id: {version}\n"
    return f"event: {said.kind}\n{id_}data: {said.model_dump_json()}\n\n"


@figures.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "Prometheus' text format", "content": {TEXT: {"schema": {"type": "string"}}}}},
)
async def show_metrics(request: Request, served: Served, _: OperatorHeader) -> Response:
    """For a viewer's token or the operator's, or without one when the coordinator was started with --open-metrics."""
    if not request.app.state.open_metrics:
        check_reads(request)

    def standing() -> list[tuple[Federation, int]]:
        present = {live.id: live.devices.present_now() for live in served.federations()}
        return [(f, present.get(f.id, 0)) for f in served.summaries()]

    return Response(metrics.text(standing), media_type=TEXT)


class Counted:
    """ASGI middleware: counts answers by method, route and status."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            status = status or 500  # answered further out
            raise
        finally:
            if scope["type"] == "http":
                route = getattr(scope.get("route"), "path", "other")
                method = scope["method"] if scope["method"] in METHODS else "other"
                metrics.REQUESTS.labels(method, route, str(status)).inc()


class Stream(Response):
    """An answer without end. Nothing is buffered beyond what the socket takes."""

    media_type = MEDIA_TYPE

    def __init__(self, events: AsyncIterator[str], streams: list[Response], connection: Connection | None) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        self._events, self._streams, self._connection = events, streams, connection
        streams.append(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams.remove(self)
            for task in (sending, gone):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for piece in self._events:
            body = {"type": "http.response.body", "body": piece.encode(), "more_body": True}
            with move_on_after(SLOW) as limit:  # asyncio.wait_for can lose the cancellation that ends a stream
                await send(body)
            if limit.cancelled_caught:
                if self._connection is not None:
                    self._connection.transport.abort()
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    """Return once the reader has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
