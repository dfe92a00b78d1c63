"""A stream that reads its Unix socket itself is the same stream as one through libpq (over TCP), also where it breaks."""

import pytest

from cdcpipe.pipe.framing import RecordReader
from support.cli_process import CLI
from support.published_database import PublishedDatabase, backlog
from support.waiting import until


def dsn(on: PublishedDatabase, transport: str) -> str:
    return on.database.dsn if transport == "unix" else on.database.tcp_dsn


def changes(data: bytes) -> tuple[list[tuple[int, bytes]], set[bytes]]:
    """Return the records without descriptions of tables, and the descriptions.

    A server that is busy may repeat a description inside a transaction, when its caches are invalidated while it sends. So two
    streams may have different numbers of them.
    """
    reader = RecordReader()
    reader.feed(data)
    records = [(lsn, bytes(record)) for lsn, record in reader]
    assert not reader.has_partial
    return [each for each in records if each[1][:1] != b"R"], {record for _, record in records if record[:1] == b"R"}


@pytest.mark.parametrize("options", [(), ("--whole-transactions", "--streaming", "on", "--messages")])
def test_both_ways_write_the_same_records(on18: PublishedDatabase, options: tuple[str, ...]) -> None:
    on = on18
    on.sql(f'alter database "{on.database.name}" set logical_decoding_work_mem = "64kB"')
    backlog(on, 40_000)
    with on.database.connect() as one, on.database.connect() as other, one.transaction(), other.transaction():
        for number in range(20):
            one.execute("update t set v = v || 'y' where id between %s and %s", (number * 100 + 1, number * 100 + 100))
            with other.transaction():
                other.execute("delete from t where id between %s and %s", (9_001 + number * 100, 9_100 + number * 100))
        one.execute("insert into t values (100001, repeat('long', 100000))")
        one.execute("select pg_logical_emit_message(true, 'p', 'content')")
    on.sql("truncate t", "insert into t values (1, 'last')")
    end = str(on.value("select pg_current_wal_insert_lsn()"))
    written = {}
    for transport in ("unix", "tcp"):
        slot = f"{on.slot}_{transport}"
        on.value("select pg_copy_logical_replication_slot(%s, %s)", on.slot, slot)
        arguments = ["-d", dsn(on, transport), "-S", slot, "--publication", "p", "-H", "--endpos", end, *options]
        with CLI(*arguments) as cli:
            data = b""
            while piece := cli.read_bytes():
                data += piece
            assert cli.wait() == 0
        written[transport] = data
        on.value("select pg_drop_replication_slot(%s)", slot)
    records, tables = changes(written["tcp"])
    assert sum(record.startswith(b"I") for _, record in records) == 40_002
    assert len(tables) == 1
    assert changes(written["unix"]) == (records, tables)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_backend_that_is_terminated_in_a_burst(on18: PublishedDatabase, transport: str) -> None:
    on = on18
    backlog(on, 200_000)
    with CLI("-d", dsn(on, transport), "-S", on.slot, "--publication", "p", "-H") as cli:
        reader, data = RecordReader(), b""
        while len(data) < 4_000_000:
            data += cli.read_bytes()
        pid = on.value("select active_pid from pg_replication_slots where slot_name = %s", on.slot)
        on.value("select pg_terminate_backend(%s)", pid)
        while piece := cli.read_bytes():
            data += piece
        assert cli.wait() == 3
        assert "57P01" in cli.stderr
    reader.feed(data)
    rows = [record for _, record in reader if record.startswith(b"I")]
    assert not reader.has_partial
    assert [b"%d" % number for number in range(1, len(rows) + 1)] == [_id(row) for row in rows]
    until(lambda: not on.is_active())


def _id(row: bytes) -> bytes:
    """Return the first value: after kind, relation, ``N``, the number of columns and ``t``."""
    size = int.from_bytes(row[9:13])
    return row[13 : 13 + size]
