"""How a stream ends whose server sends damaged bytes or goes away, with a server that the test plays. When it is not read."""

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from cdcpipe.config import SlotConfig, StreamOptions
from cdcpipe.errors import (
    CdcpipeError,
    ConnectionClosedError,
    OutputError,
    ProtocolError,
    ServerError,
    UnreachableError,
    beside_the_stream,
)
from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.limits import limit_hint
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.replication import timeline_guard
from cdcpipe.replication.boundaries import tracker_for
from cdcpipe.replication.progress import UNREAD_INTERVAL_S, Progress
from cdcpipe.streaming.consumer import CommandsIn
from cdcpipe.streaming.streamer import Streamer
from cdcpipe.subcommands import stream as subcommand
from support.fake_walsender import COPY_BOTH, READY, FakeWalsender
from support.waiting import until
from support.wire import error_fields, keepalive, message, wal_data


class Pipes(SimpleNamespace):
    """The ends of stdout's and stdin's pipes: cdcpipe has ``out_fd`` and ``command_fd``, the consumer the other two."""

    records_fd: int
    out_fd: int
    command_fd: int
    commands_fd: int


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    (records_fd, out_fd), (command_fd, commands_fd) = os.pipe(), os.pipe()
    yield Pipes(records_fd=records_fd, out_fd=out_fd, command_fd=command_fd, commands_fd=commands_fd)
    for fd in (records_fd, out_fd, command_fd, commands_fd):
        with contextlib.suppress(OSError):  # the streamer may have closed its output
            os.close(fd)


@contextmanager
def streamer(
    directory: Path, pipes: Pipes, *answers: bytes, is_direct: bool, end_lsn: int | None = None, wait_after_end: bool = False
) -> Iterator[Streamer]:
    """A stream of raw records, whose server gives these answers (see `FakeWalsender`)."""
    options = StreamOptions(pipes.out_fd, pipes.command_fd, write_header=True, wait_after_end=wait_after_end)
    with FakeWalsender(directory, list(answers)) as server, closing(Walsender(server.parameters, within_s=10)) as walsender:
        walsender.start_copy("START_REPLICATION SLOT s LOGICAL 0/0", may_be_direct=is_direct)
        progress = Progress(time.monotonic(), feedback_interval_s=0.05)
        tracker = tracker_for("raw", {}, progress, end_lsn)
        commands = CommandsIn(pipes.command_fd)
        yield Streamer(walsender, progress, tracker, options, commands, confirmed_on_server=lambda _: 0)


def test_one_socket_for_records_and_commands_shows_the_end_of_the_records(tmp_path: Path) -> None:
    """As with socat, or systemd's StandardInput=socket: another descriptor has the socket still open, for the last feedback."""
    ours, consumers = socket.socketpair()
    with ours, consumers:
        consumers.settimeout(60)
        seen = []
        both = Pipes(out_fd=os.dup(ours.fileno()), command_fd=ours.fileno())
        answer = COPY_BOTH + wal_data(8, b"one") + keepalive(32)

        def consume() -> None:
            with contextlib.suppress(TimeoutError):
                while not seen or seen[-1]:
                    seen.append(consumers.recv(100))
            consumers.send(b"F 0/8\nq\n")

        consumer = threading.Thread(target=consume)
        consumer.start()
        with streamer(tmp_path, both, answer, END, b"", is_direct=False, end_lsn=16, wait_after_end=True) as stream:
            assert stream.run() == 0
            assert stream.state().confirmed_lsn >= 8
        consumer.join()
        assert b"".join(seen) == b"w 0/8 3\none"
        assert seen[-1] == b""


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "libpq"])
def test_a_warning_about_changes_after_the_end_position_ends_nothing(tmp_path: Path, pipes: Pipes, is_direct: bool) -> None:
    """Somebody has dropped the publication after the end position, and applications go on writing."""

    def consume() -> None:
        while os.read(pipes.records_fd, 100):
            pass
        os.write(pipes.commands_fd, b"F 0/8\nq\n")

    skips = message(b"N", error_fields("WARNING", "55000", 'skipped loading publication "p"'))
    answer = COPY_BOTH + wal_data(8, b"one") + keepalive(32) + skips
    consumer = threading.Thread(target=consume)
    consumer.start()
    with streamer(tmp_path, pipes, answer, END, b"", is_direct=is_direct, end_lsn=16, wait_after_end=True) as stream:
        assert stream.run() == 0
    consumer.join()


@pytest.mark.parametrize("has_pending", [True, False])
def test_a_socket_is_not_read_while_a_transaction_is_handed_on(pipes: Pipes, has_pending: bool) -> None:
    """With -s 0 the server would ask for a status update, and nobody would see that."""
    now = time.monotonic()
    progress = Progress(now, status_interval_s=0)
    transactions = cast("Transactions", SimpleNamespace(has_pending=has_pending))
    tracker = tracker_for("pgoutput", {}, progress, None, Transactions())
    options = StreamOptions(out_fd=pipes.out_fd, command_fd=pipes.command_fd, write_header=True)
    ours, server = socket.socketpair()
    with ours, server:
        walsender: Any = SimpleNamespace(socket=ours.fileno(), direct=None, notices=[], flush=lambda: True)
        given = walsender, progress, tracker, options, CommandsIn(pipes.command_fd)
        streamer = Streamer(*given, confirmed_on_server=lambda _: 0, transactions=transactions)
        streamer._receiver.has_more = True
        with streamer._signals:
            streamer._wait(now)
    assert (progress.due_at() <= now + UNREAD_INTERVAL_S) == has_pending


