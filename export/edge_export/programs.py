"""The PyTorch backend's parts of a bundle: `model.pt2` and `model-eval.pt2`, made by `torch.export` and proved.

The proof loads what is stored and takes one step on a batch, as the backend does: loss, gradients, statistics and
outputs are measured as those of the graphs are (see `proof`).
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.func import functional_call
from torch.fx import GraphModule, Node

from edge_client import authored
from edge_client.errors import ModelError
from edge_export.draws import KEY, inputs, labels, moved
from edge_export.dropout import Drops, repeatable
from edge_export.modes import duplicate, in_training, slow_paths
from edge_export.proof import DRAWS, Arrays, Best
from edge_export.refusals import reason
from edge_export.rewriting import Rewriting, distances, weight_norm
from edge_export.witness import Step, Witness

TRAIN, EVAL = "model.pt2", "model-eval.pt2"
SAMPLES = 5  # of the batch of the proof
_WITHOUT = "export without PyTorch's parts (--no-torch-part or torch_part=False), and report the module"


def prove_programs(witness: Witness, example: Tensor, programs: Mapping[str, bytes], draws: bool) -> None:
    """Run both programs against the module. Raises ModelError that names the first tensor which differs."""
    train, evaluation = _opened(programs[TRAIN]), _opened(programs[EVAL])
    random = torch.Generator().manual_seed(23)
    values, buffers = moved(witness.module, example, random)
    draw, best = inputs(witness.module, example, random), Best()
    for _ in range(DRAWS):
        step = Step(values, buffers, draw(SAMPLES), labels(witness.target, SAMPLES, random))
        try:
            found = _step(train, evaluation, witness, step, draws)
        except Exception as error:  # PyTorch raises many kinds of errors here
            raise ModelError(
                f"{TRAIN} does not run on {SAMPLES} samples: {authored.described(error)[:200]}; {_WITHOUT}"
            ) from error
        if best.add(found, witness.step(step), witness.step(step, wide=True)):
            break
    best.check(SAMPLES, TRAIN, _WITHOUT)


def _opened(program: bytes) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.load(io.BytesIO(program)).module(check_guards=False)


def _step(train: nn.Module, evaluation: nn.Module, witness: Witness, step: Step, draws: bool) -> Arrays:
    """What `Witness.step` gives."""
    given = {k: step.buffers[k].clone() for k in witness.statistics} | {k: v.clone() for k, v in step.values.items()}
    with torch.no_grad():
        logits = functional_call(evaluation, given, (step.x,))
    free = [given[k].requires_grad_() for k in witness.trainable]
    key = (torch.tensor([KEY]),) if draws else ()
    loss = witness.target.torch_loss(functional_call(train, given, (step.x, *key)), step.y)
    gradients: Any = torch.autograd.grad(loss, free, allow_unused=True, materialize_grads=True)
    found = {"loss": loss, "logits": logits, **{f"new:{k}": given[k] for k in witness.statistics}}
    found |= {f"grad:{k}": g for k, g in zip(witness.trainable, gradients, strict=True)}
    return {k: t.detach().numpy() for k, t in found.items()}


def torch_programs(module: nn.Module, example: Tensor, given: Collection[str], draws: bool) -> dict[str, bytes]:
    """`module` in training and in evaluation mode with a dynamic batch, each saved by `torch.export.save`.

    Tensors named in `given` have no values of their own. With `draws` the program in training mode takes a second
    argument, the key of dropout. Raises ModelError.
    """
    key = (torch.zeros(1, dtype=torch.int64),) if draws else ()
    try:
        return {
            TRAIN: _saved(_traceable(in_training(duplicate(module))), (example, *key), given),
            EVAL: _saved(_traceable(duplicate(module).eval()), (example,), given),
        }
    except Exception as error:  # PyTorch raises many kinds of errors here
        raise ModelError(f"torch.export fails on the module: {reason(error)}; {_WITHOUT}") from error


def _traceable(module: nn.Module) -> nn.Module:
    """`module`, whose forward takes the key of dropout too and has nothing that PyTorch traces for one batch only."""
    author = module.forward

    def forward(x: Tensor, key: Tensor | None = None) -> Tensor:
        drops = {} if key is None else repeatable(Drops(key))
        with Rewriting({torch.cdist: distances, torch._weight_norm: weight_norm, **drops}), _in_place(module):
            made: Tensor = author(x)
        return made

    module.forward = forward
    return module


@contextlib.contextmanager
def _in_place(module: nn.Module) -> Iterator[None]:
    """A buffer that forward assigns anew is changed in place: a program drops an assignment."""
    before = [(part, k, b) for part in module.modules() for k, b in part._buffers.items() if b is not None]
    yield
    for part, name, buffer in before:
        now = part._buffers[name]
        if now is not None and now is not buffer:
            part._buffers[name] = buffer.copy_(now)


def _saved(module: nn.Module, inputs: tuple[Tensor, ...], given: Collection[str]) -> bytes:
    n, file = torch.export.Dim("n", min=1), io.BytesIO()
    first = {id(t): k for k, t in module.named_parameters()}
    aliases = {k for k, t in module.named_parameters(remove_duplicate=False) if first[id(t)] in given}
    with torch.no_grad() if not module.training else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with slow_paths():
            program = torch.export.export(module, inputs, dynamic_shapes=({0: n}, None)[: len(inputs)])
        _read_under_first_names(program)
        for name, tensor in program.state_dict.items():
            if name in given or name in aliases:  # one stored zero; the flat vectors give the values
                tensor.data = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        for part in program.graph_module.modules():
            for node in part.graph.nodes if isinstance(part, GraphModule) else ():
                node.meta.pop("stack_trace", None)  # it names files of the author's machine
        program.example_inputs = None
        torch.export.save(program, file)
    return file.getvalue()


def _read_under_first_names(program: ExportedProgram) -> None:
    """The program reads a tensor of several names under the last one; read it under the first, as the bundle does."""
    names = program.graph_signature.inputs_to_parameters
    firsts: dict[Tensor, Node] = {}
    for node in program.graph.nodes:
        if node.name in names:
            first = firsts.setdefault(program.state_dict[names[node.name]], node)
            if first is not node:
                node.replace_all_uses_with(first)
