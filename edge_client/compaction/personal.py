"""A device's mask becomes its own small model: `personal.onnx`, shown equal to the masked model before it is written.

Numpy, onnx and onnxruntime only. `edge_client.compaction.smaller` decides what goes and writes the smaller graph; this
module holds the proof and writes the file.

The masked model is `eval.onnx` with the effective values. Its norms are computed in float64: where a unit never
moved in training, float32 multiplies their rounding error by up to 300, and the reference itself would be off by more
than the tolerance. When two models count as equal is in `edge_client.equality`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from edge_client.align import Align
from edge_client.bundle import F32, Bundle, Manifest, views
from edge_client.compaction.preparation import dense
from edge_client.compaction.smaller import REPORT, analysed, refused
from edge_client.compaction.surgery import freeze, widen
from edge_client.compaction.tuning import Clock, aligned
from edge_client.equality import Probe, Sides, nudged, probes, prove
from edge_client.errors import BundleError, CompactionError
from edge_client.files import write_whole
from edge_client.runtimes.onnx import open_onnx
from edge_client.task import Personal

EVAL = "eval.onnx"
AT_ONCE = 4  # samples that the proof runs at a time, which bounds its memory
ELSEWHERE = "choose another place for the model"
MASKED, COMPACT = ("masked", "give samples of the shape and range of the model's input"), ("compact", REPORT)
SIDES = Sides(
    "the compact model",
    "the masked model",
    "keep the dense model and report the bundle",
    "before anything is cut: it overflows or divides by zero, as a weight-normalised layer does by the length of a "
    "masked row; keep a weight in each row",
)


@dataclass(frozen=True)
class PersonalReport:
    """What compaction did. Parameters count weights and biases, not batch-norm statistics.

    `parameters_live` counts the dense model's parameters that are not zero. `parameters_compact` counts all floats of
    the file, maps of what pruned channels emit and constants of the graph (a causal mask) among them. `layers` gives
    for each weight how many outputs its layer had and how many it has left. `stopped` has a line for each operator that
    reads dead channels. `max_abs_diff` is the largest difference of two outputs on ordinary inputs, `max_scaled_diff`
    the largest on all probes, divided by the scale. The latter is above `equality.TOLERANCE` where the masked model
    itself moves as much when its values are rounded.
    """

    parameters_dense: int
    parameters_live: int
    parameters_compact: int
    layers: Mapping[str, tuple[int, int]]
    stopped: tuple[str, ...]
    max_abs_diff: float
    max_scaled_diff: float


def write_personal(
    bundle: Bundle,
    personal: Personal,
    path: Path,
    samples: NDArray[Any] | None = None,
    *,
    align: Align = "rule",
    clock: Clock | None = None,
) -> PersonalReport:
    """Write `personal` as a compact ONNX model with the one input `x`, dynamic batch.

    `samples` [n, *input] joins the probes; a model of integers needs it. `align` sets how wide its layers are, and
    `clock` measures for it (`tuning`). The file appears whole or not at all.
    Raises CompactionError when the compact model is not equal to the masked one (see above) or the values do not fit
    the bundle, StateError when the file cannot be written.
    """
    manifest = bundle.manifest
    tensors = _effective(manifest, personal)
    if manifest.input.dtype != "float32" and (samples is None or not len(samples)):
        raise CompactionError(
            "this model reads integers and the bundle does not give their range; give samples to check on"
        )
    probe = np.zeros((2, *manifest.input.shape), manifest.input.dtype)
    with refused():
        made = aligned(analysed(freeze(_read_eval(bundle), tensors), probe), align, clock)
    data = made.model.SerializeToString()
    largest, scaled = _prove(bundle, tensors, data, samples)
    write_whole(path, data, mode=0o666, elsewhere=ELSEWHERE)
    return PersonalReport(
        parameters_dense=manifest.d,
        parameters_live=int(np.count_nonzero(personal.parameters)),
        parameters_compact=made.parameters,
        layers=made.layers,
        stopped=made.stopped,
        max_abs_diff=largest,
        max_scaled_diff=scaled,
    )


def dense_model(bundle: Bundle, personal: Personal, samples: NDArray[Any] | None = None) -> bytes:
    """`personal` with all its channels as a serialised model, to compare the compact model's latency with.

    It is built and checked as the compact model is, so the two differ in their channels only. When the check fails, as
    after training that left values which float32 cannot follow, it is `eval.onnx` with the values put in: by
    definition the masked model. Raises CompactionError when the values do not fit the bundle or the graph does not run.
    """
    tensors = _effective(bundle.manifest, personal)

    def frozen() -> onnx.ModelProto:
        return freeze(_read_eval(bundle), tensors)

    try:
        with refused():
            data: bytes = dense(frozen()).SerializeToString()
        _prove(bundle, tensors, data, samples)
    except CompactionError:
        data = frozen().SerializeToString()
        _open(data)
    return data


def write_dense(bundle: Bundle, personal: Personal, path: Path, samples: NDArray[Any] | None = None) -> None:
    """Write `dense_model`. Raises what that raises, and StateError when the file cannot be written."""
    write_whole(path, dense_model(bundle, personal, samples), mode=0o666, elsewhere=ELSEWHERE)


def write_smallest(
    bundle: Bundle,
    personal: Personal,
    path: Path,
    samples: NDArray[Any] | None = None,
    *,
    align: Align = "rule",
    clock: Clock | None = None,
) -> PersonalReport | str:
    """Write `personal` as `write_personal` does, or as `write_dense` does where that refuses.

    Returns the report, or why the dense model was written instead.

    Raises CompactionError when the values do not fit the bundle, StateError when the file cannot be written.
    """
    try:
        return write_personal(bundle, personal, path, samples, align=align, clock=clock)
    except CompactionError as error:
        write_dense(bundle, personal, path, samples)
        return str(error)


def _effective(manifest: Manifest, personal: Personal) -> dict[str, F32]:
    """Every tensor by name. Raises CompactionError unless the values fit the manifest and the mask is applied."""
    for what, flat, size in (
        ("parameters", personal.parameters, manifest.d),
        ("buffers", personal.buffers, manifest.buffers_d),
    ):
        if flat.shape != (size,) or flat.dtype != np.float32:
            raise CompactionError(
                f"the personal model has {what} {flat.dtype}{list(flat.shape)}, the bundle float32[{size}]; "
                "name the bundle that it was trained with"
            )
        if not np.isfinite(flat).all():
            raise CompactionError(f"{int((~np.isfinite(flat)).sum())} of the {what} are NaN or infinite; train again")
    mask = personal.mask
    if mask is not None:
        if mask.shape != (manifest.d,) or mask.dtype != np.bool_:
            raise CompactionError(
                f"the mask is {mask.dtype}{list(mask.shape)}, the bundle needs bool[{manifest.d}]; name its bundle"
            )
        wrong = int(np.count_nonzero(personal.parameters[~mask]))
        if wrong:
            raise CompactionError(f"{wrong} masked parameters are not zero; apply the mask first")
    return {**views(manifest.parameters, personal.parameters), **views(manifest.buffers, personal.buffers)}


def _read_eval(bundle: Bundle) -> onnx.ModelProto:
    try:
        return onnx.load(bundle.part(EVAL))
    except BundleError:
        raise
    except Exception as error:  # protobuf's own error class depends on its version
        raise BundleError(f"{EVAL} does not open: {error}; export the bundle again") from None


def _prove(
    bundle: Bundle, tensors: Mapping[str, F32], data: bytes, samples: NDArray[Any] | None
) -> tuple[float, float]:
    """Largest absolute difference on ordinary probes, largest scaled difference on all. Raises CompactionError."""
    frozen = _open(data)
    graph = _read_eval(bundle)
    masked = _open(widen(graph).SerializeToString())

    @cache
    def plain() -> ort.InferenceSession:
        """Linear layers and means in float32, whose long sums round as the compact model's do."""
        return _open(widen(graph, {"BatchNormalization"}).SerializeToString())

    names = {i.name for i in masked.get_inputs()}
    feed = {name: np.ascontiguousarray(value) for name, value in tensors.items() if name in names}
    (x_name,) = (i.name for i in frozen.get_inputs())

    def reference(probe: Probe) -> NDArray[Any]:
        return _run(masked, MASKED, {**feed, x_name: probe.x}, probe.name)

    def rounded(probe: Probe) -> NDArray[Any]:
        x, *values = nudged(probe, *feed.values())
        return _run(plain(), MASKED, {**dict(zip(feed, values, strict=True)), x_name: x}, probe.name)

    def found(probe: Probe) -> NDArray[Any]:
        return _run(frozen, COMPACT, {x_name: probe.x}, probe.name)

    takes = bundle.manifest.input
    return prove(probes(takes.shape, takes.dtype, takes.bounds(), samples), reference, found, rounded, SIDES)


def _open(model: bytes) -> ort.InferenceSession:
    made = "the graph that compaction made"
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # onnx raises a class of its own for every kind
        raise CompactionError(f"{made} is no valid one: {_cause(error)}; {REPORT}") from None
    return open_onnx(model, what=made, advice=REPORT, refused=CompactionError, arena=False)


def _cause(error: Exception) -> str:
    """ONNX Runtime's message, without places in its own source."""
    return re.sub(r"\S+\.(h|cc):\d+ ", "", str(error).rsplit("Status Message: ", 1)[-1]).strip()


def _run(
    session: ort.InferenceSession, what: tuple[str, str], feed: Mapping[str, NDArray[Any]], probe: str
) -> NDArray[Any]:
    *_, x = feed  # the data comes last
    try:
        parts = [
            np.asarray(session.run(None, {**feed, x: feed[x][at : at + AT_ONCE]})[0])
            for at in range(0, len(feed[x]), AT_ONCE)
        ]
        return np.concatenate(parts)
    except Exception as error:  # see _open
        raise CompactionError(f"the {what[0]} model does not run on {probe}: {_cause(error)}; {what[1]}") from None
