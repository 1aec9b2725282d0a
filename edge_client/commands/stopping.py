"""SIGTERM and Ctrl-C end a client promptly, whatever it is doing.

Python runs a signal's handler in the main thread, between two of its own instructions; a training engine may compute
for minutes inside one. So both signals are blocked, and a thread that waits for them ends the process. That is safe:
the journal survives a kill at any instant.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from edge_client.commands.exit_codes import ExitCode

CODES = {signal.SIGTERM: ExitCode.TERMINATED, signal.SIGINT: ExitCode.INTERRUPTED}
SHOW_CURSOR = "\n\x1b[?25h"  # which a live line had hidden


def end_on_signals() -> None:
    """From now on either signal ends the process. For a program's start: only threads made later inherit this."""
    signal.pthread_sigmask(signal.SIG_BLOCK, CODES)
    threading.Thread(target=_wait, daemon=True).start()


def _wait() -> None:
    code = CODES[signal.Signals(signal.sigwait(CODES))]
    late = threading.Timer(3.0, os._exit, (code,))  # where nothing can be printed: the terminal is stopped
    late.start()
    cursor = SHOW_CURSOR if sys.stderr.isatty() else ""
    print(f"{cursor}stopped; nothing is lost: the same command resumes", file=sys.stderr, flush=True)
    os._exit(code)
