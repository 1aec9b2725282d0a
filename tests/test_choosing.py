"""Figures of docs/choosing.md and of the pages of methods are those of committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "choosing.md").read_text()
TASKS = {"mnist": "lattice-mnist", "har": "lattice-har", "femnist": "lattice-femnist", "fashion": "lattice-fashion"}
LABELS = {
    "FedAvg": "fedavg",
    "Lattice": "lattice",
    "Lattice, `quantum = 2.5`": "lattice-fine",
    "Lattice, `quantum = 10`": "lattice-10",
    "Lattice, `quantum = 15`": "lattice-thrifty",
    "STC, `keep = 0.04`": "stc-25",
    "STC, `keep = 0.01`": "stc-100",
    "STC, `keep = 0.0025`": "stc-400",
    "EDEN, one bit up": "eden",
}
SHIPPED = {"FedAvg": "fedavg", "Lattice": "lattice", "Lattice, `quantum = 15`, `budget = 400`": "thrifty"}


def result(name: str, part: str = "summary") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name / "result.json").read_text())[part]
    return content


def fewer(times: float) -> str:
    """How many times fewer bytes, in three digits."""
    return f"{times:.1f}" if 1 < times < 10 else f"{float(f'{times:.3g}'):,.0f}"


MEASURED = [(row, name, "fedavg") for row, name in LABELS.items()]
AS_SHIPPED = [(row, f"{name}-default", "fedavg-default") for row, name in SHIPPED.items()]


@pytest.mark.parametrize(("row", "name", "beside"), MEASURED + AS_SHIPPED)
def test_both_tables_have_the_committed_figures(row: str, name: str, beside: str) -> None:
    due = [row]
    for task, place in TASKS.items():
        found = result(place)
        own, whole = found.get(f"{task}/{name}"), found[f"{task}/{beside}"]
        if own is None or own["seeds"] != whole["seeds"]:  # other seeds are not to be compared
            due += ["-", "-"]
            continue
        times = whole["bytes_per_device"]["mean"] / own["bytes_per_device"]["mean"]
        due += [f"{100 * own['score_mean']['mean']:.1f}", fewer(times)]
    measured, _, as_shipped = PAGE.partition("| as shipped |")
    expected = f"| {' | '.join(due)} |"
    assert expected in (measured if beside == "fedavg" else as_shipped).splitlines(), expected


def test_the_sentence_on_shakespeare_has_the_committed_figures() -> None:
    found = result("lattice-shakespeare")
    whole, rows = found["shakespeare/fedavg"], ("lattice", "lattice-no-budget")
    due = []
    for own in (found[f"shakespeare/{row}"] for row in rows):
        behind = f"{100 * (whole['score_mean']['mean'] - own['score_mean']['mean']):.1f}".removeprefix("0")
        due += [behind, fewer(whole["bytes_per_device"]["mean"] / own["bytes_per_device"]["mean"]).partition(".")[0]]
    sentence = r"Lattice is ([\d.]+) points behind FedAvg at (\d+) times .*, and ([\d.]+) behind at (\d+) times"
    (said,) = re.findall(sentence, PAGE.replace("\n", " "))
    assert list(said) == due


def test_the_demo_s_table_has_the_committed_figures() -> None:
    columns = []
    for data in ("digits", "har"):
        folder = ROOT / "benchmarks" / "results" / "demo"
        runs = [json.loads((folder / f"{data}{seed}.json").read_text()) for seed in ("", "-1", "-2")]
        alone, lattice, fedavg = ([run["methods"][m] for run in runs] for m in ("standalone", "lattice", "fedavg"))
        best = [max(run["score_mean"], run["score_mean_after_local_epochs"]) for run in fedavg]
        scores = best, [run["score_mean"] for run in lattice], [run["score_mean"] for run in alone]
        sent, whole = (sum(run["bytes_per_device"] for run in method) for method in (lattice, fedavg))
        compact = runs[0]["compaction"]
        columns.append([
            *(f"{100 * mean(three):.1f}" for three in scores),
            f"1/{whole / sent:,.0f}",
            f"{100 * compact['parameters_compact'] / compact['parameters_dense']:.0f} %",
            f"{compact['latency_dense_ms'] / compact['latency_compact_ms']:.1f}",
        ])  # fmt: skip
    table = re.search(r"^\| \| digits \| HAR \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert table is not None
    cells = [row.strip("| ").split(" | ")[1:] for row in table[1].splitlines()]
    assert cells == [list(row) for row in zip(*columns, strict=True)]


EPOCHS = {"Lattice at its default": "lattice", "Lattice, `epochs = 1`": "one", "Lattice, `lr = 0.03`": "rate",
          "Lattice, `quantum = 2.5`": "fine", "FedAvg, `lr = 0.03`": "fedavg"}  # fmt: skip


@pytest.mark.parametrize("row", EPOCHS)
def test_the_table_of_epochs_has_the_committed_figures(row: str) -> None:
    runs = result("lattice-epochs", "runs")
    mine = [runs[f"digits/{EPOCHS[row]}/{seed}"] for seed in range(6)]
    score, sent = (mean(run[figure] for run in mine) for figure in ("score_mean", "bytes_per_device"))
    line = f"| {row} | {100 * score:.1f} | {sent / 1000:,.0f} |"
    assert line in PAGE.splitlines(), line


def test_the_table_of_kept_models_has_the_committed_figures() -> None:
    page = (ROOT / "docs" / "devices.md").read_text()
    kept = ROOT / "benchmarks" / "results" / "personalise"
    runs = [json.loads((kept / f"digits-{seed}.json").read_text())["methods"] for seed in range(3)]
    for name, label in {"FedMask": "fedmask", "FedAvg": "fedavg", "Lattice": "lattice"}.items():
        mine = [run[label] for run in runs]
        found = (
            [run["rounds"][-1]["score_of_all_devices"]["mean"] for run in mine],
            [run["score_mean_after_local_epochs"] for run in mine],
            [run["score_mean"] for run in mine],
        )
        row = f"| {name} | {' | '.join(f'{100 * sum(scores) / 3:.1f}' for scores in found)} |"
        assert row in page, row


def test_the_tuned_methods_have_the_committed_figures() -> None:
    page = (ROOT / "docs" / "tune.md").read_text()
    run = json.loads((ROOT / "benchmarks" / "results" / "tune" / "residual_digits.json").read_text())["methods"]
    for name, label in {"FedMask": "fedmask", "Lattice": "lattice", "FedAvg": "fedavg"}.items():
        first, best = run[label]["trials"][0], run[label]["best"]
        row = f"| {name} | {100 * first['score']:.1f} | {100 * best['score']:.1f} | {best['bytes'] / 1000:,.0f} |"
        assert row in page, row
    tested = json.loads((ROOT / "benchmarks" / "results" / "tune" / "residual_digits_test.json").read_text())["methods"]
    said = "FedMask from {} to {} % and Lattice from {} to {} %; the tuned FedAvg reaches {} %"
    assert said.format(*(f"{100 * m['score_mean']:.1f}" for m in tested.values())) in page.replace("\n", " ")
    assert f"1/{run['fedavg']['best']['bytes'] / run['lattice']['best']['bytes']:.0f} of its bytes" in page


def test_every_link_of_the_page_is_a_method_s_page() -> None:
    for target in re.findall(r"\((methods/\w+\.md)", PAGE):
        assert (ROOT / "docs" / target).is_file()


def test_the_pages_of_coupled_and_fedpm_have_the_committed_figures() -> None:
    pages, runs = ROOT / "docs" / "methods", result("deltamask-cifar", "runs")
    last = mean(runs[f"mnist/coupled/{seed}"]["last_bytes_down_per_device"] for seed in range(3))
    masked = 265_300  # weights of the layers before the head of mlp-mnist04
    assert f"on `mnist` {8 * last / masked:.2f} bits a parameter" in (pages / "coupled.md").read_text()
    runs = result("fedpm-mnist", "runs")
    ten = [
        mean(point["score"] for seed in range(3) for point in runs[f"mnist/{label}/{seed}"]["curve"][-10:])
        for label in ("fedpm", "fedpm-klms", "coupled")
    ]
    said = "last ten rounds have {:.1f}, {:.1f} and {:.1f}:".format(*(100 * score for score in ten))
    assert said in (pages / "fedpm.md").read_text()


SCORES = [  # page, words with places for scores in per cent, result, rows
    ("bnn", "scores {} %, {} % with counts down, and {} % where", "bnn-har", "har", "bnn bnn-count bnn-frozen"),
    ("bnn", "ReLU {} % (hidenseek-har)", "hidenseek-har", "har", "bnn"),
    ("hidenseek", "{} % with signs, {} with counts;", "hidenseek-har", "har", "hidenseek hidenseek-count"),
    ("hidenseek", "held out {} and {}.", "hidenseek-har", "har-recordings", "hidenseek hidenseek-count"),
    ("signed", "{} % at the rate 100", "hidenseek-har", "har", "signed"),
    ("signed", "recordings held out, {}.", "hidenseek-har", "har-recordings", "signed"),
    ("fedpm", "FedPM reaches {} %", "fedpm-mnist", "mnist", "fedpm"),
    ("fedpm", "KLMS has {} % at .019 up, the entropy {} %", "deltamask-cifar", "mnist", "fedpm-klms fedpm"),
    ("fedmap", "{} % beside FedAvg's {} on MNIST", "fedmap-cifar", "mnist", "fedmap fedavg"),
    ("fedmap", "{} beside {} on Shakespeare", "fedmap-shakespeare", "shakespeare", "fedmap fedavg"),
    ("fedmap", "{} beside {} on CIFAR-10 in 40 rounds", "fedmap-cifar", "cifar10", "fedmap fedavg"),
    ("fedmap", "{} beside {} in 120", "fedmap-cifar", "cifar10-slow", "fedmap fedavg"),
]


@pytest.mark.parametrize(("page", "words", "name", "task", "rows"), SCORES)
def test_a_method_s_page_has_the_committed_scores(page: str, words: str, name: str, task: str, rows: str) -> None:
    found = result(name)
    scores = [f"{100 * found[f'{task}/{row}']['score_mean']['mean']:.1f}" for row in rows.split()]
    text = (ROOT / "docs" / "methods" / f"{page}.md").read_text().replace("\n", " ")
    assert words.format(*scores) in text, words.format(*scores)


COLUMNS = ["lattice-mnist/mnist", "lattice-har/har", "lattice-femnist/femnist", "lattice-fashion/fashion",
           "lattice-mnist/mnist-classes", "lattice-cifar/cifar10", "lattice-cifar/lenet"]  # fmt: skip
ROWS = {"FedAvg, float32": "fedavg", "FedAvg, `average = 0.2`": "fedavg-mean", "default, `quantum = 5`": "lattice",
        "`quantum = 2.5`": "lattice-fine", "`quantum = 10`": "lattice-10", "`quantum = 15`": "lattice-thrifty",
        "`quantum = 15`, `budget = 400`": "thrifty"}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_lattice_s_table_has_the_committed_figures(row: str) -> None:
    page = (ROOT / "docs" / "methods" / "lattice.md").read_text()
    (line,) = re.findall(rf"^\| {re.escape(row)} \|(.*) \|$", page, re.MULTILINE)
    for column, cell in zip(COLUMNS, line.split("|"), strict=True):
        name, task = column.split("/")
        own = result(name).get(f"{task}/{ROWS[row]}")
        if cell.strip() != "-":
            size = own["bytes_of_all_devices"]["mean"] / 1e6
            digits = f"{size:.{0 if size >= 10 else 1 if size >= 1 else 2}f}".removeprefix("0")
            assert cell.strip() == f"{100 * own['score_mean']['mean']:.1f} / {digits}", column


HAR = {"FedAvg": "fedavg", "Standalone": "standalone", "FedMask, its paper's setting": "fedmask-paper",
       "FedMask, HideNseek's setting": "fedmask-hidenseek",
       'FedMask, `keep = 0.8`, `restart = "latent"`, `lr = 45`': "fedmask"}  # fmt: skip


@pytest.mark.parametrize("row", HAR)
def test_fedmask_s_table_has_the_committed_figures(row: str) -> None:
    run = json.loads((ROOT / "benchmarks" / "results" / "har_fedmask.json").read_text())["methods"][HAR[row]]
    scores = (run[score] for score in ("score_mean", "score_worst", "score_mean_after_local_epochs"))
    sizes = (run[f"bytes_{way}_per_device_round"] for way in ("up", "down"))
    line = f"| {row} | {' | '.join([*(f'{100 * x:.1f}' for x in scores), *(f'{x:,.0f}' for x in sizes)])} |"
    assert line in (ROOT / "docs" / "methods" / "fedmask.md").read_text().splitlines(), line
