"""A process's log: a line a record, as text or as JSON, which neither a long message nor a flood of them can spoil.

Every module logs through ``logging.getLogger("maskfleet")``; fields go into `extra` and become keys of the JSON.
Records of what strangers can cause as often as they like name their kind as ``extra={"limited": KIND}``: of each kind
at most `MOST` are written a minute, and the next one has the number left out. The HTTP server's tracebacks are one
such kind.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Literal, TextIO

import structlog

from edge_client.events import shown

Format = Literal["text", "json"]
MOST, WINDOW = 20, 60.0  # records of one kind that are written in so many seconds
LONGEST = 2000  # characters of a message: what was refused may be long


class Limit(logging.Filter):
    """Lets `MOST` records of a kind pass in `WINDOW` seconds and counts the others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        fault = f"fault of {record.name}" if record.name == "uvicorn.error" and record.exc_info else None
        kind = getattr(record, "limited", fault)
        if not isinstance(kind, str):
            return True
        now = self._clock()
        since, count = self._kinds.get(kind, (now, 0))
        if now - since < WINDOW:
            self._kinds[kind] = since, count + 1
            return count < MOST
        self._kinds[kind] = now, 1
        if count > MOST:
            record.left_out = count - MOST
            record.msg = f"{record.getMessage()} ({count - MOST} records like it were left out)"
            record.args = ()
        return True


def set_up(form: Format, level: str, stream: TextIO | None = None) -> None:
    """Write this process's log to `stream`, by default the standard error, in place of what was set up before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(Limit())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.ExtraAdder(),
                structlog.processors.TimeStamper(fmt="iso", utc=True),
            ],
            processors=[
                structlog.processors.format_exc_info,
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _short,
                structlog.processors.JSONRenderer(default=str) if form == "json" else _line,
            ],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


def _short(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    text = str(fields["event"])
    if len(text) > LONGEST:
        fields["event"] = f"{text[:LONGEST]} ... ({len(text)} characters)"
    fields.pop("limited", None)
    return fields


def _line(_: Any, __: str, fields: MutableMapping[str, Any]) -> str:
    """Time, level and message in one line, whatever the message holds; a traceback below it."""
    text = shown(str(fields["event"])).replace("\n", "\N{REPLACEMENT CHARACTER}")
    trace = f"\n{shown(fields['exception'])}" if "exception" in fields else ""
    return f"{fields['timestamp'][:19]}Z {fields['level']:7} {text}{trace}"
