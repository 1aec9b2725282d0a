"""The device's side of a federation over HTTP: enrol, train the rounds asked for, end with a personal model.

    from edge_client import Client
    result = Client("https://fleet.example.org", token, "mine.npz").run()

`local` runs a round, `journal` survives a power cut, `exchange` has the requests; this file calls them in order.
Nothing here draws random numbers or reads a clock that could reach an update: the same assignment gives the same bytes.
So a device killed in a round trains it again, or sends the update it had stored, with the same effect.

A round that cannot be done (training diverged, memory ran out, values were lost, the coordinator refuses the update) is
reported, and the device asks for work again. Only what asking again cannot mend ends the run: see
`edge_client.commands.exit_codes`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from edge_client.align import Align
from edge_client.bundle import digest
from edge_client.data import DeviceData, read
from edge_client.device.exchange import OVER, UNFIT, Exchange
from edge_client.device.journal import END_FILE, End, Identity, Journal, Pending, Secret
from edge_client.device.local import Outcome, choose_model, failure_of, run_round
from edge_client.device.session import Session, enrol, open_session, try_out
from edge_client.errors import (
    BundleError,
    ConfigError,
    DataError,
    LostError,
    PayloadError,
    ServerError,
    UnreachableError,
)
from edge_client.events import Event, OnEvent, Watch
from edge_client.link.remote import Remote
from edge_client.link.remote_bundle import MAX_PARAMETERS, check_downlink
from edge_client.link.retry import Retry, longest
from edge_client.link.transport import Transport
from edge_client.measure import memory
from edge_client.measure.energy import Meter
from edge_client.measure.meters import AUTO, choose
from edge_client.measure.round_cost import RoundCost
from edge_client.protocol.cost import Cost, in_words, to_header
from edge_client.protocol.messages import Finish, Name, Personalise, Receipt, Report, Source, Stopped, Train, Wait
from edge_client.protocol.payload import decode, encode
from edge_client.task import Personal, Task
from edge_client.training import load_backend

HOLD = 25.0  # seconds the coordinator may hold a request for work: below the usual 30 s of proxies
LINGER = 1.0  # seconds it may hold a receipt for the next round: short, a link that breaks meanwhile costs the upload
LEAST_PAUSE = 0.5  # seconds between two requests for work that brought none, whatever the coordinator asks for
UNREADABLE_MOST = 3  # downlinks in a row that cannot be read; then this version and the coordinator's do not match
REFUSED_MOST = 5  # updates in a row that the coordinator never takes; then versions or settings do not match
NO_LEASE = "none"  # after the last round there is none, but the header is due

log = logging.getLogger("maskfleet")


@dataclass(frozen=True)
class Result:
    """How a run ended. `report` and `personal` are set once the federation is finished."""

    device: str
    rounds: int
    """Rounds trained and acknowledged in this run."""
    ended: str
    """"finished", "stopped" (by the operator), or "paused" (the rounds asked for are done)."""
    report: Report | None = None
    personal: Path | None = None
    reason: str = ""


def default_state(token: str) -> Path:
    """The default state folder: one for each join token."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "maskfleet" / digest(token.encode())[:16]


