"""What a module runs on while it is exported: drawn batches and labels, and values away from where they start.

Zeros, ones and fresh statistics hide what a graph lost, and an example of zeros hides what a training step moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

from edge_client.targets import LEFT_OUT, Sequence, Target
from edge_export.dropout import Drops, repeatable
from edge_export.modes import duplicate, in_training, running
from edge_export.rewriting import Rewriting

KEY = 123_456_789
CONSTANT = 1e-6  # a variance below this is that of a channel that does not vary
LARGE = 10_000.0  # an extreme batch is so many times a normal one

Values = dict[str, Tensor]
Draw = Callable[[int], Tensor]


def inputs(module: nn.Module, example: Tensor, random: torch.Generator) -> Draw:
    """Draws batches: normal numbers, or integers as large as an embedding of the module allows."""
    sample = tuple(example.shape[1:])
    if example.dtype != torch.int64:
        return lambda n: torch.randn((n, *sample), generator=random)
    sizes = sorted({p.num_embeddings for p in module.modules() if isinstance(p, nn.Embedding)}, reverse=True)
    sizes += sorted({n for p in module.parameters() for n in p.shape} - set(sizes), reverse=True)
    probe = duplicate(module).eval()
    for size in sizes:
        try:
            with torch.no_grad():
                probe(torch.full((2, *sample), size - 1))
        except Exception:  # of the author's module, which an index that it lacks may cause
            continue
        return lambda n, most=size: torch.randint(0, most, (n, *sample), generator=random)  # type: ignore[misc]
    return lambda n: example[torch.arange(n) % len(example)]


def labels(target: Target, n: int, random: torch.Generator) -> Tensor:
    """Labels or numbers of `n` samples; some steps of a sequence have no label."""
    made = torch.from_numpy(target.labels(n))
    if made.is_floating_point():
        return torch.randn(made.shape, generator=random)
    drawn = torch.randint(0, target.output[-1], made.shape, generator=random)
    if isinstance(target, Sequence):
        drawn[:, 1::3] = LEFT_OUT
    return drawn


def scaled(module: nn.Module, values: Values, x: Tensor, times: float) -> tuple[Values, Tensor]:
    """`values` and `x` with the inputs multiplied, or where they are integers, with the tables that they look up."""
    if x.is_floating_point():
        return values, times * x
    tables = {id(p.weight) for p in module.modules() if isinstance(p, nn.Embedding | nn.EmbeddingBag)}
    return {k: times * values[k] if id(p) in tables else values[k] for k, p in module.named_parameters()}, x


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers; NaN equals itself."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def probes(module: nn.Module, example: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two drawn batches, zeros, and a large one."""
    draw = inputs(module, example, torch.Generator().manual_seed(21))
    return draw(16), draw(5), 0 * draw(2), (LARGE if example.is_floating_point() else 1) * draw(2)


def buffers_by_step(module: nn.Module, batches: Iterable[Tensor]) -> list[Values]:
    """The buffers at the start and after a training step on each of `batches`.

    Each step starts from what the one before has left, so a buffer that moves later than another is seen too.
    """
    probe = in_training(duplicate(module))
    found = [{k: b.detach().clone() for k, b in probe.named_buffers()}]
    for x in batches:
        _train(probe, x)
        found.append({k: b.detach().clone() for k, b in probe.named_buffers() if k in found[0]})
    return found


def _train(probe: nn.Module, x: Tensor, values: Values | None = None) -> None:
    """Run `probe`, which is in training mode, with its own parameters or `values`. Raises ModelError."""
    with (
        running(f"in training mode on {tuple(x.shape)}"),
        torch.no_grad(),
        Rewriting(repeatable(Drops(torch.tensor([KEY])))),
    ):
        functional_call(probe, {k: v.clone() for k, v in (values or {}).items()}, (x,))


def moved(module: nn.Module, example: Tensor, random: torch.Generator) -> tuple[Values, Values]:
    """The module's parameters and buffers, float32, away from where they start; signs, zeros and infinities stay.

    A norm's statistics are near those of a drawn batch, or deep layers would hide what earlier ones get wrong; other
    buffers have the values that two training steps leave.
    """

    def noise(t: Tensor) -> Tensor:
        return torch.rand(t.shape, generator=random) - 0.5

    values = {}
    for name, own in module.named_parameters():
        p: Tensor = own.detach()
        flat = bool((p == 0).all())
        values[name] = (0.2 * noise(p) if flat else p * (1 + 0.4 * noise(p))).contiguous()
    first, second, *_ = probes(module, example)
    start, _, later = buffers_by_step(module, (first, second))
    kept = {k: later[k] if bool(later[k].isfinite().all()) else b for k, b in start.items()}
    norms = [prefix for prefix, _ in _norms(module)]
    fitted = _fitted(module, first, values) if norms else {}
    for prefix in norms:
        dot = f"{prefix}." if prefix else ""
        mean, var = fitted[f"{dot}running_mean"], fitted[f"{dot}running_var"]
        var = torch.where(var > CONSTANT, var, start[f"{dot}running_var"])
        kept[f"{dot}running_mean"] = mean + 0.4 * noise(mean) * var.sqrt()
        kept[f"{dot}running_var"] = var * (1 + 0.4 * noise(var))
    return values, kept


def _norms(module: nn.Module) -> Iterator[tuple[str, nn.modules.batchnorm._NormBase]]:
    for prefix, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.running_mean is not None:
            yield prefix, part


def _fitted(module: nn.Module, x: Tensor, values: Values) -> Values:
    """The buffers after a training step on batch `x` with these parameters, norms' statistics being the batch's."""
    probe = in_training(duplicate(module))
    for _, part in _norms(probe):
        part.momentum = 1.0
    _train(probe, x, values)
    return {k: b.detach().clone() for k, b in probe.named_buffers()}
