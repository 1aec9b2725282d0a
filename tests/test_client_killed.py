"""A device killed, or cut off its power, at any instant ends with the same bytes as an undisturbed one."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_rig import Coordinator, device, numpy_trainer, problem  # noqa: F401

from edge_client.events import Event


class _Killed(BaseException):
    """Stands for SIGKILL: no handler of the client sees it as an error."""


class _Disk:
    """A folder on a disk that writes nothing before a sync: names by one of the folder, bytes by one of the file.

    It stands for the worst power cut. The machine's own disk is not synced, which would take long.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bytes: dict[int, bytes] = {}
        self._files: dict[str, int] = {}
        self._open: list[int] = []  # so that no inode number is used twice

    def fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path == self.folder:
            files = [p for p in self.folder.iterdir() if p.is_file()]
            self._files = {p.name: p.stat().st_ino for p in files}
        elif path.is_file():
            self._bytes[path.stat().st_ino] = path.read_bytes()
            self._open.append(os.open(path, os.O_RDONLY))

    def cut(self) -> None:
        """Lose what was not synced."""
        for path in self.folder.iterdir() if self.folder.exists() else ():
            if path.is_file():
                path.unlink()
        for name, number in self._files.items():
            (self.folder / name).write_bytes(self._bytes.get(number, b""))
        self.close()

    def close(self) -> None:
        """Free the inode numbers."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open = []


@pytest.mark.parametrize("power_cut", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize(("method", "rounds"), [("fedavg", 2), ("standalone", 5)])
def test_stopped_at_any_file_operation_or_request_a_device_ends_with_the_same_bytes(
    method: str, rounds: int, power_cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every instant between two disk or network operations of a run is tried in turn.

    The coordinator goes on at once, so a device that comes back is always asked for a later round.
    """
    monkeypatch.setattr(os, "fsync", lambda _: None)
    calm = Coordinator(method, rounds=rounds)
    device(tmp_path / "calm", calm).run()
    real, steps = os.replace, Counter[str]()

    def step(at: int) -> None:
        steps["all"] += 1
        if steps["all"] == at:
            raise _Killed

    tried = 0
    for at in range(1, 200):
        steps.clear()
        coordinator, folder = Coordinator(method, rounds=rounds), tmp_path / str(at)
        folder.mkdir()
        disk = _Disk(folder)

        def fsync(descriptor: int, at: int = at, disk: _Disk = disk) -> None:
            step(at)
            disk.fsync(descriptor)
            step(at)

        def replace(a: Any, b: Any, at: int = at) -> None:
            step(at)  # before the rename: the temporary file is there
            real(a, b)
            step(at)

        class Link(httpx.MockTransport):
            def handle_request(self, request: httpx.Request, at: int = at) -> httpx.Response:
                step(at)
                response = super().handle_request(request)
                step(at)  # the coordinator has acted, its answer is lost
                return response

        monkeypatch.setattr(os, "replace", replace)
        if power_cut:
            monkeypatch.setattr(os, "fsync", fsync)
        options = {"transport": Link(coordinator.handle)}
        try:
            device(folder, coordinator, **options).run()
        except _Killed:
            tried += 1
            if power_cut:
                disk.cut()
            device(folder, coordinator, **options).run()
        disk.close()
        monkeypatch.setattr(os, "replace", real)
        assert coordinator.updates == calm.updates, f"killed at step {at}"
        assert (folder / "personal.onnx").read_bytes() == (tmp_path / "calm" / "personal.onnx").read_bytes()
        if steps["all"] < at:
            break
    assert tried > 30


def test_a_stored_update_that_was_never_sent_is_sent_without_training_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator()

    def dead(request: httpx.Request) -> httpx.Response | None:
        if request.method == "PUT":
            raise _Killed
        return None

    coordinator.fault = dead
    with pytest.raises(_Killed):
        device(tmp_path, coordinator).run()
    coordinator.fault = lambda _: None
    monkeypatch.setattr("edge_client.device.client.run_round", None)  # training again would fail
    assert device(tmp_path, coordinator).run(rounds=1).rounds == 1
    assert list(coordinator.updates) == [1]


def refuse_round_2(coordinator: Coordinator, kind: str, detail: str) -> None:
    """The update of round 2 is refused once; the federation is at round 3 by then."""
    left = [True]

    def fault(request: httpx.Request) -> httpx.Response | None:
        if request.method == "PUT" and "rounds/2/" in request.url.path and left:
            left.clear()
            coordinator.round = 3
            return problem(409, kind, detail)
        return None

    coordinator.fault = fault


def test_a_round_that_went_on_without_the_device_is_dropped_with_what_it_kept(tmp_path: Path) -> None:
    coordinator = Coordinator("standalone")
    refuse_round_2(coordinator, "wrong-round", "the federation is at round 3")
    said = list[Event]()
    result = device(tmp_path, coordinator).run(on_event=said.append)
    assert (result.rounds, sorted(coordinator.updates)) == (2, [1, 3])
    assert [e.round for e in said if e.kind == "dropped"] == [2]
    assert sorted(p.name for p in tmp_path.glob("kept-*")) == ["kept-0000001", "kept-0000003"]


def test_a_device_whose_update_another_one_sent_under_its_name_says_what_to_look_for(tmp_path: Path) -> None:
    coordinator = Coordinator()
    refuse_round_2(coordinator, "conflicting-update", "another body came before")
    said = list[Event]()
    device(tmp_path, coordinator).run(on_event=said.append)
    (dropped,) = (e.text for e in said if e.kind == "dropped")
    assert dropped.endswith(
        f"another body came before; if a copy of {tmp_path} is in use elsewhere, let that device join anew"
    )


def test_after_a_round_free_memory_goes_back_to_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[int]()
    monkeypatch.setattr("edge_client.device.client.memory.give_back", lambda: given.append(1))
    device(tmp_path, Coordinator(rounds=3)).run()
    assert len(given) == 4  # three rounds and the end
