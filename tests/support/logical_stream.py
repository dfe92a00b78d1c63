"""Reads the walsender's messages of a slot, without cdcpipe's own streamer and without moving the slot."""

from __future__ import annotations

import contextlib
import select
import struct
import time
from collections.abc import Iterator

import psycopg
from psycopg import pq

from cdcpipe.sql import quote_literal

_WAL_DATA = struct.Struct(">QQq")
_KEEPALIVE = struct.Struct(">QqB")
SESSION = {"datestyle": "ISO", "intervalstyle": "postgres", "timezone": "UTC", "extra_float_digits": "3"}
WORDS = [None, "", "1", "0", "2", "on", "off", "of", "o", "t", "tr", "truex", "y", "n", "no", "f", " 1", "TRUE", "Yes", "enable"]
"""Valid and invalid values of an option, for `refusals`."""


def refusals(dsn: str, slot: str, cases: list[dict[str, str | None]]) -> list[str | None]:
    """Return for each set of options the error of the server's plugin, or None if the plugin accepts them."""
    connection = pq.PGconn.connect(psycopg.conninfo.make_conninfo(dsn, replication="database", client_encoding="UTF8").encode())
    said: list[str | None] = []
    for options in cases:
        result = connection.exec_(_start_replication(slot, options))
        said.append(None if result.status == pq.ExecStatus.COPY_BOTH else result.error_message.decode())
        if said[-1] is None:
            connection.put_copy_end()
            while connection.get_copy_data(0)[0] >= 0:
                pass
            while connection.get_result() is not None:
                pass
    connection.finish()
    return said


def _start_replication(slot: str, options: dict[str, str | None]) -> bytes:
    given = ", ".join(f'"{name}"' + ("" if value is None else f" {quote_literal(value)}") for name, value in options.items())
    return (f'START_REPLICATION SLOT "{slot}" LOGICAL 0/0' + (f" ({given})" if given else "")).encode()


def peek(dsn: str, slot: str, options: dict[str, str | None], until: int, **session: str) -> list[tuple[int, bytes]]:
    """Return (WAL start, payload) of all messages up to the WAL position ``until``. Confirms nothing."""
    settings = " ".join(f"-c {name}={value}" for name, value in {**SESSION, **session}.items())
    conninfo = psycopg.conninfo.make_conninfo(dsn, replication="database", client_encoding="UTF8", options=settings)
    connection = pq.PGconn.connect(conninfo.encode())
    try:
        assert connection.status == pq.ConnStatus.OK, connection.error_message
        command = _start_replication(slot, options)
        deadline = time.monotonic() + 60
        result = connection.exec_(command)
        # The walsender of the previous peek may not have released the slot yet.
        while result.error_field(pq.DiagnosticField.SQLSTATE) == b"55006" and time.monotonic() < deadline:
            time.sleep(0.01)
            result = connection.exec_(command)
        assert result.status == pq.ExecStatus.COPY_BOTH, result.error_message.decode()
        messages = []
        while True:
            size, data = connection.get_copy_data(1)
            if size == 0:
                assert select.select([connection.socket], [], [], 60)[0], "the walsender is silent"
                connection.consume_input()
                continue
            assert size > 0, connection.get_result().error_message.decode()
            data = bytes(data)
            if data[:1] == b"w":
                messages.append((_WAL_DATA.unpack_from(data, 1)[0], data[25:]))
                continue
            wal_end, _, _ = _KEEPALIVE.unpack_from(data, 1)
            if wal_end >= until:
                return messages
            # Request the next keepalive. Report nothing as written, flushed or applied.
            connection.put_copy_data(b"r" + struct.pack(">QQQqB", 0, 0, 0, 0, 1))
            connection.flush()
    finally:
        connection.finish()


class Both:
    """A database with two slots over the same WAL: one of a plugin on the server, one of pgoutput."""

    def __init__(self, database, plugin: str, tables: str = "for all tables", **session: str) -> None:
        self.database = database
        self.plugin = plugin
        self.connection = database.connect()
        self.slots = (f"server_{database.name}", f"ours_{database.name}")
        self.tables = tables
        self.session = session

    def begin(self, *, two_phase: bool = False) -> None:
        """Create the publication and the slots. They contain the changes from here on."""
        self.connection.execute(f"create publication p {self.tables}")
        for slot, plugin in zip(self.slots, (self.plugin, "pgoutput"), strict=True):
            self.connection.execute("select pg_create_logical_replication_slot(%s, %s, false, %s)", [slot, plugin, two_phase])

    def run(self, sql: str) -> None:
        self.connection.execute(sql)

    def theirs(self, options: dict[str, str | None]) -> list[tuple[int, bytes]]:
        return peek(self.database.dsn, self.slots[0], options, self._now(), **self.session)

    def raw(self, options: dict[str, str | None] | None = None) -> list[tuple[int, bytes]]:
        options = {"proto_version": "1", "publication_names": "p", "messages": "true", **(options or {})}
        return peek(self.database.dsn, self.slots[1], options, self._now(), **self.session)

    def query(self, sql: str) -> list[tuple[str | None, ...]]:
        result = self.connection.pgconn.exec_(sql.encode())
        assert result.status == pq.ExecStatus.TUPLES_OK, result.error_message
        return [
            tuple(
                None if value is None else value.decode()
                for value in (result.get_value(row, column) for column in range(result.nfields))
            )
            for row in range(result.ntuples)
        ]

    def _now(self) -> int:
        # This commit writes only to the catalog, which is not replicated. It flushes all WAL before it.
        self.connection.execute("create temp table flush (); drop table flush")
        high, low = str(self.query("select pg_current_wal_flush_lsn()")[0][0]).split("/")
        return int(high, 16) << 32 | int(low, 16)


def peek_records(conn: psycopg.Connection, slot: str, publication: str) -> list[bytes]:
    """Return the records of a pgoutput slot, through the SQL interface. Confirms nothing."""
    rows = conn.execute(
        "select data from pg_logical_slot_peek_binary_changes(%s, null, null, 'proto_version', '1', 'publication_names', %s)",
        (slot, publication),
    )
    return [bytes(data) for (data,) in rows]


@contextlib.contextmanager
def both_on(cluster, plugin: str, **session: str) -> Iterator[Both]:
    """Yield a `Both` on a new database, which is dropped afterwards."""
    with cluster.database() as database:
        made = Both(database, plugin, **session)
        yield made
        made.connection.close()
