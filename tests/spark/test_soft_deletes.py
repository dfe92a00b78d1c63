"""``--deletes soft``: deleted rows stay in the replica, with the time of their deletion."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import postgres
import pytest

import spark_sink
from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import LSN, format_lsn
from spark_sink.changelog.ddl_log import DdlLog
from spark_sink.changelog.schema_history import SchemaHistory
from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.files import places
from spark_sink.pipeline import fit
from spark_sink.pipeline.beginning import begin_keeping_deleted
from spark_sink.replica import merge
from spark_sink.replica.layout import existing_rows
from spark_sink.replica.ordinary_merge import merge_without_spark
from spark_sink.replica.replay import replay_all, without_unneeded
from spark_sink.schema.catalog_answers import CatalogAnswers
from spark_sink.schema.table import Version
from spark_sink.source.contents import Contents, Use
from spark_sink.staging.log import Position
from spark_sink.verify.comparison import verify
from spark_sink.warehouse import landed_snapshots, purged_changes
from spark_sink.warehouse.warehouse import Warehouse, masks_path
from support.changelog_rows import EPOCH, KEY, TABLE, Source, add, add_copy, schema_of
from support.ddl_messages import ddl
from support.descriptions import table

pytestmark = pytest.mark.spark

NAMES = ("case", "id", "a", "blob", "other")


def found_in(rows: Any) -> list[Any]:
    """Return (the row, when it was deleted as microseconds) for each row, ordered by key."""
    kept = rows.selectExpr("`case`", "id", "a", "blob", "other", "unix_micros(_cdc_deleted_at)").collect()
    return sorted((tuple(bytes(v) if isinstance(v, bytearray) else v for v in row) for row in kept), key=lambda row: row[1])


def expected(source: Source) -> list[Any]:
    deleted = [(*row, round(time.timestamp() * 1e6)) for row, time in source.deleted.values()]
    return sorted([*((*row, None) for row in source.rows.values()), *deleted], key=lambda row: row[1])


@pytest.mark.parametrize("is_ordinary", [True, False], ids=["mostly without Spark", "by MERGE"])
def test_random_changes(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ordinary: bool) -> None:
    """Rows that come back, keys that change, TRUNCATE, and a copy of a table that had lost a delete."""
    seed = random.randrange(10**6)
    print("seed", seed)
    source, said = Source(random.Random(seed)), []

    def listened(*arguments: Any) -> bool:
        said.append(merge_without_spark(*arguments))
        return said[-1]

    monkeypatch.setattr(merge, "merge_without_spark", listened)
    house = Warehouse(tmp_path / "warehouse", "delta", deletes="soft")
    house.open(EPOCH)
    versions = [Version(0, 0, 7, KEY, KEY)]
    house.write_versions(TABLE, versions)
    if is_ordinary:
        monkeypatch.setattr(source, "_blob", lambda: None)  # so no update leaves a column out
        monkeypatch.setattr(source, "_blob_bytes", lambda: None)
    steps, truncated, copied = (7, 3, 5) if is_ordinary else (5, 1, 3)  # MERGE takes long
    for step in range(steps):
        start = source.lsn
        for _ in range(source.rng.randint(2, 6)):
            for _ in range(source.rng.randint(1, 6)):
                source.step(keys=12)
            source.commit()
        if step == truncated:
            source.truncate()
            source.insert(3)
            source.commit()
        if step == copied:
            source.insert(20)
            source.insert(21)
            source.commit()
        add(spark, house, source.changes, start, source.lsn)
        if step != copied or is_ordinary:  # otherwise the replica is behind when the copy comes
            merge.merge_changes(spark, house, TABLE, Position(1, source.lsn))
        if step == copied:  # the delete of a row gets lost, and a copy mends it
            start, lost = source.lsn, source.rows.pop(20)
            source.deleted[20] = lost, source.time
            lsn = source.snapshot()
            versions.append(Version(lsn, 0, 7, KEY, KEY, snapshot=tuple(enumerate(NAMES, 1))))
            house.write_versions(TABLE, versions)
            add(spark, house, source.changes, start, lsn)
            merge.remake(spark, house, TABLE, Position(1, lsn))
        assert found_in(delta.read(spark, house.replica(TABLE))) == expected(source), step
    assert existing_rows(delta.read(spark, house.replica(TABLE))).count() == len(source.rows)
    merge.remake(spark, house, TABLE, Position(1, lsn))  # as after a kill: the replica is ahead of the copy by now
    assert found_in(delta.read(spark, house.replica(TABLE))) == expected(source)
    assert any(said) if is_ordinary else not all(said)
    changes = changelogs_of(spark, house).read(TABLE)
    made = without_unneeded(replay_all(house, TABLE, changes), keeps_deleted=True)
    assert found_in(made) == expected(source)  # a reader of Parquet gets the same
    places.remove_tree(house.replica(TABLE))  # and so does a replica that was lost
    merge.bring(spark, house, TABLE, Position(1, source.lsn))
    assert found_in(delta.read(spark, house.replica(TABLE))) == expected(source)


@pytest.mark.parametrize("is_purged", [False, True])
def test_a_copy_after_restore_has_the_deleted_rows_of_the_changelog(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_purged: bool
) -> None:
    """RESTORE does not take back the position, so nothing else tells which deletes the replica lacks."""
    source, house = Source(random.Random(1)), Warehouse(tmp_path / "warehouse", "delta", deletes="soft")
    monkeypatch.setattr(source, "_blob", lambda: None)
    house.open(EPOCH)
    versions = [Version(0, 0, 7, KEY, KEY)]
    house.write_versions(TABLE, versions)

    def land(change: Callable[[int], None], *keys: int) -> None:
        start = source.lsn
        for key in keys:
            change(key)
        source.commit()
        add(spark, house, source.changes, start, source.lsn)
        merge.merge_changes(spark, house, TABLE, Position(1, source.lsn))

    land(source.insert, 1, 2)
    replica = house.replica(TABLE)
    before = delta_log.commits(replica)[-1]
    land(source.insert, 3)
    land(source.delete, 1, 3)  # 1 is in the version to which the replica is set back, 3 is not
    spark.sql(f"RESTORE TABLE {delta.table_name(replica)} TO VERSION AS OF {before}")
    fit.check_tables(house, Position(1, source.lsn))
    land(source.insert, 4)  # the copy comes a moment later
    if is_purged:
        purged_changes.record(house, TABLE, 1)
    start, lsn = source.lsn, source.snapshot()
    landed_snapshots.record_start(house, TABLE, Position(1, lsn), adds_rows=True)
    versions.append(Version(lsn, 0, 7, KEY, KEY, snapshot=tuple(enumerate(NAMES, 1))))
    house.write_versions(TABLE, versions)
    add(spark, house, source.changes, start, lsn)
    merge.remake(spark, house, TABLE, Position(1, lsn))
    landed_snapshots.record_end(house, TABLE)
    found = found_in(delta.read(spark, replica))
    assert (found == expected(source)) is not is_purged
    assert ("RESTORE has set the replica back, and earlier changes were purged" in caplog.text) is is_purged
    assert [row for row in found if row[-1] is None] == [row for row in expected(source) if row[-1] is None]


class Masked:
    """A table whose column ``blob`` gets the mask ``hash`` after its first changes."""

    def __init__(self, spark: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spark, self.source, self.blob = spark, Source(random.Random(1)), "plain"
        monkeypatch.setattr(self.source, "_blob", lambda: self.blob)
        Warehouse(root, "delta", deletes="soft").open(EPOCH)
        self.versions = [Version(0, 0, 7, KEY, KEY)]
        said = {"masks": {"public.t.blob": "hash"}, "key": None, "changes": []}
        masks_path(root).write_text(json.dumps({"version": 1, **said}))
        self.house = Warehouse(root, "delta", deletes="soft")
        self.house.write_versions(TABLE, self.versions)
        for key in range(1, 5):
            self.source.insert(key)
        self.source.delete(1)
        self.source.commit()
        self.merge(0)
        until = {**TABLE.to_json(), "until": format_lsn(self.source.lsn)}
        said["changes"] = [{"until": f"1:{until['until']}", "masks": {}, "tables": [until]}]
        masks_path(root).write_text(json.dumps({"version": 1, **said}))
        self.blob = "hashed"
        self.source.rows = {key: (*row[:3], self.blob, row[4]) for key, row in self.source.rows.items()}

    def merge(self, start: int) -> None:
        """Bring changes to changelog and replica."""
        add(self.spark, self.house, self.source.changes, start, self.source.lsn)
        merge.merge_changes(self.spark, self.house, TABLE, Position(1, self.source.lsn))

    def add_version(self, lsn: int) -> None:
        self.versions.append(Version(lsn, 0, 7, KEY, KEY, snapshot=tuple(enumerate(NAMES, 1))))
        self.house.write_versions(TABLE, self.versions)

    def land(self, lsn: int) -> None:
        """Bring the copy at ``lsn`` to changelog and replica."""
        self.add_version(lsn)
        add_copy(self.spark, self.house, self.source.changes, lsn)
        merge.remake(self.spark, self.house, TABLE, Position(1, lsn))

    def rows(self) -> dict[int, str | None]:
        return {row["id"]: row["blob"] for row in delta.read(self.spark, self.house.replica(TABLE)).collect()}

    def rows_made_anew(self) -> dict[int, str | None]:
        """Return the rows of a replica that was lost."""
        places.remove_tree(self.house.replica(TABLE))
        merge.bring(self.spark, self.house, TABLE, Position(1, self.source.lsn))
        return self.rows()


def test_a_copy_that_comes_late_masks_deleted_rows(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream goes on while the table is copied, so the replica is beyond the copy. Rows with hashes keep them."""
    table = Masked(spark, tmp_path, monkeypatch)
    start, lsn = table.source.lsn, table.source.snapshot()
    table.source.insert(5)
    table.source.commit()
    changes = table.source.changes
    table.source.changes = [change for change in changes if change[5] != "snapshot"]
    table.merge(start)
    table.source.changes = changes
    assert table.rows()[1] == "plain"
    table.land(lsn)
    hashed = dict.fromkeys(range(2, 6), "hashed")
    assert table.rows() == {1: None, **hashed}

    start = table.source.lsn
    table.source.delete(2)
    table.source.commit()
    table.merge(start)
    table.land(table.source.snapshot())
    assert table.rows() == {1: None, **hashed}
    assert table.rows_made_anew() == {1: None, **hashed}


