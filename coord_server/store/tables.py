"""The tables of the coordinator's database, and the rows that come out of it and go in. Queries are in `metadata`.

Contents of at most INLINE bytes lie in their rows, so that journalling them costs one sync and not three; larger
ones lie in the blob store and the row's content is NULL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

INLINE = 256 * 1024  # bytes of a content that lies in its row

METADATA = MetaData()

federations = Table(
    "federations",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("config", Text, nullable=False),  # FederationConfig as JSON
    Column("state", Text, nullable=False),  # the engine's State as JSON
    Column("global_state", String(64), nullable=False),  # SHA-256 of the method's state after the last closed round
    Column("global_content", LargeBinary),
    Column("created_at", Float, nullable=False),
)
devices = Table(
    "devices",
    METADATA,
    Column("federation", String(64), primary_key=True),
    Column("device", String(64), primary_key=True),
    Column("credential", String(64), nullable=False),  # SHA-256 of the device's credential
    Column("removed", Boolean, nullable=False, default=False),
    Column("enrolled_at", Float, nullable=False),
    Column("last_seen_at", Float, nullable=False),
    Column("updates", Integer, nullable=False, default=0),
    Column("bytes_up", BigInteger, nullable=False, default=0),
    Column("bytes_down", BigInteger, nullable=False, default=0),
    Column("messages", Text),  # Messages as JSON
    Column("report", Text),  # Report as JSON
    UniqueConstraint("federation", "credential"),
)
tokens = Table(
    "tokens",
    METADATA,
    Column("token", String(64), primary_key=True),  # SHA-256 of the join token
    Column("federation", String(64), nullable=False),
    Column("uses_left", Integer, nullable=False),
    Column("expires_at", Float, nullable=False),
)
updates = Table(
    "updates",
    METADATA,
    Column("federation", String(64), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("device", String(64), primary_key=True),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("received_at", Float, nullable=False),
    Column("content", LargeBinary),  # dropped when the round is closed
)
rounds = Table(
    "rounds",
    METADATA,
    Column("federation", String(64), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("record", Text, nullable=False),  # Round as JSON
)
records = Table(
    "records",
    METADATA,
    Column("federation", String(64), primary_key=True),
    Column("device", String(64), primary_key=True),
    Column("sha256", String(64), nullable=False),  # of what the method keeps about the device
    Column("content", LargeBinary),
)
bundles = Table("bundles", METADATA, Column("digest", String(64), primary_key=True), Column("added_at", Float))


@dataclass(frozen=True)
class Content:
    """Bytes by their SHA-256; `data` is None when they lie in the blob store."""

    sha256: str
    data: bytes | None


@dataclass(frozen=True)
class FederationRow:
    """A federation as it was last journalled; `config` and `state` are JSON."""

    id: str
    config: str
    state: str
    global_state: str
    global_content: bytes | None
    created_at: float


@dataclass(frozen=True)
class DeviceRow:
    """A device as it was last journalled; `credential` is a SHA-256, `messages` and `report` are JSON."""

    device: str
    credential: str
    removed: bool
    enrolled_at: float
    last_seen_at: float
    updates: int
    bytes_up: int
    bytes_down: int
    messages: str | None
    report: str | None


@dataclass(frozen=True)
class TokenRow:
    """A join token's terms."""

    federation: str
    uses_left: int
    expires_at: float


@dataclass(frozen=True)
class Seen:
    """What happened to a device since its row was last written: when it called, payload bytes it fetched.

    `messages` are the bytes of its other messages since it enrolled, as JSON; None leaves what the row has.
    """

    at: float
    bytes_down: int = 0
    messages: str | None = None


@dataclass(frozen=True)
class Acknowledged:
    """An update about to be acknowledged: its body of `size` bytes, received `at`; what `seen` adds to the device."""

    round: int
    device: str
    body: Content
    size: int
    at: float
    seen: Seen


@dataclass(frozen=True)
class ClosedRound:
    """A round about to be closed: its record as JSON, the new global state, the devices' new records."""

    round: int
    record: str
    total: Content
    kept: Mapping[str, Content]
