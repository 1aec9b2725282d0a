"""Ports for processes that are killed and started again, which no other program gets meanwhile."""

from __future__ import annotations

import socket


def kept_port() -> tuple[int, socket.socket]:
    """A port of this machine, and the socket that keeps it from everything else until it is closed.

    It is bound and does not listen: a coordinator can listen there beside it, as often as it starts, because both allow
    the address to be used again.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    return int(kept.getsockname()[1]), kept
