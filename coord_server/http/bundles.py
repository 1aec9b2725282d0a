"""The operator's bundles under `/v1`, and the methods that federations can run on them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from coord_server import catalogue
from coord_server.http import blobs, bodies
from coord_server.http.access import BundleDigest, Operated, Viewed
from coord_server.http.openapi import BYTES, MANIFEST_SCHEMA
from coord_server.http.pages import LINK, Paged
from coord_server.http.problems import documented
from coord_server.problems import Refusal
from edge_client.bundle import MAX_MANIFEST
from edge_client.protocol.messages import Name
from edge_client.protocol.operator import BundleReceipt, BundleSummary, MethodSummary
from edge_client.protocol.payload import MEDIA_TYPE as PAYLOAD

router = APIRouter(prefix="/v1", tags=["operator"])

_MANIFEST = {"required": True, "content": {"application/json": {"schema": MANIFEST_SCHEMA}}}
_PART = {"required": True, "content": {blobs.BINARY: BYTES}}


@router.post(
    "/bundles",
    status_code=201,
    responses=documented("too-large", "bad-bundle", "too-slow"),
    openapi_extra={"requestBody": _MANIFEST},
)
async def upload_manifest(request: Request, served: Operated) -> BundleReceipt:
    """The body is `manifest.json` byte for byte; its SHA-256 is the bundle's address. PUT the missing parts next."""
    return await served.bundles.add(await bodies.read_bounded(request, MAX_MANIFEST, "a manifest"))


@router.get("/bundles", responses=LINK)
async def list_bundles(served: Viewed, page: Paged) -> list[BundleSummary]:
    """All bundles, oldest first: each manifest's figures, what is missing, what uses it."""
    found = await served.bundles.listed(page.after(float, str), page.limit + 1)
    return list(page.cut(found, [(b.added_at, b.digest) for b in found]))


@router.get("/bundles/{digest}/summary")
async def show_bundle(served: Viewed, digest: BundleDigest) -> BundleSummary:
    """The same of one bundle. GET the bundle itself for its manifest."""
    return await served.bundles.summary(digest)


@router.delete("/bundles/{digest}", status_code=204, response_class=Response, responses=documented("bundle-in-use"))
async def delete_bundle(served: Operated, digest: BundleDigest) -> None:
    """Refused while a federation uses it."""
    await served.bundles.delete(digest)


@router.put(
    "/bundles/{digest}/parts/{name}",
    responses=documented("too-large", "bad-bundle", "too-slow"),
    openapi_extra={"requestBody": _PART},
)
async def upload_part(request: Request, served: Operated, digest: BundleDigest, name: Name) -> BundleReceipt:
    """Checked against the size and SHA-256 in the manifest. Sending it again is harmless."""
    shelf, sha256, size = await served.bundles.part(digest, name)
    await bodies.store(request, served.store.blobs, shelf, sha256, size, f"part {name!r}")
    return await served.bundles.receipt(digest)


@router.post(
    "/bundles/{digest}/weights",
    status_code=201,
    responses=documented("too-large", "bad-bundle", "bundle-incomplete", "too-slow"),
    openapi_extra={"requestBody": {"required": True, "content": {PAYLOAD: BYTES}}},
)
async def derive_bundle(request: Request, served: Operated, digest: BundleDigest) -> BundleReceipt:
    """A bundle with the same graphs and other weights, for a warm start; sending it again is harmless.

    The body is a safetensors file with a float32 tensor for every row of the manifest's two tables, by its name.
    """
    limit = await served.bundles.values_limit(digest)
    body = await bodies.read_bounded(request, limit, "a file of this bundle's values")
    return await served.bundles.derive(digest, body)


# --- methods


@router.get("/methods")
async def list_methods(_: Viewed) -> list[MethodSummary]:
    """Every installed method: a line, its defaults, and the JSON Schema of its settings."""
    return catalogue.methods()


@router.get("/methods/{name}")
async def show_method(
    _: Viewed, name: Annotated[str, Path(description="Its name.", examples=["lattice"])]
) -> MethodSummary:
    """The same of one method."""
    found = next((m for m in catalogue.methods() if m.name == name), None)
    if found is None:
        raise Refusal("not-found", f"there is no method {name!r}; GET /v1/methods lists them")
    return found
