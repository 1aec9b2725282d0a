"""An artifact is written and proved: `make`.

What was written runs beside `personal.onnx`, which was itself shown equal to the masked model, before anything is
called good. An exact artifact has the same outputs as `edge_client.equality` compares them, extreme inputs among them.
The error of each output of an int8 one is measured on samples that its calibration did not see, and the worst is
limited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client import card
from edge_client.artifacts import ADVICE, BATCH, Run, Writer, isolated, writer
from edge_client.equality import Probe, Sides, nudged, probes, prove, spread
from edge_client.errors import BundleError, CompactionError, DataError
from edge_client.files import write_whole
from edge_client.runtimes.onnx import open_onnx
from edge_client.targets import Target

SAMPLES = 256  # of the device's own, at most, for calibration and again for the proof
CONSTANT = 1e-6  # of its size: the standard deviation of an output that does not vary


@dataclass(frozen=True)
class Limits:
    """What an artifact that is not exact must keep: top-1 agreement if it predicts labels, and each output's error."""

    agreement: float = 0.95
    error: float = 0.25


@dataclass(frozen=True)
class Proof:
    """An artifact beside the model it was made of.

    On `samples` samples: `agreement` is the share of labels that are the same, None where the model predicts none or
    has no target in its metadata. Errors are those of the worst output, in standard deviations of that output of the
    model: `error_std` the largest, `error_rms` the root of the mean square. `worst` is that output's index within a
    sample.
    """

    samples: int
    agreement: float | None
    error_std: float
    error_rms: float
    worst: int
    bytes_model: int
    bytes_artifact: int


def make(
    model: bytes,
    kind: str,
    path: Path,
    samples: NDArray[Any] | None = None,
    limits: Limits = Limits(),  # frozen
    progress: Callable[[str], None] = lambda _: None,
    target: Target | None = None,
) -> Proof:
    """Write the artifact `kind` of the ONNX `model` to `path`, once it is proved.

    `samples` [n, ...] are the device's own: half calibrate, the other half prove. `target` is what the model predicts;
    without it, what its metadata has. Raises CompactionError when the artifact differs by more than it may, ConfigError
    when it cannot be made, DataError when samples are missing or do not fit.
    """
    chosen = writer(kind)
    reference, shape, dtype, said = _open(model)
    own = _fitting(samples, shape, dtype)
    if own is None and (not chosen.exact or dtype != np.float32):
        raise DataError(f"artifact {kind!r} of this model needs samples of the device; name its data with --data")
    calibration, own_probes = _halves(own, shape)
    data = chosen.write(model, None if chosen.exact else calibration, progress)
    with _opened(chosen, kind, data) as found:
        proof = _measured(reference, found, own_probes, target or said, len(model), len(data))
        if chosen.exact:
            _prove(reference, found, probes(shape, dtype.name, samples=own_probes), kind)
        else:
            _limited(proof, limits, kind)
    progress(f"proved on {proof.samples} samples")
    write_whole(path, data, mode=0o666, elsewhere="choose another place for the artifact")
    return proof


def _limited(proof: Proof, limits: Limits, kind: str) -> None:
    """Raise CompactionError for a proof beyond the limits."""
    same = ""
    if proof.agreement is not None:
        same = f"predicts the same label for {proof.agreement:.1%} ({limits.agreement:.1%} asked for), and "
    enough = proof.agreement is None or proof.agreement >= limits.agreement
    if not (enough and proof.error_rms <= limits.error):  # so that NaN fails too
        raise CompactionError(
            f"on {proof.samples} samples the {kind} artifact {same}has an error of {proof.error_rms:.3g} standard "
            f"deviations in output {proof.worst} ({limits.error:g} allowed). Give more samples with --data, or keep "
            "the float model"
        )


