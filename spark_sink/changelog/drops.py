"""Writes the changelog's rows for captured DROP TABLE commands: ``_cdc_op`` is ``drop``, and all columns of the table are NULL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from spark_sink.files import places
from spark_sink.files.parquet import FileWriter, part_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_sink.changelog.interface import Files
    from spark_sink.files.parquet import WrittenFile
    from spark_sink.source.ddl import Ddl

__all__ = ["write_drops"]


def write_drops(files: Files, drops: Sequence[Ddl]) -> WrittenFile:
    """Write a file with one row for each DROP TABLE."""
    writer, count = FileWriter(places.name(files.directory), part_name(), files.layout), len(drops)
    arrays = {
        "_cdc_op": pa.repeat("drop", count),
        "_cdc_epoch": pa.array([each.epoch for each in drops], pa.int32()),
        "_cdc_end_lsn": pa.array([each.end_lsn for each in drops], pa.int64()),
        "_cdc_ordinal": pa.array([each.ordinal for each in drops], pa.int32()),
        "_cdc_xid": pa.array([each.xid for each in drops], pa.int64()),
        "_cdc_commit_time": pa.array([each.commit_time_us for each in drops], pa.timestamp("us", "UTC")),
        "_cdc_unchanged": pa.array([[]] * count, pa.list_(pa.string())),
        "_cdc_exact": pa.array([[]] * count, pa.map_(pa.string(), pa.string())),
    }
    writer.write(arrays, count)
    return writer.close()
