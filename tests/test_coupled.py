"""Coupled: both sides know the same, at whatever price, and a device that does not any more recovers."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import numpy as np
import pytest
from edge_kernels import counter
from edge_kernels.codecs import counts
from mask_fleet import DEVICES, MASKED, Fleet, own_mask
from numpy_mlp import assignment, mlp

from edge_client.errors import PayloadError
from edge_client.local import run_round
from edge_client.methods.coupled import Coupled, Lost, scaled
from edge_client.methods.fedpm import FedPM
from edge_client.protocol.payload import Payload


def agrees(fleet: Fleet, device: str) -> None:
    """What the device makes of its next downlink is what the server has."""
    assert isinstance(fleet.method, Coupled)
    a = fleet.task(device, fleet.round + 1).assignment
    known = fleet.method.understand(a, fleet.kept.get(device, {}), fleet.ask(device))
    for name in ("ones", "masks"):
        assert (known.tally[name] == fleet.state[name]).all(), name
    assert (known.head == fleet.state["head"]).all()


def test_the_server_gets_the_very_mask_and_the_device_the_very_counts() -> None:
    fleet = Fleet(Coupled(lr=0.3))
    for _ in range(6):
        fleet.play(*DEVICES)
        for d in DEVICES:
            agrees(fleet, d)
            if fleet.round > 1:
                assert (fleet.masks[d] == own_mask(fleet, d)).all()


def test_a_device_is_told_what_it_lacks_and_no_more() -> None:
    fleet = Fleet(Coupled())
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
        agrees(fleet, d)
    fleet.play(*DEVICES)
    for d in DEVICES:
        agrees(fleet, d)
        assert (fleet.masks[d] == own_mask(fleet, d)).all()


@pytest.mark.parametrize(
    "settings",
    [{"reset_every": 3}, {"head": "mask", "theta0": 0.5, "spread": 1.0}, {"posterior": "mean"}, {"biases": True}],
)
def test_every_setting_keeps_both_sides_equal(settings: dict[str, Any]) -> None:
    fleet = Fleet(Coupled(**settings))
    for r in range(6):
        took_part = DEVICES if r % 3 else DEVICES[:2]
        before = {name: fleet.state[name].copy() for name in ("ones", "masks")}
        fleet.play(*took_part)
        first_mask_round = 0 if fleet.method.probing else -1
        if r > first_mask_round:  # the counts are those of the devices' own masks, added up here
            ones = np.sum([own_mask(fleet, d) for d in took_part], axis=0)
            reset = settings.get("reset_every", 1) == 1 or (r - first_mask_round - 1) % settings["reset_every"] == 0
            assert (fleet.state["ones"] == (ones if reset else before["ones"] + ones)).all()
            assert int(fleet.state["masks"][0]) == len(took_part) + (0 if reset else int(before["masks"][0]))
        for d in DEVICES:
            agrees(fleet, d)


def test_a_cohort_larger_than_the_references_gets_counts_against_counts() -> None:
    fleet = Fleet(Coupled(references=2))
    for _ in range(4):
        fleet.play(*DEVICES)
        for d in DEVICES:
            agrees(fleet, d)
    assert set(fleet.ask("a").arrays) == {"change.counts"}
    fleet.play("a", "b")
    assert set(fleet.ask("a").arrays) == {"net_short.coupled-net", "streams"}
    agrees(fleet, "a")


def test_net_flips_and_flips_are_far_below_what_fedpm_pays() -> None:
    big = mlp(300, 100, 3)
    fleets = Fleet(Coupled(), big), Fleet(FedPM(down="counts"), big)
    for fleet in fleets:
        for _ in range(4):
            fleet.play(*DEVICES)
    sizes = [sum(x.nbytes for x in f.local["a"].update.arrays.values()) for f in fleets]
    assert sizes[0] < sizes[1] / 2
    assert (
        fleets[0].ask("a").arrays["net_long.coupled-net"].nbytes < fleets[1].ask("a").arrays["counts.counts"].nbytes / 2
    )


def test_a_device_that_lost_what_it_kept_sits_a_round_out_and_is_well_again() -> None:
    fleet = Fleet(Coupled())
    for _ in range(3):
        fleet.play(*DEVICES)
    fleet.kept["a"] = {}
    fleet.play(*DEVICES)
    assert dict(fleet.local["a"].update.arrays) == {}
    assert int(fleet.state["masks"][0]) == 2
    assert set(fleet.ask("a").arrays) == {"head", "counts.counts"}
    for _ in range(2):
        for d in DEVICES:
            agrees(fleet, d)
        fleet.play(*DEVICES)
    assert int(fleet.state["masks"][0]) == 3


def test_a_device_that_missed_a_round_and_lost_its_head_does_not_take_the_bundles() -> None:
    fleet = Fleet(Coupled())
    for _ in range(3):
        fleet.play(*DEVICES)
    fleet.play("b", "c")
    fleet.kept["a"] = {}
    assert set(fleet.ask("a").arrays) == {"counts.counts"}
    fleet.play(*DEVICES)
    assert dict(fleet.local["a"].update.arrays) == {}
    agrees(fleet, "a")


def test_a_round_that_everybody_sits_out_changes_nothing() -> None:
    fleet = Fleet(Coupled())
    for _ in range(3):
        fleet.play("a", "b")
    ones = fleet.state["ones"].copy()
    fleet.kept = {}
    fleet.play("a", "b")
    assert (fleet.state["ones"] == ones).all()
    for d in DEVICES:
        agrees(fleet, d)
        assert "counts.counts" in fleet.ask(d).arrays


def play_rounds(fleet: Fleet, rounds: int) -> None:
    for _ in range(rounds):
        fleet.play(*DEVICES)


def sat_out(fleet: Fleet, device: str) -> bool:
    """Whether the device's last update only asked for everything again."""
    return not fleet.local[device].took_part and fleet.local[device].update.meta == {"resync": 1}


