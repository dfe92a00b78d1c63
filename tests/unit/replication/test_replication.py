"""The replication layer's codecs and trackers, without a server."""

import os
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdcpipe.errors import InvalidArgumentsError, ProtocolError
from cdcpipe.replication.boundaries import BoundaryTracker, NextLsnTracker, PgoutputTracker, RecordTracker, TextTracker, tracker_for
from cdcpipe.replication.commands import parse_publication_names, publication_names, start_replication
from cdcpipe.replication.copydata import WAL_DATA_HEADER_BYTES, PrimaryKeepalive, build_status_update, parse_keepalive
from cdcpipe.replication.progress import Progress
from cdcpipe.sql import quote_identifier, quote_literal
from cdcpipe.streaming.consumer import CommandsIn

# CopyData

WAL = b"w" + struct.pack(">QQq", 0x16_0374D848, 0x16_0374D848, -5) + b"data"
KEEPALIVE = b"k" + struct.pack(">Qq?", 7, 8, True)


def test_copydata() -> None:
    assert WAL[WAL_DATA_HEADER_BYTES:] == b"data"
    assert parse_keepalive(KEEPALIVE) == PrimaryKeepalive(7, True)
    assert str(parse_keepalive(memoryview(KEEPALIVE)).wal_end) == "0/7"


@pytest.mark.parametrize(
    "data", [b"", b"x", *(WAL[:end] for end in range(1, 25)), *(KEEPALIVE[:end] for end in range(1, 18)), KEEPALIVE + b"x"]
)
def test_copydata_malformed(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="replication stream"):
        parse_keepalive(data)


def test_status_update() -> None:
    data = build_status_update(1 << 40, 5, unix_time_s=946_684_801.5, reply_requested=True)
    assert struct.unpack(">cQQQq?", data) == (b"r", 1 << 40, 5, 5, 1_500_000, True)


# Commands

NAMES = ["p", "MyPub", 'a"b', "a'b", "a\\b", "a,b", " x ", "é", ""]


@pytest.mark.parametrize("name", NAMES)
def test_quoting(name: str) -> None:
    assert quote_identifier(name)[1:-1].replace('""', '"') == name
    assert quote_literal(name)[1:-1].replace("''", "'") == name


def test_nul_is_refused() -> None:
    with pytest.raises(InvalidArgumentsError):
        quote_literal("a\0b")


def test_start_replication() -> None:
    assert start_replication('s"', 0x16_00000001, {"proto_version": "1", "flag": None}) == (
        'START_REPLICATION SLOT "s""" LOGICAL 16/1 ("proto_version" \'1\', "flag")'
    )
    assert start_replication("s", 0, {}) == 'START_REPLICATION SLOT "s" LOGICAL 0/0'


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_publication_names_round_trip(names: list[str]) -> None:
    assert parse_publication_names(publication_names(names)) == names


def test_unquoted_publication_names_fold() -> None:
    assert parse_publication_names(' MyPub ,"MyPub" , x') == ["mypub", "MyPub", "x"]


@pytest.mark.parametrize("value", ["", ",", "a,", ",a", "a b", '"a', '""', '"a"b'])
def test_not_a_list_of_identifiers(value: str) -> None:
    with pytest.raises(InvalidArgumentsError):
        parse_publication_names(value)


# Boundaries


def begin(final_lsn: int) -> bytes:
    return b"B" + struct.pack(">QqI", final_lsn, 0, 1)


def stream_start(xid: int) -> bytes:
    return b"S" + struct.pack(">IB", xid, 1)


def stream_abort(xid: int, subxid: int) -> bytes:
    return b"A" + struct.pack(">II", xid, subxid)


def stream_commit(xid: int) -> bytes:
    return b"c" + struct.pack(">I", xid) + bytes(25)


def stream_prepare(xid: int) -> bytes:
    return b"p" + struct.pack(">BQQqI", 0, 1, 2, 3, xid) + b"gid\0"


COMMIT = b"C" + bytes(25)
PREPARE, COMMIT_PREPARED, ROLLBACK_PREPARED = (kind + bytes(45) for kind in (b"P", b"K", b"r"))
MESSAGE = b"M\0" + bytes(8)
TRANSACTIONAL = b"M\1" + bytes(8)


