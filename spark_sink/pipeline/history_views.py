"""Keeps the views with the histories of the tables, ``shop__orders__history``, in a database of the session's catalog.

replica/history_view.py writes the SQL of a view. It holds for the versions, the columns and the purges that the table had then. So

- a view is dropped before a change of the table's versions or columns is committed to the changelog, and made again afterwards;
- a view that another run left is made again, or dropped, at the start, if it does not fit the table any more;
- a table whose past the SQL cannot express has no view. A warning names it, and the other ways to its history. The same goes for a
  view that the catalog refuses: Hive's embedded metastore takes no text of more than 32,700 characters.

A view's properties name its changelog, and have a digest of everything that its text was made of. A view or table that this module
did not create is left alone, with a warning. But the name of a stored history whose files were deleted is dropped, if the warehouse
stores none any more.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.errors import AnalysisException

from spark_sink.files import places
from spark_sink.replica.history_view import HistoryShape, Known, UnfitError, history_shape, known_sql, view_sql
from spark_sink.schema.table import has_key
from spark_sink.spark.failure import reason_of
from spark_sink.spark.sql import literal
from spark_sink.warehouse import purged_changes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from spark_sink.schema.table import Place, Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["HISTORY_OF", "HistoryViews", "is_at", "look_up", "place_property"]

_logger = logging.getLogger(__name__)

HISTORY_OF: Final = "cdcpipe.history_of"
"""The property of a view that names the changelog of its table."""
_MADE_OF: Final = "cdcpipe.history_made_of"
"""The property with the digest."""
_NOTHING_THERE: Final = "DELTA_PATH_DOES_NOT_EXIST"
"""The condition of Delta's error for a name whose table is not at its place."""

_IN_HEX: Final = re.compile(r"hex:((?:[0-9a-f]{2})+)")
"""A property that `place_property` has made."""

_REASON: Final = 200
"""How much of a catalog's error is shown: it may repeat the text of the view."""


@dataclass(frozen=True, slots=True)
class _Basis:
    """What the text of a view is made of, but for `Known`, which costs a job of Spark."""

    changelog: str
    schema: StructType
    shape: HistoryShape
    first_place: Place
    """Where the table's first version begins: a warehouse that was made again has another one."""

    def sql(self, known: Known) -> str:
        return view_sql(self.changelog, self.schema, self.shape, known)

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.first_place} {self.sql(Known(0))}".encode()).hexdigest()


