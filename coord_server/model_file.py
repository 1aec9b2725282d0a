"""A model file from what a coordinator holds: one rule for the command line's export and for the coordinator's worker.

A device's own model where the method's state and record hold all of it, else the model that all devices share. Compact
and proved equal where that can be done, else with all its parameters. `Made` records which.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coord_server import aggregation
from edge_client.bundle import Bundle
from edge_client.card import card, describe
from edge_client.compaction.personal import write_smallest
from edge_client.global_model import global_model
from edge_client.methods import make_method
from edge_client.protocol.messages import FederationConfig, Source
from edge_client.task import Course, Personal


@dataclass(frozen=True)
class Held:
    """What a coordinator holds after round `closed`: the state, and the record of `device`, as they are stored.

    `places` is the cohort that the federation was created with. `device` is None when the shared model is asked for; a
    device has no record before its first update. `kept` is the model that the device has reported to keep, None before.
    """

    config: FederationConfig
    places: int
    closed: int
    state: bytes
    device: str | None = None
    record: bytes | None = None
    kept: Source | None = None


@dataclass(frozen=True)
class Made:
    """Whose model was written, and what it is in words; fields of the message `Export`."""

    source: Literal["global", "personal"]
    detail: str


def write_model(held: Held, bundle: Bundle, path: Path, samples: NDArray[Any] | None = None) -> Made:
    """Write the ONNX model with its metadata to `path`, proved on random inputs and on `samples` [n, *input].

    Raises ConfigError for a method without a global model, CompactionError when the values do not fit the bundle,
    StateError when the file cannot be written.
    """
    config, closed = held.config, held.closed
    method = make_method(config.method)
    course = Course(bundle.model(), config.seed, config.rounds, held.places)
    state = aggregation.unpack(method.state_type, held.state)
    everyone, own = global_model(method, course, state, closed), None
    if held.device is not None:
        record = None
        if held.record is not None and method.record_type is not None:
            record = aggregation.unpack(method.record_type, held.record)
        own = method.of_device(course, state, record, everyone)
    model = everyone if own is None else own
    source: Literal["global", "personal"] = "global"
    facts: dict[str, str | int] = {"federation": config.name, "method": method.name, "rounds": closed}
    when = f"after round {closed} of {config.rounds}"
    whose = f"the global model {when}"
    if held.device is not None and own is None:
        whose += f", since {method.name} leaves a part of a device's own model on the device alone"
    elif held.device is not None and held.kept not in (None, "global"):
        whose = f"the federation's model for {held.device!r} {when}, since the device kept one of its own training"
    elif held.device is not None:
        source, whose = "personal", f"the model of {held.device!r} {when}"
        facts["device"] = held.device
    said = _write(bundle, model, path, samples)
    describe(path, card(bundle.manifest, **facts, source=source, licence=config.licence))
    note = ""
    if bundle.manifest.buffers_d and np.array_equal(model.buffers, course.model.buffers):
        note = "; batch-norm statistics are the bundle's, those of this method stay on the devices"
    return Made(source, f"{whose}, {said}{note}")


def _write(bundle: Bundle, model: Personal, path: Path, samples: NDArray[Any] | None) -> str:
    """The compact form where it can be proved equal, else the masked network; which, in a sentence's part."""
    report = write_smallest(bundle, model, path, samples)
    if isinstance(report, str):
        return f"all {bundle.manifest.d} parameters, not compacted: {report}"
    return f"{report.parameters_compact} of {report.parameters_dense} parameters, verified to {report.max_abs_diff:.1e}"
