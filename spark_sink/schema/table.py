"""A PostgreSQL table as a warehouse records it: its name and its versions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import LSN, format_lsn

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DDL", "EXACT", "MESSAGES", "NATIVE", "SCHEMA_HISTORY", "TYPES", "Fill", "SchemaError", "Table", "Version", "has_key"]


class SchemaError(CdcpipeError):
    """A table's description and a schema do not fit together."""


EXACT, NATIVE = TYPES = ("exact", "native")
"""The two ways to type the columns of a warehouse; see schema/types.py."""


@dataclass(frozen=True, slots=True, order=True)
class Table:
    """A PostgreSQL table, by its name in the stream."""

    schema: str
    name: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}" if self.schema else self.name


MESSAGES: Final = Table("", "_cdc_message")
"""The table of the logical messages. No PostgreSQL table has this name, because each is in a schema."""


SCHEMA_HISTORY: Final = Table("", "_cdc_schema_history")
"""The table of all versions of the tables' schemas, named likewise."""


DDL: Final = Table("", "_cdc_ddl")
"""The table of the captured DDL, named likewise."""


@dataclass(frozen=True, slots=True)
class Fill:
    """The value of a new column in the rows from before the change, which the stream does not contain.

    The value is that of the column ``source``, the column's name before it was renamed. If ``source`` is None, it is ``value``:
    text as PostgreSQL writes it, None for NULL.
    """

    column: str
    source: str | None = None
    value: str | None = None


@dataclass(frozen=True, slots=True)
class Version:
    """The key and the columns of a table from a position on, until the next version.

    - ``ordinal`` is 0, unless the same transaction has earlier changes of the table.
    - ``relation_id`` is the table's OID. Another OID under the same name is another table: the first was dropped or renamed.
    - ``key`` names the columns that identify a row, in the changelog's spelling; empty if there are none.
    - ``columns`` are the columns of the changelog with the key's values: ``id__string`` once ``id`` has become text.
    - ``fills`` are applied to the rows from before the position.
    - ``snapshot`` is set if the table's rows were copied at this position. It has the columns of these rows: their numbers in
      PostgreSQL, and their names in the changelog.
    """

    end_lsn: int
    ordinal: int
    relation_id: int
    key: tuple[str, ...]
    columns: tuple[str, ...]
    fills: tuple[Fill, ...] = ()
    snapshot: tuple[tuple[int, str], ...] = ()

    @property
    def place(self) -> tuple[int, int]:
        """The place among the table's changes at which the version begins."""
        return self.end_lsn, self.ordinal

    def says_nothing_after(self, other: Version) -> bool:
        """Tell whether this version changes nothing compared with ``other``, the one before it."""
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
            "fills": [asdict(fill) for fill in self.fills],
            "snapshot": [list(column) for column in self.snapshot],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Version:
        """Read an object of ``to_json``. Files of older versions of cdcpipe lack ordinals, fills and snapshots."""
        return cls(
            int(LSN.parse(value["end_lsn"])),  # a plain int, because it is passed to Spark
            int(value.get("ordinal", 0)),
            int(value["relation_id"]),
            tuple(value["key"]),
            tuple(value["columns"]),
            tuple(Fill(**fill) for fill in value.get("fills", ())),
            tuple((int(number), str(name)) for number, name in value.get("snapshot", ())),
        )


def has_key(versions: Iterable[Version]) -> bool:
    """Tell whether a table with these versions has, or had, a key. Only such a table has a replica."""
    return any(version.key for version in versions)
