"""`cdcpipe prepare` on real servers: what it prints, what it creates, the snapshot that it exports."""

import json
import os
import pathlib
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import postgres
import pytest

from cdcpipe.config import SlotConfig
from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.parameters import connection_parameters
from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import Insert
from cdcpipe.replication.table_parts import TableParts, table_parts
from cdcpipe.subcommands import prepare
from spark_sink.client.prepare import Prepared
from spark_sink.snapshot.homes import Homes
from spark_sink.snapshot.two_looks import MORE_COLUMNS, MORE_ROWS, compare, seen
from spark_sink.warehouse.warehouse import Warehouse
from support.cli_process import CLI, COMMAND, run_cli
from support.published_database import PublishedDatabase
from support.waiting import until


def test_prepare_says_what_is_there(on: PublishedDatabase) -> None:
    on.sql(
        "create table k(b int, a text, primary key (a, b))",
        "alter publication p add table k",
        "alter table k replica identity full",
    )
    code, out, err = run_cli("prepare", "-d", on.database.dsn, "-S", on.slot, "--publication", "p")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["system_id"] == str(on.value("select system_identifier from pg_control_system()"))
    assert (found["timeline"], found["database"], found["publications"]) == (1, on.database.name, ["p"])
    assert found["slot"]["plugin"] == "pgoutput"
    assert LSN.parse(found["slot"]["confirmed_flush_lsn"]) == on.confirmed()
    keys = {table["name"]: (table["primary_key"], table["replica_identity"]) for table in found["tables"]}
    assert keys == {"k": (["a", "b"], "f"), "t": (["id"], "d")}
    assert run_cli("prepare", "-d", on.database.dsn, "-S", "nope", "--publication", "p")[0] == 8
    assert run_cli("prepare", "-d", on.database.dsn, "-S", on.slot, "--publication", "q")[0] == 2


def test_prepare_takes_no_deferrable_key_for_a_key(on: PublishedDatabase) -> None:
    """Nor does the server: with REPLICA IDENTITY DEFAULT it refuses updates of such a table."""
    on.sql(
        "create table k(id int primary key deferrable, v int)",
        "create table f(id int primary key deferrable initially deferred, v int)",
        "alter table f replica identity full",
        "alter publication p add table k, f",
    )
    code, out, err = run_cli("prepare", "-d", on.database.dsn, "-S", on.slot, "--publication", "p")
    assert code == 0
    found = {table["name"]: (table["primary_key"], table["has_deferrable_key"]) for table in json.loads(out)["tables"]}
    assert found == {"f": ([], True), "k": ([], True), "t": (["id"], False)}
    assert "public.k has no usable replica identity" in err
    assert "public.f" not in err


def test_prepare_tells_the_columns_that_are_published(on: PublishedDatabase) -> None:
    on.sql(
        "create table c(id int primary key, b varchar(5), left_out int, gone int)",
        "insert into c values (1)",
        "alter table c add f float default random()",  # writes the rows anew
        "alter table c drop gone, add d int default 7, add e text default 'it''s \"this\"', add g date",
        "alter table c add h box default '(1,1),(0,0)', add i int[] default '{1,NULL}'",
        "alter table c rename b to bb",
        "alter publication p add table c (id, bb, d, e, f, g, h, i)",
    )
    code, out, _ = run_cli("prepare", "-d", on.database.dsn, "-S", on.slot, "--publication", "p", "--in-use")
    assert code == 0
    columns = next(table["columns"] for table in json.loads(out)["tables"] if table["name"] == "c")
    keys = ("name", "number", "type_id", "type_modifier", "missing", "is_filled")
    assert [tuple(column[key] for key in keys) for column in columns] == [
        ("id", 1, 23, -1, None, False),
        ("bb", 2, 1043, 9, None, False),
        ("f", 5, 701, -1, None, True),
        ("d", 6, 23, -1, "7", False),
        ("e", 7, 25, -1, 'it\'s "this"', False),
        ("g", 8, 1082, -1, None, False),
        ("h", 9, 603, -1, "(1,1),(0,0)", False),
        ("i", 10, 1007, -1, "{1,NULL}", False),
    ]
    assert run_cli("prepare", "-d", on.database.dsn, "-S", on.slot, "--in-use", "--export-snapshot")[0] == 1


