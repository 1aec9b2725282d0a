"""`maskfleet serve`: one coordinator process. Several may share one data folder and database."""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import signal
import socket
import ssl
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import typer
import uvicorn

from coord_server import auth
from coord_server.app import create_app
from coord_server.bundles import MAX_PARAMETERS
from coord_server.connections import MOST, PATIENCE, SPARE, Connection, Places
from coord_server.coordinator import Coordinator
from coord_server.store import open_store
from edge_client.errors import ConfigError, StateError
from edge_client.logs import set_up

try:
    import resource
except ImportError:  # not a POSIX system: its limit of open files is unknown
    resource = None  # type: ignore[assignment]

KEEP_ALIVE = 75  # seconds an idle connection is kept: longer than a device sleeps between polls
HEAD_LIMIT = 16 * 1024  # bytes of a request's head
UNACKNOWLEDGED = 120  # seconds until a connection is closed whose peer acknowledges nothing
SWITCH = 0.0005  # seconds a worker thread may delay the event loop; Python's own 0.005 is a whole request
GRACE = 10  # seconds that requests under way are given at shutdown
ORIGIN = re.compile(r"\*|https?://[a-z0-9.-]+(:[0-9]+)?|https?://\[[0-9a-f:.]+\](:[0-9]+)?")  # as browsers send it
OWN_FILES = 128  # descriptors kept for the database, the blobs and the like

log = logging.getLogger("maskfleet")


class _Server(uvicorn.Server):
    """uvicorn that prints when it is ready, answers long polls at shutdown, and then returns normally."""

    def __init__(self, config: uvicorn.Config, coordinator: Coordinator, ready: str) -> None:
        super().__init__(config)
        self._coordinator, self._ready = coordinator, ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            print(self._ready, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves out the end of the application
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # the second signal does not wait for requests
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut if self.force_exit else self._coordinator.answer_polls)

    def _cut(self) -> None:
        """Cut the connections: from Python 3.12 on, a server is closed only when none is open."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def not_cancelled(record: logging.LogRecord) -> bool:
    """Whether to log it. A second signal cancels the requests under way, and uvicorn logs each as a fault."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def cut_short(record: logging.LogRecord) -> bool:
    """Log in a line that a blob could not be read to its end: uvicorn logs what ends an answer under way as a fault."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and isinstance(error.__cause__, StateError):
        record.msg, record.args, record.exc_info = "a download was cut short: %s", (error.__cause__,), None
    return True


def room(most: int) -> int:
    """How many connections there can be, at most `most`, after raising this process's limit of open files for them.

    Each may have a file open beside its socket. Raises ConfigError.
    """
    if resource is None:
        return most
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * (most + SPARE) + OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):  # a system may allow less than it reports: then the limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    found = most if soft == resource.RLIM_INFINITY else min(most, (soft - OWN_FILES) // 2 - SPARE)
    if found < 1:
        raise ConfigError(f"`ulimit -n` is {soft}, too few files to serve any connection; raise it to {needed}")
    if found < most:
        log.warning("%d connections at once, not %d: `ulimit -n` is %d; raise it to %d", found, most, soft, needed)
    return found


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError."""
    # asyncio sets TCP_NODELAY only on sockets that name IPPROTO_TCP. Without it an answer's last segment waits 40 ms.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted sockets inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED * 1000)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or --port"
        ) from None
    return bound


def configured(
    coordinator: Coordinator, places: Places, application: Mapping[str, Any] | None = None, **more: Any
) -> uvicorn.Config:
    """uvicorn's settings. They set no limit on connections, because `places` decides which ones are closed.

    `application` has further arguments of `create_app`.
    """
    return uvicorn.Config(
        create_app(coordinator, places, **(application or {})),
        http=partial(Connection, places),  # type: ignore[arg-type]
        backlog=SPARE,  # asyncio accepts as many at a time: not more than there are descriptors left
        h11_max_incomplete_event_size=HEAD_LIMIT,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=GRACE,
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        **more,
    )


