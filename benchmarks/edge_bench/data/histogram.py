"""Which labels each device holds: counts, a table for the terminal and a plot (`maskfleet simulate --labels`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.bench import plots
from edge_client.bundle import Input
from edge_client.data import DeviceData, doubts
from edge_client.errors import ConfigError
from edge_client.targets import LEFT_OUT

BARS = " ▁▂▃▄▅▆▇█"
COLUMNS = 64  # classes beyond share a bar with their neighbours
STACKED = 10, 60  # at most so many classes and devices are drawn as stacked bars, more as a heat map


def counts(devices: Mapping[str, DeviceData], classes: int) -> NDArray[np.int64]:
    """How many labels of each class every device trains on, int64[devices, classes]; its validation part counts too.

    Raises ConfigError for labels that are no classes.
    """
    rows = [np.concatenate([d.y.reshape(-1), d.y_val.reshape(-1)]) for d in devices.values()]
    if any(not np.issubdtype(row.dtype, np.integer) for row in rows):
        raise ConfigError("the labels are no classes, so there is no histogram of them")
    return np.stack([np.bincount(row[row != LEFT_OUT], minlength=classes) for row in rows])


def bars(row: NDArray[np.int64]) -> str:
    """One character a class, the taller the more labels; a class with any label shows."""
    wide = -(-len(row) // COLUMNS)
    sums = np.add.reduceat(row, np.arange(0, len(row), wide))
    heights = np.ceil(sums / max(int(sums.max()), 1) * (len(BARS) - 1)).astype(int)
    return "".join(BARS[h] for h in heights)


def table(devices: Mapping[str, DeviceData], classes: int, most: int = 20) -> str:
    """A line for each of the first `most` devices, its samples and a bar for each class; then a summary of all."""
    held = counts(devices, classes)
    width = max(map(len, devices))
    lines = [f"{'':{width}}  train  valid   test  labels 0 to {classes - 1}"]
    for (name, d), row in list(zip(devices.items(), held, strict=True))[:most]:
        lines.append(f"{name:{width}} {len(d.y):6d} {len(d.y_val):6d} {len(d.y_test):6d}  {bars(row)}")
    if len(devices) > most:
        more = len(devices) - most
        lines.append(f"and {more} more device{'s' * (more > 1)}")
    sizes, kinds = np.array([len(d.y) + len(d.y_val) for d in devices.values()]), (held > 0).sum(axis=1)
    lines.append(
        f"{len(devices)} device{'s' * (len(devices) > 1)}: {_counted(sizes, 'sample')} to train on; "
        f"{_counted(kinds, 'class')} each; unevenness {unevenness(held):.2f}"
    )
    return "\n".join(lines)


def _counted(numbers: NDArray[np.int64], what: str) -> str:
    """The range of these numbers and their median, or the one number that all are."""
    low, high = int(numbers.min()), int(numbers.max())
    things = what if high == 1 else f"{what}{'es' if what.endswith('s') else 's'}"
    return f"{high} {things}" if low == high else f"{low} to {high} {things} (median {np.median(numbers):g})"


def unevenness(held: NDArray[np.int64]) -> float:
    """Mean distance in total variation of a device's labels from the pooled ones: 0 alike, near 1 nothing in common."""
    shares = held / np.maximum(held.sum(axis=1, keepdims=True), 1)
    pooled = held.sum(axis=0) / max(int(held.sum()), 1)
    return float(np.abs(shares - pooled).sum(axis=1).mean() / 2)


def record(devices: Mapping[str, DeviceData], classes: int) -> dict[str, Any]:
    """The same for a JSON file: every device's samples of each part, and its labels of each class as `counts` has them.

    Raises ConfigError as `counts` does.
    """
    held = counts(devices, classes)
    parts = {
        name: {"train": len(d.y), "validation": len(d.y_val), "test": len(d.y_test), "labels": row.tolist()}
        for (name, d), row in zip(devices.items(), held, strict=True)
    }
    return {"classes": classes, "unevenness": unevenness(held), "devices": parts}


def untested(devices: Mapping[str, DeviceData], part: str) -> list[str]:
    """A sentence when devices have no samples to be scored on; `part` is the one they are scored on."""
    without = [name for name, d in devices.items() if not len(d.y_test)]
    if not without:
        return []
    named = ", ".join(without[:5]) + (" ..." if len(without) > 5 else "")
    return [
        f"{len(without)} of {len(devices)} devices ({named}) have no {part} samples: they train, but no score counts "
        "them; give them more samples (three of a class or more), or leave them out"
    ]


def off_scale(devices: Mapping[str, DeviceData], takes: Input) -> list[str]:
    """A sentence when devices' training samples are far from what the model is made for."""
    found = [said for name, d in devices.items() for said in doubts({}, d.x, takes, name)]
    others = f" ({len(found)} of {len(devices)} devices)" if len(devices) > 1 else ""
    return [found[0] + others] if found else []


def uncentred(devices: Mapping[str, DeviceData]) -> list[str]:
    """A sentence when the numbers to predict lie further from 0 than they spread.

    Rounds then learn their mean first. The updates are large and the losses too, so that neither steps made from the
    first round nor a comparison with the bundle's loss fit the rounds after.
    """
    y = np.concatenate([d.y for d in devices.values()])
    if not np.issubdtype(y.dtype, np.floating) or not len(y):
        return []
    mean, spread = y.mean(axis=0, dtype=np.float64).reshape(-1), y.std(axis=0, dtype=np.float64).reshape(-1)
    at = int(np.argmax(np.abs(mean) - spread))
    if abs(mean[at]) <= spread[at]:
        return []
    which = f" of output {at}" if mean.size > 1 else ""
    return [
        f"the numbers to predict{which} have mean {mean[at]:.3g} and deviation {spread[at]:.3g}: devices would learn "
        "the mean first, and compressed updates may never come to the rest; train on (y - mean) / deviation"
    ]


def draw(devices: Mapping[str, DeviceData], classes: int, path: Path, title: str) -> None:
    """The histogram as a PNG: stacked bars for few classes and devices, else a heat map. Raises StateError."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    held = counts(devices, classes)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    if classes <= STACKED[0] and len(devices) <= STACKED[1]:
        colours = mpl.colormaps["tab10"].colors  # type: ignore[attr-defined]
        places, below = np.arange(len(devices)), np.zeros(len(devices), np.int64)
        for c in range(classes):
            axes.bar(places, held[:, c], bottom=below, color=colours[c], label=str(c), width=0.9)
            below = below + held[:, c]
        axes.legend(title="label", loc="center left", bbox_to_anchor=(1, 0.5))
        axes.set(xlabel="device", ylabel="training samples", title=title)
    else:
        image = axes.imshow(held.T, aspect="auto", interpolation="nearest", origin="lower")
        figure.colorbar(image, label="training labels")
        axes.set(xlabel="device", ylabel="label", title=title)
    plots.save(figure, path)
