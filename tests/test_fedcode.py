"""FedCode: the schedule of clusters and codebooks, k-means, snapping, late devices, hostile payloads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy_mlp import CountingSamples, clusters, counted, mlp
from rounds import M, Rounds, size

from edge_client.errors import LostError, PayloadError
from edge_client.methods import fedcode
from edge_client.methods.fedavg import FedAvg
from edge_client.methods.fedcode import CLUSTERS, FedCode, k_means, nearest
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment


def test_k_means_is_a_fixed_point_of_lloyds_algorithm_and_exact_on_few_values() -> None:
    few = np.array([3, -1, 3, 0.5, -1, 0.5], np.float32)
    found = k_means(few, 8)
    assert found.codebook.tolist() == [-1, 0.5, 3]
    assert found.weights.tolist() == few.tolist()
    w = np.concatenate([np.random.default_rng(0).normal(c, 0.05, 100) for c in (-1, 0, 2)]).astype(np.float32)
    found = k_means(w, 3)
    for i, centre in enumerate(found.codebook):
        assert w[found.clusters == i].mean() == pytest.approx(centre, abs=1e-5)
    assert np.abs(found.weights - w).max() < 0.3


def least_error(values: np.ndarray, clusters: int) -> float:
    """The least squared error of any clustering: all ends of the last cluster, for every number of clusters."""
    v = np.sort(values).astype(np.float64)
    errors = [[float(np.var(v[i:j]) * (j - i)) if i < j else 0.0 for j in range(len(v) + 1)] for i in range(len(v))]
    best = [0.0] + [np.inf] * len(v)
    for _ in range(clusters):
        best = [0.0] + [min(best[i] + errors[i][j] for i in range(j)) for j in range(1, len(v) + 1)]
    return best[-1]


@pytest.mark.parametrize("kind", ["normal", "few large ones", "one outlier", "heavy tails"])
def test_k_means_comes_near_the_least_error_of_any_clustering(kind: str) -> None:
    rng = np.random.default_rng(5)
    w = 0.05 * rng.standard_normal(150)
    if kind == "few large ones":  # as a network's batch-norm scales among its weights
        w[:12] = 1 + 0.3 * rng.standard_normal(12)
    elif kind == "one outlier":
        w[0] = 1e3
    elif kind == "heavy tails":
        w = rng.laplace(size=150) ** 3
    found = k_means(w.astype(np.float32), 8)
    assert len(found.codebook) == 8
    assert float(((found.weights - w) ** 2).sum()) < 1.02 * least_error(w, 8) + 1e-9


@pytest.mark.parametrize(("count", "clusters", "share"), [(150, 3, 0.01), (20_000, 16, 0.01), (20_000, 256, 0.015)])
def test_lloyds_passes_lower_the_error_of_where_they_begin(
    count: int, clusters: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start joins runs of a finer division, whose ends are not yet half-way between two centres."""
    w = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    found = k_means(w, clusters)
    monkeypatch.setattr(fedcode, "PASSES", 0)
    begun = k_means(w, clusters)
    errors = [float(((k.weights - w.astype(np.float64)) ** 2).sum()) for k in (begun, found)]
    assert errors[1] < (1 - share) * errors[0]


def test_lloyds_passes_end_where_each_centre_is_the_mean_of_the_weights_nearest_to_it() -> None:
    w = np.random.default_rng(0).standard_normal(150).astype(np.float32)
    found = k_means(w, 3)
    means = [w[np.abs(w[:, None] - found.codebook).argmin(axis=1) == i].mean() for i in range(3)]
    assert found.codebook == pytest.approx(means, abs=1e-6)


def test_the_nearest_value_is_chosen() -> None:
    codebook, w = np.array([-1, 0, 4], np.float32), np.array([-9, -0.6, 0.1, 2.1, 1.9, 2.0], np.float32)
    assert codebook[nearest(w, codebook)].tolist() == [-1, -1, 0, 4, 0, 0]


def test_the_schedule_of_clusters_and_codebooks() -> None:
    fleet = Rounds(FedCode(clusters=16, epochs=1), rounds=11)
    down, up = [], []
    for _ in range(11):
        fleet.play("a", "b")
        down.append(CLUSTERS in fleet.down["a"].arrays)
        up.append(CLUSTERS in fleet.local["a"].update.arrays)
    assert [i + 1 for i, whole in enumerate(down) if whole] == [1, 2, 5, 10]
    assert [i + 1 for i, whole in enumerate(up) if whole] == [1, 2, 4, 6, 8, 10]
    assert size(fleet.local["a"].update) == 4 * 16
    assert CLUSTERS in fleet.ask("a").arrays  # the last delivery


def test_it_learns() -> None:
    fleet = Rounds(FedCode(lr=0.05))
    for _ in range(6):
        fleet.play("a", "b")
    assert fleet.score("a", "b") > 0.8


