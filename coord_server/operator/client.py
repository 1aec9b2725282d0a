"""The operator's requests as functions, for the command line, the demo and anyone's scripts.

One `Operator` speaks to one coordinator by httpx. Every refusal is a ServerError with the coordinator's sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from edge_client.bundle import MANIFEST, Bundle, digest, parse_manifest
from edge_client.errors import ServerError, UnreachableError, first_fault
from edge_client.link.transport import LOOPBACK, address, broken, redirected, refusal
from edge_client.protocol.messages import Change, Federation, FederationConfig, Round
from edge_client.protocol.operator import (
    BundleReceipt,
    BundleSummary,
    Device,
    Health,
    JoinToken,
    TokenRequest,
    TokenSummary,
    Viewer,
    ViewerRequest,
    ViewerToken,
)

T = TypeVar("T")
TIMEOUT = 60.0  # seconds without a byte
CHUNK = 1 << 20


class Operator:
    """An operator of the coordinator at `url`; close it, or use it in a `with`."""

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.Client(
            base_url=address(url),
            timeout=TIMEOUT,
            headers={"Authorization": f"Bearer {token}"},
            mounts={f"all://{host}": None for host in LOOPBACK},  # a proxy is not asked for this very machine
        )

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _send(self, method: str, path: str, **body: Any) -> bytes:
        return self._response(method, path, **body).content

    def _response(self, method: str, path: str, **body: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **body)
        except (httpx.RequestError, httpx.InvalidURL) as error:  # the second: a redirect to what is no address
            raise UnreachableError(
                f"{self._http.base_url} does not answer ({broken(error)}); is the coordinator running there? "
                "--url or MASKFLEET_URL names another address"
            ) from None
        if response.is_success:
            return response
        if response.has_redirect_location:  # not followed: the token goes to the address that was given
            to, base = redirected(response.url, response.headers["Location"])
            moved = f"{response.url} redirects to {to}; use --url {base}"
            raise ServerError(moved, response.status_code, "moved")
        otherwise = f"{response.url} answered {response.status_code}; is it a coordinator?", "not-a-problem"
        detail, kind = refusal(response.content) or otherwise
        raise ServerError(detail, response.status_code, kind)

    def _ask(self, answer: type[T], method: str, path: str, **body: Any) -> T:
        return _read(answer, self._response(method, path, **body))

    def _list(self, item: type[T], path: str, **query: Any) -> list[T]:
        """All items of a list, page by page."""
        found, response = list[T](), self._response("GET", path, params=query)
        while True:
            found += _read(list[item], response)  # type: ignore[valid-type]
            following = response.links.get("next", {}).get("url")
            if following is None:
                return found
            response = self._response("GET", str(response.url.join(following)))

    def health(self) -> Health:
        """Raises UnreachableError when the coordinator is not up."""
        return self._ask(Health, "GET", "/v1/health")

    def upload_bundle(self, folder: Path) -> str:
        """Upload the missing parts of the bundle in `folder`; its digest. Raises BundleError."""
        bundle = Bundle.open(folder)
        manifest = (folder / MANIFEST).read_bytes()
        receipt = self._ask(BundleReceipt, "POST", "/v1/bundles", content=manifest)
        for name in receipt.missing:
            path = bundle.part(name)
            self._send(
                "PUT",
                f"/v1/bundles/{receipt.digest}/parts/{name}",
                content=_chunks(path),
                headers={"Content-Length": str(path.stat().st_size)},
            )
        return digest(manifest)

    def fetch_bundle(self, address: str, folder: Path, parts: Sequence[str]) -> Bundle:
        """Those of the `parts` that the bundle has, and its manifest, in an empty `folder`. Raises BundleError."""
        manifest = self._send("GET", f"/v1/bundles/{address}")
        (folder / MANIFEST).write_bytes(manifest)
        for name in parse_manifest(manifest).parts.keys() & set(parts):
            (folder / name).write_bytes(self._send("GET", f"/v1/bundles/{address}/parts/{name}"))
        return Bundle.open(folder)

    def create(self, config: FederationConfig) -> Federation:
        """Create a federation from a bundle that is there."""
        return self._ask(Federation, "POST", "/v1/federations", json=config.model_dump(mode="json"))

    def federations(self, **filters: str) -> list[Federation]:
        """All federations, or those of a `phase`, a `method`, a name's `prefix`."""
        return self._list(Federation, "/v1/federations", **filters)

    def federation(self, id_: str) -> Federation:
        """One federation as it stands."""
        return self._ask(Federation, "GET", f"/v1/federations/{id_}")

    def operate(self, id_: str, action: str) -> Federation:
        """`action` is start, pause, resume or stop."""
        return self._ask(Federation, "POST", f"/v1/federations/{id_}/{action}")

    def change(self, id_: str, change: Change) -> Federation:
        """Change settings of a federation that is not over."""
        return self._ask(Federation, "PATCH", f"/v1/federations/{id_}", json=change.model_dump(exclude_none=True))

    def delete(self, id_: str) -> None:
        """Delete a federation that does not run."""
        self._send("DELETE", f"/v1/federations/{id_}")

    def bundles(self) -> list[BundleSummary]:
        """All bundles."""
        return self._list(BundleSummary, "/v1/bundles")

    def derive(self, digest: str, weights: bytes) -> str:
        """A bundle with the graphs of another one and the values of a safetensors file; its digest."""
        return self._ask(BundleReceipt, "POST", f"/v1/bundles/{digest}/weights", content=weights).digest

    def delete_bundle(self, digest: str) -> None:
        """Delete a bundle that no federation uses."""
        self._send("DELETE", f"/v1/bundles/{digest}")

    def tokens(self, id_: str) -> list[TokenSummary]:
        """A federation's join tokens, without the secrets."""
        return self._list(TokenSummary, f"/v1/federations/{id_}/tokens")

    def revoke(self, id_: str, token: str) -> None:
        """Revoke the join token with this id."""
        self._send("DELETE", f"/v1/federations/{id_}/tokens/{token}")

    def viewer(self, request: ViewerRequest) -> ViewerToken:
        """A fresh viewer's token."""
        return self._ask(ViewerToken, "POST", "/v1/viewers", json=request.model_dump())

    def viewers(self) -> list[Viewer]:
        """The viewers' tokens, without the secrets."""
        return self._list(Viewer, "/v1/viewers")

    def revoke_viewer(self, token: str) -> None:
        """Revoke the viewer's token with this id."""
        self._send("DELETE", f"/v1/viewers/{token}")

    def token(self, id_: str, request: TokenRequest) -> JoinToken:
        """A fresh join token."""
        return self._ask(JoinToken, "POST", f"/v1/federations/{id_}/tokens", json=request.model_dump())

    def devices(self, id_: str) -> list[Device]:
        """Every device that ever enrolled."""
        return self._list(Device, f"/v1/federations/{id_}/devices")

    def remove_device(self, id_: str, device: str) -> None:
        """Remove a device for good."""
        self._send("DELETE", f"/v1/federations/{id_}/devices/{device}")

    def rounds(self, id_: str, first: int = 1) -> list[Round]:
        """The records of the closed rounds from `first` on."""
        return self._list(Round, f"/v1/federations/{id_}/rounds", **{"from": first})

    def state(self, id_: str) -> bytes:
        """The global state after the last closed round, one safetensors file."""
        return self.state_and_round(id_)[0]

    def state_and_round(self, id_: str) -> tuple[bytes, int]:
        """The same, and after which round it is."""
        response = self._response("GET", f"/v1/federations/{id_}/state")
        said = response.headers.get("Maskfleet-Round", "")
        if not (said.isascii() and said.isdecimal()):
            why = f"{response.url} does not say the state's round (Maskfleet-Round = {said!r}); is it a coordinator?"
            raise ServerError(why, response.status_code, "not-a-problem")
        return response.content, int(said)


def _read(answer: type[T], response: httpx.Response) -> T:
    """What a response holds. Raises ServerError when it is not that."""
    try:
        return TypeAdapter(answer).validate_json(response.content)
    except ValidationError as error:
        why = f"{response.url} answered what cannot be read ({first_fault(error, 'answer')}); is its database damaged?"
        raise ServerError(why, response.status_code, "not-a-problem") from None


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk
