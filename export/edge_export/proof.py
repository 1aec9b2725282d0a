"""The proof of a bundle's graphs: ONNX Runtime runs them, and the author's own module is the witness.

The module runs in float64 under autograd on batches of 16, 5 and 1 samples; loss, every gradient, every new statistic
and the outputs in evaluation mode must agree. Values are moved away from their start first (see `draws`), buffers for
the batches of 16 and 1.

The error of a tensor is its largest difference over its largest entry. It may reach `TOLERANCE` at best of a few draws.
Where float32 itself misses that tensor of the witness by more, it may reach a few times that: the error of PyTorch in
float32, because some of a million activations lie so close to zero that a ReLU falls the other way, or of a float64
step in which every result is rounded to float32 at random (see `rounding`), because it sums thousands of terms. A
gradient that is zero, and a gradient or statistic of which PyTorch's float32 has no digit right, is measured against
the largest one.

Two more batches are extreme: inputs (or embeddings) ten thousand times as large, and zeros. What is finite in PyTorch's
float32 is finite in the graph. The error against float64 may reach `LOOSE`, or a few times the tensor's noise: the
error of PyTorch's float32, or of float64 steps in which every result is rounded to float32 at random (see `rounding`).
Gates saturate there, and on zeros a deep network's batch-norms divide rounding errors by deviations near zero.

A large batch proves little of a tensor that overflows in PyTorch too, that is zero, or whose noise allows more than
`MOST`. Where there is one, smaller large batches follow. What none of them proves, or what rounding alone decides on
zeros, is proved finite there, and within its noise while that leaves a digit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import ModelProto
from torch import Tensor

from edge_client.errors import ModelError
from edge_client.runtimes.onnx import open_onnx
from edge_export.draws import KEY, LARGE, Values, inputs, labels, moved, scaled
from edge_export.rounding import EPS, Rounding
from edge_export.witness import Step, Witness

BATCHES = (16, 5, 1)
TOLERANCE = 1e-5
DRAWS = 4
FACTOR = 4.0  # how much worse than float32 itself a graph may be
MOST = 0.1  # an error that no rounding excuses
EXTREMES = {"large": (LARGE, 300.0, 10.0), "zero": (0.0,)}  # less where some tensor is not proved
EXTREME = 2  # samples of an extreme batch: the mean of two equal ones is exact
NUDGES = 32  # draws of an extreme step's noise at most; in 59 exports of a correct ResNet-20 three needed 7 to 14
LOOSE = 1e-3  # TOLERANCE of an extreme batch, in which sums of large terms cancel
ZERO = 1e-9  # of the largest gradient: less is a zero, as at a bias before a norm, and measured against the largest

GRAPH, BRANCHES = (
    "the exported graph",
    "look for what the batch or its size decides, such as a squeeze() without an axis or a number in Python, and write "
    "it as tensor operators; where there is nothing, report the module",
)

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Shown:
    """What the proof found: the largest error of a gradient, of a statistic or loss, of an output."""

    gradient: float
    statistic: float
    output: float


@dataclass
class Best:
    """Over a few draws: each tensor's least error, and the largest error that float32 itself makes."""

    errors: dict[str, float] = field(default_factory=dict)
    levels: dict[str, float] = field(default_factory=dict)

    def add(self, found: Arrays, own: Values, true: Values) -> bool:
        """Whether every tensor was right in a draw."""
        unknown = _unknown(own, true)
        for name, error in _errors(found, true, unknown).items():
            self.errors[name] = min(self.errors.get(name, np.inf), error)
        for name, error in _errors(own, true, unknown).items():
            self.levels[name] = max(self.levels.get(name, 0.0), error)
        return max(self.errors.values()) <= TOLERANCE

    def allow(self, rounded: Values, own: Values, true: Values) -> None:
        """Count the errors of a step with random roundings as float32's own."""
        for name, error in _errors(rounded, true, _unknown(own, true)).items():
            self.levels[name] = max(self.levels[name], error)

    def check(self, n: int, part: str = GRAPH, advice: str = BRANCHES) -> None:
        """Raise ModelError for the first tensor that is wrong."""
        for name, error in self.errors.items():
            if error > max(TOLERANCE, min(FACTOR * self.levels[name], MOST)):
                raise ModelError(_complaint(name, f"{n} samples", error, part, advice))

    def largest(self, *kinds: str) -> float:
        return max((e for name, e in self.errors.items() if name.startswith(kinds)), default=0.0)


