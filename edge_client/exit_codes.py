"""The exit codes of `maskfleet`: the one place that defines them. `docs/exit-codes.md` explains them to people.

A script around `maskfleet join` needs the code alone. After a code in `RESTARTED` the same command may succeed later;
130 and 143 were asked for; every other code but 0 needs a person, and a restart would end the same way.
"""

from __future__ import annotations

from enum import IntEnum

from edge_client.errors import (
    BundleError,
    CompactionError,
    ConfigError,
    DataError,
    DivergedError,
    MaskfleetError,
    PayloadError,
    ServerError,
    StateError,
    UnreachableError,
)


class ExitCode(IntEnum):
    """What a command's end means."""

    DONE = 0
    INTERNAL = 1
    CONFIG = 2
    DATA = 3
    REFUSED = 4
    UNREACHABLE = 5
    STATE = 6
    COMPACTION = 7
    STOPPED = 8
    MALFORMED = 9
    INTERRUPTED = 130
    TERMINATED = 143


MEANING: dict[ExitCode, str] = {
    ExitCode.DONE: "done: the federation is finished, or the rounds asked for are",
    ExitCode.INTERNAL: "a fault of maskfleet itself; the message says how to see more",
    ExitCode.CONFIG: "wrong usage: an option or setting, a model that cannot be exported, a missing extra or package",
    ExitCode.DATA: "the data file cannot be read or does not fit the model",
    ExitCode.REFUSED: "the coordinator refused the request: bad token, unknown federation, update not valid",
    ExitCode.UNREACHABLE: "no usable answer for longer than --patience, or downloads that arrive damaged every time",
    ExitCode.STATE: "the state folder cannot be used: disk full, not writable, or in use by another client",
    ExitCode.COMPACTION: "the compact model differs from the masked one: the dense one was written, or none",
    ExitCode.STOPPED: "the operator stopped the federation before its last round",
    ExitCode.MALFORMED: "a model or payload is malformed, too large, or of a version this device does not read",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C); the same command resumes",
    ExitCode.TERMINATED: "terminated (SIGTERM); the same command resumes",
}

RESTARTED = frozenset({ExitCode.INTERNAL, ExitCode.UNREACHABLE, ExitCode.STATE})
"""What the same command may mend later: a service manager starts it again."""
ASKED_FOR = frozenset({ExitCode.INTERRUPTED, ExitCode.TERMINATED})
"""The end was requested: a service manager counts it as success."""
FINAL = frozenset(ExitCode) - RESTARTED - ASKED_FOR - {ExitCode.DONE}
"""What only a person can change."""

_BY_ERROR: tuple[tuple[type[MaskfleetError], ExitCode], ...] = (
    (ConfigError, ExitCode.CONFIG),
    (DivergedError, ExitCode.CONFIG),
    (DataError, ExitCode.DATA),
    (ServerError, ExitCode.REFUSED),
    (UnreachableError, ExitCode.UNREACHABLE),
    (StateError, ExitCode.STATE),
    (CompactionError, ExitCode.COMPACTION),
    (BundleError, ExitCode.MALFORMED),
    (PayloadError, ExitCode.MALFORMED),
)


def exit_code(error: MaskfleetError) -> ExitCode:
    """The code a command ends with after `error`."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), ExitCode.INTERNAL)
