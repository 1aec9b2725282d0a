"""The requests of an enrolled device: work, downlinks, updates, failures and the report.

The paths, headers and statuses of the device's side of `/v1` are here. What follows from an answer is in `client`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from edge_client.device.journal import Pending
from edge_client.errors import PayloadError, ServerError
from edge_client.events import Event, OnEvent
from edge_client.link.remote import Remote
from edge_client.protocol.cost import COST_HEADER
from edge_client.protocol.messages import Enrolled, Failure, Finish, Receipt, Report, Train, Work
from edge_client.protocol.payload import MEDIA_TYPE

OVER = (404, 409, 410)  # an update's or failure's round went on without this device
UNFIT = (400, 413, 415, 422)  # the coordinator never takes this update: it is too large, or not valid

WORK: TypeAdapter[Work] = TypeAdapter(Work)


@dataclass(frozen=True)
class Exchange:
    """What one device and its federation exchange; every request is repeated until it is answered (`link.remote`)."""

    remote: Remote
    enrolled: Enrolled
    say: OnEvent

    def work(self, wait: float) -> Work:
        """The device's next work, for which the coordinator may hold its answer `wait` seconds."""
        self.say(Event("asking", f"asking for work, for up to {wait:.0f} s", seconds=wait))
        return self.remote.ask("GET", f"{self.enrolled.path}/work", WORK, "asking for work", wait=wait)

    def downlink(self, work: Train | Finish) -> bytes | None:
        """The payload's bytes; None when the coordinator has dropped it because the round is over."""
        path, what = f"{self.enrolled.path}/payloads/{work.downlink}", f"fetching round {work.round}"
        try:
            return self.remote.fetch(path, work.downlink_size, work.downlink, what)
        except ServerError as error:
            if error.status not in (404, 410):  # a fetch conflicts with nothing
                raise
            self._went_on(work.round, error)
            return None

    def send(self, update: Pending, linger: float | None) -> Receipt:
        """Upload an update; the receipt has the next work when that comes within `linger` seconds.

        Raises ServerError when the coordinator does not take it, PayloadError when it acknowledges other bytes.
        """
        path = f"{self.enrolled.path}/rounds/{update.round}/updates/{self.enrolled.device}"
        headers = {"Content-Type": MEDIA_TYPE, "Maskfleet-Lease": update.lease}
        if update.cost:
            headers[COST_HEADER] = update.cost
        what = f"sending the update of round {update.round}"
        receipt = self.remote.put(path, update.update, headers, Receipt, what, linger)
        if receipt.sha256 != update.sha256:
            raise PayloadError(
                f"the coordinator acknowledged an update with SHA-256 {receipt.sha256[:12]}..., not the one sent "
                f"({update.sha256[:12]}...); check for a proxy that changes bodies"
            )
        return receipt

    def fail(self, round_: int, lease: str, failure: Failure) -> None:
        """Report that this device cannot do a round, unless the round is over anyway."""
        text = f"round {round_} failed on this device ({failure.kind}): {failure.reason}"
        self.say(Event("failed", text, round_))
        path = f"{self.enrolled.path}/rounds/{round_}/failures/{self.enrolled.device}"
        what = f"reporting the failure of round {round_}"
        try:
            self.remote.tell("PUT", path, failure, what, {"Maskfleet-Lease": lease})
        except ServerError as error:
            if error.status not in OVER:
                raise
            self._went_on(round_, error)

    def report(self, report: Report) -> None:
        """Send the report on the personal model."""
        path = f"{self.enrolled.path}/devices/{self.enrolled.device}/report"
        self.remote.tell("PUT", path, report, "sending the report")

    def _went_on(self, round_: int, error: ServerError) -> None:
        self.say(Event("dropped", f"round {round_} went on without this device: {error}", round_))
