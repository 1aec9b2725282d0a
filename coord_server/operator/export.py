"""`maskfleet federation export --onnx`: the global model of a federation as one verified file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from coord_server import aggregation
from coord_server.operator.client import Operator
from edge_client.bundle import WEIGHTS
from edge_client.card import card, describe
from edge_client.compaction.personal import EVAL, write_dense, write_personal
from edge_client.data import fit, read
from edge_client.errors import CompactionError, ConfigError
from edge_client.global_model import global_model
from edge_client.methods import make_method
from edge_client.protocol.messages import FederationConfig
from edge_client.task import Course

TRIES = 5  # rounds that may close while the state is fetched


def export_onnx(operator: Operator, id_: str, path: Path, data: Path | None = None) -> str:
    """Write the global model of a federation to `path`; what was written, as a sentence.

    The compact form is written, proved equal to the masked network on random inputs and the samples of the
    file `data`; where that cannot be shown, the masked network itself. Raises ConfigError for a method without a global
    model, CompactionError, DataError, StateError, ServerError.
    """
    found = operator.federation(id_)
    if found.config is None:
        raise ConfigError(f"federation {id_!r} cannot be read: {found.fault}")
    config, method = found.config, make_method(found.config.method)
    packed, closed = _state(operator, id_)
    with tempfile.TemporaryDirectory(prefix="maskfleet-export-") as folder:
        bundle = operator.fetch_bundle(config.bundle, Path(folder), (EVAL, WEIGHTS))
        course = Course(bundle.model(), config.seed, config.rounds, config.cohort)
        model = global_model(method, course, aggregation.unpack(method.state_type, packed), closed)
        samples = None if data is None else fit(read(data), bundle.manifest).x
        try:
            report = write_personal(bundle, model, path, samples)
            said = (
                f"{report.parameters_compact} of {report.parameters_dense} parameters, "
                f"verified to {report.max_abs_diff:.1e}"
            )
        except CompactionError as error:
            write_dense(bundle, model, path, samples)
            said = f"all {bundle.manifest.d} parameters, not compacted: {error}"
        describe(path, card(bundle.manifest, **_facts(config, method.name, closed)))
    own = bundle.manifest.buffers_d and np.array_equal(model.buffers, course.model.buffers)
    note = "; batch-norm statistics are the bundle's, those of this method stay on the devices" if own else ""
    return f"{path}: the global model after round {closed} of {config.rounds}, {said}{note}"


def _facts(config: FederationConfig, method: str, closed: int) -> dict[str, str | int]:
    return {
        "federation": config.name,
        "method": method,
        "rounds": closed,
        "source": "global",
        "licence": config.licence,
    }


def _state(operator: Operator, id_: str) -> tuple[bytes, int]:
    """The method's state, and after how many closed rounds it is."""
    for _ in range(TRIES):
        closed = len(operator.rounds(id_))
        data = operator.state(id_)
        if len(operator.rounds(id_)) == closed:
            return data, closed
    raise ConfigError(f"the rounds of {id_!r} close faster than its state can be fetched; pause it, then export again")
