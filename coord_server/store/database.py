"""One database behind a URL: its connections, its transactions, its errors. SQLite by default, PostgreSQL by URL.

A transaction that writes names what it writes to, such as a federation. One at a time writes to it, of all processes.
So what the transaction has read of it does not change before it has written. Nothing slow, such as the write of a
blob, belongs in one. Which tables the database holds and what is asked of them is in `metadata`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sqlalchemy import URL, Connection, Engine, Select, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from edge_client.errors import ConfigError, StateError, StorageDamagedError, StorageFullError, StorageUnreachableError

PATIENCE = 30_000  # milliseconds that a writer waits for the one before it
# Milliseconds without a statement after which PostgreSQL ends a transaction, and with it its locks. Less than PATIENCE:
# a writer that waits for a coordinator that has lost its power writes in the end.
SILENCE = 10_000
# Whatever the server's defaults are. Under another isolation a writer would see what was there before it had waited.
OPTIONS: Mapping[str, Any] = {
    "postgresql": {"isolation_level": "READ COMMITTED", "connect_args": {"client_encoding": "utf8"}}
}


class Database:
    """Connections to one database. Every function raises StateError when the database fails it."""

    def __init__(self, url: str | URL) -> None:
        """Raises ConfigError for what is no URL of a database that can be used, and for a driver that is missing."""
        try:
            parsed = make_url(url)
            if parsed.get_dialect().is_async:
                raise ArgumentError(f"{parsed.drivername} is an asynchronous driver")
            if parsed.get_backend_name() != "sqlite" and parsed.get_driver_name() != "psycopg":
                raise ArgumentError(f"{parsed.drivername} is neither SQLite nor PostgreSQL through psycopg")
            self.engine = create_engine(parsed, **OPTIONS.get(parsed.get_backend_name(), {}))
        except (ArgumentError, ValueError) as error:
            raise ConfigError(f"--database: {error}; give a URL like postgresql+psycopg://USER@HOST/NAME") from None
        except ImportError as error:
            lacks = f"{error.name} is not installed" if error.name else str(error).partition("\n")[0].rstrip(".")
            raise ConfigError(f"--database: {lacks}; run: pip install 'psycopg[binary]'") from None
        self._postgresql = self.engine.dialect.name == "postgresql"
        if self.engine.dialect.name == "sqlite":
            if self.engine.url.database in (None, "", ":memory:"):
                raise ConfigError(f"--database: {url} is in memory and ends with the process; name a file or a server")
            _prepare_sqlite(self.engine)
        elif self._postgresql:
            self._check_encoding()

    def _check_encoding(self) -> None:
        with self._connected() as c:
            found = c.exec_driver_sql("SHOW server_encoding").scalar_one()
        if found != "UTF8":
            raise ConfigError(
                f"--database: the encoding of this database is {found}, which lacks letters of other languages; create "
                "one with TEMPLATE template0 ENCODING 'UTF8'"
            )

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()

    def writing(self, name: str, *more: str) -> AbstractContextManager[Connection]:
        """One transaction that writes to what is named, as a context manager that gives the Connection.

        Several names are in one order everywhere, so that no two writers wait for each other.
        """
        return self._connected(name, *more)

    def all(self, query: Select[Any]) -> Sequence[Any]:
        """Every row of a query, in a transaction of its own."""
        with self._connected() as c:
            return c.execute(query).all()

    def first(self, query: Select[Any], named: Mapping[str, Any] | None = None) -> Any:
        """The first row, None without one; `named` are the values of the query's parameters."""
        with self._connected() as c:
            return c.execute(query, named).first()

    @contextmanager
    def _connected(self, *written: str) -> Iterator[Connection]:
        try:
            with self.engine.connect().execution_options(writes=bool(written)) as c, c.begin():
                if written and self._postgresql:
                    limits = {"lock_timeout": PATIENCE, "idle_in_transaction_session_timeout": SILENCE}
                    calls = [f"set_config('{name}', '{ms}', true)" for name, ms in limits.items()]
                    calls += ["pg_advisory_xact_lock(hashtext(%s))"] * len(written)
                    c.exec_driver_sql(f"SELECT {', '.join(calls)}", written)
                yield c
        except (DBAPIError, PoolTimeout) as error:
            raise _kind(error) from None


def _prepare_sqlite(engine: Engine) -> None:
    """WAL with a sync at every commit: a commit that returned survives a power cut."""

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        for pragma in (f"busy_timeout={PATIENCE}", "journal_mode=WAL", "synchronous=FULL", "secure_delete=OFF"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _kind(error: DBAPIError | PoolTimeout) -> StateError:
    """The database's error as the StateError of its kind."""
    found = error.orig if isinstance(error, DBAPIError) else error.args[0]  # without SQLAlchemy's link to its pages
    said = getattr(getattr(found, "diag", None), "message_primary", None) or str(found)  # without PostgreSQL's details
    reason, state = " ".join(said.split()), getattr(found, "sqlstate", None) or ""  # libpq writes several lines
    words = ("malformed", "not a database", "corrupt")
    if isinstance(error, IntegrityError) or state in ("XX001", "XX002") or any(w in reason for w in words):
        return StorageDamagedError(f"the coordinator's database is damaged: {reason}; restore it")
    if state == "53100" or "disk is full" in reason:
        return StorageFullError(f"the coordinator's database takes no more: {reason}; free space for it")
    return StorageUnreachableError(
        f"the coordinator's database cannot be used: {reason}; mend this or correct --database, then try again"
    )
