"""A federation that could not be loaded: its method is not installed, or its row is damaged.

It is shown with its fault and can be stopped and deleted, nothing else. It may run at another coordinator.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from pydantic import ValidationError

from coord_server import engine, events
from coord_server.live.status import summary
from coord_server.problems import Refusal
from coord_server.store.metadata import Metadata
from coord_server.store.tables import Head
from edge_client.errors import MaskfleetError, first_fault
from edge_client.protocol.messages import Federation, FederationConfig

log = logging.getLogger("maskfleet")


class UnloadedFederation:
    """What there is of a federation at version `head.version`: `summary`, `operate` and `delete` as of a live one."""

    def __init__(self, metadata: Metadata, id_: str, config: str, head: Head, error: Exception, now: float) -> None:
        """`config` is the JSON of its settings, `error` what keeps it from being loaded."""
        self.id, self.first, self.version, self._metadata = id_, head.first, head.version, metadata
        self._shown = _shown(id_, config, head, error, now).model_copy(update={"created_at": head.created_at})

    def summary(self) -> Federation:
        """The federation as it stood when it was read, as far as it can be read."""
        return self._shown

    async def shown(self) -> Federation:
        """The same: no method says more."""
        return self._shown

    def refusal(self) -> Refusal:
        """The answer to every request that needs it loaded."""
        return Refusal(
            "not-loaded",
            f"federation {self.id!r} could not be loaded; its `fault` tells the operator what to mend. "
            "It can be stopped or deleted",
        )

    async def operate(self, kind: type[events.Event]) -> None:
        """Stop it; refuse every other command. Raises Refusal, StateError."""
        if kind is not events.Stopped:
            raise self.refusal()
        head = await self._head()
        try:
            state = engine.load(head.state)
        except ValidationError:
            why = f"the state of {self.id!r} cannot be read, so it never runs; delete it"
            raise Refusal("wrong-phase", why) from None
        if kind not in engine.ACCEPTED[state.phase]:
            raise Refusal("wrong-phase", f"the federation is {state.phase}; it cannot be stopped now")
        text = engine.dump(engine.stopped(state))
        if not await asyncio.to_thread(self._metadata.commit, self.id, head.version, text, ()):
            raise self._changed()
        log.info("%s: stopped by the operator; it could not be loaded", self.id, extra={"federation": self.id})

    async def delete(self) -> None:
        """Delete its rows unless it runs somewhere; its blobs stay. Raises Refusal, StateError."""
        head = await self._head()
        with suppress(ValidationError):  # a state that cannot be read runs nowhere
            why = engine.keeps(engine.load(head.state))
            if why is not None:
                raise Refusal("wrong-phase", why)
        if not await asyncio.to_thread(self._metadata.delete_federation, self.id, head.version):
            raise self._changed()
        log.info("%s: deleted by the operator; it could not be loaded", self.id)

    async def _head(self) -> Head:
        """The federation's row as it stands. Raises Refusal when another one has the name by now."""
        head = await asyncio.to_thread(self._metadata.head, self.id)
        if head.first != self.first:
            raise self._changed()
        return head

    def _changed(self) -> Refusal:
        return Refusal("wrong-phase", f"federation {self.id!r} has just changed; send the request again")


def _shown(id_: str, config: str, head: Head, error: Exception, now: float) -> Federation:
    known = isinstance(error, (MaskfleetError, ValidationError))
    why = first_fault(error, error.title) if isinstance(error, ValidationError) else str(error)
    fault = (
        f"federation {id_!r} could not be loaded: {why if known else repr(error)}; mend that (install a "
        "method that is missing, restore a damaged data folder), then start the coordinator again"
    )
    log.error("%s", fault, exc_info=None if known else error)
    try:
        read = FederationConfig.model_validate_json(config), engine.load(head.state)
    except ValidationError:
        return Federation(id=id_, config=None, phase=None, round=0, devices=0, updates=0, fault=fault)
    return summary(*read, head.ready, now, fault)
