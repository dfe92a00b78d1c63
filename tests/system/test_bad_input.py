"""What a server should not send, and what it can't be asked for: a clear error with kind and position, and nothing confirmed.

The streams are those of a real server, in which a proxy alters single messages. A row that passes as it is, raw, is for its
consumer to judge; all else is found here.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import postgres
import pytest
from faulty_proxy import Alter, FaultyProxy, wal_data

from cdcpipe.config import SlotConfig, StreamConfig, StreamOptions
from cdcpipe.errors import CdcpipeError
from cdcpipe.libpq.parameters import connection_parameters
from cdcpipe.lsn import LSN
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.subcommands.stream import stream as run_stream
from support.cli_process import CLI
from support.published_database import PublishedDatabase

VALUE = "CANARY of a value"


class Source(PublishedDatabase):
    """Three transactions, and for each test a slot of its own before them."""

    def __init__(self, database: postgres.Database) -> None:
        super().__init__(database)
        self.sql("insert into t values (1, 'first')")
        self.sql(f"insert into t values (2, '{VALUE}'), (3, '{VALUE}')")
        self.sql("insert into t values (4)", "create table flush (); drop table flush")
        self.end = LSN.parse(str(self.value("select pg_current_wal_flush_lsn()")))
        self.original = self.slot

    @contextlib.contextmanager
    def fresh_slot(self) -> Iterator[None]:
        self.slot = f"{self.original}_copy"
        self.sql(f"select pg_copy_logical_replication_slot('{self.original}', '{self.slot}')")
        try:
            yield
        finally:
            self.released()
            self.sql(f"select pg_drop_replication_slot('{self.slot}')")
            self.slot = self.original


@pytest.fixture(scope="module")
def source(pg18: postgres.Cluster) -> Iterator[Source]:
    with pg18.database() as database, contextlib.closing(Source(database)) as made:
        yield made


class Once:
    """Alters the ``number``-th record of a kind."""

    def __init__(self, kind: bytes, change: Callable[[bytes], bytes | None], number: int = 2) -> None:
        self._kind = kind
        self._change = change
        self._left = number

    def __call__(self, record: bytes) -> bytes | None:
        if record[: len(self._kind)] == self._kind:
            self._left -= 1
            if not self._left:
                return self._change(record)
        return record


def cut(record: bytes) -> bytes:
    return record[:-1]


def grow(record: bytes) -> bytes:
    return record + b"\0"


def leave_out(record: bytes) -> None:
    del record


def other_kind(record: bytes) -> bytes:
    return b"Z" + record[1:]


def another_relation(record: bytes) -> bytes:
    return record[:1] + struct.pack(">I", 4711) + record[5:]


def another_count(record: bytes) -> bytes:
    """One column fewer: all of the row's first value is cut out."""
    count, kind, length = struct.unpack_from(">HcI", record, 6)
    assert kind == b"t"
    return record[:6] + struct.pack(">H", count - 1) + record[8 + 5 + length :]


def negative_length(record: bytes) -> bytes:
    return record[:9] + b"\xff\xff\xff\xff" + record[13:]


def huge_length(record: bytes) -> bytes:
    return record[:9] + b"\x7f\xff\xff\xff" + record[13:]


RAW, WHOLE, JSON1, JSON2, TEXT, LINES = "raw", "whole", "wal2json 1", "wal2json 2", "test_decoding", "json"
RENDERED = (JSON1, JSON2, TEXT, LINES)

