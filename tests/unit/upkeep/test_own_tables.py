"""The upkeep of the tables that the warehouse has of its own: captured DDL and the versions of schemas. Without Spark."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from spark_sink.changelog.ddl_log import DDL_SCHEMA
from spark_sink.changelog.schema_history import HISTORY_SCHEMA
from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.delta.log import read_table
from spark_sink.schema.table import DDL, SCHEMA_HISTORY, Table
from spark_sink.staging.log import Position
from spark_sink.upkeep.upkeep import Upkeep
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql.types import StructType


class Session:
    """In Spark's place: runs no statement."""

    def __init__(self, *_: object) -> None:
        self.conf = type("Conf", (), {"set": lambda *_: None})()
        self.sparkContext = SimpleNamespace(addJobTag=lambda _: None)
        self._jsparkSession = SimpleNamespace(cloneSession=lambda: None)


@pytest.mark.parametrize(("table", "schema"), [(DDL, DDL_SCHEMA), (SCHEMA_HISTORY, HISTORY_SCHEMA)])
def test_they_stay_small_although_each_schema_change_is_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: Table, schema: StructType
) -> None:
    """A database that makes tables all day would otherwise get a small file and a commit for each of them, for ever."""
    house, lock = Warehouse(tmp_path, "delta"), TableLock(tmp_path)
    spark: Any = Session()
    (tmp_path / "_cdcpipe").mkdir()
    path, changelogs = house.changelog(table), changelogs_of(spark, house)
    is_held, checkpoints = False, []
    for lsn in range(1, 21):
        arrow = to_arrow_schema(schema, timezone="UTC")
        rows = pa.Table.from_pylist([{"_cdc_epoch": 1, "_cdc_end_lsn": lsn, "_cdc_ordinal": 0}], arrow)
        changelogs.append(table, rows, schema, Position(1, lsn - 1), Position(1, lsn))
    append = lock.append

    @contextmanager
    def appending() -> Iterator[None]:
        nonlocal is_held
        with append():
            is_held = True
            yield
        is_held = False

    def checkpoint(_: Any, path: Path) -> None:
        assert is_held
        checkpoints.append(path)

    monkeypatch.setattr(lock, "append", appending)
    monkeypatch.setattr(delta, "checkpoint", checkpoint)
    monkeypatch.setattr(delta_log, "_MANY_COMMITS", 20)
    Upkeep(spark, house, lock, optimize_interval_s=0.0, vacuum_retention_s=None).run()
    state = read_table(path)
    assert state is not None
    assert (state.files, state.rows, state.lsn, checkpoints) == (1, 20, 20, [path])
