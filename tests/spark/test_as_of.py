"""Tables as they were at a moment, compared with the server's rows at that moment."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import postgres
import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import LSN, format_lsn
from spark_sink.changelog.ddl_log import DDL_SCHEMA
from spark_sink.changelog.tables import changelogs_of
from spark_sink.commands.as_of import print_rows
from spark_sink.replica import as_of
from spark_sink.schema.table import DDL, Fill, Table, Version
from spark_sink.staging import account
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Epoch, Position
from spark_sink.warehouse import gaps
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import COLUMNS, KEY, SCHEMA, TABLE, append
from support.cli_process import run_spark_cli
from support.road import Road, identity_workload

pytestmark = pytest.mark.spark
SEED = random.randrange(10**6)


@dataclass
class Moment:
    """The rows of each table on the server at a moment."""

    lsn: LSN
    time: datetime
    rows: dict[str, list[tuple[Any, ...]]]


TABLES = {"moving": "id, other, a, b", "renewed": "*", "days": "id, day::text"}


@dataclass
class Past(Road):
    """A `Road` that records the moments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.moments: list[Moment] = []

    def remember(self) -> None:
        rows = {table: self.query(f"select {columns} from {table}") for table, columns in TABLES.items()}
        ((lsn, time),) = self.query("select pg_current_wal_insert_lsn()::text, clock_timestamp()")
        self.moments.append(Moment(LSN.parse(lsn), time, rows))

    def as_of(self, table: str, at: Any) -> Any:
        return as_of.read_as_of(self.spark, self.warehouse, f"public.{table}", at)

    def warehouse_position(self) -> Position:
        position = Warehouse.existing(self.warehouse).source().position
        assert position is not None
        return position


