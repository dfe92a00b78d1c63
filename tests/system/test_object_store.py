"""Warehouses in object stores, which object_stores.py emulates. Only the last two tests use Spark."""

import contextlib
import functools
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import postgres
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import deletion_vector, file_table, rewrite
from spark_sink.delta import log as delta_log
from spark_sink.delta.file_table import ChangedError, Replaced
from spark_sink.delta.log import TableLog, read_table
from spark_sink.files import places
from spark_sink.files.parquet import FileWriter, Layout, WrittenFile
from spark_sink.files.places import StorageError, place
from spark_sink.replica.ordinary_merge import merge_without_spark
from spark_sink.replica.pieces import Piece
from spark_sink.schema.table import Table, Version
from spark_sink.schema.types import typed_schema
from spark_sink.staging.log import Epoch, Position
from spark_sink.warehouse import landed_snapshots, last_look, wanted_copies
from spark_sink.warehouse.belonging import record_staging
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import CHECKPOINT, Warehouse
from support import object_stores
from support.object_stores import Store
from support.paths import ROOT
from support.staged import make_epoch

EPOCH = Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)
TABLE = Table("public", "Odd %1/ü")  # what URLs and Hadoop's paths write otherwise
COLUMNS = StructType([StructField("id", LongType()), StructField("name", StringType())])


@pytest.fixture(scope="module")
def stores() -> Iterator[Callable[[str], Store]]:
    """Start a store of each kind once, because clients stay connected to it."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda kind: stack.enter_context(object_stores.started(kind)))


@pytest.fixture(params=["s3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("azure", "gcs"))])
def store(request: pytest.FixtureRequest, stores: Callable[[str], Store]) -> Store:
    if reason := object_stores.missing(request.param):
        pytest.skip(reason)
    return stores(request.param)


@pytest.fixture
def root(store: Store, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a place in a bucket of its own."""
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"lake{random.randrange(10**9)}"
    made: Any = place(store.url.format(bucket))
    made.fs.mkdir(bucket)
    return made


@pytest.fixture
def house(root: Any, tmp_path: Path) -> Warehouse:
    made = Warehouse(root, "delta")
    made.open(EPOCH)
    record_staging(made, tmp_path)
    made.write_versions(TABLE, [Version(0, 0, 7, ("id",), ("id",))])
    return made


def change(op: str, key: int, name: str | None, lsn: int, unchanged: list[str] | None = None) -> dict[str, Any]:
    return {
        "id": key,
        "name": name,
        "_cdc_op": op,
        "_cdc_epoch": 1,
        "_cdc_end_lsn": lsn,
        "_cdc_ordinal": key,
        "_cdc_unchanged": unchanged,
    }


def append(house: Warehouse, changes: list[dict[str, Any]], start: int, end: int) -> None:
    schema = typed_schema(COLUMNS)
    rows = pa.Table.from_pylist(changes, schema=to_arrow_schema(schema, timezone="UTC"))
    no_spark: Any = None
    changelogs_of(no_spark, house).append(TABLE, rows, schema, Position(1, start), Position(1, end))


def merge(house: Warehouse, after: int, until: int) -> None:
    piece = Piece(("id",), (("id",),), after, until, is_new_table=False)
    assert merge_without_spark(house, TABLE, piece, Position(1, until))


def rows(house: Warehouse) -> list[Any]:
    """Return the rows of the replica's files without those in deletion vectors."""
    log, found = TableLog(house.replica(TABLE)).refresh(), []
    for file in log.files:
        there = places.parquet_reader(log.path / file["path"]).read().to_pydict().values()
        gone = deletion_vector.read(log.path, file["deletionVector"]) if "deletionVector" in file else []
        found += [row for number, row in enumerate(zip(*there, strict=True)) if number not in gone]
    return sorted(found)


