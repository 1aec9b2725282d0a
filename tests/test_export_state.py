"""What a module keeps or draws beside its tensors: refused by its name where a later run can differ, else exported."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.errors import ModelError
from edge_client.training import open_trainer

torch = pytest.importorskip("torch")
from edge_export import cli, export_bundle  # noqa: E402
from edge_export.writer import Graphs, proved_graphs  # noqa: E402
from torch import Tensor, nn  # noqa: E402

Body = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Two layers; `body` runs between them as a part named `part`, which starts with the attributes given."""

    def __init__(self, body: Body, **held: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.part, self.last = nn.Linear(4, 6), Part(body, **held), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.part(self.first(x)))
        return logits


class Part(nn.Module):
    total = 0

    def __init__(self, body: Body, **held: Any) -> None:
        super().__init__()
        self.body = (body,)
        for name, value in held.items():
            if name.startswith("buffer_"):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.body[0](self, x)


def _proved(module: nn.Module, example: Tensor | None = None) -> Graphs:
    return proved_graphs(module, torch.zeros(2, 4) if example is None else example, {"kind": "classification"})


# --- buffers that a step moves


def _mean_by_assignment(m: Any, y: Tensor) -> Tensor:
    if m.training:
        m.buffer_m = 0.9 * m.buffer_m + 0.1 * y.detach().mean(0)
    return y - m.buffer_m


def _mean_in_place(m: Any, y: Tensor) -> Tensor:
    if m.training:
        m.buffer_m.mul_(0.9).add_(0.1 * y.detach().mean(0))
    return y - m.buffer_m


def _peak(m: Any, y: Tensor) -> Tensor:
    if m.training:
        m.buffer_m = torch.maximum(m.buffer_m, y.detach().abs().max())
    return y / m.buffer_m


def _first_batch(m: Any, y: Tensor) -> Tensor:
    if m.training:
        m.buffer_m = torch.where(m.buffer_seen > 0, m.buffer_m, y.detach().mean(0))
        m.buffer_seen = torch.ones_like(m.buffer_seen)
    return y - m.buffer_m


def _late(m: Any, y: Tensor) -> Tensor:
    if m.training:
        m.buffer_late = m.buffer_m.clone()
        m.buffer_m = y.detach().mean(0)
    return y - m.buffer_late


MOVED = {
    "assignment": (_mean_by_assignment, {"buffer_m": torch.zeros(6)}),
    "in place": (_mean_in_place, {"buffer_m": torch.zeros(6)}),
    "a peak that only large inputs reach": (_peak, {"buffer_m": torch.full((1,), 50.0)}),
    "a first batch": (_first_batch, {"buffer_m": torch.zeros(6), "buffer_seen": torch.zeros(1)}),
    "a step late": (_late, {"buffer_m": torch.zeros(6), "buffer_late": torch.zeros(6)}),
}


class Input(nn.Module):
    """`body` sees the input itself, so that an example of zeros moves nothing."""

    def __init__(self, body: Body, **held: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part, self.last = Part(body, **held), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.part(x))
        return logits


@pytest.mark.parametrize("name", MOVED)
def test_a_buffer_that_training_moves_is_a_statistic_though_the_example_of_zeros_moves_none(name: str) -> None:
    body, held = MOVED[name]
    made = _proved(Input(body, **held), torch.zeros(2, 6))
    assert [r.name for r in made.tables.buffers] == [f"part.{k}" for k in held]
    assert made.shown.statistic <= 1e-5


@pytest.mark.parametrize("name", ["assignment", "in place", "a step late"])
def test_both_backends_move_a_buffer_alike(name: str, tmp_path: Path) -> None:
    body, held = MOVED[name]
    bundle = export_bundle(
        Input(body, **held), torch.zeros(2, 6), tmp_path / "b", name="b", target={"kind": "classification"}
    )
    rng, model = np.random.default_rng(0), bundle.model()
    x, y = rng.standard_normal((5, 6)).astype(np.float32), np.arange(5) % 3
    one, two = (
        open_trainer(e, bundle).gradient(model.parameters, model.buffers, x, y) for e in ("onnxruntime", "torch")
    )
    assert not np.array_equal(one.buffers, model.buffers)
    np.testing.assert_allclose(one.buffers, two.buffers, atol=1e-6)
    np.testing.assert_allclose(one.parameters, two.parameters, atol=1e-6)


