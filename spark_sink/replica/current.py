"""Reads the current rows of a warehouse's tables, in any table format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import sql as delta
from spark_sink.replica.replay import replay, without_unneeded
from spark_sink.schema.table import has_key
from spark_sink.spark.sql import quote
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

__all__ = ["read_replica", "register_views"]


def read_replica(spark: SparkSession, warehouse: str | Path, table: str) -> DataFrame:
    """Return the current rows of ``table`` ("schema.name") in the ``warehouse`` directory, as of now.

    With Delta Lake it reads the replica. With Parquet it replays the changelog.
    """
    house = Warehouse.existing(warehouse)
    known = house.find(table)
    if house.format.keeps_replicas:
        return delta.read(spark, house.replica(known))
    changes = changelogs_of(spark, house).read(known)
    return without_unneeded(replay(house, known, changes))


def register_views(spark: SparkSession, warehouse: str | Path) -> list[str]:
    """Create a temporary view ``<schema>.<table>`` (one identifier: quote it) for each replica. Returns their names."""
    house = Warehouse.existing(warehouse)
    names = []
    for table in house.tables():
        if has_key(house.versions(table)):
            read_replica(spark, house.root, str(table)).createOrReplaceTempView(quote(str(table)))
            names.append(str(table))
    return names