# What is altered, how, with which records it is seen, and what is said of it.
CASES: list[tuple[str, tuple[Any, ...], tuple[str, ...], str]] = [
    ("an unknown kind", (b"I", other_kind), (RAW, WHOLE, *RENDERED), r"kind.*Z"),
    ("an empty record", (b"I", lambda _: b""), (RAW, WHOLE, *RENDERED), r"kind.*''|empty"),
    ("a Begin cut short", (b"B", cut), (WHOLE, *RENDERED), r"Begin|'B'"),
    ("a Begin cut to nothing", (b"B", lambda record: record[:5]), (RAW, WHOLE, *RENDERED), r"Begin|'B'"),
    ("a Commit cut short", (b"C", cut), (WHOLE, *RENDERED), r"Commit|'C'"),
    ("an Insert cut short", (b"I", cut), RENDERED, r"Insert|'I'"),
    ("an Insert that goes on", (b"I", grow), RENDERED, r"Insert|'I'"),
    ("an Insert with a negative length", (b"I", negative_length), RENDERED, r"Insert|'I'"),
    ("an Insert with a huge length", (b"I", huge_length), RENDERED, r"Insert|'I'"),
    ("a relation never described", (b"I", another_relation), RENDERED, r"relation 4711 was never described"),
    ("a Relation that is missing", (b"R", leave_out, 1), RENDERED, r"relation \d+ was never described"),
    ("a Relation cut short", (b"R", cut, 1), RENDERED, r"Relation|'R'"),
    ("another number of columns", (b"I", another_count), RENDERED, r"1 values, the relation 2 columns"),
    ("a Begin that is missing", (b"B", leave_out), (WHOLE, *RENDERED), r"outside a transaction"),
    ("a Commit that is missing", (b"C", leave_out, 1), (WHOLE, *RENDERED), r"Begin.*inside a transaction"),
    ("a Stream Stop out of place", (b"I", lambda _: b"E"), (WHOLE, *RENDERED), r"Stream ?Stop"),
    ("a Stream Start inside a transaction", (b"I", lambda _: b"S\0\0\0\1\1"), (WHOLE, *RENDERED), r"Stream ?Start"),
    ("a Stream Start cut short", (b"B", lambda _: b"S\0\0"), (RAW, WHOLE, *RENDERED), r"Stream ?Start|'S'"),
    ("a Stream Commit of nothing", (b"B", lambda _: b"c\0\0\0\7" + bytes(25)), (WHOLE,), r"streamed transaction 7 ends"),
    ("a Message cut short", (b"B", lambda _: b"M"), (RAW, WHOLE, *RENDERED), r"Message|'M'"),
]
RUNS = [pytest.param(fault, records, said, id=f"{name}, {records}") for name, fault, seen, said in CASES for records in seen]


def config(source: Source, dsn: str, records: str, out_fd: int, command_fd: int) -> StreamConfig:
    output, _, version = ("" if records in (RAW, WHOLE) else records).partition(" ")
    return StreamConfig(
        SlotConfig(connection_parameters([("dbname", dsn)]), source.slot, publications=("p",)),
        output=output or None,
        output_options={"format-version": version, "include-lsn": "1"} if version else {},
        whole_transactions=records == WHOLE,
        end_lsn=source.end,
        status_interval_s=0.05,
        stream=StreamOptions(out_fd=out_fd, command_fd=command_fd, auto_feedback=True),
    )


@dataclass
class Run:
    """How a stream ended, and the bytes that it wrote."""

    error: CdcpipeError | None
    out: bytes
    proxy: FaultyProxy


def stream(source: Source, alter: Alter, records: str) -> Run:
    """Stream through the proxy to the end; what has been written counts as confirmed."""
    out_fd, command_fd = os.pipe(), os.pipe()
    error = None
    with FaultyProxy(source.database.cluster.port, alter) as proxy:
        try:
            run_stream(config(source, proxy.dsn(source.database.tcp_dsn), records, out_fd[1], command_fd[0]))
        except CdcpipeError as ex:
            error = ex
        # All of it is in the pipe: it is less than a pipe holds.
        for fd in (out_fd[1], *command_fd):
            os.close(fd)
        with open(out_fd[0], "rb") as out:
            return Run(error, out.read(), proxy)


def untouched(record: bytes) -> bytes:
    return record


@pytest.mark.parametrize(("fault", "records", "said"), RUNS)
def test_messages_that_a_server_should_not_send(source: Source, fault: tuple[Any, ...], records: str, said: str) -> None:
    with source.fresh_slot():
        run = stream(source, wal_data(Once(*fault)), records)
        assert run.error is not None
        assert run.error.exit_code == ExitCode.PG_ERROR
        assert re.search(said, run.error.message), run.error.message
        assert "CANARY" not in f"{run.error} {run.error.hint}"
        (at,) = re.findall(r"record at ([0-9A-F]+/[0-9A-F]+)\)", run.error.message)
        (damaged,) = run.proxy.damaged
        # What came before it was written. (Whether that counted as confirmed, depends on the chunks in which it was received.)
        is_in_the_first = fault[2:] == (1,)
        assert is_in_the_first or b"first" in run.out
        if damaged and fault[1] is not leave_out:
            assert LSN.parse(at) == damaged
        # Nothing is confirmed of what was not understood: all of it comes again.
        source.released()
        again = stream(source, untouched, RAW)
        assert again.error is None
        assert VALUE.encode() in again.out
        assert b"first" in again.out or not is_in_the_first


