"""Bundles by name: built once, found again, refused with a reason."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from edge_bench import bundles

from edge_client.bundle import Bundle
from edge_client.errors import BundleError, ConfigError, StateError

torch = pytest.importorskip("torch")
from edge_bench import pretrain  # noqa: E402


def opened(name: str, cache: Path) -> Bundle:
    """A bundle by its name, with this folder as the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASKFLEET_BUNDLES", str(cache))
        return bundles.open_named(name)


def test_every_name_has_a_builder_and_the_demos_are_the_only_others() -> None:
    assert {*pretrain.DRAWN, *pretrain.TRAINED} == {*bundles.NAMES, "digits", "digits-wide", "har"}


def test_a_bundle_is_built_once_to_the_same_bytes_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened("mlp-mnist", tmp_path / "a")
    other = opened("mlp-mnist", tmp_path / "b")
    assert first.manifest == other.manifest
    assert first.manifest.d == 784 * 300 + 300 + 300 * 100 + 100 + 100 * 10 + 10
    assert [p.name for p in (tmp_path / "a").iterdir()] == [first.folder.name]
    monkeypatch.setattr(bundles, "find_spec", lambda name: None)  # no torch: a built bundle needs none
    monkeypatch.setattr(bundles, "recipe", lambda: first.folder.name[-12:])
    assert opened("mlp-mnist", tmp_path / "a").manifest == first.manifest
    with pytest.raises(ConfigError, match=r"maskfleet\[author\]"):
        opened("mlp-mnist", tmp_path / "c")


@pytest.mark.parametrize(
    "module", ["edge_client.compaction.labels", "edge_client.training.cut_rules", "edge_export.groups"]
)
def test_the_code_that_finds_channel_groups_is_part_of_the_recipe(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bundles.recipe()
    changed = Path(import_module(module).__file__ or "")
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path == changed))
    assert bundles.recipe() != before


def test_changed_code_builds_a_bundle_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "recipe", lambda: "0" * 12)
    old = opened("mlp-mnist", tmp_path)
    monkeypatch.setattr(bundles, "recipe", lambda: "1" * 12)
    new = opened("mlp-mnist", tmp_path)
    assert old.folder != new.folder
    assert np.array_equal(old.model().parameters, new.model().parameters)


def test_an_unknown_name_and_a_folder_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="there are mlp-har"):
        opened("mlp-nowhere", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="MASKFLEET_BUNDLES"):
        opened("mlp-mnist", tmp_path / "file")
