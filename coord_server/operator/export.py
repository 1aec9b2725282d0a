"""`maskfleet federation export --onnx`: the global model of a federation as one verified file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from coord_server.model_file import Held, write_model
from coord_server.operator.client import Operator
from edge_client.bundle import WEIGHTS
from edge_client.compaction.personal import EVAL
from edge_client.data import fit, read
from edge_client.errors import ConfigError

TRIES = 5  # rounds that may close while the state is fetched


def export_onnx(operator: Operator, id_: str, path: Path, data: Path | None = None) -> str:
    """Write the global model of a federation to `path`, checked on the samples of the file `data` too; a sentence.

    Raises ConfigError for a method without a global model, CompactionError, DataError, StateError, ServerError.
    """
    found = operator.federation(id_)
    if found.config is None or found.places is None:
        raise ConfigError(f"federation {id_!r} cannot be read: {found.fault}")
    packed, closed = _state(operator, id_)
    with tempfile.TemporaryDirectory(prefix="maskfleet-export-") as folder:
        bundle = operator.fetch_bundle(found.config.bundle, Path(folder), (EVAL, WEIGHTS))
        samples = None if data is None else fit(read(data), bundle.manifest).x
        held = Held(found.config, found.places, closed, packed)
        return f"{path}: {write_model(held, bundle, path, samples).detail}"


def _state(operator: Operator, id_: str) -> tuple[bytes, int]:
    """The method's state, and after how many closed rounds it is."""
    for _ in range(TRIES):
        closed = len(operator.rounds(id_))
        data = operator.state(id_)
        if len(operator.rounds(id_)) == closed:
            return data, closed
    raise ConfigError(f"the rounds of {id_!r} close faster than its state can be fetched; pause it, then export again")
