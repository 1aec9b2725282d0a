"""Real processes in tests: a port that stays theirs, one that has not begun yet, one that has ended."""

from __future__ import annotations

import signal
import socket
import time

import psutil


def kept_port() -> tuple[int, socket.socket]:
    """A port of this machine, and the socket that keeps it from everything else until it is closed.

    It is bound and does not listen: a coordinator can listen there beside it, as often as it starts, because both allow
    the address to be used again.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    return int(kept.getsockname()[1]), kept


HELD = ("sh", "-c", 'kill -STOP $$; exec "$@"', "-")
"""Before a command: it stops before it does anything, until `release`."""


def held(pid: int) -> bool:
    """Whether a command after `HELD` has stopped."""
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def release(pid: int) -> None:
    """Let a command begin that was started after `HELD`."""
    while not held(pid):
        time.sleep(0.001)
    psutil.Process(pid).send_signal(signal.SIGCONT)


def ended(process: psutil.Process) -> bool:
    """Whether a process has ended. Where process 1 reaps no orphans, it stays in the list as a zombie."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
