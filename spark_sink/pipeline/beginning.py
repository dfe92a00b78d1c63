"""The beginning of a pipeline: where it continues in the log, and what it finishes before the first micro-batch.

position = begin(house, staging, checkpoint, lock, tables)
ends = finish_left(spark, house, lock, tables, position)
position = fit.behind_gap(house, staging, position)     # not before: up to this position, each table has its changelog
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_sink.pipeline import fit
from spark_sink.replica import merge
from spark_sink.source.offsets import discard
from spark_sink.staging.log import Position, former_system_ids, list_segments, removed_position
from spark_sink.staging.readers import read_readers, reader_place, register_reader
from spark_sink.warehouse.belonging import record_staging
from spark_sink.warehouse.mask_settings import settle
from spark_sink.warehouse.warehouse import READER

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from spark_sink.delta.log import TableEnd
    from spark_sink.pipeline.known_tables import KnownTables
    from spark_sink.warehouse.lock import TableLock
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["begin", "finish_left"]


def begin(house: Warehouse, staging: Path, checkpoint: Path, lock: TableLock, tables: KnownTables) -> Position:
    """Check that warehouse and log belong together, and return the position from which to continue."""
    epochs = fit.check_log(house, staging)
    position = house.open(epochs[-1], former_system_ids(epochs))
    settle(house, lock, staging)
    fit.name_less_readable(house)
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
    fit.take_epochs(house, staging)
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
        fit.begin_keeping_deleted(spark, house)
        merge.finish_snapshots(spark, house, lock.is_stopping)
        merge.finish_merges(house)
        ends = fit.check_tables(house, position)
        tables.note_changelogs([table for table in house.tables() if ends.get(house.changelog(table)) is not None])
    return ends
