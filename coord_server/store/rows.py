"""The rows that go with a federation's new state into one transaction, and what other queries share with them.

Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, bindparam, case, delete, insert, select, update

from coord_server.store.tables import devices, federations, records, rounds, tokens, updates
from coord_server.store.values import Content
from edge_client.methods import Influence

# Statements of every update, built once: building one costs more than running it.
_ADD_UPDATE = insert(updates)
MINE = (devices.c.federation == bindparam("b_federation"), devices.c.device == bindparam("b_device"))
LAST_SEEN = case((devices.c.last_seen_at < bindparam("b_at"), bindparam("b_at")), else_=devices.c.last_seen_at)
_COUNT_UPDATE = (
    update(devices)
    .where(*MINE)
    .values(
        last_seen_at=LAST_SEEN,
        updates=devices.c.updates + 1,
        bytes_up=devices.c.bytes_up + bindparam("b_size"),
        cost=bindparam("b_cost"),
        failure=None,
    )
)


def of(table: Any, federation: str, device: str) -> tuple[Any, Any]:
    """The conditions for the row of a device in a table."""
    return table.c.federation == federation, table.c.device == device


class Rows:
    """Rows that go with a federation's new state into one transaction."""

    def __init__(self, connection: Connection, federation: str) -> None:
        self._c, self._federation = connection, federation

    def add_update(
        self,
        round_: int,
        device: str,
        content: Content,
        size: int,
        at: float,
        influence: Influence | None,
        cost: str | None = None,
    ) -> None:
        """An update of `size` bytes that is acknowledged at `at`; `cost` is the header beside it."""
        row = {"federation": self._federation, "round": round_, "device": device, "sha256": content.sha256,
               "size": size, "received_at": at, "content": content.data, "cost": cost}  # fmt: skip
        figures = {"norm": None, "weight": None, "statistics": None} if influence is None else vars(influence)
        self._c.execute(_ADD_UPDATE, {**row, **figures})
        named = {"b_federation": self._federation, "b_device": device, "b_at": at, "b_size": size, "b_cost": cost}
        self._c.execute(_COUNT_UPDATE, named)

    def add_failure(self, device: str, failure: str) -> None:
        """A device's failure as JSON."""
        self._c.execute(update(devices).where(*of(devices, self._federation, device)).values(failure=failure))

    def set_record(self, device: str, round_: int, content: Content | None) -> None:
        """What the method keeps of a device since a round; None: nothing."""
        self._c.execute(delete(records).where(*of(records, self._federation, device)))
        if content is not None:
            new = {"round": round_, "sha256": content.sha256, "content": content.data}
            self._c.execute(insert(records).values(federation=self._federation, device=device, **new))

    def leave_record(self, device: str, round_: int, content: Content | None) -> None:
        """What is left of the record that a round has written, None: nothing; the record of a later round stays."""
        mine = (*of(records, self._federation, device), records.c.round == round_)
        if content is None:
            self._c.execute(delete(records).where(*mine))
        else:
            self._c.execute(update(records).where(*mine).values(sha256=content.sha256, content=content.data))

    def arrive(self, device: str, at: float) -> int:
        """A device has asked for work; 1 when it had not before."""
        mine = of(devices, self._federation, device)
        self._c.execute(update(devices).where(*mine).values(last_seen_at=at))
        return self._ready(+1, *mine, ~devices.c.ready, ~devices.c.removed)

    def remove_device(self, device: str) -> int:
        """Remove a device for good; 1 when it had asked for work."""
        mine = of(devices, self._federation, device)
        was_ready = self._ready(-1, *mine, devices.c.ready)
        self._c.execute(update(devices).where(*mine).values(removed=True))
        return was_ready

    def delete_federation(self) -> None:
        """Delete the federation and all that belongs to it."""
        for table in (updates, rounds, records, devices, tokens):
            self._c.execute(delete(table).where(table.c.federation == self._federation))
        self._c.execute(delete(federations).where(federations.c.id == self._federation))

    def _ready(self, change: int, *where: Any) -> int:
        """Make one device ready, or no longer ready, and count it; how many were changed."""
        changed = self._c.execute(update(devices).where(*where).values(ready=change > 0)).rowcount
        if changed:
            mine = update(federations).where(federations.c.id == self._federation)
            self._c.execute(mine.values(ready=federations.c.ready + change))
        return changed

    def close_round(self, round_: int, record: str, values: Content, kept: Mapping[str, Content | None]) -> None:
        """A round's record as JSON, the method's new global state, its new records by device (None: dropped).

        Of its updates the rows stay, for devices that send one again, until the next update of the same device has been
        folded; the small contents go.
        """
        self._c.execute(insert(rounds).values(federation=self._federation, round=round_, record=record))
        for device, content in kept.items():
            self.set_record(device, round_, content)
        mine = updates.c.federation == self._federation
        of_round = (mine, updates.c.round == round_)
        self._c.execute(update(updates).where(*of_round).values(content=None))
        again = updates.c.device.in_(select(updates.c.device).where(*of_round))
        self._c.execute(delete(updates).where(mine, updates.c.round < round_, again))
        after = {"values_round": round_, "values_sha256": values.sha256, "values_content": values.data}
        self._c.execute(update(federations).where(federations.c.id == self._federation).values(**after))
