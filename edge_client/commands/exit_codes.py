"""The exit codes of `maskfleet`; `docs/exit-codes.md` explains each and what to do.

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


RESTARTED = frozenset({ExitCode.INTERNAL, ExitCode.UNREACHABLE, ExitCode.STATE})
"""What the same command may mend later: a service manager starts it again."""
ASKED_FOR = frozenset({ExitCode.INTERRUPTED, ExitCode.TERMINATED})
"""The end was requested: a service manager counts it as success."""
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
