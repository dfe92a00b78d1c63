"""The facts that the checks judge: about servers, the slot, publications and tables, as frozen data. ``survey`` collects them.

If the server does not show a fact to this user, or its version does not have it, the fact is None or missing. It is never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cdcpipe.ddl.script import Settings
from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import LSN
from cdcpipe.publishing import NewPublication
from cdcpipe.replication.selected import Selection
from cdcpipe.replication.slots import Slot
from cdcpipe.replication.tables import PublishedTable, TypeWithoutBinary, Unreadable

__all__ = [
    "Asked",
    "Facts",
    "LeftOut",
    "Partition",
    "Publication",
    "Restriction",
    "Role",
    "Server",
    "Table",
    "Transaction",
    "Unreachable",
    "WALRate",
]


@dataclass(frozen=True, slots=True)
class Asked:
    """The task that the user plans: to stream from a slot.

    ``new`` says what a publication that does not exist will publish. With ``create`` the slot is created first, with ``copy`` the
    tables are copied first.
    """

    slot: str
    plugin: str = "pgoutput"
    publications: tuple[str, ...] = ()
    new: NewPublication = field(default_factory=NewPublication)
    create: bool = False
    copy: bool = False


@dataclass(frozen=True, slots=True)
class Server:
    """One server, as it describes itself. ``settings`` come from pg_settings, in the units of that view."""

    address: str
    version: int
    version_text: str
    database: str
    encoding: str
    is_standby: bool
    settings: Mapping[str, str]
    wal_lsn: LSN
    slots: tuple[Slot, ...]
    walsenders: int
    has_dbname: bool | None
    """Whether primary_conninfo names a database; None if the setting is empty, or hidden from this user."""
    clock_ahead_s: float
    """How far the server's clock is ahead of ours. A difference smaller than the duration of the query counts as 0."""

    @property
    def copies_slots(self) -> bool:
        """Whether the server is a standby that copies its primary's slots, as `cdcpipe.replication.server.copies_slots` tells."""
        return self.is_standby and self.settings.get("sync_replication_slots") == "on"

    def slot(self, name: str) -> Slot | None:
        """Return the slot of this name, or None."""
        return next((slot for slot in self.slots if slot.name == name), None)

    @property
    def physical_slots(self) -> tuple[Slot, ...]:
        """The physical slots, which standbys use. Temporary slots are left out."""
        return tuple(slot for slot in self.slots if slot.slot_type == "physical" and not slot.temporary)


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A server that the connection parameters name, and that could not be asked."""

    address: str
    problem: str


@dataclass(frozen=True, slots=True)
class Role:
    """The user, and its privileges."""

    name: str
    is_superuser: bool
    can_replicate: bool
    """Whether the user has the attribute REPLICATION, or is a member of rds_replication. Amazon RDS, where no user has the
    attribute, decides by that role."""
    sees_others: bool
    """Whether the server shows other users' sessions to this user (pg_read_all_stats)."""
    can_create: bool
    """Whether the user may create objects in the database, such as a publication."""


@dataclass(frozen=True, slots=True)
class WALRate:
    """How fast the server writes WAL: measured over ``seconds``, and on average since its statistics began."""

    bytes_per_s: float
    seconds: float
    average: float | None

    @property
    def highest(self) -> float:
        """The higher one of the two rates. The checks calculate with it."""
        return max(self.bytes_per_s, self.average or 0.0)


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction that has written: one of a session (``pid``), or a prepared one (``gid``). Its age may be hidden from us."""

    pid: int | None
    gid: str | None
    database: str | None
    age_s: float | None


@dataclass(frozen=True, slots=True)
class Publication:
    """An existing publication. ``schemas``: it publishes all tables of some schemas."""

    name: str
    all_tables: bool
    schemas: tuple[str, ...]
    operations: frozenset[str]
    """The published operations, of insert, update, delete and truncate."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A relation that holds rows of a published table: a leaf partition, or the table itself.

    ``identity`` is empty with REPLICA IDENTITY FULL, and None if rows have no replica identity.
    """

    schema: str
    name: str
    replica_identity: str
    identity: tuple[str, ...] | None
    generated: tuple[str, ...] = ()
    """The generated columns."""
    virtual: tuple[str, ...] = ()
    """Those of them that are virtual. No publication has them."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """The column list and the row filter of one publication for one table."""

    publication: str
    schema: str
    name: str
    operations: frozenset[str]
    columns: tuple[str, ...] | None
    """The column list; None means all columns."""
    filtered_by: tuple[str, ...] | None
    """The columns in the row filter; None means that there is no row filter."""
    partitions: tuple[Partition, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose changes are in the stream, or will be."""

    published: PublishedTable
    unreadable: tuple[Unreadable, ...]
    """The table, or partitions of it, that this user may not read."""
    hides_rows: bool
    """Whether row-level security hides rows from this user."""
    is_owned: bool
    size_bytes: int
    """An estimate; for a partitioned table, over all its partitions."""
    identity: tuple[str, ...] | None
    """The replica identity of the table itself, in the form of `Partition.identity`."""
    partitions: tuple[Partition, ...]
    column_sets: int = 1
    """The number of different sets of columns that the publications have for this table."""

    @property
    def name(self) -> str:
        """``schema.name``."""
        return f"{self.published.schema}.{self.published.name}"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A table whose changes are not in the WAL, although a publication covers it. ``kind`` is unlogged or foreign.

    If the table is a partition, ``parent`` is the published table to which it belongs.
    """

    schema: str
    name: str
    kind: str
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the checks judge. ``others`` are the other servers that the connection parameters name."""

    asked: Asked
    server: Server
    role: Role
    others: tuple[Server | Unreachable, ...] = ()
    service_roles: tuple[str, ...] = ()
    """Those of `cdcpipe.sql.SERVICE_ROLES` that the server has. If there is one, this is a managed service: its administrator's
    role may do some of what takes a superuser elsewhere."""
    replication_problem: str | None = None
    """Why no connection for replication could be opened; None if one could."""
    replication_hint: str = ""
    """What the user can do about that."""
    timeline: int | None = None
    """The timeline of the connected server; None if no walsender could be asked."""
    wal_rate: WALRate | None = None
    transactions: tuple[Transaction, ...] | None = ()
    """The running transactions that have an id; None on a standby, where they are the primary's."""
    publications: tuple[Publication, ...] = ()
    tables: tuple[Table, ...] = ()
    restrictions: tuple[Restriction, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    without_binary: tuple[TypeWithoutBinary, ...] = ()
    ddl_triggers: Mapping[str, str] = field(default_factory=dict)
    """The event triggers of DDL capture, with their state as in pg_event_trigger.evtenabled; empty if it is not installed."""
    ddl_settings: Settings | None = None
    """What is installed of DDL capture; None if nothing is, or if its functions are of no known version."""
    selection: Selection | None = None
    """The tables of a publication that has to be created; None if there is none to create, or no tables were found."""
    selection_problem: CdcpipeError | None = None
    """Why no tables were found."""

    @property
    def primary(self) -> Server | None:
        """The primary, if the connection parameters lead to it."""
        return next((each for each in (self.server, *self.others) if isinstance(each, Server) and not each.is_standby), None)

    @property
    def slot(self) -> Slot | None:
        """The slot, or None if it does not exist."""
        return self.server.slot(self.asked.slot)
