"""Changelog tables: append-only tables with every change once. `changelogs_of` returns those of a warehouse, for its table format.

These rules hold in every format:

- Rows have the columns of the data source's typed rows (source/datasource.py): the table's columns, then the ``_cdc_`` columns.
- Files are written to the table's directory. A commit adds them to the table, after their rows have been counted.
- A new column is added. A dropped column stays, and is NULL from then on. If a column's type changes, new values go to another
  column beside it (types.versioned_name), unless the type became wider and the format can widen columns. No file is rewritten.
- A reader sees an append completely or not at all.
- An append records the position that it reaches. So an append that is made twice adds its rows once.
- A snapshot of a table with a changelog (snapshot/table.py) is a commit beside the appends, and records no position.

Logical messages have their own changelog (`schema.table.MESSAGES`), with the data source's columns for messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from spark_sink.changelog.delta_changelogs import DeltaChangelogs
from spark_sink.changelog.parquet_changelogs import ParquetChangelogs
from spark_sink.warehouse.formats import DeltaFormat, ParquetFormat

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_sink.changelog.interface import Changelogs
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["changelogs_of"]

_CLASSES: Final[dict[str, type[Changelogs[Any]]]] = {
    DeltaFormat.name: DeltaChangelogs,
    ParquetFormat.name: ParquetChangelogs,
}


def changelogs_of(spark: SparkSession, warehouse: Warehouse) -> Changelogs[Any]:
    """Return the object that reads and writes the changelogs of a warehouse."""
    return _CLASSES[warehouse.format.name](spark, warehouse)
