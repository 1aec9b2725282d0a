"""The devices of one federation in memory: who has which credential, who was removed, who called since.

The journal's rows are the truth; this is what every request needs of them without asking the database.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from pydantic import TypeAdapter, ValidationError

from coord_server import auth
from coord_server.aggregation import sum_kinds
from coord_server.refusals import Refusal
from coord_server.store.tables import DeviceRow, Seen
from edge_client.errors import StateError, first_fault
from edge_client.protocol.messages import Device, Report

# Bytes by kind: "up" and "down" of what is no payload, "last" of the downlink after the last round once it was fetched.
Messages = dict[str, dict[str, int]]


_MESSAGES = TypeAdapter(Messages)


def _read(device: str, text: str | None) -> Messages:
    """What a device's row says of its messages. Raises StateError when it is damaged."""
    try:
        found = {} if text is None else _MESSAGES.validate_json(text)
    except ValidationError as error:
        raise StateError(f"the row of device {device!r} is damaged: {first_fault(error, 'messages')}") from None
    return {"up": {}, "down": {}, "last": {}, **found}


class Roster:
    """Every device that ever enrolled in federation `federation`. Credentials are SHA-256 digests."""

    def __init__(self, federation: str, rows: list[DeviceRow]) -> None:
        self._federation = federation
        self._credentials = {d.device: d.credential for d in rows}
        self._names = {d.credential: d.device for d in rows}
        self._removed = {d.device for d in rows if d.removed}
        self._seen: dict[str, Seen] = {}
        self._messages: dict[str, Messages] = {d.device: _read(d.device, d.messages) for d in rows}

    # --- who

    def knows(self, name: str, credential: str) -> bool:
        """Whether exactly this device is in already. Raises Refusal when it can never come in."""
        known = self._credentials.get(name)
        if name in self._removed:
            raise Refusal("device-removed", f"device {name!r} was removed from {self._federation}; choose another name")
        if known is not None:
            if auth.same(known, credential):
                return True
            raise Refusal(
                "name-taken", f"another device is enrolled as {name!r} in {self._federation}; choose another name"
            )
        if credential in self._names:
            raise Refusal("name-taken", "this credential is enrolled under another name; make a fresh one")
        return False

    def add(self, name: str, credential: str) -> None:
        """A device has enrolled."""
        self._credentials[name] = credential
        self._names[credential] = name

    def remove(self, name: str) -> None:
        """A device is out for good."""
        self._removed.add(name)

    def has(self, name: str) -> bool:
        """Whether a device of this name is in."""
        return name in self._credentials and name not in self._removed

    def device_of(self, credential: str) -> str | None:
        """The device with this credential. Raises Refusal when it was removed."""
        name = self._names.get(credential)  # a digest of 256 random bits: nothing to learn from the look-up's time
        if name is None or not auth.same(self._credentials[name], credential):
            return None
        if name in self._removed:
            raise Refusal("device-removed", f"device {name!r} was removed from {self._federation} by its operator")
        return name

    def reload(self, rows: list[DeviceRow]) -> None:
        """Who is in and who was removed, from the journal anew; what happened since stays."""
        for d in rows:
            self._credentials[d.device] = d.credential
            self._names[d.credential] = d.device
        self._removed = {d.device for d in rows if d.removed}

    # --- who called

    def note(self, device: str, now: float, bytes_down: int) -> None:
        """Remember that a device called and how many payload bytes it fetched; written with its next update."""
        before = self._seen.get(device)
        self._seen[device] = Seen(now, bytes_down + (before.bytes_down if before else 0))

    def count(self, device: str, side: str, kind: str, size: int) -> None:
        """A message that is no payload went "up" or "down"; `size` are the bytes of its body."""
        kinds = self._messages.setdefault(device, _read(device, None))[side]
        kinds[kind] = kinds.get(kind, 0) + size

    def has_last(self, device: str, sizes: Mapping[str, int]) -> None:
        """A device has fetched the downlink after the last round; `sizes` are its bytes by kind."""
        self._messages.setdefault(device, _read(device, None))["last"] = dict(sizes)

    def has_fetched_last(self, device: str) -> bool:
        """Whether a device has fetched the downlink after the last round, as far as is known here."""
        return bool(self._messages.get(device, _read(device, None))["last"])

    def last(self) -> dict[str, int]:
        """Bytes by kind of the downlinks after the last round, of every device that has fetched its own, each once."""
        return sum_kinds(messages["last"] for messages in self._messages.values())

    def seen(self) -> dict[str, Seen]:
        """What the journal does not know yet."""
        return {d: replace(s, messages=self._said(d)) for d, s in self._seen.items()}

    def take_seen(self) -> dict[str, Seen]:
        """The same, to be written now: it is forgotten here."""
        seen, self._seen = self.seen(), {}
        return seen

    def _said(self, device: str) -> str | None:
        said = self._messages.get(device)
        return None if said is None else json.dumps(said, separators=(",", ":"))

    def written(self, device: str, seen: Seen) -> None:
        """What was gathered up to `seen` is in the journal now."""
        later = self._seen.get(device)
        if later is not None:
            self._seen[device] = replace(later, bytes_down=later.bytes_down - seen.bytes_down)

    def shown(self, row: DeviceRow, ready: bool) -> Device:
        """A device's row with what happened since it was written; `ready` when it takes part."""
        seen = self._seen.get(row.device, Seen(row.last_seen_at))
        messages = self._messages.get(row.device) or _read(row.device, row.messages)
        return Device(
            device=row.device,
            enrolled_at=row.enrolled_at,
            last_seen_at=max(row.last_seen_at, seen.at),
            updates=row.updates,
            bytes_up=row.bytes_up,
            bytes_down=row.bytes_down + seen.bytes_down,
            messages_up=messages["up"],
            messages_down=messages["down"],
            removed=row.removed,
            ready=ready,
            report=None if row.report is None else Report.model_validate_json(row.report),
        )
