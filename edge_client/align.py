"""How wide a compact model's layers are: the values of ``--align``. What they do is in `compaction.tuning`."""

from __future__ import annotations

from typing import Literal

from edge_client.errors import ConfigError

Align = Literal["auto", "none", "rule"] | int
"""`none`: as narrow as the mask allows; `rule`: what ONNX Runtime's kernels need, the same on every device; a number:
multiples of it; `auto`: what runs fastest on this device, by measurement."""


def align_of(text: str) -> Align:
    """The value of an option ``--align``. Raises ConfigError."""
    for word in ("auto", "none", "rule"):
        if text == word:
            return word
    if text.isascii() and text.isdigit() and 0 < int(text) <= 1024:
        return int(text)
    raise ConfigError(f"--align {text!r}: choose rule, auto, none, or a number of channels from 1 to 1024, such as 4")
