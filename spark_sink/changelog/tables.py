"""Changelog tables: append-only, every change once, in any table format. `changelogs_of` gives a warehouse's.

Rows are in the typed layout of the data source (source/datasource.py): the table's columns, then the ``_cdc_`` columns. They come
as files, written in the table's directory, which a commit makes part of it when their rows have been counted. A column that is
new is added; one that was dropped stays, NULL from then on; one whose type changed goes on under another name beside the old one
(types.versioned_name), unless the format widens columns and the type became wider. No file is written anew.

A reader sees all of an append or nothing. An append records the position that it reaches, so one that is made twice leaves the rows
of one. A snapshot of a table that has a changelog (snapshot/table.py) is a commit beside the appends, and records no position.

The logical messages have a changelog of their own (`schema.table.MESSAGES`), with the data source's columns for them.
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
    """Return the changelogs of a warehouse, to read and to write them."""
    return _CLASSES[warehouse.format.name](spark, warehouse)
