"""Data sets: what is read, how it is divided over devices, and what each device then holds."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from edge_bench.data import datasets, histogram, own, partition, scaling, sources
from edge_bench.data.datasets import divide, load, read
from edge_bench.data.sources import CHARACTERS, Samples
from edge_bench.data.table import SPLITS, DataConfig
from edge_bench.simulation.file import find_bundle
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from edge_client.bundle import Input, Manifest
from edge_client.data import DeviceData, fit
from edge_client.data import read as read_file
from edge_client.errors import ConfigError, DataError, StateError, StorageFullError
from edge_client.targets import Classification, Regression, Sequence, Target

pytest.importorskip("sklearn")
DEALT = [split for split in SPLITS if split != "natural"]
DIGITS = DataConfig(name="digits", devices=4, split="dirichlet", samples=400)


def manifest(shape: tuple[int, ...], target: Target, dtype: Any = "float32") -> Manifest:
    """What a bundle of this input and target says about them."""
    small = find_bundle("digits").manifest
    return small.model_copy(update={"input": Input(shape=shape, dtype=dtype), "target": target})


def here(name: str) -> Path:
    try:
        return sources.find(name, None)
    except DataError:
        pytest.skip("the data folder is not beside the checkout")


# --- reading


def test_labels_keep_their_classes_and_number_them_anew_in_their_order() -> None:
    s = sources.read_digits()
    kept = read(DataConfig(name="digits", labels=(7, 2)))
    assert len(kept.x) == int(np.isin(s.y, (7, 2)).sum())
    assert (kept.x[kept.y == 0] == s.x[s.y == 7]).all()
    assert (kept.x[kept.y == 1] == s.x[s.y == 2]).all()


def test_idx_files_are_read_and_damaged_ones_refused(tmp_path: Path) -> None:
    images = np.arange(20 * 784, dtype=np.uint32).astype(np.uint8).reshape(20, 28, 28)
    header = b"\0\0\x08\x03" + np.array([20, 28, 28], ">u4").tobytes()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
    labels = np.arange(20, dtype=np.uint8) % 10
    header = b"\0\0\x08\x01" + np.array([20], ">u4").tobytes()
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + labels.tobytes()))
    s = sources.read_mnist(tmp_path)
    assert np.array_equal(s.x.reshape(20, 28, 28), images / np.float32(255))
    assert s.y.tolist() == labels.tolist()
    for damaged in (b"", b"junk", gzip.compress(b"\0\0\x0d\x01"), gzip.compress(header + b"123")):
        (tmp_path / "x.gz").write_bytes(damaged)
        with pytest.raises(DataError, match="idx"):
            sources.read_idx(tmp_path / "x.gz")


def test_a_missing_data_set_says_where_it_was_looked_for(tmp_path: Path) -> None:
    for name in sources.FILES:
        with pytest.raises(DataError, match=str(tmp_path)):
            sources.find(name, tmp_path / "none")
    (tmp_path / "x.npz").write_bytes(b"junk")
    for reader in (sources.read_har, sources.read_cifar, sources.read_femnist):
        with pytest.raises(DataError, match=r"x\.npz is not the"):
            reader(tmp_path / "x.npz")


@pytest.mark.parametrize(("name", "images", "tests"), [("cifar10", 20_000, 5_000), ("cifar100", 11_000, 2_000)])
def test_cifar_images_are_normalised_and_channels_first(name: Any, images: int, tests: int) -> None:
    path = here(name)
    s = read(DataConfig(name=name))
    assert s.x.shape == (images, 3 * 32 * 32)
    assert s.published is not None
    assert s.published.sum() == tests
    with np.load(path) as z:
        red = (z["x"][7, :, :, 0].astype(np.float64) / 255 - 0.485) / 0.229
    np.testing.assert_allclose(s.x[7].reshape(3, 32, 32)[0], red, atol=1e-5)


def test_femnist_is_divided_by_writer_with_ink_as_one_and_leafs_own_test_samples() -> None:
    path = here("femnist")
    s = sources.read_femnist(path)
    assert (len(s.x), int(s.published.sum()), len(np.unique(s.owner))) == (14_708 + 1_685, 1_685, 105)  # type: ignore[union-attr]
    with np.load(path) as z:
        assert np.array_equal(s.x[3], 1 - z["x"][3].reshape(-1) / np.float32(255))
        mine = z["writer"] == 4
        wanted = int((mine & (z["is_test"] == 1)).sum()), int((mine & (z["is_test"] == 0)).sum())
    target = manifest((1, 28, 28), Classification(classes=62))
    devices = load(DataConfig(name="femnist", devices=6), 3, target)
    assert list(devices) == [f"writer-{k}" for k in range(6)]
    four = devices["writer-4"]
    assert (len(four.y_test), len(four.y)) == wanted
    chosen = load(DataConfig(name="femnist", devices=6, evaluate="validation"), 3, target)["writer-4"]
    assert len(chosen.y) + len(chosen.y_test) == wanted[1]
    _, shares = divide(DataConfig(name="femnist"), 3, read(DataConfig(name="femnist")))
    rows = np.concatenate([r for share in shares.values() for r in vars(share).values()])
    assert np.array_equal(np.sort(rows), np.arange(len(s.x)))
    assert all(s.published[share.test].all() for share in shares.values())  # type: ignore[index]


def test_shakespeare_windows_follow_one_another_and_the_last_ones_test(tmp_path: Path) -> None:
    text = "".join(CHARACTERS[i % 73] for i in range(80 * 10 + 5))
    roles = [{"text": "short"}, {"text": text}]
    path = tmp_path / "roles.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, roles)).encode()))
    target = manifest((80,), Sequence(steps=80, classes=73), "int64")
    config = DataConfig(name="shakespeare", path=path, characters=500)
    (name, data), *others = load(config, 0, target).items()
    assert (name, others) == ("role-0", [])
    ids = np.arange(805) % 73
    assert np.array_equal(np.concatenate([data.x, data.x_test]).reshape(-1), ids[:800])
    assert np.array_equal(np.concatenate([data.y, data.y_test]).reshape(-1), ids[1:801])
    assert (len(data.y), len(data.y_test)) == (8, 2)
    chosen = load(config.model_copy(update={"evaluate": "validation"}), 0, target)["role-0"]
    assert np.array_equal(chosen.x_test, data.x[6:])
    with pytest.raises(DataError, match="lower `characters`"):
        read(config.model_copy(update={"characters": 5000}))
    path.write_bytes(gzip.compress(json.dumps({"text": "~" * 900}).encode()))
    with pytest.raises(DataError, match="not among the 73"):
        read(config)
    path.write_bytes(gzip.compress(b"[1]"))
    with pytest.raises(DataError, match="not the file of Shakespeare"):
        read(config)


def test_the_roles_of_shakespeare_are_as_many_as_published() -> None:
    s = sources.read_shakespeare(here("shakespeare"), 5000)
    assert len(np.unique(s.owner)) == 266  # type: ignore[arg-type]
    assert s.x.max() == 72
    assert np.array_equal(s.x[0, 1:], s.y[0, :-1])


def test_har_by_person_is_standardised_and_whole() -> None:
    here("har")
    by_person = load(DataConfig(name="har", devices=5), 0, find_bundle("har").manifest)
    assert list(by_person) == [f"person-{k}" for k in range(1, 6)]
    assert sum(len(d.y) + len(d.y_test) for d in by_person.values()) == 347 + 302 + 341 + 317 + 302
    assert all(len(np.unique(d.y)) == 6 for d in by_person.values())
    training = np.concatenate([d.x for d in by_person.values()])
    assert abs(training.mean()) < 0.05
    assert abs(training.std() - 1) < 0.05


@pytest.mark.parametrize("name", ["har", "shakespeare"])
def test_what_belongs_to_a_maker_is_not_divided_otherwise(name: Any) -> None:
    DataConfig(name=name, split="natural")
    for changes in ({"labels": (1,)}, {"samples": 50}, {"split": "iid"}):
        with pytest.raises(ValidationError, match=r"divided by (person|role) and used whole; leave it out"):
            DataConfig(name=name, **changes)


# --- a user's own data


def saved(folder: Path, **arrays: Any) -> DataConfig:
    np.savez(folder / "own.npz", **arrays)
    return DataConfig(name="npz", path=folder / "own.npz")


X, Y = np.random.default_rng(0).normal(5.0, 3.0, (120, 4)), np.arange(120) % 3
OWN = Classification(classes=3)


def test_a_users_own_data_is_divided_by_owner_and_groups_stay_whole(tmp_path: Path) -> None:
    owner = np.repeat(["left-arm", "right_arm"], 60)
    group = np.arange(120) // 6
    config = saved(tmp_path, x=X, y=Y, owner=owner, group=group)
    devices = load(config, 1, manifest((4,), OWN))
    assert list(devices) == ["left-arm", "right_arm"]
    groups = {row.astype(np.float32).tobytes(): g for row, g in zip(X, group, strict=True)}
    for d in devices.values():
        trained, tested = ({groups[row.tobytes()] for row in x} for x in (d.x, d.x_test))
        assert tested
        assert not trained & tested
    again = load(config, 1, manifest((4,), OWN))
    assert all(np.array_equal(devices[k].x, again[k].x) for k in devices)


def rows_of(x: Any) -> set[bytes]:
    return {row.astype(np.float32).tobytes() for row in x}


@pytest.mark.parametrize("split", DEALT)
def test_a_users_test_samples_alone_test_also_when_they_are_dealt_out(split: Any, tmp_path: Path) -> None:
    marked = np.arange(120) % 4 == 0
    config = saved(tmp_path, x=X, y=Y, is_test=marked).model_copy(update={"split": split, "devices": 3, "alpha": 10.0})
    for evaluate in ("test", "validation"):
        parts = load(config.model_copy(update={"evaluate": evaluate}), 1, manifest((4,), OWN)).values()
        tested, trained = (rows_of(np.concatenate(x)) for x in ([d.x_test for d in parts], [d.x for d in parts]))
        if evaluate == "test":
            assert (tested, trained) == (rows_of(X[marked]), rows_of(X[~marked]))
        else:
            assert not rows_of(X[marked]) & (tested | trained)


@pytest.mark.parametrize("split", DEALT)
def test_a_group_without_an_owner_goes_whole_to_one_part_of_one_device(split: Any, tmp_path: Path) -> None:
    group = np.random.default_rng(1).permutation(np.arange(600) % 60)
    x = np.arange(600.0).reshape(600, 1)
    config = saved(tmp_path, x=x, y=group % 3, group=group).model_copy(update={"split": split, "devices": 3})
    holders: dict[int, set[tuple[str, str]]] = {}
    for name, d in load(config, 1, manifest((1,), OWN)).items():
        for part, samples in (("train", d.x), ("test", d.x_test)):
            for row in samples.ravel().astype(int).tolist():
                holders.setdefault(int(group[row]), set()).add((name, part))
    assert all(len(places) == 1 for places in holders.values())
    assert {part for places in holders.values() for _, part in places} == {"train", "test"}


def test_groups_that_a_division_cannot_keep_whole_are_refused(tmp_path: Path) -> None:
    group = np.arange(120) // 2
    config = saved(tmp_path, x=X, y=Y, group=group)
    for changes, words in (
        ({"split": "dirichlet"}, "a group of own.npz has several classes"),
        ({"split": "classes", "per_class": 5}, "`per_class` draws single samples"),
    ):
        with pytest.raises(ConfigError, match=words):
            divide(config.model_copy(update=changes), 0, read(config))
    few = saved(tmp_path, x=X, y=Y, group=np.arange(120) // 40).model_copy(update={"devices": 4})
    with pytest.raises(ConfigError, match="4 devices cannot each get one of 3 groups"):
        divide(few, 0, read(few))


def test_too_few_samples_are_refused_with_how_many_the_devices_take(tmp_path: Path) -> None:
    for devices, words in ((1, "devices = 1 takes 10 samples, .* there are 5"), (2, "devices = 2 takes 20 samples")):
        few = saved(tmp_path, x=X[:5], y=Y[:5]).model_copy(update={"devices": devices})
        with pytest.raises(ConfigError, match=f"{words}.*or more samples"):
            divide(few, 0, read(few))


def test_a_feature_that_is_constant_in_training_stays_small_when_standardised(tmp_path: Path) -> None:
    x = np.concatenate([np.full((120, 1), 0.1), np.zeros((120, 1)), X * 1e-8], axis=1)
    config = saved(tmp_path, x=x, y=Y, owner=np.repeat([0, 1], 60)).model_copy(update={"standardise": True})
    training = np.concatenate([d.x for d in load(config, 1, manifest((6,), OWN)).values()])
    assert np.abs(training).max() < 10
    assert np.abs(training[:, 2:].std(axis=0) - 1).max() < 0.2


@pytest.mark.parametrize("kind", [str, object, bytes])
def test_labels_that_are_text_are_numbered_in_the_order_of_their_names(kind: type, tmp_path: Path) -> None:
    text = np.array(["walk", "sit", "run"])[Y].astype(str if kind is object else kind).astype(kind)
    owner = np.array(["left", "right"])[np.arange(120) % 2].astype(object)  # both as a column of pandas has them
    found = own.returned(lambda: {"x": X, "y": text, "owner": owner}, "a function", {})
    assert isinstance(found, Samples)
    assert (found.classes, found.names) == (("run", "sit", "walk"), ("left", "right"))
    assert found.y.tolist() == (2 - Y).tolist()


def test_labels_of_a_file_may_be_text(tmp_path: Path) -> None:
    found = read(saved(tmp_path, x=X, y=np.array(["walk", "sit", "run"])[Y]))
    assert isinstance(found, Samples)
    assert (found.classes, found.y.tolist()) == (("run", "sit", "walk"), (2 - Y).tolist())


def test_own_data_without_owners_is_dealt_and_numbers_can_be_predicted(tmp_path: Path) -> None:
    config = saved(tmp_path, x=X, y=X[:, :2].astype(np.float32))
    devices = load(config.model_copy(update={"devices": 3}), 1, manifest((4,), Regression(outputs=2)))
    assert [len(d.y) + len(d.y_test) for d in devices.values()] == [40, 40, 40]
    with pytest.raises(ConfigError, match="no classes"):
        divide(config.model_copy(update={"split": "dirichlet"}), 0, read(config))


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": X}, "lacks"),
        ({"x": X, "y": Y, "speed": Y}, r"holds \['speed'\]; known are x, y, owner, group, is_test"),
        ({"x": X, "y": Y, "owner": Y[:5]}, "`owner` has shape"),
        ({"x": X, "y": Y, "group": Y[:5]}, "`group` has shape"),
        ({"x": X, "y": Y, "owner": np.repeat(["a", "../b"], 60)}, "cannot name a device"),
        ({"x": np.where(np.arange(120)[:, None] == 7, np.nan, X), "y": Y}, "own.npz: sample 7 holds NaN"),
        ({"x": np.where(np.arange(120)[:, None] == 9, 1e300, X), "y": Y}, "sample 9 holds .* beyond float32"),
        ({"x": X, "y": Y, "group": np.arange(120) // 10, "is_test": np.arange(120) < 47}, "marks a part of group 4"),
        ({"x": X.astype(str), "y": Y}, "own.npz: samples have dtype <U[0-9]+; give numbers"),
        ({"x": X, "y": Y.astype(complex)}, "labels have dtype complex128; number the classes 0, 1, 2"),
    ],
)
def test_a_mistake_in_own_data_is_named(arrays: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        read(saved(tmp_path, **arrays))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"samples": 1798}, "samples = 1798, but digits has 1797"),
        ({"split": "classes", "classes": 11}, "classes = 11, but the samples have 10"),
    ],
)
def test_more_samples_or_classes_than_there_are_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        divide(DataConfig(name="digits", **keys), 0, read(DataConfig(name="digits")))


def test_a_device_with_one_training_sample_keeps_it_when_a_share_is_its_own_validation_part(tmp_path: Path) -> None:
    y = np.append(Y[:30], [0, 0, 0])
    config = saved(tmp_path, x=X[:33], y=y, owner=np.repeat([0, 1], [30, 3]))
    changes: dict[str, Any] = {"evaluate": "validation", "validation": 0.2}
    parts = load(config.model_copy(update=changes), 1, manifest((4,), OWN))
    assert [(len(d.y), len(d.y_val)) for d in parts.values()] == [(15, 3), (1, 0)]


@pytest.mark.parametrize("evaluate", ["test", "validation"])
def test_with_per_class_a_device_has_its_validation_samples_whatever_is_scored(evaluate: Any) -> None:
    config = DataConfig(name="digits", devices=3, split="classes", per_class=10, evaluate=evaluate, test_per_class=7)
    for d in load(config, 1, manifest((64,), Classification(classes=10))).values():
        assert (len(d.y), len(d.y_val), len(d.y_test)) == (20, 10, 14 if evaluate == "test" else 10)


def test_a_label_outside_the_model_s_is_named_by_its_place_in_the_whole_file(tmp_path: Path) -> None:
    config = saved(tmp_path, x=X, y=np.where(np.arange(120) == 77, 3, Y))
    with pytest.raises(DataError, match="label 3 at index 77 is outside"):
        load(config, 0, manifest((4,), OWN))


def test_samples_without_values_are_refused_by_their_shape(tmp_path: Path) -> None:
    config = saved(tmp_path, x=np.zeros((120, 0)), y=Y)
    with pytest.raises(DataError, match=r"a sample has shape \(0,\), the model takes \(4,\)"):
        load(config, 0, manifest((4,), OWN))


def test_fractions_are_not_cut_to_the_whole_numbers_that_a_model_takes(tmp_path: Path) -> None:
    config = saved(tmp_path, x=np.arange(120.0).reshape(120, 1) + 0.7, y=Y)
    with pytest.raises(DataError, match="samples have dtype float32, the model takes whole numbers"):
        load(config, 0, manifest((1,), OWN, "int64"))


def test_own_data_needs_a_path_and_no_unknown_keys() -> None:
    with pytest.raises(ConfigError, match="needs `path`"):
        read(DataConfig(name="npz"))
    with pytest.raises(ValueError, match="volume"):
        DataConfig(name="npz", volume=3)  # type: ignore[call-arg]


# --- dividing


@settings(max_examples=40, deadline=None)
@given(
    split=st.sampled_from([*SPLITS]),
    count=st.integers(1, 12),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_device_gets_enough_and_no_sample_is_dealt_twice(split: Any, count: int, seed: int) -> None:
    y = np.arange(600) % 10
    s = Samples(np.zeros((600, 1), np.float32), y, np.arange(600))
    spread = {"alpha": 1.0} if split == "dirichlet" else {}
    owner = datasets.deal(DataConfig(name="digits", devices=count, split=split, **spread), s, seed)
    sizes = np.bincount(owner[owner >= 0], minlength=count)
    assert len(sizes) == count
    assert sizes.min() >= partition.FEWEST
    if split == "classes":
        assert max(len(np.unique(y[owner == k])) for k in range(count)) <= 2
    else:
        assert (owner >= 0).all()
    if split in ("natural", "iid"):
        assert sizes.max() - sizes.min() <= 1


def test_a_recording_is_never_parted_and_every_class_is_trained_on() -> None:
    y = np.repeat(np.arange(6), 20)
    unit = np.arange(120) // 5  # four recordings of each class
    part = partition.hold_out(y, unit, 3)
    assert all(len(np.unique(part[unit == u])) == 1 for u in range(24))
    assert all(set(part[y == c]) == {0, 1, 2} for c in range(6))
    assert (part == 0).sum() == 60


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 30),
    classes=st.integers(1, 5),
    train=st.integers(1, 12),
    balance=st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    known=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
)
def test_few_samples_of_few_classes_are_the_setting_of_fedmask_and_hermes(
    count: int, classes: int, train: int, balance: float, known: bool, seed: int
) -> None:
    y = np.random.default_rng(0).permutation(np.arange(5000) % 10)
    published = np.arange(5000) % 4 == 0 if known else None
    shares = partition.few_of_classes(y, published, count, seed, classes, (train, 2, 30), balance)
    again = partition.few_of_classes(y, published, count, seed, classes, (train, 2, 30), balance)
    owned = np.concatenate([np.concatenate([s.train, s.validation]) for s in shares])
    tested = np.concatenate([s.test for s in shares])
    assert len(np.unique(owned)) == len(owned)
    assert not set(owned.tolist()) & set(tested.tolist())
    if published is not None:
        assert published[tested].all()
    for share, same in zip(shares, again, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(vars(share).values(), vars(same).values(), strict=True))
        sizes = np.bincount(y[share.train], minlength=10)
        held = np.flatnonzero(sizes)
        assert len(held) == classes
        assert sizes.max() == train
        if classes > 1:
            assert sizes[held].min() == max(round(balance * train), 1)
        assert np.array_equal(np.bincount(y[share.validation], minlength=10)[held], np.full(classes, 2))
        assert np.array_equal(np.bincount(y[share.test], minlength=10)[held], np.full(classes, 30))


def test_the_reduced_row_of_hermes_keeps_its_validation_samples_on_the_device() -> None:
    here("cifar10")
    config = DataConfig(name="cifar10", devices=50, split="classes", per_class=20)
    devices = load(config, 0, manifest((3, 32, 32), Classification(classes=10)))
    assert {(len(d.y), len(d.y_val), len(d.y_test)) for d in devices.values()} == {(40, 10, 200)}
    assert all(set(d.y_test) == set(d.y) == set(d.y_val) for d in devices.values())


def test_too_few_samples_for_the_devices_are_an_error() -> None:
    target = find_bundle("digits").manifest
    with pytest.raises(ConfigError, match="fewer devices"):
        load(DataConfig(name="digits", devices=300), 0, target)
    with pytest.raises(ConfigError, match="lower devices, per_class"):
        load(DataConfig(name="digits", devices=100, split="classes", per_class=20, test_per_class=20), 0, target)


def test_choosing_on_validation_never_touches_the_test_part() -> None:
    target = find_bundle("digits").manifest
    parts = {e: load(DIGITS.model_copy(update={"evaluate": e}), 5, target) for e in ("validation", "test")}
    for name, chosen in parts["validation"].items():
        final = parts["test"][name]
        assert len(final.y) == len(chosen.y) + len(chosen.y_test)
        seen = {row.tobytes() for row in (*chosen.x, *chosen.x_test)}
        assert seen == {row.tobytes() for row in final.x}


def test_devices_hold_a_validation_part_only_when_asked_and_the_test_part_stays(tmp_path: Path) -> None:
    target = find_bundle("digits").manifest
    config = DataConfig(name="digits", devices=3)
    plain = load(config, 5, target)
    held = load(config.model_copy(update={"validation": 0.25}), 5, target)
    for name, data in plain.items():
        assert len(data.y_val) == 0
        mine = held[name]
        assert len(mine.y_val) == int(0.25 * len(data.y))
        assert np.array_equal(mine.x_test, data.x_test)
        rows = np.concatenate([mine.x, mine.x_val])
        assert sorted(map(bytes, rows)) == sorted(map(bytes, data.x))
    for name, path in datasets.write(plain, tmp_path).items():  # an empty part stays empty on a device
        again = fit(read_file(path), target)
        assert all(np.array_equal(again.part(p)[0], plain[name].part(p)[0]) for p in ("train", "validation", "test"))


def test_images_get_a_margin_where_the_model_takes_larger_ones() -> None:
    x = np.arange(2 * 784, dtype=np.float32).reshape(2, 784)
    wide = scaling.shaped(x, (1, 32, 32))
    assert np.array_equal(wide[:, 0, 2:30, 2:30], x.reshape(2, 28, 28))
    assert wide.sum() == x.sum()


# --- what each device holds


def held(*labels: list[int]) -> dict[str, DeviceData]:
    none = np.zeros(0, np.int64)
    return {f"d{i}": DeviceData(none, np.array(y), none, none, none, none) for i, y in enumerate(labels)}


def test_the_table_has_a_bar_for_each_class_and_a_summary_for_the_rest() -> None:
    devices = held([0, 0, 0, 0, 1], [2, 2], [1, 2])
    assert histogram.counts(devices, 3).tolist() == [[4, 1, 0], [0, 0, 2], [0, 1, 1]]
    assert histogram.counts(held([[0, -100], [2, 2]]), 3).tolist() == [[1, 0, 2]]  # -100: a step without a label
    lines = histogram.table(devices, 3, most=2).splitlines()
    assert lines[1] == "d0      5      0      0  █▂ "
    assert lines[2].endswith("  █")
    assert lines[3] == "and 1 more device"
    assert lines[4].startswith("3 devices: 2 to 5 samples (median 2) to train on; 1 to 2 classes (median 2) each; ")
    alike = histogram.table(held([0, 1], [1, 2]), 3).splitlines()[-1]
    assert alike.startswith("2 devices: 2 samples to train on; 2 classes each; ")
    assert histogram.table(held([0]), 3).splitlines()[-1].startswith("1 device: 1 sample to train on; 1 class each; ")


def test_the_file_has_every_part_and_class_of_each_device() -> None:
    record = histogram.record(held([0, 0, 0, 0, 1], [2, 2]), 3)
    assert record["devices"]["d0"] == {"train": 5, "validation": 0, "test": 0, "labels": [4, 1, 0]}
    assert (record["classes"], record["unevenness"]) == (3, histogram.unevenness(np.array([[4, 1, 0], [0, 0, 2]])))


def test_devices_without_samples_to_be_scored_on_are_named() -> None:
    x, y = np.zeros((2, 4), np.float32), np.arange(2)
    none = np.zeros(0, np.int64)
    tested = DeviceData(x, y, none, none, x, y)
    (said,) = histogram.untested({**held([0, 1]), "ann": tested}, "validation")
    assert said.startswith("1 of 2 devices (d0) have no validation samples: they train, but no score counts them")
    assert histogram.untested({"ann": tested}, "test") == []


def test_numbers_to_predict_that_lie_far_from_0_are_named() -> None:
    def predicted(*rows: tuple[float, float]) -> DeviceData:
        y, none = np.array(rows, np.float32), np.zeros((0, 2), np.float32)
        return DeviceData(y, y, none, none, none, none)

    assert histogram.uncentred({"ann": predicted((1, 9), (1, 11)), "bob": predicted((-1, -10))}) == []
    (said,) = histogram.uncentred({"ann": predicted((1, 9), (0, 11)), "bob": predicted((-1, 10))})
    assert said.startswith("the numbers to predict of output 1 have mean 10 and deviation 0.816: ")
    assert histogram.uncentred(held([4], [5])) == []


def test_unevenness_is_nought_for_equal_devices_and_large_for_devices_apart() -> None:
    assert histogram.unevenness(np.array([[2, 2], [4, 4]])) == 0
    assert histogram.unevenness(np.array([[3, 0], [0, 3]])) == 0.5


@pytest.mark.parametrize("classes", [3, 62])
def test_the_plot_is_a_picture(classes: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    histogram.draw(held([0, 1], [2, 2]), classes, tmp_path / "h.png", "labels")
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(StateError, match="choose another place"):
        histogram.draw(held([0]), 1, tmp_path / "none" / "h.png", "labels")
    with pytest.raises(StorageFullError, match="free some space"):
        histogram.draw(held([0]), 1, Path("/dev/full"), "labels")


def test_a_bar_is_the_taller_the_more_labels_and_any_label_shows() -> None:
    assert histogram.bars(np.array([800, 400, 1, 0])) == "█▄▁ "
    assert histogram.bars(np.array([0, 0])) == "  "


def test_many_classes_share_bars_with_their_neighbours() -> None:
    row = np.zeros(130, np.int64)
    row[[0, 2, 129]] = 8, 4, 4
    shown = histogram.bars(row)
    assert len(shown) == 44  # of three classes each, the last of one
    assert (shown[0], shown[1], shown[-1]) == ("█", " ", "▃")


def test_labels_of_the_validation_part_count_as_trained_on() -> None:
    x, none = np.zeros((3, 4), np.float32), np.zeros(0, np.int64)
    devices = {"ann": DeviceData(x, np.array([0, 1, 1]), x[:2], np.array([2, 2]), x[:1], np.array([0]))}
    assert histogram.counts(devices, 3).tolist() == [[1, 2, 2]]
    assert histogram.counts({"bob": replace(devices["ann"], y_val=none)}, 3).tolist() == [[1, 2, 0]]


def test_the_bars_of_a_device_stand_on_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr(histogram.plots, "save", lambda figure, path: drawn.append(figure))
    histogram.draw(held([0, 0, 1], [1, 2, 2, 2]), 3, tmp_path / "h.png", "labels")
    bars = [[(bar.get_y(), bar.get_height()) for bar in c] for c in drawn[0].axes[0].containers]
    assert bars == [[(0, 2), (0, 0)], [(2, 1), (0, 1)], [(3, 0), (1, 3)]]


def test_own_features_are_standardised_by_training_samples_alone_when_asked(tmp_path: Path) -> None:
    """The test samples are a thousand times as large; the training samples end with mean 0 and deviation 1."""
    marked = np.arange(120) % 4 == 0
    far = np.where(marked[:, None], 1000 * X, X)
    config = saved(tmp_path, x=far, y=Y, owner=np.repeat([3, 12], 60), is_test=marked)
    plain = load(config, 1, manifest((4,), OWN))
    assert {name: len(d.y_test) for name, d in plain.items()} == {"device-03": 15, "device-12": 15}
    assert abs(np.concatenate([d.x for d in plain.values()]).mean() - 5) < 1
    scaled = load(config.model_copy(update={"standardise": True, "evaluate": "validation"}), 1, manifest((4,), OWN))
    training = np.concatenate([d.x for d in scaled.values()])
    assert training.mean(axis=0) == pytest.approx(np.zeros(4), abs=1e-5)
    assert training.std(axis=0) == pytest.approx(np.ones(4), abs=1e-4)


def test_samples_that_would_not_fit_into_memory_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """400 samples of 64 float32 take 102,400 bytes, and 256 MiB must stay free."""
    small = find_bundle("digits").manifest

    def free(size: int) -> None:
        monkeypatch.setattr(datasets.psutil, "virtual_memory", lambda: SimpleNamespace(available=size))

    free((1 << 28) + 102_400)
    load(DIGITS, 0, small)
    free((1 << 28) + 102_399)
    with pytest.raises(DataError, match=r"400 samples of .* take 0\.0 GiB and 0\.3 GiB are free; lower `devices`"):
        load(DIGITS, 0, small)
