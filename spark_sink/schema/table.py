"""A PostgreSQL table as a warehouse records it: its names and its versions."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import LSN, format_lsn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cdcpipe.pgoutput.messages import Relation

__all__ = [
    "AFTER_ALL",
    "DDL",
    "EXACT",
    "MESSAGES",
    "NATIVE",
    "NO_COPIES",
    "SCHEMA_HISTORY",
    "TYPES",
    "Fill",
    "Place",
    "Placed",
    "SchemaError",
    "Table",
    "Version",
    "copies_until",
    "gone_columns",
    "gone_from",
    "has_key",
    "key_lost_at",
    "mergeable_lsn",
    "replica_begin",
    "versions_from_json",
]


class SchemaError(CdcpipeError):
    """A table's description and a schema do not fit together."""


EXACT, NATIVE = TYPES = ("exact", "native")
"""The two ways to type the columns of a warehouse; see schema/types.py."""

Place: TypeAlias = tuple[int, int]
"""Where a change is in the stream: the LSN at which its transaction ends, and its ordinal in the transaction."""
AFTER_ALL: Final[Place] = (1 << 64, 0)
"""A place after every change."""


@dataclass(frozen=True, slots=True)
class Placed:
    """What begins at a change, or stands before it."""

    end_lsn: int
    ordinal: int

    @property
    def place(self) -> Place:
        """The place of that change."""
        return self.end_lsn, self.ordinal


@dataclass(frozen=True, slots=True, order=True)
class Table:
    """A PostgreSQL table, by the name under which its first change came. Its directories have this name for ever.

    The rule: two tables are equal if they have the same directories, whatever they are called. `str` is what PostgreSQL calls the
    table now: ``Table("public", "a", called=Table("public", "b"))`` prints ``public.b``. schema/names.py knows these names.
    """

    schema: str
    name: str
    number: int = 0
    """The table's OID, if the directory without a number belongs to another table; otherwise 0."""
    called: Table | None = field(default=None, compare=False)
    """The table's name now, if it is another one."""

    @property
    def now(self) -> Table:
        """The name that the table has now, as a table of its own."""
        return self.called or self

    @property
    def copying(self) -> str:
        """The shell command that copies the table's rows, for hints."""
        return f"cdcpipe-spark snapshot --table {shlex.quote(str(self))}"

    @classmethod
    def of(cls, relation: Relation) -> Table:
        """Return the name of a table that the server describes."""
        return cls(relation.namespace, relation.name)

    def __str__(self) -> str:
        now = self.now
        text = f"{now.schema}.{now.name}" if now.schema else now.name
        return f"{text}~{now.number}" if now.number else text

    def to_json(self) -> dict[str, Any]:
        """Return the table's directory as an object for files of the warehouse."""
        return {"schema": self.schema, "name": self.name} | ({"number": self.number} if self.number else {})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Table:
        """Read an object that has the members of `to_json`, and perhaps others."""
        return cls(str(value["schema"]), str(value["name"]), int(value.get("number", 0)))


MESSAGES: Final = Table("", "_cdc_message")
"""The table of the logical messages. No PostgreSQL table has this name, because each is in a schema."""


SCHEMA_HISTORY: Final = Table("", "_cdc_schema_history")
"""The table of all versions of the tables' schemas, named likewise."""


DDL: Final = Table("", "_cdc_ddl")
"""The table of the captured DDL, named likewise."""

NO_COPIES: Final = (MESSAGES, DDL, SCHEMA_HISTORY)
"""These have changelogs, but are no tables of the database: no copy makes up for what they lose."""


@dataclass(frozen=True, slots=True)
class Fill:
    """The value of a new column in the rows from before the change, which the stream does not contain.

    The value is that of the column ``source``, the column's name before it was renamed. If ``source`` is None, it is ``value``:
    text as PostgreSQL writes it, None for NULL.

    With ``or_own`` a row without a value in ``source`` keeps the one that it has: some of these rows came before the changelog had
    the column ``source``.
    """

    column: str
    source: str | None = None
    value: str | None = None
    or_own: bool = False


