"""Models for other engines, made from what the server holds: one worker process at a time, beside the rounds.

A file's id is the SHA-256 of all that it is made of, so the same model is made once, and a coordinator that starts
again finds it. DATA/exports/ID/ is the worker's folder (`export_worker`). It is locked while its file is made, so that
other coordinators on the data folder wait for that. A worker that was killed leaves no model: the next request starts
it again. The coordinator itself computes nothing and imports neither PyTorch nor ExecuTorch.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from coord_server.bundles import read_manifest
from coord_server.live.devices import damaged, not_enrolled
from coord_server.live.federation import LiveFederation
from coord_server.problems import Refusal
from coord_server.store import Store
from coord_server.store.blobs import bundle_shelf, federation_shelf
from coord_server.store.values import read
from edge_client.bundle import MANIFEST, WEIGHTS, digest
from edge_client.errors import StateError, StorageDamagedError
from edge_client.files import make_folder, write_whole
from edge_client.protocol.messages import FederationConfig, Report, Source
from edge_client.protocol.operator import Export, Kind

# Names in a worker's folder: the order and its inputs; the worker's last line; the file with its description, or a
# sentence in its place.
ORDER, STATE, RECORD, BUNDLE, LOCK = "order.json", "state", "record", "bundle", "lock"
SAID, ONNX, MADE, MODEL, FAULT = "said", "made.onnx", "made.json", "model", "fault"
READ = ("eval.onnx", WEIGHTS)  # parts of the bundle
STOPPED = "the worker was stopped before it was done; ask for the file again"
ELSEWHERE = "free space on the coordinator's disk"
NEEDS: dict[str, Sequence[str]] = {"onnx": ("onnxruntime", "onnx"), "pte": ("torch", "executorch")}
"""Packages that a worker imports."""
WAITING = 16  # files that may wait for the worker
STORED = 64  # finished files that are kept; the oldest go
SECONDS = 1800.0  # that one worker may take
TRIES = 5  # rounds that may close while a model's values are read


class Order(BaseModel):
    """What is asked for: the model after round `closed`, of one device or of all, as `kind`; the rest as in `Held`."""

    config: FederationConfig
    places: int
    closed: int
    device: str | None
    kept: Source | None
    kind: Kind


def lacking(kind: Kind) -> list[str]:
    """Packages that this machine would need to make a file of this kind and does not have."""
    return [name for name in NEEDS[kind] if find_spec(name) is None]


class Exports:
    """The files of one coordinator."""

    def __init__(self, store: Store) -> None:
        self._store, self._folder = store, store.folder / "exports"
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: str | None = None
        self._one, self._ordering = asyncio.Lock(), asyncio.Lock()

    async def ask(self, live: LiveFederation, kind: Kind, device: str | None = None, again: bool = True) -> Export:
        """The file of the federation's model after its last closed round; its making begins unless it is there.

        `device` asks for that device's own model. A file that failed is made again, unless `again` is False. Raises
        Refusal, StateError.
        """
        missing = lacking(kind)
        if missing:
            raise Refusal(
                "not-installed",
                f"this coordinator cannot make {kind!r}, {', '.join(missing)} is not installed here; on a machine with "
                f"'maskfleet[author]' run `maskfleet federation export {live.id} --onnx model.onnx`, then `maskfleet "
                f"artifact model.onnx --kind {kind}`",
            )
        async with self._ordering:  # the second of two requests for one file finds its order written
            id_, lock = await asyncio.to_thread(self._order, live, kind, device, again)
        if lock is None:
            return self.show(id_)
        if len(self._tasks) >= WAITING:
            os.close(lock)
            raise Refusal("too-many", f"{WAITING} files wait for the coordinator's worker; ask again when one is made")
        (self._folder / id_ / FAULT).unlink(missing_ok=True)
        self._tasks[id_] = asyncio.create_task(self._make(id_))
        self._tasks[id_].add_done_callback(lambda _: os.close(lock))
        return self.show(id_)

    def show(self, id_: str, federation: str | None = None) -> Export:
        """How far a file is. Raises Refusal when there is no such one, or none of `federation`."""
        folder = self._folder / id_
        try:
            order = Order.model_validate_json((folder / ORDER).read_text("utf-8"))
        except (OSError, ValueError):
            raise Refusal("not-found", f"there is no export {id_}; POST to .../exports for one") from None
        if federation not in (None, order.config.name):
            raise Refusal("not-found", f"there is no export {id_} of {federation}; POST to .../exports for one")
        said: dict[str, Any] = {"state": "failed", "detail": _line(folder / FAULT) or STOPPED}
        if (folder / MODEL).is_file():
            size = (folder / MODEL).stat().st_size
            said = {"state": "ready", "size": size, **json.loads((folder / MADE).read_bytes())}
        elif id_ == self._running:
            said = {"state": "running", "detail": _line(folder / SAID) or "the worker starts"}
        elif id_ in self._tasks:
            waits = "the worker starts" if self._running is None else "other files are made first"
            said = {"state": "waiting", "detail": waits}
        elif _held(folder):
            said = {"state": "running", "detail": _line(folder / SAID) or "it is made at another coordinator"}
        return Export(id=id_, kind=order.kind, device=order.device, round=order.closed, **said)

    def of(self, federation: str) -> list[Export]:
        """The files of a federation, the latest first. Blocks."""
        found = list[tuple[float, Export]]()
        for path in self._folder.glob(f"*/{ORDER}"):
            with contextlib.suppress(OSError, ValueError, Refusal):  # another federation's, or just swept
                found.append((path.stat().st_mtime, self.show(path.parent.name, federation)))
        return [export for _, export in sorted(found, key=lambda one: -one[0])]

    def file(self, id_: str) -> Path:
        """A file that is ready. Raises Refusal when it is not."""
        path = self._folder / id_ / MODEL
        if not path.is_file():
            raise Refusal("not-found", f"export {id_} is not ready; GET .../exports/{id_} says how far it is")
        return path

    async def tidy(self) -> None:
        """Drop the files of federations that were deleted. Raises StateError."""
        for id_ in await asyncio.to_thread(self._orphans):
            task = self._tasks.pop(id_, None)
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
            await asyncio.to_thread(shutil.rmtree, self._folder / id_, ignore_errors=True)

    async def close(self) -> None:
        """End the worker; what it made so far is made again."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _make(self, id_: str) -> None:
        folder = self._folder / id_
        try:
            async with self._one:
                self._running = id_
                await self._work(folder)
        except Exception as error:  # the next request tries again
            with contextlib.suppress(OSError):
                (folder / FAULT).write_text(f"the worker could not be started: {error}")
        finally:
            self._running = None if self._running == id_ else self._running
            self._tasks.pop(id_, None)

    async def _work(self, folder: Path) -> None:
        """Run the worker on `folder` to its end, or for as long as it may take."""
        (folder / SAID).unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "coord_server.export_worker", str(folder),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        fault = ""
        try:
            assert process.stderr is not None
            said = await asyncio.wait_for(process.stderr.read(), SECONDS)
            if await process.wait() and not (folder / FAULT).is_file():
                last = said.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
                fault = f"the worker ended with code {process.returncode}: {last[0]}; the coordinator's log has more"
        except asyncio.TimeoutError:
            fault = f"the worker was stopped after {SECONDS:g} s; make the file on another machine"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if fault:
            (folder / FAULT).write_text(fault)
        for name in (STATE, RECORD, ONNX):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / BUNDLE, ignore_errors=True)

    def _order(self, live: LiveFederation, kind: Kind, device: str | None, again: bool) -> tuple[str, int | None]:
        """Write the worker's folder unless the file is there or is being made, here or at another coordinator.

        Its id, and the lock of the folder if the file is to be made now. Blocks. Raises Refusal, StateError.
        """
        kept = None if device is None else self._kept(live, device)
        closed, state, record = self._values(live, device)
        order = Order(config=live.config, places=live.summary().places or live.config.cohort, closed=closed,
                      device=device, kept=kept, kind=kind).model_dump_json().encode()  # fmt: skip
        id_ = digest(b"\0".join([order, digest(state).encode(), digest(record or b"").encode()]))
        folder = self._folder / id_
        if (folder / MODEL).is_file() or id_ in self._tasks or (not again and (folder / FAULT).is_file()):
            return id_, None
        files = {ORDER: order, STATE: state, **({} if record is None else {RECORD: record})}
        files |= self._bundle_files(live.config.bundle)
        make_folder(folder / BUNDLE, ELSEWHERE)
        lock = _lock(folder)
        if lock is None:
            return id_, None
        try:
            for name, data in files.items():
                write_whole(folder / name, data, elsewhere=ELSEWHERE)
        except BaseException as error:
            os.close(lock)
            if isinstance(error, StateError) and live.id not in self._store.metadata.known():  # its folder went with it
                raise Refusal("not-found", f"federation {live.id!r} was deleted") from None
            raise
        self._sweep(id_)
        return id_, lock

    def _kept(self, live: LiveFederation, device: str) -> Source | None:
        """Which model a device has reported to keep, None before. Blocks. Raises Refusal, StateError."""
        row = self._store.metadata.device(live.id, device)
        if row is None:
            raise not_enrolled(live.id, device)
        try:
            return None if row.report is None else Report.model_validate_json(row.report).source
        except ValidationError as error:
            raise damaged(device, error) from None

    def _bundle_files(self, bundle: str) -> dict[str, bytes]:
        """The manifest and the parts that a worker reads, by their paths in its folder. Blocks. Raises StateError."""
        shelf, manifest = bundle_shelf(bundle), read_manifest(self._store, bundle)
        files = {f"{BUNDLE}/{MANIFEST}": self._store.blobs.read(shelf, bundle)}
        for name in READ:
            if name in manifest.parts:
                files[f"{BUNDLE}/{name}"] = self._store.blobs.read(shelf, manifest.parts[name].sha256)
        return files

    def _values(self, live: LiveFederation, device: str | None) -> tuple[int, bytes, bytes | None]:
        """The last closed round, the state after it, and the device's record, as stored and of one moment."""
        store, id_, root = self._store, live.id, federation_shelf(live.id, live.first)
        for _ in range(TRIES):
            closed, content = store.metadata.values(id_)
            found = None if device is None else store.metadata.record(id_, device)
            with contextlib.suppress(StorageDamagedError):  # a sweep, when a round has just closed
                state = read(store.blobs, f"{root}/values/{closed}", content)
                record = None
                if found is not None:
                    record = read(store.blobs, f"{root}/records/{device}/{found[0]}", found[1])
                if store.metadata.values(id_)[0] == closed:
                    return closed, state, record
        raise Refusal("too-many", f"rounds of {id_} close faster than its state can be read; ask again, or pause it")

    def _orphans(self) -> list[str]:
        """The files of federations that are not in the database. Blocks. Raises StateError."""
        there, found = self._store.metadata.known(), list[str]()
        for path in self._folder.glob(f"*/{ORDER}"):
            with contextlib.suppress(OSError, ValueError):
                if Order.model_validate_json(path.read_text("utf-8")).config.name not in there:
                    found.append(path.parent.name)
        return found

    def _sweep(self, fresh: str) -> None:
        """Keep the newest files."""
        folders = [f for f in self._folder.iterdir() if f.name not in {*self._tasks, fresh} and not _held(f)]
        for old in sorted(folders, key=lambda f: f.stat().st_mtime, reverse=True)[STORED:]:
            shutil.rmtree(old, ignore_errors=True)


def _lock(folder: Path) -> int | None:
    """The lock of a folder, until it is closed or this process ends; None when it is taken or the folder is gone."""
    try:
        found = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    except FileNotFoundError:
        return None
    for _ in range(TRIES):  # another one may only look
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return found
        time.sleep(0.01)
    os.close(found)
    return None


def _held(folder: Path) -> bool:
    """Whether a file is being made, at whichever coordinator of the data folder."""
    try:
        found = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(found, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(found)


def _line(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except FileNotFoundError:
        return ""