@pytest.fixture(scope="module")
def past(pg18: postgres.Cluster, spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    print("seed", SEED)
    with pg18.database() as database:
        made = Past(database, spark, tmp_path_factory.mktemp("past"), slot="past")
        made.execute(
            "create table moving (id int primary key, other int not null, a int, b text)",
            "alter table moving alter b set storage external",
            "create table renewed (id int primary key, a text)",
            "create table days (id int primary key, day date)",
        )
        made.land()
        made.execute(
            "insert into renewed values (1, 'of the first table')",
            "insert into days values (1, 'infinity'), (2, '2026-01-01')",
        )
        workload = [statement.format(table="moving") for statement in identity_workload(random.Random(SEED))]
        for number, statement in enumerate(workload):
            made.execute(statement)
            if number in (7, 25):
                made.remember()
            if number == 20:
                made.execute("drop table renewed", "update days set day = '0044-03-15 BC' where id = 2")
                made.run()  # a second epoch begins
            if number == 22:
                made.execute(
                    "create table renewed (code text primary key, b int)",
                    "insert into renewed values ('of the second table', 1)",
                    "truncate days",
                )
        made.run()
        made.remember()
        yield made
        made.connection.close()


def rows_of(frame: Any, *columns: str) -> list[str]:
    return sorted(map(repr, (tuple(row) for row in frame.selectExpr(*columns).collect())))


@pytest.mark.parametrize("number", range(3))
def test_as_it_was(past: Past, number: int) -> None:
    print("seed", SEED)
    moment = past.moments[number]
    # What comes after the last commit is not in the tables, but nothing else is either.
    at = moment.lsn if number < 2 else past.warehouse_position()
    found = past.as_of("moving", at)
    assert found.columns == ["id", "other", "a", "b"]
    assert rows_of(found, "id", "other", "a", "b") == sorted(map(repr, moment.rows["moving"]))
    assert rows_of(past.as_of("moving", moment.time), "*") == rows_of(found, "*")
    renewed = past.as_of("renewed", str(at)).collect()
    values = [tuple(value for value in row if value is not None) for row in renewed]
    assert sorted(map(repr, values)) == sorted(map(repr, moment.rows["renewed"]))
    days = past.as_of("days", at.isoformat() if isinstance(at, datetime) else str(at))
    text = "coalesce(string(day), _cdc_exact['day'])" if "_cdc_exact" in days.columns else "string(day)"
    assert rows_of(days, "id", text) == sorted(map(repr, moment.rows["days"]))


def test_times_outside_of_the_log(past: Past) -> None:
    """A table without any row yet is empty. Before the beginning of the log, and beyond its end, nothing is known."""
    house = Warehouse.existing(past.warehouse)
    source = house.source()
    assert source.begin is not None
    assert past.as_of("moving", source.begin).collect() == []
    with pytest.raises(InvalidArgumentsError, match="the beginning of the log") as caught:
        past.as_of("moving", LSN(source.begin.lsn - 1))
    assert re.fullmatch(r"the tables are known from there to \d+:\w+/\w+", caught.value.hint or "")
    assert source.position is not None
    with pytest.raises(InvalidArgumentsError, match="complete only up to"):
        past.as_of("moving", LSN(max(source.position.lsn, account.read(past.staging).lsn) + 1))
    with pytest.raises(InvalidArgumentsError, match="complete only up to"):
        past.as_of("moving", Position(source.position.epoch + 1, source.position.lsn))
    first = changelogs_of(past.spark, house).read(house.find("public.renewed")).selectExpr("min(_cdc_commit_time)").collect()[0][0]
    first = first.astimezone(UTC)  # it is naive, in the machine's zone
    # The table moving changed later than another one.
    assert past.as_of("moving", first).collect() == []
    with pytest.raises(InvalidArgumentsError, match="before the first transaction") as caught:
        past.as_of("moving", datetime(2020, 1, 1, tzinfo=UTC))
    assert caught.value.hint == f"the first one committed at {first}"
    later = past.as_of("moving", datetime.now(UTC) + timedelta(days=1))
    assert rows_of(later, "*") == sorted(map(repr, past.moments[-1].rows["moving"]))


def test_an_lsn_after_other_traffic(past: Past) -> None:
    """The tables reach this position without a change of their own, once they have all of a log that reaches it."""
    past.execute("create table unheard_of ()")
    ((text,),) = past.query("select pg_current_wal_lsn()::text")
    at = LSN.parse(text)
    with pytest.raises(InvalidArgumentsError, match="complete only up to"):
        past.as_of("moving", at)
    end = past.warehouse_position()
    past.land()
    assert end.lsn < at <= account.read(past.staging).lsn
    assert rows_of(past.as_of("moving", at), "*") == rows_of(past.as_of("moving", end), "*")
    # The log has a change that the tables lack.
    past.execute("insert into unheard_of default values")
    ((later,),) = past.query("select pg_current_wal_lsn()::text")
    past.land()
    with pytest.raises(InvalidArgumentsError, match="complete only up to"):
        past.as_of("moving", later)
    past.run()
    assert rows_of(past.as_of("moving", later), "*") == rows_of(past.as_of("moving", end), "*")


def test_refusals(past: Past) -> None:
    with pytest.raises(InvalidArgumentsError, match=r"has no table 'public\.nowhere'"):
        past.as_of("nowhere", past.moments[0].lsn)
    with pytest.raises(InvalidArgumentsError, match="neither a time nor an LSN"):
        past.as_of("moving", "yesterday")


def test_rows_are_printed(past: Past, capsys: pytest.CaptureFixture[str]) -> None:
    days = past.as_of("days", past.moments[0].lsn).orderBy("id")
    print_rows(days, 1)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"id": 1, "day": None, "_cdc_exact": {"day": "infinity"}}
    assert "more rows than these 1" in printed.err
    print_rows(days, 0)
    printed = capsys.readouterr()
    assert [json.loads(line)["day"] for line in printed.out.splitlines()] == [None, "2026-01-01"]
    assert printed.err == ""


