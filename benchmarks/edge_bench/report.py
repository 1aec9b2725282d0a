"""What a run reports: one record per method for the JSON file, and a table for the terminal.

The demo and the simulator write the same record from the rounds' records, so their figures compare line by line.
Bytes are those of the payloads; what is sent only once (a structure) is listed apart.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from coord_server import guard
from coord_server.aggregation import sum_kinds
from edge_bench.curves import amount, curve, mean, moved, shown
from edge_bench.federation.fleet import Ended
from edge_bench.simulation.simulate import Simulated
from edge_client.bench.tables import plain_table, unfolded
from edge_client.bundle import Model
from edge_client.methods import MORE_EPOCHS, Method, below
from edge_client.methods.shared.local_sgd import LocalSgd
from edge_client.protocol.messages import Round, Scores, Traffic

Record = dict[str, Any]
ALONE = "standalone"  # the method of devices that train for themselves
FEW = 100  # test samples
PERSONAL = "a model of each device's own, by validation samples and personalise = 'best' (after local epochs: {:.3f})"
MISSED = 0.03  # three points: a method that ends further below its rival is named

CAPTION = """score: each device's own model on its own test samples, mean over devices
  (accuracy for labels, R^2 for numbers); worst: the lowest of any device;
  after more: the same model after one more round of training on its device
up, down: payload bytes a device sends and receives in a round; bits: the same
  per parameter that is exchanged; bytes in all: of one device, both ways, all
  rounds and the last downlink, with what is sent only once (bundle apart)"""


def traffic(rounds: Sequence[Round], devices: int) -> Record:
    """Bytes per device and round up and down, bits per parameter, what is sent once, and bytes in all.

    `devices` is how many the federation has.
    """
    last = moved(rounds[-1].traffic, "last")
    turns = sum(len(r.devices) for r in rounds)
    once = {d for r in rounds for d in r.devices}

    def per_turn(side: str) -> float:
        return sum(sum(getattr(r.traffic, side).values()) for r in rounds) / turns

    return {
        "bytes_up_per_device_round": per_turn("up"),
        "bytes_down_per_device_round": per_turn("down"),
        "bits_per_parameter_up": math.fsum(r.bits_per_parameter_up * len(r.devices) for r in rounds) / turns,
        "bits_per_parameter_down": math.fsum(r.bits_per_parameter_down * len(r.devices) for r in rounds) / turns,
        "one_time_bytes_up_per_device": sum(sum(r.traffic.one_time_up.values()) for r in rounds) / len(once),
        "one_time_bytes_down_per_device": sum(sum(r.traffic.one_time_down.values()) for r in rounds) / len(once),
        "last_bytes_down_per_device": last / devices,
        "bytes_per_device": (sum(moved(r.traffic, "up") + moved(r.traffic, "down") for r in rounds) + last) / devices,
        "devices": devices,
        "device_rounds": turns,
        "bytes_by_kind": {side: sum_kinds(getattr(r.traffic, side) for r in rounds) for side in Traffic.model_fields},
        "seconds_per_round": median(r.seconds for r in rounds),
    }


def _spread(scores: Scores | None, suffix: str = "") -> Record:
    return {f"score_{k}{suffix}": None if scores is None else getattr(scores, k) for k in Scores.model_fields}


def _measured(rounds: Sequence[Round], devices: int, final: Scores | None, start: Scores | None) -> Record:
    """What the record of a federation has, simulated or real."""
    points = [vars(p) for p in curve(rounds, devices, mean(final))]
    guarded = sum(len(r.guarded) for r in rounds)
    return {
        **_spread(final),
        "score_start": mean(start),
        **traffic(rounds, devices),
        "guarded": guarded,
        "curve": points,
    }


def simulated(result: Simulated, model: Model) -> Record:
    """The record of one simulated method, with one row per round."""
    rounds = [row.record for row in result.rows]
    record = _measured(rounds, result.devices, result.final, result.start)
    if result.final_after is not None:
        record |= _spread(result.final_after, "_after_local_epochs")
    measured = [(r.score_after.mean, r) for r in rounds if r.score_after is not None]
    if measured:
        after, best = max(measured, key=lambda pair: pair[0])
        before = mean(best.score_before)
        record["best_round"] = {"round": best.round, "score_before": before, "score_after": after}
    everyone = [(row.everyone.mean, row.record.round) for row in result.rows if row.everyone is not None]
    if everyone:
        record["best_round_of_all_devices"] = dict(zip(("score_mean", "round"), max(everyone), strict=True))
    paper = result.method.paper_bytes(model)
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


def federation(ended: Ended, start: Scores | None = None) -> Record:
    """The record of one real federation; `start` is what the bundle's own values score on its devices.

    Uncounted bytes are those of downlinks fetched again or in vain (the round was over, the update was left out) and of
    such updates. When every device was in the last cohort, the record also has its score after that round's epochs.
    """
    record = _measured(ended.rounds, len(ended.devices), ended.scores(), start)
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
        record |= _spread(ended.rounds[-1].score_after, "_after_local_epochs")
    return record


def _advice(hints: Sequence[str], own: int | None, other: str, epochs: int | None) -> Sequence[str]:
    """The hints; one of them or the first is the number of `epochs` that the method `other` has, if more than `own`."""
    if own is None or epochs is None or own >= epochs:
        return hints
    at, found = (hints.index(MORE_EPOCHS), 1) if MORE_EPOCHS in hints else (0, 0)
    return [*hints[:at], f"epochs = {epochs}, as {other} has (here {own})", *hints[at + found :]]


def _rate(method: Method, model: Model | None) -> float | None:
    """The method's learning rate, also where the settings leave it to the method; None where that has none to name."""
    if isinstance(method, LocalSgd):
        return method.lr or (method.usual_lr if model is None else method.learning_rate(model))
    return getattr(method, "lr", None)


