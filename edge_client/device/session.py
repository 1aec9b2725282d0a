"""What is settled before the rounds: who the device is, its bundle, method, data and training backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edge_client.backends import DEFAULT_BACKEND, check_parts
from edge_client.bundle import Bundle, Manifest
from edge_client.data import DataFile, DataPart, DeviceData, check, doubts, fit
from edge_client.device.exchange import Exchange
from edge_client.device.journal import Identity, Journal
from edge_client.errors import BundleError, ConfigError, DataError, MaskfleetError, ServerError
from edge_client.events import Event, OnEvent
from edge_client.link.remote import Remote
from edge_client.link.remote_bundle import open_remote
from edge_client.methods import Method, make_method
from edge_client.protocol.messages import Enrol, Enrolled, Personalise
from edge_client.task import Assignment, Course, Progress, Task
from edge_client.training import Trainer, open_trainer


@dataclass(frozen=True)
class Session:
    """What stays the same through a run."""

    exchange: Exchange
    bundle: Bundle
    method: Method
    course: Course
    trainer: Trainer
    data: DeviceData
    secret: int
    personalise: Personalise

    @property
    def enrolled(self) -> Enrolled:
        """The coordinator's answer to the enrolment."""
        return self.exchange.enrolled

    def task(
        self, round_: int, place: int = 0, rounds: int | None = None, watch: Callable[[Progress], None] | None = None
    ) -> Task:
        """The task of a round in which the device has that place, of a federation that has `rounds` by now.

        `watch` is called after every step.
        """
        course = replace(self.course, rounds=rounds or self.course.rounds)
        a = Assignment(course, round_, self.enrolled.device, place)
        return Task(a, self.trainer, self.data, self.secret, watch, frugal=True)


def enrol(
    identity: Identity, journal: Journal, remote: Remote, token: str, found: DataFile | DeviceData, say: OnEvent
) -> Identity:
    """The identity with the coordinator's answer to the enrolment, which is sent if there is none yet.

    Raises DataError where the coordinator's model takes samples of another shape.
    """
    if identity.enrolled is not None:
        say(Event("info", f"device {identity.device!r} of federation {identity.enrolled.federation!r}"))
        return identity
    if not remote.transport.secure:
        say(Event("info", f"{remote.transport.url} is not https: anyone on the way can read the credential"))
    x = found.x if isinstance(found, DeviceData) else found.arrays["x"]
    message = Enrol(token=token, device=identity.device, credential=identity.credential, sample=x.shape[1:])
    try:
        enrolled = remote.ask("POST", "/v1/enrol", Enrolled, "joining", message=message)
    except ServerError as error:
        if error.kind == "wrong-samples":
            raise DataError(str(error)) from None
        raise
    say(Event("info", f"joined federation {enrolled.federation!r} as device {enrolled.device!r}"))
    return journal.store_identity(identity.model_copy(update={"enrolled": enrolled}))


def open_session(
    identity: Identity,
    remote: Remote,
    found: DataFile | DeviceData,
    cache: Path,
    backend: str | None,
    threads: int,
    max_parameters: int,
    say: OnEvent,
    personalise: Personalise | None = None,
) -> Session:
    """Fetch the bundle, fit the data to it and open the backend. Raises BundleError, ConfigError, DataError.

    Data that may not be what the model is made for are named.
    """
    enrolled = identity.enrolled
    assert enrolled is not None
    bundle = open_remote(remote, enrolled.bundle, cache, max_parameters)
    method, manifest = _method(enrolled), bundle.manifest
    data = _checked(found, manifest) if isinstance(found, DeviceData) else fit(found, manifest, enrolled.seed)
    arrays, what = ({}, "the data") if isinstance(found, DeviceData) else (found.arrays, found.what)
    for doubt in doubts(arrays, data.x, manifest.input, what):
        say(Event("info", f"warning: {doubt}"))
    backend = backend or enrolled.backend or DEFAULT_BACKEND
    check_parts(backend, manifest)
    trainer = open_trainer(backend, bundle, threads)
    remote.transport.name_engine(backend)
    course = Course(bundle.model(), enrolled.seed, enrolled.rounds, enrolled.cohort)
    return Session(
        Exchange(remote, enrolled, say), bundle, method, course, trainer, data, identity.secret,
        personalise or enrolled.personalise,
    )  # fmt: skip


def _method(enrolled: Enrolled) -> Method:
    """The federation's method. Raises ConfigError when it is not installed here as on the coordinator."""
    try:
        return make_method(enrolled.method)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; federation {enrolled.federation!r} needs the version of maskfleet, and of the method's package, "
            "that its coordinator has: install that one here"
        ) from None


def _checked(data: DeviceData, manifest: Manifest) -> DeviceData:
    """A program's own data in the bundle's dtypes. Raises DataError."""
    parts: dict[str, DataPart] = {"training data": "train", "validation data": "validation", "test data": "test"}
    checked = [check(manifest, *data.part(part), what) for what, part in parts.items()]
    return DeviceData(*(array for pair in checked for array in pair))


def try_out(session: Session) -> None:
    """Run the model once each way, so that a device whose backend cannot run it never asks for work.

    Raises BundleError.
    """
    model, data, trainer = session.course.model, session.data, session.trainer
    x, y = data.x[:1], data.y[:1]
    try:
        trainer.gradient(model.parameters, model.buffers, x, y)
        trainer.logits(model.parameters, model.buffers, x)
        trainer.rest()
    except MaskfleetError:
        raise
    except Exception as error:  # the engines' errors share no base class
        raise BundleError(
            f"this device's training backend cannot run model {model.manifest.name!r} "
            f"({type(error).__name__}: {error}); choose another --backend, or have the model exported again"
        ) from error
