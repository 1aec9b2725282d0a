"""The networks and configurations of the mask experiments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
from edge_bench.data.sources import find

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


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_configurations_name_settings_that_exist(path: Path) -> None:
    from edge_bench.simulation.file import read_config

    from edge_client import toml
    from edge_client.methods import make_method

    for label, table in read_config(toml.read(path)).methods.items():
        made = make_method({"name": label, **table}).model_dump(mode="json")
        for key, value in table.items():
            if key != "name":
                assert made[key] == value, (label, key)
