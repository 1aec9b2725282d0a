"""A coordinator with a federation on the bundle "digits", and the model files that it makes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from coordination import LIMIT, Fleet, play

from coord_server import exports
from edge_client.bundle import MANIFEST, Bundle, digest
from edge_client.named_bundles import packaged

PATH = "/v1/federations/fed/exports"
DIGITS = packaged()["digits"]


async def upload(fleet: Fleet) -> str:
    """The packaged bundle "digits"; its digest."""
    bundle, manifest = Bundle.open(DIGITS), (DIGITS / MANIFEST).read_bytes()
    await fleet.operator("POST", "/v1/bundles", content=manifest)
    for name in bundle.manifest.parts:
        path = f"/v1/bundles/{digest(manifest)}/parts/{name}"
        await fleet.operator("PUT", path, content=bundle.part(name).read_bytes())
    return digest(manifest)


def with_digits(folder: Path, script: Callable[[Fleet], Awaitable[Any]], **more: Any) -> Any:
    """Run `script` against a coordinator with a federation of two devices on the bundle "digits"."""

    async def prepared(fleet: Fleet) -> Any:
        address = await upload(fleet)

        async def bundle(d: int = 0) -> str:
            return address

        fleet.bundle = bundle  # type: ignore[method-assign]
        await fleet.federation("a", "bb", **more)
        return await script(fleet)

    return play(folder, prepared)


async def ended(fleet: Fleet, found: dict[str, Any]) -> dict[str, Any]:
    """The export once it is ready or has failed, which the coordinator sees to, however slow the machine is."""
    end = time.monotonic() + exports.SECONDS + LIMIT
    while found["state"] in ("waiting", "running"):
        assert time.monotonic() < end, found
        await asyncio.sleep(0.05)
        found = (await fleet.operator("GET", f"{PATH}/{found['id']}")).json()
    return found