def _origin(given: str) -> str:
    """An origin as browsers send it: without the slash that an address ends with. Raises ConfigError."""
    origin = given.removesuffix("/")
    usual = {"http": "80", "https": "443"}.get(origin.partition(":")[0], "")
    if not ORIGIN.fullmatch(origin) or origin.rpartition(":")[2] == usual:
        raise ConfigError(
            f"--allow-origin {given!r} is no origin that a browser sends; give one like https://fleet.example.org: "
            "lower case, no path, no usual port"
        )
    return origin


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 lets the system choose.")] = 8750,
    data: Annotated[Path, typer.Option(help="Folder of the database, the blobs and the operator's token.")] = Path(
        "coordinator"
    ),
    database: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL of the metadata; default SQLite in the data folder.")
    ] = None,
    blobs: Annotated[
        str | None, typer.Option(help="s3://BUCKET/PREFIX for the blobs; default the data folder.")
    ] = None,
    init: Annotated[
        bool,
        typer.Option("--init", help="Start anew in a data folder that is empty or has lost its database or blobs."),
    ] = False,
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate chain (PEM); or let a proxy do it.")] = None,
    key: Annotated[Path | None, typer.Option(help="TLS private key (PEM).")] = None,
    max_parameters: Annotated[
        int, typer.Option(min=1, help="Most parameters and statistics a model may have.")
    ] = MAX_PARAMETERS,
    max_connections: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Most connections at once; idle ones make room for new ones.")
    ] = MOST,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of web pages that may call it, as https://fleet.example.org; repeat for more."),
    ] = None,
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", help="Serve /metrics without a token, in a trusted network.")
    ] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="The least that is logged.")
    ] = "info",
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Lines for people, or JSON for a collector.")
    ] = "text",
) -> None:
    """Run a coordinator until SIGTERM or Ctrl-C; what it has acknowledged is always on disk."""
    if (certificate is None) != (key is None):
        raise ConfigError("TLS needs both --certificate and --key")
    tls = None if certificate is None or key is None else tls_of(certificate, key)
    if data.is_symlink() and not data.exists():
        raise ConfigError(
            f"--data {data} is a link to {data.readlink()}, which is not there; mount its disk, or remove the link"
        )
    origins = [_origin(given) for given in allow_origin or ()]
    set_up(log_format, log_level)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of every malformed request
    for filter_ in (not_cancelled, cut_short):
        logging.getLogger("uvicorn.error").addFilter(filter_)
    places = Places(room(max_connections))
    with listen(host, port) as listening, closing(open_store(data, database, init, blobs)) as store:
        token, where = auth.operator_token(data)
        coordinator = Coordinator(store, token, max_parameters=max_parameters)
        application = {"allow_origins": origins, "open_metrics": open_metrics}
        # A signal that the parent process blocks is blocked here too: SIGTERM would not end the coordinator.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        asyncio.run(_run(coordinator, places, listening, where, tls, application))


async def _run(
    coordinator: Coordinator,
    places: Places,
    listening: socket.socket,
    where: Path | None,
    tls: ssl.SSLContext | None,
    application: Mapping[str, Any],
) -> None:
    await coordinator.start()
    sys.setswitchinterval(SWITCH)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if tls is None else "https"
    url = f"{scheme}://{shown}:{port}"
    source = f"in {where}" if where else f"from {auth.OPERATOR_ENV}"
    here = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, shown)
    ready = (
        f"maskfleet coordinator ready at {url} (operator token {source}){_settings(f'{scheme}://{here}:{port}', where)}"
    )
    config = configured(coordinator, places, application, lifespan="on")
    config.load()
    if tls is not None:
        config.ssl = tls
        limit_handshakes(asyncio.get_running_loop())
    await _Server(config, coordinator, ready).serve([listening])


def _settings(url: str, token_file: Path | None) -> str:
    """A line with what the operator's commands need to reach this coordinator; none where their defaults do."""
    found = [] if url == auth.URL else [f"MASKFLEET_URL={url}"]
    if token_file not in (None, auth.TOKEN_FILE):
        found.append(f'{auth.OPERATOR_ENV}="$(cat {shlex.quote(str(token_file.absolute()))})"')
    return "\nfor `maskfleet federation` in another terminal: export " + " ".join(found) if found else ""


def tls_of(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS with a certificate chain and its key, read before a data folder is made. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        for path in (certificate, key):
            path.stat()  # whose error names the file
        context.load_cert_chain(certificate, key)
    except OSError as error:
        if error.filename is not None:
            raise ConfigError(f"{error.filename}: {error.strerror}; correct --certificate or --key") from None
        why = error.strerror
        if isinstance(error, ssl.SSLError):  # its strerror has OpenSSL's file and line
            why = (error.reason or "no certificate or no key in it").replace("_", " ").lower()
        raise ConfigError(
            f"--certificate {certificate}, --key {key}: {why}; give a chain and its key, as PEM"
        ) from None
    return context


def limit_handshakes(loop: asyncio.AbstractEventLoop) -> None:
    """Give TLS handshakes on `loop` the time of a request's head: uvicorn has no setting for it."""
    loop.create_server = partial(loop.create_server, ssl_handshake_timeout=PATIENCE)  # type: ignore[method-assign]
