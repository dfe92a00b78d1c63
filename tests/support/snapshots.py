"""Databases whose tables a snapshot copies: when the slot is created, or later."""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import postgres

from cdcpipe.sql import quote_identifier
from spark_sink.changelog.tables import changelogs_of
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.replica.current import read_replica
from spark_sink.schema.table import Table
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.snapshot.tables import TableSnapshot
from spark_sink.verify.comparison import verify
from spark_sink.warehouse.warehouse import Warehouse
from support.road import KEEP, Road
from support.waiting import until

CHUNK_BYTES = 64 << 10

HELD = """
    select count(*) from pg_stat_activity
    where datname = current_database() and backend_type = 'walsender' and backend_xmin is not null"""
"""A query for the number of snapshots that hold back VACUUM."""


@dataclass
class InitialCopy:
    """A database, a slot that is created with a snapshot, and a warehouse."""

    database: postgres.Database
    spark: Any
    root: Path
    slot: str = "copied"

    def __post_init__(self) -> None:
        self.connection = self.database.connect()

    def execute(self, *statements: str) -> None:
        for statement in statements:
            self.connection.execute(statement)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(statement).fetchall()

    def config(self, **changes: Any) -> LauncherConfig:
        return LauncherConfig(
            **{
                "slot": self.slot,
                "staging": self.root / "staging",
                "publications": ("plain", "rooted"),
                "connection": ("-d", self.database.dsn),
                "create_slot": True,
                "available_now": True,
                "retention": KEEP,  # other pipelines read the log from its beginning
            }
            | changes
        )

    def run(
        self, warehouse: Warehouse, mode: str | None = None, while_copying: Any = None, hold_s: float = 0.0, **changes: Any
    ) -> InitialSnapshot:
        """Do the same as `cdcpipe-spark run --available-now`."""
        config = self.config(**changes)
        snapshot = InitialSnapshot(config, warehouse, mode, CHUNK_BYTES, hold_s)
        try:
            snapshot.prepare(lambda: False)
            if while_copying is not None:
                while_copying()
            with Launcher(config) as launcher:
                if snapshot.is_needed:
                    snapshot.start(self.spark)
                    snapshot.wait()
                    # From here on no snapshot holds back VACUUM, even if the stream continues for a long time.
                    until(lambda: self.query(HELD) == [(0,)], "the snapshot's end")
                launcher.wait()
        finally:
            snapshot.stop()
        assert launcher.prepared is not None
        tables = launcher.prepared.tables
        options: dict[str, Any] = {"format": warehouse.format.name, "types": warehouse.types, "describe": lambda: tables}
        Pipeline(self.spark, config.staging, warehouse.root, **options).process_available()
        return snapshot

    def changes(self, warehouse: Warehouse, name: str) -> Any:
        return changelogs_of(self.spark, warehouse).read(Table("public", name))

    def assert_equal(self, warehouse: Warehouse, name: str, columns: str = "*", where: str = "true") -> None:
        """Compare a table with its replica, value by value, as text."""
        of_table = f"attrelid = '{quote_identifier(name)}'::regclass and attnum > 0 and not attisdropped"
        listed = [column for (column,) in self.query(f"select attname from pg_attribute where {of_table} order by attname")]
        listed = [column for column in listed if columns == "*" or column in columns.split()]
        # For `format` NULL is an empty text.
        quoted = map(quote_identifier, listed)
        texts = ", ".join(f"case when {column} is distinct from null then format('%s', {column}) end" for column in quoted)
        expected = Counter(self.query(f"select {texts} from {quote_identifier(name)} where {where}"))
        rows = read_replica(self.spark, warehouse.root, f"public.{name}")
        exact = "_cdc_exact" in rows.columns
        have = []
        for row in rows.collect():
            texts_of = dict(row["_cdc_exact"] or {}) if exact else {}
            have.append(tuple(texts_of.get(column, as_text(row[column])) for column in listed))
        assert Counter(have) == expected, name


def as_text(value: Any) -> str | None:
    """Return the text that `format` writes with the session's settings. Supports only the types of the tables here."""
    if value is None:
        return None
    if isinstance(value, datetime):  # naive, in the machine's zone
        return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}+00"
    return str(value)


class TableCopies(Road):
    """A `Road` without an initial snapshot, with a warehouse in one of the formats."""

    format = "delta"

    @property
    def house(self) -> Warehouse:
        return Warehouse(self.warehouse, self.format)

    def run(self, **options: Any) -> Any:
        return super().run(format=self.format, **options)

    def table_snapshot(self, *tables: str, hold_s: float = 0.0) -> TableSnapshot:
        config = LauncherConfig(self.slot, self.staging, (self.publication,), ("-d", self.database.dsn))
        return TableSnapshot(config, self.house, [f"public.{table}" for table in tables], CHUNK_BYTES, hold_s)

    def snapshot(self, *tables: str, while_held: Any = None, hold_s: float = 0.0) -> TableSnapshot:
        """Copy tables, as the command does. The copy does not contain changes that ``while_held`` makes."""
        snapshot = self.table_snapshot(*tables, hold_s=hold_s)
        try:
            snapshot.prepare(lambda: False)
            if while_held is not None:
                while_held()
            snapshot.start(self.spark)
            snapshot.wait()
        finally:
            snapshot.stop()
        return snapshot

    def changes(self, table: str) -> Any:
        return changelogs_of(self.spark, self.house).read(Table("public", table))

    def assert_verified(self, *tables: str) -> None:
        found = verify(self.spark, self.warehouse, ("-d", self.database.dsn), tables=tables, timeout_s=300)
        assert {str(result.table): (result.is_equal, result.problem) for result in found if not result.is_equal} == {}

    def assert_once(self, table: str) -> None:
        rows = self.changes(table).select("_cdc_end_lsn", "_cdc_ordinal").collect()
        assert len(set(rows)) == len(rows), table
