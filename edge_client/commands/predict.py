"""`maskfleet predict`: run a personal model on samples, with nothing but its file and the base install."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnxruntime as ort
import typer
from numpy.typing import NDArray

from edge_client.bundle import F32
from edge_client.card import Card, read
from edge_client.data import arrays_of, doubts, normalised, numbers
from edge_client.errors import BundleError, ConfigError, DataError
from edge_client.events import shown
from edge_client.files import write_whole
from edge_client.runtimes.onnx import open_onnx
from edge_client.targets import Classification
from edge_client.targets import Sequence as Steps

BATCH = 256  # samples of one run: bounds the memory, changes no result
LINES = 20  # predictions that are printed; a file holds all
STEPS = 24  # steps of a sequence in a line

MODEL = "name a personal.onnx that `maskfleet join` wrote, or a model of `maskfleet federation export --onnx`"


@dataclass(frozen=True)
class Predictions:
    """What a model computes of n samples.

    `outputs` is float32[n, ...] as the target has them; of labels `classes` int64[n, ...] is the likeliest and
    `probability` float32[n, ...] its softmax. `score` is the target's, None without true values; `tested` is the number
    of test samples in the same file and their score. `doubts` are reasons why the model may not fit the samples.
    """

    card: Card
    outputs: F32
    classes: NDArray[np.int64] | None
    probability: F32 | None
    score: float | None
    doubts: tuple[str, ...] = ()
    tested: tuple[int, float] | None = None

    def name(self, label: int) -> str:
        """What a class is called."""
        names = self.card.class_names
        return names[label] if names else str(label)


def predict_file(model: Path, data: Path) -> Predictions:
    """Run `model` on the array x of `data`. Raises ConfigError for no model, BundleError, DataError."""
    if not model.is_file():
        raise ConfigError(f"there is no file {model}; {MODEL}")
    session = open_onnx(model, advice=MODEL, refused=BundleError)
    card = read(session.get_modelmeta().custom_metadata_map, str(model))
    arrays = normalised(arrays_of(data), card.input, str(data))
    if "x" not in arrays:
        raise DataError(f"{data} lacks the array x; it has {', '.join(sorted(arrays))}")
    x = _samples(arrays["x"], card, data)
    doubted = tuple(doubts(arrays, x, card.input, str(data)))
    outputs = _outputs(session, x, card, model)
    score = _score(card, outputs, arrays["y"], data) if "y" in arrays else None
    tested = None
    if {"x_test", "y_test"} <= arrays.keys() and arrays["x_test"].size:
        try:
            test = _samples(arrays["x_test"], card, data, "_test")
            tested = len(test), _score(card, _outputs(session, test, card, model), arrays["y_test"], data, "_test")
        except DataError as error:
            doubted += (f"{error}; the test samples have no score",)
    if not isinstance(card.target, (Classification, Steps)):
        return Predictions(card, outputs, None, None, score, doubted, tested)
    shifted = np.exp(outputs.astype(np.float64) - outputs.max(axis=-1, keepdims=True))
    shares = (shifted / shifted.sum(axis=-1, keepdims=True)).max(axis=-1).astype(np.float32)
    return Predictions(card, outputs, outputs.argmax(axis=-1), shares, score, doubted, tested)


def _outputs(session: ort.InferenceSession, x: NDArray[Any], card: Card, model: Path) -> F32:
    """The model's outputs for samples. Raises BundleError."""
    name = session.get_inputs()[0].name
    try:
        parts = [session.run(None, {name: x[low : low + BATCH]})[0] for low in range(0, len(x), BATCH)]
    except Exception as error:  # onnxruntime raises a class of its own for every status
        raise BundleError(f"{model} does not run on samples of shape {x.shape[1:]}: {error}; {MODEL}") from None
    outputs: F32 = np.concatenate(parts)
    if outputs.shape[1:] != card.target.output:
        raise BundleError(
            f"{model} gives {outputs.shape[1:]} a sample, its metadata says {card.target.output}; {MODEL}"
        )
    return outputs


def _score(card: Card, outputs: F32, y: NDArray[Any], data: Path, part: str = "") -> float:
    """The target's score of the outputs for `x` + `part`. Raises DataError."""
    labels = card.target.check(y, f"{data} (y{part})")
    if len(labels) != len(outputs):
        raise DataError(
            f"{data}: {len(outputs)} samples in x{part} but {len(labels)} labels in y{part}; give one label a sample, "
            f"or leave y{part} out"
        )
    return card.target.score(outputs, labels)


