"""Graphs of blocks drawn at random, for finding what a list of known graphs misses.

    python -m edge_bench.compaction.random_graphs --first 0 --count 200

A graph is a stack of three to six blocks on images or on sequences; every block takes any width and gives any other.
The blocks join branches, split, shuffle, gate, pool, pad, normalise, attend and activate. The same seed gives the same
graph and the same masks.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from math import gcd
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

from edge_bench.command_line import run_module
from edge_bench.compaction.masks import KINDS
from edge_bench.compaction.suite import compacted, export, prepare
from edge_bench.compaction.zoo.case import CLASSES, Case, conv
from edge_client.align import Align

ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Tanh, nn.ELU, nn.PReLU, nn.Softplus, nn.ReLU6, nn.Identity,
)  # fmt: skip


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = (run,)

    def forward(self, x: Tensor) -> Tensor:
        """What the function makes of `x`."""
        return self.run[0](x)


class Joined(nn.Module):
    """Branches on the same input, joined by a function."""

    def __init__(self, join: Callable[..., Tensor], *branches: nn.Module) -> None:
        super().__init__()
        self.join, self.branches = (join,), nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """The joined branches."""
        return self.join[0](*(branch(x) for branch in self.branches))


def _shuffled(x: Tensor, groups: int) -> Tensor:
    c, h, w = x.shape[1:]
    return x.reshape(-1, groups, c // groups, h, w).transpose(1, 2).reshape(-1, c, h, w)


def _swapped(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    return torch.cat([b, a], 1)


def image_block(random: Random, inner: int, out: int, deep: int = 0) -> nn.Module:
    """A block on [n, inner, h, w] that gives [n, out, h, w]. `inner` is a multiple of 4, `out` is even."""
    act = random.choice(ACTIVATIONS)
    kernel = random.choice((1, 3))
    plain = nn.Sequential(conv(inner, out, kernel, bias=random.random() < 0.5))
    if random.random() < 0.6:
        plain.append(nn.BatchNorm2d(out, affine=random.random() < 0.85))
    plain.append(act())
    if deep > 1:
        return plain

    def sub(a: int, b: int) -> nn.Module:
        return image_block(random, a, b, deep + 1)

    kind = random.randrange(19)
    if kind == 0:
        return Joined(torch.add, sub(inner, out), sub(inner, out))
    if kind == 1:
        sign = random.choice((-0.7, 0.5, 1.0))
        return nn.Sequential(sub(inner, out), Joined(lambda a, b: a + sign * b, nn.Identity(), sub(out, out)))
    if kind == 2:
        return Joined(lambda a, b: torch.cat([a, b], 1), sub(inner, out // 2), sub(inner, out - out // 2))
    if kind == 3:
        return Joined(torch.mul, sub(inner, out), nn.Sequential(sub(inner, out), nn.Sigmoid()))
    if kind == 4:
        return nn.Sequential(conv(inner, inner, 3, groups=inner), nn.BatchNorm2d(inner), act(), conv(inner, out, 1))
    if kind == 5:
        groups = gcd(4, out)
        return nn.Sequential(conv(inner, out, groups=groups), act(), Apply(lambda x: _shuffled(x, groups)))
    if kind == 6:
        return nn.Sequential(sub(inner, out), Apply(_swapped), nn.ReLU())
    if kind == 7:
        gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(out, 8, 1), nn.ReLU(), conv(8, out, 1), nn.Sigmoid())
        return nn.Sequential(sub(inner, out), Joined(torch.mul, nn.Identity(), gate))
    if kind == 8:
        return nn.Sequential(plain, nn.AvgPool2d(3, 1, 1, count_include_pad=random.random() < 0.5))
    if kind == 9:
        return nn.Sequential(plain, nn.MaxPool2d(3, 1, 1))
    if kind == 10:
        pad = random.choice((nn.ReflectionPad2d(1), nn.ConstantPad2d(1, 0.5), nn.ReplicationPad2d(1), nn.ZeroPad2d(1)))
        return nn.Sequential(plain, pad, conv(out, out, 3, padding=0), act())
    if kind == 11:
        return nn.Sequential(plain, nn.MaxPool2d(2), nn.Upsample(scale_factor=2), conv(out, out), act())
    if kind == 12:
        up = nn.ConvTranspose2d(out, out, 2, 2, groups=random.choice((1, 2)))
        return nn.Sequential(plain, nn.AvgPool2d(2), up, act())
    if kind == 13:
        shared = conv(out, out)
        return nn.Sequential(plain, shared, act(), shared, act())
    if kind == 14:
        return nn.Sequential(nn.BatchNorm2d(inner), act(), conv(inner, out, kernel))
    if kind == 15:
        return Joined(torch.maximum, sub(inner, out), sub(inner, out))
    if kind == 16:
        return nn.Sequential(plain, random.choice((nn.GroupNorm(2, out), nn.InstanceNorm2d(out, affine=True))), act())
    if kind == 17:
        return nn.Sequential(conv(inner, 4 * out, 1), nn.PixelShuffle(2), nn.MaxPool2d(2), conv(out, out), act())
    return nn.Sequential(plain, Apply(lambda x: x[:, : out // 2] * 2 - x[:, out // 2 :].flip(1)), conv(out // 2, out))


def sequence_block(random: Random, inner: int, out: int) -> nn.Module:
    """A block on [n, t, inner] that gives [n, t, out]. `inner` and `out` are multiples of 4."""
    act = random.choice(ACTIVATIONS)
    kind = random.randrange(8)
    if kind == 0:
        return nn.Sequential(nn.Linear(inner, out), act())
    if kind == 1:
        branch = nn.Sequential(nn.LayerNorm(inner), nn.Linear(inner, 2 * inner), act(), nn.Linear(2 * inner, inner))
        return nn.Sequential(Joined(torch.add, nn.Identity(), branch), nn.Linear(inner, out))
    if kind == 2:
        return _Attention(inner, out, random.choice((1, 2, 4)))
    if kind == 3:
        return nn.Sequential(nn.Linear(inner, 2 * out), nn.GLU(-1))
    if kind == 4:
        return _Recurrent(random.choice((nn.LSTM, nn.GRU)), inner, out, random.choice((1, 2)), random.random() < 0.5)
    if kind == 5:
        steps = Apply(lambda x: x.transpose(1, 2))
        return nn.Sequential(steps, nn.Conv1d(inner, out, 3, padding=1), nn.BatchNorm1d(out), act(), steps)
    if kind == 6:
        gate = nn.Sequential(nn.Linear(inner, out), nn.Sigmoid())
        return Joined(torch.mul, nn.Linear(inner, out), gate)
    half = out // 2
    return Joined(
        lambda a, b: torch.cat([b, a], -1), nn.Linear(inner, half), nn.Sequential(nn.Linear(inner, half), act())
    )


class _Attention(nn.Module):
    def __init__(self, inner: int, out: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.read, self.out = nn.Linear(inner, 3 * inner), nn.Linear(inner, out)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.read(x).chunk(3, -1))
        y = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        made: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return made


class _Recurrent(nn.Module):
    def __init__(self, make: Callable[..., nn.Module], inner: int, out: int, layers: int, both: bool) -> None:
        super().__init__()
        self.cells = make(inner, out // (1 + both), layers, batch_first=True, bidirectional=both)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.cells(x)[0]
        return made


def case(seed: int) -> Case:
    """Graph number `seed`. Its input is 3 x 8 x 8 or 7 x 8."""
    random = Random(seed)
    widths = [4 * random.randint(2, 5) for _ in range(random.randint(3, 6))]
    sequence = random.random() < 0.35
    flat = random.random() < 0.5

    def make() -> nn.Module:
        own = Random(seed + 1_000_000)
        if sequence:
            layers = [sequence_block(own, a, b) for a, b in zip([8, *widths], widths, strict=False)]
            end: list[nn.Module] = [nn.Flatten() if flat else Apply(lambda x: x.mean(1))]
            return nn.Sequential(*layers, *end, nn.Linear(widths[-1] * (7 if flat else 1), CLASSES))
        layers = [image_block(own, a, b) for a, b in zip([4, *widths], widths, strict=False)]
        end = [nn.AvgPool2d(2), nn.Flatten()] if flat else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        first = Apply(lambda x: functional.pad(x, (0, 0, 0, 0, 0, 1)))
        return nn.Sequential(first, *layers, *end, nn.Linear(widths[-1] * (16 if flat else 1), CLASSES))

    head = str(len(make()._modules) - 1)
    return Case(f"random {seed}", make, (7, 8) if sequence else (3, 8, 8), (head,))


def main(
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    count: Annotated[int, typer.Option(help="How many graphs.")] = 50,
    align: Annotated[Align, typer.Option(help="Widths; auto is the rule here.")] = "none",
) -> None:
    """Compact random graphs; print those that fail, and a count of the rest."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    fine = above = 0
    for seed in range(first, first + count):
        made = case(seed)
        with tempfile.TemporaryDirectory() as folder:
            try:
                bundle = export(made, Path(folder) / "bundle")
            except Exception as error:  # a crash is a result too
                print(f"{seed}: export: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            for kind in KINDS:
                subject = prepare(made, bundle, kind, 0.5, seed)
                r = compacted(subject, kind, 0.5, Path(folder) / "personal.onnx", align=align)
                if r.status != "ok" or not r.exact:
                    print(f"{seed} {kind}: {r.status[:300]} error {r.error_std} dense {r.error_dense_std}", flush=True)
                else:
                    fine += 1
                    above += not r.reached
                    if not r.reached:
                        print(f"{seed} {kind}: {r.macs_compact} multiply-adds, bound {r.macs_bound}", flush=True)
    print(f"{fine} exact, {above} of them above the bound")


if __name__ == "__main__":
    run_module(main)
