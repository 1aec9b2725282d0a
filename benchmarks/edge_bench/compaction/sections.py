"""Tables of `docs/compaction.md` from results of other commands: trained models, and other engines."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from edge_bench.compaction.zoo import ZOO

Row = Mapping[str, Any]
PAPERS = {"hermes": "1.83x", "fedmask": "1.56x", "fedmask-lasso": "1.56x"}
"""How much faster the papers' models run than the whole one, on their phones."""
GOALS = {("ResNet-56", 0.5): 2.3, ("ResNet-56", 0.3): 3.0, ("MobileNetV2", 0.5): 3.0, ("MobileNetV2", 0.3): 4.0}
"""How much faster the best engine was to be, by network and kept share."""
SMALLER = 1.02  # dense over compact parameters: below, a row is not in the table


def trained(folder: Path) -> list[str]:
    """Personal models of every method; nothing without the file."""
    path = folder / "trained.json"
    if not path.is_file():
        return []
    rows = json.loads(path.read_text())["rows"]
    done = [r for r in rows if "status" not in r]
    counts = {k: sum(r.get(k, 0) for r in done) for k in ("samples", "differing", "differing_aligned")}
    int8 = [r for r in done if "int8_agreement" in r]
    gains = [100 * r["int8_gain"] for r in int8]
    times = ", ".join(
        f"{task} {median([r['speedup_int8'] / r['speedup'] for r in int8 if r['task'] == task]):.2f}x"
        for task in _of(int8, "task")
    )
    return [
        "",
        "## Trained models",
        "",
        *_paragraph(
            "`python -m edge_bench.compaction.trained_models` trains methods for a few rounds on real data and "
            f"compacts each device's personal model: {len(_of(rows, 'method'))} methods and variants on "
            f"{len(_of(rows, 'task'))} tasks, {len(done)} of {len(rows)} runs ended. Of {counts['samples']:,} test "
            f"samples {counts['differing'] or 'none'} got another class from the compact model, "
            f"{counts['differing_aligned'] or 'none'} from one of other widths. The largest difference of two outputs "
            f"was {max(r['error_std'] for r in done):.1e} standard deviations. The task `cifar10` has 20 samples of a "
            "class on a device, so models that all devices share hardly learn it."
        ),
        "",
        *_paragraph(
            "The runs whose masks leave out whole channels follow. The other methods send or prune single weights, "
            "which stay in their matrices. Time as above; the papers measured phones. `fedmask-lasso` has a stronger "
            "group lasso and prunes nothing else:"
        ),
        "",
        "| task | method | score | live | parameters | multiply-adds | bytes | time | auto | paper |",
        "| --- " * 10 + "|",
        *(
            f"| {r['task']} | {r['method']} | {100 * r['score']:.1f} | {r['live_share']:.2f} | "
            f"{r['parameter_ratio']:.2f}x | {r['mac_ratio']:.2f}x | {r['byte_ratio']:.2f}x | {_x(r, 'speedup')} | "
            f"{_x(r, 'speedup_aligned')} | {PAPERS.get(r['method'], '')} |"
            for r in done
            if r["parameter_ratio"] >= SMALLER
        ),
        "",
        *_paragraph(
            f"int8 by ONNX Runtime, of the compact models: at least {100 * min(r['int8_agreement'] for r in int8):.1f} "
            f"% of a run's test samples get the same class. The share that is right changes by "
            f"{sum(gains) / len(gains):+.2f} points on average ({min(gains):+.1f} to {max(gains):+.1f}). Files are "
            f"{median([r['bytes'] / r['int8_bytes'] for r in int8]):.1f} times smaller. Time against the compact "
            f"float32 model: {times}."
        ),
    ]


