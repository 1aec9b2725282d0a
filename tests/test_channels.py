"""Channel groups found in a PyTorch module."""

from __future__ import annotations

import numpy as np
import pytest
from edge_kernels.channels import ChannelGroup, Consumer, Op, Producer
from edge_kernels.compaction import compact
from pydantic import TypeAdapter

torch = pytest.importorskip("torch")
from edge_export.channels import find_groups  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

IMAGE = torch.zeros(2, 1, 8, 8)


def names(groups: tuple[ChannelGroup, ...]) -> list[str]:
    return [g.name for g in groups]


def test_an_mlp_has_a_group_for_every_hidden_layer() -> None:
    module = nn.Sequential(
        nn.Linear(4, 3), nn.ReLU(), nn.Dropout(), nn.Linear(3, 2, bias=False), nn.Tanh(), nn.Linear(2, 5)
    )
    assert find_groups(module, torch.zeros(1, 4)) == (
        ChannelGroup(
            "0",
            3,
            (Producer("linear", "0.weight", "0.bias"),),
            (Op("relu", (0,)),),
            (Consumer("linear", "3.weight", None, 1),),
        ),
        ChannelGroup(
            "3",
            2,
            (Producer("linear", "3.weight"),),
            (Op("tanh", (0,)),),
            (Consumer("linear", "5.weight", "5.bias", 1),),
        ),
    )


def test_a_cnn_s_group_tells_batch_norm_pools_padding_and_flatten() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4, eps=1e-3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1, dilation=1),
        nn.LeakyReLU(0.2),
        nn.AvgPool2d(2, padding=1),
        nn.Flatten(),
        nn.ReLU6(),
        nn.Linear(6 * 9, 3),
    )
    first, second = find_groups(module, IMAGE)
    assert first.ops == (
        Op("batch_norm", (0,), ("1.weight", "1.bias", "1.running_mean", "1.running_var"), 1e-3),
        Op("relu", (1,)),
        Op("max_pool", (2,)),
    )
    assert first.consumers == (Consumer("conv", "4.weight", "4.bias", 3, padded=True),)
    assert second.ops == (
        Op("leaky_relu", (0,), value=0.2),
        Op("avg_pool", (1,), value=1.0),  # PyTorch's average pool counts its padding
        Op("flatten", (2,), value=9.0),
        Op("relu6", (3,)),
    )
    assert second.consumers == (Consumer("linear", "9.weight", "9.bias", 4, repeat=9),)


@pytest.mark.parametrize(
    ("layer", "padded"),
    [
        (nn.Conv2d(4, 2, 3), False),
        (nn.Conv2d(4, 2, 3, padding=(0, 1)), True),
        (nn.Conv2d(4, 2, 3, padding="same"), True),
        (nn.Conv2d(4, 2, 1, padding="same"), False),
        (nn.Conv2d(4, 2, 3, padding="valid"), False),
        (nn.Conv2d(4, 2, 3, stride=2, dilation=2), False),
    ],
)
def test_padding_is_told_by_what_the_layer_does(layer: nn.Module, padded: bool) -> None:
    (group,) = find_groups(nn.Sequential(nn.Conv2d(1, 4, 1), layer), IMAGE)
    assert group.consumers[0].padded is padded


@pytest.mark.parametrize(
    ("pool", "value"),
    [
        (nn.AvgPool2d(2), 0.0),
        (nn.AvgPool2d(2, padding=1, count_include_pad=False), 0.0),
        (nn.AvgPool2d(3, ceil_mode=True), 1.0),  # runtimes differ in what they count there
        (nn.AdaptiveAvgPool2d(1), 0.0),
    ],
)
def test_an_average_pool_keeps_constants_unless_it_counts_padding(pool: nn.Module, value: float) -> None:
    (group,) = find_groups(nn.Sequential(nn.Conv2d(1, 4, 1), pool, nn.Conv2d(4, 2, 1)), IMAGE)
    assert group.ops == (Op("avg_pool", (0,), value=value),)