def feed(tracker: BoundaryTracker, *records: tuple[int, bytes]) -> list[int]:
    """Return the positions of the records that pass the filter."""
    passed = []
    for lsn, data in records:
        if tracker.observe(lsn, memoryview(data)):
            break
        passed.append(lsn)
        if tracker.is_finished:
            break
    return passed


PGOUTPUT: list[tuple[str, list[tuple[int, bytes]], list[int], bool]] = [
    ("a transaction", [(1, begin(9)), (2, b"I"), (10, COMMIT)], [10], False),
    ("an open transaction", [(1, begin(9)), (2, b"I")], [], True),
    ("messages inside and outside", [(1, MESSAGE), (2, begin(9)), (3, TRANSACTIONAL), (10, COMMIT)], [1, 10], False),
    (
        "streamed blocks",
        [(1, stream_start(7)), (2, b"E"), (3, stream_start(8)), (4, b"E"), (9, stream_commit(7))],
        [9],
        True,
    ),
    ("a streamed abort", [(1, stream_start(7)), (2, b"E"), (3, stream_abort(7, 7))], [], False),
    ("an aborted subtransaction", [(1, stream_start(7)), (2, b"E"), (3, stream_abort(7, 9))], [], True),
    ("an abort of what is not known", [(3, stream_abort(5, 5))], [], False),
    ("a message in a streamed block", [(1, stream_start(7)), (2, TRANSACTIONAL), (3, b"E")], [], True),
    ("prepared", [(1, b"b"), (2, b"I"), (5, PREPARE), (8, COMMIT_PREPARED)], [5, 8], False),
    ("streamed and prepared", [(1, stream_start(7)), (2, b"E"), (5, stream_prepare(7)), (8, ROLLBACK_PREPARED)], [5, 8], False),
]


@pytest.mark.parametrize(("records", "ends", "is_open"), [case[1:] for case in PGOUTPUT], ids=[case[0] for case in PGOUTPUT])
def test_pgoutput_boundaries(records: Any, ends: list[int], is_open: bool) -> None:
    progress = Progress(0)
    tracker = PgoutputTracker(progress)
    assert len(feed(tracker, *records)) == len(records)
    assert tracker.take() == ends
    assert tracker.take() == []
    assert progress.in_transaction == is_open
    assert tracker.transactions == len(ends) - sum(data == MESSAGE for _, data in records)


@pytest.mark.parametrize(
    "data",
    [b"", b"B", begin(1)[:8], COMMIT[:-1], b"P", PREPARE[:29], b"S\0\0", b"A\0\0\0\1", b"c", b"p" + bytes(20), b"M", b"X", b"\0"],
)
def test_pgoutput_boundaries_malformed(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        PgoutputTracker(Progress(0)).observe(1, memoryview(data))


@given(st.binary(max_size=40))
def test_any_bytes_are_observed_or_a_protocol_error(data: bytes) -> None:
    try:
        PgoutputTracker(Progress(0)).observe(1, memoryview(data))
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    ("end_position", "passed"),
    [(8, []), (9, [1, 2, 10]), (10, [1, 2, 10]), (15, [1, 2, 10]), (16, [1, 2, 10, 10, 20]), (30, [1, 2, 10, 10, 20])],
)
def test_pgoutput_end_position(end_position: int, passed: list[int]) -> None:
    """A transaction whose commit lies before the end passes completely. The next one does not pass at all."""
    records = [(1, begin(8)), (2, b"I"), (10, COMMIT), (10, begin(15)), (20, COMMIT), (21, begin(30))]
    tracker = PgoutputTracker(Progress(0), end_position)
    assert feed(tracker, *records) == passed
    assert tracker.is_finished


@pytest.mark.parametrize(("end_position", "passed"), [(4, []), (5, [5]), (7, [5]), (8, [5, 8]), (9, [5, 8])])
def test_pgoutput_end_position_among_messages(end_position: int, passed: list[int]) -> None:
    """The position of a message outside of transactions is its end."""
    tracker = PgoutputTracker(Progress(0), end_position)
    assert feed(tracker, (5, MESSAGE), (8, MESSAGE)) == passed
    tracker.keepalive(9)
    assert tracker.is_finished


