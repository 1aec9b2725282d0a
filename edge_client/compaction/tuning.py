"""How wide a compact model's layers should be: by a rule, or on this device by measurement.

    `none`  as narrow as the mask allows
    `rule`  what ONNX Runtime's convolutions need, from shapes alone (`ruled`): the same bytes on every device
    `auto`  what runs fastest here

`auto` times whole models in turns: as narrow as possible, by the rule, with all layers of a stream of channels
(`width.Stream`) alike, with the channels besides that no layer reads directly (such as those of attention heads), with
all channels of streams, and whole. The fastest is taken; of two as fast, the one with fewer multiply-adds. Without a
clock `auto` is the rule. All but `auto` have no more multiply-adds than the dense model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from edge_client.align import Align
from edge_client.compaction.smaller import Smaller, cut, whole
from edge_client.compaction.study import Study, study
from edge_client.compaction.width import Stream, forced, widened
from edge_client.compaction.writer import FASTEST, FEWEST
from edge_client.errors import CompactionError, ConfigError
from edge_client.measure.engines import onnx_call
from edge_client.measure.latency import in_turns
from edge_client.measure.macs import macs

RULE = 4  # channels of ONNX Runtime's blocked convolutions
SECONDS = 1.0  # for timing whole models, beyond the fewest runs
EQUAL = 1.01  # times within this factor count as equal

Clock = Callable[[Sequence[bytes]], Sequence[float]]
"""Gives the milliseconds of whole models, timed in turns."""


def clock(sample: NDArray[Any]) -> Clock:
    """The clock of this device for models that read `sample`, a batch of one."""

    def models(data: Sequence[bytes]) -> list[float]:
        found = in_turns([onnx_call(d, sample) for d in data], runs=200, warm_up=5, seconds=SECONDS * len(data))
        return [float(np.median(t)) for t in found.cpu]

    return models


def aligned(found: Study, align: Align, clock: Clock | None) -> Smaller:
    """The smaller graph of `found` with the widths of `align`. Raises CompactionError when it cannot be written.

    Where a model of `none` or `rule` has more multiply-adds than the dense one, the narrowest is taken, and where
    that has more too, the dense one.
    """
    if align == "none":
        return _no_dearer(found, cut(found, FEWEST))
    if align == "rule" or clock is None:
        return _no_dearer(found, ruled(found))
    candidates: dict[bytes, Smaller] = {}
    for made in _widths(found):  # each in memory once, serialised
        candidates.setdefault(made.model.SerializeToString(), replace(made, model=ModelProto()))
    times = clock(list(candidates)) if len(candidates) > 1 else [0.0]
    # In the order of their multiply-adds, nearly: the first of those as fast as the fastest.
    timed = zip(candidates.items(), times, strict=True)
    data, chosen = next(candidate for candidate, ms in timed if ms <= EQUAL * min(times))
    return replace(chosen, model=ModelProto.FromString(data))


def _widths(found: Study) -> Iterator[Smaller]:
    """The models that `auto` times; some may be equal."""
    yield cut(found, FEWEST)
    yield ruled(found)
    for multiple in (_blocks, lambda s, n: _blocks(s, n) if s.readers else s.size, lambda s, n: s.size):
        made = _wide(found, multiple, True)
        if made is not None:
            yield made
    yield whole(found, "the model with all channels runs fastest here")


def _no_dearer(found: Study, made: Smaller) -> Smaller:
    """`made`, or the narrowest graph, or the dense one: the first that has no more multiply-adds than the dense one."""
    why = "what a smaller model needs instead of dead channels has more multiply-adds, so all stay"
    try:
        most = macs(whole(found, why).model)
        if macs(made.model) <= most:
            return made
        narrow = cut(found, FEWEST)
        return narrow if macs(narrow.model) <= most else whole(found, why)
    except ConfigError:  # work that depends on the data cannot be compared
        return made


def ruled(found: Study) -> Smaller:
    """The smaller graph with the widths that ONNX Runtime's convolutions need, from shapes alone."""
    return _wide(found, _blocks, False) or cut(found, FASTEST)


def _blocks(stream: Stream, count: int) -> int:
    """The multiple that ONNX Runtime's convolutions need of a stream with `count` live channels."""
    block = FASTEST.block
    if stream.depthwise:
        return block if -(-count // block) * block <= stream.size else RULE
    return RULE if stream.convolved and count > block else 1


def _wide(found: Study, multiple: Callable[[Stream, int], int], joined: bool) -> Smaller | None:
    """The graph with channels that come back; None where none does, or where it cannot be written with them."""
    extra = forced(found, multiple, joined)
    if not extra:
        return None
    try:
        return cut(study(found.net, widened(extra)), FASTEST)
    except CompactionError:
        return None
