"""Operators that move values or make them from sizes. See `operators`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from edge_export.executorch.layout import Laid, laid, merged, settled, transposed, unsqueezed
from edge_export.executorch.values import Host, Node, Value, host, pad, reversed_along, tensor, text


def reshape(node: Node, x: Value, shape: Value) -> Value:
    wanted = host(shape)
    if isinstance(x, np.ndarray):
        return x.reshape([int(n) for n in wanted])
    if not node.get("allowzero", 0):
        wanted = [x.shape[i] if isinstance(n, int) and n == 0 else n for i, n in enumerate(wanted)]
    if isinstance(x, Laid):
        made = merged(x, wanted)
        if made is not None:
            return made
    return tensor(x).reshape(wanted)


def flatten(node: Node, x: Value) -> Value:
    x = tensor(x)
    axis = node.get("axis", 1) % (x.ndim + 1)
    if axis == 1:
        return x.flatten(1) if x.ndim > 1 else x.reshape(-1, 1)
    return x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))


def transpose(node: Node, x: Value) -> Value:
    perm = node.get("perm", list(reversed(range(x.ndim))))
    return x.transpose(perm) if isinstance(x, np.ndarray) else transposed(x, perm)


def squeeze(node: Node, x: Value, axes: Value = None) -> Value:
    named = node.get("axes") if axes is None else host(axes)
    if isinstance(x, np.ndarray):
        return np.squeeze(x, None if named is None else tuple(named))
    x = tensor(x)
    gone = [a % x.ndim for a in named] if named else [a for a, n in enumerate(x.shape) if n == 1]
    return x.reshape([n for a, n in enumerate(x.shape) if a not in gone])


def unsqueeze(node: Node, x: Value, axes: Value = None) -> Value:
    named = node.get("axes") if axes is None else host(axes)
    if isinstance(x, np.ndarray):
        return np.expand_dims(x, tuple(named))
    rank = x.ndim + len(named)
    for axis in sorted(a % rank for a in named):
        x = unsqueezed(x, axis)
    return x


def concat(node: Node, *parts: Value) -> Value:
    axis = node.get("axis", 0)
    if all(isinstance(p, np.ndarray) for p in parts):
        return np.concatenate(parts, axis)
    if len(parts) == 1:
        return parts[0]
    first = laid(parts[0] if isinstance(parts[0], Laid) else tensor(parts[0]))
    if all(isinstance(p, Laid) and p.order == first.order for p in parts):
        return first.with_base(torch.cat([p.base for p in parts], first.order[axis]))
    return torch.cat([tensor(p) for p in parts], axis)


def split(node: Node, x: Value, sizes: Value = None) -> list[Value]:
    axis = node.get("axis", 0)
    length = x.shape[axis]
    if sizes is not None:
        lengths = host(sizes)
    elif node.get("split") is not None:
        lengths = list(node.get("split"))
    else:
        count = node.get("num_outputs", node.outputs)
        each = -(-length // count)
        lengths = [each] * (count - 1) + [length - each * (count - 1)]
    if isinstance(x, np.ndarray):
        return list(np.split(x, np.cumsum(lengths)[:-1], axis))
    starts, x = np.cumsum([0, *lengths]), tensor(x)
    return [x.narrow(axis, int(a), int(n)) for a, n in zip(starts, lengths, strict=False)]


def slice_operator(node: Node, x: Value, starts: Value, ends: Value, axes: Value = None, steps: Value = None) -> Value:
    low, high = host(starts), host(ends)
    named = list(range(len(low))) if axes is None else host(axes)
    by = [1] * len(low) if steps is None else host(steps)
    if isinstance(x, np.ndarray):
        cut = [slice(None)] * x.ndim
        for axis, a, b, s in zip(named, low, high, by, strict=True):
            cut[axis] = slice(a, b, s)
        return x[tuple(cut)]
    x = laid(x)
    base = x.base
    for axis, a, b, s in zip(named, low, high, by, strict=True):
        at = x.order[axis % x.ndim]
        if isinstance(s, int) and s < 0:
            if s != -1 or not (a == -1 or a >= base.shape[at] - 1) or b > -base.shape[at] - 1:
                raise node.refuse(f"step {s}")
            base = reversed_along(base, at)
        else:
            base = base[(slice(None),) * at + (slice(a, b, s),)]
    return settled(x.with_base(base))


def gather(node: Node, x: Value, index: Value) -> Value:
    axis = node.get("axis", 0)
    if isinstance(x, np.ndarray) and isinstance(index, np.ndarray):
        return np.asarray(np.take(x, index.astype(np.int64), axis))
    x = tensor(x)
    axis %= x.ndim
    if isinstance(index, np.ndarray) and index.ndim == 0:
        return x.select(axis, int(index))
    places = tensor(index).to(torch.int64)
    if isinstance(index, np.ndarray):
        places = torch.from_numpy(np.where(index < 0, index + x.shape[axis], index).astype(np.int64))
    if axis == 0 and x.ndim == 2:
        return functional.embedding(places, x)
    made = torch.index_select(x, axis, places.reshape(-1))
    return made.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])


def gather_elements(node: Node, x: Value, index: Value) -> Tensor:
    return torch.gather(tensor(x), node.get("axis", 0), tensor(index).to(torch.int64))


def scatter_elements(node: Node, x: Value, index: Value, updates: Value) -> Value:
    how, axis = text(node.get("reduction", "none")), node.get("axis", 0)
    if how not in ("none", "add"):
        raise node.refuse(f"reduction={how}")
    x, places, values = tensor(x), tensor(index).to(torch.int64), tensor(updates)
    return x.scatter_add(axis, places, values) if how == "add" else x.scatter(axis, places, values)


def scatter_nd(node: Node, x: Value, index: Value, updates: Value) -> Value:
    x, places, values = tensor(x), tensor(index).to(torch.int64), tensor(updates)
    if text(node.get("reduction", "none")) != "add" or (isinstance(places.shape[-1], int) and places.shape[-1] != 1):
        raise node.refuse("another reduction than the sum of rows")
    rows = values.reshape(-1, *x.shape[1:])
    spread = places.reshape(-1, *[1] * (x.ndim - 1)).expand_as(rows)
    return x.scatter_add(0, spread, rows)


def expand(_: Node, x: Value, shape: Value) -> Value:
    wanted, x = host(shape), tensor(x)
    missing = len(wanted) - x.ndim
    sizes = [
        x.shape[i - missing] if i >= missing and isinstance(n, int) and n == 1 else n for i, n in enumerate(wanted)
    ]
    return x.expand([*x.shape[: max(-missing, 0)], *sizes])


def tile(_: Node, x: Value, repeats: Value) -> Tensor:
    return tensor(x).repeat(host(repeats))


def pad_operator(node: Node, x: Value, widths: Value, value: Value = None, axes: Value = None) -> Value:
    mode, given = text(node.get("mode", "constant")), host(widths)
    named = list(range(x.ndim)) if axes is None else [a % x.ndim for a in host(axes)]
    half = len(given) // 2
    pairs = {a: (given[i], given[half + i]) for i, a in enumerate(named)}
    if mode == "constant":
        x = laid(x)
        both = [pairs.get(x.order.index(a), (0, 0)) for a in range(x.ndim)]
        fill = 0.0 if value is None else float(host(value)[0])
        return settled(x.with_base(pad(x.base, [b for b, _ in both] + [a for _, a in both], fill)))
    x = tensor(x)
    for axis, (before, after) in pairs.items():
        n = x.shape[axis]
        if before < 0 or after < 0:
            raise node.refuse("a negative width")
        if before or after:
            if mode == "edge":
                first, last = x.narrow(axis, 0, 1), x.narrow(axis, n - 1, 1)
                left, right = [first] * before, [last] * after
            elif mode == "reflect":
                left = [x.narrow(axis, i, 1) for i in range(before, 0, -1)]
                right = [x.narrow(axis, n - 2 - i, 1) for i in range(after)]
            elif mode == "wrap":
                left = [x.narrow(axis, n - before, before)] if before else []
                right = [x.narrow(axis, 0, after)] if after else []
            else:
                raise node.refuse(f"mode={mode}")
            x = torch.cat([*left, x, *right], axis)
    return x


def resize(node: Node, x: Value, _: Value = None, scales: Value = None, sizes: Value = None) -> Value:
    x, mode = tensor(x), text(node.get("mode", "nearest"))
    rank, space = x.ndim - 2, list(x.shape[2:])
    for name in ("axes", "antialias"):
        if node.get(name):
            raise node.refuse(name)
    if text(node.get("keep_aspect_ratio_policy", "stretch")) != "stretch":
        raise node.refuse("keep_aspect_ratio_policy")
    factors = host(scales) if scales is not None and np.asarray(scales).size else None
    wanted = _resized(node, factors, space) if factors else host(sizes)[2:]
    if (factors and any(f != 1 for f in factors[:2])) or (not factors and host(sizes)[1] != x.shape[1]):
        raise node.refuse("a change of batch or channels")
    how = text(node.get("coordinate_transformation_mode", "half_pixel"))
    if mode == "nearest":
        rounding = text(node.get("nearest_mode", "round_prefer_floor"))
        # Only then does every value repeat as often as the next.
        repeats = (how, rounding) == ("asymmetric", "floor") or (
            how in ("half_pixel", "pytorch_half_pixel") and rounding.startswith("round_prefer")
        )
        if not repeats or any(w % n for w, n in zip(wanted, space, strict=True)):
            raise node.refuse(f"nearest from {space} to {wanted}, {how}, {rounding}")
        for axis, (w, n) in enumerate(zip(wanted, space, strict=True), 2):
            x = x.repeat_interleave(w // n, axis) if w != n else x
        return x
    single = how == "pytorch_half_pixel" and 1 in wanted  # whose one value is the first and not the middle
    if mode == "linear" and rank == 2 and how in ("align_corners", "half_pixel", "pytorch_half_pixel") and not single:
        return functional.interpolate(x, size=wanted, mode="bilinear", align_corners=how == "align_corners")
    raise node.refuse(f"mode={mode}, {how} on {rank} axes")


def _resized(node: Node, factors: Sequence[float], space: Sequence[int]) -> list[int]:
    """The sizes that factors make; refused where they are not whole, because the places then follow the factor."""
    made = [float(np.float32(f) * np.float32(n)) for f, n in zip(factors[2:], space, strict=True)]
    if any(abs(m - round(m)) > 1e-5 * m for m in made):
        raise node.refuse(f"scales {list(factors[2:])} of {list(space)}")
    return [round(m) for m in made]


def depth_to_space(node: Node, x: Value) -> Value:
    x, by = tensor(x), node.get("blocksize")
    n, c, h, w = x.shape
    if text(node.get("mode", "DCR")) == "CRD":
        return x.reshape(n, c // by**2, by, by, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // by**2, h * by, w * by)
    return x.reshape(n, by, by, c // by**2, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // by**2, h * by, w * by)


def space_to_depth(node: Node, x: Value) -> Value:
    x, by = tensor(x), node.get("blocksize")
    n, c, h, w = x.shape
    return x.reshape(n, c, h // by, by, w // by, by).permute(0, 3, 5, 1, 2, 4).reshape(n, c * by**2, h // by, w // by)


def shape_of(node: Node, x: Value) -> Host:
    sizes = list(x.shape)[node.get("start", 0) : node.get("end")]
    return np.array(sizes, dtype=np.int64 if all(isinstance(n, int) for n in sizes) else object)


def constant_of_shape(node: Node, shape: Value) -> Tensor:
    from onnx import numpy_helper

    stored = node.get("value")
    fill = numpy_helper.to_array(stored).reshape(-1) if stored is not None else np.zeros(1, np.float32)
    return torch.full(host(shape), fill[0].item(), dtype=torch.from_numpy(fill).dtype)


def range_operator(_: Node, start: Value, end: Value, step: Value) -> Value:
    (a,), (b,), (s,) = host(start), host(end), host(step)
    if all(isinstance(v, int | float) for v in (a, b, s)):
        return np.arange(a, b, s)
    return torch.arange(a, b, s)


def one_hot(node: Node, index: Value, depth: Value, values: Value) -> Tensor:
    (size,), (off, on) = host(depth), host(values)
    axis = node.get("axis", -1)
    places = tensor(index).unsqueeze(axis)
    shape = [1] * places.ndim
    shape[axis] = size
    hit = places == torch.arange(size).reshape(shape)
    return torch.where(hit, torch.scalar_tensor(on), torch.scalar_tensor(off))


def trilu(node: Node, x: Value, k: Value = None) -> Tensor:
    shift = 0 if k is None else host(k)[0]
    return torch.triu(tensor(x), shift) if node.get("upper", 1) else torch.tril(tensor(x), shift)


def identity(_: Node, x: Value) -> Value:
    return x
