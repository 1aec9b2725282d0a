"""The records of a federation's closed rounds, as they are read for people. A damaged one is named, the others stay."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pydantic import ValidationError

from coord_server.live.status import Faults
from coord_server.store.metadata import Metadata
from edge_client.errors import first_fault
from edge_client.protocol.messages import MAX_ROUNDS, Round

NAMED = 10  # damaged rounds that the fault names


class Records:
    """The rounds' records of federation `id`; `faults` lists those that are damaged among the ones read last."""

    def __init__(self, metadata: Metadata, id_: str, faults: Faults) -> None:
        self._metadata, self._id, self._faults = metadata, id_, faults
        self._damaged: dict[int, str] = {}

    async def read(self, first: int, last: int = MAX_ROUNDS, limit: int | None = None) -> dict[int, str | None]:
        """The records of the rounds `first` .. `last` as JSON, in order; None where one cannot be read.

        Raises StateError.
        """
        found = await asyncio.to_thread(self._metadata.rounds, self._id, first, last, limit)
        damaged = await asyncio.to_thread(_damaged, found)
        self._damaged = {n: why for n, why in {**self._damaged, **damaged}.items() if n in damaged or n not in found}
        self._say()
        return {n: None if n in damaged else text for n, text in found.items()}

    def _say(self) -> None:
        if not self._damaged:
            self._faults.clear("records")
            return
        first, *others = sorted(self._damaged)
        more = f" (so are those of {_listed(others)})" if others else ""
        why = f"the record of round {first} of {self._id} is damaged{more}: {self._damaged[first]}"
        self._faults.set("records", f"{why}; restore the database")


def _listed(rounds: list[int]) -> str:
    more = f" and {len(rounds) - NAMED} more" if len(rounds) > NAMED else ""
    return ", ".join(f"round {n}" for n in rounds[:NAMED]) + more


def _damaged(records: Mapping[int, str]) -> dict[int, str]:
    """Which records are not those of their rounds, and why."""
    found = {}
    for number, text in records.items():
        try:
            said = Round.model_validate_json(text).round
        except ValidationError as error:
            found[number] = first_fault(error, "record")
        else:
            if said != number:
                found[number] = f"it is that of round {said}"
    return found
