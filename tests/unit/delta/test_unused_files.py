"""Which files of a table's directory are not part of the table."""

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType

from spark_sink.delta import deletion_vector, rewrite
from spark_sink.delta import unused_files as module
from spark_sink.delta.log import TableLog
from spark_sink.delta.rewrite import Rewrite
from spark_sink.delta.unused_files import unused_files
from spark_sink.staging.log import Position
from support.delta_tables import struct


def test_only_old_files_that_no_commit_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the table, its deletion vectors, and files whose names begin with ``_`` or ``.`` are used; younger ones may be.

    Those of a change data feed are not: only VACUUM deletes them.
    """
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", 0)
    path, vectors = tmp_path / "t", {"delta.enableDeletionVectors": "true"}
    Rewrite.new(path, ("id",), struct(id=LongType()), vectors).add({"id": pa.array(range(9))}, []).commit(Position(1, 10))
    first = TableLog(path).refresh()
    for lsn, key in ((20, 1), (30, 2)):
        table = Rewrite.of_log(TableLog(path).refresh(), ("id",))
        table.add({"id": pa.array([key])}, table.find(pa.table({"k0": [key]}))).commit(Position(1, lsn))
    log = TableLog(path).refresh()
    (vector,) = (file["deletionVector"] for file in log.files if "deletionVector" in file)
    (replaced,) = {each.name for each in path.glob("deletion_vector*")} - {deletion_vector.file_name(vector)}
    for name in ("more/below", "_change_data", "_other"):
        (path / name).mkdir(parents=True)
    unused = {"part-never-committed.parquet", "more/below/part.parquet", "_change_data/cdc-part.parquet"}
    for name in (*unused, ".part.parquet.crc", "_other/part.parquet", "_part", "young.parquet"):
        (path / name).write_bytes(b"abc")
    hour_ago = time.time() - 3600
    for each in path.rglob("*"):
        if each.is_file() and each.name != "young.parquet":
            os.utime(each, (hour_ago, hour_ago))
    found = unused_files(log, time.time() - 1800)
    assert {each.name for each in found} == {*unused, replaced}
    assert {each.size for each in found if "part" in each.name} == {3}
    assert all(each.written_s == pytest.approx(hour_ago) for each in found)
    assert len(unused_files(first, time.time() - 1800)) == 7  # for the first commit, all that came later is unused
    monkeypatch.setattr(module, "_MOST_FILES", 2)
    assert len(unused_files(first, time.time() - 1800)) == 2