@pytest.mark.parametrize("references", [64, 2], ids=["net flips", "counts"])
@pytest.mark.parametrize("loss", ["lost", "stale"])
@pytest.mark.parametrize("reset_every", [1, 3])
def test_a_device_with_lost_or_old_state_recovers_in_the_middle(references: int, loss: str, reset_every: int) -> None:
    fleet = Fleet(Coupled(references=references, reset_every=reset_every))
    play_rounds(fleet, 3)
    backup = fleet.kept["a"]
    fleet.play(*DEVICES)
    fleet.kept["a"] = backup if loss == "stale" else {}
    with pytest.raises(Lost, match="sits the round out"):
        fleet.personal_accuracy("a")
    fleet.play(*DEVICES)
    assert sat_out(fleet, "a")
    assert not sat_out(fleet, "b")
    assert set(fleet.ask("a").arrays) == {"head", "counts.counts"}
    for _ in range(2):
        for d in DEVICES:
            agrees(fleet, d)
        fleet.play(*DEVICES)
        assert not sat_out(fleet, "a")
        assert (fleet.masks["a"] == own_mask(fleet, "a")).all()


@pytest.mark.parametrize("rounds", [1, 2, 8])
def test_the_last_downlink_is_whole_for_every_device(rounds: int) -> None:
    fleet = Fleet(Coupled(), rounds=rounds)
    play_rounds(fleet, rounds)
    t, down = fleet.task("a", rounds + 1), fleet.ask("a")
    expected = fleet.method.personal(t, fleet.kept["a"], down).parameters
    for kept in ({}, fleet.kept["b"], {"ones": np.zeros(3, np.uint32)}):
        fleet.kept["a"] = kept
        agrees(fleet, "a")
        assert (fleet.method.personal(t, kept, down).parameters == expected).all()
    assert set(fleet.ask("a").arrays) == ({"head"} if rounds == 1 else {"head", "counts.counts"})


def test_a_device_restored_from_before_the_probing_round_recovers() -> None:
    fleet = Fleet(Coupled(probe_rounds=2))
    fleet.play(*DEVICES)
    backup = fleet.kept["a"]
    play_rounds(fleet, 2)
    fleet.kept["a"] = backup
    fleet.play(*DEVICES)
    assert sat_out(fleet, "a")
    agrees(fleet, "a")


def test_a_device_whose_counts_differ_notices() -> None:
    for references in (64, 2):
        fleet = Fleet(Coupled(references=references))
        play_rounds(fleet, 3)
        fleet.kept["a"] = {**fleet.kept["a"], "ones": 3 - fleet.kept["a"]["ones"]}
        with pytest.raises(Lost, match="kept is not of it"):
            fleet.personal_accuracy("a")


def test_a_round_that_is_sat_out_counts_in_no_mean_and_keeps_the_devices_own_statistics() -> None:
    fleet = Fleet(Coupled(persistent=True))
    play_rounds(fleet, 3)
    own = fleet.kept["a"]
    kept = {name: own[name] for name in ("buffers", "adam_mean", "adam_square", "adam_steps")}
    outcome = run_round(fleet.method, fleet.task("a", 4), kept, fleet.ask("a"))
    assert (outcome.metrics.samples, outcome.metrics.loss, outcome.metrics.correct) == (0, 0.0, [0, 0, 0])
    assert dict(outcome.update.arrays) == {}
    assert outcome.kept.keys() == kept.keys()
    whole = run_round(fleet.method, fleet.task("a", 4), own, fleet.ask("a"))
    assert (whole.metrics.samples, whole.metrics.correct[2]) == (40, 40)