def test_the_partitions_say_what_old_rows_of_a_partitioned_table_have(on: PublishedDatabase) -> None:
    on.sql(
        "create table r (id int primary key) partition by range (id)",
        "create table made partition of r for values from (0) to (10)",
        "create table attached (gone int, id int primary key)",
        "alter table attached drop gone",  # so the columns have other numbers than in the root
        "alter table r attach partition attached for values from (10) to (20)",
        "insert into r values (1), (11)",
        "alter table r add c int not null default 5, add n int, add d int default 7",
        "alter table r alter c drop default",
        "alter publication p set (publish_via_partition_root)",
        "alter publication p add table r",
    )

    def found() -> dict[str, tuple[str | None, bool]]:
        _, out, _ = run_cli("prepare", "-d", on.database.dsn, "-S", on.slot, "--publication", "p", "--in-use", "--quiet")
        columns = next(table["columns"] for table in json.loads(out)["tables"] if table["name"] == "r")
        return {column["name"]: (column["missing"], column["is_filled"]) for column in columns}

    assert found() == {"id": (None, False), "c": ("5", False), "n": (None, False), "d": ("7", False)}
    # The catalog does not have the value of these rows any more, or the partition is younger than the columns.
    on.sql("vacuum full made")
    assert found() == {"id": (None, False), "c": (None, True), "n": (None, False), "d": (None, True)}


def parts_of(on: PublishedDatabase) -> dict[str, Any]:
    code, out, err = run_cli(
        "prepare", "-d", on.database.dsn, "-S", on.slot, "--publication", "p", "--in-use", "--quiet", "--parts"
    )
    assert (code, err) == (0, "")
    return {table["name"]: table for table in json.loads(out)["tables"]}


def test_parts_tell_a_rewrite_from_everything_else(on: PublishedDatabase) -> None:
    on.sql("insert into t values (1, 'x')")

    def changed(*sql: str) -> tuple[bool, bool]:
        """Return whether the file and the definition are other ones after these commands."""
        [before] = parts_of(on)["t"]["parts"]
        on.sql(*sql)
        [after] = parts_of(on)["t"]["parts"]
        assert (after["relation_id"], after["is_attached"], after["has_rows"]) == (before["relation_id"], False, None)
        return after["file"] != before["file"], after["definition"] != before["definition"]

    assert changed("insert into t values (2, 'x')", "update t set v = 'y'", "analyze t", "vacuum t") == (False, False)
    assert changed("alter table t alter v type text using upper(v)") == (True, True)
    assert changed("alter table t add w float default random()") == (True, True)
    assert changed("alter table t add c int default 7") == (False, True)
    # Once, it puts the default of c in the rows.
    assert changed("vacuum full t") == (True, True)
    assert changed("vacuum full t", "cluster t using t_pkey", "truncate t") == (True, False)
    assert run_cli("prepare", "-d", on.database.dsn, "-S", on.slot, "--parts", "--export-snapshot")[0] == 1


def test_parts_tell_what_publishes_a_table(on: PublishedDatabase) -> None:
    by = parts_of(on)["t"]["published_by"]
    assert by == [on.value("select oid::int8 from pg_publication_rel")]
    on.sql("alter publication p drop table t", "alter publication p add table t")
    again = parts_of(on)["t"]["published_by"]
    assert len(again) == 1
    assert again != by
    if on.database.cluster.version_num >= 150000:
        on.sql("alter publication p add tables in schema public")
        both = parts_of(on)["t"]["published_by"]
        assert len(both) == 2
        assert set(again) < set(both)
    assert parts_of(on)["t"]["operations"] == ["insert", "update", "delete", "truncate"]
    on.sql("drop publication p", "create publication p for all tables with (publish = 'insert, truncate')")
    assert parts_of(on)["t"]["operations"] == ["insert", "truncate"]
    assert parts_of(on)["t"]["published_by"] == [on.value("select oid::int8 from pg_publication")]


