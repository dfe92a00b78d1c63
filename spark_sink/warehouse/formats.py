"""The table formats of a warehouse: their properties, and facts about a table from its files. No Spark.

changelog/ has an object for each format that reads and writes its tables (changelog/tables.py). Code that depends on the abilities
of a format asks `Warehouse.format` for them. It never compares the name of the format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.delta import log as delta_log
from spark_sink.delta.log import TableEnd
from spark_sink.warehouse import appends

if TYPE_CHECKING:
    from pathlib import Path

    from spark_sink.delta.log import LogCache, TableState

__all__ = [
    "ANY",
    "APART",
    "COLUMN_NAMES",
    "DELETES",
    "FORMATS",
    "HARD",
    "HISTORY",
    "KEEP",
    "OFF",
    "READERS",
    "SANITIZE",
    "SOFT",
    "SPARK",
    "TABLE",
    "VIEW",
    "WIDEN",
    "YES",
    "Format",
    "TableFacts",
    "table_format",
]

SPARK, ANY = READERS = ("spark", "any")
"""For which readers replicas are written. With ``spark`` they have deletion vectors, which not every reader knows."""
YES, APART = WIDEN = ("yes", "apart")
"""What becomes of a column whose type gets wider: it is widened, or the new values go to another column beside it."""

KEEP, SANITIZE = COLUMN_NAMES = ("keep", "sanitize")
"""How columns are called whose names need column mapping: as in PostgreSQL, or by names that need none (schema/types.py)."""
OFF, VIEW, TABLE = HISTORY = ("off", "view", "table")
"""Whether each table gets a history that SQL can query: none, a view in the catalog, or a table that the pipeline maintains."""
HARD, SOFT = DELETES = ("hard", "soft")
"""What becomes of a deleted row in a replica: it is removed, or it stays, with the time in ``_cdc_deleted_at``."""


@dataclass(frozen=True, slots=True)
class TableFacts:
    """Facts about a table from its files; None for unknown facts. The table has all changes up to ``lsn``; 0 if it has none."""

    lsn: int
    rows: int | None = None
    files: int | None = None
    size: int | None = None
    version: int | None = None
    written_ms: int | None = None


class Format(ABC):
    """A table format. Its methods take the path of a table's directory."""

    name: ClassVar[str]
    keeps_replicas: ClassVar[bool]
    """Whether replicas are tables into which changes are merged. Otherwise each reader replays the changelog."""
    widens_columns: ClassVar[bool]
    """Whether a column can be widened. Otherwise values of a wider type go to another column (schema/types.py)."""
    fits_stores: ClassVar[bool]
    """Whether its tables can be in an object store, which has no rename."""
    has_upkeep: ClassVar[bool]
    """Whether its tables need upkeep (upkeep/upkeep.py)."""

    @abstractmethod
    def exists(self, path: Path) -> bool:
        """Tell whether there is a table, even an empty one."""

    @abstractmethod
    def end(self, path: Path) -> TableEnd | None:
        """Return how far a table is, and whether another program has set it back since; None if there is no table."""

    def lsn(self, path: Path) -> int | None:
        """Return the LSN up to which a table has its changes (0 for none); None if there is no table."""
        found = self.end(path)
        return None if found is None else found.lsn

    @abstractmethod
    def reader_features(self, path: Path) -> set[str]:
        """Return the features of a table that a reader must know; a reader that does not know one refuses the table."""

    @abstractmethod
    def facts(self, path: Path) -> TableFacts | None:
        """Return facts about a table; None if there is no table. Raises OSError or ValueError if it is damaged."""

    def quiet_until(self, path: Path, lsn: int, logs: LogCache) -> int:  # noqa: ARG002 - only one of several formats looks
        """Return up to where a changelog has no change after ``lsn``, as far as facts about its files tell; otherwise ``lsn``."""
        return lsn


class DeltaFormat(Format):
    """Delta Lake: facts about a table come from its log."""

    name = "delta"
    keeps_replicas = widens_columns = fits_stores = has_upkeep = True

    def __init__(self) -> None:
        self._known: dict[Path, TableState | None] = {}
        """The last facts. A log is read again only if it has another commit."""

    def exists(self, path: Path) -> bool:
        return delta_log.exists(path)

    def end(self, path: Path) -> TableEnd | None:
        return delta_log.table_end(path)

    def reader_features(self, path: Path) -> set[str]:
        return delta_log.TableLog(path).refresh().features("readerFeatures")

    def facts(self, path: Path) -> TableFacts | None:
        state = self._known[path] = delta_log.read_table(path, self._known.get(path))
        if state is None:
            return None
        return TableFacts(state.lsn or 0, state.rows, state.files, state.size, state.version, state.written_ms)

    def quiet_until(self, path: Path, lsn: int, logs: LogCache) -> int:
        with logs.newest(path) as log:
            return delta_log.quiet_until(log.files, lsn)


class ParquetFormat(Format):
    """Parquet: a table is a directory of appends (warehouse/appends.py)."""

    name = "parquet"
    keeps_replicas = widens_columns = fits_stores = has_upkeep = False

    def exists(self, path: Path) -> bool:
        return bool(appends.list_appends(path))

    def end(self, path: Path) -> TableEnd | None:
        found = appends.list_appends(path)
        return TableEnd(found[-1].end_lsn, is_restored=False) if found else None

    def reader_features(self, path: Path) -> set[str]:  # noqa: ARG002 - Parquet has none
        return set()

    def facts(self, path: Path) -> TableFacts | None:
        lsn = self.lsn(path)
        return None if lsn is None else TableFacts(lsn)


FORMATS: Final[dict[str, type[Format]]] = {each.name: each for each in (DeltaFormat, ParquetFormat)}


def table_format(name: str) -> Format:
    """Return the format with this name. Raises InvalidArgumentsError if there is none."""
    if name not in FORMATS:
        raise InvalidArgumentsError(f"unknown table format {name!r}: choose one of {', '.join(FORMATS)}")
    return FORMATS[name]()
