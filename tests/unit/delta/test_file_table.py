"""Commits without Spark: their content, and which commits they may follow. tests/spark/test_tables.py reads them with Spark."""

import dataclasses
import json
import os
import zoneinfo
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import (
    ArrayType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
)

from spark_sink.changelog.delta_changelogs import DeltaFiles
from spark_sink.changelog.interface import Files
from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import file_table
from spark_sink.delta import log as delta_log
from spark_sink.delta.file_table import ChangedError, DeltaError, FileTable, Replaced
from spark_sink.delta.log import TableLog, commit_path
from spark_sink.files.parquet import FileWriter, Layout, WrittenFile
from spark_sink.schema.table import Table
from spark_sink.staging.log import Position
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Warehouse
from support.delta_tables import table_with_a_row

SCHEMA = StructType(
    [
        StructField("id", LongType()),
        StructField("old", StructType([StructField("id", LongType())])),
        StructField("unchanged", ArrayType(StringType())),
        StructField("exact", MapType(StringType(), StringType())),
    ]
)
UNFIT = StructType([*SCHEMA, StructField("unit price", LongType())])
"""Files can't have the name of the last column."""
FILE = WrittenFile("part-1.parquet", 100, 7, {"c": 1}, {"c": 9}, {"c": 0})


def read(table: FileTable, version: int) -> list[dict[str, Any]]:
    text = (table.path / "_delta_log" / f"{version:020d}.json").read_text()
    return [json.loads(line) for line in text.splitlines()]


def other(table: FileTable, version: int, action: dict[str, Any]) -> None:
    """Make a commit as another program would."""
    (table.path / "_delta_log" / f"{version:020d}.json").write_text(json.dumps({"commitInfo": {}}) + "\n" + json.dumps(action))


@pytest.fixture
def table(tmp_path: Path) -> FileTable:
    made = file_table.define(tmp_path / "t", SCHEMA, {"a": "b"})
    file_table.commit(made, [FILE], Position(1, 10))
    return made


def test_the_first_commit_makes_the_table(table: FileTable) -> None:
    info, protocol, metadata, transaction, added = (next(iter(action.values())) for action in read(table, 0))
    assert info["userMetadata"] == "1:0/A"
    assert info["operationMetrics"]["numOutputRows"] == "7"
    assert protocol == {"minReaderVersion": 1, "minWriterVersion": 2}
    assert metadata["configuration"] == {"a": "b"}
    assert json.loads(metadata["schemaString"]) == SCHEMA.jsonValue()
    assert table.physical == table.schema == SCHEMA
    assert transaction["version"] == 10
    assert (added["path"], json.loads(added["stats"])["numRecords"]) == ("part-1.parquet", 7)
    assert (table.version, table.lsn) == (0, 10)


def test_a_commit_that_reaches_no_position_names_none(table: FileTable) -> None:
    """As of a copy, which may land long after the changes up to its position: it would look as if these came with it."""
    file_table.commit(file_table.open_table(table.path), [FILE], Position(1, 5), is_reached=False)
    assert "userMetadata" not in read(table, 1)[0]["commitInfo"]


def test_names_that_files_can_not_have_are_mapped(tmp_path: Path) -> None:
    made = file_table.define(tmp_path / "t", UNFIT, {"a": "b"})
    file_table.commit(made, [FILE], Position(1, 10))
    _, protocol, metadata, _, _ = (next(iter(action.values())) for action in read(made, 0))
    assert protocol["readerFeatures"] == ["columnMapping"]
    assert "columnMapping" in protocol["writerFeatures"]
    assert metadata["configuration"]["a"] == "b"
    assert metadata["configuration"]["delta.columnMapping.mode"] == "name"
    fields = json.loads(metadata["schemaString"])["fields"]
    found = [fields[0], fields[1], fields[1]["type"]["fields"][0], *fields[2:]]
    numbers = [field["metadata"]["delta.columnMapping.id"] for field in found]
    assert sorted(numbers) == list(range(1, 7))
    assert metadata["configuration"]["delta.columnMapping.maxColumnId"] == "6"
    names = [field["metadata"]["delta.columnMapping.physicalName"] for field in found]
    assert len(set(names)) == 6
    assert made.physical.names == [names[0], names[1], *names[3:]]
    assert made.physical[names[1]].dataType.names == [names[2]]


