"""Every problem the coordinator answers with: one table of its kind, HTTP status, an example sentence and Retry-After.

`Refusal` carries one of them from any room to the HTTP handlers in `http/problems.py`. docs/api.md lists the meanings.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from edge_client.errors import MaskfleetError
from edge_client.protocol.messages import Problem

MEDIA_TYPE = "application/problem+json"


@dataclass(frozen=True)
class Kind:
    """One kind of problem: its HTTP status, a sentence as `detail` may hold it, and the headers that come with it."""

    status: int
    example: str
    retry_after: int | None = None
    """Seconds after which the same request may succeed."""
    closes: bool = False
    """Whether the connection is closed after the answer, because the rest of the body is not read."""

    def headers(self) -> dict[str, str]:
        """The headers of an answer of this kind."""
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.closes:
            found["Connection"] = "close"
        if self.status == HTTPStatus.UNAUTHORIZED:
            found["WWW-Authenticate"] = "Bearer"
        if self.status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:  # RFC 9110, 15.5.16: what would have been accepted
            found["Accept-Encoding"] = "identity"
        return found


PROBLEMS: dict[str, Kind] = {
    "bad-request": Kind(400, "Invalid HTTP request received. Send HTTP/1.1 as RFC 9112 defines it"),
    "unauthorized": Kind(401, "this needs the device's credential: send Authorization: Bearer CREDENTIAL"),
    "forbidden": Kind(403, "this credential belongs to 'pi-07'; it cannot upload for 'pi-08'"),
    "device-removed": Kind(403, "device 'pi-07' was removed from har by its operator"),
    "token-spent": Kind(403, "this join token has been used up; ask the operator for a new one"),
    "not-found": Kind(404, "there is no federation 'hat'; `maskfleet federation list` or GET /v1/federations has them"),
    "method-not-allowed": Kind(405, "/v1/federations/har/work does not take POST; see /docs"),
    "too-slow": Kind(408, "no byte of the body arrived for 60 s; send it again", closes=True),
    "wrong-round": Kind(409, "this update is for round 2, the federation is at round 3; ask for work again"),
    "round-closed": Kind(409, "round 3 is closed; drop this update and ask for work"),
    "wrong-lease": Kind(409, "lease '0c61' is not the one pi-07 has in round 3; ask for work"),
    "not-in-cohort": Kind(409, "pi-07 was not asked in round 3; ask for work"),
    "conflicting-update": Kind(409, "pi-07 already sent another update of round 3; the first counts, drop this one"),
    "wrong-phase": Kind(409, "the federation is finished; it cannot be paused now"),
    "bundle-in-use": Kind(409, "bundle 6f1c is used by har; delete these federations first"),
    "cannot-change": Kind(409, "rounds = 3, but round 4 has begun; give at least 5, or stop it"),
    "no-devices": Kind(409, "no device has asked for work yet; hand out a join token first"),
    "name-taken": Kind(409, "there is already a federation 'har'; choose another name"),
    "bundle-incomplete": Kind(409, "bundle 'har-mlp' lacks parts ['train.onnx']; PUT them under /v1/bundles/ first"),
    "changed-meanwhile": Kind(412, "the settings changed since they were read: rounds = 30 now; GET them again"),
    "too-large": Kind(413, "an update of this method has at most 51174 bytes, Content-Length says 1506424"),
    "compressed": Kind(415, "Content-Encoding is 'gzip'; send the body as it is, without that header"),
    "bad-range": Kind(416, "bytes=9000- of 1874 bytes is empty; ask for a range inside the content"),
    "bad-digest": Kind(422, "Content-Digest is 'md5=:AA:'; send sha-256=:BASE64:, the SHA-256 of the body (RFC 9530)"),
    "bad-bundle": Kind(422, "part 'train.onnx' has another SHA-256 than the manifest; send the file it was made with"),
    "export-failed": Kind(409, "the pte artifact's outputs differ from the model's by 0.01; keep the ONNX model"),
    "bad-config": Kind(422, "there is no method 'fedmusk'; choose one of ['coupled', 'fedavg', 'fedmask']"),
    "bad-message": Kind(422, "rounds: Input should be greater than or equal to 1, got 0; correct it and send again"),
    "wrong-samples": Kind(422, "the samples of pi-07 have shape (28, 28), the model of har takes (1152,); mend them"),
    "bad-payload": Kind(422, "the payload holds arrays ['mask']; FedAvg sends ['buffers', 'parameters']"),
    "too-many": Kind(429, "10.0.0.7 has 64 requests under way; wait for their answers", retry_after=1, closes=True),
    "internal-error": Kind(500, "the coordinator failed on this request; its log says why. Try again later"),
    "storage-damaged": Kind(500, "blob har/state/52d4 is damaged; restore the coordinator's data folder"),
    "not-installed": Kind(409, "this coordinator cannot make 'pte': executorch is not installed here"),
    "too-busy": Kind(503, "all 8192 connections are in use; try again in a few seconds", retry_after=5, closes=True),
    "not-loaded": Kind(503, "federation 'har' could not be loaded; its `fault` tells the operator why", retry_after=60),
    "storage-unreachable": Kind(503, "the database does not answer: connection refused; it is retried", retry_after=10),
    "storage-full": Kind(507, "cannot write coordinator/blobs: No space left on device; free some", retry_after=10),
}


class Refusal(MaskfleetError):
    """A request that is refused. `kind` is a key of `PROBLEMS`; `detail` has the fault, the value, and what to do.

    `about` names in the log what was refused, where method and route do not.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.about = kind, ""


def message(kind: str, detail: str, status: int | None = None) -> Problem:
    """The JSON of a problem; `status` when HTTP itself chose another one than the table."""
    status = PROBLEMS[kind].status if status is None else status
    detail = detail.encode(errors="backslashreplace").decode()  # it may quote half a surrogate pair
    return Problem(type=f"/problems/{kind}", title=HTTPStatus(status).phrase, status=status, detail=detail)
