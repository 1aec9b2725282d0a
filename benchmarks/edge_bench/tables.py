"""Records on the terminal: a line for each method, its bytes by kind, a round in a few words."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from edge_bench.curves import amount, mean, shown
from edge_bench.records import Record
from edge_client.bench.tables import plain_table, unfolded
from edge_client.protocol.messages import Round

CAPTION = """score: each device's own model on its own test samples, mean weighted by these
  (accuracy for labels, R^2 for numbers); worst: the lowest of any device;
  after more: the same model after one more round of training on its device
up, down: payload bytes a device sends and receives in a round; bits: the same
  per parameter that is exchanged; bytes in all: of one device, both ways, all
  rounds and the last downlink, with what is sent only once (bundle apart)"""


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
