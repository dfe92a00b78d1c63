"""The beginning of a pipeline: where it continues in the log, and what it finishes before the first micro-batch.

position = begin(house, staging, checkpoint, lock, tables)
ends = finish_left(spark, house, lock, tables, position)
position = behind_gap(house, staging, position)     # not before: up to this position, each table has its changelog
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from spark_sink.delta import sql as delta
from spark_sink.files import places
from spark_sink.pipeline import fit
from spark_sink.pipeline.epochs import take_epochs
from spark_sink.replica import merge
from spark_sink.schema.types import DELETED_AT, replica_schema
from spark_sink.source.offsets import discard
from spark_sink.staging.log import Position, former_system_ids, list_segments, removed_position
from spark_sink.staging.readers import read_readers, reader_place, register_reader
from spark_sink.warehouse.belonging import record_staging
from spark_sink.warehouse.formats import ANY
from spark_sink.warehouse.mask_settings import settle
from spark_sink.warehouse.warehouse import READER

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from spark_sink.delta.log import TableEnd
    from spark_sink.pipeline.known_tables import KnownTables
    from spark_sink.warehouse.lock import TableLock
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["begin", "begin_keeping_deleted", "finish_left", "less_readable"]

_logger = logging.getLogger(__name__)

_RARE_FEATURES = frozenset({"columnMapping", "deletionVectors", "typeWidening", "typeWidening-preview"})
"""Features of tables that not every reader knows (docs/spark/readers.md)."""


def begin(house: Warehouse, staging: Path, checkpoint: Path, lock: TableLock, tables: KnownTables) -> Position:
    """Check that warehouse and log belong together, and return the position from which to continue."""
    epochs = fit.check_log(house, staging)
    position = house.open(epochs[-1], former_system_ids(epochs))
    settle(house, lock, staging)
    _name_less_readable(house)
    removed = removed_position(staging)
    reached = read_readers(staging).get(READER)
    if position is None:
        discard(checkpoint)  # it is of a warehouse that was here before, and is beyond what this one has
        reached = position = fit.first_position(house, staging, epochs[0].start, removed)
        house.record(position, staging)
        register_reader(staging, READER, position, house.name)
    fit.check_copies(house, staging, position, reached, removed)
    list_segments(staging, position)  # raises if segments that the tables still need are missing
    record_staging(house, staging)
    take_epochs(house, staging)
    tables.begin()
    if reached is None or reader_place(staging, READER) != house.name:
        register_reader(staging, READER, reached or removed or Position(0, 0), house.name)
    return position


def finish_left(
    spark: SparkSession, house: Warehouse, lock: TableLock, tables: KnownTables, position: Position
) -> dict[Path, TableEnd | None]:
    """Finish what killed processes have left unfinished, and check the tables. Returns how far each changelog and replica is.

    Raises InterruptedError for a stop (`TableLock`).
    """
    with lock.alone():
        begin_keeping_deleted(spark, house)
        merge.finish_snapshots(spark, house, lock.is_stopping)
        merge.finish_merges(house)
        ends = fit.check_tables(house, position)
        tables.note_changelogs([table for table in house.tables() if ends.get(house.changelog(table)) is not None])
    return ends


def begin_keeping_deleted(spark: SparkSession, house: Warehouse) -> None:
    """With ``--deletes soft``, add the column ``_cdc_deleted_at`` to replicas that were begun without it."""
    if not (house.keeps_deleted and house.format.keeps_replicas):
        return
    wanted, begun = replica_schema(StructType(), keeps_deleted=True), []
    for table in house.tables():
        state = delta.state(house.replica(table))
        if state is not None and delta.add_columns(spark, house.replica(table), state.schema, wanted):
            begun.append(str(table))
    if begun:
        _logger.warning(
            "--deletes soft: %d replicas keep deleted rows from now on, in which %s has the time; rows that were deleted before are"
            " not in them",
            len(begun),
            DELETED_AT,
        )


def less_readable(house: Warehouse) -> dict[Path, set[str]]:
    """Return the tables that have features which not every reader of their format knows, with these features."""
    found = {
        path: house.format.reader_features(path) & _RARE_FEATURES
        for table in house.tables()
        for path in (house.changelog(table), house.replica(table), house.history(table))
    }
    return {path: features for path, features in found.items() if features}


def _name_less_readable(house: Warehouse) -> None:
    """With ``--readers any``, warn about tables from before that some readers refuse."""
    found = less_readable(house) if house.readers == ANY else {}
    if found:
        listed = [f"{places.name(path)} ({', '.join(sorted(features))})" for path, features in sorted(found.items())]
        more = f", and {len(listed) - 5} more" if len(listed) > 5 else ""
        _logger.warning(
            "--readers any: %d tables have features from before that some readers refuse: %s%s. They keep them; "
            "a new warehouse has none",
            len(listed),
            ", ".join(listed[:5]),
            more,
        )
