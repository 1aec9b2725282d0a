"""Models from the dashboard, without a browser: offered, watched, downloaded; who may; what failed, in a sentence."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import httpx
import onnxruntime as ort
import pytest
from coordination import LIMIT, OPERATOR, Fleet, bearer, refused
from dashboard_pages import FORM, HTML, PAGE, Reader, log_in, said, send
from exports_of_digits import PATH, with_digits

from coord_server import exports
from coord_server.dashboard import view

BUTTON = "Export ONNX"


async def shown(fleet: Fleet) -> httpx.Response:
    return await fleet.http.get(PAGE, headers=HTML)


async def made(fleet: Fleet) -> httpx.Response:
    """The page once no file is being made."""
    end = time.monotonic() + exports.SECONDS + LIMIT
    while f'data-quiet="{view.WORKING}"' in (found := await shown(fleet)).text:
        assert time.monotonic() < end, found.text
        await asyncio.sleep(0.1)
    return found


def test_a_model_is_asked_for_watched_and_downloaded_by_operator_and_viewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(exports.NEEDS, "pte", ("no_such_engine",))

    async def script(fleet: Fleet) -> None:
        await log_in(fleet)
        first = await shown(fleet)
        assert BUTTON in first.text
        assert "Export ExecuTorch" not in first.text
        assert f'data-quiet="{view.QUIET}"' in first.text
        assert "Models" not in said(first)
        asked = await send(fleet, "exports", kind="onnx")
        assert (asked.status_code, asked.headers["location"]) == (303, f"{PAGE}#models")
        assert f'data-refresh="{view.WORKING}" data-quiet="{view.WORKING}"' in (await shown(fleet)).text
        ready = await made(fleet)
        assert "round 0 ONNX Download" in said(ready)
        assert re.search(r"the global model after round 0 of 2, \d+ of 6570 parameters, verified", said(ready))
        (address,) = (a for a in Reader(ready.text).addresses if a.endswith("/file"))
        file = await fleet.http.get(address, headers=HTML)
        assert file.headers["content-disposition"] == 'attachment; filename="fed-round-0.onnx"'
        assert "content-security-policy" in file.headers
        assert ort.InferenceSession(file.content).get_inputs()[0].name == "x"
        assert (await send(fleet, "exports", kind="exe")).status_code == 422
        assert (await send(fleet, "exports", kind="pte")).status_code == 409

        viewer = (await fleet.operator("POST", "/v1/viewers", json={})).json()["token"]
        (listed,) = (await fleet.http.get(PATH, headers=bearer(viewer))).json()
        assert (listed["state"], listed["source"], address) == (
            "ready",
            "global",
            f"{PAGE}/exports/{listed['id']}/file",
        )
        assert refused(await fleet.http.post(PATH, headers=bearer(viewer), json={"kind": "onnx"}), "forbidden")
        await log_in(fleet, viewer)
        seen = await shown(fleet)
        assert BUTTON not in seen.text
        assert "round 0 ONNX Download" in said(seen)
        assert (await fleet.http.get(address, headers=HTML)).content == file.content
        assert (await fleet.http.post(f"{PAGE}/exports", data={"kind": "onnx"}, headers=FORM)).status_code == 403
        await fleet.http.post("/logout", headers=FORM)
        assert (await fleet.http.get(address, headers=HTML)).status_code == 303

    with_digits(tmp_path, script)


def test_a_model_that_cannot_be_made_says_why_on_the_page(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await log_in(fleet, OPERATOR)
        assert BUTTON not in (await shown(fleet)).text
        await send(fleet, "exports", kind="onnx")
        assert (
            "round 0 ONNX failed method 'standalone' has no global model: every device trains a model of its own"
            in said(await made(fleet))
        )

    with_digits(tmp_path, script, method={"name": "standalone"})
