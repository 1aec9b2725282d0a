"""Who is logged in: a signed cookie that holds no secret, and the token that a page's forms carry.

A cookie reads ID.EXPIRES.NONCE.MAC. ID names the token that was shown (`auth.token_id`), and the key of the MAC is
derived from the token's digest. So every coordinator on one data folder accepts it, and a token that is revoked or
replaced ends its sessions.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from coord_server import auth
from coord_server.roles import Role

LASTS = 12 * 3600  # seconds

Known = Callable[[str], tuple[Role, str] | None]
"""The role and the digest of the token with this id, None when there is none: `Roles.named`."""


@dataclass(frozen=True)
class Session:
    """A browser that has shown a token, with this digest. `form` is what each form of a page sends back."""

    role: Role
    digest: str
    form: str

    @property
    def operates(self) -> bool:
        """Whether commands are allowed."""
        return self.role == "operator"


def cookie(host: str) -> str:
    """The cookie's name at the address of a request's Host header.

    It holds the port, which browsers do not tell cookies apart by: two coordinators on one machine keep their sessions.
    """
    port = host.rpartition(":")[2]
    return f"maskfleet-{port}" if port.isascii() and port.isdecimal() else "maskfleet"


def _mac(digest: str, text: str) -> str:
    return hmac.digest(digest.encode(), f"dashboard {text}".encode(), "sha256").hex()


def begin(token: str, now: float) -> str:
    """A fresh cookie for the browser that has shown `token`."""
    digest = auth.hashed(token)
    text = f"{auth.token_id(digest)}.{int(now) + LASTS}.{secrets.token_hex(16)}"
    return f"{text}.{_mac(digest, text)}"


def read(shown: str, known: Known, now: float) -> Session | None:
    """The session of a cookie; None when it is forged, has expired, or its token is no longer valid."""
    text, _, mac = shown.rpartition(".")
    id_, _, rest = text.partition(".")
    found = known(id_)
    if found is None or not auth.same(_mac(found[1], text), mac):
        return None
    role, digest = found
    return Session(role, digest, _mac(digest, f"form {text}")) if now < int(rest.partition(".")[0]) else None
