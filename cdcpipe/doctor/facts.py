"""What the checks know: facts about servers, the slot, publications and tables, as plain frozen data. ``survey`` asks for them.

A fact that the server does not show this user, or does not have in its version, is None or missing, and never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cdcpipe.lsn import LSN
from cdcpipe.replication.tables import PublishedTable, TypeWithoutBinary

__all__ = [
    "Asked",
    "Facts",
    "LeftOut",
    "Partition",
    "Publication",
    "Restriction",
    "Role",
    "Server",
    "SlotState",
    "Table",
    "Transaction",
    "Unreachable",
    "WALRate",
]


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody is going to do: stream from a slot, which is made if ``create``, and copy the tables first if ``copy``."""

    slot: str
    plugin: str = "pgoutput"
    publications: tuple[str, ...] = ()
    tables: tuple[tuple[str, str], ...] = ()
    create: bool = False
    copy: bool = False


@dataclass(frozen=True, slots=True)
class SlotState:
    """A row of pg_replication_slots. ``failover`` and ``synced`` are None before 17."""

    name: str
    plugin: str | None
    slot_type: str
    database: str | None
    temporary: bool
    active_pid: int | None
    restart_lsn: LSN | None
    confirmed_flush_lsn: LSN | None
    wal_status: str | None
    safe_wal_bytes: int | None
    two_phase: bool
    invalidation_reason: str | None = None
    failover: bool | None = None
    synced: bool | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """One server as it describes itself. ``settings`` are those of pg_settings, in the units of that view."""

    address: str
    version: int
    version_text: str
    database: str
    encoding: str
    is_standby: bool
    settings: Mapping[str, str]
    wal_lsn: LSN
    slots: tuple[SlotState, ...]
    walsenders: int
    has_dbname: bool | None
    """Whether primary_conninfo names a database; None where that is not shown, or it is empty."""
    clock_ahead_s: float
    """So much the server's clock is ahead of ours; less than the time that the question took counts as nothing."""

    def slot(self, name: str) -> SlotState | None:
        """Return the slot of this name."""
        return next((slot for slot in self.slots if slot.name == name), None)

    @property
    def physical_slots(self) -> tuple[SlotState, ...]:
        """The slots of standbys."""
        return tuple(slot for slot in self.slots if slot.slot_type == "physical" and not slot.temporary)


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A server that the connection names, and that could not be asked."""

    address: str
    problem: str


@dataclass(frozen=True, slots=True)
class Role:
    """The user, and what it may do."""

    name: str
    is_superuser: bool
    can_replicate: bool
    sees_others: bool
    """Whether it is shown what other users' sessions do (pg_read_all_stats)."""
    can_create: bool
    """Whether it may make objects in the database, such as a publication."""


@dataclass(frozen=True, slots=True)
class WALRate:
    """How fast the server writes WAL: in the ``seconds`` in which it was watched, and on average since its statistics began."""

    bytes_per_s: float
    seconds: float
    average: float | None

    @property
    def highest(self) -> float:
        """The rate to reckon with."""
        return max(self.bytes_per_s, self.average or 0.0)


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction that has written: of a session (``pid``), or a prepared one (``gid``). Not every user is told its age."""

    pid: int | None
    gid: str | None
    database: str | None
    age_s: float | None


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication that is there. ``schemas``: it has tables by their schema."""

    name: str
    all_tables: bool
    schemas: tuple[str, ...]
    operations: frozenset[str]
    """Of insert, update, delete, truncate: those that are published."""


@dataclass(frozen=True, slots=True)
class Partition:
    """What has rows of a published table: a leaf partition, or the table itself.

    ``identity`` is empty with REPLICA IDENTITY FULL, and None where nothing identifies a row.
    """

    schema: str
    name: str
    replica_identity: str
    identity: tuple[str, ...] | None
    generated: tuple[str, ...] = ()
    """The generated columns."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """A column list or a row filter of one publication on one table, and the columns that it names."""

    publication: str
    schema: str
    name: str
    operations: frozenset[str]
    columns: tuple[str, ...] | None
    """The column list; None: all columns."""
    filtered_by: tuple[str, ...] | None
    """The columns in the row filter; None: there is none."""
    partitions: tuple[Partition, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table that the stream has, or would have."""

    published: PublishedTable
    is_readable: bool
    hides_rows: bool
    """Whether row-level security hides rows from this user."""
    is_owned: bool
    size_bytes: int
    """About; of all partitions."""
    identity: tuple[str, ...] | None
    """What identifies a row of the table itself, as of a `Partition`."""
    partitions: tuple[Partition, ...]
    column_sets: int = 1
    """How many different sets of columns the publications have of it."""

    @property
    def name(self) -> str:
        """``schema.name``."""
        return f"{self.published.schema}.{self.published.name}"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A table whose changes are not in the WAL, among tables that are published: ``kind`` is unlogged or foreign.

    ``parent`` is the published table of which it is a partition.
    """

    schema: str
    name: str
    kind: str
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the checks judge. ``others`` are the other servers that the connection names."""

    asked: Asked
    server: Server
    role: Role
    others: tuple[Server | Unreachable, ...] = ()
    replication_problem: str | None = None
    """Why no connection for replication could be made."""
    wal_rate: WALRate | None = None
    transactions: tuple[Transaction, ...] = ()
    publications: tuple[Publication, ...] = ()
    tables: tuple[Table, ...] = ()
    restrictions: tuple[Restriction, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    without_binary: tuple[TypeWithoutBinary, ...] = ()
    unknown_tables: tuple[str, ...] = ()
    """Those of ``asked.tables`` that can't be published, or are not there."""

    @property
    def slot(self) -> SlotState | None:
        """The slot, if it is there."""
        return self.server.slot(self.asked.slot)
