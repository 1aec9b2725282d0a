"""Secrets: the operator's token, viewers' tokens, join tokens, device credentials.

A secret is 256 random bits in hex. Only its SHA-256 is stored, and digests are compared in constant time. Transport
encryption is not here: `serve --certificate` or a proxy in front does it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from edge_client.errors import ConfigError, StateError
from edge_client.files import write_whole
from edge_client.protocol.patterns import TOKEN_DIGITS

OPERATOR_ENV = "MASKFLEET_OPERATOR_TOKEN"
OPERATOR_FILE = "operator-token"
# Where the operator's commands look for a coordinator and its token by default.
URL = "http://127.0.0.1:8750"
TOKEN_FILE = Path("coordinator") / OPERATOR_FILE


def new_secret() -> str:
    """A fresh secret: 64 hex digits."""
    return secrets.token_hex(32)


def hashed(secret: str) -> str:
    """The digest that is stored of a secret. Any text has one, half a surrogate pair too."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def token_id(digest: str) -> str:
    """The name of a token in lists: the first digits of its SHA-256, which reveal nothing of it."""
    return digest[:TOKEN_DIGITS]


def same(left: str, right: str) -> bool:
    """Whether two digests are equal, in constant time."""
    return hmac.compare_digest(left.encode(), right.encode())


def sendable(token: str) -> bool:
    """Whether a header can carry a token."""
    return token != "" and token.isascii() and token.isprintable()


def operator_token(folder: Path) -> tuple[str, Path | None]:
    """The operator's token and the file that holds it: the environment's, or the data folder's, made at first start.

    Coordinators that start on one folder at once get the same token. Raises StateError when the file can neither be
    read nor written, and ConfigError or StateError for a token that no header can carry.
    """
    given = os.environ.get(OPERATOR_ENV, "").strip()
    if given:
        if not sendable(given):
            raise ConfigError(f"{OPERATOR_ENV} is not printable ASCII, so no header can carry it; set another token")
        return given, None
    path = folder / OPERATOR_FILE
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        token = path.read_text(errors="replace").strip() if path.exists() else ""
        if not token:  # no file, or an empty one
            token = new_secret()
            write_whole(path, f"{token}\n".encode(), elsewhere=f"set {OPERATOR_ENV}")
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror}"
        raise StateError(f"{why}; repair it, remove it, or set {OPERATOR_ENV}") from None
    finally:
        os.close(lock)
    if not sendable(token):
        raise StateError(f"{path} is not one line of text; repair it, remove it, or set {OPERATOR_ENV}")
    return token, path
