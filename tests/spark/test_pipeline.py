"""From a real server to tables: a replica holds the rows of its table, whatever happens in between."""

import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import postgres
import pytest

from cdcpipe.errors import CdcpipeError, InitError, InvalidArgumentsError
from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.messages import Insert
from cdcpipe.sql import quote_identifier
from spark_sink.changelog import writer
from spark_sink.changelog.interface import Changelogs
from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.delta.compaction import compact
from spark_sink.delta.file_table import ChangedError
from spark_sink.delta.rows import UnsupportedError
from spark_sink.pipeline import fit
from spark_sink.pipeline.failures import PipelineError
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.replica import merge
from spark_sink.replica.current import read_replica, register_views
from spark_sink.schema import types
from spark_sink.schema.table import MESSAGES, SCHEMA_HISTORY, Table
from spark_sink.spark import session
from spark_sink.staging.log import Position, list_segments, log_end
from spark_sink.staging.readers import read_readers, register_reader
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.lock import lock_file
from spark_sink.warehouse.warehouse import CHECKPOINT, Warehouse
from support.locks import held_elsewhere
from support.road import BIG, HOSTILE, Road, identity_workload
from support.segments import Log, relation
from support.waiting import SPARK_DEADLINE_S, until

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def road(pg18: postgres.Cluster, spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    """Run the whole `scenario` once, in three micro-batches. The tests look at the result."""
    with pg18.database() as database:
        made = Road(database, spark, tmp_path_factory.mktemp("road"))
        made.execute(*TABLES)
        made.run()
        made.execute(*FIRST)
        made.run()
        made.execute(*SECOND)
        for statement in identity_workload(random.Random(SEED)):
            made.execute(*(statement.format(table=f"identity_{which}") for which in IDENTITIES))
        made.run()
        yield made
        made.connection.close()


SEED = random.randrange(10**6)
IDENTITIES = {
    "default": "default",
    "full": "full",
    "index": "using index identity_index_other",
}
TABLES = [
    "create type mood as enum ('sad', 'ok')",
    """create table kinds (id int primary key, flag boolean, small smallint, big bigint, price numeric(12, 2),
       loose numeric, ratio double precision, word varchar(10), data bytea, day date, moment timestamp,
       instant timestamptz, clock time, ident uuid, doc jsonb, many int[], mood mood)""",
    *(
        statement
        for which in ("default", "full")
        for statement in (
            f"create table toast_{which} (id int primary key, a int, b text)",
            f"alter table toast_{which} alter b set storage external",
            f"alter table toast_{which} replica identity {which}",
        )
    ),
    *(
        statement
        for which, identity in IDENTITIES.items()
        for statement in (
            f"create table identity_{which} (id int primary key, other int not null, a int, b text)",
            f"create unique index identity_{which}_other on identity_{which} (other)",
            f"alter table identity_{which} alter b set storage external",
            f"alter table identity_{which} replica identity {identity}",
        )
    ),
    "create table cleared (id int primary key)",
    "create table cleared_too (id int primary key)",
    "create table evolving (id int primary key, a int, b text)",
    "create table followed (id int primary key)",
    "create table renewed (id int primary key, a text)",
    "create table keyless (x int)",
    "alter table keyless replica identity full",
    "create table instants (at timestamptz primary key, a int)",
    "create table told (id int primary key, lsn pg_lsn)",
    *(f'create table {quote_identifier(name)} (id int primary key, "ID" int, "a.b" text, _cdc_op int)' for name in HOSTILE),
]
FIRST = [
    """insert into kinds values
       (1, true, -32768, 9223372036854775807, 9999999999.99, 12345678901234567890.12345678901234567890, 0.1, 'word',
        '\\x00ff', '2024-02-29', '2024-03-10 02:30:00.123456', '2024-03-10 02:30:00.5+00', '24:00',
        'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{"a": 1.10}', '{1,NULL}', 'ok'),
       (2, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null)""",
    """insert into kinds (id, price, day, moment, instant, loose) values
       (3, 'NaN', 'infinity', '-infinity', '0044-03-15 12:00:00 BC', 'NaN'),
       (4, 1.10, '10000-01-01', '9999-12-31 23:59:59.999999', '294276-12-31', 1.10)""",
    *(
        f"insert into toast_{which} select i, i, repeat(md5(i::text), {BIG // 32}) from generate_series(1, 9) i"
        for which in ("default", "full")
    ),
    "insert into cleared select generate_series(1, 5)",
    "insert into cleared_too select generate_series(1, 5)",
    "insert into evolving select i, i, 'b' || i from generate_series(1, 5) i",
    "insert into renewed values (1, 'of the first table'), (2, 'too')",
    "insert into keyless values (1), (1), (2)",
    "insert into instants values ('infinity', 1), ('-infinity', 2), ('2024-01-01 00:00+00', 3), ('4713-01-01 BC', 4)",
    *(f"insert into {quote_identifier(name)} values ({number}, {number + 1}, 'x', 5)" for number, name in enumerate(HOSTILE)),
    "select pg_logical_emit_message(true, 'alone', 'in a transaction of its own')",
    (
        "begin; insert into told values (1, null); "
        "insert into told values (2, pg_logical_emit_message(true, 'inside', '\\x00ff'::bytea)); "
        "insert into told values (3, pg_logical_emit_message(true, 'präfix', '')); commit"
    ),
    "begin; insert into told values (4, null); select pg_logical_emit_message(false, 'aside', 'stays'); rollback",
    "begin; select pg_logical_emit_message(true, 'alone', 'rolled back'); rollback",
    "insert into told values (5, null)",
]
SECOND = [
    "update kinds set day = '2025-01-01' where id = 3",
    *(
        statement.format(t=f"toast_{which}")
        for which in ("default", "full")
        for statement in (
            "update {t} set a = 100 where id = 1",
            "begin; insert into {t} values (10, 10, repeat('x', 5000)); update {t} set a = 11 where id = 10; commit",
            "update {t} set id = 20 where id = 2",
            (
                "begin; delete from {t} where id = 3; insert into {t} values (3, 3, repeat('new', 2000)); "
                "update {t} set a = 33 where id = 3; commit"
            ),
            "update {t} set b = null where id = 4",
            # Rows that change their key several times, and that change places.
            "begin; update {t} set id = 50, a = 0 where id = 5; update {t} set id = 51 where id = 50; commit",
            (
                "begin; update {t} set id = 0 where id = 6; update {t} set id = 6 where id = 7; "
                "update {t} set id = 7 where id = 0; commit"
            ),
            "begin; update {t} set id = 80 where id = 8; update {t} set id = 8, a = 1 where id = 80; commit",
        )
    ),
    "begin; insert into cleared values (6); truncate cleared, cleared_too; insert into cleared values (7); commit",
    # All of it in one transaction: each row is read with the description that is in force at its place.
    (
        "begin; insert into evolving values (6, 6, 'b6'); alter table evolving add column c int default 7; "
        "insert into evolving values (7, 7, 'b7', 7); alter table evolving drop column a; "
        "insert into evolving values (8, 'b8', 8); alter table evolving rename column b to bb; "
        "insert into evolving values (9, 'b9', 9); alter table evolving alter c type text using 'T' || c; "
        "insert into evolving values (10, 'b10', 'T10'); update evolving set bb = 'changed' where id = 1; commit"
    ),
    "drop table renewed",
    "create table renewed (code text primary key, b int)",
    "insert into renewed values ('of the second table', 1)",
    "update keyless set x = 3 where x = 2",
    "update instants set a = a + 10",
    "delete from instants where at = '-infinity'",
    "update instants set at = 'infinity'::timestamptz - interval '1 day' where a = 99",
    "update instants set at = '-infinity' where at = '2024-01-01 00:00+00'",
    *(f"update {quote_identifier(name)} set id = id + 100 where id < 2" for name in HOSTILE),
    (
        "begin; savepoint s; select pg_logical_emit_message(true, 'inside', 'undone'); rollback to s; "
        "insert into told values (6, pg_logical_emit_message(true, 'inside', repeat('large', 1000000))); commit"
    ),
    "select pg_logical_emit_message(false, 'aside', 'too')",
]
SAID = [
    ("alone", b"in a transaction of its own", True, 0),
    ("inside", b"\x00\xff", True, 1),
    ("präfix", b"", True, 2),
    ("aside", b"stays", False, 0),
    ("inside", b"large" * 1000000, True, 0),
    ("aside", b"too", False, 0),
]
"""The logical messages in the order of their LSNs, each with its ordinal; those that were undone are not there."""


def test_typed_columns(road: Road) -> None:
    same = ["id", "flag", "small", "big", "price", "loose", "word", "clock", "ident", "doc", "mood"]
    rows = {row["id"]: row for row in road.replica("public.kinds").selectExpr("*", "string(instant) as shown").collect()}
    assert road.replica("public.kinds").selectExpr("array(ratio)[0] as r").where("r = 0.1D").count() == 1
    finite = road.query(f"select {', '.join(f'{c}::text' for c in same)} from kinds where id <> 3")
    found = road.replica("public.kinds").where("id <> 3").selectExpr(*(f"string({c})" for c in same)).collect()
    assert sorted(map(tuple, found)) == sorted(finite)
    assert rows[1]["data"] == b"\x00\xff"
    assert rows[1]["many"] == [1, None]
    assert str(rows[1]["day"]) == "2024-02-29"
    assert str(rows[1]["moment"]) == "2024-03-10 02:30:00.123456"
    assert rows[1]["shown"] == "2024-03-10 02:30:00.5"
    assert rows[1]["_cdc_exact"] is None
    assert rows[3]["price"] is None
    assert rows[3]["loose"] == "NaN"
    assert str(rows[3]["day"]) == "2025-01-01"
    assert rows[3]["_cdc_exact"] == {"price": "NaN", "moment": "-infinity", "instant": "0044-03-15 12:00:00+00 BC"}
    assert rows[4]["_cdc_exact"] == {"day": "10000-01-01", "instant": "294276-12-31 00:00:00+00"}
    assert str(rows[4]["moment"]) == "9999-12-31 23:59:59.999999"


@pytest.mark.parametrize("which", ["default", "full"])
def test_unsent_values_are_kept(road: Road, which: str) -> None:
    road.assert_equal(f"toast_{which}", "id", "a", "b")
    rows = road.replica(f"public.toast_{which}")
    assert rows.columns == ["id", "a", "b"]
    assert [row["id"] for row in rows.where("b is null").collect()] == [4]


@pytest.mark.parametrize("which", list(IDENTITIES))
def test_every_identity_gives_the_same_replica(road: Road, which: str) -> None:
    print("seed", SEED)
    road.assert_equal(f"identity_{which}", "id", "other", "a", "b")
    assert road.replica(f"public.identity_{which}").columns == ["id", "other", "a", "b"]
    changes = road.changelog("public", f"identity_{which}")
    assert changes.count() == road.changelog("public", "identity_default").count()
    assert changes.select("_cdc_end_lsn", "_cdc_ordinal").distinct().count() == changes.count()


def test_truncate_is_a_barrier(road: Road) -> None:
    assert [tuple(row) for row in road.replica("public.cleared").collect()] == [(7,)]
    assert road.replica("public.cleared_too").count() == 0


def test_a_table_may_change(road: Road) -> None:
    rows = {row["id"]: row.asDict() for row in road.replica("public.evolving").collect()}
    assert list(rows[1]) == ["id", "a", "b", "c", "bb", "c__string"]
    assert rows[5] == {"id": 5, "a": 5, "b": "b5", "c": None, "bb": None, "c__string": None}
    assert rows[7] == {"id": 7, "a": 7, "b": "b7", "c": 7, "bb": None, "c__string": None}
    assert rows[9] == {"id": 9, "a": None, "b": None, "c": 9, "bb": "b9", "c__string": None}
    assert rows[10] == {"id": 10, "a": None, "b": None, "c": None, "bb": "b10", "c__string": "T10"}
    assert rows[1]["bb"] == "changed"
    assert len(rows) == 10


def test_another_table_of_the_same_name(road: Road) -> None:
    rows = road.replica("public.renewed").collect()
    assert [(row["code"], row["b"]) for row in rows] == [("of the second table", 1)]
    assert road.changelog("public", "renewed").count() == 3


def test_a_table_without_key_has_a_changelog(road: Road) -> None:
    changes = road.changelog("public", "keyless")
    assert sorted(row["_cdc_op"] for row in changes.collect()) == ["insert"] * 3 + ["update"]
    assert [row["_cdc_old"]["x"] for row in changes.where("_cdc_op = 'update'").collect()] == [2]
    with pytest.raises(WarehouseError, match=r"public\.keyless has no key"):
        road.replica("public.keyless")


def test_keys_that_spark_cannot_hold(road: Road) -> None:
    rows = road.replica("public.instants").selectExpr("a", "string(at)", "_cdc_exact['at']").collect()
    assert sorted(tuple(row) for row in rows) == sorted(
        [(11, None, "infinity"), (13, None, "-infinity"), (14, None, "4713-01-01 00:00:00+00 BC")]
    )


def test_names(road: Road) -> None:
    for name in HOSTILE:
        table = Table("public", name)
        path = Warehouse.existing(road.warehouse).replica(table)
        assert path.resolve().parent == (road.warehouse / "replica").resolve()
        rows = read_replica(road.spark, road.warehouse, str(table))
        assert rows.count() == 1
        columns = ["id", "_cdc_column_%49%44", "a.b", "_cdc_column__cdc_op"]
        assert rows.columns == columns
        assert [types.original_name(column) for column in columns] == ["id", "ID", "a.b", "_cdc_op"]
        expected = road.query(f'select id, "ID", "a.b", _cdc_op from {quote_identifier(name)}')
        assert [tuple(row) for row in rows.collect()] == expected
    assert len({path.name.lower() for path in (road.warehouse / "changelog").iterdir()}) >= len(HOSTILE)


def assert_said(messages: Any) -> None:
    found = messages.orderBy("_cdc_lsn").select("prefix", "content", "transactional", "_cdc_ordinal").collect()
    assert [(row[0], bytes(row[1]), *row[2:]) for row in found] == SAID


def test_messages_are_at_their_place(road: Road) -> None:
    messages = road.messages()
    assert messages.schema == types.MESSAGE_SCHEMA
    assert_said(messages)
    # One that was written by an insert stands right before it, and has the LSN that the function returned.
    at = ["_cdc_epoch", "_cdc_end_lsn", "_cdc_ordinal", "_cdc_xid", "_cdc_commit_time"]
    told = road.changelog("public", "told")
    beside = {row["id"]: row["_cdc_lsn"] for row in told.join(messages, at).select("id", "_cdc_lsn").collect()}
    assert beside == {key: LSN.parse(lsn) for key, lsn in road.query("select id, lsn::text from told where lsn is not null")}
    ends = {row["id"]: row["_cdc_end_lsn"] for row in told.collect()}
    first, second = messages.where("not transactional").orderBy("_cdc_lsn").collect()
    for row in (first, second):
        assert row["_cdc_end_lsn"] == row["_cdc_lsn"]
        assert row["_cdc_xid"] is row["_cdc_commit_time"] is None
    assert ends[3] < first["_cdc_end_lsn"] < ends[5] < ends[6] < second["_cdc_end_lsn"]
    with pytest.raises(InvalidArgumentsError, match="no table '_cdc_message'"):
        road.replica("_cdc_message")


def test_nothing_twice_whatever_the_batches(road: Road) -> None:
    """A lost checkpoint, a checkpoint older than the tables, batches cut differently: every change is there once."""
    counts = {name: road.changelog("public", name).count() for name in ("kinds", "identity_full", "keyless")}
    house = Warehouse.existing(road.warehouse)
    versions = changelogs_of(road.spark, house).read(SCHEMA_HISTORY).count()
    checkpoint = house.local_root() / CHECKPOINT
    shutil.rmtree(checkpoint)
    # As if it had been killed while Spark wrote the first file of the new checkpoint.
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "offsets" / ".0.f3a1.tmp").write_text("v1")
    road.pipeline().process_available()
    # As if it had been killed before it could note how far it was, with some tables further than others.
    shutil.rmtree(checkpoint)
    house.record(Position(1, list_segments(road.staging)[0].start_lsn))
    shutil.rmtree(house.replica(Table("public", "identity_full")))
    before = len(list((house.changelog(Table("public", "kinds")) / "_delta_log").glob("*.json")))
    pipeline = road.pipeline(max_bytes_per_trigger=1, replica_interval_s=0)
    pipeline.process_available()
    assert pipeline.progress.position == log_end(road.staging)
    assert counts == {name: road.changelog("public", name).count() for name in counts}
    assert before == len(list((house.changelog(Table("public", "kinds")) / "_delta_log").glob("*.json")))
    road.assert_equal("identity_full", "id", "other", "a", "b")
    assert pipeline.progress.messages == len(SAID)
    assert_said(road.messages())
    assert changelogs_of(road.spark, house).read(SCHEMA_HISTORY).count() == versions > len(TABLES) / 2


