"""`run` copies tables anew by itself whose rows the stream cannot tell; nobody does anything. All reasons in one warehouse."""

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import postgres
import pytest

import spark_sink
from spark_sink.changelog.tables import changelogs_of
from spark_sink.schema.table import Table
from spark_sink.snapshot import healer, two_looks
from spark_sink.status.check import Limits, State, judge
from spark_sink.status.report import Tables, describe
from spark_sink.verify.comparison import verify
from spark_sink.warehouse import landed_snapshots, wanted_copies
from spark_sink.warehouse.warehouse import Warehouse
from support.waiting import SPARK_DEADLINE_S, until

pytestmark = pytest.mark.spark

TABLES = [
    "create table computed (id int primary key)",
    "insert into computed select generate_series(1, 20)",
    "create table rewritten (id int primary key, v text)",
    "insert into rewritten select n, 'v' || n from generate_series(1, 20) n",
    "create table retyped (id int primary key, v text)",
    "insert into retyped select n, repeat('x', n) from generate_series(1, 20) n",
    "create table old_name (id int primary key, v text)",
    "insert into old_name select n, 'v' from generate_series(1, 20) n",
    "create table nokey (id int, v text)",
    "insert into nokey select n, 'v' from generate_series(1, 20) n",
    "create table parts (id int primary key, v text) partition by range (id)",
    "create table parts_1 partition of parts for values from (0) to (100)",
    "insert into parts select n, 'v' from generate_series(1, 20) n",
    "create table back (id int primary key, v text)",
    "insert into back select n, 'v' from generate_series(1, 20) n",
    "create table quiet (id int primary key, v text)",
    "insert into quiet select n, 'v' from generate_series(1, 20) n",
    "create table shrunk (id int primary key, v text)",
    "insert into shrunk select n, 'v' from generate_series(1, 20) n",
    "create schema app",
    (
        "create publication p for table computed, rewritten, retyped, old_name, nokey, parts, back, quiet, shrunk,"
        " tables in schema app with (publish_via_partition_root = true)"
    ),
]
CHANGED = [
    "alter table computed add r float default random()",
    "insert into computed values (100)",
    # No change follows these, so that only the catalog tells them.
    "alter table rewritten alter v type text using upper(v)",
    "alter table retyped alter v type int using length(v)",
    "update retyped set v = 7 where id = 1",
    "alter table old_name rename to new_name",
    "update new_name set v = 'changed' where id = 1",
    "alter table nokey add primary key (id)",
    "create table parts_2 (id int primary key, v text)",
    "insert into parts_2 select n, 'attached' from generate_series(100, 120) n",
    "alter table parts attach partition parts_2 for values from (100) to (200)",
    "create table added (id int primary key, v text)",
    "insert into added select n, 'before' from generate_series(1, 20) n",
    "alter publication p add table added",
    "create table moved (id int primary key, v text)",
    "insert into moved select n, 'before' from generate_series(1, 20) n",
    "alter table moved set schema app",
    "create table app.nothing (id int primary key)",
    "alter publication p drop table back",
    "delete from back where id > 10",
    "alter publication p add table back",
    # Nothing that makes a copy necessary.
    "alter table quiet add c int default 7",
    "insert into quiet values (100, 'later', 8)",
    "vacuum full shrunk",
    "delete from shrunk where id = 1",
]
HEALED = {
    "public.computed": f"the stream does not have the values of earlier rows in r; {two_looks.REWRITTEN}",
    "public.rewritten": two_looks.REWRITTEN,
    "public.retyped": f"earlier values of v are in columns of the old type; {two_looks.REWRITTEN}",
    "public.new_name": two_looks.CAME,
    "public.nokey": two_looks.KEY,
    "public.parts": two_looks.ATTACHED,
    "public.added": two_looks.CAME,
    "app.moved": two_looks.CAME,
    "app.nothing": two_looks.CAME,
    "public.back": two_looks.CAME_BACK,
}


COPIES = dict.fromkeys(HEALED, 2) | {"public.new_name": 1, "public.added": 1, "app.moved": 1, "app.nothing": 0}
"""How many snapshots the changelogs have then. (That of an empty table has no rows.)"""

KILLED = """
import os, signal, sys
from spark_sink import __main__
from spark_sink.replica import merge
from spark_sink.warehouse import landed_snapshots

remake = merge.remake

def remake_or_kill(spark, warehouse, *others):
    if landed_snapshots.unfinished(warehouse):
        os.kill(os.getpid(), signal.SIGKILL)
    remake(spark, warehouse, *others)

merge.remake = remake_or_kill
sys.exit(__main__.invoke(sys.argv[1:]))
"""