class HistoryViews:
    """Makes and drops views. The caller holds a lock."""

    def __init__(self, spark: SparkSession, warehouse: Warehouse) -> None:
        self._spark = spark
        self._warehouse = warehouse
        self._settled: set[Table] = set()
        """The tables whose views fit, and those that cannot have one."""

    def forget(self, tables: Iterable[Table] | None = None) -> None:
        """Look again, at the next `show`, whether the views of these tables, or of all tables, still fit."""
        self._settled = set() if tables is None else self._settled.difference(tables)

    def show(self, table: Table, changelog: str, view: str) -> None:
        """Make a table's view if it has a key and no view that fits. ``changelog`` and ``view`` are quoted names in the catalog."""
        if table in self._settled:
            return
        if not has_key(self._warehouse.versions(table)):
            self._settled.add(table)
            return
        is_there, properties = self._look(view, [table])
        if is_there and properties.get(HISTORY_OF) != self._path(table):
            self._tell(table, f"{view} in the catalog is something else")
            self._settled.add(table)
            return
        try:
            basis = self._basis(table, changelog)
            if properties.get(_MADE_OF) != basis.digest:
                known = Known.of(self._spark.sql(known_sql(changelog, basis.shape)).collect())
                if known is None:
                    return
                basis = self._basis(table, changelog)  # again: a purge that `known` shows must be in it
                self._make(table, view, basis, known)
        except UnfitError as ex:
            if properties:
                self._spark.sql(f"DROP VIEW {view}")
            self._tell(table, ex.message)
        self._settled.add(table)

    def _basis(self, table: Table, changelog: str) -> _Basis:
        purged_lsn = purged_changes.last_lsn(self._warehouse, table)
        versions = self._warehouse.versions(table)
        shape = history_shape(versions, purged_lsn)
        return _Basis(changelog, self._spark.table(changelog).schema, shape, versions[0].place)

    def _make(self, table: Table, view: str, basis: _Basis, known: Known) -> None:
        properties = {HISTORY_OF: place_property(self._warehouse.changelog(table)), _MADE_OF: basis.digest}
        listed = ", ".join(f"{literal(name)} = {literal(value)}" for name, value in properties.items())
        text = basis.sql(known)
        try:
            self._spark.sql(f"CREATE OR REPLACE VIEW {view} TBLPROPERTIES ({listed}) AS {text}")
        except Exception as ex:
            raise UnfitError(f"the catalog does not take its text of {len(text)} characters: {reason_of(ex)[:_REASON]}") from ex

    def drop(self, tables: Sequence[Table], view: str) -> None:
        """Drop a view, if it is that of one of the tables. `show` makes it again."""
        self.forget(tables)
        _, properties = self._look(view, tables)
        if properties.get(HISTORY_OF) in [self._path(table) for table in tables]:
            self._spark.sql(f"DROP VIEW {view}")

    def properties(self, name: str) -> dict[str, str]:
        """Return the properties of a view or table in the catalog; none if it does not exist, or is not at its place any more.

        What `place_property` has made is the path again.
        """
        return self._look(name)[1]

    def _look(self, name: str, tables: Iterable[Table] = ()) -> tuple[bool, dict[str, str]]:
        """Tell whether the catalog has a name, and return its properties.

        The name is dropped if it is that of the stored history of one of ``tables``, which is not there any more and is not wanted.
        """
        is_there, left = look_up(self._spark, name)
        if left is not None:
            if self._warehouse.keeps_history or not any(is_at(left, self._warehouse.history(table)) for table in tables):
                return True, {}
            self._spark.sql(f"DROP TABLE {name}")
            return False, {}
        if not is_there:
            return False, {}
        return True, {row["key"]: _plain(row["value"]) for row in self._spark.sql(f"SHOW TBLPROPERTIES {name}").collect()}

    def _path(self, table: Table) -> str:
        return places.name(self._warehouse.changelog(table))

    def _tell(self, table: Table, reason: str) -> None:
        _logger.warning(
            "%s has no view with its history: %s. read_history in Python has it; with Delta, --history table stores it",
            table,
            reason,
        )


def place_property(path: Path) -> str:
    """Return the value of a view's property that names a place. `HistoryViews.properties` reads it.

    Spark's SQL tells no value in which it finds a word like "url" or "token", and the name of a table or a directory may have one.
    It finds none in hexadecimal digits.
    """
    return f"hex:{places.name(path).encode().hex()}"


def _plain(value: str) -> str:
    """Return the path in a property. Any other property stays as it is, so also the paths that earlier versions have written."""
    found = _IN_HEX.fullmatch(value)
    return value if found is None else bytes.fromhex(found[1]).decode(errors="replace")


def look_up(spark: SparkSession, name: str) -> tuple[bool, str | None]:
    """Tell whether the catalog has a (quoted) name, and return the place of its Delta table if nothing is there any more."""
    try:
        return bool(spark.catalog.tableExists(name)), None
    except AnalysisException as ex:
        if ex.getCondition() != _NOTHING_THERE:
            raise
        return True, str((ex.getMessageParameters() or {}).get("path")).removeprefix("file:")


def is_at(left: str, path: Path) -> bool:
    """Tell whether a place is that of the table at ``path``, or was so before the warehouse was moved."""
    return left.split("/")[-2:] == places.name(path).split("/")[-2:]
