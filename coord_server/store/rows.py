"""The rows that go with a federation's new state into one transaction. `metadata` commits them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, bindparam, case, delete, func, insert, update

from coord_server.store.tables import (
    MESSAGES,
    ClosedRow,
    Seen,
    UpdateRow,
    devices,
    federations,
    records,
    rounds,
    updates,
)

# Statements of every update, built once: building one costs more than running it.
MINE = (devices.c.federation == bindparam("b_federation"), devices.c.device == bindparam("b_device"))
_SEEN = {
    devices.c.last_seen_at: case(
        (devices.c.last_seen_at < bindparam("b_at"), bindparam("b_at")), else_=devices.c.last_seen_at
    ),
    devices.c.bytes_down: devices.c.bytes_down + bindparam("b_down"),
    devices.c.last_down: func.coalesce(bindparam("b_last"), devices.c.last_down),
    **{devices.c[name]: devices.c[name] + bindparam(f"b_{name}") for name in MESSAGES},
}
SAVE_SEEN = update(devices).where(*MINE).values(_SEEN)
_COUNT_UPDATE = (
    update(devices)
    .where(*MINE)
    .values(
        {
            **_SEEN,
            devices.c.updates: devices.c.updates + 1,
            devices.c.bytes_up: devices.c.bytes_up + bindparam("b_size"),
            devices.c.failure: None,
        }
    )
)
_ADD_UPDATE = insert(updates)
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


def seen_values(federation: str, device: str, seen: Seen) -> dict[str, Any]:
    """The parameters of `SAVE_SEEN`."""
    counts = {f"b_{name}": seen.messages.get(name, 0) for name in MESSAGES}
    return {"b_federation": federation, "b_device": device, "b_at": seen.at, "b_down": seen.bytes_down,
            "b_last": seen.last_down, **counts}  # fmt: skip


class Rows:
    """Rows that go with a commit. Nothing is visible before the whole transaction is."""

    def __init__(self, connection: Connection, federation: str) -> None:
        self._c, self._federation = connection, federation
        self._updates: list[dict[str, Any]] = []
        self._counts: list[dict[str, Any]] = []

    def add_update(self, row: UpdateRow) -> None:
        """An update that is acknowledged, and what its device sent and received."""
        self._updates.append(
            {"federation": self._federation, "round": row.round, "device": row.device, "sha256": row.content.sha256,
             "size": row.size, "received_at": row.received_at, "norm": row.norm, "weight": row.weight,
             "statistics": row.statistics, "content": row.content.data}
        )  # fmt: skip
        self._counts.append({**seen_values(self._federation, row.device, row.seen), "b_size": row.size})

    def add_failure(self, device: str, failure: str, forget: bool) -> None:
        """A device's failure as JSON; with `forget` its record is dropped."""
        self._c.execute(update(devices).where(*self._mine(devices, device)).values(failure=failure))
        if forget:
            self._c.execute(delete(records).where(*self._mine(records, device)))

    def remove_device(self, device: str) -> None:
        """A device is out for good."""
        mine = self._mine(devices, device)
        was_ready = self._c.execute(
            update(devices).where(*mine, devices.c.ready, ~devices.c.removed).values(removed=True)
        ).rowcount
        self._c.execute(update(devices).where(*mine).values(removed=True))
        add_ready(self._c, self._federation, -was_ready)
        one_more = update(federations).values(removals=federations.c.removals + 1)
        self._c.execute(one_more.where(federations.c.id == self._federation))

    def close_round(self, row: ClosedRow) -> None:
        """A round's record, the method's new global state and records; the small contents of its updates go."""
        self._c.execute(_ADD_ROUND, {"federation": self._federation, "round": row.round, "record": row.record})
        for device, content in row.records.items():
            mine = self._mine(records, device)
            self._c.execute(delete(records).where(*mine))
            if content is not None:
                new = {"round": row.round, "sha256": content.sha256, "content": content.data}
                self._c.execute(insert(records).values(federation=self._federation, device=device, **new))
        self._c.execute(_DROP_CONTENTS, {"b_federation": self._federation, "b_round": row.round})
        values = {"values_round": row.round, "values_sha256": row.values.sha256, "values_content": row.values.data}
        self._c.execute(update(federations).where(federations.c.id == self._federation).values(**values))

    def write(self) -> None:
        """Write what was gathered."""
        if self._updates:
            self._c.execute(_ADD_UPDATE, self._updates)
            self._c.execute(_COUNT_UPDATE, self._counts)

    def _mine(self, table: Any, device: str) -> tuple[Any, Any]:
        return table.c.federation == self._federation, table.c.device == device


def add_ready(c: Connection, federation: str, count: int) -> None:
    """Change the number of ready devices of a federation."""
    if count:
        new = federations.c.ready + count
        c.execute(update(federations).where(federations.c.id == federation).values(ready=new))
