"""The proof of a bundle's graphs: ONNX Runtime runs them, and the author's own module is the witness.

The module runs in float64 under autograd on batches of 16, 5 and 1 samples; loss, every gradient, every new statistic
and the outputs in evaluation mode must agree. Values are moved away from their start first, because zeros, ones and
fresh statistics hide what a graph lost. Nothing of the exporter's own forms takes part, dropout's draws excepted.

The error of a tensor is its largest difference over its largest entry. It may reach `TOLERANCE` at best of a few draws.
Where PyTorch itself in float32 misses that tensor of the witness by more, because some of a million activations lie so
close to zero that a ReLU falls the other way, it may reach a few times PyTorch's error.

Two more batches are extreme: inputs (or embeddings) ten thousand times as large, and zeros. There PyTorch's own float32
is the first witness: what is finite in the module is finite in the graph, and equal within `LOOSE`. Where it is not,
the error against float64 may be a few times PyTorch's, on these parameters or on some one rounding away: on a batch of
zeros a deep network's batch-norms divide rounding errors by deviations near zero. Tensors that this moves share the
largest movement of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from onnx import ModelProto
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from edge_client.errors import ModelError
from edge_client.targets import Target
from edge_export.dropout import Drops, repeatable
from edge_export.modes import duplicate, in_evaluation, in_training
from edge_export.rewriting import Rewriting

BATCHES = (16, 5, 1)
TOLERANCE = 1e-5
DRAWS = 4
FACTOR = 4.0  # how much worse than PyTorch's own float32 a graph may be
MOST = 0.1  # an error that no rounding excuses
LARGE = (10_000.0, 300.0, 10.0)  # an extreme batch is so many times a normal one; less where PyTorch too overflows
EXTREME = 2  # samples of an extreme batch: the mean of two equal ones is exact
LOOSE, FEW = 1e-3, 1e-3  # TOLERANCE and ZERO of an extreme batch, in which sums of large terms cancel
ZERO = 1e-9  # of the largest gradient: less is a zero, as at a bias before a norm, and measured against the largest
KEY = 123_456_789

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Shown:
    """What the proof found: the largest error of a gradient, of a statistic or loss, of an output."""

    gradient: float
    statistic: float
    output: float


def prove(
    module: nn.Module,
    example: Tensor,
    target: Target,
    parameters: Sequence[str],
    buffers: Sequence[str],
    trainable: Sequence[str],
    train: ModelProto,
    evaluation: ModelProto,
) -> Shown:
    """Run both graphs against `module`. Raises ModelError that names the first tensor which differs."""
    random = torch.Generator().manual_seed(20)
    values, moved = _moved(module, random)
    graphs = _Graphs(train, evaluation, parameters, buffers)
    worst = {"grad": 0.0, "new": 0.0, "logits": 0.0}
    draw = _inputs(module, example, random)
    names = ["loss", *(f"grad:{k}" for k in trainable), *(f"new:{k}" for k in buffers), "logits"]
    witness = _Witness(module, target, trainable, buffers)
    _steady(witness, values, moved, draw(5))
    for n in BATCHES:
        least = dict.fromkeys(names, np.inf)
        levels = dict.fromkeys(names, 0.0)
        for _ in range(DRAWS):
            x, y = draw(n), _labels(target, n, random)
            found = graphs.step(names, values, moved, x, y)
            true, own = (witness.step(values, moved, x, y, wide) for wide in (True, False))
            due = [k for k in names if k in true]
            errors, single = _errors(found, true, due), _errors(own, true, due)
            levels = {k: max(levels[k], single[k]) for k in due}
            least = {k: min(least[k], errors[k]) for k in due}
            if max(least.values()) <= TOLERANCE:
                break
        for name, gap in least.items():
            if gap > max(TOLERANCE, min(FACTOR * levels[name], MOST)):
                raise ModelError(_complaint(name, n, gap))
            kind = name.partition(":")[0].replace("loss", "new")
            worst[kind] = max(worst[kind], gap)
    y = _labels(target, EXTREME, random)
    for what, scale in (("large", LARGE), ("zero", (0.0,))):
        for times in scale:
            given, x = _scaled(module, values, draw(EXTREME), times)
            if _extreme(witness, graphs, names, (given, moved, x, y), what):
                break
    return Shown(worst["grad"], worst["new"], worst["logits"])


def _extreme(
    witness: _Witness, graphs: _Graphs, names: Sequence[str], step: tuple[Values, Values, Tensor, Tensor], what: str
) -> bool:
    """Whether the module is finite in an extreme step. Raises ModelError when the graphs are not, or differ."""
    own, made = witness.step(*step, wide=False), graphs.step(names, *step)
    finite = {k: t.isfinite() for k, t in own.items()}
    due = [k for k in names if k in own]
    for name in due:
        if made[name].shape != own[name].shape or not np.isfinite(made[name][finite[name].numpy()]).all():
            raise ModelError(
                f"the exported graph overflows: {_named(name)} is NaN or infinite on a {what} batch, where the "
                "module's is finite; keep what goes into exp, a division, a root or a power in a range"
            )
    found = {k: np.where(finite[k].numpy(), made[k], 0) for k in due}
    if max(_errors(found, _only(own, finite), due, FEW).values()) > LOOSE:
        true = witness.step(*step, wide=True)
        both = {k: finite[k] & true[k].isfinite() for k in due}
        true, found = _only(true, both), {k: np.where(both[k].numpy(), found[k], 0) for k in due}
        errors, levels = _errors(found, true, due, FEW), _errors(_only(own, both), true, due, FEW)
        for random in (torch.Generator().manual_seed(seed) for seed in range(DRAWS)):
            if all(errors[name] <= limit for name, limit in _limits(levels).items()):
                break
            near = witness.step(_nudged(step[0], random), *step[1:], wide=False)
            single = _errors(_only({k: near[k].nan_to_num() for k in due}, both), true, due, FEW)
            levels = {k: max(levels[k], single[k]) for k in due}
        for name, limit in _limits(levels).items():
            if errors[name] > limit:
                raise ModelError(_complaint(name, EXTREME, errors[name], f"{what} "))
    return all(bool(f.all()) for f in finite.values())


def _limits(levels: Mapping[str, float]) -> dict[str, float]:
    """The error that each tensor of an extreme step may have: what rounding moves shares the largest movement."""
    noise = max(levels.values())
    return {k: max(LOOSE, FACTOR * (noise if level > LOOSE else level)) for k, level in levels.items()}


def _nudged(values: Values, random: torch.Generator) -> Values:
    """Each value one rounding up or down."""
    step = torch.finfo(torch.float32).eps
    return {k: v * (1 + step * (2.0 * torch.randint(0, 2, v.shape, generator=random) - 1)) for k, v in values.items()}


def _only(values: Values, which: Mapping[str, Tensor]) -> Values:
    return {k: torch.where(which[k], values[k].detach(), 0) for k in which}


def _scaled(module: nn.Module, values: Values, x: Tensor, times: float) -> tuple[Values, Tensor]:
    """`values` and `x` with the inputs multiplied, or where they are integers, with the tables that they look up."""
    if x.is_floating_point():
        return values, times * x
    tables = {id(p.weight) for p in module.modules() if isinstance(p, nn.Embedding | nn.EmbeddingBag)}
    return {k: times * values[k] if id(p) in tables else values[k] for k, p in module.named_parameters()}, x


def _steady(witness: _Witness, values: Values, moved: Values, x: Tensor) -> None:
    """Refuse a module whose second run on the same values differs from its first."""
    for training in (True, False):
        first, second = witness.twice(values, moved, x, training)
        if not torch.equal(first.nan_to_num(), second.nan_to_num()):
            raise ModelError(
                f"the module gives other outputs when it runs again on the same values{' in training' * training}: it "
                "keeps state in Python or draws randomness of its own; keep state in a float32 buffer, draw by "
                "torch.nn.Dropout"
            )


def _errors(found: Mapping[str, Any], true: Values, names: Sequence[str], zero: float = ZERO) -> dict[str, float]:
    """The error of each tensor of `found`; a gradient below `zero` of the largest is measured against the largest."""
    largest = max((float(t.abs().max()) for k, t in true.items() if k.startswith("grad:") and t.numel()), default=0.0)
    made = {}
    for name in names:
        nothing = name.startswith("grad:") and float(true[name].abs().max()) <= zero * largest
        made[name] = _error(np.asarray(found[name]), true[name], largest if nothing else 0.0)
    return made


def _named(name: str) -> str:
    kind, _, tensor = name.partition(":")
    return {
        "loss": "the training loss",
        "grad": f"the gradient of {tensor!r}",
        "new": f"the value of buffer {tensor!r} after a step",
        "logits": "the output in evaluation mode",
    }[kind]


def _complaint(name: str, n: int, error: float, kind: str = "") -> str:
    return (
        f"the exported graph computes {_named(name)} differently from the module (relative error {error:.1e} on {n} "
        f"{kind}samples); look for Python state, randomness, branches on the batch or its size, or buffers set in "
        "forward, and write them as tensor operators"
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

    def __init__(
        self, train: ModelProto, evaluation: ModelProto, parameters: Sequence[str], buffers: Sequence[str]
    ) -> None:
        self.parameters, self.buffers = parameters, buffers
        self.train, self.evaluation = _session(train, "train.onnx"), _session(evaluation, "eval.onnx")
        self.draws = any(i.name == "key" for i in self.train.get_inputs())

    def step(
        self, names: Sequence[str], values: Values, moved: Values, x: Tensor, y: Tensor
    ) -> dict[str, NDArray[Any]]:
        """What `_Witness.step` gives: `names`, of which the last are the logits."""
        feeds = {k: values[k].numpy() for k in self.parameters} | {k: moved[k].numpy() for k in self.buffers}
        step = {**feeds, "x": x.numpy(), "y": y.numpy()}
        if self.draws:
            step["key"] = np.array([KEY], np.int64)
        try:
            found = [*self.train.run(names[:-1], step), *self.evaluation.run(["logits"], {**feeds, "x": x.numpy()})]
        except Exception as error:  # the runtime's errors share no base class
            raise ModelError(
                f"the exported graphs do not run on {len(x)} samples: {_first_line(error)}; "
                "write the forward pass so that it takes any number of samples"
            ) from None
        return dict(zip(names, map(np.asarray, found), strict=True))


def _session(graph: ModelProto, part: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        return ort.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's errors share no base class
        raise ModelError(f"ONNX Runtime {ort.__version__} does not open {part}: {_first_line(error)}") from None


def _moved(module: nn.Module, random: torch.Generator) -> tuple[Values, Values]:
    """The module's parameters and buffers, float32, away from where they start; signs, zeros and infinities stay."""

    def noise(t: Tensor) -> Tensor:
        return torch.rand(t.shape, generator=random) - 0.5

    values, moved = {}, {}
    for name, own in module.named_parameters():
        p: Tensor = own.detach()
        flat = bool((p == 0).all())
        values[name] = (0.2 * noise(p) if flat else p * (1 + 0.4 * noise(p))).contiguous()
    for name, b in module.named_buffers():
        moved[name] = b.detach().clone()
    for prefix, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.running_mean is not None:
            dot = f"{prefix}." if prefix else ""
            mean, var = moved[f"{dot}running_mean"], moved[f"{dot}running_var"]
            moved[f"{dot}running_mean"] = mean + 0.4 * noise(mean)
            moved[f"{dot}running_var"] = var * (1 + 0.4 * noise(var))
    return values, moved


