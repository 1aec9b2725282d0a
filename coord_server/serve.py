"""`maskfleet serve`: one coordinator process on one data folder."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
import uvicorn

from coord_server import auth, connections
from coord_server.api import create_app
from coord_server.coordinator import MAX_PARAMETERS, Coordinator
from coord_server.store import open_store
from edge_client.errors import ConfigError

KEEP_ALIVE = 75.0  # seconds an idle connection is kept: longer than a device sleeps between polls
SWITCH = 0.0005  # seconds a worker thread may keep the event loop waiting; Python's own 0.005 is a whole request
GRACE = 10  # seconds that requests under way are given at shutdown


class _Server(uvicorn.Server):
    """uvicorn that says when it is ready, lets long polls go at shutdown, and then returns instead of dying."""

    def __init__(self, config: uvicorn.Config, coordinator: Coordinator, ready: str) -> None:
        super().__init__(config)
        self._coordinator, self._ready = coordinator, ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            print(self._ready, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # the second signal does not wait for requests
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._coordinator.answer_polls)


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 lets the system choose.")] = 8750,
    data: Annotated[Path, typer.Option(help="Folder of the database, the blobs and the operator's token.")] = Path(
        "coordinator"
    ),
    database: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL of the metadata; default SQLite in the data folder.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate chain (PEM); or let a proxy do it.")] = None,
    key: Annotated[Path | None, typer.Option(help="TLS private key (PEM).")] = None,
    max_parameters: Annotated[
        int, typer.Option(min=1, help="Most parameters and statistics a model may have.")
    ] = MAX_PARAMETERS,
    max_connections: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Most connections at once; more are answered 503.")
    ] = connections.MOST,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run a coordinator until SIGTERM or Ctrl-C; what it acknowledged is on disk at every moment."""
    if log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"--log-level {log_level!r} is not known; choose debug, info, warning or error")
    if (certificate is None) != (key is None):
        raise ConfigError("TLS needs both --certificate and --key")
    for path in (certificate, key):
        if path is not None and not path.is_file():
            raise ConfigError(f"there is no file {path}")
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    most = connections.room(max_connections)
    store = open_store(data, database)
    try:
        token, where = auth.operator_token(data)
        listening = connections.Listening(host, port, most)
        coordinator = Coordinator(store, token, max_parameters=max_parameters)
        asyncio.run(_run(coordinator, listening, most, where, certificate, key))
    finally:
        store.close()


async def _run(
    coordinator: Coordinator,
    listening: socket.socket,
    most: int,
    where: Path | None,
    certificate: Path | None,
    key: Path | None,
) -> None:
    await coordinator.start()
    gc.freeze()  # what is loaded now stays: no need to look for garbage in it again and again
    sys.setswitchinterval(SWITCH)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"{'http' if certificate is None else 'https'}://{shown}:{port}"
    told = f"in {where}" if where else f"from {auth.OPERATOR_ENV}"
    if certificate is not None:
        connections.hurry_handshakes(asyncio.get_running_loop())
    config = uvicorn.Config(
        create_app(coordinator),
        http=connections.Connection,
        limit_concurrency=most,
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        timeout_keep_alive=int(KEEP_ALIVE),
        timeout_graceful_shutdown=GRACE,
        ssl_certfile=None if certificate is None else str(certificate),
        ssl_keyfile=None if key is None else str(key),
    )
    await _Server(config, coordinator, f"maskfleet coordinator ready at {url} (operator token {told})").serve(
        [listening]
    )
