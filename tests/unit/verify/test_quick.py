"""The checksums of small replicas without Spark: the same as PostgreSQL's, or None with the reason in the log."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import DecimalType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from spark_sink.delta.log import TableLog, commit_path
from spark_sink.delta.rewrite import Rewrite
from spark_sink.schema.table import NATIVE
from spark_sink.schema.types import DELETED_AT
from spark_sink.staging.log import Position
from spark_sink.verify import quick
from support.delta_log import commit
from support.oids import INT4, INT8, NUMERIC, TEXT

ID = StructField("id", LongType())
NOTE = StructField("note", StringType())
DESCRIBED = [("id", INT8, -1), ("note", TEXT, -1)]
KINDS = {LongType: pa.int64(), IntegerType: pa.int32(), StringType: pa.string(), TimestampType: pa.timestamp("us", "UTC")}


def replica(directory: Path, fields: Sequence[StructField], *rows: Sequence[Any]) -> TableLog:
    """Return the log of a new replica with the rows, whose key is `id`."""
    kinds = [pa.decimal128(9, 2) if isinstance(field.dataType, DecimalType) else KINDS[type(field.dataType)] for field in fields]
    columns = {field.name: pa.array([row[i] for row in rows], kinds[i]) for i, field in enumerate(fields)}
    Rewrite.new(directory / "t", ("id",), StructType(list(fields)), {}).add(columns, []).commit(Position(1, 10))
    return TableLog(directory / "t").refresh()


def of_texts(*rows: Sequence[str | None]) -> dict[str, tuple[int, int]]:
    """Return the checksums as docs and server define them, from the rows' texts. The first text is the key."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        of_key, whole = (
            hashlib.md5(b"".join((b"\xff" if text is None else text.encode()) + b"\0" for text in texts)).hexdigest()
            for texts in (row[:1], row)
        )
        count, total = found.get(of_key[:3], (0, 0))
        found[of_key[:3]] = count + 1, total + int(whole[:15], 16)
    return found


def checksums(log: TableLog, described: Sequence[tuple[str, int, int]] = DESCRIBED) -> Mapping[str, tuple[int, int]] | None:
    return quick.checksums(log, described, ["id"], NATIVE)


def test_the_sums_are_those_of_the_texts(tmp_path: Path) -> None:
    log = replica(tmp_path, [ID, NOTE], (1, "one"), (2, None), (-3, "drei \N{SNOWMAN}"), (4, ""))
    assert checksums(log) == of_texts(("1", "one"), ("2", None), ("-3", "drei \N{SNOWMAN}"), ("4", ""))


def test_a_column_that_the_replica_lacks_is_null(tmp_path: Path) -> None:
    log = replica(tmp_path, [ID], (1,), (2,))
    assert checksums(log) == of_texts(("1", None), ("2", None))


def test_zeros_behind_the_point_do_not_count(tmp_path: Path) -> None:
    log = replica(tmp_path, [ID, StructField("price", DecimalType(9, 2))], (1, 7), (2, None))
    assert checksums(log, [("id", INT8, -1), ("price", NUMERIC, 4 + (9 << 16) + 2)]) == of_texts(("1", "7"), ("2", None))


def test_deleted_rows_do_not_count(tmp_path: Path) -> None:
    log = replica(tmp_path, [ID, NOTE, StructField(DELETED_AT, TimestampType())], (1, "here", None), (2, "gone", 5))
    assert checksums(log) == of_texts(("1", "here"))


def test_rows_that_were_replaced_do_not_count(tmp_path: Path) -> None:
    log = replica(tmp_path, [ID, NOTE], (1, "one"), (2, "two"))
    table = Rewrite.of_log(log, ("id",))
    found = table.find(pa.table({"k0": pa.array([2], pa.int64())}))
    table.add({"id": pa.array([2]), "note": pa.array(["new"])}, found).commit(Position(1, 20))
    assert checksums(log.refresh()) == of_texts(("1", "one"), ("2", "new"))


