"""Upkeep of the tables: what it compacts and deletes, and that it does not disturb readers and writers."""

import itertools
import json
import logging
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from cdcpipe.pgoutput.messages import Insert
from spark_sink.changelog.interface import Changelogs
from spark_sink.delta import file_table
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.delta.file_table import ChangedError
from spark_sink.delta.log import TableLog, commits, read_table
from spark_sink.delta.removed_files import keep_names
from spark_sink.delta.unused_files import unused_files
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.replica import merge
from spark_sink.schema.table import MESSAGES, Table, Version
from spark_sink.spark import session
from spark_sink.staging.log import Position
from spark_sink.upkeep import upkeep
from spark_sink.upkeep.upkeep import Upkeep
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import Warehouse
from support.pgoutput_build import build
from support.segments import Log, relation
from support.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

FRUIT = Table("public", "fruit")


@pytest.fixture
def house(spark: "SparkSession", tmp_path: Path) -> Warehouse:
    """A changelog of three small files, and no replica."""
    made = Warehouse(tmp_path, "delta")
    (tmp_path / "_cdcpipe").mkdir()
    made.write_versions(FRUIT, [Version(0, 0, 1, ("id",), ("id",))])
    for lsn in (1, 2, 3):
        rows = spark.range(lsn, lsn + 1).coalesce(1)
        with delta.recording(spark, Position(1, lsn)):
            if lsn == 1:
                delta.create(made.changelog(FRUIT), rows, {})
            else:
                rows.write.format("delta").mode("append").save(str(made.changelog(FRUIT)))
    return made


def state(path: Path) -> Any:
    found = read_table(path)
    assert found is not None
    return found


