"""What a simulation reports of a method (see `records`)."""

from __future__ import annotations

from edge_bench.curves import mean
from edge_bench.records import Record, measured, spread
from edge_bench.simulation.simulate import Simulated


def simulated(result: Simulated) -> Record:
    """The record of one simulated method, with one row per round."""
    rounds = [row.record for row in result.rows]
    record = measured(rounds, result.devices, result.final, result.start)
    if result.final_after is not None:
        record |= spread(result.final_after, "_after_local_epochs")
    trained = [(r.score_after.mean, r) for r in rounds if r.score_after is not None]
    if trained:
        after, best = max(trained, key=lambda pair: pair[0])
        before = mean(best.score_before)
        record["best_round"] = {"round": best.round, "score_before": before, "score_after": after}
    paper = result.method.paper_bytes(result.course)
    if paper is not None:
        record["bytes_as_the_paper_counts"] = {"up": paper[0], "down": paper[1]}
    record |= {
        "uncounted_bytes_per_device": {"up": 0.0, "down": result.vain_bytes / result.devices},
        "kept_share": result.kept_share,
        "state_sha256": result.state_sha256,
        "personal_sha256": result.personal_sha256,
        "settings": {"name": result.method.name, **result.method.model_dump(mode="json")},
        "rounds": [
            {
                **row.record.model_dump(mode="json"),
                **({} if row.everyone is None else {"score_of_all_devices": row.everyone.model_dump()}),
            }
            for row in result.rows
        ],
    }
    return record
