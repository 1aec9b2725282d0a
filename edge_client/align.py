"""How wide a compact model's layers are: the values of ``--align``. What they do is in `compaction.tuning`."""

from __future__ import annotations

from typing import Literal

from edge_client.errors import ConfigError

Align = Literal["auto", "none"] | int
"""`none`: as narrow as the mask allows; a number: multiples of it; `auto`: what runs fastest on this device."""


def align_of(text: str) -> Align:
    """The value of an option ``--align``. Raises ConfigError."""
    if text in ("auto", "none"):
        return "auto" if text == "auto" else "none"
    if text.isascii() and text.isdigit() and 0 < int(text) <= 1024:
        return int(text)
    raise ConfigError(f"--align {text!r}: choose auto, none, or a number of channels from 1 to 1024, such as 4 or 16")
