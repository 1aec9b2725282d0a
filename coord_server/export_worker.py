"""Makes one model file in a process of its own: ``python -m coord_server.export_worker FOLDER`` (see `exports`).

FOLDER holds `order.json`, the federation's state and the device's record as stored, and a bundle of what is read. The
worker writes `said`, a line about what it does. It leaves `model`, whole and proved equal, and `made.json`, which
describes it, or a sentence in `fault`. It ends when its standard input does, so with the coordinator that started it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from coord_server.exports import BUNDLE, ELSEWHERE, FAULT, MADE, MODEL, ONNX, ORDER, RECORD, SAID, STATE, Order
from coord_server.model_file import Held, write_model
from edge_client.artifacts.making import make
from edge_client.bundle import Bundle
from edge_client.errors import MaskfleetError
from edge_client.files import write_whole

NICE = 10  # rounds come first


def work(folder: Path) -> None:
    """Write the model, and what it is. Raises MaskfleetError."""
    order = Order.model_validate_json((folder / ORDER).read_text("utf-8"))
    record = (folder / RECORD).read_bytes() if (folder / RECORD).is_file() else None
    state = (folder / STATE).read_bytes()
    held = Held(order.config, order.places, order.closed, state, order.device, record, order.kept)
    onnx = folder / ONNX

    def say(line: str) -> None:
        write_whole(folder / SAID, line.encode(), elsewhere=ELSEWHERE)

    say("compacting the model")
    made = write_model(held, Bundle.open(folder / BUNDLE), onnx)
    if order.kind != "onnx":
        say(f"loading what writes {order.kind}")
        make(onnx.read_bytes(), order.kind, onnx, progress=say)
    write_whole(folder / MADE, json.dumps(asdict(made)).encode(), elsewhere=ELSEWHERE)
    onnx.rename(folder / MODEL)


def main(folder: Path) -> int:
    """Work, and write into a file what went wrong; 0 when the model is there."""
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
