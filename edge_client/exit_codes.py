"""The exit codes of `maskfleet`: the one place where they are written. `docs/exit-codes.md` is the page for people.

A script around `maskfleet join` decides by the code alone: 5 and 6 are worth another try later, 130 and 143 were
asked for, the others need a person.
"""

from __future__ import annotations

from enum import IntEnum

from edge_client.errors import (
    BundleError,
    CompactionError,
    ConfigError,
    DataError,
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
    DAMAGED = 9
    INTERRUPTED = 130
    TERMINATED = 143


MEANING: dict[ExitCode, str] = {
    ExitCode.DONE: "done: the federation is finished, or the rounds asked for are",
    ExitCode.INTERNAL: "a fault of maskfleet itself; the message says how to see more",
    ExitCode.CONFIG: "wrong usage: an option or setting, a model that cannot be exported, a missing extra or package",
    ExitCode.DATA: "the data file cannot be read or does not fit the model",
    ExitCode.REFUSED: "the coordinator refused the request: bad token, unknown federation, update not valid",
    ExitCode.UNREACHABLE: "the coordinator could not be reached for longer than --patience",
    ExitCode.STATE: "the state folder cannot be used: disk full, not writable, or in use by another client",
    ExitCode.COMPACTION: "the compact model differs from the masked one: the dense one was written, or none",
    ExitCode.STOPPED: "the operator stopped the federation before its last round",
    ExitCode.DAMAGED: "bytes do not match their digest or format even after fetching them again",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C); the same command resumes",
    ExitCode.TERMINATED: "terminated (SIGTERM); the same command resumes",
}

_BY_ERROR: tuple[tuple[type[MaskfleetError], ExitCode], ...] = (
    (ConfigError, ExitCode.CONFIG),
    (DataError, ExitCode.DATA),
    (ServerError, ExitCode.REFUSED),
    (UnreachableError, ExitCode.UNREACHABLE),
    (StateError, ExitCode.STATE),
    (CompactionError, ExitCode.COMPACTION),
    (BundleError, ExitCode.DAMAGED),
    (PayloadError, ExitCode.DAMAGED),
)


def exit_code(error: MaskfleetError) -> ExitCode:
    """The code a command ends with after `error`."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), ExitCode.INTERNAL)
