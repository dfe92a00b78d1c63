"""What a pipeline knows of the tables from one micro-batch to the next: their state and names, and which warnings it has logged.

tables = KnownTables(spark, warehouse, schemas, answers)
tables.open([table])                # reads the state of a table that is not known yet
tables[table].versions
tables.forget()                     # another writer may have changed the tables
"""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_sink.changelog.interface import ChangelogState
from spark_sink.changelog.renames import follow, told
from spark_sink.changelog.tables import changelogs_of
from spark_sink.changelog.versions import TableVersions
from spark_sink.client.keyless import keyless_text
from spark_sink.pipeline.epochs import take_epochs
from spark_sink.pipeline.fit import gone
from spark_sink.schema.names import APART, FOLLOW, Names
from spark_sink.schema.table import MESSAGES, has_key
from spark_sink.schema.types import INEXACT_MESSAGE, split_schema
from spark_sink.warehouse import table_names
from spark_sink.warehouse.comments import Comments, read_comments
from spark_sink.warehouse.wanted_copies import want_copy
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from spark_sink.changelog.interface import Files
    from spark_sink.changelog.schema_history import SchemaHistory
    from spark_sink.schema.catalog_answers import CatalogAnswers
    from spark_sink.schema.table import Place, Table, Version
    from spark_sink.source.contents import Use
    from spark_sink.source.ddl import Ddl

__all__ = ["KnownTable", "KnownTables"]

_logger = logging.getLogger(__name__)

_THREADS = 4
"""How many tables are opened at the same time."""

_KEYLESS = ""
"""The subject of the warning about a table without a key. Other warnings have a column's name as their subject."""
_INCOMPLETE = "\0"
"""The subject of the warning about inserts that lack values. It is no column's name."""
_INCOMPLETE_MESSAGE = (
    "table %s: an UPDATE brought rows into the row filter of a publication, and the server did not send their large values (TOAST) "
    "that had not changed: they are NULL, and _cdc_unchanged names them. Repair: run --heal, or %s. With REPLICA IDENTITY FULL the "
    "server sends these values"
)


@dataclass(slots=True)
class KnownTable:
    """The known state of a table: its changelog (None before the first change) and its versions."""

    changelog: ChangelogState | None
    versions: list[Version]
    files: Files | None = None
    comments: Comments | None = None
    """The recorded comments; None for a table without any."""

    @property
    def done_lsn(self) -> int:
        """The LSN up to which the changelog has the changes."""
        return 0 if self.changelog is None else self.changelog.lsn

    @property
    def columns(self) -> StructType | None:
        """The columns of the table that the changelog has."""
        return None if self.changelog is None else split_schema(self.changelog.schema)[0]

    @property
    def has_key(self) -> bool:
        """Whether the table has, had or will get a replica."""
        return has_key(self.versions)


