"""A bundle is written whole: over another one, from inside its folder, and when the export is killed or fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from edge_client.bundle import MANIFEST, WEIGHTS, Bundle, Manifest
from edge_client.errors import ModelError

torch = pytest.importorskip("torch")
from edge_bench import models  # noqa: E402
from edge_export import export_bundle, files  # noqa: E402


def _export(folder: Path, name: str) -> Bundle:
    torch.manual_seed(len(name))
    return export_bundle(
        models.mlp(4, 3), torch.zeros(2, 4), folder, name=name, target={"kind": "classification"}, torch_part=False
    )


def _parts(bundle: Bundle) -> tuple[Manifest, dict[str, bytes]]:
    return bundle.manifest, {part: (bundle.folder / part).read_bytes() for part in bundle.manifest.parts}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Manifest, dict[str, bytes]]]:
    root = tmp_path_factory.mktemp("two")
    return [_parts(_export(root / name, name)) for name in ("old", "newer")]


def test_an_export_into_the_folder_it_runs_in_replaces_the_bundle_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "b"
    _export(folder, "old")
    monkeypatch.chdir(folder)
    for name in ("newer", "newest"):
        assert _export(Path("."), name).manifest.name == name
        assert Bundle.open(Path.cwd()).manifest.name == name
    assert sorted(os.listdir()) == sorted(p.name for p in folder.iterdir())
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_an_existing_folder_may_be_a_mount_point(tmp_path: Path, two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = tmp_path / "volume"
    mount.mkdir()

    def within_one_file_system(act: Callable[..., None]) -> Callable[..., None]:
        def acted(source: Any, target: Any, **more: Any) -> None:
            if (mount in Path(source).parents) != (mount in Path(target).parents):
                raise OSError(errno.EXDEV, "Invalid cross-device link")
            act(source, target, **more)

        return acted

    for name in ("replace", "rename", "link"):
        monkeypatch.setattr(files.os, name, within_one_file_system(getattr(os, name)))
    for made in two:
        files.check_free(mount)
        assert _parts(files.write_bundle(*made, mount)) == made
        assert {p.name for p in mount.iterdir()} == {MANIFEST, *made[1]}


@pytest.mark.parametrize("name", ["old-bundle-of-2025/a", ".maskfleet-old-2025/notes.txt", ".maskfleet-new-1"])
def test_a_folder_that_no_export_left_is_refused_and_stays(name: str, tmp_path: Path, two: Any) -> None:
    folder = tmp_path / "b"
    files.write_bundle(*two[0], folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine")
    with pytest.raises(ModelError, match="other files"):
        files.check_free(folder)
    files.write_bundle(*two[1], folder)
    assert (folder / name).read_text() == "mine"


def test_the_parent_of_an_existing_folder_need_not_be_writable(
    tmp_path: Path, two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_bundle(*two[0], tmp_path / "b")
    make = files.tempfile.mkdtemp

    def not_in_the_parent(prefix: str, dir: Path) -> str:
        if dir == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(dir))
        return make(prefix=prefix, dir=dir)

    monkeypatch.setattr(files.tempfile, "mkdtemp", not_in_the_parent)  # as root may write anywhere
    assert _parts(files.write_bundle(*two[1], tmp_path / "b")) == two[1]


def test_an_export_through_a_link_replaces_what_the_link_names(tmp_path: Path, two: Any) -> None:
    files.write_bundle(*two[0], tmp_path / "b")
    (tmp_path / "link").symlink_to("b")
    files.write_bundle(*two[1], tmp_path / "link")
    assert Bundle.open(tmp_path / "b").manifest.name == "newer"
    assert (tmp_path / "link").is_symlink()


def test_files_that_the_new_bundle_has_not_are_gone(tmp_path: Path, two: Any) -> None:
    files.write_bundle(*two[0], tmp_path / "b")
    manifest, parts = two[1]
    seeded = manifest.model_copy(update={"seed": 1, "parts": {k: v for k, v in manifest.parts.items() if k != WEIGHTS}})
    files.write_bundle(seeded, {k: v for k, v in parts.items() if k != WEIGHTS}, tmp_path / "b")
    assert not (tmp_path / "b" / WEIGHTS).exists()


def _at(count: int, happens: Callable[[], None], act: Callable[..., Any]) -> Callable[..., Any]:
    """`act`, but at its call `count` something else happens."""
    calls = iter(range(1, 1000))

    def acted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            happens()
        return act(*args, **kwargs)

    return acted


@pytest.mark.parametrize("call", ["link", "unlink", "replace", "rmtree"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_kill_leaves_the_old_bundle_or_the_new_one_and_never_a_mixture(
    call: str, count: int, tmp_path: Path, two: Any
) -> None:
    files.write_bundle(*two[0], tmp_path / "b")
    child = os.fork()
    if not child:  # dies within the exchange, as by SIGKILL: no handler runs
        owner = {"link": os, "unlink": Path, "replace": os, "rmtree": files.shutil}[call]
        setattr(owner, call, _at(count, lambda: os._exit(9), getattr(owner, call)))
        files.write_bundle(*two[1], tmp_path / "b")
        os._exit(0)
    os.waitpid(child, 0)
    whole = {}
    for folder in (tmp_path / "b", *(tmp_path / "b").glob(".maskfleet-old-*")):
        if (folder / MANIFEST).exists():
            bundle = Bundle.open(folder)
            whole[bundle.manifest.name] = _parts(bundle)
    assert whole
    for name, (manifest, parts) in whole.items():
        assert (manifest.to_bytes(), parts) == next((m.to_bytes(), p) for m, p in two if m.name == name)
    files.check_free(tmp_path / "b")
    files.write_bundle(*two[1], tmp_path / "b")
    assert Bundle.open(tmp_path / "b").manifest.name == "newer"
    assert {p.name for p in (tmp_path / "b").iterdir()} == {MANIFEST, *two[1][1]}, "nothing of the killed one is left"


@pytest.mark.parametrize("there", [False, True])
def test_exports_into_one_folder_take_turns(
    there: bool, tmp_path: Path, two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, begun, goes = tmp_path / "b", Event(), Event()
    if there:
        files.write_bundle(*two[1], folder)

    def paused() -> None:
        begun.set()
        goes.wait(60)

    monkeypatch.setattr(os, "replace", _at(1, paused, os.replace))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(files.write_bundle, *two[0], folder)
        assert begun.wait(60)
        second = pool.submit(files.write_bundle, *two[1], folder)
        assert not wait([second], 0.2).done
        goes.set()
        assert first.result().manifest == two[0][0]
        assert _parts(second.result()) == two[1]
    assert {p.name for p in folder.iterdir()} == {MANIFEST, *two[1][1]}


@pytest.mark.parametrize("call", ["link", "unlink", "replace"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_ctrl_c_leaves_the_old_bundle_and_nothing_else(
    call: str, count: int, tmp_path: Path, two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_bundle(*two[0], tmp_path / "b")

    def pressed() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, _at(count, pressed, getattr(os, call)))
    with pytest.raises(KeyboardInterrupt):
        files.write_bundle(*two[1], tmp_path / "b")
    monkeypatch.undo()
    assert _parts(Bundle.open(tmp_path / "b")) == two[0]
    assert {p.name for p in (tmp_path / "b").iterdir()} == {MANIFEST, *two[0][1]}
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_full_disk_leaves_the_old_bundle_in_its_place(
    tmp_path: Path, two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_bundle(*two[0], tmp_path / "b")

    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", _at(2, full, os.replace))
    with pytest.raises(OSError, match="No space"):
        files.write_bundle(*two[1], tmp_path / "b")
    assert _parts(Bundle.open(tmp_path / "b")) == two[0]
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
