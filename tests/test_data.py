"""A device's data file: what is accepted, and the message for each mistake."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequential_bundle import small_manifest

from edge_client.bundle import Manifest
from edge_client.data import DataFile, DeviceData, doubts, fit, read, split
from edge_client.errors import DataError

X = np.arange(60, dtype=np.float64).reshape(20, 3)
Y = np.arange(20) % 2


def saved(folder: Path, **arrays: np.ndarray) -> Path:
    np.savez(folder / "d.npz", **arrays)
    return folder / "d.npz"


def load(path: Path, manifest: Manifest, seed: int = 0) -> DeviceData:
    """A device's file as a client takes it, before and after it has joined."""
    return fit(read(path), manifest, seed)


def test_a_fifth_is_kept_for_testing_when_the_file_has_no_test_samples(tmp_path: Path) -> None:
    data = load(saved(tmp_path, x=X, y=Y), small_manifest())
    assert (len(data.y), len(data.y_test)) == (16, 4)
    assert data.x.dtype == np.float32
    assert sorted(np.concatenate([data.x, data.x_test])[:, 0].tolist()) == X[:, 0].tolist()


def test_the_same_seed_gives_the_same_split_and_another_seed_another(tmp_path: Path) -> None:
    path = saved(tmp_path, x=X, y=Y)
    first, again, other = (load(path, small_manifest(), seed).x_test for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_file_s_own_test_samples_are_used(tmp_path: Path) -> None:
    data = load(saved(tmp_path, x=X, y=Y, x_test=X[:3], y_test=Y[:3]), small_manifest())
    assert (len(data.y), len(data.y_val), len(data.y_test)) == (18, 2, 3)


def test_an_array_that_nothing_reads_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    path = saved(tmp_path, x=X, y=Y, x_tset=X[:3], y_test=Y[:3])
    with pytest.raises(DataError, match=r"holds \['x_tset'\]; known are x, .*normalised.*did you mean 'x_test'"):
        read(path)


def big(samples: int, group: np.ndarray | None = None, **parts: np.ndarray) -> dict[str, np.ndarray]:
    """`samples` rows, each marked by its index, and the group of each."""
    x = np.repeat(np.arange(samples, dtype=np.float64)[:, None], 3, axis=1)
    arrays = {"x": x, "y": np.arange(samples) % 2, **parts}
    return arrays if group is None else {**arrays, "group": group}


def test_a_tenth_of_what_is_left_after_testing_is_kept_for_validation(tmp_path: Path) -> None:
    data = load(saved(tmp_path, **big(100)), small_manifest())
    assert (len(data.y), len(data.y_val), len(data.y_test)) == (72, 8, 20)
    rows = [data.part(name)[0][:, 0] for name in ("train", "validation", "test")]
    assert sorted(np.concatenate(rows).tolist()) == list(range(100))
    for name in ("train", "validation", "test"):
        x, y = data.part(name)
        assert np.array_equal(x[:, 0] % 2, y)


def test_a_device_of_few_samples_or_large_groups_trains_on_all_that_is_not_tested(tmp_path: Path) -> None:
    few = load(saved(tmp_path, **big(24)), small_manifest())
    assert (len(few.y), len(few.y_val), len(few.y_test)) == (18, 2, 4)
    fewer = load(saved(tmp_path, **big(23)), small_manifest())
    assert (len(fewer.y), len(fewer.y_val), len(fewer.y_test)) == (19, 0, 4)
    recordings = np.repeat(np.arange(3), 40)
    large = load(saved(tmp_path, **big(120, recordings)), small_manifest())
    assert (len(large.y), len(large.y_val), len(large.y_test)) == (80, 0, 40)


def test_the_file_s_own_validation_samples_are_used_and_may_be_none(tmp_path: Path) -> None:
    mine = load(saved(tmp_path, **big(100, x_val=X[:7], y_val=Y[:7])), small_manifest())
    assert (len(mine.y), len(mine.y_val), len(mine.y_test)) == (80, 7, 20)
    none = load(saved(tmp_path, **big(100, x_val=X[:0], y_val=Y[:0], x_test=X[:3], y_test=Y[:3])), small_manifest())
    assert (len(none.y), len(none.y_val), len(none.y_test)) == (100, 0, 3)


@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=12), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_no_group_is_in_two_parts_and_no_sample_is_lost(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    group = np.repeat(np.arange(len(sizes)), sizes)
    if len(group) < 2:
        return
    path = tmp_path_factory.getbasetemp() / "grouped.npz"
    np.savez(path, **big(len(group), group))
    data = load(path, small_manifest(), seed)
    parts = [data.part(name)[0][:, 0].astype(int) for name in ("train", "validation", "test")]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(group)))
    held = [set(group[rows].tolist()) for rows in parts]
    assert sum(map(len, held)) == len(held[0] | held[1] | held[2])
    assert held[0]
    assert held[2]
    assert len(parts[1]) <= 0.1 * (len(parts[0]) + len(parts[1])) + 1