@pytest.mark.parametrize("has_bytes", [True, False])
def test_a_part_of_a_record_is_a_sign_of_life(pipes: Pipes, has_bytes: bool) -> None:
    """A row of 800 MB may take longer than the limit. Before it has arrived, no other message can."""
    progress = Progress(now := time.monotonic(), status_interval_s=0.1, silence_limit_s=300)
    options = StreamOptions(out_fd=pipes.out_fd, command_fd=pipes.command_fd, write_header=True)
    ours, server = socket.socketpair()
    with ours, server:
        walsender: Any = SimpleNamespace(
            socket=ours.fileno(), direct=None, notices=[], flush=lambda: True, set_low_water_mark=lambda _: False
        )
        tracker = tracker_for("raw", {}, progress, None)
        streamer = Streamer(walsender, progress, tracker, options, CommandsIn(pipes.command_fd), confirmed_on_server=lambda _: 0)
        streamer._receiver.has_more = False
        if has_bytes:
            server.send(wal_data(8, b"a long record")[:-1])
        with streamer._signals:
            streamer._wait(now)
    assert (progress.heard_at > now) == has_bytes


def test_a_reader_that_is_gone_from_a_socket(tmp_path: Path, pipes: Pipes) -> None:
    """Linux tells it otherwise than for a pipe. No record comes whose write would fail, and stdin stays open."""
    ours, reader = socket.socketpair()
    os.dup2(ours.fileno(), pipes.out_fd)
    late = threading.Timer(20, os.write, (pipes.commands_fd, b"q\n"))
    late.start()
    with ours, streamer(tmp_path, pipes, COPY_BOTH, b"", is_direct=True) as stream:
        reader.close()
        try:
            with pytest.raises(OutputError, match="the reader has closed"):
                stream.run()
        finally:
            late.cancel()


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "libpq"])
def test_bytes_that_have_no_place_in_a_stream(tmp_path: Path, pipes: Pipes, is_direct: bool) -> None:
    """The message's length is less than that of the length itself. libpq closes the socket then, so no feedback can be sent."""
    damaged = COPY_BOTH + wal_data(8, b"one") + b"d\0\0\0\3"
    with (
        streamer(tmp_path, pipes, damaged, b"", is_direct=is_direct) as stream,
        pytest.raises(ProtocolError, match="length 3") as raised,
    ):
        stream.run()
    assert "check proxies" in str(raised.value.hint)
    assert os.read(pipes.records_fd, 100) == b"w 0/8 3\none"


def test_a_record_for_which_libpq_has_no_memory(tmp_path: Path, pipes: Pipes) -> None:
    with (
        streamer(tmp_path, pipes, COPY_BOTH + wal_data(8, b"one") + b"d\x7f\xff\xff\xfa", b"", is_direct=False) as stream,
        pytest.raises(MemoryError, match="cannot allocate memory for input buffer") as raised,
    ):
        stream.run()
    assert "ulimit -v" in str(limit_hint(raised.value))


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "libpq"])
def test_damaged_bytes_after_the_last_feedback(tmp_path: Path, pipes: Pipes, is_direct: bool) -> None:
    os.write(pipes.commands_fd, b"q\n")
    with (
        streamer(tmp_path, pipes, COPY_BOTH, wal_data(8, b"one") + b"d\0\0\0\3", b"", is_direct=is_direct) as stream,
        pytest.raises(ProtocolError, match="length 3"),
    ):
        stream.run()


@pytest.mark.parametrize("wait_after_end", [False, True])
@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "libpq"])
def test_a_connection_lost_while_the_last_records_wait_for_the_consumer(
    tmp_path: Path, pipes: Pipes, is_direct: bool, wait_after_end: bool
) -> None:
    """Nothing that the consumer confirms from then on reaches the server, so the end is not a success."""
    os.set_blocking(pipes.out_fd, False)
    with contextlib.suppress(OSError):  # over this user's limit for pipes: cdcpipe can't make it larger either
        fcntl.fcntl(pipes.out_fd, fcntl.F_SETPIPE_SZ, 1 << 20)
    filled = os.write(pipes.out_fd, b"x" * (2 << 20))

    def consume(stream: Streamer) -> None:
        try:
            until(lambda: stream._hung_up)
            found = 0
            while found < filled + len(b"w 0/8 3\none"):
                found += len(os.read(pipes.records_fd, 1 << 16))
            os.write(pipes.commands_fd, b"F 0/8\n")
            until(lambda: has_ended.is_set() or stream.state().confirmed_lsn == 8)
        finally:
            os.write(pipes.commands_fd, b"q\n")

    has_ended = threading.Event()
    to_the_end = COPY_BOTH + wal_data(8, b"one") + keepalive(32)
    with streamer(tmp_path, pipes, to_the_end, is_direct=is_direct, end_lsn=16, wait_after_end=wait_after_end) as stream:
        consumer = threading.Thread(target=consume, args=(stream,))
        consumer.start()
        try:
            with pytest.raises(ConnectionClosedError, match="lost before the last feedback"):
                stream.run()
        finally:
            has_ended.set()
            consumer.join()