@dataclass(kw_only=True)
class Client:
    """One device in one federation: `Client(url, token, data, **settings)`.

    `data` is the path of an .npz file (see `edge_client.data`) or a DeviceData. `state` is the folder of the
    journal; a run that was interrupted there is resumed. `backend` None takes the federation's choice, else ONNX
    Runtime. `patience` is how many seconds the coordinator may give no usable answer before `run` raises
    UnreachableError; `poll` the longest it may hold a request for work. `out` is where the personal model is written:
    a file if it ends in .onnx, else a folder that gets `personal.onnx` (default: the state folder). `personalise` names
    the model that the device keeps (`local.choose_model`), None: as the federation asks. A model with more than
    `max_parameters` parameters and statistics is refused before memory is taken for it. `meter` measures a round's
    energy (`edge_client.measure.meters`). `align` sets how wide the personal model's layers are
    (`edge_client.compaction.tuning`); "auto" measures here. `secret` fixes the device's own randomness, for experiments
    that must be repeatable; None draws it at the enrolment. `transport` is httpx's, a seam for tests.
    """

    url: str = field(kw_only=False)
    token: str = field(kw_only=False, repr=False)
    data: str | Path | DeviceData = field(kw_only=False, repr=False)
    device: str | None = None
    state: str | Path | None = None
    backend: str | None = None
    threads: int = 1
    patience: float = 3600.0
    poll: float = HOLD
    out: str | Path | None = None
    personalise: Personalise | None = None
    max_parameters: int = MAX_PARAMETERS
    secret: int | None = field(default=None, repr=False)
    meter: str = AUTO
    align: Align = "rule"
    transport: httpx.BaseTransport | None = None

    def __post_init__(self) -> None:
        if not self.token:
            raise ConfigError("the join token is empty; ask the federation's operator for one")
        if self.device is not None and not _valid(Name, self.device):
            raise ConfigError(
                f"{self.device!r} is not a device name; give 1 to 64 letters, digits, '.', '_' or '-' that begin with "
                "a letter or digit"
            )
        if self.secret is not None and not _valid(Secret, self.secret):
            raise ConfigError(f"{self.secret!r} is not a secret; give an integer from 0 to 2**64 - 1, or none")
        if self.backend is not None:
            load_backend(self.backend)  # a missing package is found before the token is used

    @property
    def folder(self) -> Path:
        """The state folder."""
        return default_state(self.token) if self.state is None else Path(self.state)

    @property
    def model(self) -> Path:
        """Where the personal model goes."""
        out = self.folder if self.out is None else Path(self.out)
        return out if out.suffix == ".onnx" else out / "personal.onnx"

    def run(self, rounds: int | None = None, once: bool = False, on_event: OnEvent | None = None) -> Result:
        """Take part until the federation ends, or `rounds` rounds are acknowledged.

        `once` asks for work a single time, does what there is and returns without waiting. Raises MaskfleetError;
        `edge_client.commands.exit_codes` has each kind's exit code.
        """
        say: OnEvent = on_event or (lambda _: None)
        chosen = choose(self.meter)
        for line in chosen.lines[1:]:
            log.debug("%s", line)
        if chosen.meter is not None:
            say(Event("info", chosen.why))
        transport = Transport(self.url, self.transport)
        try:
            with Journal(self.folder) as journal:
                remote = Remote(transport, Retry(transport.url, self.patience, say))
                return _Run(self, journal, remote, say, chosen.meter).go(1 if once and rounds is None else rounds, once)
        finally:
            transport.close()


