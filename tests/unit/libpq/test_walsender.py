"""How a stream begins and ends, with a server that the test plays: both for libpq's copy and for the direct one."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from cdcpipe.errors import CdcpipeError, ConnectionClosedError, ProtocolError, ServerError
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.replication.progress import Progress
from cdcpipe.sqlstate import WITHHELD, withheld
from cdcpipe.streaming import ending
from cdcpipe.streaming.ending import end_stream, take_keepalives
from cdcpipe.streaming.status import StatusUpdates
from support.fake_walsender import COPY_BOTH, READY, FakeWalsender
from support.waiting import until
from support.wire import error_fields, keepalive, message, wal_data

IN_USE = message(b"E", error_fields("ERROR", "55006", 'replication slot "s" is active for PID 7'))
SHUTDOWN = message(b"E", error_fields("FATAL", "57P01", "terminating connection due to administrator command"))
DONE = message(b"c") + message(b"C", b"COPY 0\0") + message(b"C", b"START_REPLICATION\0") + READY


@pytest.fixture(params=[True, False], ids=["direct", "libpq"])
def is_direct(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@contextmanager
def connected(directory: Path, *answers: bytes, stops_reading_after: int = 1_000) -> Iterator[tuple[Walsender, FakeWalsender]]:
    server = FakeWalsender(directory, list(answers), stops_reading_after=stops_reading_after)
    with server, closing(Walsender(server.parameters, within_s=10)) as walsender:
        yield walsender, server


def start(walsender: Walsender, is_direct: bool) -> None:
    walsender.start_copy("START_REPLICATION SLOT s LOGICAL 0/0", may_be_direct=is_direct)
    assert (walsender.direct is not None) == is_direct


@pytest.mark.parametrize("before", [b"", message(b"C", b"SELECT\0")], ids=["at once", "after a completed command"])
def test_a_refused_start_is_the_servers_error(tmp_path: Path, is_direct: bool, before: bytes) -> None:
    with (
        connected(tmp_path, before + IN_USE + READY, b"") as (walsender, _),
        pytest.raises(ServerError, match="is active") as raised,
    ):
        start(walsender, is_direct)
    assert raised.value.sqlstate == "55006"


def test_the_first_error_is_the_reason(tmp_path: Path, is_direct: bool) -> None:
    with connected(tmp_path, IN_USE + SHUTDOWN) as (walsender, _), pytest.raises(ServerError, match="is active"):
        start(walsender, is_direct)


def test_a_server_that_goes_without_an_answer(tmp_path: Path, is_direct: bool) -> None:
    with (
        connected(tmp_path, b"") as (walsender, _),
        pytest.raises(ConnectionClosedError, match="closed the connection unexpectedly"),
    ):
        start(walsender, is_direct)


def test_an_answer_that_cannot_be(tmp_path: Path) -> None:
    """libpq takes this for a command without rows."""
    with connected(tmp_path, READY, b"") as (walsender, _), pytest.raises(ProtocolError, match="kind 'Z'"):
        start(walsender, is_direct=True)


def records(walsender: Walsender) -> list[bytes]:
    """Read to the end of the copy."""
    found = []
    while True:
        length, data = walsender.receive(1)
        if length > 0:
            found.append(bytes(data))
        elif length < 0:
            return found
        else:
            walsender.wait(1, time.monotonic() + 10)
            walsender.consume_input()


@pytest.mark.parametrize(
    ("reason", "error"), [(SHUTDOWN, ConnectionClosedError), (IN_USE + READY, ServerError)], ids=["fatal", "error"]
)
def test_a_stream_that_the_server_ends_with_an_error(
    tmp_path: Path, is_direct: bool, reason: bytes, error: type[CdcpipeError]
) -> None:
    with connected(tmp_path, COPY_BOTH + wal_data(8, b"one") + reason, b"") as (walsender, _):
        start(walsender, is_direct)
        (record,) = records(walsender)
        assert record.endswith(b"one")
        with pytest.raises(error, match=r"terminating connection|is active"):
            walsender.copy_result(10)


def test_a_shutdown_of_the_server_is_no_loss(tmp_path: Path, is_direct: bool) -> None:
    """The server has sent everything, completes the command, and closes the connection without asking for another command."""
    with connected(tmp_path, COPY_BOTH + wal_data(8, b"one") + message(b"C", b"COPY 0\0")) as (walsender, _):
        start(walsender, is_direct)
        assert len(records(walsender)) == 1
        with pytest.raises(ConnectionClosedError, match="the server has ended the stream") as raised:
            walsender.copy_result(10)
    assert raised.value.hint == "it is shutting down: connect again later"


def test_only_keepalives_are_taken_at_the_end_position(tmp_path: Path, is_direct: bool) -> None:
    progress = Progress(0)
    answer = COPY_BOTH + keepalive(16) + keepalive(32) + wal_data(40, b"one") + keepalive(64)
    with connected(tmp_path, answer, b"") as (walsender, _):
        start(walsender, is_direct)
        until(lambda: not take_keepalives(walsender, progress))
    assert (progress.received_lsn, progress.confirmed_lsn) == (32, 0)


def test_what_the_server_says_of_a_row_is_not_told(tmp_path: Path, is_direct: bool) -> None:
    """A value may be in the message, in the hint, and in all lines of the context but the decoder's."""
    decoder = 'slot "s", output plugin "pgoutput", in the change callback, associated LSN 0/1B08ED0'
    more = f"Htry 'secret'\0WJSON data, line 1: secret\n{decoder}\0\0".encode()
    refused = message(b"E", error_fields("ERROR", "22P02", 'invalid input syntax for type json: "secret"')[:-1] + more)
    with connected(tmp_path, COPY_BOTH + refused + READY, b"") as (walsender, _):
        start(walsender, is_direct)
        assert records(walsender) == []
        with pytest.raises(ServerError) as raised:
            walsender.copy_result(10)
    assert (raised.value.sqlstate, raised.value.hint) == ("22P02", None)
    assert raised.value.message == f"invalid_text_representation: {WITHHELD} (22P02) [{decoder}]"