class Shop:
    """A database, and the run that follows it."""

    def __init__(self, spark: Any, database: postgres.Database, root: Path) -> None:
        self.spark, self.database = spark, database
        self.connection = database.connect()
        self.staging, self.warehouse = root / "staging", root / "warehouse"
        launcher = spark_sink.LauncherConfig(
            f"heal_{database.name}"[:63], self.staging, ("p",), ("-d", database.dsn), create_slot=True, available_now=True
        )
        self.config = spark_sink.RunConfig(launcher, self.warehouse, snapshot="initial", optimize_interval_s=None)

    def execute(self, *sql: str) -> None:
        for each in sql:
            self.connection.execute(each)

    def run(self, **changes: Any) -> None:
        spark_sink.run(replace(self.config, **changes), self.spark)

    @property
    def house(self) -> Warehouse:
        return Warehouse.existing(self.warehouse)

    def waiting(self) -> dict[str, str]:
        return {str(each.table): each.why for each in wanted_copies.waiting(self.house)}

    def state(self) -> State:
        return judge(describe(self.staging, Tables(self.house)) | {"launcher": {}}, Limits()).state

    def copies(self, name: str) -> int:
        """Return how many snapshots a table's changelog has."""
        changes = changelogs_of(self.spark, self.house).read(Table(*name.split(".")))
        return changes.where("_cdc_op = 'snapshot'").select("_cdc_end_lsn").distinct().count()

    def check(self, *names: str) -> None:
        found = verify(self.spark, self.warehouse, ("-d", self.database.dsn), tables=names, timeout_s=300)
        assert {str(each.table): (each.is_equal, each.problem) for each in found} == dict.fromkeys(names, (True, None))
        for name in names:
            rows = changelogs_of(self.spark, self.house).read(Table(*name.split("."))).select("_cdc_end_lsn", "_cdc_ordinal")
            assert rows.count() == rows.distinct().count(), name


@pytest.fixture
def shop(spark: Any, database: postgres.Database, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(spark, database, tmp_path)
    made.execute(*TABLES)
    made.run()
    yield made
    made.connection.close()


def test_every_table_whose_rows_the_stream_cannot_tell_is_copied(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert shop.waiting() == {}
    assert shop.state() == State.OK
    shop.execute(*CHANGED)

    # Turned off: they wait, and status names them.
    shop.run(heal="off")
    assert shop.waiting() == HEALED
    assert shop.state() == State.WARNING
    described = describe(shop.staging, Tables(shop.house))["waiting"]
    assert [each["table"] for each in described] == sorted(HEALED)

    # The next run does it; it is killed while it lands a table, between changelog and replica, and the run after it does the rest.
    launcher = shop.config.launcher
    source = ["-d", shop.database.dsn, "-S", launcher.slot, "--publication", "p", "--staging", str(shop.staging)]
    program = [sys.executable, "-c", KILLED, "run", *source, "--warehouse", str(shop.warehouse), "--available-now"]
    assert subprocess.run(program, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode == -signal.SIGKILL
    [(unfinished, _)] = landed_snapshots.unfinished(shop.house)
    waiting = shop.waiting().keys()
    assert str(unfinished) in waiting
    is_active = f"select active from pg_replication_slots where slot_name = '{launcher.slot}'"
    until(lambda: shop.connection.execute(is_active).fetchall() == [(False,)], "the slot's release")
    caplog.clear()
    shop.run(heal_tables=4)
    assert shop.waiting() == {}
    assert shop.state() == State.OK
    said = Counter(each.getMessage().split()[1] for each in caplog.records if "was copied" in each.getMessage())
    assert said == Counter(waiting - {str(unfinished)})
    assert {name: shop.copies(name) for name in HEALED} == COPIES
    shop.check(*HEALED, "public.quiet", "public.shrunk")
    assert (shop.copies("public.quiet"), shop.copies("public.shrunk")) == (1, 1)

    # While it runs: a table that nobody changes, and one that is changed all the time. What was healed is not copied again.
    monkeypatch.setattr(healer, "_LOOK_INTERVAL_S", 1.0)
    with spark_sink.Runner(replace(shop.config, launcher=replace(shop.config.launcher, available_now=False)), shop.spark) as runner:
        until(lambda: runner.progress.tables is not None, deadline_s=SPARK_DEADLINE_S)
        shop.execute(
            *(f"delete from {name} where id = 5" for name in HEALED),
            "insert into app.nothing values (1)",
            "create table live (id int primary key, v text)",
            "insert into live select n, 'before' from generate_series(1, 1000) n",
            "create table still (like live including all)",
            "insert into still select * from live",
            "alter publication p add table live, still",
        )
        number = 1000

        def is_done() -> bool:
            nonlocal number
            number += 1
            shop.execute(f"insert into live values ({number}, 'live')", f"update live set v = 'changed' where id = {number % 1000}")
            return {Table("public", "live"), Table("public", "still")} <= set(shop.house.tables()) and not shop.waiting()

        until(is_done, deadline_s=SPARK_DEADLINE_S)
    shop.run()
    shop.check(*HEALED, "public.live", "public.still")
    assert (shop.copies("public.live"), shop.copies("public.still")) == (1, 1)
    assert {name: shop.copies(name) for name in HEALED} == COPIES
