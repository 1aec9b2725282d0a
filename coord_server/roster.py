"""The devices of one federation in memory: who has which credential, who was removed, who called since.

The journal's rows are the truth; this is what every request needs of them without asking the database.
"""

from __future__ import annotations

from dataclasses import replace

from coord_server import auth
from coord_server.refusals import Refusal
from coord_server.store.metadata import DeviceRow, Seen
from edge_client.protocol.messages import Device, Report


class Roster:
    """Every device that ever enrolled in federation `federation`. Credentials are SHA-256 digests."""

    def __init__(self, federation: str, rows: list[DeviceRow]) -> None:
        self._federation = federation
        self._credentials = {d.device: d.credential for d in rows}
        self._names = {d.credential: d.device for d in rows}
        self._removed = {d.device for d in rows if d.removed}
        self._seen: dict[str, Seen] = {}

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

    # --- who called

    def note(self, device: str, now: float, bytes_down: int) -> None:
        """Remember that a device called and how many payload bytes it fetched; written with its next update."""
        before = self._seen.get(device)
        self._seen[device] = Seen(now, bytes_down + (before.bytes_down if before else 0))

    def seen(self) -> dict[str, Seen]:
        """What the journal does not know yet."""
        return dict(self._seen)

    def take_seen(self) -> dict[str, Seen]:
        """The same, to be written now: it is forgotten here."""
        seen, self._seen = self._seen, {}
        return seen

    def written(self, device: str, seen: Seen) -> None:
        """What was gathered up to `seen` is in the journal now."""
        later = self._seen.get(device)
        if later is not None:
            self._seen[device] = replace(later, bytes_down=later.bytes_down - seen.bytes_down)

    def shown(self, row: DeviceRow, ready: bool) -> Device:
        """A device's row with what happened since it was written; `ready` when it takes part."""
        seen = self._seen.get(row.device, Seen(row.last_seen_at))
        return Device(
            device=row.device,
            enrolled_at=row.enrolled_at,
            last_seen_at=max(row.last_seen_at, seen.at),
            updates=row.updates,
            bytes_up=row.bytes_up,
            bytes_down=row.bytes_down + seen.bytes_down,
            removed=row.removed,
            ready=ready,
            report=None if row.report is None else Report.model_validate_json(row.report),
        )