class KnownTables:
    """A cache of the state of a warehouse's tables, kept between micro-batches. Also remembers which warnings were logged.

    ``keys``, ``keyless_named`` and ``drops_columns`` have the same meaning as in `pipeline.Pipeline`. With ``is_following`` a
    renamed table goes on in its tables.
    """

    def __init__(
        self,
        spark: SparkSession,
        warehouse: Warehouse,
        schemas: SchemaHistory,
        answers: CatalogAnswers,
        keys: Mapping[str, Sequence[str]] | None = None,
        keyless_named: Iterable[str] = (),
        *,
        drops_columns: bool = False,
        is_following: bool = True,
    ) -> None:
        self.spark = spark
        self.warehouse = warehouse
        self.changelogs = changelogs_of(spark, warehouse)
        self.schemas = schemas
        self.answers = answers
        self.versions = TableVersions(warehouse, schemas, answers, keys, drops_columns=drops_columns)
        self.is_following = is_following
        self.exact_counts: Counter[tuple[Table, str]] = Counter()
        """For each column, how many values since the start are text in ``_cdc_exact`` because the column's type can't hold them."""
        self._states: dict[Table, KnownTable] = {}
        self._there: set[Table] = set()
        """The tables whose changelogs this process has seen."""
        self._told: set[tuple[Table | str, str]] = {(name, _KEYLESS) for name in keyless_named}

    @property
    def names(self) -> Names:
        """The names of the tables up to now, after `begin`. Only this process records new ones."""
        return self.versions.names

    def named(self, relation_id: int, name: Table, place: Place) -> Table:
        """Return the table of the warehouse that has the changes of the table with this OID and name."""
        return self.names.shown(self.names.home(relation_id, name, place))

    def read_names(self) -> None:
        """Read the names of the tables, and of which server their OIDs are: at the start, and after each gap of the log."""
        self.versions.names = table_names.record_names(self.warehouse)
        self.answers.end_at(self.names.servers)
        self.schemas.read_gaps()

    def take_epochs(self, staging: Path) -> None:
        """Record the log's epochs. After one, the tables may have other names."""
        take_epochs(self.warehouse, staging)
        self.read_names()

    def begin(self) -> None:
        """Read the names of the tables. Tell if the run has another choice for renamed tables than the one before it."""
        self.read_names()
        if self.names.is_following not in (None, self.is_following):
            now, before = (FOLLOW, APART) if self.is_following else (APART, FOLLOW)
            _logger.warning("--renamed is %s now, it was %s: it counts for tables that are renamed from now on", now, before)

    def follow(self, uses: Sequence[Use], ddl: Sequence[Ddl]) -> list[Table]:
        """Record the new names of tables, and tell of them. Returns these tables."""
        is_told = any(each.message.kind == "command" and each.end_lsn > self.names.done_lsn for each in ddl)
        if not is_told and self.names.is_following in (None, self.is_following) and not self.names.namings:
            return []
        versions = self.warehouse.all_versions() if is_told else {}
        names = follow(self.names, uses, ddl, versions, is_following=self.is_following)
        if names is self.names:
            return []
        self.warehouse.write_names(names)
        for line in told(self.names, names):
            _logger.warning("%s", line)
        new = {naming.home for naming in names.namings[len(self.names.namings) :]}
        self.versions.names = names
        return sorted(map(names.shown, new))

    def __getitem__(self, table: Table) -> KnownTable:
        return self._states[table]

    def note_changelogs(self, tables: Iterable[Table]) -> None:
        """Remember that these tables have changelogs. If one goes away, that is an error, and no new one is made."""
        self._there.update(tables)

    def open(self, tables: Iterable[Table]) -> None:
        """Read the state of the tables that are not in the cache, several at the same time."""
        new = [table for table in tables if table not in self._states]
        if new:
            with ThreadPoolExecutor(_THREADS, "open") as pool:
                self._states.update(zip(new, pool.map(self._read, new), strict=True))

    def forget(self) -> None:
        """Empty the cache, because another writer may have changed the tables."""
        self._states.clear()

    def _read(self, table: Table) -> KnownTable:
        state, versions = self.changelogs.state(table), self.warehouse.versions(table)
        if state is not None:
            self._there.add(table)
        elif table in self._there and (
            versions or table == MESSAGES
        ):  # without versions, a snapshot that was killed has taken it back
            raise gone(self.warehouse, table)
        return KnownTable(state, versions, comments=None if state is None else read_comments(self.warehouse, table))

    def _tell(self, table: Table, subject: str, message: str, *arguments: object) -> None:
        """Log a warning about this subject, once for each table."""
        if not {(table, subject), (str(table), subject)} & self._told:
            self._told.add((table, subject))
            _logger.warning(message, *arguments)

    def tell_keyless(self, table: Table, *, is_partial: bool) -> None:
        """Log a warning about a table without a key, once. ``is_partial``: the server sends only a part of a key."""
        self._tell(table, _KEYLESS, "%s", keyless_text([str(table)], is_partial=is_partial))

    def tell_exact(self, table: Table, counts: Mapping[str, int]) -> None:
        """Count the values that the types of their columns can't hold. Log a warning for each such column, once."""
        for name, count in sorted(counts.items()):
            self._tell(table, name, INEXACT_MESSAGE, table, name, count)
            self.exact_counts[table, name] += count

    def tell_incomplete(self, table: Table, lsn: int) -> None:
        """Let a table be copied of which an insert lacks a value. The last such transaction ends at ``lsn``. Warns once."""
        want_copy(
            self.warehouse, table, lsn, "rows came into the row filter of a publication, and large values of them were not sent"
        )
        self._tell(table, _INCOMPLETE, _INCOMPLETE_MESSAGE, table, table.copying)
