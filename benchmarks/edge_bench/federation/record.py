"""What a real federation reports of its method (see `records`)."""

from __future__ import annotations

from coord_server.aggregation import sum_kinds
from edge_bench.curves import moved
from edge_bench.federation.fleet import Ended
from edge_bench.records import Record, measured, spread
from edge_client.protocol.messages import Scores


def federation(ended: Ended, start: Scores | None = None) -> Record:
    """The record of one real federation; `start` is what the bundle's own values score on its devices.

    Uncounted bytes are those of downlinks fetched again or in vain (the round was over, the update was left out) and of
    such updates. When every device was in the last cohort, the record also has its score after that round's epochs.
    """
    record = measured(ended.rounds, len(ended.devices), ended.scores(), start)
    counted = {side: sum(moved(r.traffic, side) for r in ended.rounds) for side in ("up", "down", "last")}
    record["uncounted_bytes_per_device"] = {
        "up": (sum(d.bytes_up for d in ended.devices) - counted["up"]) / len(ended.devices),
        "down": (sum(d.bytes_down for d in ended.devices) - counted["down"] - counted["last"]) / len(ended.devices),
    }
    record["message_bytes_per_device"] = {
        side: {
            k: n / len(ended.devices)
            for k, n in sum_kinds(getattr(d, f"messages_{side}") for d in ended.devices).items()
        }
        for side in ("up", "down")
    }
    if len(ended.rounds[-1].devices) == len(ended.devices):
        record |= spread(ended.rounds[-1].score_after, "_after_local_epochs")
    return record
