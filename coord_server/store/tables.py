"""The tables of the coordinator's database. `metadata` holds the queries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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

METADATA = MetaData()

UP = ("enrol", "report", "failure")
DOWN = ("enrol", "work", "receipt", "bundle")
"""Kinds of messages that are no payloads, each with a column of its bytes: `up_enrol`, `down_work`, ..."""
MESSAGES = (*(f"up_{kind}" for kind in UP), *(f"down_{kind}" for kind in DOWN))

NAME = String(64)  # of a federation or device, or a SHA-256


def _key(name: str, kind: Any = NAME) -> Column[Any]:
    return Column(name, kind, primary_key=True)


def _column(name: str, kind: Any = NAME, default: Any = None) -> Column[Any]:
    return Column(name, kind, nullable=False, default=default)


store = Table("store", METADATA, _key("id"))  # one row: the data folder's marker
bundles = Table("bundles", METADATA, _key("digest"), _column("added_at", Float))
federations = Table(
    "federations",
    METADATA,
    _key("id"),
    _column("config", Text),  # FederationConfig as JSON
    _column("bundle"),  # the digest in it
    _column("version", BigInteger, 0),  # counts the commits
    _column("first", BigInteger, 0),  # the version it was created with, drawn at random
    _column("state", Text),  # the engine's State as JSON
    _column("values_round", Integer, 0),  # the last closed round, 0 at first
    _column("values_sha256"),  # the method's global state after it
    Column("values_content", LargeBinary),  # NULL when it is a blob, as in every column of contents
    _column("ready", Integer, 0),  # devices that asked for work and are not removed
    _column("created_at", Float),
)
devices = Table(
    "devices",
    METADATA,
    _key("federation"),
    _key("device"),
    _column("credential"),  # SHA-256 of the device's credential
    _column("ready", Boolean, False),  # it has asked for work
    _column("removed", Boolean, False),
    _column("enrolled_at", Float),
    _column("last_seen_at", Float),
    _column("updates", Integer, 0),
    _column("bytes_up", BigInteger, 0),
    _column("bytes_down", BigInteger, 0),
    *(_column(name, BigInteger, 0) for name in MESSAGES),
    Column("last_down", Text),  # bytes by kind of the downlink after the last round, as JSON, once it is fetched
    Column("report", Text),  # Report as JSON
    Column("failure", Text),  # Failure as JSON, until an update of it is accepted
    Column("cost", String(64)),  # of its last update, as its header said it; NULL when it said nothing
    Column("agent", String(64)),  # its User-Agent
    UniqueConstraint("federation", "credential"),
    Index("devices_by_credential", "credential"),
    Index("devices_by_presence", "federation", "last_seen_at"),
)
tokens = Table(
    "tokens",
    METADATA,
    _key("token"),  # SHA-256 of the join token
    _column("federation"),
    _column("uses_left", Integer),
    _column("expires_at", Float),
)
viewers = Table(
    "viewers",
    METADATA,
    _key("token"),  # SHA-256 of a token that may read
    _column("expires_at", Float),
)
updates = Table(
    "updates",
    METADATA,
    _key("federation"),
    _key("round", Integer),
    _key("device"),
    _column("sha256"),
    _column("size", BigInteger),
    _column("received_at", Float),
    Column("norm", Float),  # Influence; NULL when the method bounds it by construction
    Column("weight", Float),
    Column("statistics", Float),
    Column("cost", String(64)),  # what the round cost the device, as its header said it; NULL when it said nothing
    Column("content", LargeBinary),  # dropped when the round is closed; the row when one of a later round is
)
rounds = Table("rounds", METADATA, _key("federation"), _key("round", Integer), _column("record", Text))  # Round as JSON
records = Table(
    "records",
    METADATA,
    _key("federation"),
    _key("device"),
    _column("round", Integer),  # the round that wrote it
    _column("sha256"),  # what the method keeps about the device
    Column("content", LargeBinary),
)


@dataclass(frozen=True)
class Head:
    """The changing columns of a federation: the engine's `state` (JSON) at `version`.

    `values_round` is the last closed round. `ready` devices have asked for work and are not removed. `first` tells
    federations of one name apart: it is the version with which this one was created.
    """

    version: int
    first: int
    state: str
    values_round: int
    ready: int
    created_at: float = 0.0


@dataclass(frozen=True)
class Known:
    """A federation as watching it needs it: two versions as in `Head`."""

    version: int
    first: int


@dataclass
class Seen:
    """What happened to a device since its row was written: its last request, payload bytes fetched, bytes by message.

    `last_down` is the downlink after the last round, once the device has fetched it, and `report` the device's report,
    both as JSON; `agent` is its User-Agent.
    """

    at: float
    bytes_down: int = 0
    messages: dict[str, int] = field(default_factory=dict)
    last_down: str | None = None
    report: str | None = None
    agent: str | None = None

    def add(self, other: Seen) -> None:
        """Add what happened before."""
        self.at = max(self.at, other.at)
        self.bytes_down += other.bytes_down
        for name, size in other.messages.items():
            self.messages[name] = self.messages.get(name, 0) + size
        self.last_down = self.last_down or other.last_down
        self.report = self.report or other.report
        self.agent = self.agent or other.agent
