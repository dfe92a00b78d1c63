"""A table's versions as they come: what identifies its rows, from some transaction on. No Spark.

What holds is in the stream (keys.py), but for tables with REPLICA IDENTITY FULL or NOTHING: those are asked for in the catalog,
unless the user has named their keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spark_sink.keys import identifying_columns, version_of
from spark_sink.warehouse import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pyspark.sql.types import StructType

    from cdcpipe.pgoutput.messages import Relation
    from spark_sink.warehouse import Version, Warehouse

__all__ = ["TableVersions"]


class TableVersions:
    """Writes down in a warehouse what identifies its tables' rows.

    ``keys`` and ``describe`` are those of `pipeline.Pipeline`.
    """

    def __init__(
        self,
        warehouse: Warehouse,
        keys: Mapping[str, Sequence[str]] | None = None,
        describe: Callable[[], Iterable[Mapping[str, Any]]] | None = None,
    ) -> None:
        self._warehouse = warehouse
        self._keys = {name: tuple(columns) for name, columns in (keys or {}).items()}
        self._describe = describe
        self._catalog: dict[Table, tuple[str, ...]] = {}

    def note(
        self,
        table: Table,
        known: Sequence[Version],
        relations: Iterable[tuple[int, Relation]],
        done_lsn: int,
        columns: StructType,
    ) -> list[Version]:
        """Write down what holds beyond ``done_lsn``, before the first change under it; return all versions.

        ``known`` are those written down before, ``columns`` the changelog's.
        """
        versions = list(known)
        for end_lsn, relation in relations:
            if end_lsn <= done_lsn:
                continue
            version = version_of(end_lsn, relation, columns, self._key(table, relation))
            if versions and replace(versions[-1], end_lsn=end_lsn) == version:
                continue
            if versions and versions[-1].end_lsn == end_lsn:
                versions.pop()
            versions.append(version)
        if versions != known:
            self._warehouse.write_versions(table, versions)
        return versions

    def _key(self, table: Table, relation: Relation) -> tuple[str, ...]:
        """Return the names of the columns that identify a row, in PostgreSQL's spelling; none if nothing does."""
        key = self._keys.get(str(table))
        if key is None:
            return identifying_columns(relation, lambda: self._primary_key(table))
        return key if set(key) <= {column.name for column in relation.columns} else ()

    def _primary_key(self, table: Table) -> tuple[str, ...]:
        """Look a table's primary key up in the catalog, once."""
        if table not in self._catalog:
            if self._describe is not None:
                for found in self._describe():
                    self._catalog[Table(found["schema"], found["name"])] = tuple(found["primary_key"])
            self._catalog.setdefault(table, ())
        return self._catalog[table]
