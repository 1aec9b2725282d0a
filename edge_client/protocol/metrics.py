"""A device's metrics as they travel: one list in the metadata of its update, at few digits.

The URL, the lease and the digest of an update already name its method, round and device.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import ValidationError

from edge_client.errors import PayloadError, first_fault
from edge_client.protocol.messages import DeviceMetrics
from edge_client.protocol.payload import Payload

METRICS = "m"  # the key: short, as every update has it
_FIELDS = tuple(DeviceMetrics.model_fields)  # the list's order
_SAMPLES = "samples"  # a method that weighs updates finds them under this key


def short(loss: float, *scores: float) -> tuple[float, ...]:
    """A loss to four significant digits and scores to four decimals: what they travel as."""
    return float(f"{loss:.4g}"), *(round(score, 4) for score in scores)


def with_metrics(update: Payload, metrics: DeviceMetrics) -> Payload:
    """The update with its device's metrics."""
    return replace(update, meta={**update.meta, METRICS: [getattr(metrics, name) for name in _FIELDS]})


def split_metrics(content: Payload) -> tuple[Payload, DeviceMetrics]:
    """What the method reads, with `samples` in its metadata, and the metrics. Raises PayloadError."""
    own = dict(content.meta)
    said = own.pop(METRICS, None)
    if not isinstance(said, list) or len(said) != len(_FIELDS):
        raise PayloadError(f"metadata {METRICS} = {said!s:.80}; it must be the list {', '.join(_FIELDS)}")
    try:
        metrics = DeviceMetrics.model_validate(dict(zip(_FIELDS, said, strict=True)))
    except ValidationError as error:
        raise PayloadError(f"the update's metrics, {first_fault(error)}; train the round again") from None
    return replace(content, meta={**own, _SAMPLES: metrics.samples}), metrics