def test_a_table_that_is_unpublished_before_its_parts_are_looked_up_is_left_out(
    on: PublishedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    on.sql("create table u (id int primary key)", "alter publication p add table u")

    def unpublish(connection: Connection, names: Sequence[str]) -> Mapping[int, TableParts]:
        on.sql("alter publication p drop table t")
        return table_parts(connection, names)

    monkeypatch.setattr(prepare, "table_parts", unpublish)
    parameters = connection_parameters([("dbname", on.database.dsn)])
    found = prepare.prepare(SlotConfig(parameters, on.slot, publications=("p",)), with_parts=True)
    assert found.parts is not None
    assert [(table.name, table.relation_id in found.parts) for table in found.tables] == [("u", True)]


def test_parts_tell_which_columns_and_rows_are_not_published(on: PublishedDatabase) -> None:
    def told(name: str = "t") -> tuple[list[int], int]:
        found = parts_of(on)[name]
        return found["unpublished"], len(found["filters"])

    on.sql("alter table t add total int generated always as (id * 2) stored")
    number = on.value("select attnum::int8 from pg_attribute where attrelid = 't'::regclass and attname = 'total'")
    assert told() == ([number], 0)
    on.sql("alter table t add note text", "alter table t drop note")
    assert told() == ([number, number + 1], 0)
    on.sql("alter table t alter total drop expression")
    assert told() == ([number + 1], 0)
    if on.database.cluster.version_num < 150000:
        return
    on.sql("create table f (id int primary key, v text)")
    on.sql("alter publication p add table f (id) where (id > 1)")
    before = parts_of(on)["f"]
    assert (before["unpublished"], len(before["filters"])) == ([2], 3)
    # The same filter, at another place in the command.
    on.sql("alter publication p drop table f", "alter publication p add table f (v, id) where ((   id) > 1)")
    again = parts_of(on)["f"]
    assert (again["unpublished"], again["filters"]) == ([], before["filters"])
    # No lock of the table is waited for.
    with on.database.connect() as other, other.transaction():
        other.execute("lock table f in access exclusive mode")
        assert told("f") == ([], 3)
    on.sql("alter publication p set table t, f where (id > 2)")
    assert parts_of(on)["f"]["filters"] != before["filters"]
    on.sql("create publication q for table f where (id > 3)")
    assert told("f") == ([], 3)  # only p was asked for
    on.sql("alter publication p add tables in schema public")
    assert told("f") == ([], 0)


def test_two_looks_find_rows_and_columns_that_were_not_published(on: PublishedDatabase, tmp_path: pathlib.Path) -> None:
    homes, publications = Homes(Warehouse(tmp_path, "delta")), ["p"]

    def look() -> Prepared:
        names = [argument for name in publications for argument in ("--publication", name)]
        code, out, err = run_cli("prepare", "-d", on.database.dsn, "-S", on.slot, *names, "--in-use", "--quiet", "--parts")
        assert (code, err) == (0, "")
        return Prepared.parse(out)

    def found(*statements: str, also: str | None = None) -> list[tuple[str, str]]:
        """Return what the look after these statements finds, with one more publication."""
        before = seen(look())
        on.sql(*statements)
        publications.extend([] if also is None else [also])
        return [(str(each.table), each.reason) for each in compare(before, look(), lambda _: True, homes, {})]

    on.sql("alter table t add total int generated always as (id * 2) stored")
    assert found("alter table t alter total drop expression") == [("public.t", MORE_COLUMNS)]
    assert found("alter table t add gone int", "alter table t drop gone", "alter table t add came int default 7") == []
    if on.database.cluster.version_num >= 180000:
        on.sql("alter table t add doubled int generated always as (id * 2) stored")
        assert found("alter publication p set (publish_generated_columns = stored)") == [("public.t", MORE_COLUMNS)]
    if on.database.cluster.version_num < 150000:
        return
    on.sql(
        "create schema s",
        "create table s.f (region text primary key)",
        "alter publication p add table s.f where (region = 'eu')",
        "create publication q for table t",
        "create publication r for table s.f where (region = 'asia')",
    )
    publications.append("q")
    assert found("alter publication q add table s.f where (region  =  'eu')") == []
    assert found("alter publication q set table t, s.f where (region = 'us')") == [("s.f", MORE_ROWS)]
    assert found(also="r") == [("s.f", MORE_ROWS)]
    assert found("alter publication q set table t") == []
    assert found("alter publication p add tables in schema s") == [("s.f", MORE_ROWS)]
    assert found("alter publication p drop tables in schema s") == []
    # A filter, or none, counts only for what its publication publishes.
    on.sql(
        "create table s.g (region text primary key)",
        "create publication rows for table s.g where (region = 'eu') with (publish = 'insert, update, delete')",
        "create publication emptied for table s.g with (publish = 'truncate')",
    )
    publications.extend(["rows", "emptied"])
    assert found("alter publication emptied set table s.g where (region = 'cn')") == []
    assert found("alter publication emptied set (publish = 'insert, truncate')") == [("s.g", MORE_ROWS)]
    assert found("alter publication emptied set (publish = 'truncate')", "alter publication emptied set table s.g") == []
    assert found("alter publication rows set table s.g where (region = 'us')") == [("s.g", MORE_ROWS)]
    assert found("alter publication rows set table s.g") == [("s.g", MORE_ROWS)]
    # UPDATE brings rows, too, but not those that nobody updates.
    on.sql("alter publication rows set table s.g where (region = 'eu')", "alter publication emptied set (publish = 'update')")
    assert found("alter publication emptied set table s.g where (region = 'cn')") == []
    assert found("alter publication emptied set table s.g where (region = 'us')") == [("s.g", MORE_ROWS)]
    assert found("alter publication emptied set (publish = 'insert, update')") == [("s.g", MORE_ROWS)]
    assert found("alter publication emptied set (publish = 'update')") == []
    assert found("alter publication rows set table s.g") == [("s.g", MORE_ROWS)]
    on.sql(
        "create table s.h (region text primary key)",
        "create publication updates for table s.h where (region = 'eu') with (publish = 'update')",
    )
    publications.append("updates")
    assert ("s.h", MORE_ROWS) in found("alter publication updates set table s.h where (region = 'us')")
    # Each INSERT is published. Rows that nobody filters are in the tables, but without the updates and deletes that were filtered.
    on.sql(
        "create table s.i (region text primary key)",
        "create publication inserts for table s.i with (publish = 'insert')",
        "create publication changes for table s.i where (region = 'eu') with (publish = 'update')",
        "create publication deletes for table s.i where (region = 'eu') with (publish = 'delete')",
    )
    publications.extend(["inserts", "changes", "deletes"])
    assert found("alter publication inserts set table s.i where (region = 'us')") == []
    assert found("alter publication changes set table s.i where (region = 'us')") == [("s.i", MORE_ROWS)]
    assert found("alter publication deletes set table s.i") == [("s.i", MORE_ROWS)]


def test_parts_tell_attached_partitions_with_rows(on: PublishedDatabase) -> None:
    on.sql(
        "create table r (id int primary key, v text) partition by range (id)",
        "create table made partition of r for values from (0) to (10)",
        "insert into r values (1, 'through the root')",
        "create table loaded (id int primary key, v text)",
        "insert into loaded values (11, 'before it was attached')",
        "alter table r attach partition loaded for values from (10) to (20)",
        "create table empty (id int primary key, v text)",
        "alter table r attach partition empty for values from (20) to (30)",
        # In one transaction, as programs that manage partitions do.
        "do $$begin create table at_once (id int primary key, v text); insert into at_once values (30, 'x');"
        " alter table r attach partition at_once for values from (30) to (40); end$$",
        "begin; create table at_once_empty (id int primary key, v text);"
        " alter table r attach partition at_once_empty for values from (40) to (50); commit",
        "create table sub (id int primary key, v text) partition by range (id)",
        "create table sub_leaf partition of sub for values from (50) to (60)",
        "insert into sub values (50, 'x')",
        "alter table r attach partition sub for values from (50) to (60)",
        "alter publication p add table r",
        "alter publication p set (publish_via_partition_root = true)",
    )
    names = dict(on.connection.execute("select oid::int8, relname from pg_class where relkind = 'r'").fetchall())
    found = {names[part["relation_id"]]: (part["is_attached"], part["has_rows"]) for part in parts_of(on)["r"]["parts"]}
    with_rows = {name for name, (is_attached, has_rows) in found.items() if is_attached and has_rows}
    assert with_rows == {"loaded", "at_once", "sub_leaf"}
    assert found["made"] == (False, None)
    assert found["empty"] == found["at_once_empty"] == (True, False)
    # Nothing waits for a table that is locked.
    with on.database.connect() as other:
        other.autocommit = False
        other.execute("lock table empty in access exclusive mode")
        assert {names[part["relation_id"]] for part in parts_of(on)["r"]["parts"] if part["has_rows"]} == {*with_rows, "empty"}


def test_parts_tell_partitions_that_were_unlogged(on: PublishedDatabase) -> None:
    on.sql(
        "create table r (id int primary key) partition by range (id)",
        "create unlogged table u partition of r for values from (0) to (10)",
        "create unlogged table v partition of r for values from (10) to (20)",
        "create table w partition of r for values from (20) to (30)",
        "create table x partition of r for values from (30) to (40)",
        "insert into r values (1), (11), (21)",
        "truncate x",
        "alter table v set logged",
        "alter publication p add table r",
        "alter publication p set (publish_via_partition_root = true)",
    )
    names = dict(on.connection.execute("select oid::int8, relname from pg_class where relkind = 'r'").fetchall())

    def found() -> dict[str, tuple[bool, bool | None]]:
        return {names[part["relation_id"]]: (part["file"] > 0, part["has_rows"]) for part in parts_of(on)["r"]["parts"]}

    assert found() == {"u": (False, None), "v": (True, True), "w": (True, None), "x": (True, False)}
    on.sql("alter table u set logged")
    assert found()["u"] == (True, True)


def test_prepare_tells_the_slots_properties(on: PublishedDatabase) -> None:
    new = ["prepare", "-d", on.database.dsn, "-S", f"new_{on.database.name}", "--publication", "p"]
    has_failover = on.database.cluster.version_num >= 170000
    for created in (True, False):
        found = json.loads(run_cli(*new, "-c")[1])["slot"]
        expected: dict[str, bool | None] = {"created": created, "two_phase": False, "temporary": False}
        expected |= {"failover": has_failover or None, "synced": False if has_failover else None}
        assert found | expected == found
    assert json.loads(run_cli(*new)[1])["timeline_history"] == []
    on.sql(f"select pg_create_logical_replication_slot('two_{on.slot}', 'pgoutput', false, true)")
    found = json.loads(run_cli("prepare", "-d", on.database.dsn, "-S", f"two_{on.slot}", "--publication", "p")[1])["slot"]
    assert (found["created"], found["two_phase"]) == (False, True)


def test_prepare_tells_where_the_server_left_its_timelines(pg18: postgres.Cluster) -> None:
    del pg18  # it skips the test where there is no 18
    with postgres.Cluster("18") as primary:
        with primary.connect() as connection:
            connection.execute("create table t(id int primary key); create publication p for table t")
        with postgres.Cluster("18", standby_of=primary) as standby:
            standby.promote()
            with standby.connect() as connection:
                (history,) = connection.execute("select pg_read_file('pg_wal/00000002.history')").fetchone() or ("",)
            for options in ([], ["--export-snapshot"]):
                code, out, err = run_cli("prepare", "-d", standby.dsn, "-S", "s", "--publication", "p", "-c", *options)
                assert code == 0, err
                found = json.loads(out)
                assert found["timeline"] == 2
                assert found["timeline_history"] == [{"timeline": 1, "end_lsn": history.split()[1]}]


def test_prepare_makes_what_is_missing_and_its_end_is_reached(on: PublishedDatabase) -> None:
    name = f"new_{on.database.name}"
    args = ["-d", on.database.dsn, "-S", name, "--publication", "made", "-c"]
    assert run_cli("prepare", *args)[0] == 0
    on.sql("insert into t values (1, 'a')", "insert into t values (2, 'b')")
    _, out, _ = run_cli("prepare", *args)
    on.sql("insert into t values (3, 'c')")
    with CLI(*args, "--endpos", json.loads(out)["wal_lsn"]) as cli:
        rows = [decode(record) for _, record in cli.records()]
        assert [row.new[0] for row in rows if isinstance(row, Insert)] == [b"1", b"2"]
        assert cli.wait() == 0


THEN_STREAM = ("prepare", "--then-stream", "--publication", "p")


def test_prepare_then_streams_in_the_same_process(on: PublishedDatabase) -> None:
    on.sql("insert into t values (1, 'a')")
    with CLI(*THEN_STREAM, "-d", on.database.dsn, "-S", on.slot, header=False) as cli:
        found = read_json(cli)
        assert (found["slot"]["name"], found["publications"]) == (on.slot, ["p"])
        on.sql("insert into t values (2, 'b')")
        arguments = ["-d", on.database.dsn, "-S", on.slot, "--publication", "p", "-H"]
        cli.say(json.dumps(arguments) + "\nF 0/0\n")
        assert [rows for _, rows in cli.transactions(2)] == [[b"1"], [b"2"]]
        assert cli.quit() == 0


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("", 4, "stdin was closed before it had the arguments of a stream"),
        ('["-H"', 4, "stdin was closed before"),
        ("-H\n", 6, "the line on stdin has no arguments of a stream"),
        ('["slot", "-S", "s"]\n', 6, "the line on stdin has no arguments"),
        ('["-S", 1]\n', 6, "the line on stdin has no arguments"),
        ('["-S", "s", "--nonsense"]\n', 1, "--nonsense"),
    ],
)
def test_prepare_needs_the_arguments_of_a_stream(on18: PublishedDatabase, line: str, code: int, said: str) -> None:
    with CLI(*THEN_STREAM, "-d", on18.database.dsn, "-S", on18.slot, header=False) as cli:
        read_json(cli)
        cli.say(line)
        cli.close_stdin()
        assert cli.wait() == code
        assert said in cli.stderr


