"""A PyTorch module becomes a bundle: a folder of manifest, graphs, and weights or a seed. See `edge_client.bundle`.

A seed can replace the weights: tensor `name` is drawn from stream ``key(seed, "weights", name)`` of
`edge_kernels.counter` by its own rule `Init` (see `tables.InitScheme`), which any language can repeat. The same module
exports to the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from onnx import ModelProto
from pydantic import ValidationError
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from edge_client import targets
from edge_client.bundle import WARNINGS, WEIGHTS, Bundle, Input, Manifest, Normalisation, Part, digest
from edge_client.errors import ModelError, first_fault
from edge_client.targets import Target, target_type
from edge_export.files import check_free, write_bundle
from edge_export.graphs import eval_graph, train_graph
from edge_export.groups import with_groups
from edge_export.kept_state import refuse_state
from edge_export.modes import duplicate, evaluating, in_training, running
from edge_export.onnx_passes import OWN_NAMES
from edge_export.programs import prove_programs, torch_programs
from edge_export.proof import Shown, prove
from edge_export.refusals import refuse_checkpoint, refuse_inputs, refuse_parts
from edge_export.sample_ids import sample_ids
from edge_export.tables import InitScheme, Tables, tables, unseeded
from edge_export.witness import Witness


def export_bundle(
    module: nn.Module,
    example_batch: Tensor,
    folder: Path,
    *,
    name: str,
    target: Target | Mapping[str, Any],
    seed: int | None = None,
    init: InitScheme = "he",
    trainable: Collection[str] | None = None,
    torch_part: bool = True,
    class_names: Sequence[str] = (),
    normalisation: Normalisation | Mapping[str, Any] | None = None,
    between: tuple[float, float] | None = None,
    warnings: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """Write `module` as a bundle to `folder` and open it.

    Parameters
    ----------
    module:
        Float32 parameters; outputs ``[n, *target.output]`` from a batch ``[n, *sample]``.
    example_batch:
        float32 or int64, at least one sample; only shape and dtype matter.
    name:
        The bundle's name.
    target:
        What the model predicts, such as ``Classification(classes=6)``. A mapping such as ``{"kind": "sequence"}``
        leaves the sizes to the module's outputs.
    seed, init:
        With a seed the weights are those the seed draws by the rules of `init`, and no weights are stored; without
        one the module's own values are.
    trainable:
        Names of the parameters that get gradients; None: those that require gradients in the module.
    torch_part:
        Whether to add `model.pt2` and `model-eval.pt2`, which the PyTorch backend needs.
    class_names:
        What the classes are called, in their order; every personal model carries them.
    normalisation:
        What raw samples go through before the module, such as ``{"mean": [0.5], "std": [0.25]}``. Devices then hold
        raw samples; `example_batch` is normalised.
    between:
        Without one, the lowest and the highest value of samples. A device prints a warning when its samples are far
        outside.
    warnings:
        Lines to show where the bundle is used on this machine.
    progress:
        Gets a line before each stage; those of a deep network take minutes.

    Raises
    ------
    ModelError
        The module cannot be a bundle: what is wrong with it, and what to change.
    """
    folder = Path(folder)
    check_free(folder)
    made = proved_graphs(module, example_batch, target, init=init, trainable=trainable, progress=progress)
    module, target, example, found = made.witness.module, made.witness.target, made.example, made.tables
    names = [r.name for r in (*found.parameters, *found.buffers)]
    if seed is not None and (missing := unseeded(module, init, names)):
        raise ModelError(
            f"no rule draws {missing} from a seed; leave `seed` out, so that the module's own weights are kept"
        )
    parts = _parts(made, names, torch_part, progress, stored=seed is None)
    dtype = "int64" if example.dtype == torch.int64 else "float32"
    ids = sample_ids(made.evaluation, found, tuple(example.shape[1:])) if dtype == "int64" else None
    takes = {"shape": tuple(example.shape[1:]), "dtype": dtype, "normalisation": normalisation, "between": between,
             "ids": ids}  # fmt: skip
    try:
        manifest = Manifest(
            name=name,
            input=Input.model_validate(takes),
            target=target,
            parameters=found.parameters,
            buffers=found.buffers,
            layers=found.layers,
            seed=seed,
            class_names=tuple(class_names),
            draws=made.draws,
            parts={k: Part(sha256=digest(v), size=len(v)) for k, v in sorted(parts.items())},
        )
    except ValidationError as error:
        raise ModelError(f"the bundle's description does not fit the module: {first_fault(error)}") from None
    if warnings:
        parts[WARNINGS] = "".join(f"{line}\n" for line in warnings).encode()
    progress("finding channel groups and cutting the graphs by them")
    return write_bundle(with_groups(manifest, made.by_part), parts, folder)


def _parts(
    made: Graphs, names: Sequence[str], torch_part: bool, progress: Callable[[str], None], stored: bool
) -> dict[str, bytes]:
    """The bundle's files but the manifest, by name; with `stored` the weights among them. Raises ModelError."""
    module, example = made.witness.module, made.example
    parts = {part: graph.SerializeToString(deterministic=True) for part, graph in made.by_part.items()}
    if torch_part:
        progress("writing model.pt2 and running it beside the module")
        programs = torch_programs(module, example, names, made.draws)
        prove_programs(made.witness, example, programs, made.draws)
        parts |= programs
    if stored:
        parts[WEIGHTS] = save(_stored(module, made.tables))
    return parts


