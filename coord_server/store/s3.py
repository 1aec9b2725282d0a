"""Blobs in a bucket of S3, or of a store that speaks its protocol: `s3://BUCKET/PREFIX`.

A blob is one object, PREFIX/SHELF/SHA256. S3 shows an object whole or not at all, and answers once it is durable.
Uploads on their way in and notes stay in the data folder, which coordinators share as before (`FolderBlobs`). boto3
finds the credentials, the region and the endpoint (AWS_ENDPOINT_URL_S3), and repeats a request twice.
"""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from coord_server.store.blobs import CHUNK, FolderBlobs, intact
from edge_client.errors import ConfigError, StorageDamagedError, StorageUnreachableError

RETRIES = {"total_max_attempts": 3, "mode": "standard"}
CLIENT = Config(connect_timeout=5, read_timeout=30, retries=RETRIES, max_pool_connections=32)
MARKER = "store-id"
MISSING = ("404", "NoSuchKey")
THERE = ("PreconditionFailed", "ConditionalRequestConflict")  # another request has written the object, or writes it
RESTORE = "restore it in the bucket"


@contextmanager
def answered(what: str) -> Iterator[None]:
    """Turn the bucket's refusal or silence into the StateError of its kind."""
    try:
        yield
    except ClientError as error:
        code = error.response["Error"]["Code"]
        if code in MISSING:
            raise StorageDamagedError(f"{what} is missing; {RESTORE}") from None
        advice = "check the bucket, its policy and the coordinator's credentials"
        raise StorageUnreachableError(f"{what}: the bucket refuses ({code}); {advice}") from None
    except BotoCoreError as error:
        why = f"no usable answer from the bucket ({type(error).__name__})"  # its text has the bucket's address
        raise StorageUnreachableError(f"{what}: {why}; check the link and the coordinator's credentials") from None


@contextmanager
def tolerating(codes: Sequence[str]) -> Iterator[None]:
    """Go on after an answer with one of these codes."""
    try:
        yield
    except ClientError as error:
        if error.response["Error"]["Code"] not in codes:
            raise


@dataclass(frozen=True)
class Bucket:
    """Where the objects of one coordinator lie: their names begin with `prefix`, which is empty or ends in a slash."""

    client: Any
    name: str
    prefix: str

    def claim(self, id_: str, new: bool) -> None:
        """Mark the place as that of store `id_` if the store is `new`. Raises StateError when it is another's."""
        place = f"s3://{self.name}/{self.prefix}"
        with answered(place):
            found = self._marked()
            if found is None and new:
                with tolerating(THERE):  # of another coordinator, or of this request, which boto3 has repeated
                    self.client.put_object(**self._marker, Body=id_.encode(), IfNoneMatch="*")
                found = self._marked()
            if found != id_:
                raise StorageDamagedError(
                    f"{place} does not hold the blobs of this coordinator; name the bucket that it began with, or "
                    "restore it"
                )

    @property
    def _marker(self) -> dict[str, str]:
        return {"Bucket": self.name, "Key": f"{self.prefix}{MARKER}"}

    def _marked(self) -> str | None:
        """The id in the marker, None without one."""
        with tolerating(MISSING):
            return str(self.client.get_object(**self._marker)["Body"].read(), errors="replace")
        return None

    def blobs(self, root: Path) -> S3Blobs:
        """The store, whose uploads on their way in lie in the folder `root`. Raises StateError."""
        return S3Blobs(root, self)

    def pages(self, under: str, **more: str) -> Iterator[dict[str, Any]]:
        """What lies under a shelf or a folder of shelves, up to 1000 objects a page."""
        pages = self.client.get_paginator("list_objects_v2")
        yield from pages.paginate(Bucket=self.name, Prefix=f"{self.prefix}{under}/", **more)


def open_bucket(url: str) -> Bucket:
    """The place that `url` names. Raises ConfigError."""
    scheme, _, place = url.partition("://")
    name, _, prefix = place.partition("/")
    if scheme != "s3" or not name:
        raise ConfigError(f"--blobs {url!r} names no bucket; give one like s3://fleet-blobs/maskfleet")
    logging.getLogger("botocore").setLevel(logging.WARNING)  # below that it writes settings and session tokens
    try:
        client = boto3.client("s3", config=CLIENT)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"--blobs {url}: {error}; correct the settings of AWS") from None
    return Bucket(client, name, f"{prefix.strip('/')}/" if prefix.strip("/") else "")


class S3Blobs(FolderBlobs):
    """Complete blobs in a bucket; the rest in the folder `root`."""

    def __init__(self, root: Path, bucket: Bucket) -> None:
        """Open the store, and remove what dead processes left half-written. Raises StateError."""
        super().__init__(root)
        self._bucket = bucket

    def _object(self, shelf: str, sha256: str) -> dict[str, str]:
        return {"Bucket": self._bucket.name, "Key": f"{self._bucket.prefix}{shelf}/{sha256}"}

    def settle(self, file: int, path: Path, shelf: str, sha256: str) -> None:
        """Copy the file at `path` to its address, where the bucket compares it with its SHA-256. Raises StateError."""
        checksum = b64encode(bytes.fromhex(sha256)).decode()
        with answered("the upload was not stored"), path.open("rb") as body:
            self._bucket.client.put_object(**self._object(shelf, sha256), Body=body, ChecksumSHA256=checksum)

    def read(self, shelf: str, sha256: str) -> bytes:
        """All bytes of a blob. Raises StateError when it is missing, or differs from its address."""
        name = f"blob {shelf}/{sha256}"
        with answered(name), closing(self._bucket.client.get_object(**self._object(shelf, sha256))["Body"]) as body:
            return intact(name, body.read(), sha256, RESTORE)

    def stream(self, shelf: str, sha256: str, start: int, stop: int) -> Iterator[bytes]:
        """Bytes `start` .. `stop - 1`, a chunk at a time, unchecked: the receiver of all of them has the digest."""
        if start >= stop:
            return
        asked = {**self._object(shelf, sha256), "Range": f"bytes={start}-{stop - 1}"}
        with answered(f"blob {shelf}/{sha256}"), closing(self._bucket.client.get_object(**asked)["Body"]) as body:
            yield from body.iter_chunks(CHUNK)

    def size(self, shelf: str, sha256: str) -> int | None:
        """Size of a blob, None when it is not there. Raises StateError."""
        with answered(f"blob {shelf}/{sha256}"), tolerating(MISSING):
            return int(self._bucket.client.head_object(**self._object(shelf, sha256))["ContentLength"])
        return None

    def shelves(self, under: str) -> list[str]:
        """Names of the shelves directly under a folder. Raises StateError."""
        with answered(f"the shelves under {under}"):
            pages = list(self._bucket.pages(under, Delimiter="/"))
        found = [each["Prefix"] for page in pages for each in page.get("CommonPrefixes", [])]
        return sorted(name.removesuffix("/").rpartition("/")[2] for name in found)

    def drop(self, shelf: str) -> None:
        """Drop a shelf and everything on it; nothing happens when there is none. Raises StateError.

        A kill leaves a part of it, which is dropped with the next sweep or start.
        """
        with answered(f"shelf {shelf} was not dropped"):
            for page in self._bucket.pages(shelf):
                keys = [{"Key": found["Key"]} for found in page.get("Contents", [])]
                if keys:
                    asked = {"Objects": keys, "Quiet": True}
                    left = self._bucket.client.delete_objects(Bucket=self._bucket.name, Delete=asked).get("Errors", [])
                    if left:
                        raise StorageUnreachableError(f"shelf {shelf} was not dropped: {left[0]['Code']}")