def _inputs(module: nn.Module, example: Tensor, random: torch.Generator) -> Callable[[int], Tensor]:
    """Draws batches: normal numbers, or integers as large as an embedding of the module allows."""
    sample = tuple(example.shape[1:])
    if example.dtype != torch.int64:
        return lambda n: torch.randn((n, *sample), generator=random)
    sizes = sorted({p.num_embeddings for p in module.modules() if isinstance(p, nn.Embedding)}, reverse=True)
    sizes += sorted({n for p in module.parameters() for n in p.shape} - set(sizes), reverse=True)
    probe = in_evaluation(duplicate(module))
    for size in sizes:
        try:
            with torch.no_grad():
                probe(torch.full((2, *sample), size - 1))
        except Exception:  # the author's module raises what it likes for an index that it has not
            continue
        return lambda n, most=size: torch.randint(0, most, (n, *sample), generator=random)  # type: ignore[misc]
    return lambda n: example[torch.arange(n) % len(example)]


def _labels(target: Target, n: int, random: torch.Generator) -> Tensor:
    labels = torch.from_numpy(target.labels(n))
    if labels.is_floating_point():
        return torch.randn(labels.shape, generator=random)
    return torch.randint(0, target.output[-1], labels.shape, generator=random)


class _Wide(TorchFunctionMode):
    """Whatever the module's code makes as float32 is float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        return func(*map(_widened, args), **{k: _widened(v) for k, v in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


class _Witness:
    """The module itself: one step by autograd and the outputs in evaluation mode, in float64 or float32."""

    def __init__(self, module: nn.Module, target: Target, trainable: Sequence[str], buffers: Sequence[str]) -> None:
        self.module, self.target, self.trainable, self.buffers = module, target, trainable, buffers

    def twice(self, values: Values, moved: Values, x: Tensor, training: bool) -> list[Tensor]:
        """The outputs of two runs of one copy, from the same values each."""
        module = (in_training if training else in_evaluation)(duplicate(self.module))
        made = []
        for _ in range(2):
            state = {k: v.clone() for k, v in (values | moved).items()}
            with torch.no_grad(), Rewriting(repeatable(Drops(torch.tensor([KEY])))):
                made.append(functional_call(module, state, (x,)))
        return made

    def step(self, values: Values, moved: Values, x: Tensor, y: Tensor, wide: bool) -> Values:
        """loss, grad:<name>, new:<name> and logits."""

        def cast(t: Tensor) -> Tensor:
            return t.double() if wide and t.is_floating_point() else t.clone()

        def copied() -> nn.Module:
            return _attributes_cast(duplicate(self.module), cast)

        found: Values = {}
        x, y = cast(x), cast(y)
        with _float64() if wide else _nothing():
            evaluation, state = in_evaluation(copied()), {k: cast(v) for k, v in (values | moved).items()}
            with torch.no_grad():
                found["logits"] = functional_call(evaluation, state, (x,))
            training, state = in_training(copied()), {k: cast(v) for k, v in (values | moved).items()}
            free = {k: state[k].requires_grad_() for k in self.trainable}
            drops = Drops(torch.tensor([KEY]))
            with Rewriting(repeatable(drops)), torch.enable_grad():
                try:
                    loss = self.target.torch_loss(functional_call(training, state, (x,)), y)
                except ValueError as error:
                    if len(x) == 1 and "more than 1 value per channel" in str(error):
                        return found  # PyTorch refuses one value per channel; the graph is defined there
                    raise
            gradients = torch.autograd.grad(loss, list(free.values()), allow_unused=True)
        found["loss"] = loss.detach()
        for (name, value), g in zip(free.items(), gradients, strict=True):
            found[f"grad:{name}"] = torch.zeros_like(value) if g is None else g
        return found | {f"new:{k}": state[k].detach() for k in self.buffers}


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _attributes_cast(module: nn.Module, cast: Callable[[Tensor], Tensor]) -> nn.Module:
    """`module` with the tensors that it holds as plain attributes cast."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor):
                vars(part)[name] = cast(value)
    return module