@dataclass(frozen=True)
class Graphs:
    """A module with both its graphs, proved. The witness names tensors as they do; `example` is the traced batch."""

    witness: Witness
    example: Tensor
    tables: Tables
    train: ModelProto
    evaluation: ModelProto
    shown: Shown

    @property
    def by_part(self) -> dict[str, ModelProto]:
        """The graphs by the name of their part."""
        return {"train.onnx": self.train, "eval.onnx": self.evaluation}

    @property
    def draws(self) -> bool:
        """Whether a training step drops entries at random: its graph then has the input `key`."""
        return any(v.name == "key" for v in self.train.graph.input)


def proved_graphs(
    module: nn.Module,
    example_batch: Tensor,
    target: Target | Mapping[str, Any],
    *,
    init: InitScheme = "he",
    trainable: Collection[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Graphs:
    """The graphs of `export_bundle`, run against the module. Raises ModelError."""
    progress("tracing the training step and the evaluation")
    refuse_parts(module)
    refuse_inputs(module)
    if any(map(is_lazy, module.parameters())):  # as PyTorch does in the first run
        _run(module, example_batch)
    refuse_checkpoint(module, example_batch)
    module, prefix = _renamed(_in_float32(module))
    example = _example(module, example_batch)
    target = _target(target, _output(module, example))
    found = tables(module, example, init, None if trainable is None else [prefix + name for name in trainable])
    parameters, buffers = [r.name for r in found.parameters], [r.name for r in found.buffers]
    free = [r.name for r in found.parameters if r.trainable]
    witness = Witness(module, target, free, buffers)
    refuse_state(witness, example)
    train = train_graph(module, example, parameters, buffers, free, target)
    evaluation = eval_graph(module, example, parameters, buffers)
    if isinstance(target, targets.Classification | targets.Sequence):
        _refuse_probabilities(module, example, _maker(evaluation, "logits"))
    nodes = len(train.graph.node)
    progress(f"running train.onnx, of {nodes:,} operators, and eval.onnx beside the module in float64")
    return Graphs(witness, example, found, train, evaluation, prove(witness, example, train, evaluation))


def _maker(graph: ModelProto, name: str) -> str:
    """The operator whose output is `name`."""
    return next((str(node.op_type) for node in graph.graph.node if name in node.output), "")


def _refuse_probabilities(module: nn.Module, batch: Tensor, last: str) -> None:
    """Raise ModelError for a classifier that returns probabilities, or whose operator `last` is a softmax."""
    with torch.no_grad():
        trains = _gives_probabilities(module, lambda m: in_training(m)(batch.clone()))
    if trains:
        raise ModelError(
            "the module ends with a softmax or other probabilities, and the loss takes a softmax itself; "
            "return the logits"
        )
    if last == "Softmax" or _gives_probabilities(module, lambda m: _run(m, batch)):
        raise ModelError(
            "the module ends with a softmax or other probabilities in evaluation mode, and the loss and `predict` take "
            "a softmax themselves; return the logits in both modes"
        )


def _gives_probabilities(module: nn.Module, run: Callable[[nn.Module], Tensor]) -> bool:
    """Whether what `run` makes of copies of `module` are probabilities, also of one with other parameters.

    A head of zeros with a prior as its bias has such outputs by chance.
    """
    if not _sum_to_one(run(duplicate(module))):
        return False
    moved = duplicate(module)
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).to(p.dtype))
    return _sum_to_one(run(moved))


def _sum_to_one(outputs: Tensor) -> bool:
    """Whether the outputs of each sample are probabilities, perhaps clamped or with a small number added."""
    return bool((outputs >= 0).all()) and torch.allclose(outputs.sum(-1), torch.ones(()), atol=1e-3)


