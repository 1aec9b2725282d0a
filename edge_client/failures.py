"""Why a device could not do its round: an exception as the failure it reports to the coordinator."""

from __future__ import annotations

from edge_client.errors import DataError, DivergedError, LostError, MaskfleetError, PayloadError
from edge_client.protocol.messages import Failure, FailureKind

REASON_MOST = 1000  # characters of `Failure.reason`
OUT_OF_MEMORY = ("bad_alloc", "bad allocation", "failed to allocate", "out of memory")  # in the engines' own words


def failure_of(error: Exception) -> Failure | None:
    """The failure behind an exception of a round; None for one that is not the round's (a full disk, a bad setting)."""
    kind = _kind(error)
    if kind is None:
        return None
    reason = str(error) if isinstance(error, MaskfleetError) else f"{type(error).__name__}: {error}"
    return Failure(kind=kind, reason=reason.encode(errors="replace").decode()[:REASON_MOST])


def _kind(error: Exception) -> FailureKind | None:
    if isinstance(error, LostError):
        return "lost"
    if isinstance(error, DivergedError):
        return "downlink" if error.at_start else "diverged"
    if isinstance(error, PayloadError):
        return "downlink"
    if isinstance(error, DataError):
        return "data"
    if isinstance(error, MaskfleetError):
        return None
    words = str(error).lower()
    if isinstance(error, MemoryError) or any(phrase in words for phrase in OUT_OF_MEMORY):
        return "out-of-memory"
    return "backend"
