"""SIGTERM and Ctrl-C end a client promptly, whatever it is doing.

Python runs a signal's handler in the main thread, between two of its own instructions. A wait or a download is
interrupted for it, but a training engine that computes for minutes inside one call is not. So a second thread sees the
signal too, and ends the process after `GRACE` seconds if the main thread has not. That is safe: the journal survives
a kill at any instant.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from edge_client.exit_codes import ExitCode

GRACE = 3.0  # seconds the main thread has to end by itself
CODES = {signal.SIGTERM: ExitCode.TERMINATED, signal.SIGINT: ExitCode.INTERRUPTED}
STOPPED = "stopped; nothing is lost: the same command resumes"


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived."""


@contextmanager
def ending_promptly() -> Iterator[None]:
    """Within this block SIGTERM raises Terminated, Ctrl-C KeyboardInterrupt, and either ends the process in time.

    For the main thread of a program of its own.
    """
    seen, ours = socket.socketpair()
    ours.setblocking(False)
    left = threading.Event()
    before = signal.signal(signal.SIGTERM, _terminate)
    wakeup = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(seen, left), daemon=True).start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, before)
        ours.close()


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated


def _watch(seen: socket.socket, left: threading.Event) -> None:
    """End the process `GRACE` seconds after a signal arrived, unless the block has been left by then."""
    with seen:
        while number := seen.recv(1):  # empty once the block is left
            code = CODES.get(signal.Signals(number[0]))
            if code is not None and not left.wait(GRACE):
                print(STOPPED, file=sys.stderr, flush=True)
                os._exit(code)
