"""pgoutput's messages: a small class for each, with the manual's names of fields ("Logical Replication Message Formats").

A message has what the server sent, and nothing else: no state of relations, transactions or types. A row is a Python tuple with one
value for each column of its relation:

    None              SQL NULL (in a key tuple also: "not a key column, not sent")
    UNCHANGED_TOAST   a large value that the server did not send, because the update did not change it. Never NULL
    bytes             the value in text form
    Binary            the value in binary form (option ``binary``)

``*_time_us`` are microseconds since 2000-01-01 UTC. A change has an ``xid`` only inside a stream block (protocol version 2 and
later): the id of the subtransaction. Treat messages as immutable. They are not frozen only because this would triple the cost of
making one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, TypeAlias

__all__ = [
    "IDENTITY_CODES",
    "REPLICA_IDENTITIES",
    "UNCHANGED_TOAST",
    "UNIX_2000_US",
    "Begin",
    "BeginPrepare",
    "Binary",
    "Column",
    "Commit",
    "CommitPrepared",
    "Delete",
    "Insert",
    "LogicalMessage",
    "Message",
    "Origin",
    "Prepare",
    "Relation",
    "RollbackPrepared",
    "Row",
    "StreamAbort",
    "StreamCommit",
    "StreamPrepare",
    "StreamStart",
    "StreamStop",
    "Truncate",
    "Type",
    "UnchangedToast",
    "Update",
    "Value",
]


class UnchangedToast(enum.Enum):
    """The type of the single value `UNCHANGED_TOAST`. It is an enumeration, so that copies and pickles give the same object."""

    UNCHANGED_TOAST = "u"

    def __repr__(self) -> str:
        return "UNCHANGED_TOAST"


UNCHANGED_TOAST: Final = UnchangedToast.UNCHANGED_TOAST


class Binary(bytes):
    """A value in its type's binary send format, as distinct from its text."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Binary) and bytes.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = bytes.__hash__


Value: TypeAlias = bytes | UnchangedToast | None
Row: TypeAlias = tuple[Value, ...]


@dataclass(slots=True)
class Begin:
    """'B'. ``final_lsn`` is the start of the commit record, the same as the Commit's ``commit_lsn``."""

    final_lsn: int
    commit_time_us: int
    xid: int


@dataclass(slots=True)
class Commit:
    """'C'. ``end_lsn``, right after the commit record, is the position that confirms the transaction."""

    flags: int
    commit_lsn: int
    end_lsn: int
    commit_time_us: int


@dataclass(slots=True)
class Origin:
    """'O'. The transaction was replayed from another server; ``lsn`` is its commit there."""

    lsn: int
    name: str


@dataclass(slots=True, frozen=True)
class Column:
    """A column of a Relation. ``type_modifier`` is atttypmod, -1 for none."""

    flags: int
    name: str
    type_id: int
    type_modifier: int

    @property
    def is_key(self) -> bool:
        """True if the column is part of the replica identity (with identity FULL: every column)."""
        return bool(self.flags & 1)


UNIX_2000_US: Final = 946_684_800_000_000
"""2000-01-01 UTC, from which PostgreSQL counts, in microseconds since 1970."""

REPLICA_IDENTITIES: Final = {"d": "default", "n": "nothing", "f": "full", "i": "index"}
"""The name of each replica identity (pg_class.relreplident)."""
IDENTITY_CODES: Final = {name: code for code, name in REPLICA_IDENTITIES.items()}


@dataclass(slots=True)
class Relation:
    """'R'. The description of a relation, which applies from this place of the stream on.

    ``replica_identity`` is a key of `REPLICA_IDENTITIES`.
    """

    xid: int | None
    relation_id: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[Column, ...]


@dataclass(slots=True)
class Type:
    """'Y'. A type that is not built in. For a domain, namespace and name are those of its base type."""

    xid: int | None
    type_id: int
    namespace: str
    name: str


