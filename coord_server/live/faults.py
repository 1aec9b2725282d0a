"""What keeps a federation from going on by itself, for its operator: one sentence for each thing that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edge_client.errors import StateError


class Faults:
    """The faults that stand. A fault is cleared by the next success of the same thing."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def set(self, thing: str, sentence: str) -> None:
        """`thing` fails."""
        self._found[thing] = sentence

    def clear(self, thing: str) -> None:
        """`thing` works again."""
        self._found.pop(thing, None)

    @contextmanager
    def watch(self, thing: str, sentence: str) -> Iterator[None]:
        """Set the fault of `thing` when a StateError passes, clear it otherwise. A refusal leaves it alone."""
        try:
            yield
        except StateError as error:
            self.set(thing, f"{sentence}: {error}")
            raise
        except Exception:
            raise
        else:
            self.clear(thing)

    @property
    def text(self) -> str | None:
        """The fault found first; None when there is none."""
        return next(iter(self._found.values()), None)
