"""The warehouse directory, and the conditions for a session, without Spark."""

import os
import pwd
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdcpipe.errors import InitError, InvalidArgumentsError
from spark_sink.files.local import DamagedFileError, read_json, write_json
from spark_sink.files.system_limits import described
from spark_sink.schema.names import Names, Naming
from spark_sink.schema.table import MESSAGES, SCHEMA_HISTORY, Table, Version
from spark_sink.source.server import serve_segments
from spark_sink.spark import java_home, session
from spark_sink.spark.environment import prepare_workers
from spark_sink.spark.failure import raised_of, reason_of
from spark_sink.staging.log import Epoch, Position, StagingError
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Warehouse, encode_name
from support.spark_errors import Py4JError

EPOCH = Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)

# Anything but NUL, and short enough not to be cut: PostgreSQL's 63 bytes can be three times as long when encoded.
identifiers = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(identifiers, identifiers, identifiers, identifiers)
def test_names_are_distinct_and_safe(schema: str, name: str, other_schema: str, other: str) -> None:
    table, another = Table(schema, name), Table(other_schema, other)
    encoded = encode_name(table)
    assert (encoded.lower() == encode_name(another).lower()) == (table == another)
    assert not set(encoded) - set("abcdefghijklmnopqrstuvwxyz0123456789_-.%ABCDEF")
    assert encoded[0] not in "._"
    assert "/" not in encoded


@pytest.mark.parametrize(
    ("table", "encoded"),
    [
        (Table("public", "orders"), "public.orders"),
        (Table("public", "Orders"), "public.%4Frders"),
        (Table("_internal", "_events"), "%5Finternal.%5Fevents"),
        (Table("..", ".."), "%2E%2E.%2E%2E"),
        (Table("a=1", "{a,b}[1]*"), "a%3D1.%7Ba%2Cb%7D%5B1%5D%2A"),
        (Table("é", "e\u0301"), "%C3%A9.e%CC%81"),
    ],
)
def test_encoded_names(table: Table, encoded: str) -> None:
    assert encode_name(table) == encoded


@pytest.mark.parametrize(("table", "name"), [(MESSAGES, "_cdc_message"), (SCHEMA_HISTORY, "_cdc_schema_history")])
def test_no_table_has_the_name_of_ours(table: Table, name: str) -> None:
    assert encode_name(table) == str(table) == name
    assert encode_name(Table("public", name)) == f"public.%5F{name[1:]}"


def test_names_too_long_for_a_file_system() -> None:
    tables = [Table("д" * 31, "ж" * 30 + end) for end in "ab"]
    names = [encode_name(table) for table in tables]
    assert len(set(names)) == 2
    assert all(len(name) <= 200 for name in names)


def test_a_warehouse_reads_what_it_has_written(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path, "delta")
    assert warehouse.open(EPOCH) is None
    warehouse.record(Position(2, 0x1_0000_0001))
    assert Warehouse(tmp_path, "delta").open(EPOCH) == Position(2, 0x1_0000_0001)
    tables = [Table("public", "t"), Table("Ж" * 31, "ж" * 31)]
    versions = [Version(5, 0, 1, ("id",), ("id",), is_whole=True, copied_at=7), Version(9, 3, 1, ("id",), ("id__string",))]
    for table in tables:
        warehouse.write_versions(table, versions)
        assert warehouse.versions(table) == versions
    assert warehouse.versions(Table("public", "other")) == []
    assert warehouse.tables() == sorted(tables)
    assert Warehouse.existing(tmp_path).format.name == "delta"
    assert warehouse.find("public.t") == tables[0]
    with pytest.raises(InvalidArgumentsError, match=r"no table 'public\.nothing'; it has public\.t"):
        warehouse.find("public.nothing")