def struct(**fields: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields.items()])


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (struct(id=LongType(), größe=StringType(), **{"a-b": LongType(), "a/b": LongType()}), set()),
        (struct(at=TimestampNTZType()), {"timestampNtz"}),
        (struct(old=struct(list=ArrayType(TimestampNTZType()))), {"timestampNtz"}),
        (struct(map=MapType(StringType(), TimestampNTZType())), {"timestampNtz"}),
        *(
            (struct(**{name: LongType()}), {"columnMapping"})
            for name in ("unit price", "a,b", "a;b", "{", "}", "(", ")", "a=b", "a.b", "a\tb", "\n")
        ),
        (struct(old=struct(**{"unit price": LongType()})), {"columnMapping"}),
        (struct(list=ArrayType(struct(**{"a b": TimestampNTZType()}))), {"columnMapping", "timestampNtz"}),
    ],
)
def test_a_table_has_only_the_features_that_it_needs(tmp_path: Path, schema: StructType, wanted: set[str]) -> None:
    made = file_table.define(tmp_path / "t", schema, {})
    file_table.commit(made, [], Position(1, 10))
    assert TableLog(made.path).refresh().features("readerFeatures") == wanted


@pytest.mark.parametrize(
    ("protocol", "wanted"),
    [
        ({"minReaderVersion": 1, "minWriterVersion": 2}, set()),
        ({"minReaderVersion": 1, "minWriterVersion": 3}, {"checkConstraints"}),
        (
            {"minReaderVersion": 2, "minWriterVersion": 5},
            {"checkConstraints", "changeDataFeed", "generatedColumns", "columnMapping"},
        ),
        ({"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": [], "writerFeatures": ["rowTracking"]}, {"rowTracking"}),
    ],
)
def test_versions_of_the_protocol_imply_features(table: FileTable, protocol: dict[str, Any], wanted: set[str]) -> None:
    other(table, 1, {"protocol": protocol})
    found = TableLog(table.path).refresh().features("writerFeatures")
    assert found - {"appendOnly", "invariants"} == wanted


def test_a_table_that_forgets_its_position_is_refused(table: FileTable) -> None:
    """Delta's next checkpoint may lack the position, and changes that are in the table would come again."""

    def changed(log: TableLog) -> dict[str, Any]:
        return {**log.metadata, "configuration": {"delta.setTransactionRetentionDuration": "interval 1 hours"}}

    file_table.redefine(table.path, "SET TBLPROPERTIES", changed)
    with pytest.raises(DeltaError, match=r"has the property delta\.setTransactionRetentionDuration") as caught:
        file_table.open_table(table.path)
    way_out = "ALTER TABLE ... UNSET TBLPROPERTIES ('delta.setTransactionRetentionDuration'). "  # no feature has to be dropped
    assert (caught.value.hint or "").startswith(way_out)
    assert TableLog(table.path).refresh().obstacle("readerFeatures", {"columnMapping"}) is None


def test_files_of_one_table_may_be_anothers(tmp_path: Path) -> None:
    whole = file_table.define(tmp_path / "whole", UNFIT, {})
    part = file_table.define(tmp_path / "part", StructType([SCHEMA["old"], SCHEMA["id"]]), {"c": "d"}, like=whole)
    assert part.physical == StructType([whole.physical[1], whole.physical[0]])
    least = {name: number for number, name in enumerate(whole.physical.names)}
    file_table.commit(part, [WrittenFile("part-1.parquet", 100, 7, least, {}, least)], Position(1, 10))
    metadata, added = read(part, 0)[2]["metaData"], read(part, 0)[4]["add"]
    # A column that comes later gets a number that is not one of these.
    assert metadata["configuration"]["delta.columnMapping.maxColumnId"] == "6"
    assert metadata["configuration"]["c"] == "d"
    stats = json.loads(added["stats"])
    assert stats["minValues"] == stats["nullCount"] == {whole.physical[0].name: 0, whole.physical[1].name: 1}
    assert len(read(part, 0)) == 5


