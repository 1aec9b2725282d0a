"""The networks and configurations of the mask experiments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
from edge_bench.data.sources import find
from edge_bench.reproductions.repeat import summary

from edge_client.errors import DataError

CONFIGS = Path(__file__).parents[1] / "benchmarks" / "configs"


def data_folder() -> Path:
    try:
        return find("mnist", None).parent
    except DataError:
        pytest.skip("the data folder is not beside the checkout")


def test_the_resnet_is_the_one_its_weights_are_for() -> None:
    torch = pytest.importorskip("torch")
    from edge_bench.models import Resnet
    from safetensors.numpy import load_file

    for depth in (20, 56):
        net = Resnet(depth, 10)
        stored = load_file(data_folder() / "weights" / f"resnet{depth}_cifar10.safetensors")
        own = {f"module.{k}": tuple(v.shape) for k, v in net.state_dict().items() if "num_batches" not in k}
        assert {k: v.shape for k, v in stored.items()} == own
        assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


TRAINING = """
import torch
from torch import nn
from edge_bench.pretrain import _trained

torch.manual_seed(1)
torch.set_num_threads(1)
xs, ys = torch.rand(640, 1, 8, 8, generator=torch.Generator().manual_seed(2)), torch.arange(640) % 3
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
_trained(net, xs, ys, 2)
values = torch.cat([p.flatten().float() for p in net.state_dict().values()])
print(torch.backends.cpu.get_cpu_capability(), *(float(v).hex() for v in values))
"""


def test_each_processor_trains_the_same_weights() -> None:
    pytest.importorskip("torch")
    plain = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    here, there = (
        subprocess.run(
            [sys.executable, "-c", TRAINING], env=os.environ | env, capture_output=True, text=True, check=True
        ).stdout.split()
        for env in ({}, plain)
    )
    assert there[0] == "DEFAULT"  # arithmetic of the oldest processor, without vector instructions
    assert len(here) > 400
    assert here[1:] == there[1:]


@pytest.mark.parametrize("name", ["masks_mnist", "masks_mnist_all", "masks_cifar100"])
def test_the_configurations_name_settings_that_exist(name: str) -> None:
    from edge_bench.simulation.file import read_config

    from edge_client import toml
    from edge_client.methods import make_method

    config = read_config(toml.read(CONFIGS / f"{name}.toml"))
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
