"""The coordinator's tables in use: SQLAlchemy Core, SQLite by default, PostgreSQL by URL.

Each public function of `Metadata` is one transaction. `commit` is the one that changes a federation: the engine's
state and the rows that go with it, written together or not at all, and only over the version they were made from.
Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from sqlalchemy import Connection, Engine, bindparam, create_engine, event, insert, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from coord_server.store.rows import MINE, SAVE_SEEN, Rows, add_ready, seen_values
from coord_server.store.tables import (
    MESSAGES,
    METADATA,
    DeviceRow,
    FederationRow,
    Head,
    Member,
    Seen,
    TokenRow,
    bundles,
    devices,
    federations,
    records,
    rounds,
    store,
    tokens,
    updates,
)
from coord_server.store.values import Content
from edge_client.errors import StateError, StorageDamagedError, StorageFullError, StorageUnreachableError

Enrolment = Literal["new", "again", "removed", "name-taken", "credential-taken", "spent"]

_SAVE_STATE = (
    update(federations)
    .where(federations.c.id == bindparam("b_id"), federations.c.version == bindparam("b_version"))
    .values(state=bindparam("b_state"), version=federations.c.version + 1, stamp=bindparam("b_stamp"))
)
_HEAD = select(*(federations.c[name] for name in Head.__dataclass_fields__))
_DEVICE = [devices.c[name] for name in DeviceRow.__dataclass_fields__ if name != "messages"]


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
    reason = str(error.orig if isinstance(error, DBAPIError) else error)
    if isinstance(error, IntegrityError) or any(w in reason for w in ("malformed", "not a database", "corrupt")):
        return StorageDamagedError(f"the coordinator's database is damaged: {reason}; restore it")
    if "full" in reason or "No space left" in reason:
        return StorageFullError(f"the coordinator's database takes no more: {reason}; free space for it")
    return StorageUnreachableError(f"the coordinator's database does not answer: {reason}; the request can be repeated")


class Metadata:
    """The tables behind one database URL. Every function raises StateError when the database fails it."""

    def __init__(self, url: str) -> None:
        """Connect, and create the tables that are missing."""
        self._engine = create_engine(url)
        if self._engine.dialect.name == "sqlite":
            _prepare_sqlite(self._engine)
        with self.writing() as c:
            METADATA.create_all(c)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction that writes."""
        try:
            with self._engine.connect().execution_options(writes=True) as c, c.begin():
                yield c
        except (DBAPIError, PoolTimeout) as error:
            raise _kind(error) from None

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as c:
                yield c
        except (DBAPIError, PoolTimeout) as error:
            raise _kind(error) from None

    def identify(self, c: Connection, fresh: str | None) -> str | None:
        """The id of the data folder that belongs to this database; `fresh` is stored where there is none."""
        found: str | None = c.scalars(select(store.c.id)).first()
        if found is None and fresh is not None:
            c.execute(insert(store).values(id=fresh))
        return found or fresh

    def holds_bundles(self, c: Connection) -> bool:
        """Whether the database names any bundle."""
        return c.execute(select(bundles.c.digest).limit(1)).first() is not None

    # --- bundles

    def add_bundle(self, digest: str, now: float) -> None:
        """Store the fact that a bundle's manifest is a blob; again is harmless."""
        with self.writing() as c:
            if c.execute(select(bundles.c.digest).where(bundles.c.digest == digest)).first() is None:
                c.execute(insert(bundles).values(digest=digest, added_at=now))

    def has_bundle(self, digest: str) -> bool:
        """Whether the manifest of a bundle is stored."""
        with self._reading() as c:
            return c.execute(select(bundles.c.digest).where(bundles.c.digest == digest)).first() is not None

    # --- federations

    def add_federation(self, row: FederationRow) -> bool:
        """Store a new federation; False, and nothing, when its id is taken."""
        with self.writing() as c:
            if c.execute(select(federations.c.id).where(federations.c.id == row.id)).first() is not None:
                return False
            c.execute(
                insert(federations).values(
                    id=row.id, config=row.config, state=row.state, values_round=0, values_sha256=row.values.sha256,
                    values_content=row.values.data, created_at=row.created_at,
                )
            )  # fmt: skip
            return True

    def versions(self) -> dict[str, tuple[int, int]]:
        """Version and number of ready devices of every federation, oldest first: cheap, for watching."""
        with self._reading() as c:
            query = select(federations.c.id, federations.c.version, federations.c.ready)
            found = c.execute(query.order_by(federations.c.created_at, federations.c.id))
            return {row[0]: (row[1], row[2]) for row in found}

    def config(self, federation: str) -> str:
        """A federation's FederationConfig as JSON."""
        with self._reading() as c:
            return str(c.scalars(select(federations.c.config).where(federations.c.id == federation)).one())

    def head(self, federation: str) -> Head:
        """What changes about a federation."""
        with self._reading() as c:
            row = c.execute(_HEAD.where(federations.c.id == federation)).mappings().first()
        if row is None:
            raise StorageDamagedError(f"federation {federation!r} is not in the coordinator's database; restore it")
        return Head(**row)

    def values(self, federation: str) -> tuple[int, Content]:
        """The last closed round, 0 at first, and the method's global state after it."""
        columns = (federations.c.values_round, federations.c.values_sha256, federations.c.values_content)
        with self._reading() as c:
            row = c.execute(select(*columns).where(federations.c.id == federation)).one()
            return row[0], Content(row[1], row[2])

    def commit(
        self, federation: str, version: int, state: str, stamp: str, rows: Sequence[Callable[[Rows], None]]
    ) -> bool:
        """Write `state` and `rows` over `version`; False, and nothing, when another commit was first."""
        with self.writing() as c:
            named = {"b_id": federation, "b_version": version, "b_state": state, "b_stamp": stamp}
            if c.execute(_SAVE_STATE, named).rowcount != 1:
                return False
            gathered = Rows(c, federation)
            for add in rows:
                add(gathered)
            gathered.write()
            return True

    # --- tokens and devices

    def add_token(self, token: str, federation: str, uses: int, expires_at: float) -> None:
        """Store a join token by its SHA-256."""
        with self.writing() as c:
            c.execute(insert(tokens).values(token=token, federation=federation, uses_left=uses, expires_at=expires_at))

    def token(self, token: str) -> TokenRow | None:
        """The terms of the token with this SHA-256."""
        with self._reading() as c:
            columns = (tokens.c.federation, tokens.c.uses_left, tokens.c.expires_at)
            row = c.execute(select(*columns).where(tokens.c.token == token)).mappings().first()
            return None if row is None else TokenRow(**row)

    def enrol(self, federation: str, device: str, credential: str, token: str, now: float, valid: bool) -> Enrolment:
        """Store a new device and one use of its token, if the token is still `valid`; only "new" changes anything.

        The same device again is harmless: a lost answer loses nothing.
        """
        here = devices.c.federation == federation
        with self.writing() as c:
            mine = c.execute(
                select(devices.c.credential, devices.c.removed).where(here, devices.c.device == device)
            ).first()
            if mine is not None:
                same: Enrolment = "again" if mine[0] == credential else "name-taken"
                return "removed" if mine[1] else same
            if c.execute(select(devices.c.device).where(here, devices.c.credential == credential)).first() is not None:
                return "credential-taken"
            one_less = update(tokens).values(uses_left=tokens.c.uses_left - 1)
            unspent = (tokens.c.token == token, tokens.c.uses_left > 0)
            if not valid or c.execute(one_less.where(*unspent)).rowcount != 1:
                return "spent"
            c.execute(
                insert(devices).values(
                    federation=federation, device=device, credential=credential, enrolled_at=now, last_seen_at=now
                )
            )
            return "new"

    def member(self, federation: str, credential: str) -> Member | None:
        """The device with this credential, a SHA-256."""
        with self._reading() as c:
            columns = (devices.c.device, devices.c.credential, devices.c.ready, devices.c.removed)
            query = select(*columns).where(devices.c.credential == credential, devices.c.federation == federation)
            row = c.execute(query).first()
            return None if row is None else Member(*row)

    def federations_of(self, credential: str) -> list[str]:
        """The federations in which a device has this credential, a SHA-256."""
        with self._reading() as c:
            return list(c.scalars(select(devices.c.federation).where(devices.c.credential == credential)))

    def has_device(self, federation: str, device: str) -> bool:
        """Whether a device is enrolled and not removed."""
        query = select(devices.c.device).where(
            devices.c.federation == federation, devices.c.device == device, ~devices.c.removed
        )
        with self._reading() as c:
            return c.execute(query).first() is not None

    def devices(self, federation: str) -> list[DeviceRow]:
        """Every device that ever enrolled, by name."""
        with self._reading() as c:
            columns = (*_DEVICE, *(devices.c[name] for name in MESSAGES))
            query = select(*columns).where(devices.c.federation == federation).order_by(devices.c.device)
            rows = [dict(row) for row in c.execute(query).mappings()]
        return [DeviceRow(messages={name: row.pop(name) for name in MESSAGES}, **row) for row in rows]

    def present(self, federation: str, since: float) -> list[tuple[str, float]]:
        """Ready devices that are not removed and made a request at `since` or later, and when."""
        query = select(devices.c.device, devices.c.last_seen_at).where(
            devices.c.federation == federation, devices.c.last_seen_at >= since, devices.c.ready, ~devices.c.removed
        )
        with self._reading() as c:
            return [(row[0], row[1]) for row in c.execute(query)]

    def save_seen(self, federation: str, seen: Mapping[str, Seen], ready: Sequence[str] = ()) -> int:
        """Store what happened to devices; those of `ready` have asked for work. The number of all ready devices."""
        with self.writing() as c:
            if seen:
                c.execute(SAVE_SEEN, [seen_values(federation, device, s) for device, s in seen.items()])
            first = update(devices).where(*MINE, ~devices.c.ready, ~devices.c.removed).values(ready=True)
            new = sum(c.execute(first, {"b_federation": federation, "b_device": d}).rowcount for d in ready)
            add_ready(c, federation, new)
            return int(c.scalars(select(federations.c.ready).where(federations.c.id == federation)).one())

    def save_report(self, federation: str, device: str, report: str, seen: Seen) -> None:
        """Store a device's report, and what happened to the device."""
        with self.writing() as c:
            c.execute(SAVE_SEEN, seen_values(federation, device, seen))
            mine = (devices.c.federation == federation, devices.c.device == device)
            c.execute(update(devices).where(*mine).values(report=report))

    def last_down(self, federation: str, device: str | None = None) -> list[str]:
        """Bytes by kind, as JSON, of the downlinks after the last round that devices, or `device`, fetched."""
        query = select(devices.c.last_down).where(devices.c.federation == federation, devices.c.last_down.is_not(None))
        with self._reading() as c:
            return list(c.scalars(query if device is None else query.where(devices.c.device == device)))

    # --- rounds

    def acknowledged(self, federation: str, round_: int, device: str) -> tuple[str, int] | None:
        """SHA-256 and size of the update that was acknowledged, None when none was."""
        mine = (updates.c.federation == federation, updates.c.round == round_, updates.c.device == device)
        with self._reading() as c:
            row = c.execute(select(updates.c.sha256, updates.c.size).where(*mine)).first()
            return None if row is None else (row[0], row[1])

    def influences(self, federation: str, round_: int) -> dict[str, tuple[float, float, float]]:
        """Norm, weight and norm of the statistics of each acknowledged update of a round that has an influence."""
        query = select(updates.c.device, updates.c.norm, updates.c.weight, updates.c.statistics)
        query = query.where(updates.c.norm.is_not(None))
        with self._reading() as c:
            rows = c.execute(query.where(updates.c.federation == federation, updates.c.round == round_))
            return {row[0]: (row[1], row[2], row[3]) for row in rows}

    def update_content(self, federation: str, round_: int, device: str) -> Content | None:
        """An acknowledged update of a round that is not closed yet."""
        mine = (updates.c.federation == federation, updates.c.round == round_, updates.c.device == device)
        with self._reading() as c:
            row = c.execute(select(updates.c.sha256, updates.c.content).where(*mine)).first()
            return None if row is None else Content(row[0], row[1])

    def record(self, federation: str, device: str) -> tuple[int, Content] | None:
        """What the method keeps about a device, and the round that wrote it."""
        mine = (records.c.federation == federation, records.c.device == device)
        with self._reading() as c:
            row = c.execute(select(records.c.round, records.c.sha256, records.c.content).where(*mine)).first()
            return None if row is None else (row[0], Content(row[1], row[2]))

    def all_rounds(self, federation: str) -> list[str]:
        """The records of all closed rounds as JSON, in order."""
        with self._reading() as c:
            query = select(rounds.c.record).where(rounds.c.federation == federation).order_by(rounds.c.round)
            return list(c.scalars(query))

    def one_round(self, federation: str, round_: int) -> str | None:
        """One closed round's record as JSON."""
        with self._reading() as c:
            query = select(rounds.c.record).where(rounds.c.federation == federation, rounds.c.round == round_)
            return c.scalars(query).first()
