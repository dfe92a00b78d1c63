"""Reads the current rows of a warehouse's tables, in any table format."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException

from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import sql as delta
from spark_sink.replica.checks import check_key_kept, keyed_versions
from spark_sink.replica.replay import LAST_LSN, replay, replay_all, without_unneeded
from spark_sink.schema.table import gone_columns, has_key
from spark_sink.spark import refused_settings
from spark_sink.spark.sql import quote
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from spark_sink.schema.table import Table

__all__ = ["read_replica", "register_views"]

_logger = logging.getLogger(__name__)


def read_replica(spark: SparkSession, warehouse: str | Path, table: str) -> DataFrame:
    """Return the current rows of ``table`` ("schema.name") in the ``warehouse`` directory, as of now.

    With Delta Lake it reads the replica. With Parquet it replays the changelog. With ``--deletes soft`` the deleted rows are there,
    too: ``_cdc_deleted_at`` is NULL in the rows that exist.

    If the table has lost its key, its replica has the rows from before. With Parquet this is a WarehouseError if it has changed
    since. So is a table without a key, and one whose replica does not exist yet. With Parquet, raises InitError for a session whose
    settings would skip or change values.
    """
    house = Warehouse.existing(warehouse)
    known = house.find(table)
    if house.format.keeps_replicas:
        try:
            return delta.read(spark, house.replica(known))
        except AnalysisException as ex:  # to look first takes long in an object store: a log may have 86,400 files
            _check_there(house, known, ex)
            raise
    refused_settings.refuse_to_read(spark.conf.get)
    changes = changelogs_of(spark, house).read(known)
    check_key_kept(house, known, changes, LAST_LSN)
    play = replay_all if house.keeps_deleted else replay
    gone = gone_columns(house.versions(known), LAST_LSN)
    return without_unneeded(play(house, known, changes), gone, keeps_deleted=house.keeps_deleted)


def register_views(spark: SparkSession, warehouse: str | Path) -> list[str]:
    """Create a temporary view ``<schema>.<table>`` (one identifier: quote it) for each replica. Returns their names.

    Leaves out a table without a key. Also leaves out, with a warning, a table whose rows `read_replica` can't tell yet, or not any
    more.
    """
    house = Warehouse.existing(warehouse)
    names = []
    for table in house.tables():
        if has_key(house.versions(table)):
            try:
                rows = read_replica(spark, house.root, str(table))
            except WarehouseError as ex:
                _logger.warning("no view: %s", ex.message)
                continue
            rows.createOrReplaceTempView(quote(str(table)))
            names.append(str(table))
    return names


def _check_there(house: Warehouse, table: Table, ex: Exception) -> None:
    """Raise WarehouseError if the table has no replica, or has none yet. Spark says only that a path does not exist."""
    if house.format.exists(house.replica(table)):
        return
    keyed_versions(house, table)
    raise WarehouseError(
        f"{table} has no replica yet",
        hint="cdcpipe-spark run makes it with its next merge; cdcpipe-spark status says if the table waits for a copy",
    ) from ex
