"""Why a module is refused, in one sentence: the part of the module, the operator, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from types import CellType, FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from edge_client import authored
from edge_client.errors import ModelError
from edge_export.modes import duplicate, in_training
from edge_export.onnx_writer import Unsupported

ADVICE = {
    "add_ sub_ mul_ div_ copy_ fill_ zero_": "keep it as a float32 buffer (register_buffer), or do not change it",
    "sort topk kthvalue median mode argsort": "use max or a softmax: ties would fall differently on each engine",
    "rrelu": "use torch.nn.LeakyReLU, or torch.nn.Dropout, whose draws repeat",
    "bucketize searchsorted": "write (x.unsqueeze(-1) > edges).sum(-1)",
    "linalg_matrix_exp linalg_householder_product linalg_solve linalg_inv linalg_qr linalg_svd linalg_eigh linalg_det "
    "linalg_cholesky_ex _linalg_solve_ex linalg_inv_ex _linalg_svd _linalg_eigh _linalg_det": (
        "compute it before the export and keep it as a buffer, or drop the parametrization "
        "(torch.nn.utils.parametrize.remove_parametrizations)"
    ),
    "cumprod prod": "use exp(log(x).cumsum(dim)) or products of slices",
    "cummax cummin": "use max over a window",
    "nonzero masked_select unique unique_consecutive _unique2": "keep the size and use where or masked_fill",
    "bernoulli rand randn randint rand_like randn_like randint_like normal uniform exponential randperm multinomial": (
        "use torch.nn.Dropout, whose draws repeat, or x.bernoulli_(p) with a number p while the module trains; no "
        "other randomness is exported"
    ),
    "_fft_r2c _fft_c2c _fft_c2r complex polar view_as_complex view_as_real": (
        "keep real and imaginary parts in two tensors; a transform is a product with sines and cosines"
    ),
    "atan2": "use atan",
    "native_dropout": "let dropout follow module.training",
    "_ctc_loss": "return logits; the loss is the target's",
}
_BY_NAME = {name: text for names, text in ADVICE.items() for name in names.split()}
GENERAL = "write it with the operators that docs/export.md lists"
_READS_DATA = re.compile(
    r"data-dependent|GuardOnDataDependent|_local_scalar_dense|Cannot call \.?(item|numpy|tolist)"
    r"|boolean value of Tensor|FakeTensor.*numpy|Cannot access data pointer|aten\.item|nonzero"
    r"|\.item\(\)|\.tolist\(\)|\.numpy\(\)|unbacked",
    re.IGNORECASE,
)


_CAUSES = (  # a part of PyTorch's text, what it is about, what to write
    (
        "autograd.Function with functorch",
        "calls an autograd.Function of the old form, forward(ctx, ...)",
        "give it forward without ctx, and setup_context(ctx, inputs, output)",
    ),
    (
        "would mutate a captured Tensor",
        "changes a tensor in place that it has not made: its input, or a plain attribute",
        "start from a copy, as in x = x.clone()",
    ),
    (
        "unsupported ScalarType BFloat16",
        "computes with a bfloat16 tensor",
        "keep it as float32, or as a buffer, which is made float32",
    ),
    (
        "INTERNAL ASSERT",
        "makes PyTorch fail on a change in place",
        "compute a new tensor, or keep what changes as a float32 buffer",
    ),
)


class Path:
    """Which part of a module runs, kept by hooks; after an error, which part raised it."""

    def __init__(self, module: nn.Module) -> None:
        self.running: list[str] = []
        for name, part in module.named_modules():
            part.register_forward_pre_hook(lambda _m, _in, name=name: self.running.append(name))
            part.register_forward_hook(lambda _m, _in, _out: self._done())

    def _done(self) -> None:
        self.running.pop()

    def __str__(self) -> str:
        return named(self.running[-1] if self.running else "")


def named(path: str) -> str:
    """A part of the module as a sentence names it."""
    return f"module {path!r}" if path else "the module's own forward"


def refuse_parts(module: nn.Module) -> None:
    """Raise ModelError for a part whose kind or settings no graph can have, and for hooks that change gradients."""
    advice = "no graph runs it: remove it, and write what it does as tensor operators or requires_grad_(False)"
    known = set(module.modules())
    for path, part in module.named_modules():
        for name, value in _held(path, part):
            if isinstance(value, nn.Module) and value not in known:
                raise ModelError(
                    f"{name!r} is a layer that is not registered in the module; "
                    "keep it in a torch.nn.ModuleList or ModuleDict"
                )
            if isinstance(value, Tensor):
                _refuse_odd(value, f"tensor {name!r}")
        for name, value in vars(part).items():
            cells = (value.__closure__ or ()) if isinstance(value, FunctionType) else ()
            if any(cell != CellType() and isinstance(cell.cell_contents, nn.Module) for cell in cells):
                raise ModelError(
                    f"attribute {'.'.join(filter(None, (path, name)))!r} is a function that holds a layer, and in a "
                    "copy of the module, as the export runs, it would run the first one's; make it a method"
                )
        if isinstance(part, torch.jit.ScriptModule):
            raise ModelError(f"{named(path)} is a TorchScript module; give the module itself, without torch.jit")
        if hasattr(part, "_orig_mod"):
            raise ModelError(f"{named(path)} is compiled; give the module itself, without torch.compile")
        if getattr(part, "sparse", False) and isinstance(part, nn.Embedding | nn.EmbeddingBag):
            raise ModelError(f"{named(path)} has sparse gradients; set sparse=False")
        if getattr(part, "max_norm", None) is not None and isinstance(part, nn.Embedding | nn.EmbeddingBag):
            raise ModelError(
                f"{named(path)} changes its table in forward; set max_norm=None, and scale what it returns"
            )
        if part._backward_hooks or part._backward_pre_hooks:
            raise ModelError(f"{named(path)} has a backward hook; {advice}")
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and not part.track_running_stats:
            raise ModelError(f"{named(path)}: batch-norm keeps no running statistics; set track_running_stats=True")
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.momentum is None:
            raise ModelError(f"{named(path)}: batch-norm has momentum=None; give a number, such as momentum=0.1")
    for name, p in module.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ModelError(f"parameter {name!r} has a gradient hook (register_hook); {advice}")


def refuse_inputs(module: nn.Module) -> None:
    """Raise ModelError for a forward that needs more than a batch."""
    taken = signature(module.forward)
    try:
        taken.bind(None)
    except TypeError:
        needed = [n for n, p in taken.parameters.items() if p.default is p.empty and not p.kind.name.startswith("VAR_")]
        raise ModelError(
            f"the module's forward takes {' and '.join(needed) or 'nothing'}, and devices give it one batch; "
            "join them in one x, and take them apart in forward"
        ) from None


def _held(path: str, part: nn.Module) -> Iterator[tuple[str, Any]]:
    """The paths and values of the tensors of `part`, and of all that lies in its lists, tuples and dicts."""
    for name, value in vars(part).items():
        own = (path,) if name in ("_parameters", "_buffers") else (path, name)
        if isinstance(value, dict):
            inner = [*value.items()]
        else:
            inner = [*enumerate(value if isinstance(value, list | tuple) else ())]
            inner += [("", value)] if isinstance(value, Tensor) else []
        yield from ((".".join(filter(None, (*own, str(key)))), held) for key, held in inner)


def _refuse_odd(value: Tensor, what: str) -> None:
    """Raise ModelError for what is no plain tensor of values."""
    if value.is_meta:
        raise ModelError(f"{what} is on the device 'meta' and has no values; build the module on the CPU")
    if value.is_quantized or value.is_nested or value.layout != torch.strided:
        raise ModelError(f"{what} is quantized, sparse, nested or of another layout; keep a plain dense tensor")
    if not (type(value) is Tensor or issubclass(type(value), nn.Parameter) or is_lazy(value)):
        raise ModelError(
            f"{what} is a {type(value).__name__}, a subclass of torch.Tensor; keep x.as_subclass(torch.Tensor)"
        )


def refuse_checkpoint(module: nn.Module, batch: Tensor) -> None:
    """Raise ModelError for the part that calls `torch.utils.checkpoint` on `batch` in training mode."""
    copy = in_training(duplicate(module))
    path, stop = Path(copy), mock.Mock(side_effect=_Checkpointed)
    inner = {"CheckpointFunction": mock.Mock(apply=stop), "_checkpoint_without_reentrant_generator": stop}
    try:
        with torch.enable_grad(), mock.patch.multiple(checkpoint, **inner):
            copy(batch.clone())
    except _Checkpointed:
        raise ModelError(f"{path} calls torch.utils.checkpoint; call the function without checkpoint") from None
    except Exception:  # the author's own; what runs the module next says which
        return


class _Checkpointed(Exception):
    """A part calls `torch.utils.checkpoint`."""


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The parts that called each ATen operator."""

    def __init__(self, path: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path = path
        self.found: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.setdefault(func.overloadpacket.__name__, str(self.path))
        return func(*args, **(kwargs or {}))


def where(module: nn.Module, example: Tensor, operator: str) -> str:
    """The part of `module` whose forward pass calls `operator`, or an operator that it is the backward of."""
    copy = in_training(duplicate(module))
    try:
        with torch.no_grad(), _Seen(Path(copy)) as seen:
            copy(example)
    except Exception:  # it ran before; where it no longer does, the answer is less exact
        return "the model"
    plain = operator.strip("_").removesuffix("_backward")
    stems = {name.strip("_"): path for name, path in reversed(seen.found.items())}
    close = [
        path for stem, path in stems.items() if len(stem) > 3 and (stem.startswith(plain) or plain.startswith(stem))
    ]
    found: str = stems.get(plain) or (close or ["the model"])[-1]
    return found


def unsupported(module: nn.Module, example: Tensor, error: Unsupported) -> ModelError:
    """The refusal of an operator without an ONNX form."""
    operator = error.operator.rpartition(".")[2] or error.operator
    advice = _BY_NAME.get(operator.partition("_with_noise")[0].removesuffix("_backward"))
    what, _, instead = error.why.partition("; ")
    what = what or ("changes a tensor that is no buffer in place" if operator.endswith("_") else "has no ONNX form")
    instead = instead or advice or GENERAL
    return ModelError(f"{where(module, example, operator)}: operator {operator!r} {what}; {instead}")


@contextmanager
def in_a_sentence(module: nn.Module, example: Tensor, path: Path) -> Iterator[None]:
    """Errors of tracing and writing within the block become a ModelError; the cause stays attached."""
    try:
        yield
    except ModelError as error:
        if path.running:
            raise ModelError(f"{path}: {error}") from error
        raise
    except Unsupported as error:
        raise unsupported(module, example, error) from error
    except Exception as error:  # PyTorch raises many kinds of errors here
        place = str(path)
        if line := authored.place_of(error):
            place = f"{place} ({line})"
        text = reason(error)
        for found, what, instead in _CAUSES:
            if found in text:
                raise ModelError(f"{place} {what}; {instead}") from error
        if _READS_DATA.search(f"{type(error).__name__} {error}"):
            raise ModelError(
                f"{place} reads a tensor's values in Python (an if, int(), .item(), .tolist() or an index by a mask); "
                "write it with torch.where or other tensor operators"
            ) from error
        raise ModelError(f"{place} cannot be traced into a graph with a dynamic batch: {text}; {GENERAL}") from error


def reason(error: BaseException) -> str:
    """The first sentence of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return plain.splitlines()[0].strip().rstrip(".;") if plain else type(error).__name__