def refused(log: TableLog, caplog: pytest.LogCaptureFixture, described: Sequence[tuple[str, int, int]] = DESCRIBED) -> str:
    with caplog.at_level(logging.DEBUG, quick.__name__):
        assert checksums(log, described) is None
    return caplog.messages[-1]


def test_no_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, quick.__name__)
    assert quick.any_change(TableLog(tmp_path / "t").refresh(), 0, 9, lambda *_: pytest.fail("no changes")) is None
    assert caplog.messages == ["t is left to Spark: no table"]


def test_many_rows_or_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    log = replica(tmp_path, [ID, NOTE], (1, "one"), (2, "two"))
    with monkeypatch.context() as patched:
        patched.setattr(quick, "_MOST_ROWS", 1)
        assert refused(log, caplog) == "t is left to Spark: many rows"
    monkeypatch.setattr(quick, "_MOST_BYTES", 10)
    assert refused(log, caplog) == "t is left to Spark: many bytes to read"


def test_values_in_more_than_one_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = replica(tmp_path, [StructField("id", IntegerType()), NOTE], (1, "one"))
    assert checksums(log, [("id", INT4, -1), ("note", TEXT, -1)]) == of_texts(("1", "one"))
    assert "id has several types, or another type than on the server" in refused(log, caplog)
    exact = replica(tmp_path / "exact", [ID, NOTE, StructField("_cdc_exact", StringType())], (1, "one", None))
    assert refused(exact, caplog) == "t is left to Spark: exact texts"


def test_a_column_that_came_in_place_of_a_dropped_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The older column has values of the dropped one. After a change of the type, it has those of rows from before."""
    older, newer = StructField("v", IntegerType()), StructField("v__string", StringType())
    log = replica(tmp_path, [ID, older, newer], (1, 7, None), (2, None, "new"))
    described = [("id", INT8, -1), ("v", TEXT, -1)]
    assert quick.checksums(log, described, ["id"], NATIVE, {"v__string"}) == of_texts(("1", None), ("2", "new"))
    assert "v__string has several types" in refused(log, caplog, described)


def test_a_column_that_has_its_first_type_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was added with a default, and rows that changed while it was a text have their value there."""
    log = replica(
        tmp_path, [ID, StructField("v", IntegerType()), StructField("v__string", StringType())], (1, 5, None), (2, None, "7")
    )
    with caplog.at_level(logging.DEBUG):
        assert quick.checksums(log, [("id", INT8, -1), ("v", INT4, -1)], ["id"], NATIVE, {"v"}) is None
    assert "v has several types" in caplog.text


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b""], ids=["cut", "empty"])
def test_a_damaged_file(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any) -> None:
    log = replica(tmp_path, [ID, NOTE], (1, "one"))
    (file,) = log.files
    path = log.path / file["path"]
    path.write_bytes(damage(path.read_bytes()))
    assert refused(log, caplog).startswith("t is left to Spark: ")
    path.unlink()
    assert "t is left to Spark: " in refused(log, caplog)


def test_a_table_that_needs_another_reader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = replica(tmp_path, [ID, NOTE], (1, "one"))
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["collations"], "writerFeatures": ["collations"]}
    commit(log.path / "_delta_log", log.version + 1, {"protocol": protocol})
    assert commit_path(log.path, log.version + 1).exists()
    assert "collations" in refused(log.refresh(), caplog)


CHANGES = [StructField("id", LongType()), StructField("_cdc_end_lsn", LongType()), StructField("_cdc_xid", LongType())]


def test_changes_are_looked_for_between_two_positions(tmp_path: Path) -> None:
    log = replica(tmp_path, CHANGES, (1, 10, 700), (2, 20, 701), (3, 30, None))
    seen: list[tuple[int, int | None]] = []

    def wanted(ends: Any, xids: pa.Array) -> Any:
        seen.extend(zip(ends.tolist(), xids.to_pylist(), strict=True))
        return ends == 20

    assert quick.any_change(log, 10, 30, wanted) is True
    assert seen == [(20, 701), (30, None)]
    assert quick.any_change(log, 20, 30, wanted) is False
    assert quick.any_change(replica(tmp_path / "u", [ID, NOTE], (1, "x")), 0, 9, wanted) is None
