"""A process's log: a line a record, as text or as JSON, which neither a long message nor a flood of them can spoil.

Every module logs through ``logging.getLogger("maskfleet")``; fields go into `extra` and become keys of the JSON.
Records of what strangers can cause as often as they like name their kind as ``extra={"limited": KIND}``: of each kind
at most `MOST` are written a minute, and the next one has the number left out. The HTTP server's tracebacks are one
such kind.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Literal, TextIO

from edge_client.events import shown, timestamp

Format = Literal["text", "json"]
MOST, WINDOW = 20, 60.0  # records of one kind that are written in so many seconds
LONGEST = 2000  # characters of a message: what was refused may be long
# What every record has; anything more came as `extra`. Another handler's formatter may have added the last two.
COMMON = frozenset(vars(logging.makeLogRecord({}))) | {"limited", "message", "asctime"}


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


class Line(logging.Formatter):
    """A record in one line: time, level and message, with a traceback below; or a JSON object with its fields."""

    def __init__(self, form: Format) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        text, level, at = record.getMessage(), record.levelname.lower(), timestamp(record.created)
        if len(text) > LONGEST:
            text = f"{text[:LONGEST]} ... ({len(text)} characters)"
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._form == "json":
            extra = {name: value for name, value in vars(record).items() if name not in COMMON}
            fault = {"exception": trace} if trace else {}
            return json.dumps({"event": text, "level": level, **extra, "timestamp": at, **fault}, default=str)
        line = f"{at[:19]}Z {level:7} {shown(text)}".replace("\n", "\N{REPLACEMENT CHARACTER}")
        return f"{line}\n{shown(trace)}" if trace else line


def set_up(form: Format, level: str, stream: TextIO | None = None) -> None:
    """Write this process's log to `stream`, by default the standard error, in place of what was set up before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(Limit())
    handler.setFormatter(Line(form))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
