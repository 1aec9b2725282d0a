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


def export_onnx(operator: Operator, id_: str, path: Path, data: Path | None = None) -> str:
    """Write the global model of a federation to `path`, checked on the samples of the file `data` too; a sentence.

    Raises ConfigError for a method without a global model, CompactionError, DataError, StateError, ServerError.
    """
    found = operator.federation(id_)
    if found.config is None or found.places is None:
        raise ConfigError(f"federation {id_!r} cannot be read: {found.fault}")
    packed, closed = operator.state_and_round(id_)
    with tempfile.TemporaryDirectory(prefix="maskfleet-export-") as folder:
        bundle = operator.fetch_bundle(found.config.bundle, Path(folder), (EVAL, WEIGHTS))
        samples = None if data is None else fit(read(data), bundle.manifest).x
        held = Held(found.config, found.places, closed, packed)
        return f"{path}: {write_model(held, bundle, path, samples).detail}"
