"""What holds for the whole test session."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background has Ctrl-C ignored in them and in all their children, to whom some
# tests send it; with any handler here a child starts with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