def test_small_files_become_one_and_old_ones_go(
    spark: "SparkSession", house: Warehouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = house.changelog(FRUIT)
    care = Upkeep(spark, house, TableLock(house.root), optimize_interval_s=3600.0, vacuum_retention_s=3600.0)
    care.run()
    assert state(path).files == 3  # not so many that it would be worth it
    monkeypatch.setattr(upkeep, "_MOST_SMALL_FILES", 2)
    care.run(lambda: True)
    assert state(path).files == 3  # asked to stop
    care.run()
    assert (state(path).files, state(path).rows, state(path).lsn) == (1, 3, 3)
    # The pipeline goes on, and a commit that was made before is still known to be.
    found = delta.state(path)
    assert found is not None
    assert found.lsn == 3
    with delta.recording(spark, Position(1, 3)):
        spark.range(1).write.format("delta").mode("append").save(str(path))
    assert state(path).rows == 3
    with delta.recording(spark, Position(1, 4)):
        spark.range(1).coalesce(1).write.format("delta").mode("append").save(str(path))
    assert state(path).rows == 4
    assert sorted(row.id for row in delta.read(spark, path).collect()) == [0, 1, 2, 3]

    # The table was new a moment ago: VACUUM comes tomorrow.
    files = sorted(path.rglob("*.parquet"))
    assert len(files) == 5
    noted = house.root / "_cdcpipe/vacuumed.json"
    assert list(json.loads(noted.read_text())) == ["changelog/public.fruit"]
    hours_ago = time.time() - 7200
    for file in files:
        os.utime(file, (hours_ago, hours_ago))
    care.run()
    assert len(list(path.rglob("*.parquet"))) == 5
    noted.write_text(json.dumps({"changelog/public.fruit": time.time() - 86_401}))
    log = path / "_delta_log"
    for commit in log.glob("*.json"):  # they say when files were removed
        old = commit.read_text().splitlines()
        changed = [_aged(json.loads(line)) for line in old]
        commit.write_text("\n".join(map(json.dumps, changed)) + "\n")
        (log / f".{commit.name}.crc").unlink(missing_ok=True)
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    version = state(path).version
    Upkeep(spark, house, TableLock(house.root), optimize_interval_s=None, vacuum_retention_s=3600.0).run()
    assert len(list(path.rglob("*.parquet"))) == 2
    # Only for the property that the checkpoint below obeys. A commit of VACUUM's own might take the place of a micro-batch's.
    assert commits(path)[-1] == version + 1
    # Nor does a checkpoint name the removed files any more. Every query would read their names.
    delta.checkpoint(spark, path)
    removed = pq.read_table(max(log.glob("*.checkpoint.parquet")), columns=["remove"])["remove"]
    assert removed.null_count == len(removed)
    assert sorted(row.id for row in delta.read(spark, path).collect()) == [0, 1, 2, 3]
    assert not [
        record for record in caplog.records if record.levelno >= logging.WARNING and record.name == "spark_sink.upkeep.upkeep"
    ]


def _aged(action: dict[str, Any]) -> dict[str, Any]:
    if "remove" in action:
        action["remove"]["deletionTimestamp"] -= 7_200_000
    return action


def test_settings_that_a_session_got_after_its_start_hold_for_upkeep(spark: "SparkSession", house: Warehouse) -> None:
    """They may be what makes it reach a store. Those of upkeep stay its own."""
    given, own = session.copy(spark), "spark.databricks.delta.retentionDurationCheck.enabled"
    given.conf.set("spark.hadoop.fs.s3a.endpoint", "http://minio:9000")
    care = Upkeep(given, house, TableLock(house.root), optimize_interval_s=None, vacuum_retention_s=None)
    assert care._spark.conf.get("spark.hadoop.fs.s3a.endpoint") == "http://minio:9000"
    assert (care._spark.conf.get(own), given.conf.get(own, None)) == ("false", None)


def test_vacuum_deletes_no_file_that_is_not_listed(spark: "SparkSession", house: Warehouse) -> None:
    """A file that a micro-batch commits while VACUUM works is old and unknown to it, if the machine has paused meanwhile."""
    path = house.root / "Odd %41 ü"  # what URLs and Hadoop's paths write otherwise
    delta.create(path, spark.range(3).coalesce(1), {})
    keep_names(path, 0.0)
    delta.overwrite(path, spark.range(5).coalesce(1))
    for name in ("part-left-over %41.parquet", "part-later.parquet"):
        (path / name).write_bytes(b"rows")
    hour_ago = time.time() - 3600
    for file in path.glob("*.parquet"):
        os.utime(file, (hour_ago, hour_ago))
    log = TableLog(path).refresh()
    unused = unused_files(log, time.time())
    assert len(unused) == 3
    care = upkeep.Upkeep(spark, house, TableLock(house.root), optimize_interval_s=None, vacuum_retention_s=None)
    delta.vacuum(care._spark, path, [file for file in unused if file.name != "part-later.parquet"], 0.0)
    assert {file.name for file in path.glob("*.parquet")} == {*(each["path"] for each in log.files), "part-later.parquet"}
    assert delta.read(spark, path).count() == 5


def test_logs_are_cut_off_at_an_old_checkpoint(spark: "SparkSession", house: Warehouse, caplog: pytest.LogCaptureFixture) -> None:
    path, kept = house.changelog(FRUIT), house.replica(FRUIT)
    log = path / "_delta_log"
    forever = {"delta.logRetentionDuration": "interval 1000 days"}
    delta.create(kept, spark.range(3), forever)
    left_behind = file_table.open_table(path)
    for number in range(3, 9):
        table = file_table.open_table(path)
        assert table.version == number - 1
        file_table.commit(table, [], Position(1, 10 + number))
        if number in (4, 7):
            delta.checkpoint(spark, path)
    delta.checkpoint(spark, kept)
    file_table.commit(file_table.open_table(kept), [], Position(1, 20))
    older = delta.read(spark, path)  # as of now
    file_table.commit(file_table.open_table(path), [], Position(1, 30))
    assert commits(path) == [7, 8, 9]  # the others nobody needs
    care = Upkeep(spark, house, TableLock(house.root), optimize_interval_s=None, vacuum_retention_s=None, log_retention_s=86_400.0)
    care.run()
    assert len(list(log.glob("*.json"))) == 10
    two_days_ago = time.time() - 172_800
    old = [files for version, files in of_versions(log).items() if version < 6]
    for file in itertools.chain(*old, *of_versions(kept / "_delta_log").values()):
        os.utime(file, (two_days_ago, two_days_ago))
    care.run()
    # All that came since then is there, and what it begins with; of what was before nothing is.
    assert sorted(of_versions(log)) == list(range(4, 10))
    assert len(list(kept.joinpath("_delta_log").glob("*.json"))) == 2
    (log / "_last_checkpoint").unlink()  # it is but a hint
    assert commits(path) == list(range(4, 10))
    assert (delta_log.newest_lsn(path), state(path).rows, state(path).lsn) == (30, 3, 30)
    assert older.count() == 3
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    there = spark.read.format("delta")
    assert [there.option("versionAsOf", version).load(str(path)).count() for version in (4, 7, 9)] == [3, 3, 3]
    # Somebody who knew the table before must not make a commit that nobody would read.
    with pytest.raises(ChangedError):
        file_table.commit(left_behind, [], Position(1, 40))
    assert commits(path) == list(range(4, 10))
    file_table.commit(file_table.open_table(path), [], Position(1, 40))
    spark.range(1).coalesce(1).write.format("delta").mode("append").save(str(path))
    assert (delta_log.newest_lsn(path), state(path).rows, delta.read(spark, path).count()) == (40, 4, 4)
    assert not [
        record for record in caplog.records if record.levelno >= logging.WARNING and record.name == "spark_sink.upkeep.upkeep"
    ]


def of_versions(log: Path) -> dict[int, list[Path]]:
    """Return the files that a log has of each version, with the checksums."""
    found: dict[int, list[Path]] = {}
    for path in log.iterdir():
        if (match := re.match(r"\.?([0-9]{20})\.", path.name)) is not None:
            found.setdefault(int(match[1]), []).append(path)
    return found


def test_upkeep_that_fails_is_a_warning(
    spark: "SparkSession", house: Warehouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upkeep, "_MOST_SMALL_FILES", 2)
    broken = house.changelog(MESSAGES) / "_delta_log"
    broken.mkdir(parents=True)
    (broken / f"{0:020d}.json").write_text("{")
    delta.create(house.replica(FRUIT), spark.range(3).repartition(3), {})
    lock = TableLock(house.root)
    care = Upkeep(spark, house, lock, optimize_interval_s=0.0, vacuum_retention_s=None)
    with caplog.at_level(logging.WARNING):
        with lock.merge():
            care.start()
            until(lambda: state(house.changelog(FRUIT)).files == 1)
            assert state(house.replica(FRUIT)).files == 3  # a merge runs
        until(lambda: state(house.replica(FRUIT)).files == 1)
        until(lambda: "_cdc_message" in caplog.text)
        care.stop()
    care.run()  # stopped is stopped
    assert "_cdc_message was not compacted this time" in caplog.text
    assert not (house.root / "_cdcpipe/vacuumed.json").exists()


def test_a_clustered_table_is_written_anew_only_for_another_key(
    spark: "SparkSession", house: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta tells the clustering columns in its quotes."""
    key, path = ("a`b", "c.d"), house.replica(FRUIT)
    house.write_versions(FRUIT, [Version(0, 0, 7, key, key)])
    delta.create(path, spark.range(9).selectExpr("id as `a``b`", "id as `c.d`"), {})
    monkeypatch.setattr(upkeep, "_MOST_SMALL_FILES", 0)
    care = Upkeep(spark, house, TableLock(house.root), optimize_interval_s=3600.0, vacuum_retention_s=None, clustering=True)

    def operations() -> list[str]:
        return [row.operation for row in spark.sql(f"DESCRIBE HISTORY {delta.table_name(path)}").collect()][::-1]

    for _ in range(2):
        care.run()
        assert operations()[-2:] == ["CLUSTER BY", "OPTIMIZE"]
    assert state(path).is_clustered
    house.write_versions(FRUIT, [Version(0, 0, 7, key[1:], key[1:])])
    spark.sql(
        f"ALTER TABLE {delta.table_name(path)} CLUSTER BY (`c.d`)"
    )  # a run that was ended while it sorted has done this alone
    for _ in range(2):
        care.run()
        assert operations()[-4:] == ["CLUSTER BY", "OPTIMIZE"] * 2
    spark.sql(f"ALTER TABLE {delta.table_name(path)} CLUSTER BY NONE")
    assert not state(path).is_clustered


def test_a_stop_cancels_the_jobs_of_delta(
    spark: "SparkSession", house: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Delta runs the jobs of OPTIMIZE in threads of its own."""
    monkeypatch.setattr(upkeep, "_MOST_SMALL_FILES", 2)
    monkeypatch.setattr(upkeep, "_compact", lambda *_: False)
    marks, cores = tmp_path / "marks", spark.sparkContext.defaultParallelism
    marks.mkdir()

    def hold(core: int) -> int:
        (marks / f"begun-{core}").touch()
        while not (marks / "end").exists():
            time.sleep(0.02)
        return core

    path, jobs = house.changelog(FRUIT), spark.sparkContext.statusTracker()
    care = Upkeep(spark, house, TableLock(house.root), optimize_interval_s=3600.0, vacuum_retention_s=None)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(spark.sparkContext.range(cores, numSlices=cores).map(hold).collect)
        try:
            until(lambda: len(list(marks.iterdir())) == cores)
            holding = set(jobs.getActiveJobsIds())
            care.start()
            until(lambda: set(jobs.getActiveJobsIds()) - holding)  # it waits for a core
            care.stop()
            assert set(jobs.getActiveJobsIds()) == holding
        finally:
            (marks / "end").touch()
        assert held.result() == list(range(cores))
    assert (state(path).files, caplog.messages) == (3, [])
    Upkeep(spark, house, TableLock(house.root), optimize_interval_s=3600.0, vacuum_retention_s=None).run()
    assert state(path).files == 1


def test_nothing_is_done_where_nothing_is_asked_for(
    spark: "SparkSession", house: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_MOST_SMALL_FILES", 0)
    Upkeep(spark, house, TableLock(house.root), optimize_interval_s=None, vacuum_retention_s=None).run()
    Upkeep(spark, Warehouse(house.root, "parquet"), TableLock(house.root), optimize_interval_s=0.0, vacuum_retention_s=0.0).run()
    assert state(house.changelog(FRUIT)).files == 3


def test_the_pipeline_writes_under_the_locks_that_upkeep_takes(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a local disk: Spark's commit of an OPTIMIZE would overwrite a commit of ours that it does not see."""
    log = Log(tmp_path / "staging")
    log.segment([build(Insert(None, 1, (b"1",)))], before=[relation(1, "fruit", ("id", 23))])
    pipeline: Any = Pipeline(spark, log.root, tmp_path / "warehouse")
    held: dict[str, list[bool]] = {"replica": [], "changelog": []}

    def observe(module: Any, name: str, lock: threading.Lock, kind: str) -> None:
        function = getattr(module, name)

        def observed(*arguments: Any, **options: Any) -> Any:
            held[kind].append(lock.locked())
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, observed)

    observe(merge, "merge_changes", pipeline.lock._merging, "replica")
    observe(Changelogs, "commit_files", pipeline.lock._appending, "changelog")
    pipeline.process_available()
    assert state(tmp_path / "warehouse/replica/public.fruit").rows == 1
    assert held["replica"]
    assert held["changelog"]
    assert all(held["replica"] + held["changelog"])
    tables = TableLock(tmp_path / "warehouse")
    for right, lock in ((pipeline.lock.merge, pipeline.lock._merging), (pipeline.lock.append, pipeline.lock._appending)):
        with right():
            assert lock.locked()
            with pytest.raises(InterruptedError), tables.alone(lambda: True):
                pass
        assert not lock.locked()


def test_a_changelog_is_compacted_while_no_append_runs(
    spark: "SparkSession", house: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_MOST_SMALL_FILES", 2)
    path, lock = house.changelog(FRUIT), TableLock(house.root)
    care = Upkeep(spark, house, lock, optimize_interval_s=3600.0, vacuum_retention_s=None)
    with lock.append():
        care.start()
        until(lambda: path in care._states)  # it has seen that there is something to do
        assert state(path).files == 3
    until(lambda: state(path).files == 1)
    care.stop()
