"""How wide a compact model's layers are: the values of ``--align``. What they do is in `compaction.tuning`."""

from __future__ import annotations

from typing import Literal

Align = Literal["rule", "none", "auto"]
"""`rule`: what ONNX Runtime's kernels need, the same on every device; `none`: as narrow as the mask allows; `auto`:
what runs fastest on this device, by measurement."""