@dataclass(frozen=True, slots=True)
class Version(Placed):
    """The key and the columns of a table from a position on, until the next version.

    - ``ordinal`` is 0, unless the same transaction has earlier changes of the table. So the version's description may have a later
      place (`SchemaHistory.description_of`).
    - ``relation_id`` is the table's OID. Another OID under the same name is another table: the first was dropped or renamed.
    - ``key`` names the columns that identify a row, in the changelog's spelling; empty if there are none.
    - ``columns`` are the columns of the changelog with the key's values: ``id__string`` once ``id`` has become text.
    - ``fills`` are applied to the rows from before the position.
    - ``snapshot`` is set if the table's rows were copied at this position. It has the columns of these rows: their numbers in
      PostgreSQL, and their names in the changelog.
    - ``described`` has these columns as PostgreSQL described them: number, name, type id, type modifier. Snapshots
      of older versions of cdcpipe lack it.
    - ``is_whole`` is set if no publication had a list of the table's columns at the snapshot. Snapshots of older versions lack it.
    - ``copied_at`` is when the snapshot's rows came to the tables, in seconds since 1970, by the clock of the machine that copied
      them. From a standby, their commit time may be days before that. Snapshots of older versions lack it.
    - ``gone`` names the changelog's columns that the table does not have any more. A replica does not have them either
      (changelog/gone_columns.py). A snapshot has none: `gone_columns` says which columns are gone then.
    """

    relation_id: int
    key: tuple[str, ...]
    columns: tuple[str, ...]
    fills: tuple[Fill, ...] = ()
    snapshot: tuple[tuple[int, str], ...] = ()
    gone: tuple[str, ...] = ()
    described: tuple[tuple[int, str, int, int], ...] = ()
    is_whole: bool = False
    copied_at: int | None = None

    @property
    def named(self) -> set[str]:
        """The columns that a changelog with changes under this version has."""
        return {*self.columns, *(fill.column for fill in self.fills)}

    def says_nothing_after(self, other: Version) -> bool:
        """Tell whether this version changes nothing compared with ``other``, the one before it."""
        return self.cuts_nothing_after(other) and self.gone == other.gone

    def cuts_nothing_after(self, other: Version) -> bool:
        """Tell whether the rows so far, and their key, stay as they were under ``other``. Columns may be gone."""
        same = (self.relation_id, self.key, self.columns) == (other.relation_id, other.key, other.columns)
        return same and not self.fills and not self.snapshot

    def to_json(self) -> dict[str, Any]:
        """Return the object for the versions file."""
        return {
            "end_lsn": format_lsn(self.end_lsn),
            "ordinal": self.ordinal,
            "relation_id": self.relation_id,
            "key": list(self.key),
            "columns": list(self.columns),
            "fills": [{name: value for name, value in asdict(fill).items() if value is not False} for fill in self.fills],
            "snapshot": [list(column) for column in self.snapshot],
            "gone": list(self.gone),
            "described": [list(column) for column in self.described],
            "is_whole": self.is_whole,
            "copied_at": self.copied_at,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Version:
        """Read an object of ``to_json``. Files of older versions of cdcpipe lack some members."""
        return cls(
            int(LSN.parse(value["end_lsn"])),  # a plain int, because it is passed to Spark
            int(value.get("ordinal", 0)),
            int(value["relation_id"]),
            tuple(value["key"]),
            tuple(value["columns"]),
            tuple(Fill(**fill) for fill in value.get("fills", ())),
            tuple((int(number), str(name)) for number, name in value.get("snapshot", ())),
            tuple(map(str, value.get("gone", ()))),
            tuple((int(n), str(name), int(kind), int(modifier)) for n, name, kind, modifier in value.get("described", ())),
            bool(value.get("is_whole", False)),
            None if value.get("copied_at") is None else int(value["copied_at"]),
        )


def versions_from_json(values: Iterable[dict[str, Any]]) -> tuple[Version, ...]:
    """Read objects of `Version.to_json`. Equal columns are kept once: a table that is copied every night has the same each time."""
    shared: dict[Any, Any] = {}
    found = map(Version.from_json, values)
    return tuple(
        replace(
            each,
            snapshot=shared.setdefault(each.snapshot, each.snapshot),
            described=shared.setdefault(each.described, each.described),
        )
        for each in found
    )


def gone_from(versions: Iterable[Version]) -> Iterator[tuple[int, frozenset[str]]]:
    """Return, for each version, the LSN at which it begins, and the changelog's columns that a replica does not have from there on.

    A snapshot brings back the columns that it has.
    """
    gone: frozenset[str] = frozenset()
    for version in versions:
        gone = gone - {name for _, name in version.snapshot} if version.snapshot else frozenset(version.gone)
        yield version.end_lsn, gone


def gone_columns(versions: Iterable[Version], until_lsn: int) -> frozenset[str]:
    """Return the changelog's columns that a replica at this LSN does not have."""
    found: frozenset[str] = frozenset()
    for lsn, gone in gone_from(versions):
        if lsn > until_lsn:
            break
        found = gone
    return found


def copies_until(versions: Iterable[Version], lsn: int = AFTER_ALL[0]) -> frozenset[int]:
    """Return the LSNs of a table's snapshots up to an LSN."""
    return frozenset(version.end_lsn for version in versions if version.snapshot and version.end_lsn <= lsn)


def has_key(versions: Iterable[Version]) -> bool:
    """Tell whether a table with these versions has, or had, a key. Only such a table has a replica."""
    return any(version.key for version in versions)


def replica_begin(versions: Sequence[Version]) -> int | None:
    """Return the LSN at which the replica begins that does not exist yet: before the table's first change. None without a key."""
    return versions[0].end_lsn - 1 if has_key(versions) else None


def key_lost_at(versions: Sequence[Version], until_lsn: int) -> Place | None:
    """Return the place up to ``until_lsn`` from which on no key tells the rows apart; None if there is none.

    The key of a later version of the same table tells them apart, too (replica/pieces.py).
    """
    keyed: set[int] = set()
    lost = None
    for version in reversed(versions):
        if version.key:
            keyed.add(version.relation_id)
        if version.end_lsn <= until_lsn:
            if version.relation_id in keyed:
                break
            lost = version.place
    return lost


def mergeable_lsn(versions: Sequence[Version], lsn: int) -> int:
    """Return up to where a replica can have the changes of a changelog that is at ``lsn``: not beyond the loss of its key."""
    if not has_key(versions):
        return 0
    lost = key_lost_at(versions, lsn)
    return lsn if lost is None else lost[0] - 1
