"""Comments of a Delta table and its columns."""

import json
from pathlib import Path

import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from spark_sink.delta import file_table
from spark_sink.delta.comments import set_comments
from spark_sink.delta.file_table import ChangedError, DeltaError
from spark_sink.delta.log import TableLog, commit_path
from spark_sink.staging.log import Position

SCHEMA = StructType([StructField("id", IntegerType()), StructField("a", StringType())])


def said(path: Path) -> tuple[str | None, list[str | None]]:
    metadata = TableLog(path).refresh().metadata
    return metadata.get("description"), [
        field["metadata"].get("comment") for field in json.loads(metadata["schemaString"])["fields"]
    ]


def test_comments_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "t"
    assert not set_comments(path, "a table", {})  # there is none
    made = file_table.define(path, SCHEMA, {})
    file_table.commit(made, [], Position(1, 10))
    before = TableLog(path).refresh().metadata
    assert not set_comments(path, None, {})
    assert set_comments(path, "a table", {"a": "é", "other": "of a column that it has not"})
    assert not set_comments(path, "a table", {"a": "é"})
    assert said(path) == ("a table", [None, "é"])
    assert (TableLog(path).refresh().version, TableLog(path).refresh().lsn) == (1, 10)
    assert set_comments(path, None, {"id": "key"})
    assert said(path) == (None, ["key", None])
    assert set_comments(path, None, {})
    assert TableLog(path).refresh().metadata == before | {"schemaString": json.dumps(json.loads(before["schemaString"]))}
    # Whoever has opened the table before has to open it again.
    with pytest.raises(ChangedError):
        file_table.commit(made, [], Position(1, 20))


def test_a_commit_that_comes_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    file_table.commit(file_table.define(path, SCHEMA, {}), [], Position(1, 10))
    refresh = TableLog.refresh

    def late(log: TableLog) -> TableLog:
        found = refresh(log)
        if not commit_path(path, 1).exists():
            commit_path(path, 1).write_text(json.dumps({"commitInfo": {}}))
        return found

    monkeypatch.setattr(TableLog, "refresh", late)
    assert set_comments(path, "a table", {})
    assert TableLog(path).refresh().version == 2


def test_a_table_to_which_only_spark_can_write(tmp_path: Path) -> None:
    path = tmp_path / "t"
    file_table.commit(file_table.define(path, SCHEMA, {}), [], Position(1, 10))
    assert set_comments(path, "a table", {"id": "key"})
    features = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["checkConstraints"]}
    commit_path(path, 2).write_text(json.dumps({"protocol": features}))
    assert not set_comments(path, "a table", {"id": "key"})  # it has them: there is nothing to write
    with pytest.raises(DeltaError, match="has the feature checkConstraints"):
        set_comments(path, None, {})
