"""Random DDL and changes. With captured DDL every replica equals its table, and the changelog tells what the table was."""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import postgres
import pytest

from spark_sink.replica.as_of import read_as_of
from spark_sink.warehouse import wanted_copies
from spark_sink.warehouse.warehouse import Warehouse
from support.captured_road import CapturedRoad
from support.snapshots import TableCopies

pytestmark = pytest.mark.spark

SEED = int(os.environ.get("CDCPIPE_SEED", "7"))
"""Give another one to look for faults: one round takes two minutes, and only a few can be in the suite."""
STEPS = int(os.environ.get("CDCPIPE_STEPS", "60"))
NUMBERS, TEXTS = ("a", "b", "c"), ("t", "u", "v")
"""The names that columns may have. A column of one kind never gets a name of the other."""
BIG = 3000


@dataclass
class Model:
    """What the statements so far have made of a table."""

    name: str
    rng: random.Random
    is_certain: bool
    """Whether no command computes values that the stream does not have. Then the table needs no copy."""
    columns: list[str] = field(default_factory=lambda: ["a", "t"])
    ids: list[int] = field(default_factory=list)
    next_id: int = 1

    def create(self) -> list[str]:
        self.columns, self.ids = ["a", "t"], []
        made = [
            f"create table {self.name} (id int primary key, k int not null, a int, t text)",
            f"alter table {self.name} alter t set storage external",
        ]
        return [*made, *self._identity()]

    def _identity(self) -> list[str]:
        return [f"alter table {self.name} replica identity {self.rng.choice(['full', 'full', 'default'])}"]

    def value(self, column: str) -> str:
        if self.rng.random() < 0.1:
            return "null"
        if column in NUMBERS:
            return str(self.rng.randrange(1000))
        size = BIG if self.rng.random() < 0.4 else 5
        return f"repeat('{self.rng.choice('xyz')}', {size}) || '{self.rng.randrange(100)}'"

    def change(self) -> str:
        choice = self.rng.random()
        if not self.ids or choice < 0.4:
            return self.insert()
        key = self.rng.choice(self.ids)
        if choice < 0.8 and self.columns:
            column = self.rng.choice(self.columns)
            return f"update {self.name} set {column} = {self.value(column)} where id = {key}"
        if choice < 0.88:
            self.ids.remove(key)
            new, self.next_id = self.next_id, self.next_id + 1
            self.ids.append(new)
            return f"update {self.name} set id = {new} where id = {key}"
        if choice < 0.9:
            self.ids = []
            return f"truncate {self.name}"
        self.ids.remove(key)
        return f"delete from {self.name} where id = {key}"

    def insert(self) -> str:
        key, self.next_id = self.next_id, self.next_id + 1
        self.ids.append(key)
        values = ", ".join([str(key), str(key % 7), *map(self.value, self.columns)])
        return f"insert into {self.name} ({', '.join(['id', 'k', *self.columns])}) values ({values})"

    def ddl(self) -> list[str]:
        """Return a command, or several that belong together."""
        alter, rng = f"alter table {self.name} ", self.rng
        of_kind = [[name for name in self.columns if name in kind] for kind in (NUMBERS, TEXTS)]
        kind = rng.randrange(2)
        names, free = of_kind[kind], [name for name in (NUMBERS, TEXTS)[kind] if name not in self.columns]
        made = ("int", "text")[kind]
        match rng.randrange(13):
            case 0 | 1 if free:
                self.columns.append(new := rng.choice(free))
                default = rng.choice(["", f" default {self.value(new)}", f" default {self.value(new)}"])
                return [f"{alter}add {new} {made}{default}"]
            case 2 if free and not self.is_certain:
                self.columns.append(new := rng.choice(free))
                return [f"{alter}add {new} {made} default {('(random() * 1000)::int', 'md5(random()::text)')[kind]}"]
            case 3 if names:
                self.columns.remove(old := rng.choice(names))
                return [f"{alter}drop {old}"]
            case 4 if names:
                old = rng.choice(names)
                self.columns.remove(old)
                self.columns.append(old)
                default = rng.choice(["", f" default {self.value(old)}"])
                return [f"{alter}drop {old}", f"{alter}add {old} {made}{default}"]
            case 5 if names and free:
                old, new = rng.choice(names), rng.choice(free)
                self.columns[self.columns.index(old)] = new
                return [f"{alter}rename {old} to {new}"]
            case 6 if len(names) > 1:
                one, other = rng.sample(names, 2)
                return [f"{alter}rename {one} to x", f"{alter}rename {other} to {one}", f"{alter}rename x to {other}"]
            case 7 if names and not self.is_certain:
                old = rng.choice(names)
                return [f"{alter}alter {old} type {made} using {(f'{old} + 1', f'upper({old})')[kind]}"]
            case 8 if of_kind[0]:
                return [f"{alter}alter {rng.choice(of_kind[0])} type bigint"]
            case 9 if names:
                old = rng.choice(names)
                return [f"{alter}alter {old} set default {self.value(old)}"]
            case 10:
                key = rng.choice(["id", "id, k", "k, id"])
                return [f"{alter}drop constraint {self.name}_pkey", f"{alter}add constraint {self.name}_pkey primary key ({key})"]
            case 11:
                return self._identity()
            case 12 if rng.random() < 0.3:
                return [f"drop table {self.name}", *self.create()]
        return [f"comment on table {self.name} is 'nothing'"]


