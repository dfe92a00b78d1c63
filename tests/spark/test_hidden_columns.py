"""Columns that nobody is to see: left out of the publication, or masked, in snapshot, stream and captured DDL alike."""

from __future__ import annotations

import hmac
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import postgres
import pyarrow as pa
import pytest
from pyarrow import parquet

import spark_sink
from cdcpipe.ddl import script
from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.publishing import NewPublication
from cdcpipe.sql import quote_literal
from spark_sink.replica.current import read_replica
from spark_sink.snapshot.tables import TableSnapshot
from spark_sink.verify.comparison import TableResult, verify
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Warehouse
from support.typed_values import TYPES

pytestmark = pytest.mark.spark


class Hidden:
    """A database with people, and a run that hides a part of what is known of them."""

    def __init__(self, spark: Any, database: postgres.Database, root: Path, **options: Any) -> None:
        self.spark, self.database = spark, database
        self.staging, self.warehouse = root / "staging", root / "warehouse"
        self.connection = database.connect()
        launcher = spark_sink.LauncherConfig(
            "hidden", self.staging, ("p",), ("-d", database.dsn), create_slot=True, available_now=True, **options
        )
        self.config = spark_sink.RunConfig(launcher, self.warehouse, optimize_interval_s=None)

    def execute(self, *sql: str) -> None:
        for each in sql:
            self.connection.execute(each)

    def run(self, **changes: Any) -> None:
        spark_sink.run(replace(self.config, **changes), self.spark)

    def copy(self, name: str) -> None:
        """Copy a table, as `cdcpipe-spark snapshot` does."""
        copy = TableSnapshot(self.config.launcher, Warehouse.existing(self.warehouse), [f"public.{name}"])
        try:
            copy.prepare(lambda: False)
            copy.start(self.spark)
            copy.wait()
        finally:
            copy.stop()

    def check(self, *names: str) -> dict[str, TableResult]:
        found = verify(self.spark, self.warehouse, ("-d", self.database.dsn), tables=names, timeout_s=300)
        assert {str(each.table): (each.is_equal, each.problem) for each in found} == dict.fromkeys(names, (True, None))
        return {str(each.table): each for each in found}

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [row.asDict() for row in read_replica(self.spark, self.warehouse, f"public.{name}").collect()]

    def stored(self, name: str) -> list[dict[str, Any]]:
        """Return the rows in the replica's directory of the table that had this name at first, with all their columns."""
        rows = self.spark.read.format("delta").load(str(self.warehouse / f"replica/public.{name}"))
        return [row.asDict() for row in rows.orderBy("id").collect()]

    def files_with(self, text: bytes, *roots: Path) -> list[str]:
        """Return the files that hold a text. Parquet files compress their values, so they are searched uncompressed, too."""
        files = [path for root in roots for path in root.rglob("*") if path.is_file()]
        return [str(path) for path in files if text in path.read_bytes() or (path.suffix == ".parquet" and text in values_of(path))]


def values_of(path: Path) -> bytes:
    """Return the values of a Parquet file, one after the other."""
    table, values = parquet.ParquetFile(path).read(), pa.BufferOutputStream()
    with pa.ipc.new_stream(values, table.schema) as stream:
        stream.write_table(table)
    return values.getvalue().to_pybytes()


@pytest.fixture
def database(pg18: postgres.Cluster) -> Iterator[postgres.Database]:
    with pg18.database() as made:
        yield made


