"""What a module keeps between runs beside its parameters and buffers, which a graph cannot keep.

Copies of the module run one step on a batch, and then twice on another, from the same parameters and buffers each time.

- An attribute that differs after the last two runs is state: a counter, a list that grows, a running mean in a plain
  tensor, a generator. It is refused by its name, however late it takes effect.
- What only the first run sets is a cache, such as position ids or a mask, when a copy that has not run gives the same
  step. Otherwise the first run decides what later ones compute, and the attributes that it set are named.
- What a run writes for inspection, such as `self.last_attention`, has the same value after equal runs and passes.

Attributes are those of every part, of the objects in them, of the author's classes, what hooks hold, and the numbers
and generators at the top of the author's files.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edge_client.errors import ModelError
from edge_export.draws import Values, inputs, labels, moved
from edge_export.refusals import named
from edge_export.witness import Copies, Step, Witness

_OWN = frozenset(vars(nn.Module())) - {"training", "_forward_hooks", "_forward_pre_hooks"}  # PyTorch's own bookkeeping
_LIBRARIES = ("torch", "numpy", "builtins")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, torch.device)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
DEEP = 8  # objects within objects
_DRAWS, _DROPOUT = "draws", "use torch.nn.Dropout, whose draws repeat on every engine"
CLOSE = 1e-5  # a step's tensors repeat up to the order of sums

State = dict[tuple[str, str], Any]  # by the path of a part and the attribute's name


def refuse_state(witness: Witness, example: Tensor) -> None:
    """Raise ModelError when what one run leaves in Python can change the next."""
    seed = torch.Generator().manual_seed(22)
    draw = inputs(witness.module, example, seed)
    values, buffers = moved(witness.module, example, seed)
    first, step = (Step(values, buffers, draw(n), labels(witness.target, n, seed)) for n in (3, 5))
    copies, drawn, torchs = witness.copies(), _drawn(), torch.get_rng_state()
    fresh = _state(copies, values, buffers)
    witness.step(first, copies=copies)
    witness.step(step, copies=copies)
    once = _state(copies, values, buffers)
    again = witness.step(step, copies=copies)
    if (source := _differing(drawn, _drawn())) is not None:
        raise ModelError(f"{named(_drawing(witness, step))} draws random numbers from {source}; {_DROPOUT}")
    twice = _state(copies, values, buffers)
    if (found := _differing(once, twice)) is not None:
        if any(isinstance(entry, tuple) and entry[:1] == (_DRAWS,) for entry in twice.get(found, [])):
            raise ModelError(f"{_place(found)} draws random numbers; {_DROPOUT}")
        raise ModelError(
            f"{_place(found)} changes in every run, and a graph keeps no Python state; keep it in a float32 buffer "
            "that tensor operators change, or remove it"
        )
    if not torch.equal(torchs, torch.get_rng_state()):
        return  # tracing names the operator that draws
    if not _same(again, witness.step(step)):
        if (found := _differing(fresh, once)) is None:
            raise ModelError(
                "the module gives other results when it runs again on the same values: it draws random numbers or "
                f"reads what changes by itself, such as a clock; {_DROPOUT}"
            )
        raise ModelError(
            f"{_place(found)} is set in the first run, and later runs give other results; set it in __init__, or "
            "keep it in a float32 buffer that tensor operators change"
        )


def _same(one: Values, two: Values) -> bool:
    def close(a: Tensor, b: Tensor) -> bool:
        scale = float(b.abs().nan_to_num().max()) if b.numel() else 0.0
        return a.shape == b.shape and torch.allclose(a, b, CLOSE, CLOSE * scale, equal_nan=True)

    return one.keys() == two.keys() and all(close(one[k], two[k]) for k in one)


def _place(found: tuple[str, str]) -> str:
    if found[1] in ("_forward_hooks", "_forward_pre_hooks"):
        return f"what a forward hook of {named(found[0])} keeps"
    return f"attribute {'.'.join(filter(None, found))!r}"


def _differing(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Any:
    """The first key whose value is new, gone or another; None when all are the same."""
    return next((k for k in (*after, *before) if before.get(k, before) != after.get(k, after)), None)


# --- generators of all modules


def _drawn() -> dict[str, Any]:
    """The states of the generators that every module can reach."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {"Python's random": random.getstate(), "numpy.random": (kind, np.asarray(keys).tobytes(), *rest)}


def _drawing(witness: Witness, step: Step) -> str:
    """The path of the innermost part that draws; "" when no part does now."""
    copies, found = witness.copies(), list[str]()
    for copy in (copies.evaluation, copies.training):
        before: list[dict[str, Any]] = []
        for path, part in copy.named_modules():
            part.register_forward_pre_hook(lambda *_, before=before: before.append(_drawn()))
            part.register_forward_hook(
                lambda *_, before=before, path=path: found.append(path) if before.pop() != _drawn() else None
            )
    witness.step(step, copies=copies)
    return next(iter(found), "")


# --- attributes


def _state(copies: Copies, *given: Values) -> State:
    """What the copies hold beside the tensors that are given to a step."""
    found: State = {}
    for copy in (copies.evaluation, copies.training):
        seen = set(map(id, copy.modules()))
        for path, part in copy.named_modules():
            for name, value in _attributes(path, part, given):
                known = found.setdefault((path, name), [])
                known.append(_print(value, seen, DEEP))
    return found


def _attributes(path: str, part: nn.Module, given: tuple[Values, ...]) -> Iterator[tuple[str, Any]]:
    for name, value in vars(part).items():
        if name not in _OWN:
            yield name, value
    dot = f"{path}." if path else ""
    yield from ((k, b) for k, b in part._buffers.items() if not any(dot + k in values for values in given))
    for cls in type(part).__mro__:
        if cls.__module__.split(".")[0] in _LIBRARIES:
            continue
        for name, value in vars(cls).items():
            if not name.startswith("__"):
                yield f"{cls.__name__}.{name}", value
        for name, value in vars(sys.modules.get(cls.__module__, ModuleType(""))).items():
            if isinstance(value, (bool, int, float, *_GENERATORS)):
                yield f"{cls.__module__.rpartition('.')[2]}.{name}", value


def _print(value: Any, seen: set[int], deep: int) -> Any:
    """A value that equals that of the same object later, unless what it holds has changed."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return str(value.dtype), tuple(value.shape), hash(plain.flatten().view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape, repr(value.tolist()) if value.dtype.hasobject else hash(value.tobytes())
    if isinstance(value, _GENERATORS):
        return _DRAWS, _generator(value)
    if isinstance(value, itertools.count):
        return repr(value)
    if id(value) in seen or deep == 0 or isinstance(value, type | ModuleType):
        return None
    seen.add(id(value))

    def printed(values: Any) -> list[Any]:
        return [_print(v, seen, deep - 1) for v in values]

    if isinstance(value, Mapping):
        return printed(itertools.chain.from_iterable(value.items()))
    if isinstance(value, list | tuple | deque):
        return printed(value)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, printed(value)))
    if isinstance(value, MethodType):
        return printed([value.__self__, value.__func__])
    if isinstance(value, FunctionType):
        return printed([*map(_contents, value.__closure__ or ()), value.__defaults__, value.__kwdefaults__])
    return printed(getattr(value, "__dict__", {}).values())


def _generator(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return hash(value.get_state().numpy().tobytes())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        kind, keys, *rest = value.get_state()
        return kind, hash(np.asarray(keys).tobytes()), *rest
    return hash(value.getstate())


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