@pytest.mark.parametrize(
    ("state", "instead"),
    [
        ("42704", None),
        ("XX000", None),
        ("22012", "division_by_zero"),
        ("22030", "data_exception"),
        ("MY001", "an error of another"),
    ],
)
def test_only_messages_without_values_are_told(state: str, instead: str | None) -> None:
    found = withheld(state)
    assert found is None if instead is None else (found or "").startswith(instead)


def test_a_stream_that_the_server_ends(tmp_path: Path, is_direct: bool) -> None:
    with connected(tmp_path, COPY_BOTH + DONE, b"") as (walsender, _):
        start(walsender, is_direct)
        assert records(walsender) == []
        walsender.copy_result(10)


def test_the_end_of_a_stream_has_a_deadline(tmp_path: Path, is_direct: bool) -> None:
    with connected(tmp_path, COPY_BOTH + message(b"c"), b"", b"") as (walsender, server):
        start(walsender, is_direct)
        assert records(walsender) == []
        walsender.end_copy()
        with pytest.raises(ConnectionClosedError, match=r"not answered within 0\.2 s to the end of the stream"):
            walsender.copy_result(0.2)
    assert server.received == b"QcX"


def test_what_the_server_still_sends_is_dropped_at_the_end(tmp_path: Path, is_direct: bool) -> None:
    rest = b"".join(wal_data(8, b"x" * 1000) for _ in range(2000))
    with connected(tmp_path, COPY_BOTH, rest + DONE) as (walsender, server):
        start(walsender, is_direct)
        end_stream(walsender, StatusUpdates(walsender, Progress(time.monotonic())), lambda: 0, never)
    assert server.received == b"Qdc"


def test_a_connection_lost_at_the_end_ends_it(tmp_path: Path, is_direct: bool) -> None:
    """The server may have read the last status update, or not: then it sends the changes after it again."""
    with connected(tmp_path, COPY_BOTH, b"") as (walsender, server):
        start(walsender, is_direct)
        end_stream(walsender, StatusUpdates(walsender, Progress(time.monotonic())), lambda: 0, never)
    assert server.received == b"Qdc"


@pytest.mark.parametrize("answer", [b"", SHUTDOWN, wal_data(8, b"x")], ids=["lost", "ended", "lost with a record"])
@pytest.mark.parametrize(("confirmed", "is_warned"), [(16, False), (15, True), (0, True)])
def test_after_a_lost_end_the_server_is_asked_what_it_has_confirmed(
    tmp_path: Path,
    is_direct: bool,
    answer: bytes,
    confirmed: int,
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The exit code is 0, which must not hide that feedback may be lost."""
    monkeypatch.setattr(ending, "END_STEP_S", 0.3)
    asked = []

    def confirmed_on_server(within_s: float) -> int:
        asked.append(within_s)
        return confirmed

    with connected(tmp_path, COPY_BOTH, answer) as (walsender, _):
        start(walsender, is_direct)
        end_stream(walsender, StatusUpdates(walsender, Progress(time.monotonic())), lambda: 16, confirmed_on_server)
    assert asked
    assert ("the server has not confirmed 0/10 yet" in caplog.text) == is_warned


def test_a_completed_end_needs_no_question(tmp_path: Path, is_direct: bool) -> None:
    with connected(tmp_path, COPY_BOTH, DONE) as (walsender, _):
        start(walsender, is_direct)
        end_stream(walsender, StatusUpdates(walsender, Progress(time.monotonic())), lambda: 16, never)


def test_a_last_status_update_that_the_server_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With libpq, this can't happen: it has room for everything."""
    monkeypatch.setattr(ending, "END_STEP_S", 0.3)
    with connected(tmp_path, COPY_BOTH, b"", stops_reading_after=1) as (walsender, _):
        start(walsender, is_direct=True)
        status = StatusUpdates(walsender, Progress(time.monotonic()))
        while not status.is_stuck:
            status.send(time.monotonic())
        with pytest.raises(ConnectionClosedError, match="does not take the last status update") as raised:
            end_stream(walsender, status, lambda: 0, never)
    assert raised.value.hint == "it will send again what followed"


def never(_: float) -> int:
    raise AssertionError
