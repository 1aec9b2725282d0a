"""What is refused where it is said: settings of a federation that can only fail, answers of a coordinator out of range.

A device treats an answer out of range like any answer that it does not understand, such as a proxy's error page.
"""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from coordination import served, settings
from pydantic import TypeAdapter, ValidationError

from edge_client import artifacts, extras, targets
from edge_client.device.client import Client
from edge_client.errors import ConfigError, UnreachableError
from edge_client.link.remote import Remote
from edge_client.link.retry import Retry
from edge_client.link.transport import Transport
from edge_client.methods import make_method
from edge_client.protocol.messages import Enrolled, FederationConfig, Receipt, Work
from edge_client.protocol.operator import TokenRequest
from edge_client.training import load_backend

HUGE = 10**400
NAN, INFINITE = float("nan"), float("inf")

TRAIN = {
    "status": "train", "round": 1, "lease": "0" * 16, "place": 0, "downlink": "0" * 64, "downlink_size": 9,
    "deadline_in": 1.0,
}  # fmt: skip
FINISH = {"status": "finish", "round": 2, "downlink": "0" * 64, "downlink_size": 9}
WAIT = {"status": "wait", "reason": "x", "poll_after": 1.0}
ENROLLED = {
    "federation": "fed",
    "device": "a",
    "bundle": "0" * 64,
    "method": {"name": "fedavg"},
    "rounds": 1,
    "cohort": 1,
    "seed": 0,
}
RECEIPT = {"federation": "fed", "round": 1, "device": "a", "sha256": "0" * 64, "size": 9}

NAMES: tuple[object, ...] = ("", "a\r\nb", "../x", "a b", "é", "a?b=c", "a" * 65, None, 1)
ROUNDS: tuple[object, ...] = (0, -1, 10**30, 1.5, True, "1", None)
SIZES: tuple[object, ...] = (-1, 10**30, 2.5, True, "9")
SECONDS: tuple[object, ...] = (-1.0, 1e30, NAN, INFINITE, -INFINITE)

LIES = [
    (answer, true, field, lie)
    for answer, true, lies in (
        (Enrolled, ENROLLED, {"federation": NAMES, "device": NAMES, "rounds": ROUNDS, "cohort": ROUNDS,
                              "backend": NAMES[:-2], "seed": (-1, 2**63, HUGE, 1.5, "1", True)}),
        (Work, TRAIN, {"round": ROUNDS, "lease": NAMES, "downlink_size": SIZES, "deadline_in": SECONDS}),
        (Work, FINISH, {"round": (*ROUNDS, 1), "downlink_size": SIZES}),
        (Work, WAIT, {"poll_after": SECONDS}),
        (Receipt, RECEIPT, {"federation": NAMES, "device": NAMES, "round": ROUNDS, "size": SIZES}),
    )
    for field, several in lies.items()
    for lie in several
]  # fmt: skip


def said(true: dict[str, Any], **lie: object) -> str:
    return json.dumps({**true, **lie})


@pytest.mark.parametrize(("answer", "true", "field", "lie"), LIES)
def test_a_device_refuses_an_answer_out_of_range(answer: Any, true: dict[str, Any], field: str, lie: object) -> None:
    def coordinator(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=said(true, **{field: lie}))

    adapter: TypeAdapter[Any] = TypeAdapter(answer)
    adapter.validate_json(said(true))
    transport = Transport("http://127.0.0.1:1", httpx.MockTransport(coordinator))
    device = Remote(transport, Retry(transport.url, 0.0, lambda _: None))
    with pytest.raises(UnreachableError, match="not a coordinator's"):
        device.ask("GET", "/x", adapter, "asking")


@pytest.mark.parametrize("lie", [{"federation": "a\r\nb"}, {"device": "a\r\nb"}, {"rounds": -1}, {"seed": HUGE}])
def test_a_whole_device_ends_with_an_ordinary_error(tmp_path: Path, lie: dict[str, object]) -> None:
    def coordinator(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=said(ENROLLED, **lie))

    np.savez(tmp_path / "d.npz", x=np.zeros((4, 2), np.float32), y=np.zeros(4, np.int64))
    device = Client("http://127.0.0.1:1", "t", tmp_path / "d.npz", device="a", state=tmp_path / "s", patience=0.0,
                    transport=httpx.MockTransport(coordinator))  # fmt: skip
    with pytest.raises(UnreachableError, match="not a coordinator's"):
        device.run(1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_devices", HUGE), ("min_devices", 1_000_001), ("min_devices", True), ("min_updates", HUGE),
        ("cohort", "2"), ("cohort", True), ("rounds", True), ("rounds", 2.0), ("seed", "7"), ("seed", True),
        ("deadline_seconds", 1e-300), ("deadline_seconds", 0.4), ("deadline_seconds", True), ("deadline_seconds", "9"),
        ("max_attempts", 0), ("max_attempts", 1001), ("max_attempts", True), ("presence_seconds", 0.9),
        ("presence_seconds", NAN), ("presence_seconds", HUGE), ("guard", "other"), ("guard", None),
        ("deadline_seconds", HUGE), ("deadline_seconds", NAN), ("backend", "../x"), ("backend", "x" * 100_000),
    ],
)  # fmt: skip
def test_a_setting_of_a_federation_that_can_only_fail_or_is_of_another_kind_is_refused(
    field: str, value: object
) -> None:
    sound = settings(bundle="0" * 64)
    FederationConfig.model_validate(sound)
    with pytest.raises(ValidationError) as found:
        FederationConfig.model_validate({**sound, field: value})
    assert found.value.errors()[0]["loc"] == (field,)


