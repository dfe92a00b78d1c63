"""What a replica is when its changes come in parts, whatever they are: what a replay of the whole changelog says."""

from pathlib import Path
from typing import Any

import pytest

from spark_sink import changelog, delta, replica
from spark_sink.staging import Epoch, Position
from spark_sink.warehouse import Table, Version, Warehouse

pytestmark = pytest.mark.spark

TABLE = Table("public", "t")
EPOCH = Epoch(1, "7", 1, "db", "slot", ("p",), {}, 0)
COLUMNS = "k int, c int, v string"
SCHEMA = (
    f"{COLUMNS}, _cdc_op string, _cdc_epoch int, _cdc_end_lsn bigint, _cdc_ordinal int, _cdc_xid bigint, "
    "_cdc_commit_time timestamp, _cdc_unchanged array<string>, "
    f"_cdc_old struct<{COLUMNS.replace(' ', ':').replace(',:', ',')}>, _cdc_exact map<string,string>"
)

Row = tuple[Any, ...]


def change(op: str, lsn: int, row: Row, ordinal: int = 0, *, old: Row | None = None) -> Row:
    return (*row, op, 1, lsn, ordinal, 1, None, None, old, None)


def made(directory: Path) -> Warehouse:
    house = Warehouse(directory, "delta")
    house.open(EPOCH)
    return house


def ordered(rows: Any) -> list[Row]:
    return sorted(map(tuple, rows.select("k", "c", "v").collect()), key=str)


def bring(spark: Any, house: Warehouse, changes: list[Row], versions: list[Version], start: int, end: int) -> list[Row]:
    """Let the changes in (start, end] come as micro-batches do, and return the replica's rows."""
    found = [each for each in changes if start < each[5] <= end]
    rows = spark.createDataFrame(found, SCHEMA)
    changelog.append(spark, house, TABLE, rows.toArrow(), rows.schema, Position(1, start), Position(1, end))
    house.write_versions(TABLE, [version for version in versions if version.end_lsn <= end])
    replica.bring(spark, house, TABLE, Position(1, end))
    path = house.replica(TABLE)
    return ordered(delta.read(spark, path)) if delta.exists(path) else []


def replayed(spark: Any, house: Warehouse, end: int) -> list[Row]:
    rows = replica.replay(house, TABLE, changelog.read(spark, house, TABLE), until_lsn=end)
    return ordered(rows)


K, C, NONE = (Version(0, 0, 7, (name,) * bool(name), (name,) * bool(name)) for name in ("k", "c", ""))


def at(lsn: int, version: Version, ordinal: int = 0) -> Version:
    return Version(lsn, ordinal, version.relation_id, version.key, version.columns)


# A column is added, filled by the server, and becomes the key. With REPLICA IDENTITY FULL old rows have it at once.
BEGINNING = [change("insert", 10, (k, None, f"v{k}"), k) for k in (1, 2, 3)]
WITHOUT_IT = [change("update", 20, (1, None, "x1"), old=(1, None, "v1")), change("insert", 20, (4, None, "v4"), 1)]
WITH_IT = [
    change("update", 30, (1, 11, "y1"), old=(1, 11, "x1")),
    change("update", 30, (2, 12, "y2"), 1, old=(2, 12, "v2")),
    change("insert", 30, (4, 14, "another"), 2),
]
AFTER_IT = [change("update", 40, (1, 12, "z1"), old=(2, 12, "y2")), change("delete", 40, (4, 14, "another"), 1, old=(4, 14, "v"))]


@pytest.mark.parametrize(
    ("versions", "begins", "cuts"),
    [
        # The catalog was asked in time; late, for what came before the column; late, for all of it.
        ([at(10, K), at(30, C)], "insert", (10, 20, 30, 40)),
        ([at(10, K), at(20, NONE), at(30, C)], "snapshot", (10, 30, 40)),
        ([at(10, NONE), at(30, C)], "snapshot", (20, 40)),
    ],
)
def test_rows_from_before_the_keys_columns(
    spark: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    versions: list[Version],
    begins: str,
    cuts: tuple[int, ...],
) -> None:
    """They are left out once the key is another one, and named: nothing would find them again."""
    beginning = [(*row[:3], begins, *row[4:]) for row in BEGINNING]
    changes = [*beginning, *WITHOUT_IT, *WITH_IT, *AFTER_IT]
    house = made(tmp_path)
    for start, end in zip((0, *cuts), cuts, strict=False):
        found = bring(spark, house, changes, versions, start, end)
        if end == 30:
            assert found == [(1, 11, "y1"), (2, 12, "y2"), (4, 14, "another")]
    assert found == replayed(spark, house, end) == [(1, 11, "y1"), (1, 12, "z1")]
    assert "have no value for that" in caplog.text
    assert "cdcpipe-spark snapshot --table public.t" in caplog.text
