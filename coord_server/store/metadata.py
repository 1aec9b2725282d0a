"""The queries of the coordinator's database, in SQLAlchemy Core.

Each public function of `Metadata` is one transaction. `commit` is the one that changes a federation: the engine's
state and the rows that go with it (`rows`), written together or not at all, and only over the version they were made
from. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import URL, Connection, Select, bindparam, delete, func, insert, literal, select, tuple_, update

from coord_server.problems import Refusal
from coord_server.store.blobs import BUNDLES, owner
from coord_server.store.database import Database
from coord_server.store.rows import LAST_SEEN, MINE, Rows, of
from coord_server.store.tables import (
    MESSAGES,
    METADATA,
    Head,
    Known,
    Seen,
    bundles,
    devices,
    federations,
    records,
    rounds,
    store,
    tokens,
    updates,
    viewers,
)
from coord_server.store.values import Content
from edge_client.methods import Influence
from edge_client.protocol.messages import MAX_ROUNDS
from edge_client.protocol.operator import DeviceState
from edge_client.protocol.patterns import TOKEN_DIGITS

Enrolment = Literal["new", "again", "removed", "name-taken", "credential-taken", "spent"]

# Built once: building a statement costs more than running it.
_THIS = federations.c.id == bindparam("b_id")
_SAVE_STATE = (
    update(federations)
    .where(_THIS, federations.c.version == bindparam("b_version"))
    .values(state=bindparam("b_state"), version=federations.c.version + 1)
)
_HEAD = select(*(federations.c[name] for name in Head.__dataclass_fields__)).where(_THIS)
_SAVE_SEEN = (
    update(devices)
    .where(*MINE)
    .values(
        last_seen_at=LAST_SEEN,
        bytes_down=devices.c.bytes_down + bindparam("b_down"),
        last_down=func.coalesce(bindparam("b_last"), devices.c.last_down),
        report=func.coalesce(bindparam("b_report"), devices.c.report),
        agent=func.coalesce(bindparam("b_agent"), devices.c.agent),
        **{name: devices.c[name] + bindparam(f"b_{name}") for name in MESSAGES},
    )
)
_STATES: Mapping[DeviceState, tuple[Any, ...]] = {
    "removed": (devices.c.removed,),
    "new": (~devices.c.removed, ~devices.c.ready),
    "failed": (~devices.c.removed, devices.c.ready, devices.c.failure.is_not(None)),
    "ready": (~devices.c.removed, devices.c.ready, devices.c.failure.is_(None)),
}


class Metadata:
    """The tables behind one database URL. Every function raises StateError when the database fails it."""

    def __init__(self, url: str | URL) -> None:
        """Connect, and create the tables that are missing. Raises ConfigError as `Database` does."""
        self.database = Database(url)
        with self.database.writing("store") as c:
            METADATA.create_all(c)
            for table in METADATA.sorted_tables:  # those that were there may be of another program or version
                c.execute(select(table).limit(0))

    def close(self) -> None:
        """Close the connections."""
        self.database.close()

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
        """Record a bundle whose manifest is a blob; repeating this is harmless."""
        with self.database.writing(BUNDLES) as c:
            _add_bundle(c, digest, now)

    def bundles(self, after: tuple[float, str] | None, limit: int) -> Sequence[Any]:
        """`digest` and `added_at` of the bundles, oldest first, beyond the one `after`."""
        b = bundles.c
        query = select(bundles).order_by(b.added_at, b.digest).limit(limit)
        if after is not None:
            query = query.where(tuple_(b.added_at, b.digest) > tuple_(*(literal(v) for v in after)))
        return self.database.all(query)

    def added_at(self, digest: str) -> float | None:
        """When a bundle's manifest was stored, None when it is not here."""
        row = self.database.first(select(bundles.c.added_at).where(bundles.c.digest == digest))
        return None if row is None else float(row.added_at)

    def users(self, digest: str) -> list[str]:
        """The federations of a bundle, by name."""
        f = federations.c
        return [row.id for row in self.database.all(select(f.id).where(f.bundle == digest).order_by(f.id))]

    def delete_bundle(self, digest: str) -> list[str] | None:
        """Delete a bundle that no federation uses; else those that do, None when there is no such bundle."""
        with self.database.writing(BUNDLES) as c:
            used = list(c.scalars(select(federations.c.id).where(federations.c.bundle == digest)))
            if used:
                return used
            if c.execute(delete(bundles).where(bundles.c.digest == digest)).rowcount != 1:
                return None
            return []

    def names(self, shelf: str) -> bool:
        """Whether a bundle or a federation has this shelf; waits for a commit whose connection broke or client died."""
        name, _, digest = shelf.partition("/")
        if name == BUNDLES:
            query = select(bundles.c.digest).where(bundles.c.digest == digest)
        else:
            name, first = owner(shelf)
            query = select(federations.c.id).where(federations.c.id == name, federations.c.first == first)
        with self.database.writing(name) as c:
            return c.execute(query).first() is not None

    # --- federations

    def add_federation(
        self, id_: str, config: str, bundle: str, state: str, values: Content, now: float, first: int = 0,
        derived: bool = False,
    ) -> Literal["added", "taken", "no-bundle"]:  # fmt: skip
        """Store a new federation; `config` and `state` are JSON. Nothing when its id is taken or its bundle is gone.

        With `derived` the bundle is recorded too: it was made for this federation.
        """
        with self.database.writing(id_, BUNDLES) as c:
            if c.execute(select(federations.c.id).where(federations.c.id == id_)).first() is not None:
                return "taken"
            if derived:
                _add_bundle(c, bundle, now)
            elif c.execute(select(bundles.c.digest).where(bundles.c.digest == bundle)).first() is None:
                return "no-bundle"
            new = {"id": id_, "config": config, "bundle": bundle, "state": state, "created_at": now}
            values_ = {"values_sha256": values.sha256, "values_content": values.data}
            c.execute(insert(federations).values(**new, **values_, version=first, first=first))
            return "added"

    def delete_federation(self, federation: str, version: int) -> bool:
        """Delete a federation that no process could load; False, and nothing, when it has another version."""
        with self.database.writing(federation) as c:
            this = (federations.c.id == federation, federations.c.version == version)
            if c.execute(select(federations.c.id).where(*this)).first() is None:
                return False
            Rows(c, federation).delete_federation()
            return True

    def known(self) -> dict[str, Known]:
        """Every federation, oldest first: cheap, for watching."""
        f = federations.c
        query = select(f.id, f.version, f.first).order_by(f.created_at, f.id)
        return {row[0]: Known(*row[1:]) for row in self.database.all(query)}

    def stored(self, federation: str) -> tuple[str, Head]:
        """A federation's FederationConfig as JSON, and its changing columns: both of one, if it is replaced now."""
        *head, config = self._of_federation(federation, _HEAD.add_columns(federations.c.config))
        return config, Head(*head)

    def head(self, federation: str) -> Head:
        """The changing columns of a federation."""
        return Head(*self._of_federation(federation, _HEAD))

    def values(self, federation: str) -> tuple[int, Content]:
        """The last closed round, 0 at first, and the method's global state after it."""
        f = federations.c
        query = select(f.values_round, f.values_sha256, f.values_content).where(_THIS)
        row = self._of_federation(federation, query)
        return row[0], Content(row[1], row[2])

    def _of_federation(self, federation: str, query: Select[Any]) -> Any:
        row = self.database.first(query, {"b_id": federation})
        if row is None:
            raise Refusal(
                "not-found",
                f"federation {federation!r} was deleted; `maskfleet federation list` has those that are there",
            )
        return row

    def commit(self, federation: str, version: int, state: str, rows: Sequence[Callable[[Rows], Any]]) -> bool:
        """Write `state` and `rows` over `version`; False, and nothing, when another commit was first."""
        with self.database.writing(federation) as c:
            named = {"b_id": federation, "b_version": version, "b_state": state}
            if c.execute(_SAVE_STATE, named).rowcount != 1:
                return False
            for add in rows:
                add(Rows(c, federation))
            return True

    # --- viewers

    def add_viewer(self, token: str, expires_at: float) -> None:
        """Store a viewer's token by its SHA-256."""
        with self.database.writing("viewers") as c:
            c.execute(insert(viewers).values(token=token, expires_at=expires_at))

    def viewers(self) -> dict[str, float]:
        """When each viewer's token expires, by its SHA-256 and in that order."""
        return {row.token: row.expires_at for row in self.database.all(select(viewers).order_by(viewers.c.token))}

    def remove_viewer(self, id_: str) -> bool:
        """Revoke the viewer's token whose SHA-256 begins with `id_`; False when there is none."""
        with self.database.writing("viewers") as c:
            return c.execute(delete(viewers).where(viewers.c.token.startswith(id_, autoescape=True))).rowcount > 0

    # --- tokens and devices

    def add_token(self, token: str, federation: str, uses: int, expires_at: float) -> None:
        """Store a join token by its SHA-256. Raises Refusal when its federation was deleted."""
        with self.database.writing(federation) as c:
            if c.execute(_HEAD, {"b_id": federation}).first() is None:
                raise Refusal("not-found", f"federation {federation!r} was deleted")
            c.execute(insert(tokens).values(token=token, federation=federation, uses_left=uses, expires_at=expires_at))

    def tokens(self, federation: str, after: str, limit: int) -> Sequence[Any]:
        """`token`, `uses_left` and `expires_at` of a federation's join tokens, by id beyond the id `after`."""
        id_ = func.substr(tokens.c.token, 1, TOKEN_DIGITS)  # the id alone: a language may sort "aa" behind "ag"
        query = select(tokens).where(tokens.c.federation == federation, id_ > after).order_by(id_)
        return self.database.all(query.limit(limit))

    def remove_token(self, federation: str, id_: str) -> bool:
        """Revoke the join token whose SHA-256 begins with `id_`; False when there is none."""
        with self.database.writing(federation) as c:
            mine = (tokens.c.federation == federation, tokens.c.token.startswith(id_, autoescape=True))
            return c.execute(delete(tokens).where(*mine)).rowcount > 0

    def token(self, token: str) -> Any:
        """`federation` and `expires_at` of the token with this SHA-256."""
        return self.database.first(select(tokens).where(tokens.c.token == token))

    def enrol(self, federation: str, device: str, credential: str, token: str, now: float, valid: bool) -> Enrolment:
        """Store a new device and one use of its token, if the token is still `valid`; only "new" changes anything.

        The same device again is harmless: a lost answer loses nothing.
        """
        with self.database.writing(federation) as c:
            mine = c.execute(select(devices).where(*of(devices, federation, device))).first()
            if mine is not None:
                same: Enrolment = "again" if mine.credential == credential else "name-taken"
                return "removed" if mine.removed else same
            shown = (devices.c.federation == federation, devices.c.credential == credential)
            if c.execute(select(devices.c.device).where(*shown)).first() is not None:
                return "credential-taken"
            one_less = update(tokens).values(uses_left=tokens.c.uses_left - 1)
            unspent = (tokens.c.token == token, tokens.c.uses_left > 0)
            if not valid or c.execute(one_less.where(*unspent)).rowcount != 1:
                return "spent"
            new = {"federation": federation, "device": device, "credential": credential}
            c.execute(insert(devices).values(**new, enrolled_at=now, last_seen_at=now))
            return "new"

    def member(self, federation: str, credential: str) -> Any:
        """`device`, `ready` and `removed` of the device with this credential, a SHA-256."""
        d = devices.c
        return self.database.first(
            select(d.device, d.ready, d.removed).where(d.credential == credential, d.federation == federation)
        )

    def federations_of(self, credential: str) -> list[str]:
        """The federations in which a device has this credential, a SHA-256."""
        found = self.database.all(select(devices.c.federation).where(devices.c.credential == credential))
        return [row.federation for row in found]

    def device(self, federation: str, device: str) -> Any:
        """The row of a device; None unless it is enrolled and not removed."""
        return self.database.first(select(devices).where(*of(devices, federation, device), ~devices.c.removed))

    def devices(
        self, federation: str, state: DeviceState | None = None, after: str = "", limit: int | None = None
    ) -> Sequence[Any]:
        """The rows of every device that ever enrolled, or of those in a state, by name beyond `after`."""
        d = devices.c
        query = select(devices).where(d.federation == federation, d.device > after).order_by(d.device).limit(limit)
        return self.database.all(query if state is None else query.where(*_STATES[state]))

    def present(self, federation: str, since: float) -> dict[str, float]:
        """Ready devices that are not removed and made a request at `since` or later, and when."""
        d = devices.c
        query = select(d.device, d.last_seen_at).where(d.federation == federation, d.last_seen_at >= since)
        return {row.device: row.last_seen_at for row in self.database.all(query.where(d.ready, ~d.removed))}

    def save_seen(self, federation: str, seen: Mapping[str, Seen]) -> None:
        """Store what happened to devices."""
        rows = [
            {"b_federation": federation, "b_device": device, "b_at": s.at, "b_down": s.bytes_down,
             "b_last": s.last_down, "b_report": s.report, "b_agent": s.agent,
             **{f"b_{name}": s.messages.get(name, 0) for name in MESSAGES}}
            for device, s in seen.items()
        ]  # fmt: skip
        with self.database.writing(federation) as c:
            c.execute(_SAVE_SEEN, rows)

    def last_down(self, federation: str) -> dict[str, str]:
        """Bytes by kind, as JSON, of the downlink after the last round, by the device that fetched it."""
        d = devices.c
        query = select(d.device, d.last_down).where(d.federation == federation, d.last_down.is_not(None))
        return {row.device: row.last_down for row in self.database.all(query)}

    # --- rounds

    def _update(self, federation: str, round_: int, device: str, *columns: Any) -> Any:
        return self.database.first(select(*columns).where(*of(updates, federation, device), updates.c.round == round_))

    def acknowledged(self, federation: str, round_: int, device: str) -> tuple[str, int] | None:
        """SHA-256 and size of the update that was acknowledged, None when none was."""
        row = self._update(federation, round_, device, updates.c.sha256, updates.c.size)
        return None if row is None else (row[0], row[1])

    def update_content(self, federation: str, round_: int, device: str) -> Content | None:
        """An acknowledged update of a round that is not closed yet."""
        row = self._update(federation, round_, device, updates.c.sha256, updates.c.content)
        return None if row is None else Content(*row)

    def influences(self, federation: str, round_: int) -> dict[str, Influence]:
        """The influence of each acknowledged update of a round that has one."""
        u = updates.c
        query = select(u.device, *(u[name] for name in Influence.__dataclass_fields__)).where(u.norm.is_not(None))
        found = self.database.all(query.where(u.federation == federation, u.round == round_))
        return {row[0]: Influence(*row[1:]) for row in found}

    def costs(self, federation: str, round_: int) -> dict[str, str]:
        """What the round cost the devices of acknowledged updates, as far as they said it."""
        u = updates.c
        query = select(u.device, u.cost).where(u.federation == federation, u.round == round_, u.cost.is_not(None))
        return {row[0]: row[1] for row in self.database.all(query)}

    def record(self, federation: str, device: str) -> tuple[int, Content] | None:
        """What the method keeps about a device, and the round that wrote it."""
        row = self.database.first(select(records).where(*of(records, federation, device)))
        return None if row is None else (row.round, Content(row.sha256, row.content))

    def rounds(
        self, federation: str, first: int = 1, last: int = MAX_ROUNDS, limit: int | None = None
    ) -> dict[int, str]:
        """The records of the closed rounds `first` .. `last` as JSON, in order."""
        r = rounds.c
        query = select(r.round, r.record).where(r.federation == federation, r.round.between(first, last))
        return {row.round: row.record for row in self.database.all(query.order_by(r.round).limit(limit))}


def _add_bundle(c: Connection, digest: str, now: float) -> None:
    """Record a bundle, unless it is recorded."""
    if c.execute(select(bundles).where(bundles.c.digest == digest)).first() is None:
        c.execute(insert(bundles).values(digest=digest, added_at=now))