def test_from_changes_to_a_replica(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    append(house, [change("insert", key, f"n{key}", 10) for key in range(9)], 0, 10)
    merge(house, 0, 10)
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", 0)  # deletion vectors, also for small files
    append(house, [change("update", 3, None, 20, ["name"]), change("update", 4, "x", 20), change("delete", 5, None, 20)], 10, 20)
    append(house, [change("insert", 9, "y", 30)], 20, 30)
    merge(house, 10, 30)
    assert rows(house) == [(0, "n0"), (1, "n1"), (2, "n2"), (3, "n3"), (4, "x"), (6, "n6"), (7, "n7"), (8, "n8"), (9, "y")]
    state = read_table(house.replica(TABLE))
    assert state is not None
    assert (state.lsn, state.rows, state.version) == (30, 9, 1)
    assert read_table(house.replica(TABLE), state) is state
    assert delta_log.newest_lsn(house.changelog(TABLE)) == delta_log.newest_lsn(house.replica(TABLE)) == 30
    assert delta_log.exists(house.changelog(TABLE))
    assert read_table(house.changelog(Table("public", "none"))) is None
    assert delta_log.newest_lsn(house.replica(Table("public", "none"))) is None


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_merge_makes_few_requests(root: Any, house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs tens of milliseconds, and most come one after the other (docs/spark/object-stores.md)."""
    requests: list[str] = []
    client = type(root.fs)
    call_s3 = client._call_s3

    async def counted(self: Any, method: str, *args: Any, **options: Any) -> Any:
        requests.append(method)
        return await call_s3(self, method, *args, **options)

    monkeypatch.setattr(client, "_call_s3", counted)
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", 0)  # deletion vectors, also for small files
    for number in range(4):
        lsn = 10 * number
        append(house, [change("insert", number, "x", lsn + 10), change("update", number - 1, "y", lsn + 10)], lsn, lsn + 10)
        requests.clear()
        merge(house, lsn, lsn + 10)
    # Two uploads come besides: s3fs does not call this method for them.
    assert Counter(requests) == {"list_objects_v2": 2, "get_object": 6, "head_object": 2, "put_object": 1}


def test_two_writers_and_one_name(root: Any) -> None:
    """Both get a commit, whichever is first."""
    first = file_table.define(root / "t", COLUMNS, {})
    file_table.commit(first, [], Position(1, 10))
    tables = [file_table.open_table(root / "t") for _ in range(4)]

    def write(number: int) -> None:
        file = WrittenFile(f"part-{number}.parquet", 100, 1, {}, {}, {})
        file_table.commit(tables[number], [file], Position(1, 10), is_reached=False)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(table.version for table in tables) == [1, 2, 3, 4]
    log = TableLog(root / "t").refresh()
    assert (log.version, len(log.files)) == (4, 4)
    with pytest.raises(ChangedError):  # who replaces files has to know all commits
        file_table.commit(first, [], Position(1, 20), replaced=[Replaced({"path": "part-1.parquet"})])


def test_a_put_whose_answer_was_lost(root: Any) -> None:
    places.put_if_absent(root / "x", b"one")
    places.put_if_absent(root / "x", b"one")  # made again
    with pytest.raises(FileExistsError):
        places.put_if_absent(root / "x", b"two")
    assert (root / "x").read_bytes() == b"one"


def test_a_store_without_conditional_writes_is_refused(root: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_file = root.fs.pipe_file
    monkeypatch.setattr(root.fs, "pipe_file", lambda path, data, **_kwargs: pipe_file(path, data))
    with pytest.raises(StorageError, match="no conditional writes"):
        Warehouse(root, "delta").open(EPOCH)


def test_an_unreachable_store_is_reported(root: Any, store: Store, tmp_path: Path) -> None:
    nowhere = store.url.format("nowhere")
    with pytest.raises(StorageError) as caught:
        Warehouse(nowhere, "delta").open(EPOCH)
    assert caught.value.message.startswith(f"{nowhere}/_cdcpipe/")
    assert "can't be reached: " in caught.value.message
    said = {"s3": "The specified bucket does not exist", "azure": "The specified container does not exist", "gcs": "nowhere"}
    assert said[store.kind] in caught.value.message
    assert {"s3": "AWS_REGION", "azure": "AZURE_STORAGE", "gcs": "GOOGLE_"}[store.kind] in str(caught.value.hint)
    with pytest.raises(InvalidArgumentsError, match="not a warehouse"):
        Warehouse.existing(root / "other")


def test_files_of_one_table_for_another(root: Any) -> None:
    names = ["a", "b%41"]
    for name in names:
        places.write_file(root / "one" / name, name.encode())
    places.copy_files(root / "one", root / "two", names)
    places.copy_files(root / "one", root / "two", [])
    places.remove_tree(root / "one")
    places.remove_tree(root / "one")
    assert (places.list_names(root / "one"), sorted(places.list_names(root / "two"))) == ([], names)
    assert (root / "two" / "b%41").read_bytes() == b"b%41"
    assert abs((root / "two" / "b%41").stat().st_mtime - time.time()) < 600.0  # as delta_log.shorten asks for it
    places.remove_files(root / "two", names)
    places.remove_files(root / "two", [])
    places.remove_files(root / "two", names)  # as if nobody had written them
    assert places.list_names(root / "two") == []


def test_files_with_their_sizes_and_times(root: Any) -> None:
    for name in ("a", "b%41", "more/c ü", "_delta_log/0.json", ".hidden"):
        places.write_file(root / "t" / name, name.encode())
    found = {each.name: each for each in places.list_files(root / "t", {"a"})}
    assert {name: each.size for name, each in found.items()} == {"b%41": 4, "more/c ü": 9}
    assert all(abs(each.written_s - time.time()) < 600.0 for each in found.values())
    assert not list(places.list_files(root / "nowhere"))


def test_files_are_read_at_the_same_time(root: Any) -> None:
    paths = [root / f"log/{number}.json" for number in range(40)]
    for number, path in enumerate(paths):
        places.write_file(path, b"%d\n\nsecond\n" % number)
    assert places.map_reads(places.read_lines, paths, root) == [[b"%d" % number, b"second"] for number in range(40)]
    with pytest.raises(FileNotFoundError):
        places.map_reads(places.read_lines, [*paths, root / "log/none.json"], root)
    both = threading.Barrier(2)
    assert sorted(places.map_reads(lambda _: both.wait(timeout=60), paths[:2], root)) == [0, 1]


def test_a_file_by_name(root: Any) -> None:
    """As an executor writes it, which gets only the directory's name."""
    layout = Layout(("a",), pa.schema([("a", pa.int64())]))
    writer = FileWriter(places.name(root / "t"), "part-1.parquet", layout)
    writer.write({"a": pa.array(np.arange(5))}, 5)
    written = writer.close()
    assert (written.rows, written.size) == (5, (root / "t/part-1.parquet").stat().st_size)
    assert places.parquet_reader(root / "t/part-1.parquet").read()["a"].to_pylist() == [0, 1, 2, 3, 4]


def test_a_file_of_several_parts(root: Any) -> None:
    """Larger than one request to a store."""
    numbers = np.random.default_rng(1).integers(1 << 60, size=1_500_000)
    writer = FileWriter(places.name(root / "t"), "part-1.parquet", Layout(("a",), pa.schema([("a", pa.int64())])))
    for piece in np.array_split(numbers, 3):
        writer.write({"a": pa.array(piece)}, len(piece))
    assert writer.close().size == (root / "t/part-1.parquet").stat().st_size > 10_000_000
    places.copy_files(root / "t", root / "u", ["part-1.parquet"])
    for directory in ("t", "u"):
        assert np.array_equal(places.parquet_reader(root / directory / "part-1.parquet").read()["a"].to_numpy(), numbers)


def test_the_warehouse_knows_itself_again(house: Warehouse, tmp_path: Path) -> None:
    house.record(Position(1, 5))
    make_epoch(tmp_path, 1, 0)
    known_as = house.name
    again = Warehouse.existing(known_as)
    assert again.open(EPOCH) == Position(1, 5)
    assert again.tables() == [TABLE]
    assert again.versions(TABLE)[0].key == ("id",)
    assert again.local_root() == house.local_root(tmp_path)
    other_scheme = known_as.replace("s3a://", "s3://").replace("abfs://", "abfss://")
    assert Warehouse(f"{other_scheme}/", "delta").local_root(tmp_path) == again.local_root()
    assert again.local_root().parent == tmp_path
    landed_snapshots.record_start(house, TABLE, Position(1, 7))
    assert landed_snapshots.unfinished(again) == [(TABLE, Position(1, 7))]
    landed_snapshots.record_end(house, TABLE)
    assert landed_snapshots.unfinished(again) == []
    wanted_copies.want_copy(house, TABLE, 9, "it was renamed")
    wanted_copies.record_failure(house, TABLE, "the server is away", 1.0)
    assert [(each.table, each.why) for each in wanted_copies.waiting(again)] == [(TABLE, "it was renamed")]
    wanted_copies.settle(house)
    wanted_copies.give_up(house, TABLE)
    wanted_copies.give_up(house, TABLE)
    assert wanted_copies.waiting(again) == []
    seen = last_look.Seen("7123", 9, {})
    last_look.write(house, seen)
    assert last_look.read(again) == seen
    tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-elsewhere"))
    with pytest.raises(WarehouseError, match=f"locks of {known_as} are in its staging directory"):
        again.local_root()


def test_commits_say_the_same_everywhere(root: Any, tmp_path: Path) -> None:
    found = []
    for path in (root / "t", tmp_path / "t"):
        table = file_table.define(path, COLUMNS, {"a": "b"})
        file_table.commit(table, [WrittenFile("part-1.parquet", 100, 7, {}, {}, {})], Position(1, 10))
        text = (path / "_delta_log" / f"{0:020d}.json").read_text()
        found.append([sorted(json.loads(line)) for line in text.splitlines()])
    assert found[0] == found[1]


def section(kind: str) -> str:
    """Return the Spark settings for a store from the page. If the page has two connectors, return those of the second."""
    sections = (ROOT / "docs/spark/object-stores.md").read_text().split("\n## ")
    text = next(text for text in sections if text.startswith({"s3": "Amazon S3", "azure": "Azure", "gcs": "Google"}[kind]))
    return text.split("```sh\n")[-1]


SCRIPT = """
import os, sys
import psycopg
from spark_sink.__main__ import invoke

dsn, staging, warehouse, *conf = sys.argv[1:]
run = ["run", "-d", dsn, "-S", "stored", "--publication", "p", "--staging", staging, "--warehouse", warehouse]
run += ["--available-now", *conf]
server = psycopg.connect(dsn, autocommit=True)
code = invoke([*run, "-c"])
server.execute("update fruit set name = 'x' where id < 3")
server.execute("insert into fruit values (8, 'eight')")
server.execute("truncate odd")
server.execute("insert into odd values (3, 'NaN', 'infinity')")  # Spark merges a value that its column can't hold
code = code or invoke(run)
code = code or invoke(["verify", "-d", dsn, "--warehouse", warehouse, *conf])
server.close()
sys.exit(code)
"""


@pytest.mark.spark
def test_with_spark_as_the_page_has_it(root: Any, store: Store, database: postgres.Database, tmp_path: Path) -> None:
    conf = re.findall(r"--conf '?(spark\.[^\s']+)", section(store.kind))
    assert len(conf) == {"s3": 5, "azure": 3, "gcs": 3}[store.kind]
    conf = [text.replace("http://minio:9000", store.endpoint).replace(".ACCOUNT.", f".{object_stores.ACCOUNT}.") for text in conf]
    conf += store.settings
    with database.connect() as connection:
        connection.execute("create table fruit (id int primary key, name text)")
        connection.execute("insert into fruit select n, 'fruit ' || n from generate_series(1, 7) n")
        connection.execute('create table odd (id int primary key, "%1" numeric, at timestamp)')
        connection.execute("insert into odd values (1, 1.5)")
        connection.execute("create publication p for table fruit, odd")
    # As for the session that the other tests share (conftest.py).
    conf += ["spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=512m"]
    conf += ["spark.sql.codegen.wholeStage=false", "spark.sql.shuffle.partitions=2"]
    options = [text for each in conf for text in ("--conf", each)]
    command = [sys.executable, "-c", SCRIPT, database.dsn, str(tmp_path / "staging"), places.name(root), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "public.fruit: equal, 8 rows\npublic.odd: equal, 1 row\n", done.stderr
    house = Warehouse.existing(root)
    operations = []
    for table in ("fruit", "odd"):
        log = house.replica(Table("public", table)) / "_delta_log"
        commits = [(log / name).read_text() for name in sorted(places.list_names(log)) if name.endswith(".json")]
        operations.append(['engineInfo": "cdcpipe' in text for text in commits])
    assert operations == [[True, True], [True, False]]
    assert (house.local_root() / CHECKPOINT / "offsets/0").exists()


@pytest.mark.spark
@pytest.mark.slow
def test_keys_are_not_shown(tmp_path: Path) -> None:
    packages = re.findall(r"--conf (spark\.jars\.[^\s']+)", section("azure"))
    script = (
        "import sys; from pathlib import Path; from spark_sink.spark import session; from spark_sink.files.places import place\n"
    )
    script += "conf = dict(text.split('=', 1) for text in sys.argv[2:])\n"
    script += "session.check_reach(session.build(conf=conf), place(sys.argv[1]))"
    key = "spark.hadoop.fs.azure.account.key.account.dfs.core.windows.net=CANARY!"
    command = [sys.executable, "-c", script, "abfss://lake@account.dfs.core.windows.net/shop", *packages, key]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert "Spark can't reach abfss://lake@account.dfs.core.windows.net/shop: " in done.stderr
    raised = done.stderr.partition("The above exception was the direct cause")[2]
    assert "its key" in raised
    assert "CANARY" not in raised
    assert "WARN FileSystem" not in done.stderr