def engines(folder: Path) -> list[str]:
    """The suite in ExecuTorch and int8; nothing without files."""
    files = [json.loads(p.read_text()) for p in sorted(folder.glob("engines*.json"))]
    rows = [r for f in files for r in f["rows"]]
    if not rows:
        return []
    parts = [
        "",
        "## Other engines",
        "",
        *_paragraph(
            "`python -m edge_bench.compaction.engines` runs compact models as ExecuTorch programs (XNNPACK, "
            "float32) and as int8 in ONNX Runtime. Error as above; `class` is the least share of samples whose largest "
            "output is the masked module's. The suite's weights are random, so int8's accuracy is measured on "
            f"trained models. Of the suite's {len(ZOO)} graphs {len(_of(rows, 'model'))} were run, not under all masks "
            f"because lowering is slow: {_counts(rows)}."
        ),
        "",
        "| engine | graphs | written | exact | largest error | class |",
        "| --- " * 6 + "|",
    ]
    for engine in _of(rows, "engine"):
        own = [r for r in rows if r["engine"] == engine and not r["aligned"]]
        names, done = _of(own, "model"), [r for r in own if r["status"] == "ok"]
        bad = {r["model"] for r in own if r["status"] != "ok"}
        off = {r["model"] for r in done if r["error_std"] > max(1e-5, 2 * r.get("error_dense_std", 0.0))}
        exact = "-" if engine.endswith("int8") else str(len(set(names) - bad - off))
        largest, least = max(r["error_std"] for r in done), min(r["agreement"] for r in done)
        parts.append(f"| {engine} | {len(names)} | {len(set(names) - bad)} | {exact} | {largest:.1e} | {least:.2f} |")
    refused = [f"{r['model']}: {r['status']}" for r in rows if r["status"] != "ok" and not r["aligned"]]
    parts += ["", *(f"* {line}" for line in dict.fromkeys(refused))] if refused else []
    timed = [r for r in rows if "speedup" in r and not r["engine"].endswith("int8")]
    return parts + (_best(timed, _at_best_widths(folder)) if timed else [])


def _best(timed: Sequence[Row], auto: Mapping[tuple[Any, ...], float]) -> list[str]:
    """Each network's times by engine, and the best of them beside its goal."""
    lines, missed, goals = [], [], 0
    for key in dict.fromkeys((r["model"], r["mask"], r["kept"]) for r in timed):
        cells, best = [], auto.get(key, 0.0)
        for engine in ("onnxruntime", "executorch"):
            own = [r for r in timed if (r["model"], r["mask"], r["kept"], r["engine"]) == (*key, engine)]
            r = max(own, key=lambda r: r["speedup"], default=None)
            cells.append("- | -" if r is None else f"{r['speedup']:.2f}x | {r['ms_dense']:.3g} -> {r['ms']:.3g}")
            best = max(best, r["speedup"] if r else 0.0)
        cells.append(f"{auto[key]:.2f}x" if key in auto else "-")
        goal, verdict = GOALS.get((key[0], key[2])), ""
        if goal is not None:
            goals += 1
            verdict = f"{goal}x, {'met' if best >= goal else 'missed'}"
            missed += [f"{key[0]} at {100 * key[2]:.0f} %"] if best < goal else []
        lines.append(f"| {key[0]} | {key[1]} | {key[2]} | " + " | ".join(cells) + f" | {best:.2f}x | {verdict} |")
    said = f" Of {goals} goals {len(missed)} are missed: {', '.join(missed)}." if missed else ""
    return [
        "",
        *_paragraph(
            "Dense over compact in each engine, the models as narrow as possible and all in the same turns. `auto` is "
            "ONNX Runtime with the widths that run fastest, from the table of "
            f"published networks, measured apart on a less busy machine.{said}"
        ),
        "",
        "| network | mask | kept | ONNX Runtime | ms | ExecuTorch | ms | auto | best | goal |",
        "| --- " * 10 + "|",
        *lines,
    ]


def _at_best_widths(folder: Path) -> dict[tuple[Any, ...], float]:
    """Speedups in ONNX Runtime at the widths that run fastest, by network, mask and kept share."""
    paths = sorted(folder.glob("known*.json"), key=lambda p: p.stem)  # a later file goes before an earlier one
    rows = [r for path in paths for r in json.loads(path.read_text())["rows"]]
    found = [r for r in rows if r["aligned"] and r["tool"] == "maskfleet" and "speedup" in r]
    return {(r["model"], r["mask"], r["kept"]): r["speedup"] for r in found}


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)


def _counts(rows: Sequence[Row]) -> str:
    """How many graphs each kind of mask and kept share has."""
    found = {_mask(r): len(_of([o for o in rows if _mask(o) == _mask(r)], "model")) for r in rows}
    return ", ".join(f"{n} under {mask} masks that keep {100 * kept:.0f} %" for (mask, kept), n in found.items())


def _mask(row: Row) -> tuple[str, float]:
    return row["mask"], row["kept"]


def _of(rows: Sequence[Row], field: str) -> list[str]:
    return list(dict.fromkeys(r[field] for r in rows))


def _x(row: Row, field: str) -> str:
    return f"{row[field]:.2f}x" if field in row else "-"