def test_no_group_is_on_both_sides_of_the_split() -> None:
    group = np.repeat(np.arange(10), 2)
    stay, gone = split(group, 0, "test", 0.2)
    assert not set(group[stay].tolist()) & set(group[gone].tolist())
    assert (stay ^ gone).all()
    assert gone.sum() == 4


def test_the_smallest_group_is_kept_for_testing_when_all_are_large_and_a_single_group_is_refused() -> None:
    group = np.repeat([3, 5], [12, 8])
    stay, gone = split(group, 0, "test", 0.2)
    assert (int(stay.sum()), int(gone.sum())) == (12, 8)
    with pytest.raises(DataError, match="one group"):
        split(np.zeros(20), 0, "test", 0.2)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": X}, "lacks y;"),
        ({"x": X[:, :2], "y": Y}, "shape (2,), the model takes (3,)"),
        ({"x": X, "y": Y[:5]}, "one label a sample"),
        ({"x": X, "y": Y + 1}, "label 2 at index 1 is outside 0..1"),
        ({"x": X, "y": Y - 1}, "label -1 at index 0"),
        ({"x": X, "y": Y.astype(float)}, "give integers 0..1"),
        ({"x": np.where(X == 7, np.nan, X), "y": Y}, "sample 2 holds NaN"),
        ({"x": X.astype("S3"), "y": Y}, "give numbers"),
        ({"x": X[:1], "y": Y[:1]}, "holds 1 sample; training needs at least 2: give this device more, or leave it"),
        ({"x": X[:0], "y": Y[:0]}, "holds no samples; training needs at least 2"),
        ({"x": X, "y": Y, "group": Y[:3]}, "one group a sample"),
        ({"x": X, "y": Y, "x_test": X}, "has x_test but no y_test"),
        ({"x": X, "y": Y, "y_test": Y}, "has y_test but no x_test"),
        ({"x": X, "y": Y, "x_val": X}, "has x_val but no y_val"),
        ({"x": X, "y": Y, "x_val": X, "y_val": Y[1:]}, "d.npz (val): samples of shape (20, 3)"),
        ({"x": X, "y": Y, "x_val": X, "y_val": Y + 1}, "(validation): label 2 at index 1"),
        ({"x": X, "y": Y, "group": np.zeros(20)}, "d.npz: all samples belong to one group"),
    ],
)
def test_each_mistake_is_named_with_its_value(arrays: dict[str, np.ndarray], said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        load(saved(tmp_path, **arrays), small_manifest())
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x_test": X[:, :2], "y_test": Y}, "d.npz: a sample of x_test has shape (2,), one of x (3,)"),
        ({"x_val": X[:, :2], "y_val": Y}, "d.npz: a sample of x_val has shape (2,), one of x (3,)"),
        (
            {"normalised": np.array([True, False])},
            "d.npz: `normalised` is '[ True False]'; give True or False, one value",
        ),
        (
            {"normalised": np.array("False")},
            "d.npz: `normalised` is 'False'; give True or False, one value that is no text",
        ),
        ({"normalised": np.array(np.nan)}, "d.npz: `normalised` is 'nan'; give True or False"),
    ],
)
def test_what_fits_no_model_is_refused_before_a_device_joins(
    arrays: dict[str, np.ndarray], said: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as error:
        read(saved(tmp_path, x=X, y=Y, **arrays))
    assert said in str(error.value)


def test_a_missing_a_broken_and_a_pickled_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no data file"):
        load(tmp_path / "none.npz", small_manifest())
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 nonsense")
    with pytest.raises(DataError, match="not a readable"):
        load(tmp_path / "broken.npz", small_manifest())
    for name in "xy":  # as columns of text are
        with pytest.raises(DataError, match=rf"d\.npz: {name} holds Python objects; save {name}\.astype"):
            load(saved(tmp_path, **{"x": X, "y": Y, name: np.array([{}], dtype=object)}), small_manifest())


def test_a_single_array_and_a_zip_of_other_things_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "one.npz").open("wb") as file:
        np.save(file, X)
    with pytest.raises(DataError, match=r"not a zip archive of arrays; write x and y with numpy\.savez"):
        load(tmp_path / "one.npz", small_manifest())
    with zipfile.ZipFile(tmp_path / "zip.npz", "w") as z:
        z.writestr("x", b"text")
    with pytest.raises(DataError, match="'x', which is not an array"):
        load(tmp_path / "zip.npz", small_manifest())