def warnings(
    records: Mapping[str, Record], methods: Mapping[str, Method], tested: int = FEW, model: Model | None = None
) -> list[str]:
    """Sentences on methods that end badly or should have pruned, and on updates that the guard limited.

    A method ends badly when it scores below the bundle's own start, below Standalone, or more than `MISSED` below its
    `rival`, as far as these ran; else below half of the best method. This holds for Standalone too. With `tested` test
    samples of all devices, fewer than `FEW`, a gap of up to two standard errors of a share, ``tested ** -0.5``, says
    nothing. Both mappings have the same labels. `model` is the bundle's, where it is at hand.
    """
    alone = next((label for label in records if methods[label].name == ALONE), None)
    scores = {label: r["score_mean"] for label, r in records.items() if r["score_mean"] is not None}
    best, least = max(scores, key=scores.__getitem__, default=None), tested**-0.5 if 0 < tested < FEW else 0.0
    found = []
    for label, r in records.items():
        score, bases = r["score_mean"], {"the bundle's own start": r["score_start"]}
        if alone is not None and alone != label:
            bases["training alone"] = records[alone]["score_mean"]
        if limited := guard.said(r.get("guarded", 0)):
            found.append(f"{label}: {limited}")
        if r.get("kept_share") == 1 and (unpruned := methods[label].unpruned()):
            found.append(f"{label}: {unpruned}")
        if score is None:
            continue
        worse = {than: base for than, base in bases.items() if base is not None and score < base - least}
        rivals = [other for other in scores if methods[other].name == methods[label].rival]
        rival = max(rivals, key=scores.__getitem__, default=None)
        if rival is not None and score < scores[rival] - max(least, MISSED):
            worse[f"{rival}'s score"] = scores[rival]
        if not worse and best is not None and scores[best] > 0 and score < scores[best] / 2 - least:
            worse[f"half of {best}'s score"] = scores[best]
        after, hints = r.get("score_mean_after_local_epochs"), _hints(label, methods, alone, model)
        for than, base in worse.items():
            own_model = [PERSONAL.format(after)] if after is not None and after >= base else []
            found += [said] if (said := below(label, score, base, than, [*own_model, *hints])) else []
    return found


