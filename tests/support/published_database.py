"""A database with a published table and a slot, and helpers that run the command on it."""

import postgres

from cdcpipe.lsn import LSN
from support.cli_process import CLI, run_cli
from support.waiting import until


class PublishedDatabase:
    """A database with a published table `t(id, v)` and a slot."""

    def __init__(self, database: postgres.Database) -> None:
        self.database = database
        self.connection = database.connect()
        self.sql("create table t(id int primary key, v text)", "create publication p for table t")
        self.slot = f"s_{database.name}"
        self.make_slot()

    def close(self) -> None:
        self.connection.close()

    def sql(self, *statements: str) -> None:
        for statement in statements:
            self.connection.execute(statement)

    def value(self, query: str, *parameters: object) -> object:
        row = self.connection.execute(query, parameters).fetchone()
        return row[0] if row else None

    def make_slot(self, plugin: str = "pgoutput", suffix: str = "") -> str:
        self.connection.execute("select pg_create_logical_replication_slot(%s, %s)", (self.slot + suffix, plugin))
        return self.slot + suffix

    def confirmed(self) -> LSN:
        return LSN.parse(str(self.value("select confirmed_flush_lsn from pg_replication_slots where slot_name = %s", self.slot)))

    def is_active(self) -> bool:
        return bool(self.value("select active from pg_replication_slots where slot_name = %s", self.slot))

    def released(self) -> None:
        until(lambda: not self.is_active(), "the slot's release")

    def cli(self, *args: str, publication: str = "p", **kwargs: object) -> CLI:
        base = ["-d", self.database.dsn, "-S", self.slot, *(["--publication", publication] if publication else [])]
        return CLI(*base, *args, **kwargs)

    def run(self, *args: str, publication: str = "p", **kwargs: object) -> tuple[int, bytes, str]:
        base = ["-d", self.database.dsn, "-S", self.slot, *(["--publication", publication] if publication else [])]
        return run_cli(*base, *args, **kwargs)


def backlog(on: PublishedDatabase, rows: int = 100_000, per_transaction: int = 1000, width: int = 100) -> None:
    for start in range(0, rows, per_transaction):
        on.connection.execute(
            "insert into t select g, repeat('x', %s) from generate_series(%s::int, %s::int) g",
            (width, start + 1, start + per_transaction),
        )


def insert(on: PublishedDatabase, *ids: int) -> None:
    for number in ids:
        on.connection.execute("insert into t values (%s, 'x')", (number,))
