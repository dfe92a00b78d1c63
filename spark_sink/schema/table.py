"""A table of the source as a warehouse knows it: its name, its versions, and what its columns are like."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import LSN, format_lsn

__all__ = ["EXACT", "MESSAGES", "NATIVE", "SCHEMA_HISTORY", "TYPES", "Fill", "SchemaError", "Table", "Version"]


class SchemaError(CdcpipeError):
    """A table's description and a schema do not fit together."""


EXACT, NATIVE = TYPES = ("exact", "native")
"""What the columns of a warehouse are like: schema/types.py."""


@dataclass(frozen=True, slots=True, order=True)
class Table:
    """A table of the source, by the name that it has in the stream."""

    schema: str
    name: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}" if self.schema else self.name


MESSAGES: Final = Table("", "_cdc_message")
"""What the logical messages are the rows of. No table of a source has it for a name: each is in a schema."""


SCHEMA_HISTORY: Final = Table("", "_cdc_schema_history")
"""So for the versions of the tables' schemas."""


@dataclass(frozen=True, slots=True)
class Fill:
    """What a column that is new has in the rows from before, of which the stream does not tell.

    The value of the column ``source``, whose name it was; or if that is None ``value``, as PostgreSQL writes it, None for NULL.
    """

    column: str
    source: str | None = None
    value: str | None = None


@dataclass(frozen=True, slots=True)
class Version:
    """What holds for a table's changes from a position on, until the next version.

    ``ordinal`` is 0 unless changes of the table precede it in its transaction. ``relation_id`` is the table's OID: another one
    under the same name is another table, the first having been dropped or renamed. ``key`` names the columns that identify a
    row, as the changelog spells them, empty when nothing does. ``columns`` are those of the changelog that hold the key's
    values: ``id__string`` once ``id`` has become text. ``fills`` are done with the rows from before the position. With a
    ``snapshot`` the table begins anew here, with rows that have these columns: their number in PostgreSQL, the changelog's name.
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
        """Where among a table's changes it begins."""
        return self.end_lsn, self.ordinal

    def says_nothing_after(self, other: Version) -> bool:
        """Tell whether all is as it was in the version before this one."""
        same = (self.relation_id, self.key, self.columns) == (other.relation_id, other.key, other.columns)
        return same and not self.fills and not self.snapshot

    def to_json(self) -> dict[str, Any]:
        """Return what the versions file holds."""
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
        """Read what ``to_json`` gave; a file of an older program has neither ordinals nor fills nor snapshots."""
        return cls(
            int(LSN.parse(value["end_lsn"])),  # Spark is given it, and knows no LSN
            int(value.get("ordinal", 0)),
            int(value["relation_id"]),
            tuple(value["key"]),
            tuple(value["columns"]),
            tuple(Fill(**fill) for fill in value.get("fills", ())),
            tuple((int(number), str(name)) for number, name in value.get("snapshot", ())),
        )
