"""What a client reports while it works: plain values for a program, and how a terminal or a log shows them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["info", "asking", "wait", "training", "trained", "sent", "dropped", "failed", "done"]


@dataclass(frozen=True)
class Event:
    """Something happened, or is waited for.

    `text` is a sentence for a person. `seconds` is the length of a wait, or the time left for a round; `round` is 0
    for an event outside the rounds.
    """

    kind: Kind
    text: str
    round: int = 0
    seconds: float | None = None


OnEvent = Callable[[Event], None]

QUIET = 30.0  # seconds before a log repeats a wait that goes on


class Log:
    """One line an event, for logs and pipes; a wait that goes on is repeated only after a while."""

    def __init__(self) -> None:
        self._said, self._at = "", 0.0

    def __call__(self, event: Event) -> None:
        if event.kind == "asking":
            return  # becomes a line when the answer is to wait
        subject = event.text.partition(";")[0]
        if event.kind == "wait" and subject == self._said and time.monotonic() < self._at + QUIET:
            return
        self._said, self._at = subject, time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {shown(event.text)}", flush=True)

    def close(self) -> None:
        """Nothing is open."""


class Terminal:
    """Events as lines; the present wait or training is one live line below them, with the time it ends."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._status = self._console.status("starting")
        self._status.start()

    def __call__(self, event: Event) -> None:
        from rich.markup import escape

        text = escape(shown(event.text))
        if event.kind in ("asking", "wait", "training"):
            end = None if event.seconds is None else time.localtime(time.time() + event.seconds)
            self._status.update(text if end is None else f"{text} ({time.strftime('%H:%M:%S', end)})")
        else:
            colours = {"sent": "green", "done": "bold green", "dropped": "yellow", "failed": "red"}
            colour = colours.get(event.kind, "none")
            self._console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] [{colour}]{text}[/]")

    def close(self) -> None:
        """Remove the live line."""
        self._status.stop()


def shown(text: str) -> str:
    """Text from the network without the characters that move a terminal's cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
