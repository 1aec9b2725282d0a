"""The device's side of a federation over HTTP: enrol, train the rounds asked for, end with a personal model.

    from edge_client.client import Client
    result = Client("https://fleet.example.org", token, "mine.npz").run()

What happens in a round is the method's business (`edge_client.local`), how a request is repeated the transport's,
what survives a power cut the journal's. This file is the order in which they are called. Nothing here draws random
numbers or reads a clock that could reach an update: the same assignment gives the same bytes, so a device killed in
mid-round repeats the round, or sends the update it had written down, and nobody can tell.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import TypeAdapter, ValidationError

from edge_client.backends import DEFAULT_BACKEND, check_parts, installed
from edge_client.bundle import Bundle, digest
from edge_client.data import DataFile, DeviceData, check, fit, read
from edge_client.errors import BundleError, ConfigError, MaskfleetError, PayloadError, ServerError
from edge_client.events import Event, OnEvent
from edge_client.journal import Identity, Journal, Pending
from edge_client.local import run_round
from edge_client.methods import Assignment, Method, Task, make_method
from edge_client.protocol.messages import Enrol, Enrolled, Finish, Name, Receipt, Report, Stopped, Train, Wait, Work
from edge_client.protocol.payload import MEDIA_TYPE, decode, encode
from edge_client.remote_bundle import open_remote
from edge_client.training import open_trainer
from edge_client.transport import Transport

HOLD = 25.0  # seconds the coordinator may hold a question for work: under the usual 30 s of proxies
LINGER = 1.0  # seconds it may hold a receipt for the next round: short, a link that breaks meanwhile costs the upload
SENDS = 3  # times an update is sent that arrives damaged
WORK: TypeAdapter[Work] = TypeAdapter(Work)
NAME: TypeAdapter[str] = TypeAdapter(Name)


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


@dataclass(frozen=True)
class _Session:
    """What stays the same through a run."""

    identity: Identity
    enrolled: Enrolled
    bundle: Bundle
    method: Method
    task: Callable[[int], Task]
    """The task of a round."""

    @property
    def federation(self) -> str:
        return f"/v1/federations/{self.enrolled.federation}"


def default_state(token: str) -> Path:
    """Where a device's state lies unless it says otherwise: one folder for each join token."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "maskfleet" / digest(token.encode())[:16]


def _check_name(device: str) -> None:
    try:
        NAME.validate_python(device)
    except ValidationError:
        raise ConfigError(
            f"{device!r} is no name for a device; give one of 1 to 64 letters, digits, '.', '_' or '-' that begins "
            "with a letter or digit"
        ) from None


