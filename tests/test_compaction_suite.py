"""The compaction suite: masks, the bound against hand counts, and its quick graphs compacted exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

torch = pytest.importorskip("torch")
from edge_bench.compaction import page, random_graphs  # noqa: E402
from edge_bench.compaction.masks import masked  # noqa: E402
from edge_bench.compaction.options import chosen, cuts  # noqa: E402
from edge_bench.compaction.oracle import bound  # noqa: E402
from edge_bench.compaction.suite import Result, compacted, export, prepare  # noqa: E402
from edge_bench.compaction.zoo import ZOO, Case  # noqa: E402
from edge_bench.compaction.zoo.case import Net, conv, pooled  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from edge_client.errors import ConfigError  # noqa: E402

# What compaction leaves although the outputs do not depend on it; docs/compaction.md says why.
ABOVE = {("attention, one layer for all three", "weight")}
QUICK = [case for case in ZOO.values() if case.quick]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles")


@pytest.mark.parametrize("case", QUICK, ids=lambda c: c.name)
def test_a_compact_model_says_what_its_masked_module_says_at_the_fewest_multiply_adds(
    case: Case, bundles: Path, tmp_path: Path
) -> None:
    bundle = export(case, bundles / case.name)
    for kind in ("act", "weight"):
        subject = prepare(case, bundle, kind, 0.5)
        result = compacted(subject, kind, 0.5, tmp_path / "personal.onnx")
        assert result.status == "ok"
        assert result.exact, result.row()
        assert result.reached or (case.name, kind) in ABOVE, result.row()


def test_a_network_of_long_sums_is_not_refused_for_what_float32_rounds_in_them(bundles: Path, tmp_path: Path) -> None:
    case = ZOO["EMNIST CNN"]  # uniform inputs: outputs that hardly differ, of sums over 980 products
    subject = prepare(case, export(case, bundles / case.name), "act", 0.5)
    assert compacted(subject, "act", 0.5, tmp_path / "personal.onnx").status == "ok"


def test_a_rule_s_widths_never_cost_more_than_the_dense_model(bundles: Path, tmp_path: Path) -> None:
    case = ZOO["gru of two layers both ways"]  # its second layer reads what dead units of the first add as inputs more
    subject = prepare(case, export(case, bundles / case.name), "weight", 0.8)
    result = compacted(subject, "weight", 0.8, tmp_path / "personal.onnx", align="rule")
    assert result.exact
    assert result.macs_compact is not None
    assert result.macs_compact <= (result.macs_dense or 0)


# A shuffle of groups in half of a width; a GRU in both directions, at its full width; sequences.
@pytest.mark.parametrize("seed", [80, 102, 203])
def test_a_random_graph_is_compacted_exactly(seed: int, tmp_path: Path) -> None:
    case = random_graphs.case(seed)
    subject = prepare(case, export(case, tmp_path / "bundle"), "weight", 0.5, seed)
    result = compacted(subject, "weight", 0.5, tmp_path / "personal.onnx", align="rule")
    assert result.exact, result.row()


def _states(m: Net, ids: Tensor) -> Tensor:
    states: Tensor = m.cells(m.embedding(ids))[0]
    return states


def _last_of(m: Net, x: Tensor) -> Tensor:
    """The state at the last id that is not 0, of each sample."""
    return m.head(_states(m, x)[torch.arange(x.shape[0]), (x != 0).sum(1).clamp(min=1) - 1])


def _two_of(m: Net, x: Tensor) -> Tensor:
    last = (x != 0).sum(1).clamp(min=1) - 1
    return m.head(_states(m, x)[torch.arange(x.shape[0])[:, None], torch.stack([last, last // 2], 1)].sum(1))


def _begun(m: Net, x: Tensor) -> Tensor:
    """The last state, behind an id that begins every sequence."""
    return m.head(_states(m, torch.cat([torch.full((x.shape[0], 1), 11), x], 1))[:, -1])


@pytest.mark.parametrize("wiring", [_last_of, _two_of, _begun])
def test_a_network_of_ids_that_picks_a_place_in_each_sample_or_begins_with_an_id_of_its_own_is_compacted(
    wiring: Callable[[Net, Tensor], Tensor], tmp_path: Path
) -> None:
    def make() -> nn.Module:
        cells = nn.GRU(6, 8, batch_first=True)
        return Net(wiring, embedding=nn.Embedding(12, 6), cells=cells, head=nn.Linear(8, 3))

    case = Case("ids", make, (7,), ("head",), ids=11)
    subject = prepare(case, export(case, tmp_path / "bundle"), "act", 0.5)
    result = compacted(subject, "act", 0.5, tmp_path / "personal.onnx")
    assert result.status == "ok"
    assert result.exact, result.row()


def test_the_page_shows_the_committed_results() -> None:
    assert page.PAGE.read_text() == page.page(), "run: python -m edge_bench.compaction.page"


@pytest.mark.parametrize(
    ("masks", "kept", "said"),
    [("act,wieght", "0.5", "no mask 'wieght'"), ("act", "half", "--kept 'half'"), ("act", "0.5,0", "--kept '0.5,0'")],
)
def test_masks_and_shares_of_the_command_are_checked(masks: str, kept: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cuts(masks, kept)
    assert cuts("weight,act", "0.5,0.25")[:3] == [("act", 0.5), ("act", 0.25), ("weight", 0.5)]


def test_the_suite_has_graphs_enough_and_their_names_are_theirs_alone() -> None:
    assert len(ZOO) >= 60
    assert 10 <= len(QUICK) <= 15


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 5))


CHAIN = Case("chain", chain, (6,), ("4",))


@pytest.mark.parametrize("kind", ["act", "weight"])
def test_the_bound_of_a_chain_is_the_product_of_what_its_layers_keep(kind: str) -> None:
    found = bound(masked(CHAIN, kind, 0.5).module, CHAIN)
    assert (found.dense, found.live) == (6 * 8 + 8 * 4 + 4 * 5, 6 * 4 + 4 * 2 + 2 * 5)


def test_a_unit_that_happens_to_be_off_counts_as_live() -> None:
    module = chain().eval()
    with torch.no_grad():
        module[0].bias.fill_(-50.0)  # type: ignore[index,union-attr]
    assert bound(module, CHAIN).live == bound(module, CHAIN).dense


def test_what_no_output_reads_and_what_no_input_reaches_is_dead() -> None:
    def wiring(m: Net, x: Tensor) -> Tensor:
        constant = m.still(torch.ones(x.shape[0], 3, dtype=x.dtype))  # type: ignore[operator]
        return m.head(torch.relu(m.a(x)) + constant + 0.0 * m.unread(x))  # type: ignore[operator, no-any-return]

    case = Case(
        "dead",
        lambda: Net(wiring, a=nn.Linear(6, 4), unread=nn.Linear(6, 4), still=nn.Linear(3, 4), head=nn.Linear(4, 2)),
        (6,),
        ("head",),
    )
    assert bound(case.make().eval(), case).live == 6 * 4 + 4 * 2


def test_a_depthwise_layer_counts_the_channels_that_both_masks_leave() -> None:
    case = Case(
        "depthwise",
        lambda: nn.Sequential(conv(3, 8, 1), nn.ReLU(), conv(8, 8, 3, groups=8), nn.ReLU(), pooled(8, 2)),
        (3, 4, 4),
        ("4.2",),
    )
    made = masked(case, "weight", 0.5)
    both = int((made.kept["0"] & made.kept["2"]).sum())
    assert bound(made.module, case).live == 16 * (3 * both + 9 * both) + 2 * both


def test_an_index_of_a_product_counts_where_either_side_varies_and_not_where_the_softmax_cancels_it() -> None:
    def wiring(m: Net, x: Tensor) -> Tensor:
        weights = torch.softmax(m.q(x) @ m.k(x).transpose(1, 2), -1)  # type: ignore[operator]
        return m.head((weights @ x).mean(1))  # type: ignore[operator, no-any-return]

    case = Case("cancels", lambda: Net(wiring, q=nn.Linear(4, 3), k=nn.Linear(4, 3), head=nn.Linear(4, 2)), (5, 4), ())
    module = case.make().eval()
    rest = 2 * 4 + 5 * 5 * 4  # the classifier, and the product with the weights
    with torch.no_grad():
        module.q.weight[0] = 0.0  # a constant query times a varying key: a score of each key
        assert bound(module, case).live == rest + 5 * 4 * (2 + 3) + 25 * 3
        module.k.weight[1] = 0.0  # a varying query times a constant key: the same for all keys
        assert bound(module, case).live == rest + 5 * 4 * (1 + 2) + 25 * 2


def test_the_bound_counts_plain_recurrence_and_cells_by_their_live_units() -> None:
    for name, steps, gates in (("rnn", 9, 1), ("lstm cell", 5, 4), ("gru cell", 5, 3)):
        case = ZOO[name]
        made = masked(case, "act", 0.5)
        (units,) = (int(k.sum()) for k in made.kept.values())
        assert bound(made.module, case).live == steps * gates * units * (8 + units) + 5 * units


@pytest.mark.parametrize(
    ("make", "gates", "read", "units", "inputs"),
    [
        (nn.LSTM, 4, None, 1, 3),  # unit 1 is dead and moves from step to step; unit 0 does not read it
        (nn.LSTM, 4, 2, 1, 4),  # by one gate: an input more brings what it adds
        (nn.GRU, 3, None, 1, 3),
        (nn.GRU, 3, 1, 1, 4),
        (nn.GRU, 3, 2, 2, 3),  # behind the reset gate: only a unit does
        (nn.RNN, 1, 0, 1, 4),
    ],
)
def test_the_bound_of_a_recurrent_layer_has_an_input_or_a_unit_for_what_a_dead_unit_adds_at_each_step(
    make: type[nn.RNNBase], gates: int, read: int | None, units: int, inputs: int
) -> None:
    case = Case(
        "moves", lambda: Net(lambda m, x: m.cells(x)[0][..., 0], cells=make(3, 2, batch_first=True)), (7, 3), ()
    )  # type: ignore[arg-type]
    module = case.make().eval()
    with torch.no_grad():
        module.cells.weight_ih_l0.view(gates, 2, 3)[:, 1] = 0.0  # type: ignore[union-attr,operator]
        recurrent = module.cells.weight_hh_l0.view(gates, 2, 2)  # type: ignore[union-attr,operator]
        recurrent[:, 1] = 0.0
        recurrent[:, 0, 1] = 0.0
        if read is not None:
            recurrent[read, 0, 1] = 1.0
    assert bound(module, case).live == 7 * gates * units * (inputs + units)


def test_the_bound_counts_einsum_by_live_triples_and_a_constant_beside_what_varies() -> None:
    def wiring(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.einsum("ni,ni,no->no", m.a(x), m.b(x), x))  # type: ignore[operator, no-any-return]

    case = Case("three", lambda: Net(wiring, a=nn.Linear(4, 6), b=nn.Linear(4, 6), head=nn.Linear(4, 2)), (4,), ())
    module = case.make().eval()
    rest = 4 * 2 + 1 * 4  # the classifier, and the sum of products times x
    assert bound(module, case).live == rest + 2 * 4 * 6 + 6
    with torch.no_grad():
        module.a.weight[:2] = 0.0  # a constant beside an entry that varies
        assert bound(module, case).live == rest + 4 * (4 + 6) + 6
        module.a.bias[0] = 0.0  # zero: neither entry matters
        assert bound(module, case).live == rest + 4 * (4 + 5) + 5


def test_the_bound_of_a_convolution_counts_steps_that_lie_in_the_samples_axis() -> None:
    case = ZOO["convolution of each step"]
    live = bound(masked(case, "act", 0.5).module, case).live
    assert live == 4 * 8 * 8 * 9 * 3 * 4 + 4 * 5 + 5 * 5


def test_the_bound_starts_at_bags_of_ids_as_at_single_ones() -> None:
    case = Case(
        "bags", lambda: nn.Sequential(nn.EmbeddingBag(9, 8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5)), (4,), (), 9
    )
    made = masked(case, "act", 0.5)
    units = [int(k.sum()) for k in made.kept.values()]
    assert bound(made.module, case).live == 8 * units[0] + units[0] * units[1]


@pytest.mark.parametrize("corners", [False, True])
def test_the_bound_counts_linear_interpolation_as_a_product_along_each_axis(corners: bool) -> None:
    grow = {"scale_factor": (2, 3), "mode": "bilinear", "align_corners": corners}
    case = Case(
        "grown",
        lambda: nn.Sequential(conv(2, 4, 1), nn.ReLU(), nn.Upsample(**grow), pooled(4, 3)),
        (2, 5, 6),
        ("3.2",),  # type: ignore[arg-type]
    )
    module = masked(case, "act", 0.5).module
    each = 5 * 10 * 6 + 6 * 18 * 10  # multiply-adds of a channel
    assert bound(module, case).live == 30 * 2 * 2 + 2 * each + 2 * 3
    assert bound(case.make().eval(), case).live == 30 * 2 * 4 + 4 * each + 4 * 3


def test_a_reparametrised_layer_is_pruned_by_its_lengths() -> None:
    made = masked(ZOO["weight norm"], "weight", 0.5)
    rows = made.module.a.weight.flatten(1).abs().sum(1)
    assert torch.equal(rows > 0, made.kept["a"])


@pytest.mark.parametrize(
    ("name", "kind", "most"), [("gru both ways on a stream", "weight", 9000), ("decoder, lstm both ways", "act", 5000)]
)
def test_recurrent_layers_lose_units_that_move_or_start_elsewhere(
    name: str, kind: Literal["act", "weight"], most: int, tmp_path: Path
) -> None:
    case = ZOO[name]
    subject = prepare(case, export(case, tmp_path / "bundle"), kind, 0.3)
    result = compacted(subject, kind, 0.3, tmp_path / "personal.onnx")
    assert result.exact, result.row()
    assert result.macs_compact is not None
    assert result.macs_compact < most
    assert result.stopped_by


def test_masks_keep_the_share_of_every_layer_and_zero_the_batch_norm_behind_it_for_act() -> None:
    case = ZOO["transposed convolution"]
    for kind in ("act", "weight"):
        made = masked(case, kind, 0.3)
        assert [int(k.sum()) for k in made.kept.values()] == [max(1, round(0.3 * len(k))) for k in made.kept.values()]
        state = made.module.state_dict()
        dead = ~made.kept["3"]  # the transposed convolution; its batch-norm is 4
        assert not state["3.weight"][:, dead].any()
        assert bool(state["3.weight"][:, ~dead].any())
        assert bool((state["3.bias"][dead] == 0).all()) == (kind == "act")
        assert bool((state["4.bias"][dead] == 0).all()) == (kind == "act")
        assert float(state["4.running_var"].std()) > 0


def test_an_lstm_is_pruned_by_units_in_all_its_gates() -> None:
    made = masked(ZOO["lstm"], "weight", 0.5)
    gates = made.module.state_dict()["cells.weight_hh_l0"].view(4, 16, 16).abs().sum((0, 2))
    assert torch.equal(gates > 0, made.kept["cells.l0"])


def test_a_result_is_exact_within_the_dense_graphs_own_rounding_and_at_the_bound_within_five_percent() -> None:
    assert Result("m", "act", 0.5, error_std=9e-6).exact
    assert not Result("m", "act", 0.5, error_std=2e-5, error_dense_std=1e-6).exact
    assert Result("m", "act", 0.5, error_std=2e-5, error_dense_std=1.5e-5).exact
    assert not Result("m", "act", 0.5).exact
    assert Result("m", "act", 0.5, macs_compact=105, macs_bound=100).reached
    assert not Result("m", "act", 0.5, macs_compact=106, macs_bound=100).reached


def test_graphs_are_named_one_at_a_time_since_names_hold_commas() -> None:
    assert [case.name for case in chosen(["U-Net, upsampled", "relu"], None)] == ["U-Net, upsampled", "relu"]
    assert chosen(None, "chains")[0].name == "relu"
    assert len(chosen(None, None)) == len(ZOO)
    for names, family in ((["U-Net"], None), (None, "chain")):
        with pytest.raises(ConfigError, match=r"there (are|is) no"):
            chosen(names, family)
