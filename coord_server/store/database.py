"""One database behind a URL: its connections, its transactions, its errors. SQLite by default, PostgreSQL by URL.

Which tables it holds and what is asked of them is in `metadata`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sqlalchemy import URL, Connection, Engine, Select, create_engine, event
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from edge_client.errors import ConfigError, StateError, StorageDamagedError, StorageFullError, StorageUnreachableError


class Database:
    """Connections to one database. Every function raises StateError when the database fails it."""

    def __init__(self, url: str | URL) -> None:
        """Raises ConfigError for what is no URL of a database, and for one whose driver is not installed."""
        try:
            self.engine = create_engine(url)
        except (ArgumentError, ValueError) as error:
            raise ConfigError(f"--database: {error}; give a URL like postgresql+psycopg://USER@HOST/NAME") from None
        except ImportError as error:
            lacks = f"{error.name} is not installed" if error.name else str(error).partition("\n")[0].rstrip(".")
            raise ConfigError(f"--database: {lacks}; install this database driver") from None
        if self.engine.dialect.name == "sqlite":
            if self.engine.url.database in (None, "", ":memory:"):
                raise ConfigError(f"--database: {url} is in memory and ends with the process; name a file or a server")
            _prepare_sqlite(self.engine)

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()

    def writing(self) -> AbstractContextManager[Connection]:
        """One transaction that writes, as a context manager that gives the Connection."""
        return self._connected(writes=True)

    def all(self, query: Select[Any]) -> Sequence[Any]:
        """Every row of a query, in a transaction of its own."""
        with self._connected(writes=False) as c:
            return c.execute(query).all()

    def first(self, query: Select[Any], named: Mapping[str, Any] | None = None) -> Any:
        """The first row, None without one; `named` are the values of the query's parameters."""
        with self._connected(writes=False) as c:
            return c.execute(query, named).first()

    @contextmanager
    def _connected(self, writes: bool) -> Iterator[Connection]:
        try:
            with self.engine.connect().execution_options(writes=writes) as c, c.begin():
                yield c
        except (DBAPIError, PoolTimeout) as error:
            raise _kind(error) from None


def _prepare_sqlite(engine: Engine) -> None:
    """WAL with a sync at every commit: a commit that returned survives a power cut."""

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        for pragma in ("busy_timeout=30000", "journal_mode=WAL", "synchronous=FULL", "secure_delete=OFF"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _kind(error: Exception) -> StateError:
    """The database's error as the StateError of its kind."""
    reason = " ".join(str(error.orig if isinstance(error, DBAPIError) else error).split())  # libpq writes several lines
    if isinstance(error, IntegrityError) or any(w in reason for w in ("malformed", "not a database", "corrupt")):
        return StorageDamagedError(f"the coordinator's database is damaged: {reason}; restore it")
    if "full" in reason or "No space left" in reason:
        return StorageFullError(f"the coordinator's database takes no more: {reason}; free space for it")
    return StorageUnreachableError(
        f"the coordinator's database does not answer: {reason}; bring it back or correct --database, and repeat this"
    )
