"""A request is carried out and its answer is lost, over real HTTP: what the device does next and what it gets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from coordination import Fleet, bearer, credential, refused
from listening import listening
from lossy import Lossy

from edge_client.data import DeviceData
from edge_client.device.journal import Journal
from edge_client.device.session import enrol
from edge_client.link.remote import Remote
from edge_client.link.retry import Retry
from edge_client.link.transport import Transport
from edge_client.protocol.messages import Enrolled

NONE = DeviceData(*(np.zeros((0, 2), np.float32), np.zeros(0, np.int64)) * 3)


def join(folder: Path, url: str, token: str, lossy: Lossy) -> Enrolled:
    """Enrol a device as its client does."""
    with Journal(folder) as journal:
        remote = Remote(Transport(url, lossy), Retry(url, 100.0, lambda _: None, sleep=lambda _: None))
        found = enrol(journal.identity(token, "bb"), journal, remote, token, NONE, lambda _: None)
    assert found.enrolled is not None
    return found.enrolled


def test_a_device_whose_answer_was_lost_gets_it_again_although_its_token_is_revoked(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path / "data") as here:
            url = f"http://127.0.0.1:{here.port}"

            async def script(fleet: Fleet) -> None:
                await fleet.federation("a", min_devices=9)
                ((token),) = (await fleet.operator("GET", "/v1/federations/fed/tokens")).json()
                loop = asyncio.get_running_loop()

                def revoke() -> None:
                    path = f"/v1/federations/fed/tokens/{token['id']}"
                    asyncio.run_coroutine_threadsafe(fleet.operator("DELETE", path), loop).result()

                lossy = Lossy(revoke)
                enrolled = await asyncio.to_thread(join, tmp_path / "device", url, fleet.join, lossy)
                assert (enrolled.federation, enrolled.device) == ("fed", "bb")
                assert lossy.asked == ["POST /v1/enrol"] * 2
                shown = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()
                assert [d["device"] for d in shown] == ["a", "bb"]
                refused(await fleet.enrol("third"), "unauthorized")

            await here.fleet(script)

    asyncio.run(main())


def test_a_revoked_token_shows_nothing_to_those_who_did_not_join_with_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path) as here:

            async def script(fleet: Fleet) -> None:
                await fleet.federation("a", min_devices=9)
                fleet.join = "revoked"
                assert (await fleet.enrol("a")).status_code == 200
                refused(await fleet.enrol("a", credential("b")), "unauthorized")
                refused(await fleet.enrol("b"), "unauthorized")
                refused(await fleet.enrol("b", credential("a")), "name-taken")
                work = await fleet.http.get("/v1/federations/fed/work", headers=bearer(credential("b")))
                refused(work, "unauthorized")

            await here.fleet(script)

    asyncio.run(main())
