"""Every option of `maskfleet serve` reaches the part of the coordinator it is for."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from coordinator_process import coordinator

from coord_server import auth, serve
from coord_server.operator import cli as operator
from coord_server.store import open_store
from edge_client import cli
from edge_client.errors import ConfigError, StateError

PEM = Path(__file__).parent / "loopback.pem"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `maskfleet serve` opens and runs."""
    found: dict[str, Any] = {}

    def opened(*given: Any) -> Any:
        found["store"] = given
        return open_store(*given)

    async def run(*given: Any) -> None:
        found["run"] = given
        given[2].close()

    monkeypatch.setattr(serve, "open_store", opened)
    monkeypatch.setattr(serve, "_run", run)
    monkeypatch.setattr(serve, "set_up", lambda form, level: found.update(form=form, level=level.upper()))
    return found


def call(*arguments: str) -> None:
    whole = ["serve", *arguments]
    done = CliRunner().invoke(cli.build(), whole, catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("url", "file", "needed"),
    [
        ("http://127.0.0.1:8750", Path("coordinator/operator-token"), ""),
        ("http://127.0.0.1:8750", None, ""),
        ("https://10.0.0.5:8750", None, "MASKFLEET_URL=https://10.0.0.5:8750"),
        (
            "http://127.0.0.1:80",
            Path("/srv/my fleet/operator-token"),
            "MASKFLEET_URL=http://127.0.0.1:80 MASKFLEET_OPERATOR_TOKEN=\"$(cat '/srv/my fleet/operator-token')\"",
        ),
        (
            "http://127.0.0.1:8750",
            Path("x/operator-token"),
            'MASKFLEET_OPERATOR_TOKEN="$(cat {here}/x/operator-token)"',
        ),
    ],
)
def test_serve_prints_what_the_operator_s_commands_need_beyond_their_defaults(
    url: str, file: Path | None, needed: str
) -> None:
    line = "\nfor `maskfleet federation` in another terminal: export " + needed.replace("{here}", str(Path.cwd()))
    assert serve._settings(url, file) == (line if needed else "")