def test_the_command_exports_a_running_mean_of_the_inputs(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(s):\n"
        "        super().__init__(); s.register_buffer('mean', torch.zeros(4)); s.l = nn.Linear(4, 3)\n"
        "    def forward(s, x):\n"
        "        if s.training: s.mean.mul_(0.9).add_(0.1 * x.mean(0))\n"
        "        return s.l(x - s.mean)\n"
        "def make(): return Net()\n"
    )
    cli.export(f"{file}:make", "4", tmp_path / "b", torch_part=False)
    assert '"name":"mean"' in (tmp_path / "b" / "manifest.json").read_text().replace(" ", "")


# --- what is refused, by name


def _count(m: Any, y: Tensor) -> Tensor:
    m.n += 1
    return y.detach() if m.n > 100 else y


def _append(m: Any, y: Tensor) -> Tensor:
    m.n.append(1)
    return y


def _append_in_training(m: Any, y: Tensor) -> Tensor:
    return _append(m, y) if m.training else y


def _nested(m: Any, y: Tensor) -> Tensor:
    m.n["deep"].steps += 1
    return y


class Meter:
    steps = 0


def _class_count(m: Any, y: Tensor) -> Tensor:
    type(m).total += 1
    return y


STEPS = 0


def _global_count(m: Any, y: Tensor) -> Tensor:
    global STEPS
    STEPS += 1
    return y


def _plain_mean(m: Any, y: Tensor) -> Tensor:
    m.n = 0.9 * m.n + 0.1 * y.detach().mean(0)
    return y - m.n


def _own_generator(m: Any, y: Tensor) -> Tensor:
    return y * float(m.n.random() > 1e-6)


def _skip(m: Any, y: Tensor) -> Tensor:
    return y if m.training and random.random() < 1e-6 else 2 * y


def _skip_by_numpy(m: Any, y: Tensor) -> Tensor:
    return y if m.training and np.random.random() < 1e-6 else 2 * y  # noqa: NPY002


def _start_by_flag(m: Any, y: Tensor) -> Tensor:
    if m.training and not m.n:
        m.buffer_m.copy_(y.detach().mean(0))
        m.n = True
    return y - m.buffer_m


def _frozen_later(m: Any, y: Tensor) -> Tensor:
    if m.n is None:
        m.n = True
        return y
    return y.detach()


