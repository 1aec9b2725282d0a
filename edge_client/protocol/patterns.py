"""Patterns of the messages' fields, and the sentence that an error has in place of each.

`errors` imports this module, so it imports nothing of the project.
"""

from __future__ import annotations

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
DIGEST = r"^[0-9a-f]{64}$"
TOKEN_ID = r"^[0-9a-f]{16}$"  # how a token is named without showing it
SENTENCES = {
    NAME: "a name has letters, digits, '.', '_' and '-', 64 at most, and begins with a letter or digit",
    DIGEST: "64 lower-case hexadecimal digits are due",
    TOKEN_ID: "16 lower-case hexadecimal digits are due",
}
"""What is said of a value that does not match, by pattern."""
