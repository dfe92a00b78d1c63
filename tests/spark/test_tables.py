"""Changelogs and replicas from changes made by hand. tests/spark/test_pipeline.py does the same on a real server."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    DateType,
    DecimalType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
)

from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import file_table
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.files import places
from spark_sink.files.parquet import FileWriter, Layout
from spark_sink.replica import merge, reduction
from spark_sink.replica.current import read_replica
from spark_sink.schema.table import Version
from spark_sink.staging.log import Position
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import EPOCH, KEY, SCHEMA, TABLE, Source, add, comparable

pytestmark = pytest.mark.spark


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    made = Warehouse(tmp_path / "warehouse", "delta")
    made.open(EPOCH)
    return made


def test_reduction_equals_the_source(spark: Any) -> None:
    """200 random scripts at once, each cut in two: the reduction of the second part continues the result of the first."""
    seed = random.randrange(10**6)
    print("seed", seed)
    sources = []
    for case in range(200):
        source = Source(random.Random(seed + case), case)
        for _ in range(source.rng.randint(1, 25)):
            source.step(keys=4)
            if source.rng.random() < 0.5:
                source.commit()
        sources.append(source)
    changes = spark.createDataFrame([change for source in sources for change in source.changes], SCHEMA)
    key = tuple((name,) for name in KEY)
    summary = reduction.summarize(changes, key)
    assert summary.has_moves
    assert summary.has_partial_begins
    assert summary.unchanged == ("blob", "other")
    columns = reduction.data_columns(changes.schema)
    assert columns == ["case", "id", "a", "blob", "other"]
    rows = reduction.reduce(changes, key, columns, summary).cache()
    assert rows.where("size(_cdc_missing) + size(_cdc_moved) > 0").isEmpty()
    assert comparable(rows.where("not _cdc_gone").select(*columns).collect()) == comparable(
        row for source in sources for row in source.rows.values()
    )
    assert rows.count() == rows.select("_cdc_key").distinct().count()
    rows.unpersist()


def test_a_table_is_made_where_an_attempt_to_was_killed(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "replica/public.t"
    (path / "_delta_log").mkdir(parents=True)
    (path / "part-0.parquet").write_bytes(b"PAR1")
    assert not delta_log.exists(path)
    delta.create(path, spark.range(3), {})
    assert delta.read(spark, path).count() == 3
    assert not (path / "part-0.parquet").exists()


@pytest.mark.parametrize("table_format", ["delta", "parquet"])
def test_random_batches_applied_again(spark: Any, tmp_path: Path, table_format: str) -> None:
    """Batches are cut at random. Each is applied up to three times, also old ones after newer ones. The replica is the source."""
    seed = random.randrange(10**6)
    print("seed", seed)
    warehouse = Warehouse(tmp_path, table_format)
    warehouse.open(EPOCH)
    warehouse.write_versions(TABLE, [Version(0, 0, 7, KEY, KEY)])
    source = Source(random.Random(seed))
    done: list[tuple[int, int]] = []
    for _ in range(5):
        start = source.lsn
        for _ in range(source.rng.randint(1, 8)):
            for _ in range(source.rng.randint(1, 8)):
                if source.rng.random() < 0.05:
                    source.truncate()
                source.step(keys=12)
            source.commit()
        done.append((start, source.lsn))
        again = source.rng.choices(done, k=source.rng.randrange(2))
        for first, last in [done[-1], *again, *[done[-1]] * source.rng.randrange(2)]:
            state = changelogs_of(spark, warehouse).state(TABLE)
            # As the pipeline does: from where the table stands, if that is further than the batch's start.
            begin = max(first, 0 if state is None else state.lsn)
            if begin < last:
                add(spark, warehouse, source.changes, begin, last)
            if table_format == "delta":
                merge.merge_changes(spark, warehouse, TABLE, Position(1, last))
    assert changelogs_of(spark, warehouse).read(TABLE).count() == len(source.changes)
    rows = read_replica(spark, warehouse.root, "public.t")
    assert comparable(rows.select("case", "id", "a", "blob", "other").collect()) == comparable(source.rows.values())
    assert not [name for name in rows.columns if name.startswith("_cdc_")]
    if table_format == "parquet":
        plain = spark.read.option("mergeSchema", "true").parquet(str(warehouse.changelog(TABLE)))
        assert plain.count() == len(source.changes)
        return
    # The replica comes from the changelog alone.
    state = delta.state(warehouse.replica(TABLE))
    assert state is not None
    assert state.lsn == source.lsn


def test_commits_by_hand_are_delta_s(spark: Any, tmp_path: Path) -> None:
    schema = StructType(
        [
            StructField("id", LongType()),
            StructField("at", TimestampNTZType()),
            StructField("a.b", StructType([StructField("x", LongType())])),
            StructField("exact", MapType(StringType(), StringType())),
        ]
    )
    path = tmp_path / "t"
    path.mkdir()
    made = file_table.define(path, schema, {"cdcpipe.table": "x"})
    layout = Layout(tuple(schema.names), to_arrow_schema(made.physical, timezone="UTC"))
    for number in range(3):
        writer = FileWriter(str(path), f"part-{number}.parquet", layout)
        batch = {"id": pa.array([number, None]), "a.b": pa.array([{"x": number}, None])}
        writer.write(batch, 2)
        file_table.commit(made, [writer.close()], Position(1, 10 + number))
    delta.checkpoint(spark, path)
    assert (path / "_delta_log/_last_checkpoint").exists()
    file_table.commit(made, [], Position(1, 20))
    rows = delta.read(spark, path)
    assert rows.schema == schema
    assert sorted((row["id"], row["a.b"]["x"]) for row in rows.where("id is not null").collect()) == [(n, n) for n in range(3)]
    assert rows.where("`a.b` is null and id is null").count() == 3
    found = file_table.open_table(path)
    assert (found.version, found.lsn, found.schema, found.physical) == (3, 20, schema, made.physical)

    wider = StructType(
        [*schema.fields[:2], StructField("a.b", StructType([*schema["a.b"].dataType, StructField("y z", DateType())]))]
    )
    wider = StructType([*wider.fields, *schema.fields[3:], StructField("new", DecimalType(12, 2))])
    assert delta.add_columns(spark, path, schema, wider)
    assert not delta.add_columns(spark, path, wider, wider)
    assert file_table.open_table(path).schema == wider
    with pytest.raises(file_table.ChangedError):
        file_table.commit(made, [], Position(1, 30))


def test_a_checkpoint_in_another_thread_has_an_active_session(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta reads an earlier checkpoint in the background. If that fails, it needs the thread's session to read it again."""
    delta.create(tmp_path / "t", spark.range(1), {})
    seen = []
    name = places.name

    def look(path: Path) -> str:
        sessions = spark._jvm.org.apache.spark.sql.classic.SparkSession
        seen.append(sessions.getActiveSession().isDefined())
        return name(path)

    monkeypatch.setattr(places, "name", look)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            pool.submit(spark._jvm.org.apache.spark.sql.classic.SparkSession.clearActiveSession).result()
            pool.submit(delta.checkpoint, spark, tmp_path / "t").result()
    assert seen == [True, True]
    assert (tmp_path / "t/_delta_log/_last_checkpoint").exists()
