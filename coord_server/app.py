"""The ASGI application: REST under `/v1`, OpenAPI at `/openapi.json`, for people at `/docs`, the dashboard at `/`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from coord_server import dashboard
from coord_server.connections import Places
from coord_server.coordinator import Coordinator
from coord_server.exports import Exports
from coord_server.http import (
    access,
    artifacts,
    bodies,
    bundles,
    device,
    head,
    openapi,
    operator,
    problems,
    tokens,
    tracing,
    watch,
)
from edge_client.errors import StateError

DESCRIPTION = """Federated learning of personal subnetworks. Rounds count from 1, times are seconds, sizes bytes,
digests SHA-256 in lower-case hex. HEAD is answered as GET, without the body. Every error is an RFC 9457
`application/problem+json` whose `detail` has the fault and what to do."""
BODY_PATIENCE = 60.0  # seconds without a byte until a body is given up


def create_app(
    coordinator: Coordinator,
    places: Places | None = None,
    body_patience: float = BODY_PATIENCE,
    allow_origins: Sequence[str] = (),
    open_metrics: bool = False,
) -> FastAPI:
    """The ASGI application that serves `coordinator`; its lifespan starts and closes it.

    Pages of `allow_origins` may call it from a browser. With `open_metrics`, `/metrics` needs no token.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await coordinator.start()
        with suppress(StateError):  # the next deletion tries again
            await app.state.exports.tidy()  # a kill may have come between a deletion and this
        try:
            yield
        finally:
            await app.state.exports.close()
            await coordinator.close()

    app = FastAPI(title="maskfleet coordinator", version=version("maskfleet"), description=DESCRIPTION,
                  lifespan=lifespan, redirect_slashes=False, docs_url=None, redoc_url=None,
                  generate_unique_id_function=lambda route: route.name)  # fmt: skip
    app.state.coordinator, app.state.places, app.state.streams = coordinator, places or Places(), []
    app.state.exports = Exports(coordinator.store)
    problems.install(app)
    app.add_middleware(bodies.BoundedBody, patience=body_patience)
    app.add_middleware(access.Admission, coordinator=coordinator, places=app.state.places)
    for router in (
        device.router, artifacts.own, bundles.router, tokens.router, watch.router, artifacts.router, operator.router,
        watch.figures, operator.health,
    ):  # fmt: skip
        app.include_router(router)
    app.state.open_metrics = open_metrics
    app.add_middleware(head.Head)
    app.add_middleware(watch.Counted)
    if allow_origins:  # outermost: it answers preflights, and every answer has its headers
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(allow_origins),
            allow_methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=[
                "Authorization",
                "Content-Type",
                "Content-Digest",
                "If-Match",
                "If-None-Match",
                "If-Range",
                "Last-Event-ID",
                "Maskfleet-Cost",
                "Maskfleet-Lease",
                "Range",
            ],
            expose_headers=["ETag", "Link", "Location", "Maskfleet-Round", "Maskfleet-Source", "Retry-After"],
        )
    openapi.install(app)
    tracing.install(app)
    dashboard.install(app)
    return app