def _hints(label: str, methods: Mapping[str, Method], alone: str | None, model: Model | None) -> Sequence[str]:
    """What most often helps the method of this label, with its rate and with how many epochs training alone has."""
    hints: Sequence[str] = methods[label].hints(model)
    if alone is not None and alone != label:
        own, epochs = (getattr(methods[which], "epochs", None) for which in (label, alone))
        hints = _advice(hints, own, alone, epochs)
    rate = _rate(methods[label], model)
    return [f"lr (here {rate:g})" if rate and hint == "lr" else hint for hint in hints]


def warn(console: Console, sentences: list[str]) -> None:
    """Print a paragraph for each sentence, after an empty line."""
    if sentences:
        console.print("", *map(_paragraph, sentences), sep="\n", markup=False)


def _paragraph(sentence: str) -> str:
    """A warning in lines of 79 columns; a path or another long word is not broken."""
    text = f"warning: {sentence}"
    return textwrap.fill(text, 79, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def outcome(r: Round) -> str:
    """A round's figures in a few words."""
    before, after = (shown(mean(scores), ".3f") for scores in (r.score_before, r.score_after))
    return f"loss {shown(r.loss, '.3f')}  score {before}, after local epochs {after}"


def table(records: Mapping[str, Record], title: str, console: Console) -> Table:
    """One line per method, as wide as it has to be; within 80 columns for a label of up to 22 characters.

    Nothing is folded or cut off: a label has to be found again in the other tables and in the TOML file.
    """
    return unfolded(lambda gap: _rows(plain_table(title, gap), records), console)


def _rows(out: Table, records: Mapping[str, Record]) -> Table:
    out.add_column("\nmethod", no_wrap=True)
    heads = (
        "\nscore", "\nworst", "after\nmore", "up a\nround", "down a\nround", "bits\nup", "bits\ndown",
        "bytes\nin all", "s per\nround",
    )  # fmt: skip
    for head in heads:
        out.add_column(head, justify="right", no_wrap=True)
    out.caption = CAPTION
    for label, r in records.items():
        out.add_row(
            label,
            shown(r["score_mean"], ".3f"),
            shown(r["score_worst"], ".3f"),
            shown(r["score_mean_after_local_epochs"], ".3f") if "score_mean_after_local_epochs" in r else "",
            amount(r["bytes_up_per_device_round"]),
            amount(r["bytes_down_per_device_round"]),
            _bits(r["bits_per_parameter_up"]),
            _bits(r["bits_per_parameter_down"]),
            amount(r["bytes_per_device"]),
            f"{r['seconds_per_round']:.2f}",
        )
    return out


def _bits(count: float) -> str:
    """Bits a parameter with three digits at most, so that the table stays narrow."""
    return f"{count:.2f}" if count < 9.995 else f"{count:.1f}"


def by_kind(records: Mapping[str, Record]) -> str:
    """What the payloads held, in bytes a device and round (once: a device), a few lines for each method."""
    width = max(map(len, records))
    lines = ["payload bytes of a device and round by kind (header: the container's own)"]
    for label, r in records.items():
        turns, name = r["device_rounds"], label
        for side in ("up", "down"):
            parts = [f"{kind} {count / turns:,.0f}" for kind, count in r["bytes_by_kind"][side].items()]
            if once := r["bytes_by_kind"][f"one_time_{side}"]:
                parts.append(f"{' and '.join(once)} {r[f'one_time_bytes_{side}_per_device']:,.0f} once")
            if side == "down":
                last = [
                    f"{kind} {count / r['devices']:,.0f}" for kind, count in r["bytes_by_kind"]["last_down"].items()
                ]
                parts.append(f"after the last round {' + '.join(last)}")
            if uncounted := r["uncounted_bytes_per_device"][side]:
                parts.append(f"beside these, again or in vain, {uncounted:,.0f} in all")
            head = f"  {name:{width}}  {side:4}  "
            lines += textwrap.wrap(", ".join(parts), 78, initial_indent=head, subsequent_indent=" " * len(head))
            name = ""
        for side, kinds in r.get("message_bytes_per_device", {}).items():
            parts = [f"{kind} {count:,.0f}" for kind, count in kinds.items()]
            head = f"  {'':{width}}  {side:4}  in all, beside payloads: "
            lines += textwrap.wrap(", ".join(parts), 78, initial_indent=head, subsequent_indent=" " * (width + 10))
    return "\n".join(lines)
