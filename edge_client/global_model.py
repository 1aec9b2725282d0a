"""A method's global model from the server's state: what a device without data and without a past would be given.

The method itself makes it: its downlink of the next round for a device of which nothing is known, received by one that
has nothing kept and no samples to train on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from edge_client.bundle import Manifest
from edge_client.data import DeviceData
from edge_client.errors import ConfigError
from edge_client.methods import Method
from edge_client.narrow import Channels, narrow
from edge_client.protocol.payload import decode, encode
from edge_client.task import Assignment, Course, Personal, Task
from edge_client.training import Trainer


@dataclass
class _Untrained:
    """A trainer that can only become narrower: nothing is computed for a device without samples."""

    manifest: Manifest

    def gradient(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a device without samples has nothing to train on")

    logits = rest = gradient

    def narrow(self, kept: Channels) -> Trainer:
        return _Untrained(narrow(self.manifest, kept).manifest)


def global_model(method: Method, course: Course, state: Any, closed: int) -> Personal:
    """The model that `state` holds after `closed` rounds. Raises ConfigError for a method without a global model."""
    stays = method.stays(course)
    if stays is not None:
        raise ConfigError(f"method {method.name!r} has no global model: {stays}")
    m = course.model.manifest
    x = np.zeros((0, *m.input.shape), m.input.dtype)
    y = m.target.labels(0)
    task = Task(Assignment(course, closed + 1, "global"), _Untrained(m), DeviceData(x, y, x, y, x, y), secret=0)
    try:
        downlink = decode(encode(method.downlink(course, closed + 1, state, None)))
        return method.personal(task, None, method.receive(task.assignment, None, downlink))
    except Exception as error:  # code of another package may fail in any way
        raise ConfigError(
            f"method {method.name!r} gives no global model ({type(error).__name__}: {error}); "
            "install the coordinator's version of its package"
        ) from error
