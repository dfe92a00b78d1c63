"""On whatever road the changes come to rows: a value that the server did not send is known, or it is marked.

A column came with a value of the server in each row. No change has these values: a row has NULL there in the changes before, and
an update that does not send the column leaves it out. PostgreSQL leaves out only values that are not NULL. If an update brings a
row into a row filter, the server sends an insert, which lacks such values, too.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import postgres
import pytest

from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import sql as delta
from spark_sink.replica import history, history_table, merge
from spark_sink.replica.as_of import read_as_of
from spark_sink.replica.current import read_replica
from spark_sink.replica.history import read_history
from spark_sink.replica.history_view import Known, history_shape, known_sql, view_sql
from spark_sink.replica.replay import replay
from spark_sink.schema.table import Version
from spark_sink.spark.sql import literal
from spark_sink.staging.log import Position
from spark_sink.warehouse import wanted_copies
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import COLUMNS, EPOCH, KEY, SCHEMA, TABLE, UNSENT, Later, OrdinaryLater, append, schema_of, told
from support.road import BIG, Road

pytestmark = pytest.mark.spark

NARROW = schema_of(COLUMNS.removesuffix(", other binary"))


_MOST_STEPS = 100


def narrow(change: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a change from before the column ``other``."""
    old = change[12]
    return (*change[:4], *change[5:12], old and old[:4], change[13])


@dataclass
class Past:
    """What happened to a table, in rounds of some transactions."""

    source: Later
    added_at: int = 0
    ends: list[int] = field(default_factory=list)
    """The LSNs at which the rounds end."""
    states: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    """The rows at the end of each transaction."""

    @classmethod
    def of(cls, source: Later, rounds: int) -> Self:
        made = cls(source)
        for key in range(10):
            source.insert(key)
        for number in range(rounds):
            if number == 1:
                source.add_column()
                made.added_at = source.lsn
                for _ in range(_MOST_STEPS):
                    if UNSENT in source.known.values():
                        break
                    source.step(keys=14)
                else:  # by now changes may have told the value of each row
                    return cls.of(type(source)(random.Random(source.rng.random())), rounds)
            for _ in range(3):
                for _ in range(source.rng.randint(1, 3)):
                    source.step(keys=14)
                made.states[source.lsn + 1] = source.told
                source.commit()
            made.ends.append(source.lsn)
        return made

    def append(self, spark: Any, house: Warehouse, start: int, end: int) -> None:
        """Append the changes of a round to a changelog, which gets the column with the first change that has it."""
        new = [change for change in self.source.changes if start < change[7] <= end]
        is_early = end <= self.added_at and house.format.keeps_replicas  # a view names Parquet's files, not their common schema
        changes = [narrow(change) for change in new] if is_early else new
        append(spark, house, changes, NARROW if is_early else SCHEMA, Position(1, start), Position(1, end))
        house.record(Position(1, end))


def made(root: Path, table_format: str = "delta", **options: Any) -> Warehouse:
    house = Warehouse(root, table_format, **options)
    house.open(EPOCH)
    house.write_versions(TABLE, [Version(0, 0, 7, KEY, KEY)])
    house.record(Position(1, 0))
    return house


def rows_of(found: Any) -> list[tuple[Any, ...]]:
    return told(row.asDict() for row in found.collect())


@pytest.mark.parametrize(
    ("kind", "deletes", "merged"),
    [  # every pair of two factors
        (OrdinaryLater, "hard", (1, 2, 4)),
        (OrdinaryLater, "soft", (2, 4)),
        (Later, "hard", (2, 4)),
        (Later, "soft", (1, 2, 4)),
    ],
)
def test_replicas(
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Later],
    deletes: str,
    merged: tuple[int, ...],
) -> None:
    """The column comes in the second round: to a replica that is there, or within the first merge, which makes the replica.

    A merge follows each of the rounds ``merged``, and takes one round or two. If the changes are ordinary, as many as possible are
    done without Spark, else none.
    """
    seed = random.randrange(10**6)
    print("seed", seed)
    past, house = Past.of(kind(random.Random(seed)), 4), made(tmp_path / "warehouse", deletes=deletes)
    if kind is not OrdinaryLater:
        monkeypatch.setattr(merge, "merge_without_spark", lambda *_: False)
    start = 0
    for number, end in enumerate(past.ends, 1):
        past.append(spark, house, start, end)
        if number in merged:
            merge.bring(spark, house, TABLE, Position(1, end))
            rows = delta.read(spark, house.replica(TABLE))
            if deletes == "soft":
                rows = rows.where("_cdc_deleted_at is null")
            assert rows_of(rows) == past.states[max(lsn for lsn in past.states if lsn <= end)]
        start = end