def test_a_keepalive_reaches_the_end_but_not_inside_a_transaction() -> None:
    progress = Progress(0)
    tracker = PgoutputTracker(progress, 50)
    feed(tracker, (1, begin(40)))
    tracker.keepalive(60)
    assert not tracker.is_finished
    feed(tracker, (45, COMMIT))
    tracker.keepalive(49)
    assert not tracker.is_finished
    tracker.keepalive(50)
    assert tracker.is_finished


@pytest.mark.parametrize(
    ("plugin", "options", "kind"),
    [
        ("pgoutput", {}, PgoutputTracker),
        ("test_decoding", {}, TextTracker),
        ("wal2json", {}, NextLsnTracker),
        ("wal2json", {"format-version": "1"}, NextLsnTracker),
        ("wal2json", {"format-version": "1", "write-in-chunks": "1"}, RecordTracker),
        ("wal2json", {"format-version": "2"}, TextTracker),
        ("wal2json", {"format-version": "2", "include-transaction": None}, TextTracker),
        ("wal2json", {"format-version": "2", "include-transaction": "tru"}, TextTracker),
        ("wal2json", {"format-version": "2", "include-transaction": "off"}, RecordTracker),
        ("decoderbufs", {}, RecordTracker),
    ],
)
def test_tracker_for(plugin: str, options: dict[str, str | None], kind: type[BoundaryTracker]) -> None:
    assert type(tracker_for(plugin, options, Progress(0), None)) is kind


def test_text_boundaries() -> None:
    progress = Progress(0)
    tracker = TextTracker(progress, None, b"BEGIN", (b"COMMIT",))
    feed(tracker, (1, b"message: x"), (2, b"BEGIN 7"), (3, b"table t: INSERT"), (9, b"COMMIT 7"))
    assert tracker.take() == [1, 9]


@pytest.mark.parametrize("outcome", [b"COMMIT PREPARED 'g', txid 7", b"ROLLBACK PREPARED 'g', txid 7"])
def test_prepared_transactions_of_test_decoding(outcome: bytes) -> None:
    """The consumer has the changes at the PREPARE. Nothing keeps the end position or the idle slot waiting then."""
    progress = Progress(0)
    tracker = tracker_for("test_decoding", {}, progress, 50)
    feed(tracker, (2, b"BEGIN 7"), (3, b"table t: INSERT"), (9, b"PREPARE TRANSACTION 'g', txid 7"))
    assert not progress.in_transaction
    feed(tracker, (20, outcome))
    assert tracker.take() == [9, 20]
    tracker.keepalive(50)
    assert tracker.is_finished


def test_unknown_plugins_end_with_each_record() -> None:
    tracker = RecordTracker(Progress(0), 5)
    assert feed(tracker, (3, b"x"), (5, b"y"), (6, b"z")) == [3, 5]
    assert tracker.take() == [3, 5]


