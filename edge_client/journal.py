"""What a device must not lose when its power goes: who it is, what it keeps between rounds, the update not yet sent.

A state folder serves one enrolment and one process at a time:

    lock                      held (flock) while a client runs
    device.json               name, credential, token digest, what the coordinator answered to the enrolment
    kept-0000012.safetensors  what the method keeps after round 12; counts only up to the acknowledged round
    pending                   the update of a round, trained and not yet acknowledged: one line of JSON, then its bytes
    acknowledged.json         the last round whose update the coordinator has on disk
    bundles/                  the models, see `edge_client.remote_bundle`
    personal.onnx, done.json  the end

Every file is written whole: temporary file, fsync, rename, fsync of the folder. The order of a round is `kept-r`,
then `pending` (from here the round is never trained again), PUT, then `acknowledged`. Killed between any two of
them, the next process either trains the round again from the same values, or sends the same bytes again.
No network and no clock here.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from re import sub
from typing import IO, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from edge_client.bundle import digest
from edge_client.errors import ConfigError, PayloadError, StateError
from edge_client.protocol.messages import Enrolled, Report
from edge_client.protocol.payload import Arrays, Payload, decode, encode

KEPT_ROUNDS = 2  # the last one, and the one before it for a round that is run again


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Identity(_Stored):
    """Who this device is to the coordinator. `token` is the SHA-256 of the join token, never the token."""

    device: str
    credential: str
    token: str
    enrolled: Enrolled | None = None


class _Acknowledged(_Stored):
    round: int


class _PendingHeader(_Stored):
    round: int
    lease: str
    downlink: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Pending:
    """An update that was trained and waits to be acknowledged. `downlink` is the digest it was trained from."""

    round: int
    lease: str
    downlink: str
    update: bytes


M = TypeVar("M", bound=BaseModel)


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal into a StateError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = "free some space, then run the same command again: nothing is lost"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = "give this user write access, or choose another folder with --state"
        else:
            advice = "choose another folder with --state"
        raise StateError(f"cannot use {path}: {error.strerror or error}; {advice}") from None


def write_whole(path: Path, *chunks: bytes | memoryview) -> None:
    """Replace `path` by `chunks` so that a reader, or the next start after a power cut, sees all or nothing.

    Raises StateError (disk full, not writable); the old content then stays.
    """
    temporary = path.with_name(path.name + ".new")
    with disk(path):
        try:
            with open(temporary, "wb", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class Journal:
    """One device's state folder, locked for this process. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        """Create and lock the folder. Raises StateError when it is not writable or another client holds it."""
        self.folder = folder
        with disk(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock: IO[str] = open(folder / "lock", "a")  # noqa: SIM115 (held until close)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise StateError(
                    f"another maskfleet client is using {folder}; wait for it to end, or choose another --state"
                ) from None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.close()

    # --- who

    def identity(self, token: str, device: str | None) -> Identity:
        """The device's stored identity, made (and stored) at the first call.

        The default name is the host's name and six random hex digits. Raises ConfigError when the folder
        belongs to another enrolment or another device name.
        """
        hashed = digest(token.encode())
        stored = self._read("device.json", Identity)
        if stored is None:
            host = sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._") or "device"
            made = Identity(
                device=device or f"{host[:57]}-{secrets.token_hex(3)}", credential=secrets.token_hex(32), token=hashed
            )
            return self.store_identity(made)
        if stored.token != hashed:
            if stored.enrolled is not None:
                raise ConfigError(
                    f"{self.folder} belongs to device {stored.device!r} of federation {stored.enrolled.federation!r}, "
                    "which joined with another token; give that token, or another --state for another federation"
                )
            stored = self.store_identity(stored.model_copy(update={"token": hashed}))
        if device is not None and device != stored.device:
            if stored.enrolled is not None:
                raise ConfigError(
                    f"{self.folder} belongs to device {stored.device!r}, not {device!r}; "
                    f"leave --device out, or choose another --state for device {device!r}"
                )
            stored = self.store_identity(stored.model_copy(update={"device": device}))
        return stored

    def store_identity(self, identity: Identity) -> Identity:
        """Write `identity` down and return it."""
        write_whole(self.folder / "device.json", identity.model_dump_json(indent=1).encode())
        return identity

    # --- what the method keeps

    def acknowledged(self) -> int:
        """The last round whose update the coordinator has acknowledged, 0 for none."""
        stored = self._read("acknowledged.json", _Acknowledged)
        return 0 if stored is None else stored.round

    def kept(self, before: int) -> Arrays:
        """What the method kept after the last acknowledged round before round `before`; {} when there is none."""
        limit = min(self.acknowledged(), before - 1)
        rounds = [r for r in self._kept_rounds() if r <= limit]
        if not rounds:
            return {}
        path = self._kept_path(max(rounds))
        with disk(path):
            data = path.read_bytes()
        try:
            return dict(decode(data).arrays)
        except PayloadError as error:
            raise StateError(f"{path} is damaged ({error}); remove {self.folder} and join again") from None

    def _kept_path(self, round_: int) -> Path:
        return self.folder / f"kept-{round_:07d}.safetensors"

    def _kept_rounds(self) -> list[int]:
        return [int(p.stem[len("kept-") :]) for p in self.folder.glob("kept-*.safetensors")]

    # --- the update

    def trained(self, kept: Arrays, pending: Pending) -> None:
        """Note a trained round. Only after this returns may the update be sent."""
        self._drop_kept_beyond(self.acknowledged())
        write_whole(self._kept_path(pending.round), encode(Payload(kept, {"round": pending.round})))
        header = _PendingHeader(
            round=pending.round,
            lease=pending.lease,
            downlink=pending.downlink,
            size=len(pending.update),
            sha256=digest(pending.update),
        )
        write_whole(self.folder / "pending", header.model_dump_json().encode() + b"\n", pending.update)

    def pending(self) -> Pending | None:
        """The update not yet acknowledged. One whose bytes have decayed is None: its round is trained again."""
        path = self.folder / "pending"
        with disk(path):
            if not path.is_file():
                return None
            line, _, update = path.read_bytes().partition(b"\n")
        try:
            header = _PendingHeader.model_validate_json(line)
        except ValidationError:
            return None
        if len(update) != header.size or digest(update) != header.sha256 or header.round <= self.acknowledged():
            return None
        return Pending(header.round, header.lease, header.downlink, update)

    def acknowledge(self, round_: int) -> None:
        """The coordinator has the update of `round_`: what the method kept in it now counts."""
        write_whole(self.folder / "acknowledged.json", json.dumps({"round": round_}).encode())
        self.drop_pending()
        for old in sorted(r for r in self._kept_rounds() if r <= round_)[:-KEPT_ROUNDS]:
            self._kept_path(old).unlink(missing_ok=True)

    def drop_pending(self) -> None:
        """Forget the update that waits: its round went on without this device."""
        with disk(self.folder):
            (self.folder / "pending").unlink(missing_ok=True)
        self._drop_kept_beyond(self.acknowledged())

    def _drop_kept_beyond(self, round_: int) -> None:
        with disk(self.folder):
            for r in self._kept_rounds():
                if r > round_:
                    self._kept_path(r).unlink(missing_ok=True)

    # --- the end

    def done(self) -> Report | None:
        """The report the coordinator has accepted, None before the end."""
        return self._read("done.json", Report)

    def finish(self, report: Report) -> None:
        """Note that the coordinator has the device's report."""
        write_whole(self.folder / "done.json", report.model_dump_json(indent=1).encode())

    def _read(self, name: str, kind: type[M]) -> M | None:
        path = self.folder / name
        with disk(path):
            if not path.is_file():
                return None
            data = path.read_bytes()
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            what = error.errors()[0]["msg"]
            raise StateError(f"{path} is damaged ({what}); remove {self.folder} and join again") from None
