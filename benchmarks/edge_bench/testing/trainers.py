"""What every training engine must do: the reference's numbers on the same bundle, as a pure function."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_bench.testing.require import require
from edge_client.bundle import F32, Bundle, Manifest
from edge_client.targets import LEFT_OUT, Regression, Sequence
from edge_client.training import Gradient, Trainer, open_trainer
from edge_client.training.sgd import Sgd

Samples = tuple[NDArray[Any], NDArray[Any]]


def samples(manifest: Manifest, n: int, seed: int, tokens: int = 2) -> Samples:
    """`n` random samples in the shape of the bundle's input, labels of its target; token ids are below `tokens`.

    Some steps of a sequence have no label.
    """
    rng = np.random.default_rng(seed)
    shape = (n, *manifest.input.shape)
    whole = manifest.input.dtype == "int64"
    x = rng.integers(0, tokens, shape) if whole else rng.standard_normal(shape).astype(np.float32)
    y = manifest.target.labels(n)
    if isinstance(manifest.target, Regression):
        return x, rng.standard_normal(y.shape).astype(np.float32)
    classes = getattr(manifest.target, "classes", 1)
    y = rng.integers(0, classes, y.shape).astype(y.dtype)
    if isinstance(manifest.target, Sequence):
        y[:, 1:][rng.random((n, manifest.target.steps - 1)) < 0.4] = LEFT_OUT
    return x, y


def check_trainer(trainer: Trainer, bundle: Bundle, reference: str = "onnxruntime", tokens: int = 2) -> None:
    """The engine beside the engine `reference` on random samples. Raises AssertionError."""
    due = open_trainer(reference, bundle)
    who, start = type(trainer).__name__, bundle.model()
    require(trainer.manifest == bundle.manifest, f"{who}: `manifest` is not the bundle's")
    for n in (32, 7, 2):
        x, y = samples(bundle.manifest, n, n, tokens)
        g, expected = (t.gradient(start.parameters, start.buffers, x, y) for t in (trainer, due))
        close = abs(g.loss - expected.loss) <= 1e-5 * abs(expected.loss) + 1e-7
        require(
            close, f"{who}: the loss of {n} samples is {g.loss:.6g}, {reference}'s {expected.loss:.6g}; it is the mean"
        )
        for t in bundle.manifest.parameters:
            norm = float(np.linalg.norm(expected.parameters[t.span]))
            error = float(np.linalg.norm(g.parameters[t.span] - expected.parameters[t.span]))
            require(
                error <= 1e-4 * norm + 1e-6,
                f"{who}: the gradient of {t.name} over {n} samples is off by {error:.2g}, its norm is {norm:.2g}",
            )
        stats = np.allclose(g.buffers, expected.buffers, rtol=1e-4, atol=1e-5)
        require(stats, f"{who}: batch-norm statistics after {n} samples differ from {reference}'s")
        logits, found = (t.logits(start.parameters, start.buffers, x) for t in (due, trainer))
        require(
            found.shape == logits.shape and np.allclose(found, logits, rtol=1e-4, atol=1e-4),
            f"{who}: the outputs for {n} samples differ from {reference}'s, or their shape {found.shape} does",
        )
    is_pure(trainer, bundle, tokens)
    takes_read_only(trainer, bundle, tokens)
    ends_where(trainer, trained(due, bundle, tokens), bundle, tokens)


def is_pure(trainer: Trainer, bundle: Bundle, tokens: int = 2) -> None:
    """A result depends on the arguments alone, not on earlier calls."""
    start, (x, y) = bundle.model(), samples(bundle.manifest, 8, 1, tokens)
    models = (
        (start.parameters, start.buffers),
        (start.parameters, start.buffers * 2),  # one vector is as before: the other must be read anew
        (start.parameters * 2, start.buffers),
    )
    found: dict[int, Gradient] = {}
    for i in (0, 1, 2, 1, 0):
        g = trainer.gradient(*models[i], x, y)
        trainer.logits(*models[i], x)
        due = found.setdefault(i, Gradient(g.loss, g.parameters.copy(), g.buffers.copy()))
        same = np.array_equal(g.parameters, due.parameters) and np.array_equal(g.buffers, due.buffers)
        require(same, f"{type(trainer).__name__}: the same arguments give another gradient after other calls")


def takes_read_only(trainer: Trainer, bundle: Bundle, tokens: int = 2) -> None:
    """Parameters of a payload, which cannot be written, serve as any."""
    start, (x, y) = bundle.model(), samples(bundle.manifest, 4, 1, tokens)
    parameters, buffers = (np.frombuffer(a.tobytes(), np.float32) for a in (start.parameters, start.buffers))
    who = type(trainer).__name__
    loss = trainer.gradient(parameters, buffers, x, y).loss
    due = trainer.gradient(start.parameters, start.buffers, x, y).loss
    require(loss == due, f"{who}: read-only parameters give the loss {loss:.6g}, others {due:.6g}")
    outputs = trainer.logits(parameters, buffers, x)
    same = np.array_equal(outputs, trainer.logits(start.parameters, start.buffers, x))
    require(same, f"{who}: read-only parameters give other outputs")


def trained(trainer: Trainer, bundle: Bundle, tokens: int = 2) -> tuple[F32, F32]:
    """Parameters and statistics after fifty steps of SGD over batches of 2 to 16 samples."""
    start = bundle.model()
    parameters, buffers = start.parameters.copy(), start.buffers.copy()
    sgd = Sgd(len(parameters), lr=0.02, momentum=0.9)
    for step in range(50):
        x, y = samples(bundle.manifest, (16, 9, 16, 4, 2)[step % 5], 100 + step, tokens)
        g = trainer.gradient(parameters, buffers, x, y)
        buffers[:] = g.buffers
        sgd.step(parameters, g.parameters)
    return parameters, buffers


def ends_where(trainer: Trainer, expected: tuple[F32, F32], bundle: Bundle, tokens: int = 2) -> None:
    """`trained` with this engine ends at the `expected` model and statistics."""
    who, start = type(trainer).__name__, bundle.model()
    moved = distance(start.parameters, expected[0])
    require(moved > 0.02, f"the reference hardly moved in fifty steps ({moved:.2g}): this bundle cannot tell")
    got, stats = trained(trainer, bundle, tokens)
    off = distance(got, expected[0])
    require(off < 1e-3, f"{who}: fifty steps end {off:.2g} of the model's norm away from the reference")
    same = np.allclose(stats, expected[1], rtol=1e-3, atol=1e-4)
    require(same, f"{who}: after fifty steps the batch-norm statistics differ from the reference's")


def distance(a: F32, b: F32) -> float:
    """How far a is from b, in units of b's norm."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