class _Run:
    """One call of `Client.run`: its parts, and the loop."""

    def __init__(self, client: Client, journal: Journal, remote: Remote, say: OnEvent, meter: Meter | None) -> None:
        self.client, self.journal, self.remote, self.say = client, journal, remote, say
        self.cost = RoundCost(meter)
        self.failures = 0  # rounds that failed in a row
        self.refused = 0  # updates in a row that were refused for good
        self.unreadable = 0  # rounds in a row that failed because their downlink could not be read
        self.lost_end = False

    def go(self, rounds: int | None, once: bool) -> Result:
        client = self.client
        identity = self.journal.identity(client.token, client.device, client.secret)
        self.remote.transport.credential = identity.credential
        end = self.journal.end()
        if end is not None and not self._goes_on(identity, end):
            there, file = client.model.is_file(), self.journal.folder / END_FILE
            again = f"{client.model} is not there; to have it made, remove {file} and join again"
            where = f"the model is {client.model}" if there else again
            self.say(Event("done", f"the federation was finished before; {where}"))
            return Result(identity.device, 0, "finished", end.report, client.model if there else None)
        done = int(self._resume(identity))
        session = self._begin(identity)
        receipt: Receipt | None = None
        hold = 0.0  # the first request is answered at once: the answer names what is waited for
        while rounds is None or done < rounds:
            work = (receipt.work if receipt is not None else None) or session.exchange.work(hold)
            receipt = None
            if isinstance(work, Stopped):
                self.say(Event("done", f"the federation is over: {work.reason}"))
                return Result(identity.device, done, "stopped", reason=work.reason)
            if isinstance(work, Finish):
                report = self._finish(session, work)
                if report is not None:
                    return Result(identity.device, done, "finished", report, client.model)
            elif isinstance(work, Train):
                goes_on = not once and (rounds is None or done + 1 < rounds)
                receipt = self._round(session, work, min(LINGER, client.poll) if goes_on else None)
                done += receipt is not None
            elif once:
                self.say(Event("info", f"no work now: {work.reason}"))
            else:
                self._wait(work, hold)
            if once:
                break
            hold = client.poll
        self.say(Event("done", f"{done} round{'' if done == 1 else 's'} done; run the same command again to go on"))
        return Result(identity.device, done, "paused")

    def _goes_on(self, identity: Identity, end: End) -> bool:
        """Whether the federation that was finished has rounds to run, or another end: its coordinator was restored.

        If it has the same end, the report is sent again: the backup may be older than the report alone.
        """
        if identity.enrolled is None:
            return False
        self.say(Event("info", "finished before; asking the coordinator whether its federation goes on"))
        remote = Remote(self.remote.transport, Retry(self.remote.retry.url, 0.0, self.say, busy=0.0))
        try:
            exchange = Exchange(remote, identity.enrolled, lambda _: None)
            work = exchange.work(0.0)
        except (ServerError, UnreachableError):  # it is over, and its coordinator may be gone
            return False
        if isinstance(work, Stopped):
            return False
        if isinstance(work, Train | Wait) or work.downlink != end.downlink:
            return True
        try:
            exchange.report(end.report)
        except (ServerError, UnreachableError) as error:
            self.say(Event("info", f"the report was not sent again: {error}"))
        return False

    def _resume(self, identity: Identity) -> bool:
        """Send the update that an earlier run has stored, if there is one; whether the coordinator took it."""
        pending = self.journal.pending()
        if pending is None or identity.enrolled is None:
            return False
        self.say(Event("info", f"round {pending.round}: resuming with the update trained before", pending.round))
        return self._send(Exchange(self.remote, identity.enrolled, self.say), pending) is not None

    def _begin(self, identity: Identity) -> Session:
        """The session of this device, whose backend runs the model."""
        try:
            session = self._opened(identity)
            try_out(session)
        except (BundleError, ConfigError, DataError) as error:
            self._give_up(identity, error)
            raise
        return session

    def _give_up(self, identity: Identity, error: Exception) -> None:
        """Report that a device that took part before cannot take up its work again, if a round waits for it."""
        if identity.enrolled is None:
            return
        exchange = Exchange(self.remote, identity.enrolled, self.say)
        try:
            work = exchange.work(0.0)
            failure = failure_of(error, other="backend")
            if isinstance(work, Train) and failure is not None:
                exchange.fail(work.round, work.lease, failure)
        except (ServerError, UnreachableError) as unreported:
            self.say(Event("info", f"the failure was not reported: {unreported}"))

    def _opened(self, identity: Identity) -> Session:
        """The session of this device. The arrays read from its file do not outlive this call."""
        client, given = self.client, self.client.data
        found = given if isinstance(given, DeviceData) else read(Path(given))  # before the token is used up
        identity = enrol(identity, self.journal, self.remote, client.token, found, self.say)
        cache = self.journal.folder / "bundles"
        return open_session(
            identity, self.remote, found, cache, client.backend, client.threads, client.max_parameters,
            self.say, client.personalise,
        )  # fmt: skip

    # --- work

    def _wait(self, work: Wait, held: float) -> None:
        """Pause as long as the coordinator asks; after the first answer, which was not held, ask again at once."""
        after = max(work.poll_after, LEAST_PAUSE) if held or not self.client.poll else 0.0
        again = f"in {after:.0f} s, " if after else ""
        text = f"no work yet: {work.reason}; asking again {again}for up to {self.client.poll:.0f} s"
        self.say(Event("wait", text, seconds=after + self.client.poll))
        self.remote.retry.pause(after)

    def _downlink(self, session: Session, work: Train | Finish) -> bytes | None:
        """The payload's bytes; None, after a pause, when the round is over."""
        check_downlink(session.bundle.manifest, work.downlink_size)
        data = session.exchange.downlink(work)
        if data is None:
            self.remote.retry.pause(1.0)
        return data

    # --- a round

    def _round(self, session: Session, work: Train, linger: float | None) -> Receipt | None:
        """Train and send one round: its receipt, with the next round's work when that comes within `linger` seconds."""
        trained = self._train(session, work)
        memory.give_back()  # a device waits longer than it trains
        if trained is None:
            return None
        outcome, cost = trained
        self.unreadable = 0
        pending = Pending(work.round, work.lease, work.downlink, encode(outcome.update), to_header(cost))
        self.journal.trained(outcome.kept, pending)
        m = outcome.metrics
        figures = f"loss {m.loss:.4f}"
        if m.test_samples:
            figures += f", score {m.score_before:.3f} -> {m.score_after:.3f}"
        text = f"round {work.round}: {figures}, update of {len(pending.update)} bytes; "
        text += in_words(cost.model_dump(exclude_none=True))
        self.say(Event("trained", text, work.round))
        return self._send(session.exchange, pending, linger)

    def _train(self, session: Session, work: Train) -> tuple[Outcome, Cost] | None:
        """The round, trained, and what it cost; None when it is over, or failed and the failure is reported."""
        try:
            downlink = self._downlink(session, work)
            if downlink is None:
                return None
            rounds = work.rounds or session.enrolled.rounds
            text = f"round {work.round} of {rounds}: training, due in {work.deadline_in:.0f} s"
            self.say(Event("training", text, work.round, work.deadline_in))
            kept = self.journal.kept(before=work.round)
            watch = Watch(work.round, self.say)
            task, content = session.task(work.round, work.place, work.rounds, watch), decode(downlink)
            return self.cost.of(lambda: run_round(session.method, task, kept, content, session.personalise))
        except Exception as error:  # an engine's errors share no base class
            failure = failure_of(error)
            if failure is None:
                raise
            log.debug("round %d failed", work.round, exc_info=True)
            session.exchange.fail(work.round, work.lease, failure)
            unreadable = isinstance(error, PayloadError) and not isinstance(error, LostError)
            self.unreadable = self.unreadable + 1 if unreadable else 0
            if self.unreadable == UNREADABLE_MOST:
                raise UnreachableError(
                    f"{UNREADABLE_MOST} payloads in a row could not be read: {error}; if it stays so after a restart, "
                    "install the coordinator's version of maskfleet"
                ) from error
        self._pause(work.round)
        return None

    def _pause(self, round_: int) -> None:
        """Wait after a failed round: longer, the more of them failed in a row."""
        self.failures += 1
        delay = longest(self.failures)
        self.remote.retry.pause(delay, f"round {round_} failed; asking for work again in {delay:.0f} s")

    def _send(self, exchange: Exchange, pending: Pending, linger: float | None = None) -> Receipt | None:
        """Upload an update until the coordinator has it, or answers that it does not take it (None)."""
        try:
            receipt = exchange.send(pending, linger)
        except ServerError as error:
            self._refused(exchange, pending, error)
            return None
        self.failures = self.refused = 0
        self.journal.acknowledge(pending.round)
        self.say(Event("sent", f"round {pending.round}: the coordinator has the update", pending.round))
        return receipt

    def _refused(self, exchange: Exchange, pending: Pending, error: ServerError) -> None:
        """Drop an update whose round went on without it; report and drop one that is unfit; raise any other refusal.

        After REFUSED_MOST unfit ones in a row the last refusal is raised too.
        """
        if error.status not in OVER + UNFIT:
            raise error
        twice = error.kind == "conflicting-update"
        if twice:  # an earlier update was acknowledged: its kept values stay
            self.journal.acknowledge(pending.round)
        else:
            self.journal.drop_pending()
        if error.status in OVER:
            self.failures = 0
            text = f"round {pending.round} went on without this update: {error}"
            if twice:
                text += f"; if a copy of {self.journal.folder} is in use elsewhere, let that device join anew"
            self.say(Event("dropped", text, pending.round))
            return
        failure = failure_of(error, other="refused")
        assert failure is not None
        exchange.fail(pending.round, pending.lease, failure)
        self.refused += 1
        if self.refused == REFUSED_MOST:
            raise error
        self._pause(pending.round)

    # --- the end

    def _finish(self, session: Session, work: Finish) -> Report | None:
        """Make, measure and write the personal model, and report it; None when there is newer work to ask for."""
        from edge_client.device.conclude import conclude, remarks  # onnx is needed only here

        downlink = self._downlink(session, work)
        if downlink is None:
            return None
        self.say(Event("training", "the rounds are over: making the personal model", work.round))
        task = session.task(work.round, rounds=work.round - 1, watch=Watch(work.round, self.say))
        try:
            personal, source = self._chosen(session, task, downlink)
        except LostError as error:
            failure = failure_of(error)
            if self.lost_end or failure is None:
                raise
            self.lost_end = True  # the next one is whole
            session.exchange.fail(work.round, NO_LEASE, failure)
            self.remote.retry.pause(1.0)
            return None
        del downlink
        memory.give_back()  # compaction needs it
        enrolled, client = session.enrolled, self.client
        facts: dict[str, str | int] = {
            "federation": enrolled.federation,
            "device": enrolled.device,
            "method": session.method.name,
            "rounds": work.round - 1,
            "source": source,
            "licence": enrolled.licence,
        }
        report = conclude(session.bundle, task, personal, client.model, client.threads, client.align, facts).model_copy(
            update={"source": source}
        )
        session.exchange.report(report)
        self.journal.finish(End(downlink=work.downlink, report=report))
        for line in remarks(session.method, task, personal, report, self.journal.took_part):
            self.say(Event("info", line))
        self.say(Event("done", f"finished: the personal model is {client.model}"))
        return report

    def _chosen(self, session: Session, task: Task, downlink: bytes) -> tuple[Personal, Source]:
        """The model that the device keeps, and which one it is; the others are freed."""
        kept = self.journal.kept(before=task.assignment.round)
        chosen = choose_model(session.method, task, kept, decode(downlink), session.personalise)
        self.say(Event("info", f"keeping the {chosen.source} model: {chosen.why}"))
        return chosen.personal, chosen.source


def _valid(kind: Any, value: object) -> bool:
    """Whether `value` is what a message's field of this type takes."""
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True