def prove(witness: Witness, example: Tensor, train: ModelProto, evaluation: ModelProto) -> Shown:
    """Run both graphs against the module. Raises ModelError that names the first tensor which differs."""
    random, module, target = torch.Generator().manual_seed(20), witness.module, witness.target
    values, later = moved(module, example, random)
    start = {k: b for k, b in module.named_buffers() if k in later}
    draw, graphs = inputs(module, example, random), _Graphs(train, evaluation)
    found, told = [], set[str]()
    for n, held in zip(BATCHES, (later, start, later), strict=True):
        best = Best()
        for _ in range(DRAWS):
            step = Step(values, held, draw(n), labels(target, n, random))
            true = witness.step(step, wide=True)
            told |= {*true} - _nothing(true)
            own = witness.step(step)
            if best.add(graphs.step(step), own, true):
                break
            best.allow(witness.step(step, wide=True, rounding=Rounding(random)), own, true)
        best.check(n)
        found.append(best)
    for what, scale in EXTREMES.items():
        for times in scale:
            given, x = scaled(module, values, draw(EXTREME), times)
            step = Step(given, later, x, labels(target, EXTREME, random))
            if told <= _extreme(witness, graphs, *_telling(witness, step, random), what):
                break
    return Shown(*(max(b.largest(*kinds) for b in found) for kinds in (("grad",), ("new", "loss"), ("logits",))))


def _telling(witness: Witness, step: Step, random: torch.Generator) -> tuple[Step, Values]:
    """`step` and what it gives, with labels that leave a gradient: what the module predicts rightly may leave none."""
    own = witness.step(step)
    for _ in range(DRAWS):
        if any(bool(t.any()) for k, t in own.items() if k.startswith("grad:")):
            break
        step = replace(step, y=labels(witness.target, EXTREME, random))
        own = witness.step(step)
    return step, own


def _extreme(witness: Witness, graphs: _Graphs, step: Step, own: Values, what: str) -> set[str]:
    """The tensors that an extreme step proves. Raises ModelError when the graphs overflow, or differ from `own`."""
    made, finite = graphs.step(step), {k: t.isfinite() for k, t in own.items()}
    for name in own:
        if made[name].shape != own[name].shape or not np.isfinite(made[name][finite[name].numpy()]).all():
            raise ModelError(
                f"the exported graph overflows: {_named(name)} is NaN or infinite on a {what} batch, where the "
                "module's is finite; keep what goes into exp, a division, a root or a power in a range"
            )
    true = witness.step(step, wide=True)
    both = {k: finite[k] & true[k].isfinite() for k in own}
    true = _only(true, both)
    errors, noise = _errors(_kept(made, both), true), _errors(_only(own, both), true)
    for seed in range(NUDGES):
        if all(error <= _limit(noise[k]) for k, error in errors.items()):
            break
        random = torch.Generator().manual_seed(seed)
        nudged = replace(step, values=_nudged(step.values, random))
        near = witness.step(nudged, wide=True, rounding=Rounding(random))
        moved = _errors(_only({k: near[k].nan_to_num() for k in own}, both), true)
        noise = {k: max(noise[k], moved[k]) for k in own}
    for name, error in errors.items():
        if error > _limit(noise[name]):
            raise ModelError(_complaint(name, f"{EXTREME} {what} samples", error))
    return {k for k, b in both.items() if bool(b.all()) and _limit(noise[k]) <= MOST} - _nothing(true)


def _limit(noise: float) -> float:
    """The error that a tensor of an extreme step may have where rounding moves it by `noise`.

    From 1 on no digit is known, and draws differ by thousands: a deep norm of equal values multiplies one rounding.
    """
    return max(LOOSE, FACTOR * noise) if noise < 1 else np.inf