class Global(nn.Module):
    """A global pool written as a mean, a flatten written as a view, weights in submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv1d(1, 4, 3)
        self.head = nn.ModuleDict({"hidden": nn.Linear(4, 3), "out": nn.Linear(3, 2)})

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.body(x)).mean(dim=(2,))
        x = torch.sigmoid(self.head["hidden"](x.view(x.shape[0], -1)))
        return self.head["out"](x)


def test_functional_code_is_understood() -> None:
    body, hidden = find_groups(Global(), torch.zeros(1, 1, 9))
    assert (body.name, [o.kind for o in body.ops]) == ("body", ["relu", "avg_pool", "flatten"])
    assert body.consumers == (Consumer("linear", "head.hidden.weight", "head.hidden.bias", 3),)
    assert hidden.name == "head.hidden"


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.left, self.right = nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.left(F.relu(x)).flatten(1) + self.right(torch.tanh(x)).flatten(1)


def test_two_readers_at_different_points_read_different_values() -> None:
    (group,) = find_groups(Fork(), IMAGE)
    reads = {c.weight: group.ops[c.reads - 1].kind for c in group.consumers}
    assert reads == {"left.weight": "relu", "right.weight": "tanh"}
    assert all(op.inputs == (0,) for op in group.ops)


def test_a_fork_s_compact_tensors_compute_the_same() -> None:
    torch.manual_seed(0)
    module = Fork().eval()
    with torch.no_grad():
        module.stem.weight[:2] = 0
    tensors = {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}
    (group,) = find_groups(module, IMAGE)
    result = compact(tensors, [group])
    assert result.kept["stem"].size == 3  # one constant stays for the padded reader, both are folded for the other
    small = Fork()
    small.stem, small.left, small.right = (
        nn.Conv2d(1, 3, 3, padding=1),
        nn.Conv2d(3, 2, 3, padding=1),
        nn.Conv2d(3, 2, 1),
    )
    small.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in result.tensors.items()})
    x = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(small(x), module(x), rtol=0, atol=1e-5)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.inner = nn.Conv2d(1, 4, 1), nn.Conv2d(5, 4, 1), nn.Conv2d(4, 5, 1)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.out(x + self.block(F.relu(self.inner(x))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.hidden, self.out = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        sequence, _ = self.cell(x[:, 0])
        return self.out(F.relu(self.hidden(sequence[:, -1])))


class Twice(nn.Module):
    """`shared` runs twice, `tied` is one tensor under two names, `plain` is in-place behind a second reader."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(64, 64)
        self.tied, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.other.weight = self.tied.weight
        self.out = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.shared(F.relu(self.shared(x.flatten(1)))))
        return self.out(F.relu(self.other(F.relu(self.tied(x)))))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.left, self.right = nn.Linear(64, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(x.flatten(1))
        y = F.relu_(x.view(x.shape[0], 4))
        return self.left(x) + self.right(y)


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (Residual(), ["inner"]),
        (Recurrent(), ["hidden"]),
        (Twice(), []),
        (InPlace(), []),
        (nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 2, 1)), []),
        (nn.Sequential(nn.Conv2d(1, 4, 1), nn.GELU(), nn.Conv2d(4, 2, 1)), []),
        (nn.Sequential(nn.Conv2d(1, 4, 1), nn.Linear(8, 8), nn.Flatten(), nn.Linear(256, 2)), []),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), []),
    ],
)
def test_what_is_not_understood_forms_no_group(module: nn.Module, found: list[str]) -> None:
    assert names(find_groups(module, IMAGE)) == found


def test_the_module_is_left_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(64, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 2))
    module[2].eval()
    before = [m.training for m in module.modules()]
    find_groups(module, torch.zeros(1, 64))
    assert [m.training for m in module.modules()] == before


def test_groups_survive_the_manifest_s_json() -> None:
    groups = find_groups(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)), IMAGE)
    adapter = TypeAdapter(tuple[ChannelGroup, ...])
    assert adapter.validate_json(adapter.dump_json(groups)) == groups
