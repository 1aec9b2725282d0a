"""The dashboard over HTTP: who gets in, what a form needs, what a page may hold, and what it shows."""

from __future__ import annotations

import asyncio
import gzip
import html
import re
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from coordination import OPERATOR, Fleet, bearer, credential, open_folder, served, until
from dashboard_pages import FORM, HTML, PAGE, Reader, form_of, log_in, said, send
from fastapi import Request

from coord_server import auth
from coord_server.app import create_app
from coord_server.connections import Places
from coord_server.coordinator import Coordinator
from coord_server.dashboard import answers, reference, session, view
from coord_server.http import watch
from coord_server.http.access import CALL
from coord_server.live.federation import LiveFederation
from coord_server.roles import Role
from edge_client.protocol.messages import Report

DATABASE = "coordinator.db"


def play(folder: Path, script: Callable[[Fleet], Awaitable[Any]], **given: Any) -> Any:
    """Run `script` with a coordinator that answers with pages."""

    async def main() -> Any:
        async with served(folder, **given) as fleet:
            fleet.http.headers.update(HTML)
            return await script(fleet)

    return asyncio.run(main())


async def phase(fleet: Fleet) -> str:
    found: str = (await fleet.operator("GET", "/v1/federations/fed")).json()["phase"]
    return found


# --- who gets in


