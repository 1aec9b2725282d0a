"""`result.json` of a reproduction: what it says, and how it is written with the table and the plots.

`stored_runs` reads it, `results_page` makes the table and the plots from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

from edge_bench import provenance
from edge_bench.command_line import write_text
from edge_bench.reproductions import results_page
from edge_bench.reproductions.reproduction import Reproduction
from edge_bench.reproductions.stored_runs import RESULT, Run, stored

LATE = 10
"""The number of last rounds whose mean is the late score. One round's score is noisy where test parts are small."""

AVERAGED = (
    "score_start", "score_mean", "score_worst", "score_mean_after_local_epochs", "best_score", "bits_per_parameter_up",
    "bits_per_parameter_down", "bytes_per_device", "bytes_of_all_devices", "kept_share", "seconds",
)  # fmt: skip


TEXT = {"title", "reference", "minutes", "notes", "full", "tried", "paper"}
"""What a reproduction's file says beside its settings; title, reference, paper and tried stand apart in the result."""


def rounded(value: Any) -> Any:
    """Floats with six significant digits, all the way down: files stay small and readable."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else value


def one_line_each(content: Mapping[str, Any]) -> str:
    """JSON with one line for each run."""
    lines = []
    for name, value in content.items():
        if name in ("runs", "tried_runs"):
            rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f" {json.dumps(name)}: {{\n{rows}\n }}" if rows else f" {json.dumps(name)}: {{}}")
        else:
            lines.append(f" {json.dumps(name)}: " + json.dumps(value, indent=1).replace("\n", "\n "))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def summary(runs: Iterable[Run]) -> dict[str, dict[str, Any]]:
    """By task and method, mean and standard deviation over the seeds."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(f"{run['task']}/{run['label']}", []).append(run)
    out = {}
    for name, mine in groups.items():
        row: dict[str, Any] = {"task": mine[0]["task"], "label": mine[0]["label"], "seeds": [r["seed"] for r in mine]}
        late = [[v for v in r["rounds"]["score_before"][-LATE:] if v is not None] for r in mine]
        figures = {f: [r[f] for r in mine if r.get(f) is not None] for f in AVERAGED}
        figures["late_score"] = [fmean(values) for values in late if values]
        counted = [r["bytes_as_the_paper_counts"] for r in mine if r.get("bytes_as_the_paper_counts")]
        figures |= {f"paper_bytes_{side}": [c[side] for c in counted] for side in ("up", "down")}
        for figure in {name: None for r in mine for name in r.get("small", {})}:
            figures[figure] = [r["small"][figure] for r in mine if "small" in r]
        for figure, values in figures.items():
            if values:
                deviation = stdev(values) if len(values) > 1 else pstdev(values)
                row[figure] = rounded({"mean": fmean(values), "std": deviation})
        out[name] = row
    return out


def merge(name: str, r: Reproduction, command: str, runs: dict[str, Run], tried: dict[str, Run], full: bool) -> Run:
    """The content of `result.json`."""
    settings = r.model_dump(mode="json", exclude=TEXT)
    return {
        "name": name,
        "title": r.title,
        "reference": r.reference,
        "full": full,
        "command": command,
        "commit": provenance.commit(),
        "machine": provenance.machine(),
        "settings": settings,
        "paper": {t: {m: p.model_dump() for m, p in figures.items()} for t, figures in r.paper.items()},
        "summary": summary(runs.values()),
        "tried": [*(t.model_dump() for t in r.tried), *(_attempt(run) for run in tried.values())],
        "runs": runs,
        "tried_runs": tried,
    }


def _attempt(run: Run) -> dict[str, Any]:
    return {
        k: run.get(k) for k in ("task", "label", "seed", "settings", "score_mean", "best_score", "bytes_per_device")
    }


def write(folder: Path, result: Run) -> None:
    """Write a result, its table and its plots; an unchanged file is not written again.

    While every run is the same, the commit and the machine stay those of the result that is there, whatever else the
    reproduction's file says now.
    """
    before = stored(folder)
    if before is not None and all(
        _text(before.get(part, {})) == _text(result[part]) for part in ("runs", "tried_runs")
    ):
        result = {**result, "commit": before.get("commit"), "machine": before["machine"]}
    text = one_line_each(result)
    drawn = all((folder / f"{run['task']}.png").is_file() for run in result["runs"].values())
    if not drawn or not _says(folder / RESULT, text):
        results_page.draw(result, folder)
    for path, content in ((folder / "table.md", results_page.tables(result)), (folder / RESULT, text)):
        if not _says(path, content):
            write_text(path, content)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _says(path: Path, text: str) -> bool:
    """Whether a file is there with this text."""
    return path.is_file() and path.read_bytes() == text.encode()
