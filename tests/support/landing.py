"""Runs a launcher on a real server, and reads the log that it has written."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import postgres

from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import Commit, Delete, Insert, Relation, Truncate, Update
from cdcpipe.pipe.framing import RecordReader
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.staging.filler import SealPolicy
from spark_sink.staging.log import list_segments


def config_for(database: postgres.Database, staging: Path, **changes: Any) -> LauncherConfig:
    config = LauncherConfig(
        slot=f"slot_{database.name}"[:63],
        staging=staging,
        publications=("pub",),
        connection=("-d", database.dsn),
        create_slot=True,
        seal=SealPolicy(segment_bytes=200_000, seal_interval_s=0.1, held_bytes=100_000, backlog_interval_s=0),
    )
    return replace(config, **changes)


def replay(staging: Path) -> tuple[dict[str, dict[bytes, tuple[Any, ...]]], int]:
    """Apply the log to empty tables. Asserts that the log has every transaction once and in order."""
    tables: dict[str, dict[bytes, tuple[Any, ...]]] = {}
    names: dict[int, str] = {}
    transactions, last_end_lsn = 0, 0
    for segment in list_segments(staging):
        reader = RecordReader()
        reader.feed(segment.path.read_bytes())
        names.clear()  # each segment must be readable on its own
        for _, body in reader:
            message = decode(body)
            match message:
                case Insert():
                    table = tables.setdefault(names[message.relation_id], {})
                    assert message.new[0] not in table
                    table[message.new[0]] = message.new
                case Update():
                    table = tables[names[message.relation_id]]
                    del table[(message.key or message.new)[0]]
                    table[message.new[0]] = message.new
                case Delete():
                    del tables[names[message.relation_id]][message.key[0]]
                case Truncate():
                    for relation_id in message.relation_ids:
                        tables[names[relation_id]] = {}
                case Relation():
                    names[message.relation_id] = message.name
                case Commit():
                    transactions += 1
                    assert message.end_lsn > last_end_lsn
                    last_end_lsn = message.end_lsn
                case _:
                    pass
    return tables, transactions


def check_tables(database: postgres.Database, staging: Path, *names: str) -> None:
    tables, _ = replay(staging)
    with database.connect() as connection:
        for name in names:
            rows = connection.execute(f"select t.* from {name} t").fetchall()
            expected = {
                str(row[0]).encode(): tuple(None if value is None else str(value).encode() for value in row) for row in rows
            }
            assert tables.get(name, {}) == expected


def confirmed_lsn(database: postgres.Database) -> int:
    with database.connect() as connection:
        [(text,)] = connection.execute(
            "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", (f"slot_{database.name}"[:63],)
        ).fetchall()
    return LSN.parse(text)


def land(config: LauncherConfig) -> None:
    with Launcher(config) as launcher:
        launcher.wait()
