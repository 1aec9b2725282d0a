"""What a device must not lose when its power fails: its identity, what its method keeps, the update not yet sent.

A state folder serves one enrolment and one process at a time:

    lock             held (flock) while a client runs
    device.json      name, credential, secret, token digest, the coordinator's answer to the enrolment
    pending-0000013  round 13 as it was trained: a line of JSON, what the method keeps, the update
    kept-0000012     the same of round 12, whose update the coordinator has acknowledged
    bundles/         the models, see `edge_client.link.remote_bundle`
    personal.onnx, done.json: the end

The order of a round is `pending-r`, PUT, rename to `kept-r`: what a method keeps counts only together with an update
that counts. Every file is written whole (temporary file, sync, rename, sync), and `pending-r` is safe before the PUT,
because a coordinator that has an update never asks for that round again. A power cut before that leaves no file: the
round is trained again from the same values to the same bytes. The rename to `kept-r` is not synced: when a power cut
takes it back, the same bytes are sent again, and the coordinator answers with the same receipt in whatever round it is.

Files that decayed on the disk are recognised by their digests. No network and no clock here.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from re import sub
from typing import IO, Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edge_client.bundle import digest
from edge_client.errors import ConfigError, LostError, StateError, first_fault
from edge_client.files import disk, make_folder, write_whole
from edge_client.protocol.messages import Enrolled, Name, Report
from edge_client.protocol.payload import FILE_HEADER_BYTES, Arrays, Payload, decode, encode

log = logging.getLogger("maskfleet")

END_FILE = "done.json"
LINE_MOST = 4096  # bytes of a round's first line
KEPT_ROUNDS = 2  # the last one, and the one before it for a round that is run again

Secret = Annotated[int, Field(strict=True, ge=0, lt=2**64)]


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Identity(_Stored):
    """Who this device is. `token` is the SHA-256 of the join token; `secret` never leaves the device."""

    device: Name
    credential: str
    token: str
    secret: Secret
    enrolled: Enrolled | None = None


class End(_Stored):
    """How the federation ended: the report that the coordinator has accepted, and the digest of the last downlink.

    The personal model, which the report is about, was made from that downlink.
    """

    downlink: str
    report: Report


class _Header(_Stored):
    """First line of a round's file: what follows it is what the method keeps, in `kept` bytes, and the update."""

    round: int
    lease: str
    downlink: str
    kept: Annotated[int, Field(ge=0)]
    kept_sha256: str
    update_sha256: str
    cost: str = ""


@dataclass(frozen=True)
class Pending:
    """A trained update that is not acknowledged yet. `downlink` is the digest of what it was trained from.

    `cost` is what the round cost (`protocol.cost`), sent beside the update; empty when it is not known.
    """

    round: int
    lease: str
    downlink: str
    update: bytes
    cost: str = ""

    @cached_property
    def sha256(self) -> str:
        """The update's digest."""
        return digest(self.update)


M = TypeVar("M", bound=BaseModel)