def _open(model: bytes) -> tuple[Run, tuple[int, ...], np.dtype[Any], Target | None]:
    """How to run the ONNX model, its input's sample shape and dtype, and the target in its metadata."""
    session = open_onnx(model, advice="name a personal.onnx", refused=BundleError)
    inputs, outputs = session.get_inputs(), session.get_outputs()
    if len(inputs) != 1 or not all(isinstance(n, int) for n in inputs[0].shape[1:]):
        raise BundleError("the model has not the one input `x` of a personal.onnx; name a personal.onnx")
    if len(outputs) != 1 or len(outputs[0].shape) < 2:
        found = ", ".join(f"{o.name} {o.shape}" for o in outputs)
        raise BundleError(f"the model's outputs are {found}, not one value [n, ...]; name a personal.onnx")
    name, shape = inputs[0].name, tuple(int(n) for n in inputs[0].shape[1:])
    dtype = np.dtype(np.int64 if inputs[0].type == "tensor(int64)" else np.float32)

    def run(x: NDArray[Any]) -> NDArray[Any]:
        try:
            made = np.asarray(session.run(None, {name: x})[0])
        except Exception as error:  # the runtime's errors share no base class
            raise BundleError(
                f"the model does not run on the input of shape {list(x.shape)} that it declares: "
                f"{str(error).splitlines()[0]}; name a personal.onnx"
            ) from None
        if made.ndim < 2 or len(made) != len(x):
            raise BundleError(
                f"the model gives {list(made.shape)} for {len(x)} samples, not [n, ...]; name a personal.onnx"
            )
        return made

    entries = session.get_modelmeta().custom_metadata_map
    return run, shape, dtype, card.read(entries, "the model").target if card.has_card(entries) else None


def _fitting(samples: NDArray[Any] | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    if samples is None:
        return None
    if samples.shape[1:] != shape or len(samples) < 2 or not np.issubdtype(samples.dtype, np.number):
        raise DataError(
            f"the samples are {samples.dtype}{list(samples.shape)}, the model takes [n, {', '.join(map(str, shape))}] "
            "with n of 2 at least; name the data this model was trained on"
        )
    made = np.ascontiguousarray(samples, dtype)
    if not np.isfinite(made).all():
        raise DataError(f"sample {int(np.argwhere(~np.isfinite(made))[0][0])} holds NaN or infinity; clean the data")
    return made


def _halves(own: NDArray[Any] | None, shape: tuple[int, ...]) -> tuple[NDArray[Any] | None, NDArray[Any]]:
    """Samples to calibrate with, and others to prove on: every other one, spread over the file."""
    if own is None:
        return None, np.random.default_rng(0).standard_normal((4 * BATCH + 1, *shape), np.float32)
    places = np.linspace(0, len(own) - 1, min(len(own), 2 * SAMPLES)).astype(np.int64)
    return own[places[::2]], own[places[1::2]]


@contextmanager
def _opened(chosen: Writer, kind: str, data: bytes) -> Iterator[Run]:
    """The artifact as a call. Raises CompactionError when it does not run."""
    if chosen.native:
        with isolated.opened(kind, data) as found:
            yield found
        return
    made = chosen.open(data)

    def run(x: NDArray[Any]) -> NDArray[Any]:
        try:
            return made(x)
        except Exception as error:  # engines' errors share no base class
            raise CompactionError(f"the {kind} artifact does not run: {str(error).strip()}; {ADVICE}") from None

    yield run


def _by_batch(run: Run, x: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([run(x[i : i + BATCH]) for i in range(0, len(x), BATCH)])


def _prove(reference: Run, found: Run, on: Iterable[Probe], kind: str) -> None:
    """Raise CompactionError unless the two are equal. An extreme probe on which the model overflows shows nothing."""
    expected = [(p, _by_batch(reference, p.x)) for p in on]
    outputs = {p.name: y for p, y in expected}
    prove(
        [p for p, y in expected if p.ordinary or np.isfinite(y).all()],
        lambda p: outputs[p.name],
        lambda p: _by_batch(found, p.x),
        lambda p: _by_batch(reference, nudged(p)[0]),
        Sides(f"the {kind} artifact", "the model", ADVICE, "so the artifact cannot be proved; train again"),
    )


def _measured(
    reference: Run, found: Run, x: NDArray[Any], target: Target | None, bytes_model: int, bytes_artifact: int
) -> Proof:
    expected, made = (np.asarray(_by_batch(run, x), np.float64) for run in (reference, found))
    if made.shape != expected.shape:
        raise CompactionError(f"the artifact's outputs are {made.shape}, the model's {expected.shape}; report it")
    labels = target is not None and np.issubdtype(target.labels(1).dtype, np.integer)
    agreement = float((made.argmax(-1) == expected.argmax(-1)).mean()) if labels else None
    expected, made = (v.reshape(len(x), -1) for v in (expected, made))
    scale, size = spread(expected), np.abs(expected).max(axis=0)
    constant = scale <= CONSTANT * size  # its size means more: its deviation is rounding
    scale = np.maximum(np.where(constant, np.maximum(size, expected.std()), scale), 1e-30)
    error = np.abs(made - expected) / scale
    rms = np.sqrt((error**2).mean(axis=0))
    worst = int(np.argmax(rms))
    return Proof(len(x), agreement, float(error.max()), float(rms[worst]), worst, bytes_model, bytes_artifact)