def test_an_idle_pipeline_starts_no_job(road: Road) -> None:
    def jobs() -> int:
        """Return how many jobs there were, also those of the query's own group, which the status tracker does not count."""
        return road.spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs()

    pipeline = road.pipeline()
    pipeline.process_available()
    before = jobs()
    pipeline.process_available()
    assert jobs() == before


def test_a_replica_that_cannot_be_made_ends_the_pipeline(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise WarehouseError("no such luck")

    with monkeypatch.context() as patched:
        patched.setattr(merge, "merge_changes", fail)
        pipeline = road.pipeline(trigger_interval_s=0.2, replica_interval_s=0.2).start()
        road.execute("insert into followed values (30)")
        road.land()
        with pytest.raises(WarehouseError, match="no such luck"):
            pipeline.wait()
        pipeline.stop()
    road.pipeline().process_available()
    road.assert_equal("followed", "id")


def test_a_running_pipeline_follows(road: Road) -> None:
    """The schema changes while it runs. At its end it gives back all segments. Without messages it rests."""
    road.pipeline().process_available()
    log = Warehouse.existing(road.warehouse).changelog(MESSAGES) / "_delta_log"
    before = sorted(log.iterdir())
    replica_path = Warehouse.existing(road.warehouse).replica(Table("public", "followed"))
    with road.pipeline(trigger_interval_s=0.2, replica_interval_s=86400) as pipeline:
        until(lambda: pipeline.progress.position == log_end(road.staging), deadline_s=SPARK_DEADLINE_S)
        stands_at = delta_log.newest_lsn(replica_path)
        road.execute("alter table followed add column later text", "insert into followed values (20, 'later')")
        road.land()
        until(lambda: pipeline.progress.position == log_end(road.staging), deadline_s=SPARK_DEADLINE_S)
        assert delta_log.newest_lsn(replica_path) == stands_at
    road.assert_equal("followed", "id", "later")
    assert pipeline.progress.changes
    assert sorted(log.iterdir()) == before
    assert read_readers(road.staging)["tables"] == log_end(road.staging)


def test_parquet(road: Road, tmp_path: Path) -> None:
    """The same log, in small micro-batches, into a warehouse without Delta Lake."""
    warehouse = tmp_path / "parquet"
    register_reader(road.staging, "tables", Position(0, 0))
    pipeline = road.pipeline(warehouse, format="parquet", max_bytes_per_trigger=100_000)
    pipeline.process_available()
    for which in IDENTITIES:
        road.assert_equal(f"identity_{which}", "id", "other", "a", "b", warehouse=warehouse)
    for which in ("default", "full"):
        road.assert_equal(f"toast_{which}", "id", "a", "b", warehouse=warehouse)
    rows = road.replica("public.renewed", warehouse).collect()
    assert [(row["code"], row["b"]) for row in rows] == [("of the second table", 1)]
    assert_said(road.messages(warehouse))
    house = Warehouse.existing(warehouse)
    assert_said(road.spark.read.parquet(str(house.changelog(MESSAGES))))
    plain = road.spark.read.option("mergeSchema", "true").parquet(str(house.changelog(Table("public", "evolving"))))
    assert plain.count() == road.changelog("public", "evolving").count()
    assert {"a", "b", "bb", "c", "c__string"} <= set(plain.columns)
    names = register_views(road.spark, warehouse)
    assert "public.cleared" in names
    assert "public.keyless" not in names
    assert road.spark.table("`public.cleared`").count() == road.query("select count(*) from cleared")[0][0]
    with pytest.raises(InvalidArgumentsError, match="parquet tables, not delta"):
        road.pipeline(warehouse).process_available()


def test_small_files_of_changelogs_are_put_together_without_spark(road: Road, tmp_path: Path) -> None:
    """For Spark the rows are the same, whatever their types. Files from before a column was added are left to OPTIMIZE."""
    house, done, left = Warehouse.existing(road.warehouse), set(), set()
    for table in house.tables():
        path = tmp_path / table.name
        shutil.copytree(house.changelog(table), path)
        before = sorted(map(str, delta.read(road.spark, path).collect()))
        try:
            gone = compact(path, 1 << 30, nullcontext)
        except UnsupportedError:
            left.add(table.name)
        else:
            done |= {table.name} if gone > 1 else set()
        assert sorted(map(str, delta.read(road.spark, path).collect())) == before, table
    assert {"kinds", "toast_default"} <= done
    assert left <= {"evolving", "followed", "renewed"}  # their columns have changed


def test_a_warehouse_of_another_slot_is_refused(road: Road, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    epoch = staging / "000001"
    epoch.mkdir(parents=True)
    text = max(road.staging.glob("*/epoch.json")).read_text()
    (epoch / "epoch.json").write_text(text.replace('"tables"', '"other"'))
    with pytest.raises(InvalidArgumentsError, match="changes of slot 'tables'"):
        Pipeline(road.spark, staging, road.warehouse).process_available()


def test_a_micro_batch_that_begins_during_a_stop(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark would wait for the micro-batch, and the micro-batch for the stop. So it is refused, and comes with the next start."""
    log, described = Log(tmp_path / "staging"), relation(10, "t", ("id", 23))
    log.segment([described, Insert(None, 10, (b"1",))])
    pipeline = Pipeline(spark, log.root, tmp_path / "warehouse", format="parquet", trigger_interval_s=0.0)
    calls: list[int] = []
    batch = pipeline._batch

    def begin(rows: Any, batch_id: int) -> None:
        calls.append(batch_id)
        batch(rows, batch_id)

    def let_another_begin() -> bool:
        log.segment([described, Insert(None, 10, (b"2",))])
        until(lambda: calls == [0, 1], deadline_s=SPARK_DEADLINE_S)
        return True

    monkeypatch.setattr(pipeline, "_batch", begin)
    monkeypatch.setattr(pipeline, "_is_recorded", let_another_begin)
    pipeline.start()
    until(lambda: pipeline.progress.batches == 1, deadline_s=SPARK_DEADLINE_S)
    stopping = threading.Thread(target=pipeline.stop, daemon=True)
    stopping.start()
    stopping.join(240)
    assert not stopping.is_alive()
    assert pipeline.wait()
    assert pipeline.progress.changes == 1
    again = Pipeline(spark, log.root, tmp_path / "warehouse", format="parquet")
    again.process_available()
    assert again.progress.changes == 1
    assert read_replica(spark, tmp_path / "warehouse", "public.t").count() == 2


def test_a_micro_batch_that_waits_for_another_process_during_a_stop(spark: Any, tmp_path: Path) -> None:
    """The query ends in order, although the run is asked to stop some time before it stops the pipeline."""
    log, described = Log(tmp_path / "staging"), relation(10, "t", ("id", 23))
    log.segment([described, Insert(None, 10, (b"1",))])
    stopping, looks = threading.Event(), threading.Semaphore(0)
    pipeline = Pipeline(
        spark, log.root, tmp_path / "warehouse", format="parquet", is_stopping=lambda: looks.release() or stopping.is_set()
    )
    pipeline.start()
    until(lambda: pipeline.progress.batches == 1, deadline_s=SPARK_DEADLINE_S)
    with held_elsewhere(lock_file(tmp_path / "warehouse")):
        log.segment([described, Insert(None, 10, (b"2",))])
        assert looks.acquire(timeout=SPARK_DEADLINE_S)
        stopping.set()
        assert not pipeline.wait(1.0)
        pipeline.stop()
        assert pipeline.wait()
    assert pipeline.progress.changes == 1
    again = Pipeline(spark, log.root, tmp_path / "warehouse", format="parquet")
    again.process_available()
    assert again.progress.changes == 1


def test_two_pipelines_work_in_one_session(spark: Any, tmp_path: Path) -> None:
    """Each has a session of its own. In one for both, Spark refused the second query, because it has the name of the first."""
    described = relation(10, "t", ("id", 23))
    made: list[Pipeline] = []
    with ExitStack() as stack:
        for name in ("a", "b"):
            log = Log(tmp_path / name / "staging")
            log.segment([described, Insert(None, 10, (b"1",))])
            made.append(stack.enter_context(Pipeline(spark, log.root, tmp_path / name / "warehouse", format="parquet")))
        assert spark.streams.active == []  # a cell that stops all of the user's queries stops none of these
        for each in made:
            until(lambda each=each: each.progress.changes == 1, deadline_s=SPARK_DEADLINE_S)
    assert all(each.wait() for each in made)


def test_a_query_that_a_program_stops(spark: Any, tmp_path: Path) -> None:
    """For Spark that is a good end."""
    log = Log(tmp_path / "staging")
    log.segment([relation(10, "t", ("id", 23)), Insert(None, 10, (b"1",))])
    pipeline = Pipeline(spark, log.root, tmp_path / "warehouse", format="parquet").start()
    for query in pipeline.spark.streams.active:
        query.stop()
    with pytest.raises(PipelineError, match="Spark's query was stopped, but not by its Pipeline"):
        pipeline.wait()
    pipeline.stop()
    pipeline.process_available()
    assert read_replica(spark, tmp_path / "warehouse", "public.t").count() == 1


def test_a_checkpoint_that_a_power_cut_has_damaged(spark: Any, tmp_path: Path) -> None:
    """Spark has synced none of its files. The tables go on from where they are."""
    log, described = Log(tmp_path / "staging"), relation(10, "t", ("id", 23))

    def process(number: int) -> Pipeline:
        log.segment([described, Insert(None, 10, (b"%d" % number,))])
        pipeline = Pipeline(spark, log.root, tmp_path / "warehouse")
        pipeline.process_available()
        assert pipeline.progress.changes == 1
        return pipeline

    checkpoint = process(0).checkpoint
    process(1)
    for number, name in enumerate(("metadata", "commits/1", "offsets/1"), 2):
        (checkpoint / name).write_bytes(bytes(number % 2 * 40))
        process(2 * number)
        process(2 * number + 1)
    assert read_replica(spark, tmp_path / "warehouse", "public.t").count() == 8


def test_a_new_warehouse_does_not_go_on_from_the_checkpoint_of_the_one_before(spark: Any, tmp_path: Path) -> None:
    """The checkpoint may be elsewhere than the warehouse. A run then ended with an error at each start."""
    log, described = Log(tmp_path / "staging"), relation(10, "t", ("id", 23))
    for number in range(2):
        log.segment([described, Insert(None, 10, (b"%d" % number,))])
        pipeline = Pipeline(spark, log.root, tmp_path / "warehouse", checkpoint=tmp_path / "checkpoint")
        pipeline.process_available()
        assert pipeline.progress.changes == number + 1
        shutil.rmtree(tmp_path / "warehouse")


def test_a_changelog_that_has_gone_is_not_begun_anew(spark: Any, tmp_path: Path) -> None:
    log, described = Log(tmp_path / "staging"), relation(10, "t", ("id", 23))
    log.segment([described, Insert(None, 10, (b"1",))])
    pipeline = Pipeline(spark, log.root, tmp_path / "warehouse")
    pipeline.process_available()
    path = pipeline.warehouse.changelog(Table("public", "t"))
    shutil.rmtree(path)
    log.segment([described, Insert(None, 10, (b"2",))])
    for checkpoint in (pipeline.checkpoint, tmp_path / "another"):
        with pytest.raises(WarehouseError, match=r"changelog of public\.t, .* has gone") as raised:
            Pipeline(spark, log.root, tmp_path / "warehouse", checkpoint=checkpoint).process_available()
        assert "snapshot --table public.t; " in str(raised.value.hint)
    assert not path.exists()


@pytest.mark.parametrize(("module", "function"), [(fit, "check_tables"), (writer, "write")])
def test_a_changelog_that_goes_while_the_pipeline_runs_is_not_begun_anew(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, function: str
) -> None:
    """The new one had the last changes only, and was taken for the whole changelog from then on."""
    log, described = Log(tmp_path / "staging"), relation(10, "t", ("id", 23))
    log.segment([described, Insert(None, 10, (b"1",))])
    pipeline = Pipeline(spark, log.root, tmp_path / "warehouse")
    pipeline.process_available()
    path = pipeline.warehouse.changelog(Table("public", "t"))
    log.segment([described, Insert(None, 10, (b"2",))])
    call = getattr(module, function)

    def remove_then(*arguments: Any) -> Any:
        found = call(*arguments)
        shutil.rmtree(path)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(module, function, remove_then)
        with pytest.raises(CdcpipeError, match=r"changelog of public\.t, .* has gone"):
            Pipeline(spark, log.root, tmp_path / "warehouse").process_available()
    with pytest.raises(WarehouseError, match=r"changelog of public\.t, .* has gone"):
        Pipeline(spark, log.root, tmp_path / "warehouse").process_available()


def test_a_changelog_that_another_program_changes_again_and_again(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, described = Log(tmp_path / "staging"), relation(10, "t", ("id", 23))
    log.segment([described, Insert(None, 10, (b"1",))])
    attempts: list[Table] = []

    commit_files = Changelogs.commit_files

    def change(changelogs: Changelogs[Any], table: Table, *others: Any) -> None:
        if table == SCHEMA_HISTORY:
            return commit_files(changelogs, table, *others)
        attempts.append(table)
        raise ChangedError

    with monkeypatch.context() as patched:
        patched.setattr(Changelogs, "commit_files", change)
        with pytest.raises(WarehouseError, match="changed by another program"):
            Pipeline(spark, log.root, tmp_path / "warehouse").process_available()
    assert len(attempts) == 10
    pipeline = Pipeline(spark, log.root, tmp_path / "warehouse")
    pipeline.process_available()
    assert changelogs_of(spark, pipeline.warehouse).read(Table("public", "t")).count() == 1


def test_a_session_without_delta_is_refused(spark: Any) -> None:
    catalog = spark.conf.get("spark.sql.catalog.spark_catalog")
    spark.conf.set("spark.sql.catalog.spark_catalog", "org.example.Another")
    try:
        with pytest.raises(InitError, match="no Delta Lake"):
            session.check(spark, "delta")
        session.check(spark, "parquet")
    finally:
        spark.conf.set("spark.sql.catalog.spark_catalog", catalog)