def test_the_line_that_serve_prints_makes_the_operator_s_commands_work(tmp_path: Path) -> None:
    with coordinator(tmp_path / "my data", token="") as (process, _):  # it draws a token
        assert process.stdout is not None
        _, _, setting = process.stdout.readline().partition("terminal: ")
        listing = f"{setting.strip()}; {sys.executable} -m edge_client.cli federation list --json"
        done = subprocess.run(["sh", "-c", listing], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_every_option_reaches_its_part(tmp_path: Path, seen: dict[str, Any]) -> None:
    url = f"sqlite:///{tmp_path / 'other.db'}"
    folder = str(tmp_path / "d")
    call(
        "--data",
        folder,
        "--database",
        url,
        "--init",
        "--max-parameters",
        "5",
        "--max-connections",
        "7",
        "--certificate",
        str(PEM),
        "--key",
        str(PEM),
        "--log-level",
        "error",
        "--allow-origin",
        "https://a.example",
        "--allow-origin",
        "https://b.example/",
        "--open-metrics",
        "--port",
        "0",
        "--host",
        "127.0.0.1",
    )
    assert seen["store"] == (tmp_path / "d", url, True, None)
    coordinator, places, _, where, tls, application = seen["run"]
    assert application == {"allow_origins": ["https://a.example", "https://b.example"], "open_metrics": True}
    assert (coordinator.bundles.most, places.most) == (5, 7)
    assert (where, isinstance(tls, ssl.SSLContext)) == (tmp_path / "d" / "operator-token", True)
    assert seen["level"] == "ERROR"


def test_without_options_the_defaults_are_those_of_the_help(
    tmp_path: Path, seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    listen = serve.listen

    def free(host: str, port: int) -> Any:
        seen["at"] = host, port
        return listen(host, 0)

    monkeypatch.setattr(serve, "listen", free)
    call()
    assert seen["store"] == (Path("coordinator"), None, False, None)
    assert seen["at"] == ("127.0.0.1", 8750)
    assert seen["level"] == "INFO"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--certificate", str(PEM)], "both --certificate and --key"),
        (["--certificate", "none.pem", "--key", str(PEM)], "none.pem: No such file or directory; correct"),
        (["--port", "0", "--blobs", "fleet"], "--blobs 'fleet' names no bucket"),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path: Path, given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call("--data", str(tmp_path / "d"), *given)
    assert not (tmp_path / "d").exists()


def test_a_wrong_certificate_or_data_folder_is_named_and_no_folder_is_made(tmp_path: Path) -> None:
    odd, link = tmp_path / "odd.pem", tmp_path / "link"
    odd.write_text("no certificate")
    link.symlink_to(tmp_path / "unmounted")
    for given, code, said in (
        (
            ["--data", str(tmp_path / "d"), "--certificate", str(odd), "--key", str(PEM)],
            2,
            "no certificate or no key in it; give a chain and its key, as PEM\n",
        ),
        (["--data", str(odd)], 6, "is a file, not a folder; name another folder with --data"),
        (["--data", str(link)], 2, "unmounted, which is not there; mount its disk, or remove the link\n"),
    ):
        command = [sys.executable, "-m", "edge_client.cli", "serve", "--port", "0", *given]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, said in done.stderr, done.stderr.count("\n")) == (code, True, 1), done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {odd.name, link.name}


@pytest.mark.parametrize("token", ["tök", "a\nb", "\x7f"])
def test_a_token_that_no_header_can_carry_is_refused_on_both_sides(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / auth.OPERATOR_FILE
    file.write_text(token)
    monkeypatch.delenv(auth.OPERATOR_ENV, raising=False)
    with pytest.raises(StateError, match="is not one line of text"):
        auth.operator_token(tmp_path)
    with pytest.raises(ConfigError, match=r"operator-token holds no valid token \(one line"):
        operator.list_(token_file=file)
    monkeypatch.setenv(auth.OPERATOR_ENV, token)
    with pytest.raises(ConfigError, match="MASKFLEET_OPERATOR_TOKEN is not printable ASCII"):
        auth.operator_token(tmp_path)
    with pytest.raises(ConfigError, match="MASKFLEET_OPERATOR_TOKEN holds no valid token"):
        operator.list_(token_file=file)


def test_a_port_in_use_is_named_before_a_data_folder_is_made(tmp_path: Path) -> None:
    with serve.listen("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="choose another --host or --port"):
            call("--data", str(tmp_path / "d"), "--port", str(taken.getsockname()[1]))
    assert not (tmp_path / "d").exists()


def test_processes_on_one_folder_share_the_operator_s_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(auth.OPERATOR_ENV, raising=False)
    (tmp_path / auth.OPERATOR_FILE).touch()  # an empty file counts as none
    first = auth.operator_token(tmp_path)
    assert auth.operator_token(tmp_path) == first
    assert (tmp_path / auth.OPERATOR_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("origin", [
    "https://x.org/a", "https://x.org//", "https://x.org:443", "http://x.org:80/", "/", "bogus", "x.org",
    "https://X.org", "ftp://x.org",
])  # fmt: skip
def test_an_origin_that_no_browser_sends_is_refused(tmp_path: Path, origin: str) -> None:
    with pytest.raises(ConfigError, match=f"{origin!r} is no origin"):
        call("--data", str(tmp_path), "--allow-origin", origin)


def test_origins_as_browsers_send_them_are_known() -> None:
    for origin in ("*", "http://localhost:3000", "https://fleet.example.org", "http://[::1]:8080", "http://10.0.0.7"):
        assert serve._origin(origin) == origin
    assert serve._origin("https://fleet.example.org:8443/") == "https://fleet.example.org:8443"