class Client:
    """One device in one federation.

    `data` is the path of an .npz file (see `edge_client.data`) or a DeviceData. `state` is the folder of the
    journal; what is there is resumed. `backend` None takes what the federation asks for, else ONNX Runtime.
    `patience` is how many seconds the coordinator may be unreachable before `run` raises UnreachableError;
    `poll` the longest it may hold a question for work; `personal` where the personal model is written
    (default: `personal.onnx` in the state folder). `transport` is httpx's, a seam for tests.
    """

    def __init__(
        self,
        url: str,
        token: str,
        data: str | Path | DeviceData,
        *,
        device: str | None = None,
        state: str | Path | None = None,
        backend: str | None = None,
        threads: int = 1,
        patience: float = 3600.0,
        poll: float = HOLD,
        personal: str | Path | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if not token:
            raise ConfigError("the join token is empty; ask the federation's operator for one")
        if device is not None:
            _check_name(device)
        if backend is not None:
            installed(backend)
        self.url, self.token, self.data, self.device = url, token, data, device
        self.state = default_state(token) if state is None else Path(state)
        self.backend, self.threads, self.patience, self.poll = backend, threads, patience, poll
        self.personal = self.state / "personal.onnx" if personal is None else Path(personal)
        self._transport = transport

    def run(self, rounds: int | None = None, once: bool = False, on_event: OnEvent | None = None) -> Result:
        """Take part until the federation ends, or `rounds` rounds are acknowledged.

        `once` asks for work a single time, does what there is and returns, waiting for nothing. Raises
        MaskfleetError; `edge_client.exit_codes` says what each kind means to a shell.
        """
        say: OnEvent = on_event or (lambda _: None)
        journal = Journal(self.state)
        transport: Transport | None = None
        try:
            transport = Transport(self.url, patience=self.patience, on_event=say, transport=self._transport)
            return _Run(self, journal, transport, say).go(1 if once and rounds is None else rounds, once)
        finally:
            journal.close()
            if transport is not None:
                transport.close()


class _Run:
    """One call of `Client.run`: the parts it is made of, and the loop."""

    def __init__(self, client: Client, journal: Journal, transport: Transport, say: OnEvent) -> None:
        self.client, self.journal, self.transport, self.say = client, journal, transport, say

    def go(self, rounds: int | None, once: bool) -> Result:
        identity = self.journal.identity(self.client.token, self.client.device)
        report = self.journal.done()
        if report is not None:
            self.say(Event("done", f"the federation was finished before; the model is {self.client.personal}"))
            return Result(identity.device, 0, "finished", report, self.client.personal)
        session = self._begin(identity)
        done = 0
        receipt: Receipt | None = None
        pending = self.journal.pending()
        if pending is not None:
            self.say(Event("info", f"round {pending.round}: resuming with the update trained before", pending.round))
            done += self._send(session, pending) is not None
        self._try_out(session)
        hold = 0.0  # the first answer is wanted at once: it says what is waited for
        while rounds is None or done < rounds:
            work = receipt.work if receipt is not None and receipt.work is not None else self._ask(session, hold)
            receipt = None
            if isinstance(work, Stopped):
                self.say(Event("done", f"the operator stopped the federation: {work.reason}"))
                return Result(identity.device, done, "stopped", reason=work.reason)
            if isinstance(work, Finish):
                report = self._finish(session, work)
                if report is not None:
                    return Result(identity.device, done, "finished", report, self.client.personal)
            elif isinstance(work, Train):
                goes_on = not once and (rounds is None or done + 1 < rounds)
                receipt = self._round(session, work, min(LINGER, self.client.poll) if goes_on else None)
                done += receipt is not None
            elif once:
                self.say(Event("info", f"no work now: {work.reason}"))
            else:
                self._wait(work, hold)
            if once:
                break
            hold = self.client.poll
        self.say(Event("done", f"{done} rounds done; run the same command again to go on"))
        return Result(identity.device, done, "paused")

    def _wait(self, work: Wait, held: float) -> None:
        """Say what is waited for, and stay away as long as the coordinator wishes one that was held so long to."""
        after = work.poll_after if held or not self.client.poll else 0.0
        again = f"in {after:.0f} s, " if after else ""
        text = f"no work yet: {work.reason}; asking again {again}for up to {self.client.poll:.0f} s"
        self.say(Event("wait", text, seconds=after + self.client.poll))
        self.transport.pause(after)

    # --- before the rounds

    def _begin(self, identity: Identity) -> _Session:
        """The session of this device, enrolled if it was not. What was read of a file is not kept beside it."""
        given = self.client.data
        found = given if isinstance(given, DeviceData) else read(Path(given))  # before a token is used up for it
        return self._session(self._enrol(identity), found)

    def _enrol(self, identity: Identity) -> Identity:
        self.transport.credential = identity.credential
        if identity.enrolled is not None:
            self.say(Event("info", f"device {identity.device!r} of federation {identity.enrolled.federation!r}"))
            return identity
        if not self.transport.secure:
            self.say(Event("info", f"{self.client.url} is not https: anyone on the way can read the credential"))
        ask = Enrol(token=self.client.token, device=identity.device, credential=identity.credential)
        enrolled = self.transport.ask("POST", "/v1/enrol", Enrolled, "joining", body=ask)
        self.say(Event("info", f"joined federation {enrolled.federation!r} as device {enrolled.device!r}"))
        return self.journal.store_identity(identity.model_copy(update={"enrolled": enrolled}))

    def _session(self, identity: Identity, found: DataFile | DeviceData) -> _Session:
        enrolled = identity.enrolled
        assert enrolled is not None
        bundle = open_remote(self.transport, enrolled.bundle, self.journal.folder / "bundles")
        try:
            method = make_method(enrolled.method)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; federation {enrolled.federation!r} needs the version of maskfleet, and of the method's "
                "package, that its coordinator has: install that one here"
            ) from None
        if isinstance(found, DeviceData):
            train = check(bundle.manifest, found.x, found.y, "training data")
            data = DeviceData(*train, *check(bundle.manifest, found.x_test, found.y_test, "test data"))
        else:
            data = fit(found, bundle.manifest, enrolled.seed)
        backend = self.client.backend or enrolled.backend or DEFAULT_BACKEND
        check_parts(backend, bundle.manifest)
        trainer = open_trainer(backend, bundle, self.client.threads)
        model = bundle.model()

        def task(round_: int) -> Task:
            return Task(Assignment(model, enrolled.seed, enrolled.rounds, round_, enrolled.device), trainer, data)

        return _Session(identity, enrolled, bundle, method, task)

    def _try_out(self, session: _Session) -> None:
        """Run the model once each way, so that a device whose backend cannot never asks for work and is never drawn."""
        task = session.task(1)
        model, x, y = task.assignment.model, task.data.x[:1], task.data.y[:1]
        try:
            task.trainer.gradient(model.parameters, model.buffers, x, y)
            task.trainer.logits(model.parameters, model.buffers, x)
        except MaskfleetError:
            raise
        except Exception as error:  # the engines' errors share no base class
            raise BundleError(
                f"this device's training backend cannot run model {model.manifest.name!r} "
                f"({type(error).__name__}: {error}); choose another --backend, or have the model exported again"
            ) from error

    # --- a round

    def _ask(self, session: _Session, wait: float) -> Work:
        self.say(Event("asking", f"asking for work, for up to {wait:.0f} s", seconds=wait))
        return self.transport.ask("GET", f"{session.federation}/work", WORK, "asking for work", wait=wait)

    def _downlink(self, session: _Session, work: Train | Finish) -> bytes | None:
        """The payload's bytes; None when the coordinator has dropped it because the round is over."""
        path = f"{session.federation}/payloads/{work.downlink}"
        try:
            return self.transport.fetch(path, work.downlink, work.downlink_size, f"fetching round {work.round}")
        except ServerError as error:
            if error.status not in (404, 410):
                raise
            self.say(Event("dropped", f"round {work.round} went on without this device: {error}", work.round))
            self.transport.pause(1.0)
            return None

    def _round(self, session: _Session, work: Train, linger: float | None) -> Receipt | None:
        """Train and send one round: its receipt, with the next round's work when that comes within `linger` seconds."""
        downlink = self._downlink(session, work)
        if downlink is None:
            return None
        text = f"round {work.round} of {session.enrolled.rounds}: training, due in {work.deadline_in:.0f} s"
        self.say(Event("training", text, work.round, work.deadline_in))
        kept = self.journal.kept(before=work.round)
        outcome = run_round(session.method, session.task(work.round), kept, decode(downlink))
        pending = Pending(work.round, work.lease, work.downlink, encode(outcome.update))
        self.journal.trained(outcome.kept, pending)
        m = outcome.metrics
        figures = f"loss {m.loss:.4f}"
        if m.test_samples:
            figures += f", accuracy {m.accuracy_before:.1%} -> {m.accuracy_after:.1%}"
        if not m.samples:
            figures = "sat out, what this device kept was lost or is out of date; the next round brings all of it"
        text = f"round {work.round}: {figures}, update of {len(pending.update)} bytes"
        self.say(Event("trained", text, work.round))
        return self._send(session, pending, linger)

    def _send(self, session: _Session, pending: Pending, linger: float | None = None) -> Receipt | None:
        """Upload an update until the coordinator has it, or says that the round went on without it (None)."""
        path = f"{session.federation}/rounds/{pending.round}/updates/{session.enrolled.device}"
        headers = {"Content-Type": MEDIA_TYPE, "Maskfleet-Lease": pending.lease}
        for attempt in range(1, SENDS + 1):
            try:
                what = f"sending the update of round {pending.round}"
                receipt = self.transport.put(
                    path, pending.update, headers, Receipt, what, sha256_hex=pending.sha256, wait=linger
                )
            except ServerError as error:
                if error.status in (404, 409, 410):
                    # Another body of ours was acknowledged before: what is kept goes with that one.
                    if error.kind == "conflicting-update":
                        self.journal.acknowledge(pending.round)
                    else:
                        self.journal.drop_pending()
                    text = f"round {pending.round} went on without this update: {error}"
                    self.say(Event("dropped", text, pending.round))
                    return None
                if error.kind == "bad-digest" and attempt < SENDS:
                    self.say(Event("info", f"the update arrived damaged; sending it again: {error}", pending.round))
                    continue
                if error.status in (400, 413, 415, 422):
                    self.journal.drop_pending()
                raise
            if receipt.sha256 != pending.sha256:
                raise PayloadError(
                    f"the coordinator acknowledged an update with SHA-256 {receipt.sha256[:12]}..., not the one sent "
                    f"({pending.sha256[:12]}...); check for a proxy that changes bodies"
                )
            self.journal.acknowledge(pending.round)
            self.say(Event("sent", f"round {pending.round}: the coordinator has the update", pending.round))
            return receipt
        raise AssertionError("the loop returns or raises")

    # --- the end

    def _finish(self, session: _Session, work: Finish) -> Report | None:
        """Make, measure and write the personal model, and report it; None when there is newer work to ask for."""
        from edge_client.conclude import conclude  # onnx is needed only here

        downlink = self._downlink(session, work)
        if downlink is None:
            return None
        self.say(Event("training", "the rounds are over: making the personal model", work.round))
        task = session.task(work.round)
        kept = self.journal.kept(before=work.round)
        personal = session.method.personal(task, kept, decode(downlink))
        report = conclude(session.bundle, task, personal, self.client.personal, self.client.threads)
        path = f"{session.federation}/devices/{session.enrolled.device}/report"
        self.transport.tell("PUT", path, report, "sending the report")
        self.journal.finish(report)
        if report.uncompacted is not None:
            self.say(Event("info", f"the personal model is the masked dense one, not compacted: {report.uncompacted}"))
        self.say(Event("done", f"finished: the personal model is {self.client.personal}"))
        return report