def transactions(models: list[Model], rng: random.Random) -> Iterator[list[str]]:
    for _ in range(STEPS):
        model = rng.choice(models)
        statements: list[str] = []
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.4:
                made = model.ddl()
                if rng.random() < 0.15:
                    keep = [*statements, "savepoint s", f"alter table {model.name} add gone int default 3"]
                    statements = [*keep, f"insert into {model.name} (id, k) values (-1, 0)", "rollback to s"]
                statements += made
            else:
                statements.append(model.change())
        yield ["begin", *statements, "commit"]
        if rng.random() < 0.1:
            yield [f"vacuum full {model.name}"]


def test_random_ddl(database: postgres.Database, spark: Any, tmp_path: Any) -> None:
    print("seed", SEED)  # shown if the test fails
    rng = random.Random(SEED)
    road = CapturedRoad(database, spark, tmp_path)
    models = [Model(name, random.Random(rng.random()), name != "computed") for name in ("one", "other", "computed")]
    road.execute("create publication everything for all tables", *(each for model in models for each in model.create()))
    road.land()
    road.install()
    states: list[tuple[str, str, list[str], list[tuple[Any, ...]]]] = []
    for number, statements in enumerate(transactions(models, rng)):
        road.execute(*statements)
        model = rng.choice(models)
        if model.is_certain and rng.random() < 0.2:
            ((lsn,),) = road.query("select pg_current_wal_insert_lsn()::text")
            columns = ["id", "k", *model.columns]
            states.append((model.name, lsn, columns, road.query(f"select {text(columns)} from {model.name}")))
        if number == STEPS // 2:
            road.run()
    for model in models:
        road.execute(f"insert into {model.name} (id, k) values (0, 0)")
    road.run()

    house = Warehouse.existing(road.warehouse)
    waiting = [each.table.name for each in wanted_copies.waiting(house)]
    assert set(waiting) <= {"computed"}
    for name, lsn, columns, rows in states:
        assert as_of(spark, road, name, lsn, columns) == sorted(map(repr, rows)), (name, lsn)
    if waiting:
        TableCopies(database, spark, tmp_path).snapshot(*waiting)
    for model in models:
        road.assert_equal(model.name, "id", "k", *model.columns)
    assert wanted_copies.waiting(house) == []


def text(columns: list[str]) -> str:
    return ", ".join(f"{column}::text" for column in columns)


def as_of(spark: Any, road: CapturedRoad, name: str, lsn: str, columns: list[str]) -> list[str]:
    rows = read_as_of(spark, road.warehouse, f"public.{name}", lsn)
    return sorted(repr(tuple(row)) for row in rows.selectExpr(*(f"string(`{column}`)" for column in columns)).collect())