class _Named(nn.Module):
    """A module whose tensors' names start with `model.`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.model(x)
        return made


def _renamed(module: nn.Module) -> tuple[nn.Module, str]:
    """`module`, and the prefix of its tensors' names: none, unless a graph uses one of the names itself."""
    names = [n for n, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())]
    if any(map(OWN_NAMES.match, names)):
        return _Named(module), "model."
    return module, ""


def _in_float32(module: nn.Module) -> nn.Module:
    """`module`, or a copy in which every buffer of other floats that float32 holds exactly is float32."""

    def exact(b: Tensor) -> bool:
        return b.is_floating_point() and b.dtype != torch.float32 and torch.equal(b.float().to(b.dtype), b)

    if not any(map(exact, module.buffers())):
        return module
    made = duplicate(module)
    for part in made.modules():
        part._buffers.update({k: b.float() for k, b in part.named_buffers(recurse=False) if exact(b)})
    return made


def _example(module: nn.Module, batch: Tensor) -> Tensor:
    """A batch for tracing whose size no other axis has, after checks of the module and the batch."""
    if batch.dtype not in (torch.float32, torch.int64) or batch.ndim < 2 or batch.shape[0] < 1:
        raise ModelError(f"the example is {batch.dtype} of shape {tuple(batch.shape)}; give float32 or int64 [n, ...]")
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if value.is_floating_point() and value.dtype != torch.float32:
            raise ModelError(f"tensor {name!r} is {value.dtype}; call module.float()")
    taken = {*batch.shape[1:], *_output(module, batch.detach())} | {n for p in module.parameters() for n in p.shape}
    size = next(n for n in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67) if n not in taken)
    return batch.detach()[torch.arange(size) % batch.shape[0]].clone()


def _output(module: nn.Module, batch: Tensor) -> tuple[int, ...]:
    """The shape of one sample's outputs. Raises ModelError when the module does not run or gives something else."""
    outputs = _run(duplicate(module), batch)
    if not isinstance(outputs, Tensor) or outputs.dtype != torch.float32:
        found = f"{outputs.dtype}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ModelError(f"the module returns {found}; return one float32 tensor, which the loss is taken of")
    if outputs.ndim < 2 or outputs.shape[0] != batch.shape[0]:
        raise ModelError(
            f"the module returns outputs of shape {tuple(outputs.shape)} for a batch of {batch.shape[0]}; their first "
            "axis must be the samples, and another must hold each sample's outputs, if only one: [n, 1], not [n]"
        )
    return tuple(outputs.shape[1:])


def _run(module: nn.Module, batch: Tensor) -> Any:
    """What `module` gives in evaluation mode. Raises ModelError when it does not run."""
    with running(f"on a batch of {batch.dtype} {tuple(batch.shape)}"), evaluating(module):
        return module(batch.clone())


def _target(wanted: Target | Mapping[str, Any], output: tuple[int, ...]) -> Target:
    """`wanted` with its sizes, after checking that the outputs suit it."""
    target = wanted if isinstance(wanted, Target) else _sized(wanted, output)
    if target.output != output:
        raise ModelError(
            f"the module's outputs have shape {_shape(output)}, a {target.kind} target of {target.model_dump()} needs "
            f"{_shape(target.output)}; change the target or the last layer"
        )
    return target


def _sized(wanted: Mapping[str, Any], output: tuple[int, ...]) -> Target:
    """The target of these settings; sizes that they leave out follow from the outputs."""
    try:
        kind = target_type(wanted.get("kind"))
    except ValueError as error:
        raise ModelError(str(error)) from None
    sizes, unsuited = kind.sizes(output), f"outputs of shape {_shape(output)} do not suit a {wanted['kind']} target"
    if not sizes and not set(kind.shape) <= wanted.keys():
        raise ModelError(
            f"{unsuited}, whose shape is {_shape(kind.shape)}; reshape them at the end of forward, as .flatten(1) "
            "does, or choose another target"
        )
    try:
        return kind.model_validate({**sizes, **wanted})
    except ValidationError as error:
        raise ModelError(f"{unsuited}: {first_fault(error, 'target')}") from None


def _shape(output: tuple[int | str, ...]) -> str:
    return f"[n, {', '.join(map(str, output))}]"


def _stored(module: nn.Module, found: Tables) -> dict[str, Tensor]:
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {r.name: state[r.name].detach().contiguous() for r in (*found.parameters, *found.buffers)}
