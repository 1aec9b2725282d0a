"""A function in the author's Python file builds the model; here the model becomes a bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from pydantic import ValidationError

from edge_client import authored, toml
from edge_client.bundle import About, Bundle
from edge_client.errors import ConfigError, first_fault
from edge_export.tables import InitScheme, unseeded
from edge_export.writer import export_bundle

WHAT = "a function that returns the torch module"
SILENT = About()


def read_about(path: Path) -> About:
    """The TOML file that `--about` names. Raises ConfigError with the setting at fault."""
    try:
        return About.model_validate(toml.read(path, "--about"))
    except ValidationError as error:
        raise ConfigError(f"--about {path}: setting {first_fault(error, 'file', About.model_fields)}") from None


def export_factory(
    place: str,
    shape: tuple[int, ...],
    out: Path,
    *,
    dtype: Literal["float32", "int64"] = "float32",
    target: Mapping[str, Any],
    seed: int | None = None,
    init: InitScheme = "he",
    name: str | None = None,
    torch_part: bool = True,
    about: About = SILENT,
    progress: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """The bundle of the module that the function at `place` builds, written to `out`; a sample has `shape`.

    Without `name` the bundle has that of the function's file; the other arguments are those of `export_bundle`.
    PyTorch's generator starts from `seed`, or 0, so the same file gives the same weights. The bundle's warnings name
    weights that will count as trained and are not the same when they are built again. Raises ConfigError, AuthorError
    for an exception of the author's code, ModelError when the module cannot be a bundle.
    """
    build = authored.load(place, WHAT)
    torch.manual_seed(seed or 0)
    with authored.theirs(place):
        module = build()
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"{place} returned a value of type {type(module).__name__}; it must return a torch.nn.Module")
    found = "" if seed is not None else drawn(build, module, init)
    example = torch.zeros((2, *shape), dtype=getattr(torch, dtype))
    return export_bundle(
        module,
        example,
        out,
        name=name or authored.stem(place),
        target=target,
        seed=seed,
        init=init,
        torch_part=torch_part,
        class_names=about.class_names,
        normalisation=about.normalisation,
        between=about.between,
        warnings=[found] if found else [],
        progress=progress,
    )


class Unseeded:
    """The generator that `torch.manual_seed`, imported under any name, seeds: here no such seed reaches PyTorch's.

    `torch.default_generator.manual_seed` and `torch.set_rng_state` still do: what they seed is taken for trained.
    """

    def manual_seed(self, seed: int) -> torch.Generator:
        return torch.default_generator

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)


def drawn(build: Callable[[], Any], module: torch.nn.Module, init: InitScheme) -> str:
    """What to say of the layers of `module` whose weights differ when it is built again; nothing when none do.

    Weights of one value, such as those of a new batch-norm, speak for neither.
    """
    other, layers, trained = None, dict[str, None](), False
    torch.manual_seed(1)
    # a function may run only once, and a seed of its own would draw the same again
    with suppress(Exception, SystemExit), patch.object(torch.random, "default_generator", Unseeded()):
        other = build()
    again = dict(other.named_parameters()) if isinstance(other, torch.nn.Module) else {}
    for name, weights in module.named_parameters():
        if name not in again or weights.shape != again[name].shape:
            continue
        if not torch.equal(weights, again[name]):
            layers[name.rpartition(".")[0] or name] = None
        elif weights.numel() and not torch.equal(weights, weights.flatten()[0].expand_as(weights)):
            trained = True
    if not layers:
        return ""
    function = getattr(build, "__name__", "the function")
    count = f"drawn anew each time {function}() runs and count as trained"
    if trained:
        return (
            f"the weights of {', '.join(layers)} are {count}; "
            'for a new head, set head = "probe" where coupled, deltamask or fedpm is the method'
        )
    statistics = (name for name, _ in module.named_buffers() if name.endswith(("running_mean", "running_var")))
    if missing := unseeded(module, init, [*dict(module.named_parameters()), *statistics]):
        return f"the weights are {count}; no rule draws {missing[0]} from a seed, so the bundle carries all weights"
    return f"the weights are {count}; if they are random, pass --seed 1 (in a simulation's [export]: seed = 1)"