def test_a_copy_after_restore_masks_deleted_rows(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are those from before the copy that masked them, although the replica's position is beyond it."""
    table = Masked(spark, tmp_path, monkeypatch)
    replica = table.house.replica(TABLE)
    before = delta_log.commits(replica)[-1]
    table.land(table.source.snapshot())
    start = table.source.lsn
    table.source.delete(2)
    table.source.commit()
    table.merge(start)
    purged_changes.record(table.house, TABLE, 1)
    spark.sql(f"RESTORE TABLE {delta.table_name(replica)} TO VERSION AS OF {before}")
    assert table.rows() == dict.fromkeys(range(1, 5), "plain")
    table.land(table.source.snapshot())
    assert table.rows() == {1: None, 2: None, 3: "hashed", 4: "hashed"}


def test_a_copy_without_rows_masks_deleted_rows(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Masked(spark, tmp_path, monkeypatch)
    start = table.source.lsn
    table.source.truncate()  # that is the copy of an empty table
    table.source.commit()
    table.add_version(table.source.changes[-1][7])
    add(spark, table.house, table.source.changes, start, table.source.lsn)
    merge.remake(spark, table.house, TABLE, Position(1, table.source.lsn))
    gone = dict.fromkeys(range(1, 5))
    assert table.rows() == gone
    assert table.rows_made_anew() == gone


NEW_TABLE = 'create table t (id int primary key, name text, _cdc_deleted_at text, "unit price" int)'


def test_run_with_soft_deletes(database: postgres.Database, spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A copy, then changes; another key, another table with the name; `verify`, `as-of`, and a change of the option."""
    launcher = spark_sink.LauncherConfig(
        f"soft_{database.name}"[:63], tmp_path / "staging", ("p",), ("-d", database.dsn), create_slot=True, available_now=True
    )
    warehouse = tmp_path / "warehouse"

    def run(deletes: Any) -> None:
        config = spark_sink.RunConfig(launcher, warehouse, snapshot="initial", deletes=deletes, catalog_database="default")
        spark_sink.run(config, spark)

    def rows(name: str = "t") -> list[Any]:
        found = spark_sink.read_replica(spark, warehouse, f"public.{name}")
        return sorted((row["id"], row["name"], row["_cdc_deleted_at"] is not None) for row in found.collect())

    def verified() -> list[Any]:
        found = verify(spark, warehouse, ("-d", database.dsn), timeout_s=300)
        assert all(each.is_equal and each.without_deleted for each in found), found
        return [(str(each.table), each.replica_rows) for each in found]

    with database.connect() as connection:
        for statement in (
            NEW_TABLE,
            "create table quiet (id int primary key, name text)",
            "insert into t select n, 'first' from generate_series(1, 5) n",
            "insert into quiet values (1, 'x')",
            "create publication p for table t, quiet",
        ):
            connection.execute(statement)
        run("soft")
        assert rows() == [(number, "first", False) for number in range(1, 6)]
        connection.execute("delete from t where id = 1; update t set id = 12 where id = 2; insert into t values (7, 'brief')")
        connection.execute("delete from t where id = 7; update t set name = 'second' where id = 3")
        run("soft")
        expected = [(1, "first", True), (2, "first", True), (3, "second", False), (4, "first", False), (5, "first", False)]
        assert rows() == [*expected, (7, "brief", True), (12, "first", False)]
        assert verified() == [("public.quiet", 1), ("public.t", 4)]
        lsn = LSN.parse(connection.execute("select pg_current_wal_lsn()").fetchone()[0])

        connection.execute("insert into t values (1, 'again'); delete from t where id = 4")
        connection.execute("alter table t drop constraint t_pkey; alter table t add primary key (id, name)")
        connection.execute("insert into t values (3, 'twin')")
        run("soft")
        found = rows()
        assert [row for row in found if row[0] in (1, 3, 4)] == [
            (1, "again", False),
            (3, "second", False),
            (3, "twin", False),
            (4, "first", True),
        ]
        assert verified()[1] == ("public.t", 5)
        past = spark_sink.read_as_of(spark, warehouse, "public.t", lsn)
        assert sorted(row["id"] for row in past.collect()) == [3, 4, 5, 12]
        assert "_cdc_deleted_at" not in past.columns

        connection.execute("truncate t; drop table t")
        connection.execute(NEW_TABLE)
        connection.execute("alter publication p add table t")
        connection.execute("insert into t values (3, 'another', 'theirs', 4)")
        run("soft")
        found = rows()
        assert (3, "another", False) in found
        assert sum(not is_deleted for *_, is_deleted in found) == 1
        assert len({row[0] for row in found}) == len(found)  # the new table has the key (id): a key has one row
        assert verified()[1] == ("public.t", 1)
        [theirs] = spark_sink.read_replica(spark, warehouse, "public.t").where("_cdc_deleted_at is null").collect()
        assert theirs["_cdc_column__cdc_deleted_at"] == "theirs"
        with pytest.raises(InvalidArgumentsError, match="have deleted rows") as refused:
            run("hard")
        assert "--deletes soft" in str(refused.value.hint)


CIDR, INET, DATES, TIMES, INT4, MOOD = 650, 869, 1082, 1184, 23, 16500


@pytest.mark.parametrize("is_first", [False, True], ids=["copied before", "first copy"])
@pytest.mark.parametrize(
    ("columns", "types", "former", "copied", "is_certain"),
    [
        ("k date, k__timestamp timestamp", (DATES, TIMES), "date '2020-01-0{}', null", "null, timestamp '2020-01-0{}'", False),
        ("k string", (CIDR, INET), "'10.0.0.{}/32'", "'10.0.0.{}'", False),
        ("k int, k__string string", (INT4, CIDR), "{}, null", "null, '{}'", False),
        ("k date", (DATES, DATES), "date '2020-01-0{}'", "date '2020-01-0{}'", True),
        ("k bigint", (INT4, 20), "{}", "{}", True),
        ("k string", (MOOD, MOOD), "'ok{}'", "'fine{}'", False),  # RENAME VALUE
    ],
)
def test_a_copy_after_another_type_of_the_key_adds_no_row_that_was_not_deleted(
    spark: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    columns: str,
    types: tuple[int, int],
    former: str,
    copied: str,
    *,
    is_certain: bool,
    is_first: bool,
) -> None:
    """Row 1 stays, the stream deletes row 2, and only the copy lacks row 3. They came with an earlier copy, or in the stream."""
    house = Warehouse(tmp_path / "warehouse", "delta", deletes="soft")
    house.open(EPOCH)
    names = [each.split()[0] for each in columns.split(", ")]
    fields = names[0], names[-1]
    versions = [
        Version(lsn, 0, 7, ("k",), (field,), snapshot=((1, field),), described=((1, "k", type_id, -1),))
        for lsn, field, type_id in zip((10, 50), fields, types, strict=True)
    ]
    if is_first:
        versions[0] = replace(versions[0], snapshot=(), described=())
        use = Use(10, 0, replace(table(f"k:{types[0]}"), relation_id=7), 10)
        segment: Any = SimpleNamespace(epoch=1, start_lsn=0, end_lsn=10, end=Position(1, 10))
        history = SchemaHistory(spark, house, CatalogAnswers(None))
        history.record_new({TABLE: Contents(1, 10, [use])}, lambda *_: None, [segment])
    house.write_versions(TABLE, versions)
    statement = "alter type mood rename value 'ok1' to 'fine1'"
    renamed = ddl(40, 0, tag="ALTER TYPE", statement=statement, types=[{"oid": MOOD, "array": None}])
    written: Any = SimpleNamespace(epoch=1, start_lsn=30, end_lsn=40, end=Position(1, 40), path=tmp_path / "staging/000001/s.cdc")
    DdlLog(spark, house).record_new([renamed], [written])
    house.record(Position(1, 50))  # what captured DDL says up to the copy is known
    order = "_cdc_op, _cdc_epoch, _cdc_end_lsn, _cdc_ordinal, _cdc_xid, _cdc_commit_time, _cdc_unchanged, _cdc_old, _cdc_exact"
    rows = [
        *(("insert" if is_first else "snapshot", 10, former.format(key)) for key in (1, 2, 3)),
        ("delete", 20, former.format(2)),
        ("snapshot", 50, copied.format(1)),
    ]
    selects = [
        f"select {values}, '{op}', 1, {lsn}L, {number}, 1L, timestamp_seconds({lsn}), null, null, null"
        for number, (op, lsn, values) in enumerate(rows)
    ]
    changes = spark.createDataFrame(
        spark.sql(" union all ".join(selects)).toDF(*names, *order.split(", ")).collect(), schema_of(columns)
    )
    found = without_unneeded(replay_all(house, TABLE, changes), keeps_deleted=True)
    ends = found.selectExpr("unix_seconds(_cdc_deleted_at)").collect()
    assert sorted(end or 0 for (end,) in ends) == ([0, 20, 50] if is_certain else [0, 20])
    assert ("rows that were deleted before the table was copied may be missing: the key has another type" in caplog.text) == (
        not is_certain
    )


def test_a_warehouse_begins_to_keep_deleted_rows(spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Replicas get the column at the start; what was deleted before is gone."""
    source = Source(random.Random(3))
    for key in range(3):
        source.insert(key)
    source.delete(0)
    source.commit()
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(EPOCH)
    house.write_versions(TABLE, [Version(0, 0, 7, KEY, KEY)])
    add(spark, house, source.changes, 0, source.lsn)
    merge.merge_changes(spark, house, TABLE, Position(1, source.lsn))
    soft = Warehouse(tmp_path / "warehouse", "delta", deletes="soft")
    soft.open(EPOCH)
    for _ in range(2):
        begin_keeping_deleted(spark, soft)
    assert caplog.text.count("1 replicas keep deleted rows from now on") == 1
    start = source.lsn
    source.delete(1)
    source.commit()
    add(spark, soft, source.changes, start, source.lsn)
    merge.merge_changes(spark, soft, TABLE, Position(1, source.lsn))
    del source.deleted[0]
    assert found_in(delta.read(spark, soft.replica(TABLE))) == expected(source)
