"""What a client says while it works: plain values that a program reads and a terminal prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["info", "asking", "wait", "training", "trained", "sent", "dropped", "done"]


@dataclass(frozen=True)
class Event:
    """Something happened, or is waited for.

    `text` is a sentence for a person. `seconds` says how long a wait, or the time left for a round, is;
    `round` is 0 where no round is meant.
    """

    kind: Kind
    text: str
    round: int = 0
    seconds: float | None = None


OnEvent = Callable[[Event], None]
