"""Tables and plots of reproductions, and `docs/results.md`, all made from the committed `result.json` files.

python -m edge_bench.reproductions.results_page          writes docs/results.md and every table.md and PNG
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from edge_bench.command_line import run_module, write_text
from edge_bench.curves import amount
from edge_bench.reproductions import goals, reproduction
from edge_bench.reproductions.stored_runs import stored
from edge_client.bench import plots
from edge_client.errors import MaskfleetError
from edge_client.methods import make_method

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
"""The committed results of a checkout; an installed package has none."""
GOALS = RESULTS / "goals.toml"
PAGE = ROOT / "docs" / "results.md"

HEAD = """# Results

Every table is made from `benchmarks/results/NAME/result.json` by `python -m edge_bench.reproductions.results_page`; run
one again with `maskfleet reproduce NAME` ([how](reproduce.md)). Scores are per cent: each device is scored on its own
test samples, the mean over the devices is weighted by these, and mean and standard deviation over the seeds are shown.

* **ours**: every device's own model from the downlink after the last round; **late**: the same of the last ten rounds'
  cohorts before their local epochs, steadier where test parts are small; **after epochs**: after one more round of
  local epochs; **best round**: the best round's cohort after its local epochs.
* **bits up, down**: payload bits of a device and round for each exchanged parameter.
* **MB in all**: payload bytes of all devices and rounds in both directions, with the container's header, what late
  devices catch up on, what is sent once, and the last downlink to every device. **less**: how many times fewer than the
  baseline's.
* **theirs**: MiB up and down of a device and round as the method's paper counts them, where it has a count of its own.
* **kept**: share of the parameters that the devices' own models keep.
* **earlier version**: the method or the bundle's weights have changed since; the row is from before.
* Cells are run at different times: the file names the commit and the machine of each. A `+` after a commit stands for
  changes that were not committed yet.

## Goals