@pytest.mark.parametrize("schema", [SCHEMA, UNFIT])
def test_another_tables_files_may_lack_a_column(tmp_path: Path, schema: StructType) -> None:
    whole = file_table.define(tmp_path / "whole", schema, {})
    more = file_table.define(tmp_path / "more", StructType([schema["id"], StructField("more", LongType())]), {}, like=whole)
    assert more.physical[0] == whole.physical[0]
    assert more.schema.names == ["id", "more"]
    assert more.physical.names[1] not in whole.physical.names
    numbers = [field.metadata.get("delta.columnMapping.id") for field in (*whole.physical, *more.physical[1:])]
    assert len(set(numbers)) == (len(numbers) if schema is UNFIT else 1)
    assert more.properties.get("delta.columnMapping.maxColumnId") == ("7" if schema is UNFIT else None)


def test_the_order_of_durability(table: FileTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the files' names, then the content of the commit, then its name."""
    log, synced = table.path / "_delta_log", []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{fd}")), len(list(log.glob("*.json")))))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    file_table.commit(table, [FILE], Position(1, 20))
    places = [path if path.is_dir() else path.parent for path, _ in synced]
    assert places == [table.path, table.path.parent, log, log]
    assert [commits for _, commits in synced] == [1, 1, 1, 2]


def test_a_commit_follows_others_that_only_change_rows(table: FileTable) -> None:
    other(table, 1, {"remove": {"path": "part-1.parquet"}})
    other(table, 2, {"txn": {"appId": "another", "version": 99}})
    file_table.commit(table, [FILE], Position(1, 20))
    assert (table.version, table.lsn) == (3, 20)
    assert [next(iter(action)) for action in read(table, 3)] == ["commitInfo", "txn", "add"]


@pytest.mark.parametrize("action", ["metaData", "protocol"])
def test_another_definition_is_not_followed(table: FileTable, action: str) -> None:
    other(table, 1, {action: {}})
    with pytest.raises(ChangedError):
        file_table.commit(table, [FILE], Position(1, 20))
    assert sorted(path.name for path in (table.path / "_delta_log").iterdir()) == [f"{n:020d}.json" for n in range(2)]
    assert (table.version, table.lsn) == (0, 10)


def test_another_program_that_records_positions_is_an_error(table: FileTable) -> None:
    other(table, 1, {"txn": {"appId": "cdcpipe", "version": 20}})
    with pytest.raises(DeltaError, match="another process writes"):
        file_table.commit(table, [FILE], Position(1, 20))


def test_a_changelog_that_another_process_has_brought_further_before_it_was_opened(table: FileTable) -> None:
    """Both had taken up the same changes, and the changelog had them twice."""
    no_spark: Any = None
    changelogs = changelogs_of(no_spark, Warehouse(table.path.parent, "delta"))
    file_table.commit(table, [FILE], Position(1, 20))
    files = DeltaFiles(SCHEMA, table.path, Layout((), None), file_table.open_table(table.path))
    with pytest.raises(DeltaError, match="another process writes"):
        changelogs.commit_files(Table("public", "t"), files, [FILE], Position(1, 10), Position(1, 20), FILE.rows)
    changelogs.commit_files(Table("public", "t"), files, [FILE], Position(1, 20), Position(1, 30), FILE.rows)
    assert delta_log.newest_lsn(table.path) == 30


@pytest.mark.parametrize("format", ["delta", "parquet"])
def test_files_that_lack_rows_are_not_committed(tmp_path: Path, format: str) -> None:  # noqa: A002
    warehouse, name = Warehouse(tmp_path, format), Table("public", "t")
    no_spark: Any = None
    changelogs = changelogs_of(no_spark, warehouse)
    if format == "delta":
        made = file_table.define(warehouse.changelog(name), SCHEMA, {})
        files: Files = DeltaFiles(SCHEMA, made.path, Layout((), None), made)
        made.path.mkdir(parents=True)
    else:
        files = changelogs.open_files(name, SCHEMA)
    with pytest.raises(WarehouseError, match=r"7 rows were written .* up to 1:0/14, but .* 8 changes"):
        changelogs.commit_files(name, files, [FILE], Position(1, 10), Position(1, 20), 8)
    assert not warehouse.has_changelog(name)
    (files.directory / FILE.name).touch()
    changelogs.commit_files(name, files, [FILE], Position(1, 10), Position(1, 20), 7)
    assert warehouse.has_changelog(name)


def test_only_a_line_feed_ends_a_line_of_json(table: FileTable) -> None:
    """Spark writes U+2028, U+2029 and U+0085 unescaped: in users' commit metadata, in names, in values."""
    text = "a\u2028b\u2029c\u0085d"
    actions = [{"commitInfo": {"userMetadata": text}}, {"txn": {"appId": text, "version": 99}}, {"add": {"path": text}}]
    written = "".join(json.dumps(action, ensure_ascii=False) + "\n" for action in actions)
    commit_path(table.path, 1).write_text(written, encoding="utf-8")
    assert delta_log.newest_lsn(table.path) == 10
    assert {file["path"] for file in TableLog(table.path).refresh().files} == {"part-1.parquet", text}
    file_table.commit(table, [FILE], Position(1, 20))
    assert (table.version, delta_log.newest_lsn(table.path)) == (2, 20)


def test_a_link_that_is_there_although_an_error_was_returned(table: FileTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens over NFS, when an answer is lost and the client repeats the request."""
    link, errors = os.link, [FileExistsError, TimeoutError]

    def lose_answer(source: Path, target: Path) -> None:
        link(source, target)
        raise errors.pop()

    monkeypatch.setattr(os, "link", lose_answer)
    for lsn in (20, 30):
        file_table.commit(table, [FILE], Position(1, lsn))
    assert (table.version, table.lsn, errors) == (2, 30, [])
    monkeypatch.setattr(os, "link", link)
    with pytest.raises(DeltaError, match="another process writes"):  # not ours, equal as it may be
        file_table.commit(dataclasses.replace(table, version=1), [FILE], Position(1, 30))
    assert {path.name for path in (table.path / "_delta_log").iterdir()} == {f"{number:020d}.json" for number in range(3)}


def test_files_have_the_numbers_of_the_tables_columns(tmp_path: Path) -> None:
    """Delta's protocol asks for this in tables with column mapping. A reader that maps by number finds no column without it."""
    nested = StructType([*UNFIT, StructField("list", ArrayType(StructType([StructField("x", LongType())])))])
    table = file_table.define(tmp_path / "t", nested, {})
    table.path.mkdir()
    writer = FileWriter(str(table.path), "part-1.parquet", table.layout())
    writer.write({"id": pa.array([1]), "old": pa.array([{"id": 2}]), "list": pa.array([[{"x": 3}]])}, 1)
    file_table.commit(table, [writer.close()], Position(1, 20))
    metadata = TableLog(table.path).refresh().metadata
    said = json.loads(metadata["schemaString"])["fields"]
    fields = [*said, said[1]["type"]["fields"][0], said[5]["type"]["elementType"]["fields"][0]]
    wanted = {each["metadata"]["delta.columnMapping.physicalName"]: each["metadata"]["delta.columnMapping.id"] for each in fields}
    schema = pq.ParquetFile(table.path / "part-1.parquet").schema_arrow
    written = [*schema, schema.field(1).type.field(0), schema.field(5).type.value_type.field(0)]
    assert {each.name: int(each.metadata[b"PARQUET:field_id"]) for each in written} == wanted
    assert len(wanted) == 8


def test_bounds_of_the_columns_by_which_a_table_is_clustered(tmp_path: Path) -> None:
    utc = zoneinfo.ZoneInfo("UTC")
    values = {
        "text": (["b", "a" * 40], ("a" * 32, "b")),
        "long": (["x" * 5000], None),
        "cut": (["a" * 32 + "b\U0010ffff"], ("a" * 32, "a" * 32 + "\U0010ffff")),
        "greatest": (["a" * 32 + "\U0010ffff\U0010ffff"], None),  # no text of 33 characters is a bound
        "day": ([date(1, 1, 1), date(2024, 2, 29)], ("0001-01-01", "2024-02-29")),
        "time": ([datetime(2024, 1, 1, 0, 0, 0, 1999, utc)], ("2024-01-01T00:00:00.001Z",) * 2),
        "local": ([datetime(2024, 1, 1)], ("2024-01-01T00:00:00.000",) * 2),
        "price": ([Decimal("1.10"), Decimal("2.20")], (1.1, 2.2)),
        "large": ([Decimal("12345678901234567890.12")], None),
        "raw": ([b"a"], None),
    }
    arrays = {name: pa.array(column) for name, (column, _) in values.items()}
    wanted = {name: bounds for name, (_, bounds) in values.items() if bounds is not None}
    clustered = tuple(values)
    for name, array in arrays.items():
        schema = pa.schema([pa.field(name, array.type)])
        writer = FileWriter(str(tmp_path), f"{name}.parquet", Layout((name,), schema, clustered))
        writer.write({name: array}, len(array))
        writer.write({name: pa.nulls(1, array.type)}, 1)
        written = writer.close()
        bounds = (written.minimum[name], written.maximum[name]) if name in written.minimum else None
        assert (bounds, written.nulls) == (wanted.get(name), {name: 1})
        assert json.loads(json.dumps(written.statistics([name])))["nullCount"] == {name: 1}


def test_bounds_that_json_numbers_do_not_hold_are_left_out(table: FileTable) -> None:
    """Rounded bounds would make readers skip a file that has the row."""
    stats = '{"numRecords":1,"minValues":{"a":12345678901234567.89,"b":0.1},"maxValues":{},"nullCount":{"a":0,"b":0}}'
    file = {"path": "part-1.parquet", "partitionValues": {}, "size": 100, "stats": stats}
    file_table.commit(table, [], Position(1, 20), replaced=[Replaced(file, {"storageType": "i", "pathOrInlineDv": "x"})])
    (added,) = [action["add"] for action in read(table, 1) if "add" in action]
    assert json.loads(added["stats"])["minValues"] == {"a": None, "b": 0.1}


def test_clustering_is_known_from_the_log(table: FileTable) -> None:
    domain = {
        "domain": "delta.clustering",
        "configuration": json.dumps({"clusteringColumns": [["c"], ["s", "x"]]}),
        "removed": False,
    }
    other(table, 1, {"domainMetadata": domain})
    with pytest.raises(ChangedError):  # the file has no statistics of it
        file_table.commit(table, [FILE], Position(1, 20))
    assert file_table.open_table(table.path).clustering == ("c",)
    other(table, 2, {"domainMetadata": domain | {"removed": True}})
    assert file_table.open_table(table.path).clustering == ()


@pytest.mark.parametrize("stats", [None, "", "no JSON", "[]", '{"nullCount": null}', '{"nullCount": {"a": 0}}'])
def test_columns_with_nulls(tmp_path: Path, stats: str | None) -> None:
    """Without statistics of a column, as in a file from before it or one of another program, it may have NULL."""
    table = table_with_a_row(tmp_path / "t", struct(a=IntegerType(), b=IntegerType()), a=1)
    log = TableLog(table.path).refresh()
    assert file_table.columns_with_nulls(log, ["a", "b"]) == ["b"]
    (file,) = log.files
    added = {"add": {**file, "path": "other.parquet", "stats": stats, "dataChange": True}}
    commit_path(table.path, log.version + 1).write_text(json.dumps(added))
    expected = ["b"] if stats and '"a": 0' in stats else ["a", "b"]
    assert file_table.columns_with_nulls(log.refresh(), ["a", "b"]) == expected
