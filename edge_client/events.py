"""What a client reports while it works: plain values that a program reads and a terminal prints."""

from __future__ import annotations

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
