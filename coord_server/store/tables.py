"""The tables of the coordinator's database, and the dataclasses of its rows. `metadata` holds the queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from coord_server.store.values import Content

METADATA = MetaData()

UP = ("enrol", "report", "failure")
DOWN = ("enrol", "work", "receipt", "bundle")
"""Kinds of messages that are no payloads, each with a column of its bytes: `up_enrol`, `down_work`, ..."""
MESSAGES = (*(f"up_{kind}" for kind in UP), *(f"down_{kind}" for kind in DOWN))

store = Table("store", METADATA, Column("id", String(64), primary_key=True))  # one row: the data folder's marker

federations = Table(
    "federations",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("config", Text, nullable=False),  # FederationConfig as JSON
    Column("version", BigInteger, nullable=False, default=0),  # counts the commits
    Column("stamp", String(32), nullable=False, default=""),  # the last commit's own random name
    Column("state", Text, nullable=False),  # the engine's State as JSON
    Column(
        "values_round", Integer, nullable=False
    ),  # the closed round that the method's global state is of, 0 at first
    Column("values_sha256", String(64), nullable=False),  # that global state
    Column("values_content", LargeBinary),
    Column("ready", Integer, nullable=False, default=0),  # devices that asked for work and are not removed
    Column("removals", Integer, nullable=False, default=0),  # devices that were removed
    Column("created_at", Float, nullable=False),
)
devices = Table(
    "devices",
    METADATA,
    Column("federation", String(64), primary_key=True),
    Column("device", String(64), primary_key=True),
    Column("credential", String(64), nullable=False),  # SHA-256 of the device's credential
    Column("ready", Boolean, nullable=False, default=False),  # it has asked for work
    Column("removed", Boolean, nullable=False, default=False),
    Column("enrolled_at", Float, nullable=False),
    Column("last_seen_at", Float, nullable=False),
    Column("updates", Integer, nullable=False, default=0),
    Column("bytes_up", BigInteger, nullable=False, default=0),
    Column("bytes_down", BigInteger, nullable=False, default=0),
    *(Column(name, BigInteger, nullable=False, default=0) for name in MESSAGES),
    Column("last_down", Text),  # bytes by kind of the downlink after the last round, as JSON, once it is fetched
    Column("report", Text),  # Report as JSON
    Column("failure", Text),  # Failure as JSON, until an update of it is accepted
    UniqueConstraint("federation", "credential"),
    Index("devices_by_credential", "credential"),
    Index("devices_by_presence", "federation", "last_seen_at"),
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
    Column("norm", Float),  # Influence; NULL when the method bounds it by construction
    Column("weight", Float),
    Column("statistics", Float),
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
    Column("round", Integer, nullable=False),  # the round that wrote it
    Column("sha256", String(64), nullable=False),  # what the method keeps about the device
    Column("content", LargeBinary),
)
bundles = Table("bundles", METADATA, Column("digest", String(64), primary_key=True), Column("added_at", Float))


@dataclass(frozen=True)
class FederationRow:
    """A new federation; `config` and `state` are JSON, `values` is the method's global state before round 1."""

    id: str
    config: str
    state: str
    values: Content
    created_at: float


@dataclass(frozen=True)
class Head:
    """What changes about a federation: the engine's `state` (JSON) at `version`, written by commit `stamp`.

    `values_round` is the last closed round and `values_sha256` the method's global state after it. `ready` devices have
    asked for work and are not removed; `removals` counts those that were removed.
    """

    version: int
    stamp: str
    state: str
    values_round: int
    values_sha256: str
    ready: int
    removals: int


@dataclass(frozen=True)
class Member:
    """A device as requests need it; `credential` is a SHA-256."""

    device: str
    credential: str
    ready: bool
    removed: bool


@dataclass(frozen=True)
class DeviceRow:
    """A device as the operator sees it; `last_down`, `report` and `failure` are JSON."""

    device: str
    removed: bool
    ready: bool
    enrolled_at: float
    last_seen_at: float
    updates: int
    bytes_up: int
    bytes_down: int
    messages: Mapping[str, int]
    last_down: str | None
    report: str | None
    failure: str | None


@dataclass(frozen=True)
class TokenRow:
    """A join token's terms."""

    federation: str
    uses_left: int
    expires_at: float


@dataclass(frozen=True)
class Seen:
    """What happened to a device since its row was written: its last request, payload bytes fetched, bytes by message.

    `last_down` is the JSON of the downlink after the last round, once the device has fetched it.
    """

    at: float
    bytes_down: int = 0
    messages: Mapping[str, int] = field(default_factory=dict)
    last_down: str | None = None


@dataclass(frozen=True)
class UpdateRow:
    """An update about to be acknowledged; `seen` goes into its device's row."""

    round: int
    device: str
    content: Content
    size: int
    received_at: float
    norm: float | None
    weight: float | None
    statistics: float | None
    seen: Seen


@dataclass(frozen=True)
class ClosedRow:
    """A round about to be closed: its record as JSON, the method's new global state, new records (None: dropped)."""

    round: int
    record: str
    values: Content
    records: Mapping[str, Content | None]
