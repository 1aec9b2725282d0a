"""Lattice's pruning on exported networks that are no chain of layers: an attention, a GRU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge_bench.data import datasets
from edge_bench.simulation.comparison import run_all
from edge_bench.simulation.file import read_config
from edge_bench.simulation.simulate import Simulated

from edge_client.bundle import Bundle
from edge_client.errors import ConfigError
from edge_client.methods.lattice.prune import choose
from edge_client.methods.shared.shrinking import counts
from edge_client.methods.shared.units import unpacked
from edge_client.targets import Classification

torch = pytest.importorskip("torch")
from edge_export import export_bundle  # noqa: E402
from torch import Tensor as T  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_network_is_small")

TABLE = {
    "bundle": "digits",
    "data": {"name": "digits", "devices": 3, "split": "iid", "samples": 600},
    "rounds": 12,
    "cohort": 3,
    "evaluate_every": 4,
}
PRUNED = {"name": "lattice", "quantum": 2.5, "lr": 0.1, "prune": 0.4, "prune_after": 4}


class Attention(nn.Module):
    """One head over the rows of an image. Nothing reads the products of queries and keys by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.q, self.k, self.v = nn.Linear(8, 16), *(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.wide, self.back, self.head = nn.Linear(16, 20), nn.Linear(20, 16), nn.Linear(16, 10)

    def forward(self, x: T) -> T:
        t = self.inp(x.squeeze(1))
        t = t + torch.softmax(self.q(t) @ self.k(t).transpose(1, 2) / 4, -1) @ self.v(t)
        return self.head((t + self.back(torch.relu(self.wide(t)))).mean(1))


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rnn, self.head = nn.Linear(8, 12), nn.GRU(12, 10, batch_first=True), nn.Linear(10, 10)

    def forward(self, x: T) -> T:
        found: T = self.head(self.rnn(torch.relu(self.inp(x.squeeze(1))))[0].mean(1))
        return found


def made(module: nn.Module, folder: Path) -> Bundle:
    example = torch.zeros(2, 1, 8, 8)
    return export_bundle(module, example, folder, name="net", target=Classification(classes=10), torch_part=False)


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    torch.manual_seed(1)
    return made(Attention(), tmp_path_factory.mktemp("attention"))


@pytest.fixture(scope="module")
def gru(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    torch.manual_seed(1)
    return made(Gru(), tmp_path_factory.mktemp("gru"))


def played(bundle: Bundle, **more: Any) -> Simulated:
    """A federation whose network is pruned after four of its twelve rounds."""
    config = read_config({**TABLE, "methods": {"pruned": {**PRUNED, **more}}})
    devices = datasets.load(config.data, config.seed, bundle.manifest)
    return run_all(config, bundle, devices)["pruned"]


def shares(bundle: Bundle, **keep: float) -> dict[str, float]:
    """The share of its units that each group keeps."""
    model = bundle.model()
    left = counts(unpacked(model.manifest, choose(model.manifest, model.parameters, 0.4, keep)))
    return {g.name: n / g.size for g, n in zip(model.manifest.groups, left, strict=True)}


def learnt(run: Simulated) -> None:
    """The smaller network's last score is above the whole one's, and every model is finite and has pruned units."""
    scores = [row.everyone.mean for row in run.rows if row.everyone is not None]
    assert scores[-1] > scores[0] + 0.1
    assert run.kept_share < 0.9
    for personal in run.personal.values():
        assert np.isfinite(personal.parameters).all()


def test_queries_and_keys_of_an_attention_are_pruned_together_and_the_network_trains_on(attention: Bundle) -> None:
    (group,) = (g for g in attention.manifest.groups if not g.at("reads"))
    assert {p.tensor for p in group.places} == {"q.weight", "k.weight"}
    assert [g.name for g in attention.manifest.groups] == ["inp", "q", "wide"]
    assert shares(attention) == pytest.approx({"inp": 0.4, "q": 0.4, "wide": 0.4}, abs=0.05)
    learnt(played(attention, lr=0.05))


def test_units_of_a_gru_and_those_that_it_reads_stay_unless_they_are_named(gru: Bundle) -> None:
    assert [g.name for g in gru.manifest.groups] == ["inp", "rnn"]
    assert shares(gru) == {"inp": 1.0, "rnn": 1.0}
    with pytest.raises(ConfigError, match=r"removes no unit .*\['inp', 'rnn'\].*prune_keep"):
        played(gru)
    assert shares(gru, rnn=0.5) == {"inp": 1.0, "rnn": 0.5}
    learnt(played(gru, lr=0.3, prune_keep={"rnn": 0.5}))