def test_every_page_asks_for_a_token_first(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        for address in ("/", PAGE, f"{PAGE}?state=ready", f"{PAGE}/state", f"{PAGE}/stop", "/federations/none"):
            answer = await fleet.http.get(address)
            assert (answer.status_code, answer.headers["location"].partition("?")[0]) == (303, "/login"), address
        assert answer.headers["location"] == "/login?next=/federations/none"
        assert (await fleet.http.post(f"{PAGE}/pause", headers=FORM)).headers["location"] == "/login"

    play(tmp_path, script)


def test_the_token_opens_a_session_that_does_not_hold_it(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        answer = await log_in(fleet)
        assert (answer.status_code, answer.headers["location"]) == (303, PAGE)
        cookie = answer.headers["set-cookie"]
        assert OPERATOR not in cookie
        assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
        assert "Secure" not in cookie
        assert "fed" in said(await fleet.http.get("/"))
        out = await fleet.http.post("/logout", headers=FORM)
        assert out.headers["location"] == "/login"
        assert (await fleet.http.get("/")).status_code == 303

    play(tmp_path, script)


def test_two_coordinators_on_one_machine_keep_their_sessions(tmp_path: Path) -> None:
    """Browsers send a machine's cookies to every port of it."""

    async def script(fleet: Fleet) -> None:
        first, _ = (await log_in_at(fleet, "machine:8750")).headers["set-cookie"].split("=", 1)
        second, _ = (await log_in_at(fleet, "machine:8751")).headers["set-cookie"].split("=", 1)
        assert (first, second) == ("maskfleet-8750", "maskfleet-8751")
        for host in ("machine:8750", "machine:8751"):
            assert (await fleet.http.get("/", headers={"Host": host})).status_code == 200
        out = await fleet.http.post(
            "/logout", headers={**HTML, "Host": "machine:8751", "Origin": "http://machine:8751"}
        )
        assert out.status_code == 303
        assert (await fleet.http.get("/", headers={"Host": "machine:8751"})).status_code == 303
        assert (await fleet.http.get("/", headers={"Host": "machine:8750"})).status_code == 200
        assert [session.cookie(h) for h in ("machine", "[::1]", "[::1]:80", "", "a:b;c")] == [
            "maskfleet", "maskfleet", "maskfleet-80", "maskfleet", "maskfleet"
        ]  # fmt: skip

    async def log_in_at(fleet: Fleet, host: str) -> httpx.Response:
        headers = {**HTML, "Host": host, "Origin": f"http://{host}"}
        return await fleet.http.post("/login", data={"token": OPERATOR}, headers=headers)

    play(tmp_path, script)


def test_the_cookie_is_secure_under_tls(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        fleet.http.base_url = httpx.URL("https://coordinator")
        answer = await fleet.http.post(
            "/login", data={"token": OPERATOR}, headers={**HTML, "Origin": "https://coordinator"}
        )
        assert "Secure" in answer.headers["set-cookie"].split("; ")

    play(tmp_path, script)


def test_a_wrong_token_opens_nothing(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        for token in ("", "wrong", OPERATOR[:-1], OPERATOR * 100, "\ud800"):
            body = {"token": token.encode(errors="surrogatepass")}
            answer = await fleet.http.post("/login", data=body, headers=FORM)
            assert answer.status_code == 401, token
            assert "not a token of this coordinator" in said(answer)
            assert "set-cookie" not in answer.headers

    play(tmp_path, script)


def test_a_login_leads_nowhere_else(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        for address in ("//evil.example", "https://evil.example", "/\\evil.example", "x", "/\r\nA: b", ""):
            answer = await fleet.http.post("/login", data={"token": OPERATOR, "next": address}, headers=FORM)
            assert (answer.status_code, answer.headers["location"]) == (303, "/"), address

    play(tmp_path, script)


def test_a_cookie_that_was_not_made_here_is_worth_nothing(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await log_in(fleet)
        (good,) = fleet.http.cookies.jar
        id_, expires, nonce, mac = str(good.value).split(".")
        for cookie in (
            f"{id_}.{int(expires) + 1}.{nonce}.{mac}",
            f"{id_}.{expires}.{nonce}.",
            f"{'0' * 16}.{expires}.{nonce}.{mac}",
            session.begin("another token", 2e9),
            "...",
            "",
            "x" * 5000,
        ):
            fleet.http.cookies.set("maskfleet", cookie)
            answer = await fleet.http.get("/", headers={"Cookie": f"maskfleet={cookie}"})
            assert answer.status_code == 303, cookie

    play(tmp_path, script)


def test_a_session_ends() -> None:
    cookie, digest = session.begin("token", 1000.0), auth.hashed("token")

    def known(id_: str) -> tuple[Role, str] | None:
        return ("viewer", digest) if id_ == auth.token_id(digest) else None

    assert session.read(cookie, known, 1000.0 + session.LASTS - 1) is not None
    assert session.read(cookie, known, 1000.0 + session.LASTS) is None
    assert session.read(cookie, lambda _: None, 1000.0) is None
    assert session.read(cookie, lambda _: ("operator", auth.hashed("other")), 1000.0) is None


def test_a_viewers_session_ends_when_the_token_is_revoked(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        made = (await fleet.operator("POST", "/v1/viewers", json={})).json()
        await log_in(fleet, made["token"])
        assert "viewer" in said(await fleet.http.get("/"))
        assert (await fleet.operator("DELETE", f"/v1/viewers/{made['id']}")).status_code == 204
        assert (await fleet.http.get("/")).status_code == 303

    play(tmp_path, script)


def test_the_cookie_is_no_credential_of_the_api(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        await log_in(fleet)
        assert (await fleet.http.get("/v1/federations")).status_code == 401

    play(tmp_path, script)


def test_another_process_on_the_same_folder_takes_the_session(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        await log_in(fleet)
        async with served(tmp_path) as second:
            second.http.cookies = fleet.http.cookies
            assert (await second.http.get(PAGE)).status_code == 200

    play(tmp_path, script)


# --- forms


def test_a_form_of_another_site_changes_nothing(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, str], str | None]] = [
        (FORM, ""),
        (FORM, "0" * 64),
        ({**HTML, "Origin": "http://evil.example"}, None),
        ({**HTML, "Origin": "null"}, None),
        ({**HTML, "Origin": "http://["}, None),
        (HTML, None),
        ({**FORM, "Sec-Fetch-Site": "cross-site"}, None),
        ({**FORM, "Sec-Fetch-Site": "same-site"}, None),
    ]

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        await log_in(fleet)
        for headers, form in wrong:
            fields = {} if form is None else {"form": form}
            for action in ("pause", "stop", "tokens"):
                answer = await send(fleet, action, headers, **fields)
                assert answer.status_code == 403, (headers, form, action)
                assert "form" in said(answer)
        assert await phase(fleet) == "running"

    play(tmp_path, script)


def test_a_proxy_that_hides_the_host_needs_a_browser_that_vouches(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        await log_in(fleet)
        outside = {**HTML, "Origin": "https://fleet.example.org"}
        assert (await send(fleet, "pause", outside)).status_code == 403
        assert (await send(fleet, "pause", {**outside, "Sec-Fetch-Site": "same-origin"})).status_code == 303

    play(tmp_path, script)


def test_the_form_of_another_session_is_refused(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        await log_in(fleet)
        first = await form_of(fleet)
        await log_in(fleet)
        assert await form_of(fleet) != first
        assert (await send(fleet, "pause", form=first)).status_code == 403
        assert await phase(fleet) == "running"

    play(tmp_path, script)


def test_the_commands_of_the_page_are_carried_out(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b", start="manual")
        await log_in(fleet)
        assert await phase(fleet) == "recruiting"
        for action, then in (("start", "running"), ("pause", "paused"), ("resume", "running"), ("stop", "stopped")):
            asked = await fleet.http.get(f"{PAGE}/{action}")
            assert f"{PAGE}/{action}" in Reader(asked.text).forms
            assert (await phase(fleet)) != then
            done = await send(fleet, action)
            assert (done.status_code, done.headers["location"]) == (303, PAGE)
            assert await phase(fleet) == then
            shown = said(await fleet.http.get(PAGE))
            assert then in shown
            assert ("no round closes or opens until it resumes" in shown) is (action == "pause")
        form = re.search(r'value="([0-9a-f]{64})"', asked.text)
        assert form is not None
        late = await send(fleet, "pause", form=form.group(1))
        assert late.status_code == 409
        assert "the federation is stopped; it cannot be paused now." in said(late)

    play(tmp_path, script)


def test_only_commands_that_the_phase_takes_are_offered(tmp_path: Path) -> None:
    assert {p: view.allowed(p) for p in ("recruiting", "running", "paused", "finished", "stopped", None)} == {  # type: ignore[arg-type]
        "recruiting": ["start", "stop"],
        "running": ["pause", "stop"],
        "paused": ["resume", "stop"],
        "finished": [],
        "stopped": [],
        None: [],
    }


def test_a_viewer_sees_everything_and_can_change_nothing(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        token = (await fleet.operator("POST", "/v1/viewers", json={})).json()["token"]
        await log_in(fleet, token)
        shown = await fleet.http.get(PAGE)
        assert shown.status_code == 200
        assert Reader(shown.text).forms == ["/logout"]
        assert "Pause" not in shown.text
        assert Reader((await fleet.http.get(f"{PAGE}/stop")).text).forms == ["/logout"]
        digest = auth.hashed(token)
        (cookie,) = fleet.http.cookies.jar
        known = session.read(str(cookie.value), lambda _: ("viewer", digest), 0.0)
        assert known is not None
        for action in ("pause", "stop", "tokens"):
            answer = await send(fleet, action, form=known.form, uses="1", expires_in="60")
            assert answer.status_code == 403
            assert "viewer changes nothing" in said(answer)
        assert await phase(fleet) == "running"

    play(tmp_path, script)


def test_a_join_token_of_the_page_enrols_a_device(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        await log_in(fleet)
        answer = await send(fleet, "tokens", uses="1", expires_in="3600")
        found = re.search(r"maskfleet join http://coordinator --token ([0-9a-f]{64}) --data mine.npz", said(answer))
        assert found is not None
        assert 'class="code"' in answer.text
        assert "For 1 device, valid for an hour." in said(answer)
        fleet.join = found.group(1)
        assert (await fleet.enrol("b")).status_code == 200
        assert (await fleet.enrol("c")).status_code == 403

    play(tmp_path, script)


def test_a_wrong_token_form_is_answered_with_what_is_wrong(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        await log_in(fleet)
        for uses, lasts in (("", "1"), ("0", "60"), ("x", "60"), ("1", "nan"), ("1" * 5000, "1")):
            answer = await send(fleet, "tokens", uses=uses, expires_in=lasts)
            assert answer.status_code == 422, (uses, lasts)
            assert "correct" in said(answer)

    play(tmp_path, script)


# --- what a page holds


async def pages(fleet: Fleet) -> dict[str, httpx.Response]:
    """Every kind of page, of a federation with a closed round and a failure with a hostile reason."""
    await fleet.federation("a", "b", rounds=3)
    for device in ("a", "b"):
        assert (await fleet.train(device)).status_code == 201
    work = await fleet.due("a")
    assert work["round"] == 2
    reason = "</li><script>alert(1)</script>\"'><img src=x onerror=alert(2)> \N{RIGHT-TO-LEFT OVERRIDE}\x1b\0"
    assert (await fleet.fail("a", work, "data", reason)).status_code < 300
    out = {"login": await fleet.http.get("/login")}
    await log_in(fleet)
    found = {address: await fleet.http.get(address) for address in ("/", PAGE, f"{PAGE}/stop", "/docs")}
    hostile = {"state": "<b>", "name": '"><script>x</script>'}
    found["hostile"] = await fleet.http.get(PAGE, params=hostile)
    found["token"] = await send(fleet, "tokens", uses="1", expires_in="60")
    found["missing"] = await fleet.http.get("/federations/none")
    found["bad"] = await fleet.http.get("/federations/<script>")
    found["nowhere"] = await fleet.http.get("/nowhere")
    found["refused"] = await send(fleet, "pause", form="x")
    return out | found


def test_no_page_holds_a_script_a_style_or_an_address_of_elsewhere(tmp_path: Path) -> None:
    found = play(tmp_path, pages)
    for name, answer in found.items():
        assert answer.headers["content-type"] == "text/html; charset=utf-8", (name, answer.text)
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert policy.startswith("default-src 'none'; style-src 'self'; script-src 'self'")
        assert answer.headers["cache-control"] == "no-store"
        read = Reader(answer.text)
        assert not read.inline, name
        assert not read.unlabelled, name
        assert read.headings[0] == 1, name
        assert read.headings.count(1) == 1, name
        assert all(a.startswith(("/", "#")) and not a.startswith("//") for a in read.addresses), name
        assert "<script>" not in answer.text, name
        assert "<img" not in answer.text, name
    assert [found[n].status_code for n in ("missing", "bad", "nowhere", "refused")] == [404, 422, 404, 403]
    assert "onerror=alert(2)" in said(found[PAGE])  # as text
    assert not {"\N{RIGHT-TO-LEFT OVERRIDE}", "\x1b", "\0"} & set(found[PAGE].text)
    assert "data:" in said(found[PAGE])


def test_every_asset_comes_from_the_package_and_may_be_kept(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        login = await fleet.http.get("/login")
        named = {a for a in Reader(login.text).addresses if a.startswith("/assets/")}
        assert {a.partition("?")[0] for a in named} == {f"/assets/{name}" for name in answers.ASSETS}
        for address in named:
            answer = await fleet.http.get(address)
            assert answer.status_code == 200
            assert "immutable" in answer.headers["cache-control"]
            assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
            assert "url(" not in answer.text
            assert "@import" not in answer.text
        assert (await fleet.http.get("/assets/none.js")).status_code == 404
        assert (await fleet.http.get("/assets/..%2f__init__.py")).status_code == 404

    play(tmp_path, script)


def test_a_page_is_compressed_for_those_who_read_that(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        await log_in(fleet)
        plain = await fleet.http.get(PAGE, headers={"Accept-Encoding": "identity"})
        packed = await fleet.http.get(PAGE, headers={"Accept-Encoding": "br, gzip"})
        assert "content-encoding" not in plain.headers
        assert packed.headers["content-encoding"] == "gzip"
        assert int(packed.headers["content-length"]) < len(plain.content) / 2
        assert packed.text == plain.text

    play(tmp_path, script)


def test_an_error_of_ours_is_a_page_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> Any:
        raise RuntimeError("boom")

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        await log_in(fleet)
        monkeypatch.setattr(view, "federation", broken)
        answer = await fleet.http.get(PAGE)
        assert answer.status_code == 500
        assert "its log says why" in said(answer)
        assert "Traceback" not in answer.text
        assert "boom" not in answer.text

    play(tmp_path, script)


def test_errors_of_the_api_stay_json(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        for address in ("/v1/nowhere", "/v1/federations/x"):
            answer = await fleet.http.get(address)
            assert answer.headers["content-type"] == "application/problem+json"
        machine = await fleet.http.get("/nowhere", headers={"Accept": "application/json"})
        assert machine.headers["content-type"] == "application/problem+json"

    play(tmp_path, script)


def test_a_federation_that_could_not_be_loaded_says_why(tmp_path: Path) -> None:
    async def first(fleet: Fleet) -> None:
        await fleet.federation("a")

    play(tmp_path, first)
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute("UPDATE federations SET config = replace(config, 'fedavg', 'gone')")

    async def script(fleet: Fleet) -> None:
        await log_in(fleet)
        for address in ("/", PAGE):
            answer = await fleet.http.get(address)
            assert answer.status_code == 200
            assert "could not be loaded" in said(answer)
        assert (await send(fleet, "pause", form="x")).status_code == 403
        assert f'href="{PAGE}/stop"' in (await fleet.http.get(PAGE)).text
        assert (await fleet.http.get(f"{PAGE}/pause", headers=HTML)).status_code == 503
        asked = await fleet.http.get(f"{PAGE}/stop", headers=HTML)
        assert "Stop fed?" in said(asked)
        form = asked.text.partition('name="form" value="')[2].partition('"')[0]
        assert (await send(fleet, "stop", form=form)).status_code == 303
        stopped = await fleet.http.get(PAGE)
        assert "stopped" in said(stopped)
        assert f'href="{PAGE}/stop"' not in stopped.text

    play(tmp_path, script)


# --- what is shown


def test_the_page_says_who_has_reported_who_is_missing_and_why(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("kitchen", "hall", "attic", cohort=3, min_devices=3, min_updates=2, rounds=3)
        await log_in(fleet)
        for device in ("kitchen", "hall", "attic"):
            await fleet.train(device)
        await until(fleet, lambda f: f["round"] == 2)
        await fleet.train("hall")
        await fleet.fail("attic", await fleet.work("attic"), "out-of-memory", "the sensor's buffer is full")
        text = said(await fleet.http.get(PAGE))
        assert "Round 2 of 3" in text
        assert "Updates in 1 of 2" in text
        assert "Reported 1 hall" in text
        assert "Training 1 kitchen" in text
        assert "Failed 1 attic out-of-memory: the sensor's buffer is full" in text
        assert "Score 0.750 worst 0.750" in text
        assert "round 1: mean 0.750, p10 0.750, worst 0.750" in text
        assert re.search(r"attic failed now 1 \d+ B", text)

    play(tmp_path, script)


def test_the_row_of_a_device_has_what_it_reported(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("kitchen")
        await log_in(fleet)
        assert "kitchen ready now 0 0 B 0 B" in said(await fleet.http.get(PAGE))
        report = Report(score=0.9, test_samples=5, parameters_dense=6570, parameters_compact=4000)
        path, shown = "/v1/federations/fed/devices/kitchen/report", bearer(credential("kitchen"))
        assert (await fleet.http.put(path, json=report.model_dump(), headers=shown)).is_success
        assert "0.900 4,000 of 6,570 parameters" in said(await fleet.http.get(PAGE))

    play(tmp_path, script)


def test_a_refused_update_is_shown_with_the_reason(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        await log_in(fleet)
        work = await fleet.work("a")
        assert (await fleet.upload("a", work["round"], work["lease"], b"<b>no payload</b>")).status_code == 422
        assert re.search("round 1 a bad-payload update refused: ", said(await fleet.http.get(PAGE)))

    play(tmp_path, script)


def test_the_events_of_a_page_need_its_session(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        assert (await fleet.http.get(f"{PAGE}/events", headers=bearer(OPERATOR))).status_code == 303

    play(tmp_path, script)


def test_the_exported_state_is_that_of_the_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name has the round of its bytes, also when a later round closes while they are read."""

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        for device in ("a", "b"):
            await fleet.train(device)
        await until(fleet, lambda f: f["round"] == 2)
        await log_in(fleet)
        answer = await fleet.http.get(f"{PAGE}/state")
        assert answer.headers["content-disposition"] == 'attachment; filename="fed-round-1.safetensors"'
        same = await fleet.operator("GET", "/v1/federations/fed/state")
        assert (same.content, same.headers["Maskfleet-Round"]) == (answer.content, "1")
        read = LiveFederation.exported

        async def slowly(live: LiveFederation) -> Any:
            found = await read(live)
            for device in ("a", "b"):
                await fleet.train(device)
            await until(fleet, lambda f: f["phase"] == "finished")
            return found

        monkeypatch.setattr(LiveFederation, "exported", slowly)
        late = await fleet.http.get(f"{PAGE}/state")
        assert late.headers["content-disposition"] == 'attachment; filename="fed-round-1.safetensors"'
        assert late.content == answer.content

    play(tmp_path, script)


def test_two_thousand_devices_fit_into_a_small_page(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        with sqlite3.connect(tmp_path / DATABASE) as database:
            (columns,) = database.execute("SELECT * FROM devices").fetchall()
            names = [d[0] for d in database.execute("SELECT * FROM devices").description]
            place, secret = names.index("device"), names.index("credential")
            marks = ",".join("?" * len(names))
            rows = []
            for i in range(2000):
                row = list(columns)
                row[place], row[secret] = f"device-{i:04}", f"{i:064x}"
                rows.append(row)
            database.executemany(f"INSERT INTO devices VALUES ({marks})", rows)
        await log_in(fleet)
        answer = await fleet.http.get(PAGE)
        assets = sum(len(a.packed) for a in answers.ASSETS.values())
        assert len(gzip.compress(answer.content)) + assets < 40_000
        assert "all 2,001" in said(answer)
        assert "page 1 of 41, 2,001 devices" in said(answer)
        assert len(re.findall('data-label="updates"', answer.text)) == 50
        last = await fleet.http.get(PAGE, params={"part": 999})
        assert "page 41 of 41" in said(last)
        some = await fleet.http.get(PAGE, params={"name": "DEVICE-01", "state": "ready"})
        assert "page 1 of 2, 100 devices" in said(some)
        assert "No device" in said(await fleet.http.get(PAGE, params={"name": "zzz"}))
        assert (await fleet.http.get(PAGE, params={"part": "x"})).status_code == 422

    play(tmp_path, script)


def test_an_empty_coordinator_says_how_to_begin(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await log_in(fleet)
        assert "maskfleet federation create" in said(await fleet.http.get("/"))

    play(tmp_path, script)


# --- the API's reference


def test_the_reference_names_every_call_and_message(tmp_path: Path) -> None:
    store = open_folder(tmp_path / "data")
    document = create_app(Coordinator(store, OPERATOR)).openapi()
    store.close()

    async def script(fleet: Fleet) -> None:
        text = html.unescape((await fleet.http.get("/docs")).text)
        for path, operations in document["paths"].items():
            assert f"<code>{path}</code>" in text
            for operation in operations.values():
                assert f'id="{operation["operationId"]}"' in text
        linked = set(re.findall(r'<a href="#(\w+)">', text)) - {"main"}
        assert linked
        for name in linked | set(document["components"]["schemas"]):
            assert f'id="{name}"' in text, name
        assert (await fleet.http.get("/redoc")).status_code == 404
        assert (await fleet.http.get("/openapi.json")).json()["openapi"].startswith("3.1")
        assert not any(path.startswith("/federations") for path in document["paths"])

    play(tmp_path / "data", script)


def test_the_operators_bearer_token_is_not_a_session(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        assert (await fleet.http.get("/", headers=bearer(OPERATOR))).status_code == 303

    play(tmp_path, script)


def test_the_reference_is_rendered_once_for_each_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[Any] = []
    of = reference.of
    monkeypatch.setattr(reference, "of", lambda app: rendered.append(app) or of(app))

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        viewer = (await fleet.operator("POST", "/v1/viewers", json={})).json()["token"]
        for token in (None, OPERATOR, viewer):
            if token is not None:
                await log_in(fleet, token)
            pages = [await fleet.http.get("/docs", headers={"Accept-Encoding": e}) for e in ("gzip", "identity")]
            assert pages[0].text == pages[1].text
            assert [p.headers.get("Content-Encoding") for p in pages] == ["gzip", None]
            assert ("Log out" in pages[0].text) == (token is not None)
            assert (">viewer<" in pages[0].text) == (token == viewer)
        assert len(rendered) == 3

    play(tmp_path, script)


def test_a_last_event_of_many_digits_is_not_read(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        live = fleet.http._transport.app.state.coordinator.federation("fed")  # type: ignore[attr-defined]
        scope = {"type": "http", "headers": [], "app": fleet.http._transport.app, CALL: Viewing()}  # type: ignore[attr-defined]
        stream = await watch.follow(Request(scope), live, "9" * 5000, lambda: True)
        assert stream.status_code == 200

    class Viewing:
        role, places, connection = "viewer", Places(), None

    play(tmp_path, script)
