"""The operator's further commands against a real coordinator, and its client over several pages."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import typer
from coordination import LIMIT, OPERATOR, bearer, settings, write_bundle
from coordinator_process import coordinator
from listening import listening
from typer.testing import CliRunner

from coord_server.http import pages
from coord_server.operator import cli, manage
from coord_server.operator.client import Operator
from edge_client.errors import ConfigError, ServerError, UnreachableError
from edge_client.link.transport import Transient, Transport
from edge_client.protocol.messages import FederationConfig
from edge_client.protocol.operator import TokenRequest


def test_the_commands_change_list_revoke_and_delete(tmp_path: Path) -> None:
    environment = {"COLUMNS": "120", "MASKFLEET_OPERATOR_TOKEN": OPERATOR, "TERM": "dumb"}
    app, bundles = typer.Typer(), typer.Typer()
    app.add_typer(manage.app, name="federation")
    app.add_typer(bundles, name="bundle")
    bundles.command("list")(manage.list_bundles)
    bundles.command("delete")(manage.delete_bundle)
    with coordinator(tmp_path / "data") as (_, url), Operator(url, OPERATOR) as operator:

        def said(*words: str) -> str:
            found = CliRunner().invoke(app, [*words, "--url", url], env=environment, catch_exceptions=False)
            assert found.exit_code == 0, found.output
            return found.output

        bundle = operator.upload_bundle(write_bundle(tmp_path / "bundle"))
        operator.create(FederationConfig.model_validate(settings(bundle=bundle)))
        token = operator.token("fed", TokenRequest(uses=3))
        assert "rounds = 9" in said("federation", "change", "fed", "--rounds", "9")
        with pytest.raises(ConfigError, match="nothing to change"):
            said("federation", "change", "fed")
        assert operator.federation("fed").config.rounds == 9  # type: ignore[union-attr]
        assert token.id in said("federation", "tokens", "fed")
        assert "`maskfleet federation remove fed DEVICE` removes one" in said("federation", "revoke", "fed", token.id)
        assert operator.tokens("fed") == []
        viewer = said("federation", "viewer").strip()
        seen = httpx.get(f"{url}/v1/federations", headers=bearer(viewer), timeout=LIMIT, trust_env=False)
        assert seen.status_code == 200
        (listed,) = operator.viewers()
        assert listed.id in said("federation", "viewers")
        said("federation", "revoke-viewer", viewer)  # the token itself: only its id is sent
        assert operator.viewers() == []
        listing = said("bundle", "list")
        assert bundle[:12] in listing
        assert "fed" in listing
        with pytest.raises(ServerError, match="is used by fed; delete these federations first"):
            said("bundle", "delete", bundle[:9])
        assert "deleted" in said("federation", "delete", "fed")
        with pytest.raises(ConfigError, match="'' is no digest; give 4 digits or more"):
            said("bundle", "delete", "")
        said("bundle", "delete", bundle[:9])
        assert operator.federations() == operator.bundles() == []


def test_the_bundles_that_need_no_coordinator_are_named_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASKFLEET_OPERATOR_TOKEN", raising=False)
    named = "without a coordinator there are digits, digits-wide, har: `maskfleet bundle inspect NAME` shows one"
    with pytest.raises(ConfigError, match=f"no operator token: .*; {named}"):
        manage.list_bundles(token_file=tmp_path / "none")
    monkeypatch.setenv("MASKFLEET_OPERATOR_TOKEN", "t")
    with pytest.raises(UnreachableError, match=f"does not answer .*; {named}"):
        manage.list_bundles(url="http://127.0.0.1:1")


@pytest.mark.parametrize(
    "words",
    [
        ("delete", "../bundles/x"),
        ("show", "fed?x=1"),
        ("remove", "fed", "../tokens/x"),
        ("revoke", "fed", ".."),
        ("revoke-viewer", "9" * 63),
    ],
)
def test_what_is_no_name_never_becomes_an_address(words: tuple[str, ...]) -> None:
    found = CliRunner().invoke(manage.app, [*words, "--url", "http://127.0.0.1:1"], env={"TERM": "dumb"})
    assert found.exit_code == 2
    assert "is no name" in found.output or "16 lower-case hexadecimal digits" in " ".join(found.output.split())
    assert "id_" not in found.output


def test_the_client_follows_the_links_of_long_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with coordinator(tmp_path / "data") as (_, url), Operator(url, OPERATOR) as operator:
        bundle = operator.upload_bundle(write_bundle(tmp_path / "bundle"))
        for name in "abcde":
            operator.create(FederationConfig.model_validate(settings(bundle=bundle, name=name)))
        asked = []
        send = httpx.Client.request
        monkeypatch.setattr(
            httpx.Client,
            "request",
            lambda http, method, path, **more: asked.append(path) or send(http, method, path, **more),
        )
        assert [f.id for f in operator.federations(limit="2")] == list("abcde")
        assert len(asked) == 3
        assert pages.MOST == 1000


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("change", "fed", "--deadline-seconds", "1e12"), "--deadline-seconds = 1000000000000.0: Input should be less"),
        (("change", "fed", "--rounds", "99999999999"), "--rounds = 99999999999: Input should be less"),
        (("viewer", "--expires-in", "1e12"), "--expires-in = 1000000000000.0: Input should be less"),
        (("token", "fed", "--uses", "99999999999"), "--uses = 99999999999: Input should be less"),
        (("token", "fed", "--uses", "0"), "--uses = 0: Input should be greater than or equal to 1"),
    ],
)
def test_a_value_out_of_range_is_a_sentence(words: tuple[str, ...], why: str) -> None:
    environment = {"MASKFLEET_OPERATOR_TOKEN": OPERATOR, "TERM": "dumb"}
    found = CliRunner().invoke(manage.app, [*words, "--url", "http://127.0.0.1:1"], env=environment)
    assert isinstance(found.exception, ConfigError)
    assert why in str(found.exception)


def test_an_answer_that_cannot_be_read_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = httpx.Response(200, content=b'[{"x": 1}]', request=httpx.Request("GET", "http://127.0.0.1:1/rounds"))
    monkeypatch.setattr(httpx.Client, "request", lambda *_, **__: broken)
    with (
        Operator("http://127.0.0.1:1", OPERATOR) as operator,
        pytest.raises(ServerError, match="answered what cannot be read"),
    ):
        operator.rounds("fed")


@pytest.mark.parametrize(("given", "count"), [("abcd", 2), ("abce", 0)])
def test_a_bundle_s_beginning_that_others_share_deletes_none(
    given: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [SimpleNamespace(digest="abcd" + 60 * end) for end in "01"]
    monkeypatch.setattr(Operator, "bundles", lambda _: listed)
    monkeypatch.setenv("MASKFLEET_OPERATOR_TOKEN", OPERATOR)
    with pytest.raises(ConfigError, match=f"{count} bundles begin with '{given}'"):
        manage.delete_bundle(given, "http://127.0.0.1:1", Path("token"))


def test_the_state_is_written_to_the_file_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(no_global_model=None)
    monkeypatch.setattr(Operator, "state", lambda *_: b"state")
    monkeypatch.setattr(Operator, "federation", lambda *_: found)
    environment, file = {"MASKFLEET_OPERATOR_TOKEN": OPERATOR}, tmp_path / "state.safetensors"
    done = CliRunner().invoke(cli.app, ["export", "fed", "--output", str(file)], env=environment)
    assert (done.output.replace("\n", ""), file.read_bytes()) == (f"{file}: 5 bytes", b"state")
    found.no_global_model = "every device trains a model of its own"
    done = CliRunner().invoke(cli.app, ["export", "fed", "--output", str(file)], env=environment)
    assert "warning: this is no model that all devices share: every device trains" in done.output
    without = CliRunner().invoke(cli.app, ["export", "fed"], env=environment)
    assert "nothing to write" in str(without.exception)


def test_an_address_that_redirects_is_named_and_gets_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = httpx.Request("GET", "http://a.example/v1/health")
    moved = httpx.Response(301, headers={"Location": "https://a.example/v1/health"}, request=asked)
    monkeypatch.setattr(httpx.Client, "request", lambda *_, **__: moved)
    with (
        Operator("http://a.example", OPERATOR) as operator,
        pytest.raises(
            ServerError, match=r"/v1/health redirects to https://a\.example/v1/health; use --url https://a\.example$"
        ),
    ):
        operator.health()


def asked_by_device(url: str) -> None:
    with closing(Transport(url)) as transport, transport.send("GET", "/v1/health", {}):
        pass


def test_on_its_own_machine_no_proxy_is_asked_and_the_given_certificate_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem = Path(__file__).parent / "loopback.pem"  # certificate and key of the tests alone
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")

    async def main() -> None:
        async with listening(tmp_path, certificate=pem) as here:
            with Operator(f"https://127.0.0.1:{here.port}", OPERATOR) as operator:
                assert (await asyncio.to_thread(operator.health)).status == "ok"
            monkeypatch.delenv("SSL_CERT_FILE")
            untrusted = pytest.raises(UnreachableError, match="set SSL_CERT_FILE to a certificate to trust")
            with Operator(f"https://127.0.0.1:{here.port}", OPERATOR) as operator, untrusted:
                await asyncio.to_thread(operator.health)
            with pytest.raises(Transient, match="set SSL_CERT_FILE to a certificate to trust"):
                await asyncio.to_thread(asked_by_device, f"https://127.0.0.1:{here.port}")

    asyncio.run(main())