def test_a_printed_row_does_nothing_to_a_terminal(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Users of the application may have typed anything. Spark escapes only what is below a space."""
    typed = "a\x9b2J\x7f\u202eü😀"
    print_rows(spark.createDataFrame([(typed,)], "name string"), 0)
    line = capsys.readouterr().out.removesuffix("\n")
    assert line == r'{"name":"a\u009b2J\u007f\u202eü😀"}'
    assert json.loads(line) == {"name": typed}


def test_the_command(past: Past, tmp_path: Path) -> None:
    arguments = ["as-of", "--warehouse", str(past.warehouse), "--table", "public.days", "--at", format_lsn(past.moments[0].lsn)]
    arguments += ["--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1", "--output"]
    done = run_spark_cli(*arguments, str(tmp_path / "days"))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert past.spark.read.parquet(str(tmp_path / "days")).count() == 2
    done = run_spark_cli(*arguments, str(tmp_path / "days"))
    assert done.returncode == 1
    assert "exists already" in done.stderr


def test_commit_times_out_of_order_and_epochs(spark: Any, tmp_path: Path) -> None:
    """Transactions count in the order of their commits. So no state is shown that never existed."""
    warehouse = Warehouse(tmp_path, "parquet")
    warehouse.open(Epoch(1, "7", 1, "db", "slot", ("p",), {}, 0))
    warehouse.record(Position(1, 0))
    warehouse.write_versions(TABLE, [Version(0, 0, 7, KEY, KEY)])
    changes = [
        ((1, 1, lsn, None, None), "insert" if lsn == 10 else "update", epoch, lsn, time)
        for epoch, lsn, time in ((1, 10, 10), (1, 20, 21), (1, 30, 20), (2, 40, 40), (2, 50, 50))
    ]
    rows = [
        (*row, op, epoch, lsn, 0, 1, datetime(2026, 1, 1, 0, 0, time, tzinfo=UTC), None, None, None)
        for row, op, epoch, lsn, time in changes
    ]
    assert COLUMNS.startswith("case int, id int, a int")
    append(spark, warehouse, rows, SCHEMA, Position(1, 0), Position(2, 50))
    warehouse.record(Position(2, 50))

    warehouse.write_versions(Table("public", "keyless"), [Version(0, 0, 8, (), ())])
    with pytest.raises(WarehouseError, match=r"public\.keyless has no key"):
        as_of.read_as_of(spark, tmp_path, "public.keyless", LSN(50))

    def at(moment: Any) -> int | None:
        found = as_of.read_as_of(spark, tmp_path, "public.t", moment).collect()
        return found[0]["a"] if found else None

    second = datetime(2026, 1, 1, tzinfo=UTC)
    assert [at(second.replace(second=s)) for s in (10, 20, 21, 39, 40, 59)] == [10, 10, 30, 30, 40, 50]
    assert at(second.replace(second=40, microsecond=999999)) == 40
    assert [at(LSN(lsn)) for lsn in (9, 10, 29, 45, 50)] == [None, 10, 20, 40, 50]
    assert [at(Position(*position)) for position in ((1, 30), (1, 45), (2, 45))] == [30, 30, 40]


def test_before_the_snapshot_of_a_table(spark: Any, tmp_path: Path) -> None:
    """The hint has a time for a time, and a position for a position. It can be asked for."""
    warehouse = Warehouse(tmp_path, "parquet")
    warehouse.open(Epoch(1, "7", 1, "db", "slot", ("p",), {}, 0))
    warehouse.record(Position(1, 0))
    warehouse.write_versions(TABLE, [Version(0, 0, 7, KEY, KEY)])
    copied = datetime(2026, 1, 1, 0, 0, 30, 500000, tzinfo=UTC)
    row = (1, 1, 5, None, None, "snapshot", 1, 30, 0, None, copied, None, None, None)
    append(spark, warehouse, [row], SCHEMA, Position(1, 0), Position(1, 50))
    warehouse.record(Position(1, 50))

    for early, first in ((copied - timedelta(microseconds=1), copied), (LSN(29), format_lsn(30))):
        with pytest.raises(InvalidArgumentsError, match=r"known only since its snapshot at 0/1E, not at ") as caught:
            as_of.read_as_of(spark, tmp_path, "public.t", early)
        assert caught.value.hint == f"ask for {first} or later"
    assert as_of.read_as_of(spark, tmp_path, "public.t", copied).count() == 1


SECOND = datetime(2026, 1, 1, tzinfo=UTC)


def copied_again(spark: Any, root: Path, *, is_gap: bool) -> Warehouse:
    """Return a warehouse whose table was copied at 20 and 60, with one change in between. The one of another table is at 40."""
    house = Warehouse(root, "parquet")
    house.open(Epoch(1, "7", 1, "db", "slot", ("p",), {}, 0))
    house.record(Position(1, 0))
    copy = {"snapshot": ((1, "case"), (2, "id"), (3, "a"))}
    house.write_versions(TABLE, [Version(20, 0, 7, KEY, KEY, **copy), Version(60, 0, 7, KEY, KEY, **copy)])
    other = Table("public", "other")
    house.write_versions(other, [Version(0, 0, 8, KEY, KEY)])
    changes = [
        ((1, number, value, None, None), op, 1 if lsn < 50 else 2, lsn)
        for number, value, op, lsn in (
            (1, 10, "snapshot", 20),
            (2, 10, "snapshot", 20),
            (1, 11, "update", 30),
            (1, 12, "snapshot", 60),
        )
    ]
    rows = [(*row, op, epoch, lsn, 0, 1, SECOND + timedelta(seconds=lsn), None, None, None) for row, op, epoch, lsn in changes]
    append(spark, house, rows, SCHEMA, Position(1, 0), Position(2, 70))
    late = (1, 1, 1, None, None, "insert", 1, 40, 0, 1, SECOND + timedelta(seconds=40), None, None, None)
    append(spark, house, [late], SCHEMA, Position(1, 0), Position(2, 70), other)
    house.record(Position(2, 70))
    if is_gap:
        gaps.record(house, [Epoch(2, "7", 1, "db", "slot", ("p",), {}, 50, gap=Gap(45, "the slot was lost", 0, 0))])
    return house


@pytest.mark.parametrize("is_gap", [True, False])
def test_a_later_copy_does_not_tell_the_rows_from_before_it(spark: Any, tmp_path: Path, *, is_gap: bool) -> None:
    """It was made because the stream did not tell them. A time in a gap is refused, a time that is certainly before it is not."""
    copied_again(spark, tmp_path, is_gap=is_gap)

    def at(seconds: int) -> list[tuple[int, int]]:
        found = as_of.read_as_of(spark, tmp_path, "public.t", SECOND + timedelta(seconds=seconds))
        return sorted((row["id"], row["a"]) for row in found.collect())

    assert [at(seconds) for seconds in (20, 29, 30, 39)] == [[(1, 10), (2, 10)]] * 2 + [[(1, 11), (2, 10)]] * 2
    for seconds in (40, 46, 59):
        if is_gap:
            with pytest.raises(InvalidArgumentsError, match="are not known: changes are missing after 0/2D") as caught:
                at(seconds)
            assert caught.value.hint == "ask for 0/2D or earlier, or for a position after the copy"
        else:
            assert at(seconds) == [(1, 11), (2, 10)]
    assert [at(seconds) for seconds in (60, 90)] == [[(1, 12)]] * 2
    before = as_of.read_as_of(spark, tmp_path, "public.t", Position(1, 45))
    assert sorted((row["id"], row["a"]) for row in before.collect()) == [(1, 11), (2, 10)]


def test_only_the_first_copy_tells_the_rows_from_before_it(spark: Any, tmp_path: Path) -> None:
    """A second one, for a reason that the stream did not tell, does not: also if nothing has changed in between."""
    house = Warehouse(tmp_path, "parquet")
    house.open(Epoch(1, "7", 1, "db", "slot", ("p",), {}, 0))
    house.record(Position(1, 0))
    copy = {"snapshot": ((1, "case"), (2, "id"), (3, "a"))}
    house.write_versions(TABLE, [Version(10, 0, 7, KEY, KEY), *(Version(lsn, 0, 7, KEY, KEY, **copy) for lsn in (20, 60))])
    rows = [
        (1, 1, value, None, None, op, 1, lsn, 0, 1, SECOND + timedelta(seconds=lsn), None, None, None)
        for value, op, lsn in ((1, "insert", 10), (2, "snapshot", 20), (3, "snapshot", 60))
    ]
    append(spark, house, rows, SCHEMA, Position(1, 0), Position(1, 70))
    house.record(Position(1, 70))
    values = [
        [row["a"] for row in as_of.read_as_of(spark, tmp_path, "public.t", SECOND + timedelta(seconds=seconds)).collect()]
        for seconds in (15, 20, 59, 60)
    ]
    assert values == [[2], [2], [2], [3]]


def test_captured_ddl_after_a_time_does_not_count(spark: Any, tmp_path: Path) -> None:
    """The table has had no change since: only the log of the captured DDL tells when its new version began."""
    house = Warehouse(tmp_path, "parquet")
    house.open(Epoch(1, "7", 1, "db", "slot", ("p",), {}, 0))
    house.record(Position(1, 0))
    fill = Fill("blob", value="5")
    house.write_versions(TABLE, [Version(10, 0, 7, KEY, KEY), Version(40, 0, 7, KEY, KEY, (fill,), gone=("a",))])
    row = (1, 1, 1, None, None, "insert", 1, 10, 0, 1, SECOND + timedelta(seconds=10), None, None, None)
    append(spark, house, [row], SCHEMA, Position(1, 0), Position(1, 70))
    ddl = [
        ("command", "ALTER TABLE", "alter", [str(TABLE)], "{}", 1, lsn, 0, 1, 1, SECOND + timedelta(seconds=lsn))
        for lsn in (30, 40)
    ]
    append(spark, house, ddl, DDL_SCHEMA, Position(1, 0), Position(1, 70), DDL)
    house.record(Position(1, 70))
    found = {s: as_of.read_as_of(spark, tmp_path, "public.t", SECOND + timedelta(seconds=s)) for s in (20, 39, 40)}
    assert {s: ("a" in frame.columns, [row["blob"] for row in frame.collect()]) for s, frame in found.items()} == {
        20: (True, [None]),
        39: (True, [None]),
        40: (False, ["5"]),
    }