END = message(b"c") + message(b"C", b"COPY 0\0") + READY


def test_feedback_counts_while_the_last_records_are_written(tmp_path: Path, pipes: Pipes) -> None:
    """After SIGTERM, a slow consumer confirms records for as long as it takes to read them."""
    answer = COPY_BOTH + wal_data(8, b"one") + wal_data(16, b"x" * (3 << 20))
    has_ended = threading.Event()

    with streamer(tmp_path, pipes, answer, END, b"", is_direct=False) as stream:

        def consume() -> None:
            os.read(pipes.records_fd, 1 << 16)
            os.write(pipes.commands_fd, b"F 0/8\nnonsense\n")  # the end is decided, so a bad command changes nothing
            until(lambda: has_ended.is_set() or stream.state().confirmed_lsn == 8)
            while os.read(pipes.records_fd, 1 << 16):
                pass

        until(lambda: stream._receiver.receive() < 0 or stream.state().pending_bytes > 3 << 20)
        consumer = threading.Thread(target=consume)
        consumer.start()
        try:
            stream._finish()
        finally:
            has_ended.set()
            stream._records.close()
            os.close(pipes.out_fd)
            consumer.join()
        assert stream.state().confirmed_lsn == 8


class FailingFeeder:
    """An output plugin that writes its records as they come, and fails at one."""

    def __init__(self, write: Callable[[int, bytes], None], error: Exception) -> None:
        self._write, self._error = write, error

    def feed(self, wal_start: int, data: bytes) -> None:
        if data == b"bad":
            with beside_the_stream():
                raise self._error
        self._write(wal_start, data)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [ServerError("cancelled"), ConnectionClosedError("lost"), MemoryError(), KeyError("a value")])
@pytest.mark.parametrize("is_guard", [False, True])
def test_the_server_reads_the_last_feedback_after_an_error_that_is_not_the_walsenders(
    tmp_path: Path, pipes: Pipes, error: Exception, is_guard: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The catalog's query was cancelled, a standby was promoted, a plugin has a defect."""
    caplog.set_level("INFO")
    checks = []

    def check() -> None:
        checks.append(1)
        with beside_the_stream():
            raise error

    options = StreamOptions(pipes.out_fd, pipes.command_fd, write_header=True, auto_feedback=True)
    answer = COPY_BOTH + wal_data(8, b"one") + wal_data(16, b"bad")
    with (
        FakeWalsender(tmp_path, [answer, END, b""]) as server,
        closing(Walsender(server.parameters, within_s=10)) as walsender,
    ):
        walsender.start_copy("START_REPLICATION SLOT s LOGICAL 0/0", may_be_direct=False)
        progress = Progress(time.monotonic())
        stream = Streamer(
            walsender,
            progress,
            tracker_for("raw", {}, progress, None),
            options,
            CommandsIn(pipes.command_fd),
            confirmed_on_server=lambda _: 0,
            make_feeder=None if is_guard else lambda write: FailingFeeder(write, error),
            check=check if is_guard else None,
        )
        with pytest.raises(type(error)) as raised:
            stream.run()
        assert server.received.endswith(b"dc")
    assert raised.value is error
    assert progress.written_lsn == progress.confirmed_lsn == 0  # the chunk that failed may end with half a transaction
    assert checks == [1] * is_guard  # a guard that can't be asked is not asked again
    assert "a value" not in caplog.text
    os.set_blocking(pipes.records_fd, False)
    if is_guard:
        with pytest.raises(BlockingIOError):
            os.read(pipes.records_fd, 100)
    else:
        assert os.read(pipes.records_fd, 100) == b"w 0/8 3\none"


def test_the_errors_of_the_catalog_and_of_the_guard_are_not_the_walsenders(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UnreachableError("no connection")

    monkeypatch.setattr(subcommand, "connect", fail)
    catalog = subcommand._Catalog(SlotConfig("s", {}))
    catalog._connection = cast("Connection", SimpleNamespace(execute=Mock(side_effect=ConnectionClosedError("lost")), close=Mock()))
    with pytest.raises(CdcpipeError) as lost:
        catalog.query("select 1")
    monkeypatch.setattr(timeline_guard, "connect_walsender", Mock())
    monkeypatch.setattr(timeline_guard, "identify_system", lambda _: SimpleNamespace(system_id="7", timeline=2))
    monkeypatch.setattr(timeline_guard, "expect_system", Mock())
    guard = timeline_guard.TimelineGuard(cast("Connection", SimpleNamespace(parameters_here={})), "7/1")
    with pytest.raises(ConnectionClosedError) as promoted:
        guard.check()
    assert lost.value.is_beside_stream
    assert promoted.value.is_beside_stream