@pytest.mark.parametrize(("option", "code"), [("--then-stream", 4), ("--export-snapshot", 0)])
def test_prepare_takes_a_closed_stdin_for_one_at_its_end(on18: PublishedDatabase, option: str, code: int) -> None:
    command = shlex.join([*COMMAND, "prepare", "-d", on18.database.dsn, "-S", on18.slot, "--publication", "p", option])
    done = subprocess.run(["sh", "-c", f"exec {command} <&-"], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert json.loads(done.stdout)["slot"]["name"] == on18.slot
    assert "defect" not in done.stderr


def test_prepare_exports_no_snapshot_without_a_publication(on18: PublishedDatabase) -> None:
    code, _, err = run_cli("prepare", "-d", on18.database.dsn, "-S", on18.slot, "--export-snapshot")
    assert (code, "--publication" in err) == (2, True), err


def test_prepare_that_fails_has_no_stream(on18: PublishedDatabase) -> None:
    assert run_cli(*THEN_STREAM, "-d", on18.database.dsn, "-S", "nope")[0] == 8
    assert run_cli(*THEN_STREAM, "-d", on18.database.dsn, "-S", on18.slot, "--in-use")[0] == 1
    with CLI(*THEN_STREAM, "-d", on18.database.dsn, "-S", on18.slot, header=False) as cli:
        read_json(cli)
        cli.process.terminate()
        assert cli.wait() == 143


def test_prepare_exports_the_snapshot_of_a_new_slot(on: PublishedDatabase) -> None:
    name = f"new_{on.database.name}"
    args = ["prepare", "-d", on.database.dsn, "-S", name, "--publication", "p", "-c", "--export-snapshot"]
    on.sql("insert into t values (1, 'before')")
    with CLI(*args, header=False) as cli:
        found = read_json(cli)
        assert found["slot_created"]
        assert found["consistent_point"] == found["slot"]["confirmed_flush_lsn"]
        assert found["connection"]["dbname"] == on.database.name
        on.sql("insert into t values (2, 'after')")
        assert rows_of_snapshot(on, found["snapshot"]) == [(1,)]
        # The slot is nobody's, and its stream begins where the snapshot ends.
        with CLI("-d", on.database.dsn, "-S", name, "--publication", "p") as stream:
            assert [rows for _, rows in stream.transactions(1)] == [[b"2"]]
            assert stream.quit() == 0
        assert rows_of_snapshot(on, found["snapshot"]) == [(1,)]
        cli.close_stdin()
        assert cli.wait_without_reading() == 0


def test_prepare_exports_a_snapshot_beside_a_slot_in_use(on: PublishedDatabase) -> None:
    on.sql("insert into t values (1, 'before')")
    with on.cli() as stream:
        ((before, _),) = stream.transactions(1)
        with CLI("prepare", "-d", on.database.dsn, "-S", on.slot, "--publication", "p", "--export-snapshot", header=False) as cli:
            found = read_json(cli)
            assert not found["slot_created"]
            on.sql("insert into t values (2, 'after')")
            assert rows_of_snapshot(on, found["snapshot"]) == [(1,)]
            ((after, rows),) = stream.transactions(1)
            assert rows == [b"2"]
            assert before <= LSN.parse(found["consistent_point"]) < after
            on.sql("select pg_terminate_backend(active_pid) from pg_replication_slots where temporary")
            assert cli.wait() == 3
            assert "connection" in cli.stderr
        assert stream.quit() == 0
    until(lambda: not on.value("select count(*) from pg_replication_slots where temporary"), "the temporary slot's end")


def test_prepare_lingers_until_another_program_opens_the_pipe(on18: PublishedDatabase, tmp_path: pathlib.Path) -> None:
    pipe = tmp_path / "hold"
    os.mkfifo(pipe)
    arguments = ["prepare", "-d", on18.database.dsn, "-S", on18.slot, "--publication", "p", "--export-snapshot", "--linger"]
    held = "select count(*) from pg_replication_slots where temporary"

    def begin(linger_s: str) -> tuple[subprocess.Popen[bytes], int]:
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        writer = os.open(pipe, os.O_WRONLY)
        os.set_blocking(reader, True)
        process = subprocess.Popen([*COMMAND, *arguments, linger_s], stdin=reader, stdout=subprocess.PIPE)
        os.close(reader)
        assert process.stdout is not None
        until(lambda: process.stdout.readline() == b"}\n", "the report")
        process.stdout.close()
        return process, writer

    process, writer = begin("600")
    os.close(writer)
    writer = os.open(pipe, os.O_WRONLY)  # this is what waits while nobody reads from it
    os.write(writer, b"not q\n")
    assert on18.value(held) == 1
    os.write(writer, b"q\n")
    assert process.wait(60) == 0
    os.close(writer)

    process, writer = begin("0.2")
    os.close(writer)
    assert process.wait(60) == 0
    assert run_cli("prepare", "-d", on18.database.dsn, "-S", on18.slot, "--linger", "5")[0] == 1


def read_json(cli: CLI) -> dict[str, Any]:
    text = b""
    while not text.endswith(b"}\n"):
        data = cli.read_bytes()
        assert data, cli.stderr
        text += data
    found: dict[str, Any] = json.loads(text)
    return found


def rows_of_snapshot(on: PublishedDatabase, snapshot: str) -> list[Any]:
    with on.database.connect() as other, other.transaction():
        other.execute("set transaction isolation level repeatable read")
        other.execute(f"set transaction snapshot '{snapshot}'")
        return other.execute("select id from t order by 1").fetchall()


def test_a_role_that_another_one_takes_the_place_of_makes_a_slot(on: PublishedDatabase) -> None:
    """The other one does not inherit the attribute REPLICATION."""
    login, owner = f"{on.database.name}_login", f"{on.database.name}_owner"
    on.sql(f"create role {owner}; create role {login} login replication in role {owner}; alter role {login} set role = {owner}")
    try:
        code, _, err = run_cli("prepare", "-d", on.database.dsn, "-U", login, "-S", f"{on.slot}_2", "--publication", "p", "-c")
        assert (code, err) == (0, "")
        assert on.value(f"select count(*) from pg_replication_slots where slot_name = '{on.slot}_2'") == 1
        on.sql(f"create table unpublished (); grant usage on schema public to {owner}; grant select on t to {owner}")
        asked = {"pending": f"{on.slot}_2", "publications": ["p"], "upto": str(on.value("select pg_current_wal_insert_lsn()"))}
        begun = {"begin": [], "publications": ["p"]}
        command = [*COMMAND, "checksum", "-d", on.database.dsn, "-U", login]
        text = f"{json.dumps(begun)}\n{json.dumps(asked)}\n"
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1] == "false", done.stderr
    finally:
        on.sql(f"select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = '{on.slot}_2'")
        on.sql(f"drop owned by {owner}; drop role {login}; drop role {owner}")


@pytest.mark.parametrize("stdout", [">/dev/full", "| :"], ids=["full disk", "closed pipe"])
def test_a_slot_that_was_made_is_named_if_the_answer_is_lost(on18: PublishedDatabase, stdout: str) -> None:
    slot = f"{on18.slot}_new"
    command = shlex.join([*COMMAND, "prepare", "-d", on18.database.dsn, "-S", slot, "--publication", "p", "-c"])
    said = subprocess.run(["sh", "-c", f"{command} {stdout}"], stderr=subprocess.PIPE, text=True).stderr
    try:
        assert f"replication slot '{slot}' is there now, and retains WAL" in said
    finally:
        on18.sql(f"select pg_drop_replication_slot('{slot}')")


def test_the_answer_is_in_utf8_whatever_the_locale_is(on18: PublishedDatabase) -> None:
    on18.sql('create table "таблица"(id int primary key)', 'alter publication p add table "таблица"')
    environment = {"PYTHONIOENCODING": "iso8859-1"}
    code, out, err = run_cli("prepare", "-d", on18.database.dsn, "-S", on18.slot, "--publication", "p", env=environment)
    assert (code, err) == (0, "")
    assert "таблица" in {table["name"] for table in json.loads(out)["tables"]}
