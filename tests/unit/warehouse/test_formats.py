"""What the files of a table tell about it, without Spark, in each table format."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.delta import file_table
from spark_sink.files.parquet import WrittenFile
from spark_sink.staging.log import Position
from spark_sink.warehouse import appends
from spark_sink.warehouse.appends import AppendError
from spark_sink.warehouse.formats import TableFacts, table_format


def append(path: Path, start: int, end: int) -> Path:
    made = path / appends.append_name(Position(1, start), Position(1, end))
    made.mkdir(parents=True)
    return made


def test_a_parquet_table_is_as_far_as_its_newest_append(tmp_path: Path) -> None:
    parquet, path = table_format("parquet"), tmp_path / "t"
    assert (parquet.exists(path), parquet.lsn(path), parquet.facts(path)) == (False, None, None)
    for start, end in ((10, 20), (0, 10)):
        append(path, start, end)
    (path / "_writing").mkdir()
    (path / appends.snapshot_name(Position(1, 30))).mkdir()
    assert (parquet.exists(path), parquet.lsn(path), parquet.facts(path)) == (True, 20, TableFacts(20))


def test_appends_that_overlap_are_an_error(tmp_path: Path) -> None:
    append(tmp_path, 0, 20)
    append(tmp_path, 10, 30)
    with pytest.raises(AppendError, match="begins before 0/14") as caught:
        appends.list_appends(tmp_path)
    assert caught.value.hint is not None


def test_the_newest_append_is_never_an_old_one(tmp_path: Path) -> None:
    first, snapshot = append(tmp_path, 0, 10), tmp_path / appends.snapshot_name(Position(1, 15))
    snapshot.mkdir()
    append(tmp_path, 10, 20)
    assert [each.path for each in appends.list_before(tmp_path, 99)] == [first, snapshot]
    assert [each.path for each in appends.list_before(tmp_path, 14)] == [first]


def test_a_table_with_names_of_an_earlier_version_goes_on_with_them(tmp_path: Path) -> None:
    (tmp_path / "_cdc_batch=000001-0000000000000000-000000000000000A").mkdir()
    source = tmp_path / "_writing"
    source.mkdir()
    appends.add_append(tmp_path, appends.append_name(Position(1, 10), Position(1, 20)), source, ())
    appends.add_append(tmp_path, appends.snapshot_name(Position(1, 15)), source, ())
    assert [each.end_lsn for each in appends.list_appends(tmp_path)] == [10, 20]
    assert [each.name[:11] for each in appends.list_snapshots(tmp_path)] == ["_cdc_batch="]
    assert [each.end_lsn for each in appends.list_before(tmp_path, 15)] == [10, 15]


def test_an_append_does_not_list_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To list them takes longer with each append, and each micro-batch makes one."""
    listed, glob = [], Path.glob

    def listing(path: Path, pattern: str) -> Iterator[Path]:
        listed.append(path)
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", listing)
    (tmp_path / "_writing").mkdir()
    for number in range(3):
        name = appends.append_name(Position(1, number), Position(1, number + 1))
        appends.add_append(tmp_path, name, tmp_path / "_writing", ())
    assert len(listed) == 1
    assert len(appends.list_appends(tmp_path)) == 3


def test_a_delta_table_is_as_far_as_its_log_says(tmp_path: Path) -> None:
    delta, path = table_format("delta"), tmp_path / "t"
    assert (delta.exists(path), delta.lsn(path), delta.facts(path)) == (False, None, None)
    made = file_table.define(path, StructType([StructField("id", LongType())]), {})
    for number in (1, 2):
        file_table.commit(made, [WrittenFile(f"{number}.parquet", 100, 7, {}, {}, {})], Position(1, 10 * number))
        facts = delta.facts(path)
        assert facts is not None
        assert (facts.lsn, facts.rows, facts.files, facts.size) == (10 * number, 7 * number, number, 100 * number)
        assert (delta.exists(path), delta.lsn(path), facts.version) == (True, 10 * number, number - 1)
    assert delta.facts(path) == facts


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(InvalidArgumentsError, match="unknown table format 'csv': choose one of delta, parquet"):
        table_format("csv")