def test_a_record_behind_a_confirmed_position_is_outstanding_until_feedback_for_it() -> None:
    """The transaction began at 0x650, was idle while 0x700 was confirmed, and committed at 0x800."""
    progress = Progress(0)
    tracker = RecordTracker(progress)
    progress.keepalive(0x700, reply_requested=False)
    assert progress.confirmed_lsn == 0x700
    feed(tracker, (0x650, b"x"))
    progress.keepalive(0x900, reply_requested=False)
    progress.feedback(0x650, 0)  # it is not written yet
    progress.confirm_written(0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (0x700, True)
    progress.written(tracker.take())
    assert progress.is_outstanding
    progress.feedback(0x650, 0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (0x900, False)


@pytest.mark.parametrize(
    ("feedback", "is_outstanding"), [(0x640, True), (0x650, False), (0x910, True), (0x911, False), (0xA00, False)]
)
def test_feedback_for_an_earlier_record_is_not_for_a_later_one_behind_it(feedback: int, is_outstanding: bool) -> None:
    progress = Progress(0)
    tracker = RecordTracker(progress)
    feed(tracker, (0x910, b"x"), (0x650, b"y"))
    progress.written(tracker.take())
    progress.keepalive(0xB00, reply_requested=False)
    progress.feedback(0x910, 0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (0x910, True)
    progress.feedback(feedback, 0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (0x910 if is_outstanding else 0xB00, is_outstanding)


def test_feedback_for_a_later_record_confirms_those_behind_before_it() -> None:
    progress = Progress(0)
    tracker = RecordTracker(progress)
    feed(tracker, (0x910, b"x"), (0x650, b"y"), (0x640, b"z"), (0x920, b"later"))
    progress.written(tracker.take())
    progress.keepalive(0xB00, reply_requested=False)
    progress.feedback(0x650, 0)
    assert progress.is_outstanding
    progress.feedback(0x920, 0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (0xB00, False)


@pytest.mark.parametrize(("first", "lsn"), [(0x100, 0x260), (0x910, 0x260), (0x260, 0x260)])
def test_feedback_for_a_position_of_several_records_is_for_the_first_one(first: int, lsn: int) -> None:
    """Such as the rows of a COPY, or a message and the transaction whose first change follows it in the WAL."""
    progress = Progress(0)
    tracker = RecordTracker(progress)
    feed(tracker, (first, b"x"), (lsn, b"y"), (lsn, b"z"))
    progress.written(tracker.take())
    progress.keepalive(0xB00, reply_requested=False)
    progress.feedback(first, 0)
    progress.feedback(lsn, 0)
    assert progress.is_outstanding
    assert progress.confirmed_lsn == max(first, lsn)
    feed(tracker, (0xC00, b"later"))
    progress.written(tracker.take())
    progress.feedback(0xC00, 0)
    assert not progress.is_outstanding


def test_feedback_for_a_record_at_a_confirmed_idle_position() -> None:
    """The next change often begins there. Nobody else can have sent this feedback: the consumer was not told of the position."""
    progress = Progress(0)
    tracker = RecordTracker(progress)
    feed(tracker, (0x100, b"x"))
    progress.written(tracker.take())
    progress.feedback(0x100, 0)
    progress.keepalive(0x200, reply_requested=False)
    assert progress.confirmed_lsn == 0x200
    feed(tracker, (0x200, b"y"))
    progress.written(tracker.take())
    assert progress.is_outstanding
    progress.feedback(0x200, 0)
    progress.keepalive(0x300, reply_requested=False)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (0x300, False)


def test_feedback_for_records_behind_that_comes_together() -> None:
    progress = Progress(0)
    tracker = RecordTracker(progress)
    feed(tracker, (0x910, b"x"), (0x650, b"y"))
    progress.written(tracker.take())
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b"F 0/910\nF 0/650\n")
    commands = CommandsIn(read_fd)
    try:
        commands.read(lambda lsn: progress.feedback(lsn, 0))
    finally:
        commands.close()
        os.close(read_fd)
        os.close(write_fd)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (0x910, False)


def test_auto_feedback_confirms_a_record_behind_once_it_is_written() -> None:
    progress = Progress(0)
    tracker = RecordTracker(progress)
    progress.keepalive(0x700, reply_requested=False)
    feed(tracker, (0x650, b"x"))
    progress.keepalive(0x900, reply_requested=False)
    progress.confirm_written(0)
    assert progress.confirmed_lsn == 0x700
    progress.written(tracker.take())
    progress.confirm_written(0)
    assert progress.confirmed_lsn == 0x900


@pytest.mark.parametrize("head", [b'{"xid":7,"nextlsn":"0/%X","change":[', b'{\n\t"nextlsn": "0/%X",\n\t"change": ['])
def test_a_whole_transaction_of_wal2json_ends_where_it_says(head: bytes) -> None:
    """The second one began before the first one's commit. Feedback for the first is beyond the second's beginning."""
    progress = Progress(0)
    tracker = tracker_for("wal2json", {"format-version": "1", "include-lsn": "true"}, progress, 0x2000)
    assert feed(tracker, (0x900, head % 0x955 + b"1]}"), (0x920, head % 0x1005 + b"2]}")) == [0x900, 0x920]
    ends = tracker.take()
    assert ends == [0x955, 0x1005]
    progress.written(ends)
    progress.keepalive(0x1100, reply_requested=False)
    progress.feedback(0x955, 0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (0x955, True)
    progress.feedback(0x1005, 0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (0x1100, False)
    feed(tracker, (0x1100, b'{"change":[{"kind":"message"'))
    assert progress.is_outstanding
    assert tracker.take() == [0x1100]
