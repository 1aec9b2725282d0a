"""What the results were to reach: every entry names a row, and the table has what was reached and what was missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from edge_bench.reproductions import goals, reproduction, results_page

from edge_client.errors import ConfigError


def row(score: float, bytes_: float = 1e6, **more: float) -> dict[str, Any]:
    figures = {"score_mean": score, "bytes_of_all_devices": bytes_, **more}
    return {name: {"mean": value, "std": 0.0} for name, value in figures.items()}


def results(**rows: dict[str, Any]) -> dict[str, Any]:
    return {"r": {"summary": {f"t/{label}": found for label, found in rows.items()}}}


def entry(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "goals.toml"
    path.write_text(f'[[goal]]\nwhat = "It"\nrow = "r/t/mine"\n{text}\n')
    return path


@pytest.mark.parametrize("goal", goals.read(results_page.GOALS), ids=lambda t: t.what)
def test_every_goal_names_a_row_of_a_reproduction_and_has_a_bound(goal: goals.Goal) -> None:
    name, task, label = goal.row.split("/")
    r = reproduction.read(name)
    assert task in r.tasks
    assert label in r.methods
    assert goal.of in r.methods or goal.behind is goal.times is None
    assert any(bound is not None for bound in (goal.low, goal.high, goal.behind, goal.times))


def test_every_committed_row_of_a_goal_was_run() -> None:
    assert "not run" not in goals.table(goals.read(results_page.GOALS), results_page.results())


@pytest.mark.parametrize(
    ("bounds", "mine", "due", "found", "met"),
    [
        ("low = 93.0", row(0.9296), "at least 93", "93", True),
        ("low = 93.0", row(0.9294), "at least 93", "92.9", False),
        ("low = 29.0\nhigh = 34.0", row(0.341), "at least 29, at most 34", "34.1", False),
        ('figure = "kept_share"\nhigh = 70.0', row(0.1, kept_share=0.7), "at most 70", "70", True),
        ('figure = "bits_up"\nhigh = 0.66', row(0.1, bits_up=0.6374), "at most 0.66", "0.637", True),
        ("behind = 0.5", row(0.895), "at most 0.5 behind `fedavg`", "89.5, 0.5 behind", True),
        ("behind = 0.5", row(0.894), "at most 0.5 behind `fedavg`", "89.4, 0.6 behind", False),
        ("behind = 1.0\ntimes = 100.0", row(0.91, 9e6), "at most 1 behind `fedavg`, 100 times fewer bytes",
         "91, 1 ahead, 111 times", True),
        ("behind = 1.0\ntimes = 100.0", row(0.91, 11e6), "at most 1 behind `fedavg`, 100 times fewer bytes",
         "91, 1 ahead, 91 times", False),
        ("times = 100.0", row(0.9, 1e7), "100 times fewer bytes", "100 times", True),
        ("times = 1.0", row(0.9, 1e9 / 1.25), "fewer bytes than `fedavg`", "1.25 times", True),
        ("times = 1.0", row(0.9, 1e9), "fewer bytes than `fedavg`", "1.00 times", False),
        ("low = 1.0\nbehind = 0.5", {}, "at least 1, at most 0.5 behind `fedavg`", "not run, not run", False),
        ('of = "none"\nbehind = 0.5\ntimes = 2.0', row(0.9), "at most 0.5 behind `none`, 2 times fewer bytes",
         "not run, not run", False),
    ],
)  # fmt: skip
def test_a_bound_is_met_to_the_digit_that_is_printed(
    bounds: str, mine: dict[str, Any], due: str, found: str, met: bool, tmp_path: Path
) -> None:
    found_goals = goals.read(entry(tmp_path, bounds))
    line = goals.table(found_goals, results(mine=mine, fedavg=row(0.9, 1e9))).splitlines()[2]
    assert line == f"| It | `r/t/mine` | {due} | {found} | {'yes' if met else '**no**'} |"


def test_a_wrong_entry_is_refused_with_its_setting(tmp_path: Path) -> None:
    path = entry(tmp_path, "lowest = 1.0")
    with pytest.raises(ConfigError, match="lowest"):
        goals.read(path)
