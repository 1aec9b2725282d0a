"""Makes one model file in a process of its own: ``python -m coord_server.export_worker FOLDER`` (see `exports`).

FOLDER holds `order.json`, the federation's state and the device's record as stored, and a bundle of what is read. The
worker writes `said`, a line about what it does, and leaves `model`, whole and proved equal, or a sentence in `fault`.
It ends when its standard input does, that is with the coordinator that started it.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from coord_server import aggregation
from coord_server.exports import BUNDLE, ELSEWHERE, FAULT, MODEL, ORDER, RECORD, SAID, STATE, Order
from edge_client.artifacts import make
from edge_client.bundle import Bundle
from edge_client.card import card, describe
from edge_client.compaction.personal import write_personal
from edge_client.errors import ConfigError, MaskfleetError
from edge_client.files import write_whole
from edge_client.global_model import global_model
from edge_client.methods import Method, make_method
from edge_client.task import Course, Personal

NICE = 10  # rounds come first


def personal(method: Method, course: Course, order: Order, folder: Path) -> Personal:
    """The values of the model. Raises ConfigError when a part of it is on the device alone."""
    state = aggregation.unpack(method.state_type, (folder / STATE).read_bytes())
    everyone = global_model(method, course, state, order.closed)
    if order.device is None:
        return everyone
    record = None
    if (folder / RECORD).is_file() and method.record_type is not None:
        record = aggregation.unpack(method.record_type, (folder / RECORD).read_bytes())
    known = method.of_device(course, state, record, everyone)
    if known is None:
        raise ConfigError(
            f"the coordinator does not know all of {order.device!r}'s model: method {method.name!r} keeps a part of it "
            "on the device; there, run `maskfleet artifact` on its personal.onnx"
        )
    return known


def work(folder: Path) -> None:
    """Write the model. Raises MaskfleetError."""
    order = Order.model_validate_json((folder / ORDER).read_text("utf-8"))
    bundle, method, config = Bundle.open(folder / BUNDLE), make_method(order.config.method), order.config
    course = Course(bundle.model(), config.seed, config.rounds, config.cohort)
    compact = folder / "compact.onnx"

    def say(line: str) -> None:
        write_whole(folder / SAID, line.encode(), elsewhere=ELSEWHERE)

    say("compacting the model")
    write_personal(bundle, personal(method, course, order, folder), compact)
    facts: dict[str, str | int] = {"federation": config.name, "method": method.name, "rounds": order.closed}
    facts |= {"source": "global"} if order.device is None else {"source": "personal", "device": order.device}
    describe(compact, card(bundle.manifest, **facts, licence=config.licence))
    if order.kind == "onnx":
        compact.rename(folder / MODEL)
    else:
        say(f"loading what writes {order.kind}")
        make(compact.read_bytes(), order.kind, folder / MODEL, progress=say)


def main(folder: Path) -> int:
    """Work, and say in a file what went wrong; 0 when the model is there."""
    os.nice(NICE)
    threading.Thread(target=_end_with_the_coordinator, daemon=True).start()
    try:
        work(folder)
    except MaskfleetError as error:
        write_whole(folder / FAULT, str(error).encode(), elsewhere=ELSEWHERE)
        return 1
    return 0


def _end_with_the_coordinator() -> None:
    os.read(0, 1)  # unbuffered: a lock that a thread holds at the interpreter's end aborts it
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
