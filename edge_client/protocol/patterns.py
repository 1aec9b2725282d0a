"""Patterns of the messages' fields, and the sentence that an error has in place of each.

`errors` imports this module, so it imports nothing of the project.
"""

from __future__ import annotations

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
DIGEST = r"^[0-9a-f]{64}$"
TOKEN_DIGITS = 16  # of a token's SHA-256: they name it without showing it
TOKEN_ID = rf"^[0-9a-f]{{{TOKEN_DIGITS}}}$"
SENTENCES = {
    NAME: "a name has letters, digits, '.', '_' and '-', 64 at most, and begins with a letter or digit",
    DIGEST: "it must be 64 lower-case hexadecimal digits",
    TOKEN_ID: f"it must be {TOKEN_DIGITS} lower-case hexadecimal digits",
}
"""What is said of a value that does not match, by pattern."""