@pytest.mark.parametrize("given", [{"uses": True}, {"uses": "1"}, {"uses": 1.0}, {"expires_in": True}])
def test_a_token_is_asked_for_in_numbers(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TokenRequest.model_validate(given)


@pytest.mark.parametrize("name", [["x"], {}, None, 1, "nosuch"])
def test_a_method_whose_name_is_none_is_a_setting_to_correct(tmp_path: Path, name: object) -> None:
    with pytest.raises(ConfigError, match=r"there is no method|the method has no `name`"):
        make_method({"name": name})

    async def main() -> None:
        async with served(tmp_path) as fleet:
            config = settings(bundle=await fleet.bundle(), method={"name": name})
            answer = await fleet.operator("POST", "/v1/federations", json=config)
            assert (answer.status_code, answer.json()["type"]) == (422, "/problems/bad-config")

    asyncio.run(main())


def test_what_another_package_installs_does_not_replace_ours_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (EntryPoint("twice", f"{room}:it", "maskfleet.methods") for room in ("coord_server.serve", "theirs"))
    first = EntryPoint("apart", "theirs:other", "maskfleet.methods")
    for found in ([ours, theirs, first], [theirs, first, ours]):
        monkeypatch.setattr(extras, "entry_points", lambda group, found=found: found)
        assert list(extras.installed("maskfleet.methods").items()) == [("apart", first), ("twice", ours)]


@pytest.mark.parametrize(
    "where", ["no_such_package:Method", "edge_client.methods:NoSuchMethod", "edge_client.methods.no_such_module:Method"]
)
def test_a_method_whose_package_does_not_load_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    broken = EntryPoint("theirs", where, "maskfleet.methods")
    monkeypatch.setattr(extras, "entry_points", lambda **_: [broken])
    with pytest.raises(ConfigError, match=r"method 'theirs' cannot be loaded \(\w+Error: .*(?i:no_?such).*install"):
        make_method({"name": "theirs"})


@pytest.mark.parametrize(
    "where", [f"edge_client.{place}" for place in ("methods", "task:Assignment", "methods:below", "methods:Method")]
)
def test_an_entry_point_that_names_no_method_is_named(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(extras, "entry_points", lambda **_: [EntryPoint("theirs", where, "maskfleet.methods")])
    with pytest.raises(ConfigError, match=f"'theirs' has the entry point '{where}', which names no complete sub"):
        make_method({"name": "theirs"})


@pytest.mark.parametrize("where", ["edge_client.targets", "edge_client.task:Assignment", "edge_client.targets:Target"])
def test_an_entry_point_that_names_no_target_is_named(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(extras, "entry_points", lambda **_: [EntryPoint("theirs", where, "maskfleet.targets")])
    with pytest.raises(ValueError, match=f"'theirs' has the entry point '{where}', which names no complete sub"):
        targets.target_type("theirs")


def test_what_an_incomplete_method_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    half = EntryPoint("theirs", "edge_client.methods.shared.local_sgd:LocalSgd", "maskfleet.methods")
    monkeypatch.setattr(extras, "entry_points", lambda **_: [half])
    with pytest.raises(ConfigError, match=r"it has no downlink, exchanged, finish, .*update_limit\); mend it"):
        make_method({"name": "theirs"})


def test_a_backend_that_does_not_load_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("theirs", "edge_client.training:NoSuch", "maskfleet.trainers")
    monkeypatch.setattr(extras, "entry_points", lambda **_: [broken])
    with pytest.raises(ConfigError, match=r"backend 'theirs' cannot be loaded \(AttributeError: .*NoSuch.*install"):
        load_backend("theirs")


@pytest.mark.parametrize("where", ["edge_client.training", "edge_client.backends:DEFAULT_BACKEND"])
def test_an_entry_point_that_opens_no_bundle_or_makes_no_writer_is_named(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(extras, "entry_points", lambda **_: [EntryPoint("theirs", where, "maskfleet.trainers")])
    with pytest.raises(ConfigError, match=f"backend 'theirs' has the entry point '{where}', which names no func"):
        load_backend("theirs")
    monkeypatch.setattr(extras, "entry_points", lambda **_: [EntryPoint("theirs", where, "maskfleet.artifacts")])
    with pytest.raises(ConfigError, match=f"artifact 'theirs' has the entry point '{where}', which names no class"):
        artifacts.writer("theirs")
