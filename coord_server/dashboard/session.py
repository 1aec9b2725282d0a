"""Who is signed in: a signed cookie that holds no secret, and the token that a page's forms carry.

A cookie reads ROLE.EXPIRES.NONCE.MAC. The key of the MAC is derived from the digest of the role's token, so that every
coordinator on one data folder accepts it, and a new token ends all sessions of the old one.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Role = Literal["operator", "viewer"]

COOKIE = "maskfleet"
LASTS = 12 * 3600  # seconds
ROLES: tuple[Role, ...] = ("operator", "viewer")


@dataclass(frozen=True)
class Session:
    """Somebody who has shown a token. `form` is what each form of a page sends back."""

    role: Role
    form: str

    @property
    def operates(self) -> bool:
        """Whether commands are allowed."""
        return self.role == "operator"


def _mac(key: bytes, text: str) -> str:
    return hmac.digest(key, text.encode(), "sha256").hex()


def begin(key: bytes, role: Role, now: float) -> str:
    """A fresh cookie of `role`, signed with the role's key."""
    text = f"{role}.{int(now) + LASTS}.{secrets.token_hex(16)}"
    return f"{text}.{_mac(key, text)}"


def read(cookie: str, key_of: Callable[[Role], bytes | None], now: float) -> Session | None:
    """The session of a cookie; None when it is forged, has expired, or its token is no longer valid."""
    text, _, mac = cookie.rpartition(".")
    parts = text.split(".")
    role = next((r for r in ROLES if r == parts[0]), None)
    key = None if role is None else key_of(role)
    if role is None or key is None or not hmac.compare_digest(_mac(key, text).encode(), mac.encode()):
        return None
    return Session(role, _mac(key, f"form {text}")) if now < int(parts[1]) else None


def same_form(session: Session, sent: str) -> bool:
    """Whether a form came from a page of this session."""
    return hmac.compare_digest(session.form.encode(), sent.encode())
