"""What a client reports while it works: plain values for a program, and how a terminal or a log shows them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from edge_client.task import Progress  # numpy only where something is trained

Kind = Literal["info", "asking", "wait", "training", "progress", "trained", "sent", "dropped", "failed", "done"]


@dataclass(frozen=True)
class Event:
    """Something happened, or is waited for.

    `text` is a sentence for a person. `seconds` is the length of a wait, or the time left for a round or its training;
    `round` is 0 for an event outside the rounds. `progress` is how far the training is.
    """

    kind: Kind
    text: str
    round: int = 0
    seconds: float | None = None
    progress: Progress | None = None


OnEvent = Callable[[Event], None]

QUIET = 30.0  # seconds before a log repeats a wait that goes on
EPOCHS_APART = 5.0  # seconds between two lines of a log about the training
STEPS_APART = 0.25  # seconds between two events about the training


class Watch:
    """Turns a training's steps into events, no more of them than a person can follow."""

    def __init__(self, round_: int, say: OnEvent, clock: Callable[[], float] = time.monotonic) -> None:
        self._round, self._say, self._clock = round_, say, clock
        self._began = self._said = clock()

    def __call__(self, p: Progress) -> None:
        now = self._clock()
        if p.step == 1:  # the step before it is not known, so the time of the first is not counted
            self._began = now
        if now - self._said < STEPS_APART:
            return
        self._said = now
        left = None if p.step == 1 else (now - self._began) / (p.step - 1) * (p.steps - p.step)
        took = "" if left is None else f", {left:.0f} s left"
        what = "" if p.phase == "train" else f" ({p.phase})"
        text = f"round {self._round}: epoch {p.epoch} of {p.epochs}{what}, loss {p.loss:.4f}{took}"
        self._say(Event("progress", text, self._round, left, p))


class Log:
    """One line an event, for logs and pipes, as text or JSON; what goes on is repeated only after a while."""

    def __init__(self, as_json: bool = False) -> None:
        self._said, self._at, self._epoch = "", 0.0, (0, "", 0)
        self._write = _json if as_json else _text

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        if event.kind == "asking":
            return  # becomes a line when the answer is to wait
        if event.progress is not None:
            epoch = event.round, event.progress.phase, event.progress.epoch
            if epoch == self._epoch or now < self._at + EPOCHS_APART:
                return
            self._epoch = epoch
        subject = event.text.partition(";")[0]
        if event.kind == "wait" and subject == self._said and now < self._at + QUIET:
            return
        self._said, self._at = subject, now
        print(self._write(event), flush=True)

    def close(self) -> None:
        """Nothing is open."""


def _text(event: Event) -> str:
    return f"{time.strftime('%H:%M:%S')} {shown(event.text)}"


def _json(event: Event) -> str:
    said: dict[str, Any] = {"event": event.text, "level": "warning" if event.kind == "failed" else "info"}
    said |= {"kind": event.kind, "round": event.round, "seconds": event.seconds}
    said |= {} if event.progress is None else asdict(event.progress)
    said["timestamp"] = timestamp(time.time())
    return json.dumps({name: value for name, value in said.items() if value is not None})


def timestamp(seconds: float) -> str:
    """A time since the epoch in ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


class Terminal:
    """Events as lines; the present wait or training is one live line below them, with the time it ends."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, emoji=False)
        self._status = self._console.status("starting")
        self._status.start()

    def __call__(self, event: Event) -> None:
        from rich.markup import escape
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        text = shown(event.text)
        if event.progress is not None:
            line = Table.grid(padding=(0, 1))
            line.add_row(Text(text), ProgressBar(event.progress.steps, event.progress.step, width=24))
            self._status.update(line)
        elif event.kind in ("asking", "wait", "training"):
            end = None if event.seconds is None else time.localtime(time.time() + event.seconds)
            self._status.update(Text(text if end is None else f"{text} ({time.strftime('%H:%M:%S', end)})"))
        else:
            colours = {"sent": "green", "done": "bold green", "dropped": "yellow", "failed": "red"}
            colour = colours.get(event.kind, "none")
            self._console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] [{colour}]{escape(text)}[/]")

    def close(self) -> None:
        """Remove the live line."""
        self._status.stop()


def shown(text: str) -> str:
    """Text from the network without the characters that move a terminal's cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
