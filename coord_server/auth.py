"""Who may ask for what: the operator's token, join tokens, device credentials.

Secrets are 256 random bits in hex. Only their SHA-256 is stored, and what is compared is always two digests in
constant time. Transport encryption is the business of the proxy in front.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from edge_client.errors import StateError

OPERATOR_ENV = "MASKFLEET_OPERATOR_TOKEN"
OPERATOR_FILE = "operator-token"


def new_secret() -> str:
    """A fresh secret: 64 hex digits."""
    return secrets.token_hex(32)


def hashed(secret: str) -> str:
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def same(left: str, right: str) -> bool:
    """Whether two digests are equal, in constant time."""
    return hmac.compare_digest(left.encode(), right.encode())


def operator_token(folder: Path) -> tuple[str, Path | None]:
    """The operator's token and the file it is in: the environment's, or the data folder's, made at first start.

    Raises StateError when the file can neither be read nor made.
    """
    given = os.environ.get(OPERATOR_ENV, "").strip()
    if given:
        return given, None
    path = folder / OPERATOR_FILE
    try:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            token = path.read_text().strip()
            if not token:
                raise StateError(f"{path} is empty; remove it and start again") from None
            return token, path
        token = new_secret()
        with os.fdopen(descriptor, "w") as file:
            file.write(token + "\n")
            file.flush()
            os.fsync(file.fileno())
        return token, path
    except OSError as error:
        raise StateError(f"{path} cannot be used: {error.strerror}; or set {OPERATOR_ENV}") from None
