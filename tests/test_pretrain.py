"""The data and networks of the mask experiments."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")
from edge_bench import datasets
from edge_bench.datasets import DataConfig, find, read, read_digits
from edge_bench.repeat import summary

from edge_client.bundle import Bundle
from edge_client.data import fit
from edge_client.data import read as read_file
from edge_client.errors import ConfigError, DataError

CONFIGS = Path(__file__).parents[1] / "benchmarks" / "configs"


def data_folder() -> Path:
    try:
        return find("mnist", None).parent
    except DataError:
        pytest.skip("the data folder is not beside the checkout")


def test_labels_keep_their_classes_and_number_them_anew_in_their_order() -> None:
    x, y = read_digits()
    kept, numbers = read(DataConfig(name="digits", labels=(7, 2)))
    assert len(kept) == int(np.isin(y, (7, 2)).sum())
    assert (kept[numbers == 0] == x[y == 7]).all()
    assert (kept[numbers == 1] == x[y == 2]).all()


def test_har_has_no_labels_to_choose() -> None:
    from edge_bench.datasets import _divided

    with pytest.raises(ConfigError, match="labels"):
        _divided(DataConfig(name="har", labels=(1,)), 0)


def test_cifar_images_are_normalised_and_channels_first() -> None:
    data_folder()
    x, y = read(DataConfig(name="cifar100", labels=(0, 1)))
    assert x.shape == (220, 3 * 32 * 32)
    assert set(y.tolist()) == {0, 1}
    assert -2.2 < x.min() < 0 < x.max() < 2.7


def test_the_resnet_is_the_one_its_weights_are_for() -> None:
    torch = pytest.importorskip("torch")
    from edge_bench.pretrain import Resnet20
    from safetensors.numpy import load_file

    net = Resnet20(10)
    stored = load_file(data_folder() / "weights" / "resnet20_cifar10.safetensors")
    own = {f"module.{k}": tuple(v.shape) for k, v in net.state_dict().items() if not k.endswith("num_batches_tracked")}
    assert {k: v.shape for k, v in stored.items()} == own
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("name", ["masks_mnist", "masks_mnist_all", "masks_cifar100", "masks_random"])
def test_the_configurations_name_settings_that_exist(name: str) -> None:
    from edge_bench.cli import read_toml
    from edge_bench.simulate import read_config

    from edge_client.methods import make_method

    config = read_config(read_toml(CONFIGS / f"{name}.toml"))
    text = (CONFIGS / f"{name}.toml").read_text()
    labels = [line[len("[methods.") : -1].strip('"') for line in text.splitlines() if line.startswith("[methods.")]
    assert list(config.methods) == labels
    for label, table in config.methods.items():
        made = make_method({"name": label, **table}).model_dump(mode="json")
        for key, value in table.items():
            if key != "name":
                assert made[key] == value, (label, key)


def test_a_summary_takes_the_mean_over_seeds() -> None:
    run = {"bits_per_parameter_up": 1.0, "bits_per_parameter_down": 2.0}
    rows = {"rounds": [{"bits_per_parameter_up": 0.5, "bits_per_parameter_down": 0.25}]}
    runs = {f"m/{i}": {"score_mean": 0.5 + i / 4, **run, **rows} for i in (0, 1)}
    made = json.loads(json.dumps(summary(runs)))["m"]
    assert made["score"] == [0.5, 0.75]
    assert made["score_mean"] == 0.625
    assert (made["last_round_bits_up"], made["all_rounds_bits_down"]) == (0.5, 2.0)


def test_devices_hold_a_validation_part_only_when_asked_and_the_test_part_stays(tmp_path: Path) -> None:
    manifest = Bundle.open(Path(datasets.__file__).parent / "bundles" / "digits").manifest
    config = DataConfig(name="digits", devices=3)
    plain = datasets.load(config, 5, manifest)
    held = datasets.load(config.model_copy(update={"validation": 0.25}), 5, manifest)
    for name, data in plain.items():
        assert len(data.y_val) == 0
        mine = held[name]
        assert len(mine.y_val) == int(0.25 * len(data.y))
        assert np.array_equal(mine.x_test, data.x_test)
        rows = np.concatenate([mine.x, mine.x_val])
        assert sorted(map(bytes, rows)) == sorted(map(bytes, data.x))
    for name, path in datasets.write(plain, tmp_path).items():  # an empty part stays empty on a device
        again = fit(read_file(path), manifest)
        assert all(np.array_equal(again.part(p)[0], plain[name].part(p)[0]) for p in ("train", "validation", "test"))