def test_excluded_columns_are_nowhere(spark: Any, database: postgres.Database, tmp_path: Path) -> None:
    wanted = NewPublication.of(exclude_columns=["public.person.ssn"], exclude_tables=["public.other"])
    hidden = Hidden(spark, database, tmp_path, new_publication=wanted)
    hidden.execute(
        "create table person (id int primary key, name text, ssn text, age int)",
        "create table plain (id int primary key, v text)",
        "create table other (v text)",
        script.install("cdcpipe", script.Settings()),
        "insert into person select i, 'name ' || i, 'canary' || i, i from generate_series(1, 100) i",
    )
    hidden.run()
    hidden.check("public.person", "public.plain")
    hidden.execute(
        "update person set ssn = 'canary-new', age = age + 1 where id < 10",
        "update person set ssn = 'canary-alone' where id = 11",
        "insert into person values (200, 'Ann', 'canary-200', 1)",
        "delete from person where id = 50",
        # Captured DDL describes the whole table, also the excluded column, which the stream does not have.
        "alter table person rename column name to full_name",
        "alter table person alter column ssn type varchar(40)",
        "alter table person add column nick text default 'nobody'",
        "update person set age = 7 where id = 12",
        "alter table plain add column w int default 7",
        "insert into plain values (1, 'x', 1)",
    )
    hidden.run()
    hidden.check("public.person", "public.plain")
    hidden.execute("alter table person drop column ssn", "update person set age = 5 where id = 13")
    hidden.run()
    hidden.check("public.person", "public.plain")
    assert {name for row in hidden.rows("person") for name in row} >= {"id", "full_name", "age"}
    assert all("ssn" not in row for row in hidden.rows("person"))
    assert hidden.files_with(b"canary", hidden.staging, hidden.warehouse) == []
    hidden.connection.close()


KEY = "a key that only this test knows"
KINDS = [*TYPES, ("mood", None, ["so so"], []), ("price", None, ["1.5"], [])]


def hash_of(text: str) -> str:
    return hmac.new(KEY.encode(), text.encode(), "sha256").hexdigest()


def every_kind(first: int) -> Iterator[str]:
    """Yield statements that insert each value of each type, beginning with this id."""
    count = max(len(fine) + len(others) for _, _, fine, others in KINDS)
    for number in range(count):
        values = [[*fine, *others][number % (len(fine) + len(others))] for _, _, fine, others in KINDS]
        yield f"insert into kinds values ({first + number}, {', '.join(quote_literal(value) for value in values)})"
    yield f"insert into kinds (id) values ({first + count})"