def test_no_earlier_row_is_read_for_an_insert_without_a_value(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins another row. For the value of a row whose key has changed, a merge joins the whole replica."""
    source, house = Later(random.Random(1)), made(tmp_path / "warehouse", history="table")
    past, lock, start = Past(source), TableLock(house.root), 0
    source.is_added = True
    for key in range(4):
        source.insert(key)
    for number in range(2):
        if number:
            source.enter(4)
            source.delete(3)
            source.enter(3)
            monkeypatch.setattr(merge, "_fill_moved", None)
            monkeypatch.setattr(history, "_with_inherited", None)
        end = source.commit()
        past.append(spark, house, start, end)
        merge.bring(spark, house, TABLE, Position(1, end))
        history_table.bring(spark, house, TABLE, Position(1, end), lock)
        start = end
    assert rows_of(delta.read(spark, house.replica(TABLE))) == source.told
    assert rows_of(delta.read(spark, house.history(TABLE)).where("is_current")) == source.told


@pytest.mark.parametrize("table_format", ["delta", "parquet"])
def test_the_past(spark: Any, tmp_path: Path, table_format: str) -> None:
    """Replays, reads as of a place, both formats' current rows, histories, and the view with a history."""
    seed = random.randrange(10**6)
    print("seed", seed)
    past, house = Past.of(Later(random.Random(seed)), 3), made(tmp_path / "warehouse", table_format)
    for start, end in zip((0, *past.ends), past.ends, strict=False):
        past.append(spark, house, start, end)
    if table_format == "delta":
        merge.bring(spark, house, TABLE, Position(1, past.ends[-1]))
    last = past.source.told
    assert rows_of(read_replica(spark, house.root, str(TABLE))) == last
    changes = changelogs_of(spark, house).read(TABLE)
    history = read_history(spark, house.root, str(TABLE)).localCheckpoint()
    source = f"delta.`{house.changelog(TABLE)}`"
    if table_format == "parquet":
        source = f"parquet.`{house.changelog(TABLE)}` WITH (recursiveFileLookup = {literal('true')})"
    shape = history_shape(house.versions(TABLE))
    known = Known.of(spark.sql(known_sql(source, shape)).collect())
    assert known is not None
    view = spark.sql(view_sql(source, changes.schema, shape, known)).localCheckpoint()
    for versions in (history, view):
        for lsn, expected in past.states.items():
            assert rows_of(versions.where(f"from_lsn <= {lsn} and (to_lsn is null or {lsn} < to_lsn)")) == expected
    for lsn in list(past.states)[5::5]:
        assert rows_of(replay(house, TABLE, changes, until_lsn=lsn)) == past.states[lsn]
        assert rows_of(read_as_of(spark, house.root, str(TABLE), f"0/{lsn:X}")) == past.states[lsn]


@pytest.mark.parametrize(("kind", "rounds"), [(Later, 4), (OrdinaryLater, 2)])
def test_stored_histories(spark: Any, tmp_path: Path, kind: type[Later], rounds: int) -> None:
    """Rounds by Spark, and without it as long as the values are known, which they are in the first round."""
    seed = random.randrange(10**6)
    print("seed", seed)
    past, house = Past.of(kind(random.Random(seed)), rounds), made(tmp_path / "warehouse", history="table")
    lock, start = TableLock(house.root), 0
    for end in past.ends:
        past.append(spark, house, start, end)
        history_table.bring(spark, house, TABLE, Position(1, end), lock)
        start = end
    stored = delta.read(spark, house.history(TABLE)).localCheckpoint()
    for lsn, expected in past.states.items():
        assert rows_of(stored.where(f"from_lsn <= {lsn} and (to_lsn is null or {lsn} < to_lsn)")) == expected


COME_AND_GO = [
    [
        f"insert into {{t}} select i, 'active', repeat('a', {BIG}) from generate_series(1, 4) i where i <> 3",
        f"insert into {{t}} values (3, 'archived', repeat('a', {BIG}))",
        "update {t} set status = 'archived' where id = 2",
    ],
    [
        *(f"update {{t}} set {change} where id = 1" for change in ("status = 'archived'", f"doc = repeat('b', {BIG})")),
        "update {t} set status = 'active' where id in (1, 3)",
        "update {t} set status = 'archived' where id = 4",
    ],
    [
        f"update {{t}} set doc = repeat('c', {BIG}) where id in (2, 4)",
        "update {t} set status = 'active' where id = 2",
        "update {t} set status = 'active', doc = 'sent' where id = 4",
    ],
]
"""Rounds of updates that bring rows into the filter ``status = 'active'``, and take them out of it. Row 4 comes with its value."""


def test_rows_that_come_into_a_row_filter(pg18: postgres.Cluster, spark: Any, tmp_path: Path) -> None:
    """Replicas with and without deleted rows, histories and Parquet. With REPLICA IDENTITY FULL the server sends the values."""
    kinds = {"hard": {"history": "table"}, "soft": {"deletes": "soft"}, "parquet": {"format": "parquet"}}
    with pg18.database() as database:
        road = Road(database, spark, tmp_path)
        for table in ("by_index", "by_all"):
            road.execute(
                f"create table {table} (id int primary key, status text not null, doc text)",
                f"alter table {table} alter doc set storage external",
                f"create unique index {table}_index on {table} (status, id)",
            )
        road.execute(
            "alter table by_index replica identity using index by_index_index",
            "alter table by_all replica identity full",
            "create publication everything for table by_index where (status = 'active'), by_all where (status = 'active')",
        )
        road.land()  # makes the slot
        for statements in COME_AND_GO:
            road.execute(*(statement.format(t=table) for statement in statements for table in ("by_index", "by_all")))
            road.prepared = road.land().prepared
            for kind, options in kinds.items():
                road.pipeline(tmp_path / kind, **options).process_available()
        expected = dict(road.query("select id, doc from by_all"))
        road.connection.close()
    found = [(kind, read_replica(spark, tmp_path / kind, "public.by_all")) for kind in kinds]
    partial = [(kind, read_replica(spark, tmp_path / kind, "public.by_index")) for kind in kinds]
    for rows, name in ((found, "public.by_all"), (partial, "public.by_index")):
        rows.append(("history", read_history(spark, tmp_path / "hard", name).where("is_current")))
        house = Warehouse.existing(tmp_path / "hard")
        rows.append(("stored history", delta.read(spark, house.history(house.find(name))).where("is_current")))
    for kind, rows in found:
        here = rows.where("_cdc_deleted_at is null") if kind == "soft" else rows
        assert {row["id"]: row["doc"] for row in here.collect()} == expected, kind
        assert "_cdc_unchanged" not in rows.columns or rows.where("_cdc_unchanged is not null").isEmpty()
    for kind, rows in partial:
        here = rows.where("_cdc_deleted_at is null") if kind == "soft" else rows
        marked = {row["id"]: (row["doc"], row["_cdc_unchanged"]) for row in here.collect()}
        assert marked == {**{key: (None, ["doc"]) for key in (1, 2, 3)}, 4: ("sent", None)}, kind
    for kind in kinds:
        waiting = wanted_copies.waiting(Warehouse.existing(tmp_path / kind))
        assert [str(each.table) for each in waiting] == ["public.by_index"], kind
