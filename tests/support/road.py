"""The whole path of the changes on a real server: a database, a slot, a staging directory, a warehouse."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import postgres

from spark_sink.changelog.tables import changelogs_of
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.replica.current import read_replica
from spark_sink.schema.table import MESSAGES, Table
from spark_sink.staging.readers import Retention
from spark_sink.warehouse.warehouse import Warehouse

KEEP = Retention(size=1 << 40)
"""Keeps all segments."""
BIG = 5000
"""The size in bytes of a value that is stored out of line (TOAST)."""


@dataclass
class Road:
    """A database, a slot, a staging directory, a warehouse."""

    database: postgres.Database
    spark: Any
    root: Path
    slot: str = "tables"
    publication: str = "everything"
    keys: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.connection = self.database.connect()

    @property
    def staging(self) -> Path:
        return self.root / "staging"

    @property
    def warehouse(self) -> Path:
        return self.root / "warehouse"

    def execute(self, *statements: str) -> None:
        """Run each string as its own transaction. A string with several statements is one transaction."""
        for statement in statements:
            self.connection.execute(statement)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(statement).fetchall()

    def publish(self) -> None:
        """Make a publication of all tables, if there is none. (-c would refuse to where tables have no key.)"""
        if not self.query(f"select from pg_publication where pubname = '{self.publication}'"):
            self.execute(f"create publication {self.publication} for all tables")

    def land(self) -> Launcher:
        """Bring everything that is committed to the staging directory."""
        self.publish()
        config = LauncherConfig(
            slot=self.slot,
            staging=self.staging,
            publications=(self.publication,),
            connection=("-d", self.database.dsn),
            create_slot=True,
            available_now=True,
            retention=KEEP,  # other pipelines read the log from its beginning
        )
        with Launcher(config) as launcher:
            launcher.wait()
        return launcher

    def pipeline(self, warehouse: Path | None = None, **options: Any) -> Pipeline:
        assert self.prepared is not None
        return Pipeline(self.spark, self.staging, warehouse or self.warehouse, describe=lambda: self.prepared.tables, **options)

    prepared: Any = None

    def run(self, **options: Any) -> Pipeline:
        """Bring everything to the tables."""
        self.prepared = self.land().prepared
        pipeline = self.pipeline(**options)
        pipeline.process_available()
        return pipeline

    def replica(self, table: str, warehouse: Path | None = None) -> Any:
        return read_replica(self.spark, warehouse or self.warehouse, table)

    def changelog(self, schema: str, name: str) -> Any:
        path = Warehouse.existing(self.warehouse).changelog(Table(schema, name))
        return self.spark.read.format("delta").load(str(path))

    def features(self, name: str) -> set[str]:
        """Return the features of the replica that a reader must know."""
        house = Warehouse.existing(self.warehouse)
        return house.format.reader_features(house.replica(Table("public", name)))

    def messages(self, warehouse: Path | None = None) -> Any:
        return changelogs_of(self.spark, Warehouse.existing(warehouse or self.warehouse)).read(MESSAGES)

    def assert_equal(self, name: str, *columns: str, schema: str = "public", warehouse: Path | None = None) -> None:
        """Compare a table with its replica, as text, over columns whose text is the same on both sides."""
        listed = ", ".join(f'"{column}"::text' for column in columns)
        expected = self.query(f'select {listed} from "{schema}"."{name}"')
        rows = self.replica(f"{schema}.{name}", warehouse)
        found = [tuple(row) for row in rows.selectExpr(*(f"string(`{column}`)" for column in columns)).collect()]
        assert sorted(map(repr, found)) == sorted(map(repr, expected)), name


HOSTILE = ["T", "t", '../{a,b}=1\n"`']


def identity_workload(rng: random.Random) -> Iterator[str]:
    """Yield random transactions on a table that exists in three kinds. Each kind gets the same changes."""
    rows: dict[int, int] = {}
    for number in range(60):
        statements = []
        for _ in range(rng.randint(1, 4)):
            choice = rng.random()
            if not rows or choice < 0.35:
                key, other = rng.randrange(1000), number * 10 + len(statements)
                if key in rows or other in rows.values():
                    continue
                rows[key] = other
                big = f"repeat('{rng.randrange(10)}', {BIG})" if rng.random() < 0.7 else "'small'"
                statements.append(f"insert into {{table}} values ({key}, {other}, 0, {big})")
            else:
                key = rng.choice(list(rows))
                if choice < 0.6:
                    statements.append(f"update {{table}} set a = a + 1 where id = {key}")
                elif choice < 0.7:
                    new = 2000 + number * 10 + len(statements)
                    rows[new] = rows.pop(key)
                    statements.append(f"update {{table}} set id = {new} where id = {key}")
                elif choice < 0.8:
                    rows[key] = 5000 + number * 10 + len(statements)
                    statements.append(f"update {{table}} set other = {rows[key]} where id = {key}")
                elif choice < 0.85:
                    statements.append("truncate {table}")
                    rows.clear()
                else:
                    del rows[key]
                    statements.append(f"delete from {{table}} where id = {key}")
        yield "begin; " + "; ".join([*statements, "commit"])
