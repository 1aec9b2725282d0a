"""Coupled: both sides hold the same values, a device receives what it lacks, and one that lost them recovers."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from edge_kernels import counter, coupling
from edge_kernels.codecs import counts
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_fleet import DEVICES, MASKED, MaskFleet, own_mask
from numpy_mlp import assignment, mlp

from edge_client.errors import LostError, PayloadError
from edge_client.methods.coupled import Coupled, Held, Kept, scaled
from edge_client.methods.fedpm import FedPM
from edge_client.methods.shared.theta import Posterior
from edge_client.protocol.payload import Payload, encode
from edge_client.task import Assignment


def agrees(fleet: MaskFleet, device: str) -> bool:
    """Whether what the device decodes from its next downlink is what the server has."""
    received, state = fleet.receive(device), fleet.state
    numbers = np.array_equal(received.posterior.ones, state.posterior.ones)
    return numbers and received.posterior.masks == state.posterior.masks and np.array_equal(received.head, state.head)


def wiped(fleet: MaskFleet, device: str, kept: Kept | None = None) -> None:
    """The device has lost what it kept, or has an older copy: it reports the loss, the server drops its record."""
    fleet.kept[device] = kept
    with pytest.raises(LostError, match="is not of it"):
        fleet.receive(device)
    fleet.lose(device)


def test_the_server_gets_the_very_mask_and_the_device_the_very_counts() -> None:
    fleet = MaskFleet(Coupled(lr=0.3))
    for _ in range(6):
        fleet.play(*DEVICES)
        for d in DEVICES:
            assert agrees(fleet, d)
            if fleet.round > 1:
                assert (fleet.masks[d] == own_mask(fleet, d)).all()


def test_a_device_receives_what_it_lacks_and_no_more() -> None:
    fleet = MaskFleet(Coupled())
    assert set(fleet.ask("a").arrays) == set()  # it has the bundle's head
    fleet.play("a", "b")
    assert set(fleet.ask("a").arrays) == {"head"}  # the averaged head; theta is still theta0
    fleet.play("a", "b")
    assert set(fleet.ask("a").arrays) == {"net_short.coupled-net", "streams"}
    assert set(fleet.ask("c").arrays) == {"head", "counts.counts"}
    fleet.play("a", "c")
    assert set(fleet.ask("a").arrays) == {"net_long.coupled-net", "streams"}
    assert set(fleet.ask("c").arrays) == {"net_short.coupled-net", "streams"}
    assert set(fleet.ask("b").arrays) == {"counts.counts"}  # it missed a round; the head it has
    for d in DEVICES:
        assert agrees(fleet, d)
    fleet.play(*DEVICES)
    for d in DEVICES:
        assert agrees(fleet, d)
        assert (fleet.masks[d] == own_mask(fleet, d)).all()


@pytest.mark.parametrize(
    "settings",
    [{"reset_every": 3}, {"head": "mask", "theta0": 0.5, "spread": 1.0}, {"posterior": "mean"}, {"biases": True}],
)
def test_every_setting_keeps_both_sides_equal(settings: dict[str, Any]) -> None:
    fleet = MaskFleet(Coupled(**settings))
    for r in range(6):
        took_part = DEVICES if r % 3 else DEVICES[:2]
        before = fleet.state.posterior
        fleet.play(*took_part)
        first_mask_round = 0 if fleet.method.probing(fleet.course.model) else -1
        if r > first_mask_round:  # the counts are those of the devices' own masks, added up here
            ones = np.sum([own_mask(fleet, d) for d in took_part], axis=0)
            reset = settings.get("reset_every", 1) == 1 or (r - first_mask_round) % settings["reset_every"] == 0
            assert (fleet.state.posterior.ones == (ones if reset else before.ones + ones)).all()
            assert fleet.state.posterior.masks == len(took_part) + (0 if reset else before.masks)
        for d in DEVICES:
            assert agrees(fleet, d)


def test_a_cohort_larger_than_the_references_receives_counts_against_counts() -> None:
    fleet = MaskFleet(Coupled(references=2))
    for _ in range(4):
        fleet.play(*DEVICES)
        for d in DEVICES:
            assert agrees(fleet, d)
    assert set(fleet.ask("a").arrays) == {"change.counts"}
    fleet.play("a", "b")
    assert set(fleet.ask("a").arrays) == {"net_short.coupled-net", "streams"}
    assert agrees(fleet, "a")


def test_net_flips_and_flips_are_far_below_what_fedpm_pays() -> None:
    big = mlp(300, 100, 3)
    fleets = MaskFleet(Coupled(), big), MaskFleet(FedPM(down="counts"), big)
    for fleet in fleets:
        for _ in range(4):
            fleet.play(*DEVICES)
    sizes = [sum(x.nbytes for x in f.local["a"].update.arrays.values()) for f in fleets]
    assert sizes[0] < sizes[1] / 2
    assert (
        fleets[0].ask("a").arrays["net_long.coupled-net"].nbytes < fleets[1].ask("a").arrays["counts.counts"].nbytes / 2
    )


def play_rounds(fleet: MaskFleet, rounds: int) -> None:
    for _ in range(rounds):
        fleet.play(*DEVICES)


def test_a_device_that_lost_what_it_kept_receives_everything_and_trains_again() -> None:
    fleet = MaskFleet(Coupled())
    play_rounds(fleet, 3)
    wiped(fleet, "a")
    fleet.play("b", "c")  # the round goes on without it
    assert fleet.state.posterior.masks == 2
    assert set(fleet.ask("a").arrays) == {"head", "counts.counts"}
    for _ in range(2):
        for d in DEVICES:
            assert agrees(fleet, d)
        fleet.play(*DEVICES)
    assert fleet.state.posterior.masks == 3


def test_a_device_that_reports_its_loss_can_be_asked_again_in_the_same_round() -> None:
    fleet = MaskFleet(Coupled())
    play_rounds(fleet, 3)
    wiped(fleet, "a")
    fleet.play(*DEVICES)
    for d in DEVICES:
        assert agrees(fleet, d)
        assert (fleet.masks[d] == own_mask(fleet, d)).all()
    assert fleet.audience("a") == "short"
    assert fleet.audience("b") == "long"


def test_a_device_that_missed_a_round_and_lost_its_head_does_not_take_the_bundles() -> None:
    fleet = MaskFleet(Coupled())
    play_rounds(fleet, 3)
    fleet.play("b", "c")
    assert set(fleet.ask("a").arrays) == {"counts.counts"}
    wiped(fleet, "a")
    assert set(fleet.ask("a").arrays) == {"head", "counts.counts"}
    assert agrees(fleet, "a")


@pytest.mark.parametrize("references", [64, 2], ids=["net flips", "counts"])
@pytest.mark.parametrize("loss", ["lost", "stale"])
@pytest.mark.parametrize("reset_every", [1, 3])
def test_a_device_with_lost_or_old_state_recovers_in_the_middle(references: int, loss: str, reset_every: int) -> None:
    fleet = MaskFleet(Coupled(references=references, reset_every=reset_every))
    play_rounds(fleet, 3)
    backup = fleet.kept["a"]
    fleet.play(*DEVICES)
    wiped(fleet, "a", backup if loss == "stale" else None)
    fleet.play("b", "c")
    assert set(fleet.ask("a").arrays) == {"head", "counts.counts"}
    for _ in range(2):
        for d in DEVICES:
            assert agrees(fleet, d)
        fleet.play(*DEVICES)
        assert (fleet.masks["a"] == own_mask(fleet, "a")).all()


@settings(max_examples=12, deadline=None)
@given(
    plan=st.lists(st.tuples(st.sets(st.sampled_from(DEVICES), min_size=1), st.sets(st.sampled_from(DEVICES))),
                  min_size=3, max_size=6),
    references=st.sampled_from([64, 2, 1]),
    reset_every=st.sampled_from([1, 2]),
    head=st.sampled_from(["probe", "mask"]),
)  # fmt: skip
def test_after_any_absence_and_any_loss_both_sides_hold_the_same(
    plan: list[tuple[set[str], set[str]]], references: int, reset_every: int, head: Any
) -> None:
    fleet = MaskFleet(Coupled(references=references, reset_every=reset_every, head=head))
    for took_part, lost in plan:
        for d in sorted(lost):
            fleet.kept[d] = None
            try:
                fleet.receive(d)
            except LostError:
                fleet.lose(d)
        fleet.play(*sorted(took_part))
        for d in took_part & fleet.masks.keys():
            assert (fleet.masks[d] == own_mask(fleet, d)).all()
        for d in DEVICES:
            assert agrees(fleet, d)


def test_devices_of_one_audience_receive_the_same_bytes() -> None:
    seen: set[str] = set()
    for references in (64, 1):
        fleet = MaskFleet(Coupled(references=references))
        for took_part in (DEVICES, "ab", "abc", "abc", "bc", "abc", "abc", "abc"):
            sent: dict[str, bytes] = {}
            for d in DEVICES:
                data = encode(fleet.ask(d))
                assert sent.setdefault(fleet.audience(d), data) == data
                assert not {"device", "a", "b", "c"} & set(fleet.ask(d).meta)
            seen |= sent.keys()
            fleet.play(*took_part)
    assert seen == {"whole", "whole+head", "short", "long", "change"}


@pytest.mark.parametrize("rounds", [1, 2, 8])
def test_the_last_downlink_is_whole_for_every_device(rounds: int) -> None:
    fleet = MaskFleet(Coupled(), rounds=rounds)
    play_rounds(fleet, rounds)
    t = fleet.task("a", rounds + 1)
    expected = fleet.method.personal(t, fleet.kept["a"], fleet.receive("a")).parameters
    buffers, none = np.zeros(0, np.float32), Posterior(np.zeros(3, np.uint32), 0)
    for kept in (None, fleet.kept["b"], Kept(buffers, None, Held(none, buffers, None))):
        fleet.kept["a"] = kept
        assert agrees(fleet, "a")
        assert (fleet.method.personal(t, kept, fleet.receive("a")).parameters == expected).all()
    assert set(fleet.ask("a").arrays) == ({"head"} if rounds == 1 else {"head", "counts.counts"})
    assert len({fleet.audience(d) for d in DEVICES}) == 1


def test_a_device_restored_from_before_the_probing_round_recovers() -> None:
    fleet = MaskFleet(Coupled(probe_rounds=2))
    fleet.play(*DEVICES)
    backup = fleet.kept["a"]
    play_rounds(fleet, 2)
    wiped(fleet, "a", backup)
    assert agrees(fleet, "a")


@pytest.mark.parametrize("references", [64, 2])
def test_a_device_whose_counts_differ_detects_it(references: int) -> None:
    fleet = MaskFleet(Coupled(references=references))
    play_rounds(fleet, 3)
    kept = fleet.kept["a"]
    posterior = replace(kept.held.posterior, ones=np.uint32(3) - kept.held.posterior.ones)
    wiped(fleet, "a", replace(kept, held=replace(kept.held, posterior=posterior)))
    assert agrees(fleet, "a")


def test_a_loss_keeps_the_devices_own_statistics_and_moments() -> None:
    fleet = MaskFleet(Coupled(persistent=True))
    play_rounds(fleet, 3)
    own = replace(fleet.kept["a"], held=None)
    wiped(fleet, "a", own)
    fleet.play(*DEVICES)
    assert fleet.kept["a"].adam.steps == own.adam.steps + 1


def test_counts_are_scaled_to_the_next_number_of_masks_and_rounded() -> None:
    # Of three masks 0, 1, 2, 3 ones are 0, 1.33, 2.67, 4 of four; of two 0, .67, 1.33, 2.
    tally = Posterior(np.arange(4, dtype=np.uint32), 3)
    assert scaled(tally, 4).tolist() == [0, 1, 3, 4]
    assert scaled(tally, 2).tolist() == [0, 1, 1, 2]
    half = Posterior(np.array([1, 3], np.uint32), 4)
    assert scaled(half, 2).tolist() == [1, 2]  # .5 and 1.5: halves go up


def test_a_change_of_cohort_size_is_coded_against_the_scaled_counts() -> None:
    fleet = MaskFleet(Coupled(references=1))
    play_rounds(fleet, 2)
    before = fleet.state
    fleet.play("a", "b")
    assert agrees(fleet, "a")
    data = fleet.ask("a").arrays["change.counts"].tobytes()
    ones = counts.decode(data, MASKED, 2, (before.posterior.ones * np.uint32(2) + np.uint32(1)) // np.uint32(3))
    assert (ones == fleet.state.posterior.ones).all()
    assert fleet.ask("a").meta["crc"] == zlib.crc32(ones.astype("<i4").tobytes())


def test_counts_that_decode_from_the_wrong_ones_do_not_pass_their_checksum() -> None:
    m, method = mlp(300, 100, 3), Coupled(references=1)
    a = assignment(m, round_=4)
    before = np.arange(30_000, dtype=np.uint32) % 4
    after = before.copy()
    after[::100] = 3 - after[::100]
    change = np.frombuffer(counts.encode(after, 3, before), np.uint8)
    down = Payload({"change.counts": change}, {"masks": 3, "crc": zlib.crc32(after.astype("<i4").tobytes())})
    held = Held(Posterior(before, 3), np.zeros(303, np.float32), None)
    kept = Kept(np.zeros(0, np.float32), None, held)
    assert (method.receive(a, kept, down).posterior.ones == after).all()
    # Two weights exchanged: as many of every count as before, so the codec itself has nothing to object to.
    wrong = before.copy()
    wrong[[1, 2]] = wrong[[2, 1]]
    with pytest.raises(LostError, match="checksum"):
        method.receive(a, replace(kept, held=replace(held, posterior=Posterior(wrong, 3))), down)


@pytest.mark.parametrize("shift", [-4, 4])
def test_net_flips_that_leave_the_range_of_the_counts_are_those_of_other_counts(
    shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = MaskFleet(Coupled())
    play_rounds(fleet, 3)
    decode = coupling.decode_net
    monkeypatch.setattr(coupling, "decode_net", lambda *given: decode(*given) + np.int32(shift))
    with pytest.raises(LostError, match=r"counts leave 0\.\.3"):
        fleet.receive("a")


def test_every_device_and_round_has_uniforms_of_its_own_which_the_downlink_names() -> None:
    fleet = MaskFleet(Coupled())
    for round_ in (1, 2, 3):
        fleet.play(*DEVICES)
        if round_ > 1:
            keys = [counter.key(3, "uniforms", round_, device) for device in DEVICES]
            assert fleet.ask("a").arrays["streams"].tolist() == keys


def test_an_update_names_the_reference_mask_that_its_flips_are_of() -> None:
    fleet = MaskFleet(Coupled())
    play_rounds(fleet, 2)
    theta, u = fleet.theta(), counter.uniform(counter.key(3, "uniforms", 3, "a"), MASKED)
    fleet.play("a")
    update = fleet.local["a"].update
    name = hashlib.sha256(np.packbits(u < theta, bitorder="little")).hexdigest()[:16]
    assert update.meta == {"reference": name, "samples": 40}
    a = fleet.task("a", 3).assignment
    for other in ("0" * 16, None):
        meta = {"reference": other} if other else {}
        with pytest.raises(PayloadError, match=f"reference mask {other!r}.*trains again"):
            fleet.method.read_update(a, fleet.state, None, Payload(update.arrays, meta))


def test_net_flips_without_their_streams_are_a_payload_error() -> None:
    fleet = MaskFleet(Coupled())
    play_rounds(fleet, 2)
    down = fleet.ask("a")
    broken = Payload({n: x for n, x in down.arrays.items() if n != "streams"}, down.meta)
    with pytest.raises(PayloadError, match="streams"):
        fleet.method.receive(fleet.task("a", 3).assignment, fleet.kept["a"], broken)


def test_net_flips_coded_with_earlier_ones_that_a_device_does_not_hold_are_a_loss() -> None:
    fleet = MaskFleet(Coupled(lr=0.3), mlp(20, 64, 48, 3))  # large enough for contexts to pay
    play_rounds(fleet, 4)
    kept = fleet.kept["a"]
    fleet.kept["a"] = replace(kept, held=replace(kept.held, net=None))
    assert "net_long.coupled-net" in fleet.ask("a").arrays
    with pytest.raises(LostError, match="is not of it"):
        fleet.receive("a")


def test_more_streams_than_a_device_draws_are_a_payload_error() -> None:
    fleet = MaskFleet(Coupled(references=3))
    play_rounds(fleet, 2)
    down = fleet.ask("a")
    more = np.append(down.arrays["streams"], np.uint64(1))
    with pytest.raises(PayloadError, match=r"streams is uint64\[4\]; it must be 1..3 uint64 values"):
        fleet.method.receive(fleet.task("a", 3).assignment, fleet.kept["a"], Payload({**down.arrays, "streams": more}))


def test_the_first_counts_of_a_large_cohort_travel_whole_as_there_are_none_before() -> None:
    fleet = MaskFleet(Coupled(references=2))
    sent = []
    for _ in range(3):
        fleet.play(*DEVICES)
        sent.append(set(fleet.ask("a").arrays) - {"head"})
    assert sent == [set(), {"counts.counts"}, {"change.counts"}]


def test_flips_are_coded_with_what_the_last_rounds_net_flips_say_of_each_tensor() -> None:
    fleet = MaskFleet(Coupled(lr=0.5, theta0=0.5), mlp(30, 40, 20, 3))
    for _ in range(2):
        fleet.play(*DEVICES)
    received = fleet.receive("a")
    fleet.play(*DEVICES)
    stream = fleet.method.stream(Assignment(fleet.course, 3, "a"))  # type: ignore[attr-defined]
    u = counter.uniform(stream, received.theta.size)
    flips = fleet.masks["a"] ^ (u < received.theta)
    sent = fleet.local["a"].update.arrays["flips.coupled"].tobytes()
    past = coupling.history(received.net, [(40, 30), (20, 40)])
    assert sent == coupling.encode_flips(flips, received.theta, u, past)
    for other in (None, coupling.history(received.net, [(2000,)])):
        assert sent != coupling.encode_flips(flips, received.theta, u, other)