def test_a_layout_of_a_newer_version_is_refused_before_it_is_read_or_changed(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    newer = (read_json(warehouse.identity_path) or {}) | {"version": 2, "format": "of another kind"}
    write_json(warehouse.identity_path, newer)
    for use in (lambda: warehouse.open(EPOCH), lambda: Warehouse.existing(tmp_path)):  # run; every other command
        with pytest.raises(WarehouseError, match=r"warehouse\.json has version 2; this program knows 1") as refused:
            use()
        assert refused.value.hint == "use the version of cdcpipe that wrote it, or a newer one"
    assert read_json(warehouse.identity_path) == newer


def test_versions_and_names_of_years_are_those_of_the_files(tmp_path: Path) -> None:
    columns = tuple((number, f"column_{number}", 23, -1) for number in range(1, 50))
    copies = [Version(lsn, 0, 1, ("id",), ("id",), described=columns) for lsn in range(1, 40)]
    writer, reader, table = Warehouse(tmp_path, "delta"), Warehouse(tmp_path, "delta"), Table("public", "t")
    for versions in (copies, copies[:20], copies):  # as other processes write them
        writer.write_versions(table, versions)
        found = reader.versions(table)
        assert found == versions
        assert len({id(each.described) for each in found}) == 1  # equal columns take memory once
        found.clear()
        assert reader.versions(table) == versions
        assert reader.all_versions() == {table: tuple(versions)}
        assert reader.tables() == [table]

    a, b = Table("public", "a"), Table("public", "b")
    names = Names(Naming((lsn, 0), 7, *((a, b) if lsn % 2 else (b, a)), a) for lsn in range(1, 200))
    writer.write_names(names)
    found_names = reader.recorded_names()
    found_names.add(Naming((300, 0), 7, b, Table("public", "c"), a))
    assert reader.recorded_names().namings == names.namings
    assert reader.recorded_names().name(a) == b


@pytest.mark.parametrize("value", [{}, {"schema": "public", "name": "t"}, {"schema": "public", "name": "t", "versions": [{}]}])
def test_damaged_versions_are_named(tmp_path: Path, value: dict[str, object]) -> None:
    warehouse, table = Warehouse(tmp_path, "delta"), Table("public", "t")
    warehouse.write_versions(table, [])
    write_json(tmp_path / "_cdcpipe/tables/public.t.json", value)
    for read in (lambda: warehouse.versions(table), warehouse.tables, warehouse.all_versions):
        with pytest.raises(WarehouseError, match=r"public\.t\.json is damaged: KeyError"):
            read()


@pytest.mark.parametrize(
    ("epoch", "table_format", "message"),
    [
        (Epoch(1, "8", 1, "shop", "slot", ("p",), {}, 0), "delta", "system_id '7123', but the staging directory has those of '8'"),
        (
            Epoch(1, "7123", 1, "other", "slot", ("p",), {}, 0),
            "delta",
            "database 'shop', but the staging directory has those of 'other'",
        ),
        (Epoch(1, "7123", 1, "shop", "two", ("p",), {}, 0), "delta", "slot 'slot', but the staging directory has those of 'two'"),
        (EPOCH, "parquet", "delta tables, not parquet"),
    ],
)
def test_another_source_is_refused(tmp_path: Path, epoch: Epoch, table_format: str, message: str) -> None:
    Warehouse(tmp_path, "delta").open(EPOCH)
    with pytest.raises(InvalidArgumentsError, match=message):
        Warehouse(tmp_path, table_format).open(epoch)


def test_deleted_rows_can_be_kept_later_but_not_given_up(tmp_path: Path) -> None:
    Warehouse(tmp_path, "delta").open(EPOCH)
    assert not Warehouse.existing(tmp_path).keeps_deleted
    Warehouse(tmp_path, "delta", deletes="soft").open(EPOCH)
    assert Warehouse.existing(tmp_path).keeps_deleted
    with pytest.raises(InvalidArgumentsError, match="deleted rows, with the time in _cdc_deleted_at") as refused:
        Warehouse(tmp_path, "delta").open(EPOCH)
    assert "--deletes soft" in str(refused.value.hint)


def test_tables_without_their_identity_are_refused(tmp_path: Path) -> None:
    (tmp_path / "changelog/public.t").mkdir(parents=True)
    with pytest.raises(WarehouseError, match="lacks the file"):
        Warehouse(tmp_path, "delta").open(EPOCH)


@pytest.mark.parametrize("text", ["", "[]", "\x80cos", '{"version": 2}', '{"version": 1, "position": 5}'])
def test_a_damaged_identity_is_refused(tmp_path: Path, text: str) -> None:
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    path = tmp_path / "_cdcpipe/warehouse.json"
    good = path.read_text()
    path.write_text(good.replace('"version": 1', '"position": 5, "version": 1') if "position" in text else text)
    with pytest.raises((WarehouseError, StagingError, DamagedFileError), match=r"damaged|has version 2"):
        warehouse.open(EPOCH)


@pytest.mark.parametrize("url", ["file:/srv", "file:///srv", "HDFS://n/x", Path("s3a://bucket/lake")])
def test_a_url_of_something_else_than_a_store_is_refused(url: Path | str) -> None:
    for path in (url, Path(url)):
        with pytest.raises(InvalidArgumentsError, match=r"not a URL|can't be there"):
            Warehouse(path, "delta")
        with pytest.raises(InvalidArgumentsError, match=r"not a URL|can't be there"):
            Warehouse.existing(path)


def test_other_jars_are_added_to_delta_lakes() -> None:
    settings, conf = {"spark.jars.packages": session.DELTA_PACKAGES}, {"spark.jars.packages": "a:b:1", "spark.jars.excludes": "c:d"}
    session._join_jars(settings, conf)
    assert conf["spark.jars.packages"].split(",") == ["a:b:1", *session.DELTA_PACKAGES.split(",")]
    assert conf["spark.jars.excludes"].split(",") == ["c:d", *session.DELTA_EXCLUDES_AMONG_OTHERS.split(",")]
    conf = {"spark.jars": "https://host/x.jar"}
    session._join_jars({"spark.jars": "delta.jar,storage.jar"}, conf)
    assert conf == {"spark.jars": "https://host/x.jar,delta.jar,storage.jar"}
    for own, theirs in (({}, {"spark.jars.packages": "a:b:1"}), (settings, {"spark.jars": "x.jar"})):
        before = dict(theirs)
        session._join_jars(dict(own), theirs)
        assert theirs == before


JAVA = """An error occurred while calling o258.load.
: org.example.Outer$Error: Job aborted.
\tat org.example.Main.run(Main.java:1)
Caused by: java.io.IOException: Upload failed
\t... 12 more
Caused by: org.example.HttpResponseException: 404 Not Found
POST https://host//batch
{"error": {"code": 404}}
\tat org.example.Main.run(Main.java:2)
"""

PYTHON = """[PYTHON_DATA_SOURCE_ERROR] Failed when reading:
Traceback (most recent call last):
  File "/x.py", line 1, in <module>
spark_sink.staging.StagingError: segment 1 is damaged
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (JAVA, "Job aborted: 404 Not Found"),
        (JAVA.partition("Caused")[0], "Job aborted."),
        ("An error occurred while calling o1.x.\n: java.lang.NullPointerException\n\tat x", "NullPointerException"),
        ("An error occurred while calling o1.x.\n: No key for host.example.org\n\tat x", "No key for host.example.org"),
        ("x\n: a.B: two: it\nCaused by: a.C: it\n", "two: it"),
        (PYTHON, "segment 1 is damaged"),
        ("[TABLE_NOT_FOUND] no such table\nsecond line", "[TABLE_NOT_FOUND] no such table"),
        ("", "Py4JError"),
    ],
)
def test_an_error_of_spark_in_one_line(text: str, reason: str) -> None:
    assert reason_of(Py4JError(text)) == reason
    assert raised_of(Py4JError(text)) == (("StagingError", reason) if text is PYTHON else None)


def test_a_directory_without_delta(tmp_path: Path) -> None:
    zipfile.ZipFile(tmp_path / "delta-storage-4.4.0.jar", "w").close()
    with pytest.raises(InitError, match=r"no delta-spark_4\.2_2\.13-\*\.jar in") as caught:
        session._jar_settings("delta", tmp_path)
    assert caught.value.hint is not None
    assert all(word in caught.value.hint for word in ("--jars DIR", "Maven Central", "--format parquet"))


def test_ivy_keeps_jars_where_they_are_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Java takes the home directory from the system's list of users. So Spark must be told the folder, or each start would resolve
    again.
    """
    system_home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    for home, ivy in ((str(tmp_path), tmp_path / ".ivy2.5.2"), ("", system_home / ".ivy2.5.2"), (None, system_home / ".ivy2.5.2")):
        if home is None:
            monkeypatch.delenv("HOME")
        else:
            monkeypatch.setenv("HOME", home)
        assert session._jar_settings("delta", None)["spark.jars.ivy"] == str(ivy)
    named = str(tmp_path / "named")
    assert session._jar_settings("delta", None, named) == {
        "spark.jars.packages": session.DELTA_PACKAGES,
        "spark.jars.excludes": session.DELTA_EXCLUDES,
        "spark.jars.ivy": named,
    }
    for jar in session.DELTA_JARS:
        path = tmp_path / "named/jars" / f"io.delta_{jar}"
        path.parent.mkdir(parents=True, exist_ok=True)
        zipfile.ZipFile(path, "w").close()
    assert "named/jars" in session._jar_settings("delta", None, named)["spark.jars"]


def test_a_home_that_can_keep_no_jars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/nobody")
    with pytest.raises(InitError, match=r"cannot keep Spark's packages in /proc/nobody/\.ivy2\.5\.2: No such file") as caught:
        session._jar_settings("delta", None)
    assert "spark.jars.ivy" in (caught.value.hint or "")


def test_one_process_at_a_time_fetches_packages(tmp_path: Path) -> None:
    """Ivy does not lock its folder. Two sessions that fetch Delta Lake at the same time on a new machine would both fail."""
    settings = {"spark.jars.packages": session.DELTA_PACKAGES, "spark.jars.ivy": str(tmp_path / "ivy")}
    with session._alone_in_ivy(settings):
        with pytest.raises(InitError, match=r"another process has been fetching Spark's packages into \S+/ivy for 0 s"):
            session._alone_in_ivy(settings, deadline_s=0).__enter__()
        with session._alone_in_ivy({"spark.jars": "delta.jar"}, deadline_s=0):
            pass
    with session._alone_in_ivy(settings, deadline_s=0):
        assert (tmp_path / "ivy/jars").is_dir()


def java(home: Path, version: str) -> Path:
    """Make a Java that prints its version, and nothing else."""
    (home / "bin").mkdir(parents=True)
    (home / "bin/java").write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    (home / "bin/java").chmod(0o755)
    return home


def test_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = java(tmp_path / "jdk8", "1.8.0_402")
    monkeypatch.setattr(java_home, "_java_homes", lambda: [old, tmp_path / "nothing"])
    with pytest.raises(
        InitError, match=r"no Java 17 or newer; found only .*jdk8 \(8\), .*nothing \(no Java that starts\)"
    ) as caught:
        java_home.find_java()
    assert "openjdk-21-jre-headless; Debian 12: openjdk-17-jre-headless" in (caught.value.hint or "")


def test_where_the_current_directory_has_gone_java_is_not_to_blame(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(java_home, "_java_homes", lambda: [tmp_path / "nothing"])
    with pytest.raises(FileNotFoundError) as caught:
        java_home.find_java()
    assert described(caught.value) == (
        "the current directory does not exist any more",
        "change to one that exists; then start again",
    )


@pytest.mark.parametrize("version", [None, "1.8.0_402"])
def test_a_java_home_without_a_java_for_spark_is_named(
    version: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    named, found = tmp_path / "named", java(tmp_path / "found", "21.0.2")
    if version is not None:
        java(named, version)
    monkeypatch.setenv("JAVA_HOME", str(named))
    monkeypatch.setenv("PATH", f"{found / 'bin'}{os.pathsep}{os.environ['PATH']}")
    java_home.export_java()
    assert caplog.messages == [f"JAVA_HOME is {named}, which has no Java 17 or newer: using {found}"]
    assert os.environ["JAVA_HOME"] == str(found)
    caplog.clear()
    java_home.export_java()
    assert caplog.messages == []


def test_a_directory_that_is_no_warehouse(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentsError, match="not a warehouse") as caught:
        Warehouse.existing(tmp_path / "wrong")
    assert "--warehouse" in (caught.value.hint or "")


def test_a_file_that_can_not_be_written_is_one_error(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk. pyarrow prints nothing more, and nothing of the file is left."""
    program = f"""
import resource, signal
import pyarrow as pa
from spark_sink.files.parquet import FileWriter, Layout
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
writer = FileWriter({str(tmp_path)!r}, "x.parquet", Layout(("v",), pa.schema([("v", pa.int64())])))
try:
    writer.write({{"v": pa.array([number * 0x9E3779B97F4A7C15 % 2**63 for number in range(100_000)])}}, 100_000)
    writer.close()
except OSError as ex:
    print(ex.strerror)
del writer
"""
    # Coverage would write a large file at the end of the program, too.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "File too large" in done.stdout
    assert not list(tmp_path.iterdir())


def test_java_is_found() -> None:
    assert (java_home.find_java() / "bin/java").exists()


@pytest.mark.parametrize(
    ("named", "settings", "taken"),
    [
        (None, {}, sys.executable),
        ("/opt/python", {}, "/opt/python"),
        ("/opt/python", {"spark.pyspark.python": "/usr/bin/python3"}, "/usr/bin/python3"),
    ],
)
def test_the_interpreter_of_the_workers(
    monkeypatch: pytest.MonkeyPatch, named: str | None, settings: dict[str, str], taken: str
) -> None:
    for name in ("PYTHONPATH", "PYSPARK_DRIVER_PYTHON", "PYSPARK_PYTHON"):
        monkeypatch.setenv(name, named or "")
    if named is None:
        monkeypatch.delenv("PYSPARK_PYTHON")
    prepare_workers(settings)
    assert os.environ["PYSPARK_PYTHON"] == taken


def test_segments_are_not_served_where_traffic_is_to_be_encrypted(tmp_path: Path) -> None:
    conf = {"spark.driver.host": "127.0.0.1"}
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(getConf=lambda: conf))
    serve_segments(spark, tmp_path).stop()
    conf["spark.network.crypto.enabled"] = "true"
    with pytest.raises(InvalidArgumentsError, match=r"spark\.network\.crypto\.enabled is set"):
        serve_segments(spark, tmp_path)
