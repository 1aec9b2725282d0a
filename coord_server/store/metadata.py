"""Everything the coordinator knows that is not bytes: SQLAlchemy Core, SQLite by default, PostgreSQL by URL.

Each public function is one transaction. What an event changes (its row and the engine's state) goes in together, so
that after a crash the state and the rows agree. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, create_engine, event, func, insert, select, update
from sqlalchemy.exc import DBAPIError

from coord_server.store.tables import (
    METADATA,
    Acknowledged,
    ClosedRound,
    Content,
    DeviceRow,
    FederationRow,
    Seen,
    TokenRow,
    bundles,
    devices,
    federations,
    records,
    rounds,
    tokens,
    updates,
)
from edge_client.errors import StateError

# Statements of every update, built once: building one costs more than running it.
_ADD_UPDATE = insert(updates)
_COUNT_UPDATE = (
    update(devices)
    .where(devices.c.federation == bindparam("b_federation"), devices.c.device == bindparam("b_device"))
    .values(
        {
            devices.c.updates: devices.c.updates + 1,
            devices.c.bytes_up: devices.c.bytes_up + bindparam("b_size"),
            devices.c.bytes_down: devices.c.bytes_down + bindparam("b_down"),
            devices.c.last_seen_at: bindparam("b_at"),
            devices.c.messages: func.coalesce(bindparam("b_messages"), devices.c.messages),
        }
    )
)
_ADD_ROUND = insert(rounds)
_DROP_CONTENTS = (
    update(updates)
    .where(
        updates.c.federation == bindparam("b_federation"),
        updates.c.round == bindparam("b_round"),
        updates.c.content.is_not(None),
    )
    .values(content=None)
)
_SAVE_ROUND = (
    update(federations)
    .where(federations.c.id == bindparam("b_id"))
    .values(state=bindparam("b_state"), global_state=bindparam("b_global"), global_content=bindparam("b_content"))
)
_SAVE_STATE = update(federations).where(federations.c.id == bindparam("b_id")).values(state=bindparam("b_state"))


def _prepare_sqlite(engine: Engine) -> None:
    """WAL with a sync at every commit: a commit that returned survives a power cut."""

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=OFF", "busy_timeout=30000"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


class Metadata:
    """The tables behind one database URL."""

    def __init__(self, url: str) -> None:
        """Connect, and create the tables that are missing. Raises StateError."""
        self._engine = create_engine(url)
        if self._engine.dialect.name == "sqlite":
            _prepare_sqlite(self._engine)
        with self._write() as c:
            METADATA.create_all(c)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        try:
            with self._engine.connect().execution_options(writes=True) as c, c.begin():
                yield c
        except DBAPIError as error:
            raise StateError(
                f"the coordinator's database took nothing: {error.orig}; free space or repair it, then try again"
            ) from None

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as c:
                yield c
        except DBAPIError as error:
            raise StateError(f"the coordinator's database cannot be read: {error.orig}; repair it") from None

    # --- bundles

    def add_bundle(self, digest: str, now: float) -> None:
        """Note a bundle's manifest; again is harmless."""
        with self._write() as c:
            if c.execute(select(bundles.c.digest).where(bundles.c.digest == digest)).first() is None:
                c.execute(insert(bundles).values(digest=digest, added_at=now))

    def has_bundle(self, digest: str) -> bool:
        """Whether the manifest of a bundle is here."""
        with self._read() as c:
            return c.execute(select(bundles.c.digest).where(bundles.c.digest == digest)).first() is not None

    # --- federations

    def add_federation(self, row: FederationRow) -> None:
        """Journal a new federation."""
        with self._write() as c:
            c.execute(insert(federations).values(**vars(row)))

    def all_federations(self) -> list[FederationRow]:
        """Every federation, oldest first."""
        with self._read() as c:
            found = c.execute(select(federations).order_by(federations.c.created_at, federations.c.id)).mappings()
            return [FederationRow(**row) for row in found]

    def federation(self, id_: str) -> FederationRow:
        """One federation. Raises StateError when it is not there."""
        with self._read() as c:
            row = c.execute(select(federations).where(federations.c.id == id_)).mappings().first()
        if row is None:
            raise StateError(f"federation {id_!r} is not in the coordinator's database; restore it")
        return FederationRow(**row)

    def save_state(self, federation: str, state: str) -> None:
        """Journal the engine's state alone."""
        with self._write() as c:
            self._state(c, federation, state)

    def state(self, federation: str) -> str | None:
        """The journalled state of the engine."""
        with self._read() as c:
            return c.scalars(select(federations.c.state).where(federations.c.id == federation)).first()

    def _state(self, c: Connection, federation: str, state: str) -> None:
        c.execute(_SAVE_STATE, {"b_id": federation, "b_state": state})

    # --- tokens and devices

    def add_token(self, token: str, federation: str, uses: int, expires_at: float) -> None:
        """Journal a join token by its SHA-256."""
        with self._write() as c:
            c.execute(insert(tokens).values(token=token, federation=federation, uses_left=uses, expires_at=expires_at))

    def token(self, token: str) -> TokenRow | None:
        """The terms of the token with this SHA-256."""
        with self._read() as c:
            columns = (tokens.c.federation, tokens.c.uses_left, tokens.c.expires_at)
            row = c.execute(select(*columns).where(tokens.c.token == token)).mappings().first()
            return None if row is None else TokenRow(**row)

    def enrol(self, federation: str, device: str, credential: str, token: str, now: float) -> bool:
        """Journal a new device and one use of its token; False, and nothing, when the token is used up.

        The same device again is harmless: whoever was not told that it is in may repeat this.
        """
        mine = (devices.c.federation == federation) & (devices.c.device == device)
        with self._write() as c:
            if c.execute(select(devices.c.device).where(mine, devices.c.credential == credential)).first() is not None:
                return True
            spent = c.execute(
                update(tokens)
                .where(tokens.c.token == token, tokens.c.uses_left > 0)
                .values(uses_left=tokens.c.uses_left - 1)
            )
            if spent.rowcount != 1:
                return False
            c.execute(
                insert(devices).values(
                    federation=federation,
                    device=device,
                    credential=credential,
                    removed=False,
                    enrolled_at=now,
                    last_seen_at=now,
                )
            )
            return True

    def all_devices(self, federation: str) -> list[DeviceRow]:
        """Every device that ever enrolled, by name."""
        columns = [col for col in devices.c if col.name != "federation"]
        with self._read() as c:
            query = select(*columns).where(devices.c.federation == federation).order_by(devices.c.device)
            return [DeviceRow(**row) for row in c.execute(query).mappings()]

    def remove_device(self, federation: str, device: str, state: str) -> None:
        """Journal that a device is out."""
        with self._write() as c:
            self._device(c, federation, device, {"removed": True})
            self._state(c, federation, state)

    def _device(self, c: Connection, federation: str, device: str, values: Mapping[Any, Any]) -> None:
        mine = (devices.c.federation == federation) & (devices.c.device == device)
        c.execute(update(devices).where(mine).values(dict(values)))

    def _seen(self, c: Connection, federation: str, seen: Mapping[str, Seen]) -> None:
        for device, s in seen.items():
            values = {devices.c.last_seen_at: s.at, devices.c.bytes_down: devices.c.bytes_down + s.bytes_down}
            said = {} if s.messages is None else {devices.c.messages: s.messages}
            self._device(c, federation, device, {**values, **said})

    def save_seen(self, federation: str, seen: Mapping[str, Seen]) -> None:
        """Journal who called since."""
        with self._write() as c:
            self._seen(c, federation, seen)

    def save_report(self, federation: str, device: str, report: str, seen: Seen) -> None:
        """Journal a device's last word, the newest counts, and what happened to it since its row was written."""
        with self._write() as c:
            self._seen(c, federation, {device: seen})
            self._device(c, federation, device, {"report": report})

    # --- rounds

    def acknowledge(
        self, federation: str, rows: Sequence[Acknowledged], state: str, closed: ClosedRound | None = None
    ) -> None:
        """Journal updates that are about to be acknowledged, each of a device of its own, in one transaction.

        With `closed` they are the last ones of that round, which is closed in the same transaction: they are in its
        total, and nobody asks for their content any more.
        """
        with self._write() as c:
            bodies, counts = [], []
            for r in rows:
                key = {"federation": federation, "round": r.round, "device": r.device}
                content = None if closed is not None and closed.round == r.round else r.body.data
                body = {"sha256": r.body.sha256, "content": content, "size": r.size, "received_at": r.at}
                bodies.append({**key, **body})
                seen = {"b_size": r.size, "b_down": r.seen.bytes_down, "b_at": r.seen.at, "b_messages": r.seen.messages}
                counts.append({"b_federation": federation, "b_device": r.device, **seen})
            c.execute(_ADD_UPDATE, bodies)
            c.execute(_COUNT_UPDATE, counts)
            if closed is None:
                self._state(c, federation, state)
            else:
                self._close(c, federation, closed, state)

    def acknowledged(self, federation: str, round_: int, device: str) -> tuple[str, int] | None:
        """SHA-256 and size of the update that was acknowledged, None when none was."""
        mine = (updates.c.federation == federation) & (updates.c.round == round_) & (updates.c.device == device)
        with self._read() as c:
            row = c.execute(select(updates.c.sha256, updates.c.size).where(mine)).first()
            return None if row is None else (row[0], row[1])

    def update_content(self, federation: str, round_: int, device: str) -> Content | None:
        """An acknowledged update of a round that is not closed yet."""
        mine = (updates.c.federation == federation) & (updates.c.round == round_) & (updates.c.device == device)
        with self._read() as c:
            row = c.execute(select(updates.c.sha256, updates.c.content).where(mine)).first()
            return None if row is None else Content(row[0], row[1])

    def close_round(self, federation: str, closed: ClosedRound, state: str) -> None:
        """Journal a round's record, the new global state, the devices' new records and the engine's state."""
        with self._write() as c:
            self._close(c, federation, closed, state)

    def _close(self, c: Connection, federation: str, closed: ClosedRound, state: str) -> None:
        c.execute(_ADD_ROUND, {"federation": federation, "round": closed.round, "record": closed.record})
        for device, content in closed.kept.items():
            mine = (records.c.federation == federation) & (records.c.device == device)
            new = {"sha256": content.sha256, "content": content.data}
            if c.execute(update(records).where(mine).values(new)).rowcount == 0:
                c.execute(insert(records).values(federation=federation, device=device, **new))
        c.execute(_DROP_CONTENTS, {"b_federation": federation, "b_round": closed.round})
        new_state = {"b_state": state, "b_global": closed.total.sha256, "b_content": closed.total.data}
        c.execute(_SAVE_ROUND, {"b_id": federation, **new_state})

    def all_records(self, federation: str) -> dict[str, str]:
        """Each device's record by its digest."""
        with self._read() as c:
            query = select(records.c.device, records.c.sha256).where(records.c.federation == federation)
            return {row[0]: row[1] for row in c.execute(query)}

    def record(self, federation: str, device: str) -> Content | None:
        """One device's record."""
        mine = (records.c.federation == federation) & (records.c.device == device)
        with self._read() as c:
            row = c.execute(select(records.c.sha256, records.c.content).where(mine)).first()
            return None if row is None else Content(row[0], row[1])

    def all_rounds(self, federation: str) -> list[str]:
        """The records of all closed rounds as JSON, in order."""
        with self._read() as c:
            query = select(rounds.c.record).where(rounds.c.federation == federation).order_by(rounds.c.round)
            return list(c.scalars(query))

    def one_round(self, federation: str, round_: int) -> str | None:
        """One closed round's record as JSON."""
        with self._read() as c:
            query = select(rounds.c.record).where(rounds.c.federation == federation, rounds.c.round == round_)
            return c.scalars(query).first()