@dataclass(slots=True)
class Insert:
    """'I'."""

    xid: int | None
    relation_id: int
    new: Row


@dataclass(slots=True)
class Update:
    """'U'. Has ``key`` ('K') if the key changed, or ``old`` ('O') if the identity is FULL; often neither, never both."""

    xid: int | None
    relation_id: int
    key: Row | None
    old: Row | None
    new: Row


@dataclass(slots=True)
class Delete:
    """'D'. Has ``old`` ('O') if the identity is FULL, else ``key`` ('K'), in which only the key columns are set."""

    xid: int | None
    relation_id: int
    key: Row | None
    old: Row | None


@dataclass(slots=True)
class Truncate:
    """'T'. One TRUNCATE statement with all its relations."""

    xid: int | None
    flags: int
    relation_ids: tuple[int, ...]

    @property
    def is_cascade(self) -> bool:
        """TRUNCATE … CASCADE."""
        return bool(self.flags & 1)

    @property
    def is_restart_identity(self) -> bool:
        """TRUNCATE … RESTART IDENTITY."""
        return bool(self.flags & 2)


@dataclass(slots=True)
class LogicalMessage:
    """'M' (the manual: "Message"). From pg_logical_emit_message(); ``content`` is any bytes.

    A message that is not transactional comes outside of any transaction, before the Begin of the transaction that wrote it.
    """

    xid: int | None
    flags: int
    lsn: int
    prefix: str
    content: bytes

    @property
    def is_transactional(self) -> bool:
        """True if the message belongs to its transaction, and disappears with it on rollback."""
        return bool(self.flags & 1)


@dataclass(slots=True)
class StreamStart:
    """'S'. Opens a block of changes of a transaction in progress. ``first_segment`` is set in the first block of this xid."""

    xid: int
    first_segment: bool


@dataclass(slots=True)
class StreamStop:
    """'E'. Closes the block."""


@dataclass(slots=True)
class StreamCommit:
    """'c'. A streamed transaction committed."""

    xid: int
    flags: int
    commit_lsn: int
    end_lsn: int
    commit_time_us: int


@dataclass(slots=True)
class StreamAbort:
    """'A'. Subtransaction ``subxid`` of ``xid`` is undone. If the two are equal, the whole transaction is undone.

    ``abort_lsn`` and ``abort_time_us`` are sent only with streaming=parallel (protocol version 4).
    """

    xid: int
    subxid: int
    abort_lsn: int | None
    abort_time_us: int | None


@dataclass(slots=True)
class BeginPrepare:
    """'b'. Like Begin, for a transaction that the server sends at its PREPARE."""

    prepare_lsn: int
    end_lsn: int
    prepare_time_us: int
    xid: int
    gid: str


@dataclass(slots=True)
class Prepare:
    """'P'. Ends the transaction of a BeginPrepare: it is prepared, but not committed."""

    flags: int
    prepare_lsn: int
    end_lsn: int
    prepare_time_us: int
    xid: int
    gid: str


@dataclass(slots=True)
class CommitPrepared:
    """'K'. The prepared transaction ``gid`` is committed."""

    flags: int
    commit_lsn: int
    end_lsn: int
    commit_time_us: int
    xid: int
    gid: str


@dataclass(slots=True)
class RollbackPrepared:
    """'r'. The prepared transaction ``gid`` is rolled back."""

    flags: int
    prepare_end_lsn: int
    rollback_end_lsn: int
    prepare_time_us: int
    rollback_time_us: int
    xid: int
    gid: str


@dataclass(slots=True)
class StreamPrepare:
    """'p'. A streamed transaction is prepared."""

    flags: int
    prepare_lsn: int
    end_lsn: int
    prepare_time_us: int
    xid: int
    gid: str


Message: TypeAlias = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | Insert
    | Update
    | Delete
    | Truncate
    | LogicalMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | CommitPrepared
    | RollbackPrepared
    | StreamPrepare
)