def test_untouched(source: Source) -> None:
    """The proxy does not disturb, and what is confirmed does not come again: the tests above can fail."""
    for records in (RAW, WHOLE, *RENDERED):
        with source.fresh_slot():
            run = stream(source, untouched, records)
            assert run.error is None
            assert VALUE.encode() in run.out
            assert b"first" in run.out
            source.released()
            assert stream(source, untouched, records).out == b""


COPY_DATA: list[tuple[str, Alter]] = [
    ("another kind", lambda payload: b"x" + payload[1:]),
    ("WALData cut short", lambda payload: payload[:20] if payload[:1] == b"w" else payload),
    ("a keepalive cut short", lambda payload: payload[:-1] if payload[:1] == b"k" else payload),
    ("a keepalive that goes on", lambda payload: payload + b"x" if payload[:1] == b"k" else payload),
]


@pytest.mark.parametrize("records", [RAW, WHOLE, JSON2])
@pytest.mark.parametrize("alter", [pytest.param(alter, id=name) for name, alter in COPY_DATA])
def test_bytes_that_are_no_message_of_a_walsender(source: Source, alter: Alter, records: str) -> None:
    with source.fresh_slot():
        run = stream(source, alter, records)
        assert run.error is not None
        assert run.error.exit_code == ExitCode.PG_ERROR
        assert re.search(r"replication stream: kind 0x\w*, \d+ bytes", run.error.message), run.error.message
        source.released()
        assert VALUE.encode() in stream(source, untouched, RAW).out


def test_on_the_command_line(source: Source) -> None:
    """Exit code 5, one line that says what and where, one that says what to do; no traceback, no value."""
    with source.fresh_slot(), FaultyProxy(source.database.cluster.port, wal_data(Once(b"I", cut))) as proxy:
        dsn = proxy.dsn(source.database.tcp_dsn)
        with CLI("-d", dsn, "-S", source.slot, "--publication", "p", "-J") as cli:
            assert b"first" in b"".join(record for _, record in cli.records())
            assert cli.wait() == 5
            assert re.fullmatch(r"cdcpipe: error: [^\n]*Insert[^\n]*\(record at [0-9A-F/]+\)\n", cli.stderr)
            assert VALUE not in cli.stderr


# What can't be asked for: named before the stream starts, with the version that has it, and the slot stays as it is.

# Options, the server version from which on they are fine, what is said.
TOO_NEW: list[tuple[dict[str, str | None], int, str]] = [
    ({"origin": "none"}, 160000, r"origin=none from PostgreSQL 16 on; this server is 15"),
    ({"origin": "any"}, 160000, r"origin=any from PostgreSQL 16 on"),
    ({"streaming": "parallel"}, 160000, r"streaming=parallel from PostgreSQL 16 on"),
    ({"proto_version": "4"}, 160000, r"proto_version 4 .*speaks 1 to 3"),
    ({"proto_version": "5"}, 990000, r"proto_version 5 .*speaks 1 to [34]"),
    ({"proto_version": "0"}, 990000, r"proto_version 0 "),
    ({"proto_version": "1", "streaming": "on"}, 990000, r"proto_version 1 is too low.*need 2"),
    ({"proto_version": "2", "two_phase": "on"}, 990000, r"proto_version 2 is too low.*need 3"),
    ({"streaming": "sideways"}, 990000, r"streaming takes off, on, parallel"),
    ({"nonsense": "1"}, 990000, r"nonsense"),
]


def test_what_a_server_does_not_have(pg: postgres.Cluster) -> None:
    with pg.database() as database, contextlib.closing(Source(database)) as source:
        columns = "confirmed_flush_lsn, restart_lsn, two_phase, active"
        state = f"select row({columns})::text from pg_replication_slots where slot_name = %s"
        before = source.value(state, source.slot)
        for options, since, said in TOO_NEW:
            if pg.version_num >= since:
                continue
            with pytest.raises(CdcpipeError, match=said) as caught:
                run_stream(replace(config(source, database.dsn, RAW, 1, 0), options=options))
            assert caught.value.exit_code == ExitCode.INIT_FAILED
            source.released()
            assert source.value(state, source.slot) == before


def test_an_option_that_neither_side_knows(source: Source) -> None:
    """With an output plugin, what is not pgoutput's is the plugin's: the error names the option, and the plugin's own."""
    asked = replace(config(source, source.database.dsn, JSON2, 1, 0), options={"nonsense": "1"})
    with pytest.raises(CdcpipeError, match="wal2json has no option 'nonsense'") as caught:
        run_stream(asked)
    assert caught.value.exit_code == ExitCode.INVALID_ARGS
    assert "include-xids" in (caught.value.hint or "")