class Journal:
    """One device's state folder, locked for this process. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        """Create and lock the folder. Raises StateError when it is not writable or another client holds it."""
        self.folder = folder
        make_folder(folder)
        with disk(folder):
            self._lock: IO[str] = open(folder / "lock", "a")  # noqa: SIM115 (held until close)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise StateError(
                    f"another maskfleet client is using {folder}; wait for it to end, or choose another --state"
                ) from None
            for torn in folder.glob("*.new"):  # of a client that was killed while it wrote
                torn.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.close()

    # --- who

    def identity(self, token: str, device: str | None, secret: int | None = None) -> Identity:
        """The device's stored identity, made and stored at the first call.

        The default name is the host's name and six random hex digits, the default secret 64 random bits. Raises
        ConfigError when the folder belongs to another enrolment, device name or secret.
        """
        hashed = digest(token.encode())
        stored = self._read("device.json", Identity)
        if stored is None:
            host = sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._") or "device"
            made = Identity(
                device=device or f"{host[:57]}-{secrets.token_hex(3)}",
                credential=secrets.token_hex(32),
                token=hashed,
                secret=secrets.randbits(64) if secret is None else secret,
            )
            return self.store_identity(made)
        asked = {"token": hashed, "device": device, "secret": secret}
        changes = {k: v for k, v in asked.items() if v is not None and v != getattr(stored, k)}
        if not changes:
            return stored
        if stored.enrolled is None:
            return self.store_identity(stored.model_copy(update=changes))
        whose = f"{self.folder} belongs to device {stored.device!r}"
        if "token" in changes:
            raise ConfigError(
                f"{whose} of federation {stored.enrolled.federation!r}, which joined with another token; give that "
                "token, or another --state for another federation"
            )
        if "device" in changes:
            raise ConfigError(f"{whose}, not {device!r}; leave --device out, or give another --state for {device!r}")
        raise ConfigError(f"{whose}, which joined with another secret; leave --secret out, or give another --state")

    def store_identity(self, identity: Identity) -> Identity:
        """Write `identity` down and return it."""
        write_whole(self.folder / "device.json", identity.model_dump_json(indent=1).encode())
        return identity

    # --- rounds

    @property
    def took_part(self) -> bool:
        """Whether the coordinator has an update of this device and the state folder still has its record."""
        return bool(self._rounds("kept"))

    def kept(self, before: int) -> Arrays:
        """What the method kept in the last acknowledged round before round `before`; {} when there is none.

        A damaged file counts as missing. When every file is damaged, all are removed and LostError is raised: the
        device reports the loss, and the next call returns {} as for a new device.
        """
        rounds = sorted((r for r in self._rounds("kept") if r < before), reverse=True)
        for r in rounds:
            found = self._read_round("kept", r)
            if found is not None:
                return dict(decode(found[1], FILE_HEADER_BYTES).arrays)
            log.warning("%s is damaged; going on without it", self._path("kept", r))
        if rounds:
            self._drop(rounds, "kept")
            raise LostError(f"all that this device kept in {self.folder} is damaged")
        return {}

    def trained(self, kept: Arrays, pending: Pending) -> None:
        """Store a trained round. Only after this returns may the update be sent. Raises StateError."""
        body = encode(Payload(kept), FILE_HEADER_BYTES)
        header = _Header(
            round=pending.round,
            lease=pending.lease,
            downlink=pending.downlink,
            kept=len(body),
            kept_sha256=digest(body),
            update_sha256=pending.sha256,
            cost=pending.cost,
        )
        line = header.model_dump_json().encode() + b"\n"
        write_whole(self._path("pending", pending.round), line, body, pending.update)
        self._drop([r for r in self._rounds("pending") if r != pending.round], "pending")

    def pending(self) -> Pending | None:
        """The last update not yet acknowledged. A damaged one counts as missing: its round is trained again."""
        for round_ in sorted(self._rounds("pending"), reverse=True):
            found = self._read_round("pending", round_)
            if found is not None:
                header, _, update = found
                return Pending(header.round, header.lease, header.downlink, update, header.cost)
        return None

    def acknowledge(self, round_: int) -> None:
        """The coordinator has the update of `round_`: what the method kept in it now counts.

        What it kept of later rounds goes: a coordinator that was restored from a backup runs them again.
        """
        with disk(self.folder):
            os.replace(self._path("pending", round_), self._path("kept", round_))
        kept = sorted(self._rounds("kept"))
        valid = [r for r in kept if r <= round_][-KEPT_ROUNDS:]
        self._drop([r for r in kept if r not in valid], "kept")

    def drop_pending(self) -> None:
        """Forget the update that is not acknowledged: its round went on without this device."""
        self._drop(self._rounds("pending"), "pending")

    def _path(self, kind: str, round_: int) -> Path:
        return self.folder / f"{kind}-{round_:07d}"

    def _rounds(self, kind: str) -> list[int]:
        names = (p.name.partition("-")[2] for p in self.folder.glob(f"{kind}-*"))
        return [int(name) for name in names if name.isascii() and name.isdigit()]

    def _drop(self, rounds: list[int], kind: str) -> None:
        with disk(self.folder):
            for r in rounds:
                self._path(kind, r).unlink(missing_ok=True)

    def _read_round(self, kind: str, round_: int) -> tuple[_Header, bytes, bytes] | None:
        """A round's header, what the method keeps and the update; None when the file is damaged."""
        path = self._path(kind, round_)
        with disk(path), path.open("rb") as file:
            try:
                header = _Header.model_validate_json(file.readline(LINE_MOST))
            except ValidationError:
                return None
            left = os.fstat(file.fileno()).st_size - file.tell()
            if header.kept > left:
                return None
            kept, update = file.read(header.kept), file.read(left - header.kept)
        sound = header.round, header.kept_sha256, header.update_sha256
        return (header, kept, update) if sound == (round_, digest(kept), digest(update)) else None

    # --- the end

    def end(self) -> End | None:
        """How the federation ended, None before that."""
        return self._read(END_FILE, End)

    def finish(self, end: End) -> None:
        """Store how the federation ended, once the coordinator has accepted the report."""
        write_whole(self.folder / END_FILE, end.model_dump_json(indent=1).encode())

    def _read(self, name: str, kind: type[M]) -> M | None:
        path = self.folder / name
        with disk(path):
            if not path.is_file():
                return None
            data = path.read_bytes()
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            fault = first_fault(error)
            raise StateError(f"{path} is damaged ({fault}); remove {self.folder} and join again") from None