def test_counts_are_scaled_to_the_next_number_of_masks_and_rounded() -> None:
    # Of three masks 0, 1, 2, 3 ones are 0, 1.33, 2.67, 4 of four; of two 0, .67, 1.33, 2.
    tally = {"ones": np.arange(4, dtype=np.uint32), "masks": np.array([3])}
    assert scaled(tally, 4).tolist() == [0, 1, 3, 4]
    assert scaled(tally, 2).tolist() == [0, 1, 1, 2]
    half = {"ones": np.array([1, 3], np.uint32), "masks": np.array([4])}
    assert scaled(half, 2).tolist() == [1, 2]  # .5 and 1.5: halves go up


def test_a_change_of_cohort_size_is_coded_against_the_scaled_counts() -> None:
    fleet = Fleet(Coupled(references=1))
    play_rounds(fleet, 2)
    before = fleet.state
    fleet.play("a", "b")
    agrees(fleet, "a")
    data = fleet.ask("a").arrays["change.counts"].tobytes()
    ones = counts.decode(data, MASKED, 2, (before["ones"] * np.uint32(2) + np.uint32(1)) // np.uint32(3))
    assert (ones == fleet.state["ones"]).all()
    assert fleet.ask("a").meta["crc"] == zlib.crc32(ones.astype("<i4").tobytes())


def test_counts_that_decode_from_the_wrong_ones_do_not_pass_their_checksum() -> None:
    m, method = mlp(300, 100, 3), Coupled(references=1)
    a = assignment(m, round_=4)
    before = np.arange(30_000, dtype=np.uint32) % 4
    after = before.copy()
    after[::100] = 3 - after[::100]
    change = np.frombuffer(counts.encode(after, 3, before), np.uint8)
    down = Payload({"change.counts": change}, {"masks": 3, "crc": zlib.crc32(after.astype("<i4").tobytes())})
    kept = {"ones": before, "masks": np.array([3]), "head": np.zeros(303, np.float32)}
    assert (method.understand(a, kept, down).tally["ones"] == after).all()
    # Two weights exchanged: as many of every count as before, so the codec itself has nothing to object to.
    wrong = before.copy()
    wrong[[1, 2]] = wrong[[2, 1]]
    with pytest.raises(Lost, match="checksum"):
        method.understand(a, {**kept, "ones": wrong}, down)


def test_every_device_and_round_has_uniforms_of_its_own_which_the_downlink_names() -> None:
    fleet = Fleet(Coupled())
    for round_ in (1, 2, 3):
        fleet.play(*DEVICES)
        if round_ > 1:
            keys = [counter.key(3, "uniforms", round_, device) for device in DEVICES]
            assert fleet.ask("a").arrays["streams"].tolist() == keys


def test_an_update_names_the_reference_mask_that_its_flips_are_of() -> None:
    fleet = Fleet(Coupled())
    play_rounds(fleet, 2)
    theta, u = fleet.theta(), counter.uniform(counter.key(3, "uniforms", 3, "a"), MASKED)
    fleet.play("a")
    update = fleet.local["a"].update
    assert update.meta == {"reference": hashlib.sha256(np.packbits(u < theta, bitorder="little")).hexdigest()[:16]}
    a = fleet.task("a", 3).assignment
    for other in ("0" * 16, None):
        meta = {"reference": other} if other else {}
        with pytest.raises(PayloadError, match=f"reference mask {other!r}.*start the client again"):
            fleet.method.read_update(a, fleet.state, {}, Payload(update.arrays, meta))


def test_net_flips_without_their_streams_are_a_payload_error() -> None:
    fleet = Fleet(Coupled())
    play_rounds(fleet, 2)
    down = fleet.ask("a")
    broken = Payload({n: x for n, x in down.arrays.items() if n != "streams"}, down.meta)
    with pytest.raises(PayloadError, match="streams"):
        fleet.method.personal(fleet.task("a", 3), fleet.kept["a"], broken)


def test_a_device_that_sits_a_round_out_cannot_weigh_in_its_means() -> None:
    fleet = Fleet(Coupled())
    fleet.play("a")
    a = fleet.task("a", 2).assignment
    for meta in ({"samples": 5}, {"correct": [1, 1, 2]}):
        with pytest.raises(PayloadError, match="reports no samples"):
            fleet.method.read_update(a, fleet.state, {}, Payload({}, {"resync": 1, **meta}))
    assert fleet.method.read_update(a, fleet.state, {}, Payload({}, {"resync": 1})) == {}
