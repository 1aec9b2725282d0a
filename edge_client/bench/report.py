"""A report for people: terminal tables with bars, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edge_client.bench.tables import plain_table, unfolded

BAR = 28  # characters of the longest bar
STATE = {"celsius": "°C", "mhz": "MHz", "load": "load", "free_mb": "free MB"}


def figure(value: float | None, digits: int = 3) -> str:
    """A number to so many digits; "-" for none."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def times(report: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, str]:
    """A row's times as text, each under its column's name; ± is half of the median's interval."""
    wall, cpu = row["wall_ms"], row.get("cpu_ms")
    low, high = wall["p50_interval"] or (None, None)
    return {
        "variant": row["variant"],
        "engine": row["engine"],
        "thr": str(row["threads"]),
        "p50 ms": figure(wall["p50"]),
        "±": "-" if low is None else f"{50 * (high - low) / wall['p50']:.1f}%",
        "p90": figure(wall["p90"]),
        "p99": figure(wall["p99"]),
        "CV": f"{100 * wall['cv']:.0f} %",
        "CPU ms": figure(None if cpu is None else cpu["p50"]),
        "faster": f"{ratios(report)[row['variant'], row['threads']]:.2f}x",
    }


def sizes(report: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, str]:
    """What else a row has as text, each under its column's name."""
    about, joules = report["variants"][row["variant"]], row.get("joules")
    return {
        "variant": row["variant"],
        "thr": str(row["threads"]),
        "peak MB": figure(row.get("peak_mb")),
        "model MB": figure(row.get("model_mb")),
        "file kB": figure(about["bytes"] / 1e3),
        "MMACs": figure(None if about["macs"] is None else about["macs"] / 1e6),
        "import ms": figure(row.get("import_ms")),
        "first ms": figure(row.get("first_result_ms")),
        "mJ": "-" if joules is None else f"{figure(1e3 * joules)} ± {figure(1e3 * row['joules_error'], 2)}",
    }


def ratios(report: Mapping[str, Any]) -> dict[tuple[str, int], float]:
    """How many times faster than the first variant each row is, on the same threads, by medians."""
    base: dict[int, float] = {}
    for row in report["rows"]:
        base.setdefault(row["threads"], row["wall_ms"]["p50"])
    return {(r["variant"], r["threads"]): base[r["threads"]] / r["wall_ms"]["p50"] for r in report["rows"]}


def facts(report: Mapping[str, Any]) -> list[str]:
    """The machine, its state and the meter, a line each."""
    about, before, after = report["machine"], report["before"], report["after"]
    engines = ", ".join(f"{k} {v}" for k, v in about["engines"].items())
    limits = [v for v in about.get("frequency_mhz") or [] if v is not None]
    clock = f", {' to '.join(figure(v, 4) for v in limits)} MHz" if limits else ""
    return [
        f"{about.get('board') or 'machine'}: {about['processor']}, {about['cores']} cores, {about['architecture']}, "
        f"{about['memory_mb']} MB",
        f"{about['system']}, kernel {about['kernel']}; governor {about.get('governor') or 'unknown'}{clock}; {engines}",
        "before and after: "
        + ", ".join(
            f"{name} {figure(before.get(key), 4)} and {figure(after.get(key), 4)}"
            for key, name in STATE.items()
            if before.get(key) is not None
        ),
        report["meter"],
    ]


def training_lines(report: Mapping[str, Any]) -> list[str]:
    """A training step and a round, a line each."""
    found = report.get("training")
    if not found:
        return []
    what = {
        "step": f"training step of {found['batch']} samples",
        "round": f"round of {found['method']['name']}, {found['steps_of_a_round']} steps on {found['samples']} samples",
    }
    lines = []
    for name, words in what.items():
        wall = found[name]["wall_ms"]
        joules = found[name].get("joules")
        energy = "" if joules is None else f", {figure(joules)} J ± {figure(found[name]['joules_error'], 2)}"
        interval = "" if wall["p50_interval"] is None else " [{}, {}]".format(*map(figure, wall["p50_interval"]))
        lines.append(f"{words}: {figure(wall['p50'])} ms{interval}, p90 {figure(wall['p90'])}{energy}")
    return lines


def bars(report: Mapping[str, Any]) -> list[str]:
    """Median latency of each row as a bar, for a terminal."""
    most = max((r["wall_ms"]["p50"] for r in report["rows"]), default=0.0)
    wide = max((len(r["variant"]) for r in report["rows"]), default=0)
    faster = ratios(report)
    lines = []
    for row in report["rows"]:
        p50 = row["wall_ms"]["p50"]
        bar = "█" * max(1, round(BAR * p50 / most)) if most else ""
        speed = faster[row["variant"], row["threads"]]
        lines.append(f"{row['variant']:<{wide}} {row['threads']:>3} thr {bar:<{BAR}} {figure(p50):>8} ms  {speed:.2f}x")
    return lines


def notes(report: Mapping[str, Any]) -> list[str]:
    """What was not made and why, what the variants are, and warnings."""
    made = [f"{name}: {about['note']}" for name, about in report["variants"].items() if about.get("note")]
    missing = [f"{name} was not made: {why}" for name, why in report["not_made"].items()]
    return [*made, *missing, *(f"warning: {text}" for text in report["warnings"])]


def what(report: Mapping[str, Any]) -> str:
    """What is measured: the model, and the input of one run."""
    shape = report["input"]["shape"]
    return f"{report['model']}, {'one sample' if shape[:1] == [1] else 'a run'} of {shape}"


def table(title: str, rows: Sequence[Mapping[str, str]], gap: int) -> Table:
    """Rows of text by columns' names, the first column on the left; nothing is folded."""
    made = plain_table(title, gap)
    for i, head in enumerate(rows[0]):
        made.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        made.add_row(*map(escape, row.values()))
    return made


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the report."""
    for line in facts(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    engines = sorted({row["engine"] for row in report["rows"]})
    one = len(engines) == 1
    title = f"{what(report)}, {engines[0]}" if one else what(report)
    for columns in (times, sizes):
        rows = [columns(report, row) for row in report["rows"]]
        if one:  # it is in the title
            rows = [{head: cell for head, cell in row.items() if head != "engine"} for row in rows]
        console.print(unfolded(partial(table, title, rows), console), crop=False)
        title = ""
    for line in [*bars(report), *training_lines(report), *notes(report)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def markdown(report: Mapping[str, Any], plot: str | None = None) -> str:
    """The report as a page; `plot` is the name of a picture beside it."""
    origin = f"`{report['command']}`, commit {report['commit'] or '-'}, {report['date']}."
    lines = [f"# {what(report)}", "", origin, ""]
    lines += [f"* {line.strip()}" for line in facts(report)]
    for columns in (times, sizes):
        rows = [columns(report, row) for row in report["rows"]]
        rule = "|".join(" --- " if i == 0 else " ---: " for i in range(len(rows[0])))
        head, *rest = (f"| {' | '.join(cells)} |" for cells in (rows[0], *(row.values() for row in rows)))
        lines += ["", head, f"|{rule}|", *rest]
    lines += ["", *(f"* {line}" for line in [*training_lines(report), *notes(report)])]
    if plot is not None:
        lines += ["", f"![latency and memory]({plot})"]
    return "\n".join(lines) + "\n"
