"""What the coordinator says no to: one exception that carries an RFC 9457 problem's word, status and sentence."""

from __future__ import annotations

from edge_client.errors import MaskfleetError

STATUS = {
    "bad-request": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "device-removed": 403,
    "not-found": 404,
    "method-not-allowed": 405,
    "too-slow": 408,
    "wrong-round": 409,
    "round-closed": 409,
    "wrong-lease": 409,
    "not-in-cohort": 409,
    "conflicting-update": 409,
    "wrong-phase": 409,
    "no-devices": 409,
    "name-taken": 409,
    "bundle-incomplete": 409,
    "token-spent": 403,
    "too-large": 413,
    "bad-range": 416,
    "bad-digest": 422,
    "bad-bundle": 422,
    "bad-config": 422,
    "bad-message": 422,
    "bad-payload": 422,
    "superseded": 429,
    "internal-error": 500,
    "round-not-open": 503,
    "too-busy": 503,
    "not-loaded": 503,
    "storage-full": 507,
}
"""Every problem's fixed word and its HTTP status; docs/api.md lists what each one means."""


class Refusal(MaskfleetError):
    """A request that is not granted. `detail` says what, which value, what to do."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.status = STATUS[kind]