What each row was to reach: the figures of prototypes that were written from the papers, and our own. The row names the
reproduction, its task and its label below. Three groups were set by us: HAR by whole recordings, and Lattice as shipped
or on two more networks. Not here: that a pre-trained model ends at or above its start (`pretrained-femnist` names the
methods that do not), the speed of the simulator ([speed](reproduce.md#speed)), and the time of [Lattice's
coder](methods/lattice.md#what-coding-costs).

"""

COLUMNS = (
    "method", "paper", "ours", "late", "after epochs", "best round", "bits up", "bits down", "MB in all", "less",
    "theirs", "kept",
)  # fmt: skip
PAPER = COLUMNS.index("paper")
MEASURES = {"final": "ours", "after": "after epochs", "best": "best round"}


def score(row: Mapping[str, Any], figure: str) -> str:
    """A score of a summary's row in per cent with its deviation; "-" when there is none."""
    found = row.get(figure)
    if found is None:
        return "-"
    spread = f" ± {100 * found['std']:.1f}" if len(row["seeds"]) > 1 else ""
    return f"{100 * found['mean']:.1f}{spread}"


def printed(figures: Mapping[str, Any] | None) -> str:
    """What the paper prints."""
    if not figures:
        return "-"
    parts = []
    if figures["score"] is not None:
        parts.append(f"{figures['score']:g}" + (f" ± {figures['spread']:g}" if figures["spread"] is not None else ""))
    return "; ".join([*parts, *([figures["says"]] if figures["says"] else [])]) or "-"


def line(
    row: Mapping[str, Any],
    seeds: list[int],
    paper: Mapping[str, Any] | None,
    baseline: Mapping[str, Any] | None,
    old: bool,
) -> list[str]:
    """One method's cells; its seeds are named when they are not `seeds`, the table's."""
    total = row["bytes_of_all_devices"]["mean"]
    of = baseline["bytes_of_all_devices"]["mean"] if baseline else 0.0
    kept = row["kept_share"]["mean"]
    own = sorted(row["seeds"])
    remarks = [] if own == seeds else [f"{'seed' if len(own) == 1 else 'seeds'} {', '.join(map(str, own))}"]
    remarks += ["earlier version"] * old
    return [
        row["label"] + (f" ({'; '.join(remarks)})" if remarks else ""),
        printed(paper),
        score(row, "score_mean"),
        score(row, "late_score"),
        score(row, "score_mean_after_local_epochs"),
        score(row, "best_score"),
        f"{row['bits_per_parameter_up']['mean']:.3g}",
        f"{row['bits_per_parameter_down']['mean']:.3g}",
        f"{total / 1e6:.3g}",
        f"{of / total:.3g}x" if of and total else "-",
        " / ".join(f"{row[f'paper_bytes_{side}']['mean'] / 2**20:.3g}" for side in ("up", "down"))
        if "paper_bytes_up" in row
        else "-",
        f"{100 * kept:.0f} %" if kept < 1 else "all",
    ]


def earlier(run: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether the run, where its method is installed, would end otherwise today with a result's `settings`."""
    label, task = run["label"], settings["tasks"][run["task"]]
    own = reproduction.merged(settings["methods"][label], task["methods"].get(label, {}))
    try:
        method = make_method({"name": label, **own})
    except MaskfleetError:
        return False
    return not reproduction.stands(run, method, task["bundle"])


def tables(result: Mapping[str, Any]) -> str:
    """A result as markdown: for each task a table "paper | ours"."""
    settings = result["settings"]
    measure, out = MEASURES[settings["measure"]], []
    for task, what in settings["tasks"].items():
        rows = {r["label"]: r for r in result["summary"].values() if r["task"] == task}
        seeds = sorted({seed for r in rows.values() for seed in r["seeds"]})
        if not rows:
            out.append(f"not run yet: {task}\n")
            continue
        if len(settings["tasks"]) > 1:
            out.append(f"### {task}\n")
        out.append(
            f"`{what['bundle']}`, {what['data']['name']}, {what['rounds']} rounds of {what['cohort']} devices, "
            f"seeds {', '.join(map(str, seeds)) or 'none'}."
            + (f" The paper's score is to be compared with *{measure}*.\n" if result["paper"] else "\n")
        )
        paper, baseline = result["paper"].get(task, {}), rows.get(settings["baseline"])
        out += [row_of(COLUMNS, result), row_of(["---"] * 2 + ["---:"] * (len(COLUMNS) - 2), result)]
        old = {r["label"] for r in result["runs"].values() if r["task"] == task and earlier(r, settings)}
        for label in settings["methods"]:
            if label in rows:
                out.append(row_of(line(rows[label], seeds, paper.get(label), baseline, label in old), result))
            elif label in paper:
                out.append(row_of([label, printed(paper[label]), "not run", *["-"] * (len(COLUMNS) - 3)], result))
        out.append("")
        starts = {r["seed"]: r.get("score_start") for r in result["runs"].values() if r["task"] == task}
        if starts and None not in starts.values():
            out.append(against_start(fmean(starts.values()), rows) + "\n")
        if any("multiply_adds_small" in row for row in rows.values()):
            out += [*small_models(rows), ""]
    return "\n".join(out)


def row_of(cells: Sequence[str], result: Mapping[str, Any]) -> str:
    """A line of a table; the column of the paper is left out where no paper is."""
    return f"| {' | '.join(cell for i, cell in enumerate(cells) if i != PAPER or result['paper'])} |"


def against_start(start: float, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """What the bundle scores before any training, and which methods end below that."""
    under = [label for label, row in rows.items() if row["score_mean"]["mean"] < start]
    ends = f"below that end {', '.join(f'`{label}`' for label in under)}" if under else "no method ends below that"
    return f"The bundle's own weights score {100 * start:.1f}; {ends}."


def small_models(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A table of what the pruned models save, whole network -> small one."""
    figures = ("parameters", ",.0f"), ("multiply_adds", ",.0f"), ("inference_ms", ".3f"), ("step_ms", ".2f")
    out = [
        "| method | parameters | multiply-adds | inference, ms | training step of 32, ms |",
        f"| --- |{' ---: |' * 4}",
    ]
    for label, row in rows.items():
        if "multiply_adds_small" not in row:
            continue
        cells = []
        for name, form in figures:
            whole, small = (row[f"{name}_{which}"]["mean"] for which in ("whole", "small"))
            cells.append(f"{whole:{form}} -> {small:{form}} ({small / whole:.2f})")
        out.append(f"| {label} | {' | '.join(cells)} |")
    return out


def section(name: str, result: Mapping[str, Any], r: reproduction.Reproduction) -> str:
    """A reproduction's part of the page; title and notes are those of its file."""
    ran = {row["task"] for row in result["summary"].values()}
    attempts: dict[str, set[str]] = {}
    for tried in result["tried"]:
        about = f"{tried['task']}/{tried['label']}" if len(ran) > 1 else tried["label"]
        attempts.setdefault(about, set()).add(json.dumps(tried["settings"], sort_keys=True))
    compared = ", ".join(f"`{about}` {len(own)}" for about, own in sorted(attempts.items()) if len(own) > 1)
    chosen = f" Settings compared on the validation part, listed in the file: {compared}." if compared else ""
    lines = [
        f"## {name}: {r.title}",
        "",
        f"{result['reference']}. `{result['command']}`, table of commit {result['commit'] or 'unknown'}, "
        f"{result['machine']['cores']} cores.{chosen}",
        "",
        tables(result).rstrip(),
        "",
        *(
            f"![{name}, {task}](../benchmarks/results/{name}/{task}.png)"
            for task in result["settings"]["tasks"]
            if task in ran
        ),
    ]
    if r.notes:
        lines += ["", r.notes.strip()]
    return "\n".join(lines) + "\n"


def results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The committed results by name: those at two cores' scale first, each followed by the paper's.

    Raises ConfigError when one is damaged.
    """
    found = {}
    for name in reproduction.names():
        for variant in (name, f"{name}-full"):
            if (result := stored(folder / variant)) is not None:
                found[variant] = result
    return found


def page(folder: Path = RESULTS) -> str:
    """The text of `docs/results.md`."""
    found = results(folder)
    missing = [name for name in reproduction.names() if name not in found]
    parts = [HEAD + goals.table(goals.read(GOALS), found)]
    for variant, result in found.items():
        parts.append(section(variant, result, reproduction.read(variant.removesuffix("-full"), result["full"])))
    if missing:
        parts.append("## Not run yet\n\n" + "\n".join(f"* `{m}`: {reproduction.read(m).title}" for m in missing) + "\n")
    return "\n".join(parts)


def draw(result: Mapping[str, Any], folder: Path) -> None:
    """For each task a PNG: score against rounds, and against the bytes of all devices on a logarithmic axis.

    A line is the mean over the seeds. Without matplotlib nothing is drawn.
    """
    if not plots.available():
        return
    from matplotlib.figure import Figure

    for task in dict.fromkeys(run["task"] for run in result["runs"].values()):
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for i, label in enumerate(result["settings"]["methods"]):
            runs = [r for r in result["runs"].values() if (r["task"], r["label"]) == (task, label) and r["curve"]]
            if not runs:
                continue
            style: dict[str, Any] = {"marker": "os^Dv<>p"[i % 8], "markersize": 3, "linewidth": 1.0, "label": label}
            style["color"] = f"C{i % 10}"
            by_round = [{p["round"]: p for p in r["curve"]} for r in runs]
            rounds = sorted(set.intersection(*(set(points) for points in by_round)))  # a round may have no score
            scores = [fmean(points[k]["score"] for points in by_round) for k in rounds]
            left.plot(rounds, scores, **style)
            carried = [
                fmean(points[k]["bytes"] * r["devices"] for points, r in zip(by_round, runs, strict=True))
                for k in rounds
            ]
            right.plot([max(c, 1.0) for c in carried], scores, **style)
        left.set(xlabel="round", ylabel="mean score", title=f"{result['name']}, {task}")
        right.set(xscale="log", xlabel="payload bytes of all devices, up and down, so far")
        for axes in (left, right):
            axes.grid(visible=True, which="both", alpha=0.2)
        if right.lines:
            right.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        plots.save(figure, folder / f"{task}.png", dpi=110)


def main() -> None:
    """Write the page, and every result's table and plots anew."""
    for name, result in results().items():
        write_text(RESULTS / name / "table.md", tables(result))
        draw(result, RESULTS / name)
        total = amount(sum(r["bytes_of_all_devices"] for r in result["runs"].values()))
        print(f"{name}: {len(result['runs'])} cells, {total} of payloads")
    write_text(PAGE, page())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    run_module(main)