def test_masked_columns(
    spark: Any, database: postgres.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = Hidden(spark, database, tmp_path)
    columns = ", ".join(f"c{number} {kind}" for number, (kind, *_) in enumerate(KINDS))
    hidden.execute(
        "create type mood as enum ('so so'); create domain price as numeric(8,2)",
        f"create table kinds (id int primary key, {columns})",
        *every_kind(1000),
        "create table person (email text, no int, ssn text, phone text, age int, note text, primary key (email, no))",
        "alter table person alter note set storage external",
        "insert into person select 'canary' || i, i, 'canary-s' || i, 'canary-p', i, repeat('canary', 1000)"
        " from generate_series(1, 100) i",
        "insert into person (email, no) values ('canary', 0)",
    )
    masks = {
        "public.person.email": "hash",
        "public.person.ssn": "null",
        "public.person.phone": "redact",
        "public.person.note": "hash",
        "public.kinds.c*": "hash",
    }
    monkeypatch.delenv("CDCPIPE_MASK_KEY", raising=False)
    with pytest.raises(InvalidArgumentsError, match="CDCPIPE_MASK_KEY"):
        hidden.run(masks=masks)
    assert hidden.connection.execute("select from pg_replication_slots where slot_name = 'hidden'").fetchall() == []
    monkeypatch.setenv("CDCPIPE_MASK_KEY", KEY)
    hidden.run(masks=masks)
    hidden.execute(
        *every_kind(0),
        "update kinds set c0 = not c0 where id < 3",
        "update person set age = age + 1 where no < 10",  # the note is not sent
        "update person set email = 'canary-moved' where no = 20",  # a hashed key still finds its row
        "update person set ssn = 'canary-new', phone = null, note = 'canary-note' where no = 21",
        "insert into person values ('canary-ü', 200, 'canary', '', 1, null)",
        "delete from person where no between 50 and 60",
    )
    hidden.run()  # the warehouse keeps its masks
    found = hidden.check("public.person", "public.kinds")
    assert (found["public.person"].left_out, found["public.person"].hashed) == (("ssn", "phone"), ("email", "note"))
    assert len(found["public.kinds"].hashed) == len(KINDS)
    rows = {row["no"]: row for row in hidden.rows("person")}
    assert rows[20]["email"] == hash_of("canary-moved")
    assert rows[200]["email"] == hash_of("canary-ü")
    assert rows[5]["note"] == hash_of("canary" * 1000)
    assert {row["ssn"] for row in rows.values()} == {None}
    assert (rows[1]["phone"], rows[0]["phone"], rows[21]["phone"], rows[200]["phone"]) == ("***", None, None, "***")
    assert (rows[0]["note"], rows[200]["note"], rows[21]["note"]) == (None, None, hash_of("canary-note"))
    changes = spark.read.format("delta").load(str(hidden.warehouse / "changelog/public.person"))
    old = changes.where("_cdc_old.email is not null").select("_cdc_old.email").collect()
    assert {len(row["email"]) for row in old} == {64}
    assert hidden.files_with(b"canary", hidden.warehouse) == []
    assert hidden.files_with(b"canary", hidden.staging)  # the log holds what the server has sent

    # A difference is found in a hashed column, too.
    spark.sql(f"update delta.`{hidden.warehouse}/replica/public.person` set note = 'x' where no = 5")
    [result] = verify(spark, hidden.warehouse, ("-d", database.dsn), tables=["public.person"], timeout_s=300)
    assert [(each.kind, each.key["no"]) for each in result.differences] == [("changed", "5")]

    # Another key, and another mask of a key column, are refused. Other masks may change: the table is copied anew.
    monkeypatch.setenv("CDCPIPE_MASK_KEY", KEY + "!")
    with pytest.raises(WarehouseError, match="is not the key"):
        hidden.run()
    with pytest.raises(WarehouseError, match="is not the key"):  # and not "DIFFERENT"
        verify(spark, hidden.warehouse, ("-d", database.dsn), timeout_s=300)
    monkeypatch.setenv("CDCPIPE_MASK_KEY", KEY)
    with pytest.raises(WarehouseError, match=r"the mask of public\.person\.email can't be changed"):
        hidden.run(masks={"public.person.email": "off"})
    hidden.execute("update person set phone = 'canary-last' where no = 1")
    caplog.clear()
    hidden.run(masks={"public.person.phone": "off", "public.person.age": "redact"})
    assert "Changes up to " in caplog.text
    hidden.run()
    found = hidden.check("public.person")
    assert found["public.person"].left_out == ("ssn", "age")
    rows = {row["no"]: row for row in hidden.rows("person")}
    assert (rows[1]["phone"], rows[2]["phone"], rows[200]["phone"], rows[1]["age__string"]) == (
        "canary-last",
        "canary-p",
        "",
        "***",
    )
    noted = json.loads((hidden.warehouse / "_cdcpipe/masks.json").read_text())
    assert noted["changes"][0]["masks"] == masks
    assert KEY not in json.dumps(noted)

    # A column that was renamed would be shown: the run ends before it writes a row.
    hidden.execute("alter table person rename ssn to social", "update person set social = 'canary-renamed' where no = 1")
    with pytest.raises(CdcpipeError, match="has no column 'ssn', which --mask names"):
        hidden.run()
    hidden.run(masks={"public.person.ssn": "off", "public.person.ss*n": "null", "public.person.social": "null"})
    assert hidden.files_with(b"canary-renamed", hidden.warehouse) == []
    assert hidden.check("public.person")["public.person"].left_out == ("social", "age")
    # So would the columns of a table that was renamed.
    hidden.execute("alter table person rename to people", "update people set social = 'canary-people' where no = 1")
    with pytest.raises(CdcpipeError, match=r"public\.people has rows of public\.person, and --mask names"):
        hidden.run()
    assert hidden.files_with(b"canary-people", hidden.warehouse) == []
    hidden.connection.close()


def test_a_warehouse_that_is_made_anew_does_not_show_what_was_masked(
    spark: Any, database: postgres.Database, tmp_path: Path
) -> None:
    """The pages say: delete the warehouse, and start `run -c`. The mask was given once, and the warehouse kept it."""
    hidden = Hidden(spark, database, tmp_path)
    hidden.execute("create table person (id int primary key, ssn text)", "insert into person values (1, 'canary')")
    hidden.run(masks={"public.person.ssn": "redact"})
    hidden.run()
    assert hidden.rows("person") == [{"id": 1, "ssn": "***"}]
    shutil.rmtree(hidden.warehouse)
    for snapshot in (None, "initial"):
        with pytest.raises(InvalidArgumentsError, match=r"does not have: public\.person\.ssn=redact"):
            hidden.run(snapshot=snapshot)
    with pytest.raises(InvalidArgumentsError, match=r"does not have: public\.person\.ssn=redact"):
        spark_sink.Pipeline(spark, hidden.staging, hidden.warehouse).start()
    assert not hidden.warehouse.exists()
    hidden.run(masks={"public.person.ssn": "null"})
    hidden.run()
    assert hidden.rows("person") == [{"id": 1, "ssn": None}]
    assert hidden.files_with(b"canary", hidden.warehouse) == []
    shutil.rmtree(hidden.warehouse)
    hidden.run(masks={"public.person.ssn": "off"})
    hidden.run()
    assert hidden.rows("person") == [{"id": 1, "ssn": "canary"}]
    hidden.connection.close()


def test_rows_that_a_copy_has_brought_get_a_later_mask(spark: Any, database: postgres.Database, tmp_path: Path) -> None:
    """A copy may be later than the tables' position. Then it is no copy with the masks of the next start."""
    hidden = Hidden(spark, database, tmp_path)
    hidden.execute("create table person (id int primary key, ssn text)", "insert into person values (1, 'canary')")
    hidden.run()
    hidden.execute("update person set ssn = 'canary-new'")
    hidden.copy("person")
    assert hidden.rows("person") == [{"id": 1, "ssn": "canary-new"}]
    hidden.run(masks={"public.person.ssn": "null"})
    hidden.run()
    assert hidden.rows("person") == [{"id": 1, "ssn": None}]
    hidden.connection.close()


@pytest.mark.parametrize("captures", [True, False])
def test_a_rename_into_the_pattern_of_a_mask(
    spark: Any, database: postgres.Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, captures: bool
) -> None:
    """The rows from before have no value under the masked name, until the table is copied."""
    hidden = Hidden(spark, database, tmp_path, new_publication=NewPublication.of())
    if captures:
        hidden.execute(script.install("cdcpipe", script.Settings()))
    hidden.execute(
        "create schema secret",
        "create table person (id int primary key, pw text, note text)",
        "create table card (id int primary key, pin int, owner text)",
        "insert into person select i, 'canary', 'x' from generate_series(1, 3) i",
        "insert into card select i, 4711, 'canary' from generate_series(1, 3) i",
    )
    masks = {"*.*.password": "null", "secret.*.pin": "redact", "secret.*.owner": "redact"}
    hidden.run(masks=masks, deletes="soft", heal="off")
    hidden.execute(
        "delete from person where id = 3",
        "alter table person rename pw to password",
        "update person set note = 'y', password = 'canary-new' where id = 1",
    )
    if captures:
        hidden.execute("alter table card set schema secret", "insert into secret.card values (4, 12, 'canary')")
    hidden.run(deletes="soft", heal="off")
    assert "since a rename, a mask applies to password" in caplog.text
    names = ["person", "card"] if captures else ["person"]
    shown = {name: hidden.stored(name) for name in names}
    assert {name: len(rows) for name, rows in shown.items()} == {name: 3 if name == "person" else 4 for name in names}
    assert "canary" not in str(shown)
    assert "4711" not in str(shown)
    hidden.run(deletes="soft")
    hidden.run(deletes="soft")
    shown = {name: hidden.stored(name) for name in names}
    assert "canary" not in str(shown)
    assert "4711" not in str(shown)
    assert [row["note"] for row in shown["person"]] == ["y", "x", "x"]
    if captures:
        assert {(row["pin__string"], row["owner"]) for row in shown["card"]} == {("***", "***")}
    hidden.connection.close()


def test_deleted_rows_get_a_later_mask(
    spark: Any, database: postgres.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``--deletes soft``: a copy does not have the deleted rows, and the masks apply to them all the same."""
    monkeypatch.setenv("CDCPIPE_MASK_KEY", KEY)
    hidden = Hidden(spark, database, tmp_path)
    hidden.execute(
        "create table person (id int primary key, ssn text, pin int, phone text, day date, note text)",
        "insert into person select i, 'canary', 4711, 'canary', 'infinity', 'note ' || i from generate_series(1, 5) i",
        "insert into person (id) values (6)",
    )
    hidden.run(deletes="soft")
    hidden.execute("delete from person where id in (1, 6)")
    hidden.run(deletes="soft")
    assert "infinity" in str(hidden.stored("person"))
    hidden.execute("delete from person where id = 2")
    masks = {"public.person.ssn": "null", "public.person.p*": "redact", "*.person.day": "hash"}
    for _ in range(2):
        hidden.run(deletes="soft", masks=masks)
    hidden.execute("delete from person where id = 3")
    hidden.run(deletes="soft")

    def check() -> None:
        rows = {row["id"]: row for row in hidden.stored("person")}
        assert sorted(number for number, row in rows.items() if row["_cdc_deleted_at"]) == [1, 2, 3, 6]
        assert all(plain not in str(rows) for plain in ("canary", "4711", "infinity"))
        assert {(row["pin__string"], row["phone"]) for number, row in rows.items() if number != 6} == {("***", "***")}
        assert (rows[6]["pin__string"], rows[6]["phone"]) == (None, None)
        assert [rows[number]["note"] for number in range(1, 6)] == [f"note {number}" for number in range(1, 6)]
        # What was deleted before the masks came has no hash. What has one keeps it.
        days = [rows[number]["day__string"] for number in range(1, 6)]
        assert days == [None, None, *[hash_of("infinity")] * 3]

    check()
    hidden.copy("person")
    check()
    hidden.connection.close()


def test_what_has_the_rows_of_a_masked_table_is_not_shown(spark: Any, database: postgres.Database, tmp_path: Path) -> None:
    """Partitions under their own names, also new ones, the root of a masked partition, and a table that inherits."""
    hidden = Hidden(spark, database, tmp_path)
    hidden.execute(
        "create table orders (id int primary key, email text) partition by range (id)",
        "create table orders_1 partition of orders for values from (0) to (10)",
        "create table person (id int primary key, ssn text)",
        "create table employee (primary key (id)) inherits (person)",
        "insert into orders values (1, 'canary')",
        "insert into employee values (1, 'canary')",
        "create publication p for all tables",
    )
    given = {"public.orders.email": "redact", "public.person.ssn": "null"}
    for table, column, parent, kind in (("employee", "ssn", "person", "null"), ("orders_1", "email", "orders", "redact")):
        with pytest.raises(
            InvalidArgumentsError, match=rf"public\.{table} has rows of public\.{parent}, and --mask names {column}"
        ):
            hidden.run(masks=given)
        given[f"public.{table}.{column}"] = kind
    hidden.run(masks=given)
    assert hidden.rows("employee") == [{"id": 1, "ssn": None}]
    # From the stream, and with a copy.
    hidden.execute(
        "create table orders_2 partition of orders for values from (10) to (20)", "insert into orders values (11, 'canary')"
    )
    with pytest.raises(InvalidArgumentsError, match=r"public\.orders_2 has rows of public\.orders, and"):
        hidden.run()
    with pytest.raises(InvalidArgumentsError, match=r"public\.orders_2 has rows of public\.orders, and"):
        hidden.copy("orders_2")
    hidden.run(masks={"public.orders_2.email": "redact"})
    # A table of its own that is attached.
    hidden.execute("create table orders_3 (id int primary key, email text)", "insert into orders_3 values (21, 'shown')")
    hidden.run()
    hidden.execute(
        "alter table orders attach partition orders_3 for values from (20) to (30)", "insert into orders values (22, 'canary')"
    )
    with pytest.raises(InvalidArgumentsError, match=r"public\.orders_3 has rows of public\.orders, and"):
        hidden.run()
    hidden.run(masks={"public.orders_3.email": "redact"})
    hidden.execute("alter publication p set (publish_via_partition_root)")
    hidden.run(masks={"public.orders.email": "off"}, heal="off")
    with pytest.raises(InvalidArgumentsError, match=r"public\.orders has rows of public\.orders_1, and"):
        hidden.copy("orders")
    assert hidden.files_with(b"canary", hidden.warehouse) == []
    hidden.connection.close()


def test_rows_that_leave_their_mask_are_not_shown(spark: Any, database: postgres.Database, tmp_path: Path) -> None:
    """A partition under its own name, a root with a table that was attached, two columns that swap names: each run ends first."""
    hidden = Hidden(spark, database, tmp_path)
    hidden.execute(
        "create table orders (id int primary key, email text) partition by range (id)",
        "create table orders_1 partition of orders for values from (0) to (10)",
        "create table orders_2 partition of orders for values from (10) to (20)",
        "create table whole (id int primary key, email text) partition by range (id)",
        "create table piece (id int primary key, email text)",
        "create table person (id int primary key, ssn text, token text)",
        "insert into orders select i, 'canary' from generate_series(1, 15) i",
        "insert into piece values (1, 'canary')",
        "insert into person values (1, 'canary', 'x')",
        "create publication p for all tables with (publish_via_partition_root)",
    )
    given = {"public.orders.email": "redact", "public.piece.email": "null", "public.person.ssn": "redact"}

    def refused(message: str, *sql: str, mended: dict[str, str]) -> None:
        hidden.execute(*sql)
        with pytest.raises(InvalidArgumentsError, match=message):
            hidden.run()
        assert hidden.files_with(b"canary", hidden.warehouse) == []
        hidden.run(masks=mended)
        assert hidden.files_with(b"canary", hidden.warehouse) == []

    hidden.run(masks=given)
    refused(
        r"public\.orders_1 has rows of public\.orders, and",
        "alter table orders detach partition orders_1",
        "update orders_1 set email = 'canary-1' where id = 1",
        mended={"public.orders_1.email": "redact"},
    )
    refused(
        r"public\.whole has rows of public\.piece, and",
        "alter table whole attach partition piece for values from (0) to (10)",
        "insert into whole values (2, 'canary')",
        mended={"public.whole.email": "null"},
    )
    refused(
        r"column public\.person\.ssn_raw was public\.person\.ssn, and",
        "begin; alter table person rename ssn to ssn_raw; alter table person rename token to ssn; commit",
        "update person set ssn = 'y' where id = 1",
        mended={"public.person.ssn_raw*": "redact"},
    )
    # Without a change in the stream, a copy would show the rows.
    hidden.execute("alter publication p set (publish_via_partition_root = false)")
    with pytest.raises(InvalidArgumentsError, match=r"public\.orders_2 has rows of public\.orders, and"):
        hidden.copy("orders_2")
    hidden.execute("update orders set email = 'canary-2' where id = 11")
    with pytest.raises(InvalidArgumentsError, match=r"public\.orders_2 has rows of public\.orders, and"):
        hidden.run()
    assert hidden.files_with(b"canary", hidden.warehouse) == []
    hidden.connection.close()