def _samples(x: NDArray[Any], card: Card, data: Path, part: str = "") -> NDArray[Any]:
    """The samples of the array `x` + `part` as the model takes them. Raises DataError."""
    takes = card.input
    if x.shape[1:] != takes.shape or not x.ndim or not len(x):
        raise DataError(
            f"{data}: x{part} has shape {x.shape}, the model takes [n, {', '.join(map(str, takes.shape))}] with n of 1 "
            "at least; give samples as the device's own data has them"
        )
    return numbers(takes, x, str(data))


def predict(
    model: Annotated[Path, typer.Argument(metavar="PERSONAL.onnx", help="A personal model, or an exported one.")],
    data: Annotated[Path, typer.Argument(metavar="DATA.npz", help="Samples x, and y for a score.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write all predictions: .npz or .csv.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all predictions as JSON.")] = False,
) -> None:
    """Run a personal model on samples: classes and probabilities, numbers, or steps.

    The model's own metadata says what it takes and how samples are normalised.
    """
    if out is not None and out.suffix not in (".npz", ".csv"):
        raise ConfigError(f"--out {out}: the name has to end in .npz or .csv")
    found = predict_file(model, data)
    for doubt in found.doubts:
        print(f"maskfleet: warning: {shown(doubt)}", file=sys.stderr)
    if out is not None:
        write_whole(
            out, _npz(found) if out.suffix == ".npz" else _csv(found), mode=0o666, elsewhere="choose another --out"
        )
    if as_json:
        print(json.dumps(_json(found)))
        return
    for line in _lines(found, 0 if out is not None else LINES):
        print(shown(line))
    n = len(found.outputs)
    if out is not None:
        print(f"{n} predictions in {out}")
    elif n > LINES:
        print(f"... and {n - LINES} more; --out FILE.csv writes all")
    if found.score is not None:
        print(f"score {found.score:.4f} on {n} samples")
    if found.tested is not None:
        print(f"score {found.tested[1]:.4f} on the file's {found.tested[0]} test samples")


def _lines(found: Predictions, most: int) -> Iterator[str]:
    for i, row in enumerate(found.outputs[:most]):
        if found.classes is None or found.probability is None:
            yield f"{i}: {' '.join(f'{value:.6g}' for value in row.ravel())}"
        elif found.classes.ndim == 1:
            yield f"{i}: {found.name(int(found.classes[i]))} {found.probability[i]:.3f}"
        else:
            steps = [found.name(int(label)) for label in found.classes[i][:STEPS]]
            more = " ..." if found.classes.shape[1] > STEPS else ""
            yield f"{i}: {' '.join(steps)}{more} (mean probability {found.probability[i].mean():.3f})"


def _named(found: Predictions, labels: Any) -> Any:
    """Names in place of labels, of any nesting."""
    return [_named(found, one) for one in labels] if isinstance(labels, list) else found.name(labels)


def _json(found: Predictions) -> dict[str, Any]:
    said: dict[str, Any] = {"model": dict(found.card.entries), "samples": len(found.outputs), "score": found.score}
    if found.tested is not None:
        said |= {"test_samples": found.tested[0], "test_score": found.tested[1]}
    if found.classes is None or found.probability is None:
        return {**said, "outputs": found.outputs.tolist()}
    names = {"names": _named(found, found.classes.tolist())} if found.card.class_names else {}
    probability = np.round(found.probability.astype(np.float64), 6).tolist()
    return {**said, "classes": found.classes.tolist(), **names, "probability": probability}


def _npz(found: Predictions) -> bytes:
    made: dict[str, Any] = {"outputs": found.outputs, "classes": found.classes, "probability": found.probability}
    file = io.BytesIO()
    np.savez(file, **{name: array for name, array in made.items() if array is not None})
    return file.getvalue()


def _csv(found: Predictions) -> bytes:
    """A line for each sample; for each step of a sequence."""
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n").writerow
    if found.classes is None or found.probability is None:
        flat = found.outputs.reshape(len(found.outputs), -1)
        write(["sample", *(f"output_{k}" for k in range(flat.shape[1]))])
        for i, row in enumerate(flat):
            write([i, *row])
        return text.getvalue().encode()
    steps: Sequence[str] = ["step"] if found.classes.ndim > 1 else []
    write(["sample", *steps, "class", "name", "probability"])
    for at in np.ndindex(found.classes.shape):
        label = int(found.classes[at])
        write([*at, label, found.name(label), f"{found.probability[at]:.6f}"])
    return text.getvalue().encode()
