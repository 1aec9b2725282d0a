"""The exported contracts refuse parts that break them, each with a sentence that names the fault."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from edge_bench import testing
from edge_bench.testing import check_codec, check_meter, check_trainer, digits, methods
from edge_kernels import codecs
from edge_kernels.codecs import values

from edge_client.measure.energy import Trace
from edge_client.methods.fedavg import FedAvg, State, Update
from edge_client.methods.lattice.method import Lattice
from edge_client.methods.linear_probing import LinearProbing
from edge_client.protocol.payload import Payload, vector
from edge_client.training import Gradient, open_trainer

pytest.importorskip("sklearn")
CALLS = count()


class Careless(FedAvg):
    """Takes whatever arrays an update has."""

    def read_update(self, a: Any, state: Any, record: Any, payload: Payload) -> Update:
        return Update(vector(payload, "parameters", a.model.manifest.d), a.model.buffers, 1.0)


class Lax(LinearProbing):
    """Takes statistics that nothing reads."""

    def read_update(self, a: Any, state: Any, record: Any, payload: Payload) -> Any:
        read = {name: array for name, array in payload.arrays.items() if name != "buffers"}
        return super().read_update(a, state, record, Payload(read, payload.meta))


class Crashing(FedAvg):
    """Looks an array up without checking that it is there."""

    def read_update(self, a: Any, state: Any, record: Any, payload: Payload) -> Update:
        payload.arrays["parameters"].reshape(a.model.manifest.d)
        return super().read_update(a, state, record, payload)


class Random(FedAvg):
    """Draws from a generator that the seed does not know."""

    def start(self, course: Any) -> State:
        first = super().start(course)
        return replace(first, parameters=first.parameters + np.float32(1e-3 * next(CALLS)))


class Forgetful(FedAvg):
    """Keeps what the next round needs beside its state."""

    def finish(self, course: Any, round_: int, took_part: Any, state: Any, total: Any) -> Any:
        after, records = super().finish(course, round_, took_part, state, total)
        marked = replace(after)
        object.__setattr__(marked, "more", 1.0)
        drift = np.float32(getattr(state, "more", 0.0) * 1e-3)
        object.__setattr__(marked, "parameters", after.parameters + drift)
        return marked, records


class Wasteful(FedAvg):
    """Trains in the arrays that it received."""

    def receive(self, a: Any, kept: Any, downlink: Payload) -> Any:
        received = super().receive(a, kept, downlink)
        return replace(received, parameters=received.parameters.copy())  # those of a payload cannot be written

    def local_round(self, task: Any, kept: Any, received: Any) -> Any:
        done = super().local_round(task, kept, received)
        received.parameters[:] += np.float32(1e-3)
        return done


class Unaware(Lattice):
    """Leaves the record as it is when the guard drops an update, although the device has moved on."""

    def dropped(self, a: Any, update: Any, record: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("kind", "check", "sentence"),
    [
        (Careless, methods.refuses_what_is_malformed, "accepted an update with an array too many"),
        (Lax, methods.refuses_what_is_malformed, "accepted an update with an array too many, 'buffers'"),
        (Crashing, methods.refuses_what_is_malformed, "raised KeyError.*raise PayloadError"),
        (Random, methods.repeats, "differs in .*edge_kernels.counter"),
        (Forgetful, methods.survives_the_store, "the state after two rounds is another"),
        (Wasteful, methods.leaves_its_inputs, "gives another update; copy arrays"),
        (Unaware, methods.survives_the_guard, r"\[3, 3, 2, 2\] took part; give the record .* in `dropped`"),
    ],
)
def test_a_method_that_breaks_its_contract_is_told_how(kind: Any, check: Any, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check(kind(epochs=1), digits())


def test_check_method_runs_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    every = ["repeats", "takes_late_devices", "survives_lost_state", "survives_the_guard", "survives_the_store"]
    every += ["leaves_its_inputs", "refuses_what_is_malformed"]
    for name in every:
        monkeypatch.setattr(methods, name, lambda *given, name=name: called.append(name))
    testing.check_method(FedAvg())
    assert called == [*every, "refuses_what_is_malformed"]


def test_a_codec_that_loses_or_varies_is_refused() -> None:
    bits = codecs.codec("bits")
    broken = {
        "came back as other": replace(bits, decode=lambda data, d, known: bits.decode(data, d, known)[1:]),
        "without": replace(bits, exact=False, decode=lambda data, d, known: bits.decode(data, d, known)[1:]),
        "the second time": replace(
            bits, encode=lambda p, d, known: bits.encode(p, d, known) + bytes([next(CALLS) % 256])
        ),
        "no set": replace(bits, decode=lambda data, d, known: bits.decode(data, d, known)[::-1]),
    }
    for sentence, codec in broken.items():
        with pytest.raises(AssertionError, match=sentence):
            check_codec(codec)
    floats = values.codec("float32")
    for sentence, coded in {
        "the most is": replace(floats, encode=lambda v, s: floats.encode(v, s) * 3 + bytes(5000)),
        "the other way": replace(floats, decode=lambda data, d, s: -floats.decode(data, d, s)),
        "not finite": replace(floats, decode=lambda data, d, s: floats.decode(data, d, s).astype(np.float64)),
    }.items():
        with pytest.raises(AssertionError, match=sentence):
            check_codec(coded)


class Engine:
    """ONNX Runtime with one fault."""

    def __init__(self, fault: str) -> None:
        self._inner, self._fault = open_trainer("onnxruntime", digits().bundle), fault
        self.manifest = self._inner.manifest

    def gradient(self, parameters: Any, buffers: Any, x: Any, y: Any, key: int = 0) -> Gradient:
        g = self._inner.gradient(parameters, buffers, x, y, key)
        if self._fault == "sums":
            return replace(g, loss=g.loss * len(y))
        if self._fault == "scales":
            return replace(g, parameters=g.parameters * np.float32(1.01))
        if self._fault == "varies":
            return replace(g, parameters=g.parameters + np.float32(1e-9 * next(CALLS)))
        return g

    def logits(self, parameters: Any, buffers: Any, x: Any) -> Any:
        outputs = self._inner.logits(parameters, buffers, x)
        return outputs[:, ::-1] if self._fault == "turns" else outputs

    def narrow(self, kept: Any) -> Any:
        return self._inner.narrow(kept)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("sums", "it is the mean"),
        ("scales", "the gradient of .* is off"),
        ("turns", "outputs"),
        ("varies", "other calls"),
    ],
)
def test_an_engine_with_other_numbers_is_refused(fault: str, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_trainer(Engine(fault), digits().bundle)


@dataclass
class Still:
    """A meter whose recording is given."""

    trace: Trace
    name: str = "still"
    what: str = "a recording made up"

    def start(self) -> None: ...

    def stop(self) -> Trace:
        return self.trace


@pytest.mark.parametrize(
    ("times", "sentence"), [([0.0], "two or more"), ([1.0, 0.5], "do not rise"), ([0.0, 1.0], "not covered")]
)
def test_a_meter_without_a_usable_recording_is_refused(times: list[float], sentence: str) -> None:
    trace = Trace(np.array(times), np.ones(len(times)), "W", 0.1)
    with pytest.raises(AssertionError, match=sentence):
        check_meter(Still(trace), 0.01)
