"""Builds changes of a table by hand, as a changelog holds them. Needs no server."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import MapType, StructType

from spark_sink.changelog.tables import changelogs_of
from spark_sink.files.parquet import FileWriter, part_name
from spark_sink.schema.table import Table, Version
from spark_sink.staging.log import Epoch, Position
from spark_sink.warehouse.warehouse import Warehouse

TABLE = Table("public", "t")

EPOCH = Epoch(1, "7", 1, "db", "slot", ("p",), {}, 0)

NAMES = ("case", "id", "a", "blob", "other")

COLUMNS = "case int, id int, a int, blob string, other binary"


def schema_of(columns: str) -> str:
    """Return the schema of a changelog of a table with these columns."""
    return (
        f"{columns}, _cdc_op string, _cdc_epoch int, _cdc_end_lsn bigint, _cdc_ordinal int, _cdc_xid bigint, "
        "_cdc_commit_time timestamp, _cdc_unchanged array<string>, "
        f"_cdc_old struct<{columns.replace(' ', ':').replace(',:', ',')}>, _cdc_exact map<string,string>"
    )


SCHEMA = schema_of(COLUMNS)

KEY = ("case", "id")
Row = tuple[int, int, int | None, str | None, bytes | None]


@dataclass
class Source:
    """Simulates a PostgreSQL table, and the changes that pgoutput would send."""

    rng: random.Random
    case: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    deleted: dict[int, tuple[Row, datetime]] = field(default_factory=dict)
    """The last row of each key that has none any more, and the commit time of its end."""
    changes: list[tuple[Any, ...]] = field(default_factory=list)
    lsn: int = 0
    ordinal: int = 0

    @property
    def time(self) -> datetime:
        """The commit time of the present transaction."""
        return datetime(2026, 10, 25, tzinfo=UTC) + timedelta(seconds=self.lsn)

    def _end(self, key: int, row: Row) -> None:
        self.deleted[key] = row, self.time

    def commit(self) -> int:
        """End a transaction. Later changes belong to the next one."""
        self.lsn += self.rng.randint(1, 50)
        self.ordinal = 0
        return self.lsn

    def _emit(self, op: str, row: Row | None, unchanged: list[str] | None = None, old: Row | None = None) -> None:
        values = list(row or (None,) * 5)
        for index, name in ((3, "blob"), (4, "other")):
            if name in (unchanged or ()):
                values[index] = None
        old_key = None if old is None else (old[0], old[1], None, None, None)
        epoch = 2 if op == "snapshot" else 1  # a log that was lost, which the copies have seen, begins with epoch 1 again
        self.changes.append((*values, op, epoch, self.lsn + 1, self.ordinal, 1, self.time, unchanged, old_key, None))
        self.ordinal += 1

    def insert(self, key: int) -> None:
        self.rows[key] = (self.case, key, self.rng.randrange(99), self._blob(), self._blob_bytes())
        self.deleted.pop(key, None)
        self._emit("insert", self.rows[key])

    def update(self, key: int, to: int | None = None) -> None:
        old = self.rows.pop(key)
        unchanged = []
        blob, other = old[3], old[4]
        if blob is not None and self.rng.random() < 0.6:
            unchanged.append("blob")
        else:
            blob = self._blob()
        if other is not None and self.rng.random() < 0.6:
            unchanged.append("other")
        else:
            other = self._blob_bytes()
        new = (self.case, key if to is None else to, self.rng.randrange(99), blob, other)
        self.rows[new[1]] = new
        if to is not None:
            self._end(key, old)
            self.deleted.pop(to, None)
        self._emit("update", new, unchanged or None, None if to is None else old)

    def delete(self, key: int) -> None:
        self._end(key, self.rows[key])
        self._emit("delete", self.rows[key][:2] + (None,) * 3, None, self.rows.pop(key))

    def truncate(self) -> None:
        self._emit("truncate", None)
        for key, row in self.rows.items():
            self._end(key, row)
        self.rows.clear()

    def snapshot(self) -> int:
        """Copy all rows, at a position of its own, which is returned. Rows that only the changelog has are gone.

        Every other ordinal is negative, as beyond 31 bits (snapshot/chunk.py).
        """
        lsn = self.lsn + 1
        for number, row in enumerate(self.rows.values()):
            self.ordinal = number - (1 << 31) if number % 2 else number
            self._emit("snapshot", row)
        assert self.rows
        self.commit()
        return lsn

    def _blob(self) -> str | None:
        return None if self.rng.random() < 0.2 else f"blob {self.rng.randrange(10**6)}"

    def _blob_bytes(self) -> bytes | None:
        return None if self.rng.random() < 0.2 else self.rng.randbytes(4)

    def step(self, keys: int) -> None:
        """Make a random change."""
        used, free = sorted(self.rows), [key for key in range(keys) if key not in self.rows]
        choice = self.rng.random()
        if free and (not used or choice < 0.3):
            self.insert(self.rng.choice(free))
        elif choice < 0.6:
            self.update(self.rng.choice(used))
        elif choice < 0.75 and free:
            self.update(self.rng.choice(used), self.rng.choice(free))
        elif choice < 0.85 and free and len(used) > 1:
            one, two = self.rng.sample(used, 2)
            self.update(one, free[0])
            self.update(two, one)
            self.update(free[0], two)
        elif used:
            self.delete(self.rng.choice(used))


class Ordinary(Source):
    """A source whose changes are merged without Spark: an update that changes a key sends all columns."""

    def update(self, key: int, to: int | None = None) -> None:
        if to is not None:
            self.rows[key] = (*self.rows[key][:3], None, None)  # none is large, so none is left out
        super().update(key, to)


UNSENT = ...
"""A value that is not known: the server did not send it, and no change has it."""


class Later(Source):
    """A source whose column ``other`` comes later, with a value in each row that is in no change (`add_column`).

    Some rows then come without it: an update on the server has brought them into a row filter.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.is_added = False
        self.has_incomplete = False
        """Whether an insert has left out ``other``."""
        self.known: dict[int, Any] = {}
        """For each row, what the changes tell of ``other``: a value, UNSENT, or None before the first change of the row since."""

    def add_column(self) -> None:
        self.is_added = True
        self.rows = {key: (*row[:4], b"of the server") for key, row in self.rows.items()}

    def _blob_bytes(self) -> bytes | None:
        return super()._blob_bytes() if self.is_added else None

    def enter(self, key: int) -> None:
        """Insert a row without its value of ``other``."""
        self.rows[key] = (self.case, key, self.rng.randrange(99), self._blob(), self.rng.randbytes(4))
        self.deleted.pop(key, None)
        self.has_incomplete = True
        self._emit("insert", self.rows[key], ["other"])

    def insert(self, key: int) -> None:
        if self.is_added and self.rng.random() < 0.3:
            self.enter(key)
        else:
            super().insert(key)

    def step(self, keys: int) -> None:
        """Make a random change. A row may leave the row filter and come back; with another filter nothing tells that it left."""
        if self.is_added and self.rows and self.rng.random() < 0.1:
            key = self.rng.choice(sorted(self.rows))
            if self.rng.random() < 0.5:
                self.delete(key)
            self.enter(key)
        else:
            super().step(keys)

    def _emit(self, op: str, row: Any, unchanged: list[str] | None = None, old: Row | None = None) -> None:
        super()._emit(op, row, unchanged, old)
        if op == "truncate":
            self.known.clear()
        elif op == "delete":
            self.known.pop(row[1])
        elif op == "insert" and unchanged:
            self.known[row[1]] = UNSENT
        elif "other" in (unchanged or ()):
            before = self.known.pop(row[1] if old is None else old[1])
            self.known[row[1]] = UNSENT if before is None else before
        else:
            if old is not None:
                self.known.pop(old[1])
            self.known[row[1]] = row[4]

    @property
    def told(self) -> list[tuple[Any, ...]]:
        """The rows as the changes tell them: ``id``, ``a``, ``blob`` and ``other``."""
        return sorted(((*row[1:4], self.known[key]) for key, row in self.rows.items()), key=repr)