def _clipped(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.w.clamp_(-0.1, 0.1)
    return y * m.w


def _in_evaluation_too(m: Any, y: Tensor) -> Tensor:
    m.buffer_m = 0.9 * m.buffer_m + 0.1 * y.detach().mean(0)
    return y - m.buffer_m


def _only_in_evaluation(m: Any, y: Tensor) -> Tensor:
    if not m.training:
        m.buffer_m += 1
    return y - m.buffer_m


def _by_default(m: Any, y: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return y


def _afresh(m: Any, y: Tensor) -> Tensor:
    return y * float(np.random.default_rng().random())


def _closure() -> Body:
    n = 0

    def body(m: Any, y: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return y

    return body


REFUSED = {
    "a counter": (Net(_count, n=0), "attribute 'part.n' changes in every run"),
    "a list": (Net(_append, n=[]), "attribute 'part.n' changes in every run"),
    "a list in training alone": (Net(_append_in_training, n=[]), "attribute 'part.n' changes in every run"),
    "an object in a dict": (Net(_nested, n={"deep": Meter()}), "attribute 'part.n' changes in every run"),
    "a count of the class": (Net(_class_count), "attribute 'part.Part.total' changes in every run"),
    "a count of the file": (Net(_global_count), r"attribute '.*STEPS' changes in every run"),
    "a count of a function": (Net(_closure()), "attribute 'part.body' changes in every run"),
    "a default that grows": (Net(_by_default), "attribute 'part.body' changes in every run"),
    "a new generator": (Net(_afresh), "draws random numbers or reads .* a clock"),
    "a buffer in evaluation alone": (Net(_only_in_evaluation, buffer_m=torch.zeros(6)), "'part.buffer_m' changes in"),
    "a hidden layer": (Net(lambda m, y: m.n[0](y), n=[nn.Linear(6, 6)]), "'part.n.0' is a layer.*ModuleList"),
    "an iterator": (Net(lambda m, y: y * (next(m.n) < 99), n=itertools.count()), "attribute 'part.n' changes"),
    "a mean in a plain tensor": (Net(_plain_mean, n=torch.zeros(6)), "attribute 'part.n' changes in every run.*buffer"),
    "a generator": (Net(_own_generator, n=np.random.default_rng(1)), "attribute 'part.n' draws random.*Dropout"),
    "another generator": (Net(_own_generator, n=random.Random(1)), "attribute 'part.n' draws random.*Dropout"),
    "python's generator": (Net(_skip), "module 'part' draws random numbers from Python's random; use .*Dropout"),
    "numpy's generator": (Net(_skip_by_numpy), "module 'part' draws random numbers from numpy.random; use .*Dropout"),
    "a start by a flag": (Net(_start_by_flag, n=False, buffer_m=torch.zeros(6)), "attribute 'part.n' is set in"),
    "a second run without gradient": (Net(_frozen_later, n=None), "attribute 'part.n' is set in the first run"),
    "a parameter": (Net(_clipped, w=nn.Parameter(torch.ones(6))), "parameter 'part.w' changes in forward; .*clamp"),
    "a buffer in evaluation": (Net(_in_evaluation_too, buffer_m=torch.zeros(6)), "'part.buffer_m' changes in eval"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_state_and_randomness_of_python_are_refused_by_their_name(name: str) -> None:
    module, sentence = REFUSED[name]
    with pytest.raises(ModelError, match=sentence):
        _proved(module)


def _hooked(hook: Callable[[nn.Module], Any]) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    hook(module)
    return module


HOOKS = {
    "a parameter's gradient": (lambda m: m[0].weight.register_hook(lambda g: g * 0), "parameter '0.weight' has a grad"),
    "after accumulation": (
        lambda m: m[2].bias.register_post_accumulate_grad_hook(lambda p: None), "parameter '2.bias' has a grad"),
    "a part's backward pass": (
        lambda m: m[1].register_full_backward_hook(lambda m, i, o: None), "module '1' has a backward hook; .*remove"),
    "before a part's backward pass": (
        lambda m: m[1].register_full_backward_pre_hook(lambda m, o: None), "module '1' has a backward hook"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_gradients_are_refused_with_their_place(name: str) -> None:
    hook, sentence = HOOKS[name]
    with pytest.raises(ModelError, match=sentence):
        _proved(_hooked(hook))


# --- what is kept and does no harm


def _inspected(m: Any, y: Tensor) -> Tensor:
    m.seen, m.size, m.names["last"] = y, len(y.shape), float(y.shape[1])
    return y.tanh()


def _cached(m: Any, y: Tensor) -> Tensor:
    if m.places is None or len(m.places) < y.shape[1]:
        m.places = torch.arange(y.shape[1], device=y.device) / 7
    return y + m.places


def _cached_by_key(m: Any, y: Tensor) -> Tensor:
    if y.shape[1] not in m.tables:
        m.tables[y.shape[1]] = torch.linspace(0, 1, 6)
    return y * m.tables[y.shape[1]]


def _cached_in_a_buffer(m: Any, y: Tensor) -> Tensor:
    if not hasattr(m, "helper"):
        m.register_buffer("helper", torch.linspace(0, 1, 6), persistent=False)
    return y * m.helper


KEPT = {
    "values for inspection": (_inspected, {"names": {}}),
    "a cache": (_cached, {"places": None}),
    "a cache by key": (_cached_by_key, {"tables": {}}),
    "a cache in a buffer": (_cached_in_a_buffer, {}),
}


@pytest.mark.parametrize("name", KEPT)
def test_caches_and_what_is_kept_for_inspection_are_exported(name: str) -> None:
    body, held = KEPT[name]
    assert _proved(Net(body, **held)).shown.gradient <= 1e-5


def test_a_forward_hook_is_part_of_the_graphs() -> None:
    module = _hooked(lambda m: [m[1].register_forward_hook(lambda m, i, o: o * 2), m.register_forward_hook(_doubled)])
    assert _proved(module).shown.output <= 1e-5


def _doubled(module: nn.Module, given: Any, made: Tensor) -> Tensor:
    return 2 * made


def test_an_export_leaves_the_module_as_it_was() -> None:
    module = Net(_count, n=0)
    with pytest.raises(ModelError):
        _proved(module)
    assert module.part.n == 0
    assert module.training