def _nudged(values: Values, random: torch.Generator) -> Values:
    """Each value one rounding of float32 up or down."""
    signs = {k: 2 * torch.randint(0, 2, v.shape, generator=random) - 1 for k, v in values.items()}
    return {k: v * (1 + EPS * signs[k]) for k, v in values.items()}


def _only(values: Values, which: Mapping[str, Tensor]) -> Values:
    return {k: torch.where(which[k], values[k].detach(), 0) for k in which}


def _kept(found: Arrays, which: Mapping[str, Tensor]) -> Arrays:
    return {k: np.where(which[k].numpy(), found[k], 0) for k in which}


def _errors(found: Mapping[str, Any], true: Values, unknown: Collection[str] = ()) -> dict[str, float]:
    """The error of each tensor of `true`. A zero gradient, or what is `unknown`, is measured against the largest."""
    nothing = _nothing(true).union(unknown)
    scale = {k: _largest(true, k.partition(":")[0]) if k in nothing else 0.0 for k in true}
    return {k: _error(np.asarray(found[k]), t, scale[k]) for k, t in true.items()}


def _nothing(true: Values) -> set[str]:
    """The gradients below `ZERO` of the largest."""
    least = ZERO * _largest(true, "grad")
    return {k for k, t in true.items() if k.startswith("grad:") and not bool((t.abs() > least).any())}


def _unknown(own: Values, true: Values) -> set[str]:
    """The gradients and statistics of which PyTorch's float32 has no digit right."""
    return {k for k, error in _errors(own, true).items() if k.startswith(("grad:", "new:")) and error >= 1}


def _largest(true: Values, kind: str) -> float:
    """The largest entry of all gradients or statistics."""
    return max((float(t.abs().max()) for k, t in true.items() if k.startswith(f"{kind}:") and t.numel()), default=0.0)


def _named(name: str) -> str:
    kind, _, tensor = name.partition(":")
    return {
        "loss": "the training loss",
        "grad": f"the gradient of {tensor!r}",
        "new": f"the value of buffer {tensor!r} after a step",
        "logits": "the output in evaluation mode",
    }[kind]


def _complaint(name: str, batch: str, error: float, part: str = GRAPH, advice: str = BRANCHES) -> str:
    return (
        f"{part} computes {_named(name)} differently from the module (relative error {error:.1e} on {batch}); {advice}"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]


def _error(found: NDArray[Any], true: Tensor, least: float) -> float:
    """The largest difference over the largest entry or `least`; infinite for another shape or what is not finite."""
    wanted = true.detach().double().numpy()
    if found.shape != wanted.shape:
        return np.inf
    if not wanted.size:
        return 0.0
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, abs(found - wanted))
    scale = max(abs(wanted).max(), least)
    if not np.isfinite(scale):
        return 0.0 if same.all() else np.inf
    return float(np.nan_to_num(difference.max() / (scale + 1e-30), nan=np.inf)) if scale else float(difference.max())


class _Graphs:
    """Both graphs in ONNX Runtime."""

    def __init__(self, train: ModelProto, evaluation: ModelProto) -> None:
        graphs = {"train.onnx": train, "eval.onnx": evaluation}
        self.sessions = [open_onnx(g.SerializeToString(), what=part, refused=ModelError) for part, g in graphs.items()]

    def step(self, step: Step) -> Arrays:
        """What `Witness.step` gives."""
        given = step.values | step.buffers | {"x": step.x, "y": step.y, "key": torch.tensor([KEY])}
        found: dict[str, Any] = {}
        try:
            for session in self.sessions:
                feeds = {i.name: given[i.name].numpy() for i in session.get_inputs()}
                found |= dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
        except Exception as error:  # the runtime's errors share no base class
            raise ModelError(
                f"the exported graphs do not run on {len(step.x)} samples: {_first_line(error)}; "
                "write the forward pass so that it takes any number of samples"
            ) from None
        return {k: np.asarray(v) for k, v in found.items()}