def test_a_round_of_clusters_gives_the_mean_of_the_clustered_models_weighted_by_samples() -> None:
    counts = {"a": 30, "b": 90}
    fleet = Rounds(FedCode(clusters=8, epochs=1), data={d: clusters(M, ord(d), n) for d, n in counts.items()})
    fleet.play("a", "b")
    models = [fleet.local[d].trained.parameters.astype(np.float64) for d in counts]
    assert [len(np.unique(w)) for w in models] == [8, 8]
    due = np.average(models, axis=0, weights=list(counts.values()))
    assert np.abs(fleet.state.parameters - due).max() < 1e-6


def test_with_a_value_for_every_weight_and_clusters_in_every_update_it_is_federated_averaging() -> None:
    """Clustering then changes nothing. In a round of codebooks it would: the server does not learn which weight has
    which value."""
    m = mlp(6, 12, 8, 3)
    data = {d: clusters(m, ord(d), n) for d, n in {"a": 30, "b": 90}.items()}
    assert m.d <= 256
    ours = Rounds(FedCode(clusters=256, request_every=1, epochs=2), m, data=data)
    plain = Rounds(FedAvg(epochs=2), m, data=data)
    for devices in ("a", "a", "a", "ab", "ab"):  # one device at first: that is local training
        ours.play(*devices)
        plain.play(*devices)
        assert np.abs(ours.state.parameters - plain.state.parameters).max() < 1e-5
        if devices == "a":
            assert np.abs(ours.state.parameters - ours.local["a"].trained.parameters).max() < 1e-6


def test_a_round_of_codebooks_moves_each_weight_to_the_nearest_value_of_all() -> None:
    fleet = Rounds(FedCode(clusters=8, epochs=1))
    for _ in range(3):
        before = fleet.state.parameters
        fleet.play("a", "b")
    union = np.concatenate([fleet.local[d].update.arrays["codebook"] for d in "ab"])
    due = union[np.abs(before[:, None] - union).argmin(axis=1)]
    assert np.abs(fleet.state.parameters - due).max() < 1e-6


def test_a_codebook_alone_moves_the_devices_own_weights() -> None:
    fleet = Rounds(FedCode(clusters=8, epochs=1))
    for _ in range(2):
        fleet.play("a")
    own, codebook = fleet.kept["a"].model.parameters, fleet.ask("a").arrays["codebook"]
    assert np.array_equal(np.unique(own), fleet.local["a"].update.arrays["codebook"])  # a device keeps what it sent
    due = codebook[np.abs(own[:, None] - codebook).argmin(axis=1)]
    assert np.abs(fleet.receive("a").parameters - due).max() < 1e-6


def test_statistics_travel_with_clusters_and_stay_where_they_are_with_a_codebook_alone() -> None:
    m = counted(M)
    data = {d: clusters(m, ord(d), n) for d, n in (("a", 30), ("b", 60))}
    fleet = Rounds(FedCode(clusters=8, epochs=1), m, data=data, trainer=CountingSamples(m))
    seen = []
    for _ in range(3):
        fleet.play("a", "b")
        seen.append([float(v.buffers[0]) for v in (fleet.received["a"], fleet.received["b"], fleet.state)])
    assert seen == [[0, 0, 50], [50, 50, 100], [80, 110, 100]]  # the mean of 30 and 60 by samples is 50


def test_a_late_device_receives_clusters_and_one_that_lost_its_model_says_so() -> None:
    fleet = Rounds(FedCode(epochs=1))
    for devices in ("ab", "ab", "b"):
        fleet.play(*devices)
    assert CLUSTERS in fleet.ask("a").arrays
    assert CLUSTERS not in fleet.ask("b").arrays
    fleet.kept["b"] = replace(fleet.kept["b"], round=2)
    with pytest.raises(LostError, match="no model of the last one"):
        fleet.receive("b")
    del fleet.kept["b"]
    with pytest.raises(LostError):
        fleet.receive("b")
    fleet.records.pop("b")
    fleet.receive("b")


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"codebook": np.zeros(0, np.float32)},
        {"codebook": np.zeros((2, 2), np.float32)},
        {"codebook": np.array([1, 0], np.float32)},
        {"codebook": np.array([0, np.nan], np.float32)},
        {"codebook": np.arange(999, dtype=np.float32)},
        {"codebook": np.arange(3, dtype=np.float32), CLUSTERS: np.full(40, 255, np.uint8)},
    ],
)
def test_hostile_payloads_are_refused(arrays: dict[str, np.ndarray]) -> None:
    fleet = Rounds(FedCode())
    for round_ in (1, 3):
        a = Assignment(fleet.course, round_, "a")
        payload = Payload(
            {**arrays, **({"buffers": np.zeros(0, np.float32)} if CLUSTERS in arrays else {})}, {"samples": 1}
        )
        with pytest.raises(PayloadError):
            fleet.method.read_update(a, fleet.state, None, payload)
        with pytest.raises(PayloadError):
            fleet.method.receive(a, None, payload)
