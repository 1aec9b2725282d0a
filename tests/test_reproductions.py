"""The reproductions that come with the package, and the committed page of their results."""

from __future__ import annotations

import pytest
from edge_bench.data import datasets
from edge_bench.reproductions import results_page
from edge_bench.reproductions.reproduction import cells, names, read

from edge_client.errors import DataError
from edge_client.methods import make_method

DUE = {
    "fedmask-har", "fedmask-cifar2class", "hidenseek-har", "hidenseek-mnist-dirichlet", "deltamask-cifar",
    "hermes-cifar2class", "fedmap-cifar", "fedmap-shakespeare", "lattice-mnist", "lattice-har", "lattice-femnist",
    "lattice-cifar", "lattice-fashion", "lattice-pruned", "pretrained-femnist", "fedpm-mnist", "frontier",
}  # fmt: skip


def test_every_reproduction_that_is_due_is_there() -> None:
    assert set(names()) >= DUE


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", names())
def test_a_reproduction_s_settings_are_those_that_its_methods_have(name: str, full: bool) -> None:
    r = read(name, full)
    assert r.minutes <= 30
    for cell in cells(r, (0,)):
        make_method(cell.config.methods[cell.label])


@pytest.mark.parametrize("name", names())
def test_the_data_of_a_full_reproduction_can_be_divided_over_its_devices(name: str) -> None:
    r, missing = read(name, full=True), set[str]()
    for seed in r.seeds:
        for config in {cell.task: cell.config for cell in cells(r, (seed,))}.values():
            try:
                shares = datasets.divide(config.data, seed, datasets.read(config.data))[1]
            except DataError as error:
                missing.add(str(error))
                continue
            assert len(shares) >= config.cohort
            assert config.data.devices in (None, len(shares))
            assert all(len(share.train) and len(share.test) for share in shares.values())
    if missing:
        pytest.skip("; ".join(sorted(missing)))


def test_the_page_of_results_is_made_from_the_committed_files() -> None:
    assert results_page.PAGE.read_text() == results_page.page(), "run: python -m edge_bench.reproductions.results_page"