class OrdinaryLater(Later, Ordinary):
    """The same with changes that are merged without Spark."""


def told(rows: Iterable[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Return rows of a replica or a history as `Later.told` has them. Checks that no other column is marked, and no value."""
    found = []
    for row in rows:
        marks, other = row.get("_cdc_unchanged") or [], row.get("other")
        assert list(marks) in ([], ["other"])
        assert not (marks and other)
        found.append((row["id"], row["a"], row["blob"], UNSENT if marks else other and bytes(other)))
    return sorted(found, key=repr)


def comparable(rows: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(bytes(v) if isinstance(v, bytearray) else v for v in row) for row in rows)


TIME_KEYS: Mapping[str, tuple[str, ...]] = {
    "at timestamp": ("at",),
    "at timestamp_ntz, at__timestamp timestamp": ("at", "at__timestamp"),
    "at array<timestamp>": ("at",),
}
"""Columns of tables with the key ``at``, and the columns that have had its values. The last of them has them now."""


def keys_of_the_hour_that_comes_twice(spark: Any, root: Path, columns: str) -> tuple[Any, Warehouse]:
    """Return a session in whose time zone two keys of the table are the same text, and the warehouse.

    ``columns`` is one of `TIME_KEYS`.
    """
    house = Warehouse(root, "delta")
    house.open(EPOCH)
    names = TIME_KEYS[columns]
    house.write_versions(TABLE, [Version(lsn, 0, 7, ("at",), (name,)) for lsn, name in enumerate(names)])
    times = [datetime(2024, 11, 3, hour, 30, tzinfo=UTC) for hour in (5, 6)]
    keys = [(*(None for _ in names[1:]), [time] if "array" in columns else time) for time in times]
    changes = [
        (*key, "insert", 1, 10 + n, 0, 1, time, None, None, None) for n, (key, time) in enumerate(zip(keys, times, strict=True))
    ]
    append(spark, house, changes, schema_of(columns), Position(1, 0), Position(1, 20))
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    return session, house


def add(spark: Any, warehouse: Warehouse, changes: list[tuple[Any, ...]], start: int, end: int, schema: str = SCHEMA) -> None:
    """Append to the changelog the changes whose transactions end in (start, end]."""
    part = [change for change in changes if start < change[7] <= end]
    append(spark, warehouse, part, schema, Position(1, start), Position(1, end))


def append(
    spark: Any,
    warehouse: Warehouse,
    changes: Sequence[tuple[Any, ...]],
    schema: str | StructType,
    start: Position,
    end: Position,
    table: Table = TABLE,
) -> None:
    """Append these changes to a changelog, as a micro-batch from ``start`` to ``end`` does. Starts no job of Spark."""
    struct = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    changelogs_of(spark, warehouse).append(table, _arrow(changes, struct), struct, start, end)


def add_copy(
    spark: Any, warehouse: Warehouse, changes: Sequence[tuple[Any, ...]], lsn: int, schema: str | StructType = SCHEMA
) -> None:
    """Add the rows of a snapshot at ``lsn`` to a changelog, as `cdcpipe-spark snapshot` does."""
    rows = [change for change in changes if change[5] == "snapshot" and change[7] == lsn]
    struct = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    changelogs, directory = changelogs_of(spark, warehouse), warehouse.root / f"copy-{lsn}"
    directory.mkdir()
    writer = FileWriter(str(directory), part_name(), changelogs.snapshot_layout(TABLE, struct))
    for batch in _arrow(rows, struct).to_batches():
        writer.write_batch(batch)
    changelogs.add_snapshot(TABLE, directory, [writer.close()], Position(1, lsn))


def _arrow(rows: Sequence[tuple[Any, ...]], struct: StructType) -> pa.Table:
    schema = to_arrow_schema(struct, timezone="UTC")
    columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in schema]
    for number, field_ in enumerate(struct):
        if isinstance(field_.dataType, MapType):
            columns[number] = [None if value is None else list(value.items()) for value in columns[number]]
    return pa.table([pa.array(column, kind.type) for column, kind in zip(columns, schema, strict=True)], schema=schema)