def test_a_file_that_lies_about_itself_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """Each makes another part of the readers raise something else."""

    def archive(change: Callable[[bytearray], None]) -> Path:
        data = bytearray(saved(tmp_path, x=X, y=Y).read_bytes())
        change(data)
        (tmp_path / "lies.npz").write_bytes(bytes(data))
        return tmp_path / "lies.npz"

    def directory(offset: int, value: int) -> Callable[[bytearray], None]:
        def change(data: bytearray) -> None:
            for magic, shift in ((b"PK\x03\x04", -2), (b"PK\x01\x02", 0)):
                data[data.index(magic) + offset + shift] = value

        return change

    def header(old: bytes, new: bytes) -> Callable[[bytearray], None]:
        def change(data: bytearray) -> None:
            at = data.index(old)
            data[at : at + len(new)] = new

        return change

    lies = (
        directory(8, 1),  # encrypted
        directory(10, 99),  # compressed as nothing is
        directory(10, 14),  # LZMA that is none
        header(b"(20, 3)", b"(1<<70,"),
        header(b"\x93NUMPY\x01", b"\x93NUMPY\x09"),
        header(b"{'descr'", b"{'\xff\xfe\xfd'"),
    )
    for change in lies:
        with pytest.raises(DataError, match="is not a readable"):
            load(archive(change), small_manifest())


def test_a_header_that_promises_more_than_memory_is_refused(tmp_path: Path) -> None:
    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000, 1000000, 1000000), }"
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as z:
        for name in ("x.npy", "y.npy"):
            z.writestr(name, b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    with pytest.raises(DataError, match="is not a readable"):
        load(tmp_path / "huge.npz", small_manifest())


@given(at=st.integers(0, 10_000), byte=st.integers(1, 255))
@settings(max_examples=150, deadline=None)
def test_a_damaged_file_is_read_or_refused_with_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    np.savez_compressed(path, x=X, y=Y)
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= byte
    path.write_bytes(bytes(data))
    try:
        found = load(path, small_manifest())
    except DataError:
        return
    assert len(found.y) + len(found.y_val) + len(found.y_test) == 20


def doubted(x: np.ndarray, takes: dict[str, object], **flags: object) -> list[str]:
    """What is said of a file with these samples, for a model that takes such ones."""
    m = small_manifest(input={"shape": x.shape[1:], **takes})
    arrays = {"x": x, "y": np.arange(len(x)) % 2, **{name: np.asarray(flag) for name, flag in flags.items()}}
    return list(doubts(arrays, fit(DataFile("d.npz", arrays), m).x, m.input, "d.npz"))


UNIT = np.random.default_rng(3).random((40, 3))
UNEVEN = {"mean": (33.0, 60.0, 90.0), "std": (70.0, 75.0, 90.0)}


@pytest.mark.parametrize(
    ("x", "takes", "said"),
    [
        (np.uint8(UNIT * 255), {"between": (0.0, 1.0)}, "made for 0 to 1"),
        (UNIT, {"between": (0.0, 255.0)}, "made for 0 to 255"),
        (np.uint8(UNIT * 255), {"normalisation": {"mean": (0.5,), "std": (0.3,)}}, "mean 0.5 and std 0.3"),
        (UNIT, {"normalisation": UNEVEN}, "begins with mean 33 and std 70"),
        (UNIT, {"between": (0.0, 1.0)}, None),
        (UNIT * 3 - 1, {"between": (0.0, 1.0)}, None),
        (np.zeros((40, 3)), {"between": (0.0, 1.0)}, None),
        (np.uint8(UNIT * 255), {"between": (0.0, 255.0)}, None),
        (np.uint8(UNIT * 255), {"normalisation": UNEVEN}, None),
        (np.uint8(UNIT * 255), {}, None),
    ],
)
def test_samples_far_from_the_model_s_scale_are_named_in_a_sentence(
    x: np.ndarray, takes: dict[str, object], said: str | None
) -> None:
    found = doubted(x, takes)
    assert len(found) == (said is not None)
    assert said is None or (said in found[0] and found[0].startswith("d.npz: as the model takes them, samples lie"))


def test_a_mark_of_normalisation_counts_for_nothing_where_the_model_says_nothing_and_that_is_said() -> None:
    assert ["marked as normalised" in s for s in doubted(UNIT, {}, normalised=True)] == [True]
    assert ["marked as not normalised" in s for s in doubted(UNIT, {}, normalised=False)] == [True]
    assert not doubted(UNIT, {"between": (0.0, 1.0)}, normalised=True)
    how = {"normalisation": {"mean": (0.5,), "std": (0.3,)}}
    assert not doubted(UNIT, how, normalised=False)
    assert not doubted((UNIT - 0.5) / 0.3, how, normalised=True)
    assert len(doubted(UNIT * 255, how, normalised=True)) == 1


def test_one_sample_or_a_rare_outlier_is_no_doubt() -> None:
    how = {"normalisation": {"mean": (0.5,), "std": (0.3,)}}
    m = small_manifest(input={"shape": (3,), **how})
    assert not list(doubts({}, np.full((1, 3), 0.2, np.float32), m.input, "d.npz"))
    rare = (UNIT - 0.5) / 0.3
    rare[0, 0] = 60.0
    assert not doubted(rare, how, normalised=True)
