"""One word for all checks."""

from __future__ import annotations


def require(fulfilled: bool, sentence: str) -> None:
    """Raise AssertionError with the sentence unless the condition holds; `python -O` does not switch it off."""
    if not fulfilled:
        raise AssertionError(sentence)
