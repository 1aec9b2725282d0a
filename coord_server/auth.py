"""Who may ask for what: the operator's token, join tokens, device credentials.

Secrets are 256 random bits in hex. Only their SHA-256 is stored, and what is compared is always two digests in
constant time. Transport encryption is not done here: `serve --certificate` or a proxy in front does it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from edge_client.errors import StateError
from edge_client.files import write_whole

OPERATOR_ENV = "MASKFLEET_OPERATOR_TOKEN"
OPERATOR_FILE = "operator-token"


def new_secret() -> str:
    """A fresh secret: 64 hex digits."""
    return secrets.token_hex(32)


def hashed(secret: str) -> str:
    """What is stored of a secret. Any text has one: half a surrogate pair is nobody's secret, not a failure."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def same(left: str, right: str) -> bool:
    """Whether two digests are equal, in constant time."""
    return hmac.compare_digest(left.encode(), right.encode())


def operator_token(folder: Path) -> tuple[str, Path | None]:
    """The operator's token and the file it is in: the environment's, or the data folder's, made at first start.

    It is written whole or not at all; an empty file counts as none. Raises StateError when the file can neither be
    read nor made.
    """
    given = os.environ.get(OPERATOR_ENV, "").strip()
    if given:
        return given, None
    path = folder / OPERATOR_FILE
    try:
        token = path.read_text().strip() if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise StateError(f"{path} cannot be read: {reason}; repair it, remove it, or set {OPERATOR_ENV}") from None
    if not token:
        token = new_secret()
        write_whole(path, f"{token}\n".encode(), elsewhere=f"set {OPERATOR_ENV}")
    return token, path
