"""A user's own data: images in folders, a Hugging Face data set, a Python function, a device's files."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.metadata import EntryPoint, entry_points
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge_bench.data import own as own_data
from edge_bench.data.datasets import divide, divided, load, read, write
from edge_bench.data.own import DeviceFiles
from edge_bench.data.sources import Samples
from edge_bench.data.table import SPLITS, DataConfig
from edge_bench.simulation.file import SimulationConfig, find_bundle, open_simulation, read_config
from edge_bench.simulation.split import split
from PIL import Image

from edge_client import extras
from edge_client.authored import AuthorError
from edge_client.bundle import Input, Manifest, Normalisation
from edge_client.data import fit
from edge_client.data import read as read_file
from edge_client.errors import ConfigError, DataError
from edge_client.targets import Classification, Regression


def manifest(shape: tuple[int, ...], classes: int) -> Manifest:
    """What a bundle of this input and so many classes says about them."""
    small = find_bundle("digits").manifest
    target = Classification(classes=classes)
    return small.model_copy(update={"input": Input(shape=shape, dtype="float32"), "target": target})


# --- keys that change nothing


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"name": "digits", "split": "iid", "alpha": 0.3}, r'\[data\] setting alpha = 0.3: .*split = "dirichlet"'),
        ({"name": "digits", "alpha": 0.5}, 'alpha = 0.5: .*split = "dirichlet"'),  # the default, but it says something
        ({"name": "digits", "classes": 3}, 'classes = 3: .*split = "classes"'),
        ({"name": "digits", "split": "classes", "balance": 0.5}, "balance = 0.5: .*`per_class`"),
        ({"name": "digits", "per_class": 5}, 'per_class = 5: .*split = "classes"'),
        ({"name": "mnist", "characters": 9}, "characters = 9: .*'mnist' does not use it; it is for shakespeare"),
        ({"name": "digits", "inside": "window"}, "inside = 'window': .*it is for har"),
        ({"name": "digits", "path": "x"}, "path = 'x': .*'digits' does not use it"),
        ({"name": "har", "standardise": True}, "standardise = true: .*it is for npz, images, hf, python"),
        ({"name": "npz", "path": "x", "size": 8}, "size = 8: .*it is for images, hf"),
        ({"name": "images", "path": "x", "factory": "a.py:b"}, "factory = 'a.py:b': .*it is for python"),
        ({"name": "har", "labels": [1, 2]}, r"labels = \[1, 2\]: 'har' is divided by person and used whole; leave"),
        ({"name": "digits", "alhpa": 1}, r"alhpa = 1: there is no such setting; did you mean 'alpha'\?"),
        ({"name": "images", "path": "x", "size": 0}, r"size = 0: give a side of 1 to 4096 pixels, or \[h"),
        ({"name": "images", "path": "x", "mean": 0.5}, "mean = 0.5: give a list, in brackets"),
        ({"name": "images", "path": "x", "size": [0, 5]}, r"size = \[0, 5\]: give a side of 1"),
        ({"name": "images", "path": "x", "size": [5]}, r"size = \[5\]: give a side of 1"),
        ({"name": "digits", "split": "dirichet"}, r"there is no such split; choose natural, .*mean 'dirichlet'\?"),
        ({"name": "imags"}, "name = 'imags': there is no such data set; .*did you mean 'images'"),
        ({"name": "images", "path": "x", "deviation": [0.0]}, r"deviation.0 = 0.0"),
    ],
)  # fmt: skip
def test_a_key_that_the_data_set_or_the_split_does_not_use_is_refused(table: dict[str, Any], words: str) -> None:
    base: dict[str, Any] = {"bundle": "digits", "rounds": 1, "cohort": 1, "methods": {"fedavg": {}}}
    with pytest.raises(ConfigError, match=words):
        read_config({**base, "data": table})


def test_every_key_has_a_row_in_the_manual() -> None:
    page = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
    of_data, _, of_simulation = page.partition("## Every key")[2].partition("## A simulation's other keys")
    assert {name for name in DataConfig.model_fields if f"`{name}`" not in of_data} == set()
    assert {n for n in SimulationConfig.model_fields if f"`{n}`" not in of_simulation} == {"data", "methods", "export"}


# --- images

RED, GREEN, GREY = (255, 0, 0), (0, 255, 0), (102, 102, 102)


def picture(file: Path, colour: Any, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(file)


def test_a_folder_for_each_class_gives_labels_in_the_order_of_names_and_channels_first(tmp_path: Path) -> None:
    for i in range(10):
        picture(tmp_path / "green" / f"{i}.png", GREEN)
        picture(tmp_path / "red" / f"{i}.jpg", RED)
    config = DataConfig(name="images", path=tmp_path, devices=1)
    s, shares = divide(config, 0, read(config))
    assert (s.classes, np.bincount(s.y).tolist()) == (("green", "red"), [10, 10])
    x = s.samples(np.arange(20))
    assert (x.shape, x.dtype) == ((20, 3, 4, 6), np.float32)  # height before width
    assert x[0].reshape(3, -1).mean(axis=1).tolist() == [0, 1, 0]
    assert x[-1, 0].min() > 0.98  # a JPEG is nearly red
    assert list(shares) == ["device-0"]
    devices = load(config, 0, manifest((3, 4, 6), 2))
    assert devices["device-0"].x.shape == (16, 3, 4, 6)


def test_a_folder_for_each_device_above_is_a_natural_split_of_what_the_model_takes(tmp_path: Path) -> None:
    for device in ("north", "south-2"):
        for label, colour in (("a", GREY), ("b", GREEN)):
            for i in range(6):
                picture(tmp_path / device / label / f"{i}.png", colour)
    config = DataConfig(name="images", path=tmp_path)
    devices = load(config, 0, manifest((1, 5, 5), 2))  # the model takes grey images of 5x5
    assert list(devices) == ["north", "south-2"]
    d = devices["north"]
    assert d.x.shape[1:] == (1, 5, 5)
    assert np.allclose(np.unique(d.x[d.y == 0]), 0.4)
    assert len(d.y) + len(d.y_test) == 12
    scaled = load(config.model_copy(update={"mean": (0.4,), "deviation": (0.2,)}), 0, manifest((1, 5, 5), 2))
    assert np.allclose(scaled["north"].x, (d.x - 0.4) / 0.2, atol=1e-5)
    wide = load(config.model_copy(update={"size": (2, 3), "colour": "rgb"}), 0, manifest((18,), 2))
    assert wide["north"].x.shape[1:] == (18,)  # a model that takes flat samples


def test_a_first_image_that_is_grey_makes_no_coloured_one_grey_unasked(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "0.png", 100, mode="L")
    picture(tmp_path / "b" / "0.png", RED)
    config = DataConfig(name="images", path=tmp_path)
    s = read(config)
    assert not isinstance(s, DeviceFiles)
    assert s.samples(np.arange(1)).shape == (1, 1, 4, 6)
    with pytest.raises(
        DataError, match=r'first image is grey and .*/b/0\.png has colour; set colour = "rgb", or "grey"'
    ):
        s.samples(np.arange(2))
    for colour, channels in (("rgb", 3), ("grey", 1)):
        s = read(config.model_copy(update={"colour": colour}))
        assert not isinstance(s, DeviceFiles)
        assert s.samples(np.arange(2)).shape == (2, channels, 4, 6)


@pytest.mark.parametrize("mode", ["P", "RGB", "RGBA", "I;16B"])
def test_a_grey_image_stored_in_another_mode_fits_a_grey_first_one(tmp_path: Path, mode: str) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    Image.fromarray(np.full((4, 4), 0x80, np.uint8)).save(tmp_path / "a" / "0.png")
    if mode == "I;16B":
        Image.frombytes(mode, (4, 4), b"\x80\x00" * 16).save(tmp_path / "b" / "0.tif")
    else:
        Image.fromarray(np.full((4, 4), 0x80, np.uint8)).convert(mode).save(tmp_path / "b" / "0.png")
    s = read(DataConfig(name="images", path=tmp_path))
    assert not isinstance(s, DeviceFiles)
    assert s.samples(np.arange(2)) == pytest.approx(0x80 / 255, abs=1e-6)


def test_sixteen_bits_a_pixel_and_turned_photographs_come_out_right(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((4, 4), 0x8000, np.uint16)).save(tmp_path / "a" / "0.png")
    s = read(DataConfig(name="images", path=tmp_path))
    assert not isinstance(s, DeviceFiles)
    assert np.allclose(s.samples(np.arange(1)), 0x80 / 255)
    turned = Image.new("L", (2, 1), 0)
    turned.putpixel((0, 0), 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned.save(tmp_path / "a" / "0.png", exif=exif)
    s = read(DataConfig(name="images", path=tmp_path, size=(2, 1)))
    assert not isinstance(s, DeviceFiles)
    assert s.samples(np.arange(1))[0, 0].tolist() == [[1], [0]]
    s = read(DataConfig(name="images", path=tmp_path))  # of the size that the first image is seen in
    assert not isinstance(s, DeviceFiles)
    assert s.samples(np.arange(1))[0, 0].tolist() == [[1], [0]]


def test_files_are_opened_only_for_the_samples_in_use(tmp_path: Path) -> None:
    for i in range(30):
        picture(tmp_path / "a" / f"{i:02d}.png", GREY)
    for file in (tmp_path / "a").glob("1?.png"):
        file.write_bytes(b"damaged")
    whole = DataConfig(name="images", path=tmp_path, devices=1)
    with pytest.raises(DataError, match=r"1\d\.png is not a readable image.*remove or replace"):
        load(whole, 0, manifest((3, 4, 6), 2))
    s = read(whole)
    assert not isinstance(s, DeviceFiles)
    assert s.samples(np.arange(5)).shape == (5, 3, 4, 6)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], r"holds no images; they end in \.bmp"),
        (["x.png"], r"x\.png is not like that"),
        (["a/x.png", "d/a/x.png"], r"; a/x\.png is not like that"),
        (["a/x.png", "a/y.png", "stray.png"], r"; stray\.png is not like that"),
        (["a/b/c/x.png"], "CLASS/image, or all as DEVICE/CLASS/image"),
        (["anna/a/x.png", "Test/a/x.png"], "folders of devices, such as anna, beside Test, which names a part"),
    ],
)
def test_folders_of_another_shape_are_refused(files: list[str], words: str, tmp_path: Path) -> None:
    for file in files:
        picture(tmp_path / file, GREY)
    with pytest.raises(DataError, match=words):
        read(DataConfig(name="images", path=tmp_path))
    with pytest.raises(DataError, match="no folder"):
        read(DataConfig(name="images", path=tmp_path / "none"))
    with pytest.raises(ConfigError, match="needs `path`"):
        read(DataConfig(name="images"))


def test_a_mean_for_each_channel_must_be_as_many(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "x.png", GREY)
    with pytest.raises(DataError, match="`mean` has 2 values for 3 channels"):
        read(DataConfig(name="images", path=tmp_path, mean=(0.1, 0.2)))


def test_more_samples_than_memory_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(20):
        picture(tmp_path / "a" / f"{i}.png", GREY)
    with pytest.raises(DataError, match=r"20 samples of \(3, 60000, 60000\) take 804\.\d GiB.*lower `devices`"):
        load(DataConfig(name="images", path=tmp_path, devices=1, size=4), 0, manifest((3, 60_000, 60_000), 2))


# --- Hugging Face


def test_a_saved_data_set_is_read_by_its_columns_with_its_own_test_split_and_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"]), "who": datasets.Value("string")}
    )

    def rows(n: int) -> Any:
        pictures = [Image.new("L", (5, 5), 50 * (i % 2)) for i in range(n)]
        who = [f"cam-{i % 2}" for i in range(n)]
        return datasets.Dataset.from_dict({"img": pictures, "label": [i % 2 for i in range(n)], "who": who}, features)

    datasets.DatasetDict({"train": rows(40), "test": rows(12)}).save_to_disk(tmp_path / "set")
    config = DataConfig(name="hf", path=tmp_path / "set", owner="who")
    s = read(config, (1, 5, 5))
    assert not isinstance(s, DeviceFiles)
    assert s.classes == ("cat", "dog")
    assert s.published is not None
    assert s.published.sum() == 12
    devices = load(config, 0, manifest((1, 5, 5), 2))
    assert {name: (len(d.y), len(d.y_test)) for name, d in devices.items()} == {"cam-0": (20, 6), "cam-1": (20, 6)}
    assert np.allclose(np.unique(devices["cam-1"].x), 50 / 255)
    with pytest.raises(
        DataError, match=r"no column 'lable'; set `label` to one of img, label, who; did you mean 'label'"
    ):
        read(config.model_copy(update={"label": "lable"}))


def test_parquet_files_with_lists_of_numbers_and_labels_in_words(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = {"x": [[i / 60, 1.0] for i in range(60)], "label": [("up", "down")[i % 2] for i in range(60)]}
    datasets.Dataset.from_dict(table).to_parquet(tmp_path / "train-00000-of-00001.parquet")
    datasets.Dataset.from_dict({k: v[:20] for k, v in table.items()}).to_parquet(tmp_path / "test-0.parquet")
    s = read(DataConfig(name="hf", path=tmp_path))
    assert not isinstance(s, DeviceFiles)
    assert (s.x.shape, s.x.dtype, s.classes) == ((80, 2), np.float32, ("down", "up"))
    assert s.published is not None
    assert s.published[-20:].all()
    devices = load(DataConfig(name="hf", path=tmp_path, devices=3), 0, manifest((2,), 2))
    assert sum(len(d.y) + len(d.y_test) for d in devices.values()) == 80
    datasets.Dataset.from_dict({"x": ["a text"], "label": [0]}).to_parquet(tmp_path / "one.parquet")
    with pytest.raises(DataError, match="column 'x' holds <U6; write numbers"):
        read(DataConfig(name="hf", path=tmp_path / "one.parquet"))
    with pytest.raises(DataError, match="neither a folder of save_to_disk nor one with Parquet"):
        read(DataConfig(name="hf", path=tmp_path.parent / "nowhere"))


def test_rows_without_a_value_and_no_rows_are_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def config(name: str, **columns: list[Any]) -> DataConfig:
        table = {"x": [[1.0, 2.0]] * 4, "label": [0, 1, 0, 1], "who": ["a", "b", "a", "b"], **columns}
        datasets.Dataset.from_dict(table).to_parquet(tmp_path / f"{name}.parquet")
        return DataConfig(name="hf", path=tmp_path / f"{name}.parquet", owner="who")

    assert isinstance(read(config("whole")), Samples)
    gaps = ("label", [0, None, 1, None]), ("label", ["u", None, "v", None]), ("who", ["a", None, "b", None])
    for key, value in gaps:
        with pytest.raises(DataError, match=f"column '{key}': 2 of 4 rows have no value, first row 1"):
            read(config("gaps", **{key: value}))
    with pytest.raises(DataError, match="holds no samples"):
        read(config("empty", x=[], label=[], who=[]))
    datasets.Dataset.from_dict({"x": [], "label": []}).save_to_disk(tmp_path / "none")
    with pytest.raises(DataError, match="none holds no samples"):
        read(DataConfig(name="hf", path=tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"\[data\] mean is for images, and whole.parquet holds numbers"):
        read(config("whole").model_validate({**config("whole").model_dump(exclude_unset=True), "mean": (0.5,)}))


def test_without_the_package_the_command_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        read(DataConfig(name="hf", path=Path("x")))


# --- Python

X, Y = np.random.default_rng(0).normal(5.0, 3.0, (60, 4)), np.arange(60) % 3


def python(folder: Path, body: str, **arguments: Any) -> DataConfig:
    (folder / "mine.py").write_text(
        "import numpy as np\nX, Y = np.random.default_rng(0).normal(5., 3., (60, 4)), np.arange(60) % 3\n"
        f"def load(n=60):\n    {body}\n"
    )
    given = {"arguments": arguments} if arguments else {}
    return DataConfig(name="python", factory=f"{folder}/mine.py:load", **given)


def test_a_function_returns_arrays_like_a_file_or_a_pair(tmp_path: Path) -> None:
    target = manifest((4,), 3)
    pair = load(python(tmp_path, "return X[:n], Y[:n]", n=40).model_copy(update={"devices": 2}), 1, target)
    assert sum(len(d.y) + len(d.y_test) for d in pair.values()) == 40
    np.savez(tmp_path / "own.npz", x=X, y=Y, owner=np.arange(60) % 2)
    file = load(DataConfig(name="npz", path=tmp_path / "own.npz"), 1, target)
    mapping = load(python(tmp_path, "return {'x': X.tolist(), 'y': Y, 'owner': np.arange(60) % 2}"), 1, target)
    assert list(file) == list(mapping) == ["device-0", "device-1"]
    assert all(np.array_equal(file[d].x, mapping[d].x) for d in file)


def test_a_function_returns_each_device_s_own_arrays_which_are_cut_as_the_device_cuts_them(tmp_path: Path) -> None:
    config = python(tmp_path, "return {f'cam.{k}': {'x': X[k::2], 'y': Y[k::2]} for k in range(2)}")
    target = manifest((4,), 3)
    devices = load(config, 7, target)
    assert list(devices) == ["cam.0", "cam.1"]
    np.savez(tmp_path / "file.npz", x=X[1::2], y=Y[1::2])
    real = fit(read_file(tmp_path / "file.npz"), target, 7)
    assert all(np.array_equal(a, b) for a, b in zip(vars(devices["cam.1"]).values(), vars(real).values(), strict=True))
    chosen = load(config.model_copy(update={"evaluate": "validation"}), 7, target)["cam.1"]
    assert np.array_equal(chosen.x_test, real.x_val)
    assert len(chosen.y_val) == 0
    scaled = load(config.model_copy(update={"standardise": True}), 7, target)
    assert np.abs(np.concatenate([d.x for d in scaled.values()]).mean(axis=0)).max() < 1e-5
    assert list(load(config.model_copy(update={"devices": 1}), 7, target)) == ["cam.0"]
    with pytest.raises(ConfigError, match=r"`split` divides a data set, but mine\.py:load has every device's own"):
        load(DataConfig(**{**config.model_dump(exclude_unset=True), "split": "iid"}), 7, target)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 5", "returned a value of type int; return a mapping with x, y"),
        ("return {}", "returned a value of type dict of 0"),
        ("return X, Y, Y", "returned a value of type tuple of 3"),
        ("return {'X': X, 'y': Y}", r"keys \['X', 'y'\]"),
        ("return {'x': X, 'y': Y, 'own': Y}", "holds .'own'.; known are x, y, owner.*did you mean 'owner'"),
        ("return {'x': X, 'y': Y[:4]}", "give one label a sample"),
        ("return {'x': [[1], [2, 3]], 'y': [0, 1]}", "x is no array"),
        ("return {'x': X, 'y': Y, 'owner': Y - 1}", "owner -1 is negative"),
        ("return {'x': X, 'y': Y, 'owner': np.minimum(np.arange(60), 1)}", "has 1 sample to train on.* at least 2"),
        ("return {'a/b': {'x': X, 'y': Y}}", "'a/b' cannot name a device"),
        ("return {'a': {'x': X, 'y': Y, 'x_val': X}}", "x_val but no y_val"),
        (
            "return {'a': {'x': X, 'y': Y}, 'b': {'x': X[:1], 'y': Y[:1]}}",
            r"mine\.py:load, device 'b' holds 1 sample; .* give this device more, or leave it out",
        ),
    ],
)
def test_what_is_no_data_set_is_refused_with_what_to_return(body: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        load(python(tmp_path, body), 0, manifest((4,), 3))


def test_an_exception_of_the_function_is_the_user_s_and_a_wrong_argument_is_named(tmp_path: Path) -> None:
    with pytest.raises(AuthorError, match=r"mine\.py, line 4, in load: 'return X\[0\]\[99\]': IndexError"):
        read(python(tmp_path, "return X[0][99]"))
    with pytest.raises(ConfigError, match=r"arguments = \{'m': 3\}: got an unexpected keyword argument 'm'"):
        read(python(tmp_path, "return X, Y", m=3))
    with pytest.raises(ConfigError, match="needs `factory`"):
        read(DataConfig(name="python"))


def test_another_package_adds_a_source_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_weather.py").write_text(
        "import numpy as np\ndef load(n=30):\n    return np.zeros((n, 4)), np.arange(n) % 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = EntryPoint("weather", "acme_weather:load", own_data.GROUP)
    found = {own_data.GROUP: [entry]}
    monkeypatch.setattr(extras, "entry_points", lambda group: found.get(group) or entry_points(group=group))
    devices = load(DataConfig(name="weather", arguments={"n": 40}, devices=2), 0, manifest((4,), 3))
    assert sum(len(d.y) + len(d.y_test) for d in devices.values()) == 40
    with pytest.raises(ValueError, match="'weather' does not use it"):
        DataConfig(name="weather", characters=3)


# --- the same files on devices


def test_the_files_of_a_split_are_read_by_devices_and_by_a_simulation_as_the_same_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "run.toml").write_text(
        'bundle = "digits"\nrounds = 1\ncohort = 3\nseed = 4\n[data]\nname = "digits"\ndevices = 3\nvalidation = 0.1\n'
        "[methods.standalone]\n"
    )
    split(tmp_path / "run.toml", tmp_path / "parts")
    said = capsys.readouterr().out
    assert f"--data {tmp_path}/parts/device-0.npz --device device-0" in said
    assert "no device has validation samples" not in said
    _, bundle, devices = open_simulation(tmp_path / "run.toml")
    (tmp_path / "again.toml").write_text(
        'bundle = "digits"\nrounds = 1\ncohort = 3\nseed = 4\n[data]\nname = "npz"\npath = "parts"\n'
        "[methods.standalone]\n"
    )  # a path beside the file, whatever the current folder
    _, _, again = open_simulation(tmp_path / "again.toml")
    real = {name: fit(read_file(tmp_path / "parts" / f"{name}.npz"), bundle.manifest, 4) for name in devices}
    for name, d in devices.items():
        for other in (again[name], real[name]):
            assert all(np.array_equal(a, b) for a, b in zip(vars(d).values(), vars(other).values(), strict=True))
    with pytest.raises(ConfigError, match="is not empty"):
        split(tmp_path / "run.toml", tmp_path / "parts")


def test_a_split_needs_no_methods(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    table = 'bundle = "digits"\nrounds = 1\ncohort = 1\n[data]\nname = "digits"\ndevices = 2\n'
    (tmp_path / "run.toml").write_text(table)
    split(tmp_path / "run.toml", tmp_path / "parts")
    assert {file.name for file in (tmp_path / "parts").glob("*.npz")} == {"device-0.npz", "device-1.npz"}


def test_the_names_of_classes_are_written_beside_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for label in ("oak", "ash"):
        for i in range(10):
            picture(tmp_path / "trees" / label / f"{i}.png", GREY, (8, 8))
    (tmp_path / "run.toml").write_text(
        'bundle = "digits"\nrounds = 1\ncohort = 1\n[data]\nname = "images"\npath = "trees"\ndevices = 1\n'
        'colour = "grey"\n[methods.standalone]\n'
    )
    split(tmp_path / "run.toml", tmp_path / "parts")
    assert (tmp_path / "parts" / "about.toml").read_text() == 'class_names = ["ash", "oak"]\nbetween = [0.0, 1.0]\n'
    assert "no device has validation samples, so each ends with the global model" in capsys.readouterr().out


def test_a_folder_of_files_is_refused_where_one_is_misnamed_or_none_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no \.npz file"):
        read(DataConfig(name="npz", path=tmp_path))
    np.savez(tmp_path / "-x.npz", x=X, y=Y)
    with pytest.raises(DataError, match="'-x' cannot name a device"):
        read(DataConfig(name="npz", path=tmp_path))
    with pytest.raises(DataError, match="cannot name a device"):
        write({"../up": None}, tmp_path / "out")  # type: ignore[dict-item]
    assert not (tmp_path / "out").exists()


def test_raw_samples_are_normalised_as_the_bundle_says_as_on_a_device(tmp_path: Path) -> None:
    np.savez(tmp_path / "raw.npz", x=np.tile(np.float32([0, 1]), (60, 1)), y=np.arange(60) % 2)
    m = manifest((2,), 2)
    takes = m.input.model_copy(update={"normalisation": Normalisation(mean=(1.0,), std=(0.5,))})
    m = m.model_copy(update={"input": takes})
    raw = DataConfig(name="npz", path=tmp_path / "raw.npz", devices=2)
    of_device = fit(read_file(tmp_path / "raw.npz"), m).x[0]
    assert of_device.tolist() == load(raw, 0, m)["device-0"].x[0].tolist() == [-2, 0]
    with pytest.raises(ConfigError, match=r"'digits' says how raw samples are normalised, and so does \[data\]"):
        load(raw.model_copy(update={"standardise": True}), 0, m)


@pytest.mark.parametrize("shape", [(2,), (2, 3), (18,)])
def test_what_the_table_makes_of_raw_samples_is_what_a_bundle_would_say(shape: tuple[int, ...], tmp_path: Path) -> None:
    """So a device's raw file and the split's file hold the same samples."""
    raw = np.random.default_rng(0).normal(1e4, [1e3, 1e-1], (60, 9, 2)).astype(np.float32)
    x = (raw if shape == (18,) else raw[:, : prod(shape) // 2]).reshape(60, *shape)
    np.savez(tmp_path / "raw.npz", x=x, y=np.arange(60) % 2)
    m, config = manifest(shape, 2), DataConfig(name="npz", path=tmp_path / "raw.npz", devices=2, standardise=True)
    found = divided(config, 0, m)
    assert found.normalised
    assert found.normalisation is not None
    takes = Input(shape=shape, normalisation=found.normalisation)
    by_bundle = load(
        config.model_copy(update={"standardise": False}), 0, m.model_copy(update={"input": takes})
    )  # which standardise = false, written out, leaves to the bundle
    for name, d in found.devices.items():
        np.testing.assert_array_equal(d.x, by_bundle[name].x)


def test_pictures_are_normalised_by_channel_also_for_a_model_that_takes_them_flat(tmp_path: Path) -> None:
    for i in range(20):
        picture(tmp_path / "a" / f"{i}.png", (10 * i, 50, 200 - i))
    mean, deviation = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    config = DataConfig(
        name="images", path=tmp_path, devices=1, size=(2, 2), colour="rgb", mean=mean, deviation=deviation
    )
    found = divided(config, 0, manifest((3, 2, 2), 2)).normalisation
    assert found == Normalisation(mean=mean, std=deviation)
    flat = divided(config, 0, manifest((12,), 2)).normalisation
    assert flat == Normalisation(mean=tuple(np.repeat(mean, 4)), std=tuple(np.repeat(deviation, 4)))
    both = divided(config.model_copy(update={"standardise": True}), 0, manifest((3, 2, 2), 2))
    plain = DataConfig(name="images", path=tmp_path, devices=1, size=(2, 2), colour="rgb")
    raw = load(plain, 0, manifest((3, 2, 2), 2))["device-0"]
    assert both.normalisation is not None
    np.testing.assert_allclose(both.normalisation.apply(raw.x), both.devices["device-0"].x, atol=1e-5)


def test_samples_of_other_axes_are_refused_and_not_mixed(tmp_path: Path) -> None:
    x, y = np.arange(40 * 12.0).reshape(40, 2, 2, 3), np.arange(40) % 2
    np.savez(tmp_path / "channels_last.npz", x=x, y=y)
    config = DataConfig(name="npz", path=tmp_path / "channels_last.npz", devices=1)
    with pytest.raises(DataError, match=r"shape \(2, 2, 3\), the model takes \(3, 2, 2\); transpose its axes"):
        load(config, 0, manifest((3, 2, 2), 2))
    with pytest.raises(DataError, match=r"shape \(2, 2, 3\), the model takes \(4, 3\); reshape them"):
        load(config, 0, manifest((4, 3), 2))
    for shape in ((12,), (1, 2, 2, 3)):
        assert load(config, 0, manifest(shape, 2))["device-0"].x.shape[1:] == shape


def test_labels_with_names_are_no_numbers_to_predict_and_have_the_bundles_order(tmp_path: Path) -> None:
    np.savez(tmp_path / "text.npz", x=np.arange(40.0).reshape(40, 1), y=np.array(["9", "10"] * 20))
    config = DataConfig(name="npz", path=tmp_path / "text.npz", devices=1)
    predicts = manifest((1,), 2).model_copy(update={"target": Regression(outputs=1)})
    with pytest.raises(DataError, match="labels are names, such as '10', and the model predicts numbers"):
        load(config, 0, predicts)
    for names, right in ((("10", "9"), True), (("nine", "ten"), True), (("9", "10"), False)):
        named = manifest((1,), 2).model_copy(update={"class_names": names})
        with nullcontext() if right else pytest.raises(DataError, match="numbered 10, 9, those of the bundle 9, 10"):
            assert load(config, 0, named)["device-0"].y.max() == 1
    more = manifest((1,), 3).model_copy(update={"class_names": ("1", "10", "9")})  # of which the data lack the first
    with pytest.raises(DataError, match="numbered 10, 9, those of the bundle 1, 10, 9; give numbers, or export it"):
        load(config, 0, more)


def test_a_devices_file_is_refused_as_join_refuses_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "pi.npz", x=np.zeros((40, 2, 2)), y=np.arange(40) % 2)
    with pytest.raises(DataError, match=r"pi\.npz: a sample has shape \(2, 2\), the model takes \(4,\); reshape them"):
        load(DataConfig(name="npz", path=tmp_path), 0, manifest((4,), 2))


def test_the_margin_around_an_image_stays_zero(tmp_path: Path) -> None:
    raw = np.random.default_rng(0).random((40, 28, 28)).astype(np.float32)
    np.savez(tmp_path / "raw.npz", x=raw, y=np.arange(40) % 2)
    config = DataConfig(name="npz", path=tmp_path / "raw.npz", devices=1, standardise=True)
    found = divided(config, 0, manifest((1, 32, 32), 2))
    assert found.normalisation is not None
    made = found.normalisation.apply(np.pad(raw[:, None], ((0, 0), (0, 0), (2, 2), (2, 2))))
    trained = found.devices["device-0"].x
    assert {a.tobytes() for a in trained} <= {a.tobytes() for a in made}
    assert not trained[:, :, :2].any()


def test_a_device_s_file_is_marked_only_when_its_samples_are_no_raw_ones(tmp_path: Path) -> None:
    np.savez(tmp_path / "raw.npz", x=X, y=Y)
    config = DataConfig(name="npz", path=tmp_path / "raw.npz", devices=2)
    for table, mark in ((config, False), (config.model_copy(update={"standardise": True}), True)):
        found = divided(table, 0, manifest((4,), 3))
        files = write(found.devices, tmp_path / str(mark), found.normalised)
        assert ("normalised" in read_file(files["device-0"]).arrays) is mark


@pytest.mark.parametrize("split", [split for split in SPLITS if split != "natural"])
def test_devices_that_samples_are_dealt_to_do_not_take_the_names_of_owners(split: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=X, y=Y, owner=np.array(["anna", "bob"])[np.arange(60) % 2])
    for count in (2, 3):  # as many as there are owners, and more
        table = {"name": "npz", "path": tmp_path / "own.npz", "split": split, "devices": count}
        assert list(load(DataConfig(**table), 0, manifest((4,), 3))) == [f"device-{k}" for k in range(count)]
    assert list(load(DataConfig(name="npz", path=tmp_path / "own.npz"), 0, manifest((4,), 3))) == ["anna", "bob"]


# --- what looks like data and is not


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"owner": np.where(Y > 0, Y, np.nan)}, "`owner` of sample 0 is nan; give each one"),
        ({"group": np.where(Y > 1, np.nan, Y)}, "`group` of sample 2 is nan"),
        ({"is_test": np.array(["True", "False", "False"])[Y]}, "`is_test` holds other values than true and false"),
        ({"is_test": np.where(Y > 0, 0, np.nan)}, "`is_test` holds other values"),
        ({"is_test": Y < 0}, "`is_test` marks no sample or every one"),
    ],
)
def test_a_value_that_is_missing_or_a_word_is_no_owner_no_group_and_no_mark(arrays: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        own_data.whole({"x": X, "y": Y, **arrays}, "mine.npz")
    marked = own_data.whole({"x": X, "y": Y, "is_test": Y == 0}, "mine.npz").published
    assert marked is not None
    assert marked.sum() == 20


def test_folders_of_splits_are_no_devices(tmp_path: Path) -> None:
    for part, count in (("train", 12), ("Test", 5), ("val", 3)):
        for i in range(count):
            picture(tmp_path / "set" / part / "ab"[i % 2] / f"{i}.png", GREY)
    s = read(DataConfig(name="images", path=tmp_path / "set"))
    assert isinstance(s, Samples)
    assert (s.owner, len(s.y), s.classes) == (None, 20, ("a", "b"))
    assert s.published is not None
    assert s.published.sum() == 5
    for name in ("train", "test"):
        np.savez(tmp_path / f"{name}.npz", x=X, y=Y)
    with pytest.raises(DataError, match=r"has test, train, which name parts of one data set and no devices.*`is_test`"):
        read(DataConfig(name="npz", path=tmp_path))
    with pytest.raises(DataError, match=r"mine\.py:load has train, test, which name parts"):
        read(python(tmp_path, "return {k: {'x': X, 'y': Y} for k in ('train', 'test')}"))


def test_classes_that_are_kept_exist_and_are_named_once(tmp_path: Path) -> None:
    for label in "ab":
        picture(tmp_path / label / "x.png", GREY)
    config = DataConfig(name="images", path=tmp_path, split="iid")
    with pytest.raises(ConfigError, match="has no sample of class 5; leave it out of `labels`"):
        read(config.model_copy(update={"labels": (0, 5)}))
    with pytest.raises(ValueError, match="name each class once"):
        DataConfig(name="images", path=tmp_path, split="iid", labels=(1, 1))
    kept = read(config.model_copy(update={"labels": (1,)}))
    assert isinstance(kept, Samples)
    assert (kept.classes, kept.y.tolist()) == (("b",), [0])


def test_an_image_of_floating_point_values_and_a_mean_in_0_to_255_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "a" / "0.tif")
    s = read(DataConfig(name="images", path=tmp_path))
    assert isinstance(s, Samples)
    with pytest.raises(DataError, match=r"0\.tif has floating-point values"):
        s.samples(np.arange(1))
    with pytest.raises(ValueError, match="less than or equal to 1"):
        DataConfig(name="images", path=tmp_path, mean=(123.7, 116.3, 103.5))
