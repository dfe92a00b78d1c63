"""`Transactions` with messages made by hand, and with random bytes."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import (
    Begin,
    BeginPrepare,
    Column,
    Commit,
    CommitPrepared,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamPrepare,
    StreamStart,
    Truncate,
)
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.pipe.framing import encode_header
from support.pgoutput_build import build
from support.whole_transactions import COMMIT, E, FakeSpill, S, row, take_all, whole

COLUMNS = (Column(1, "id", 23, -1),)


def relation(xid: int | None, *columns: Column) -> Relation:
    return Relation(xid, 16385, "public", "t", "d", columns or COLUMNS)


def values(messages: list[tuple[int, Message]]) -> list[bytes]:
    return [bytes(message.new[0]) for _, message in messages if isinstance(message, Insert)]


def test_a_streamed_transaction_is_what_version_1_sends() -> None:
    assert whole(S, Origin(9, "o"), relation(7), row(8, 1), Truncate(7, 0, (16385,)), E, COMMIT) == [
        (1, Begin(100, 5, 7)),
        (2, Origin(9, "o")),
        (0, relation(None)),
        (4, row(None, 1)),
        (5, Truncate(None, 0, (16385,))),
        (7, Commit(0, 100, 200, 5)),
    ]


def test_changes_of_the_subtransaction_that_wrote_last_may_come_as_records() -> None:
    transactions = Transactions(make_spill=FakeSpill)
    seen = []
    for lsn, message in enumerate([S, relation(7), row(7, 1), row(8, 2), E, COMMIT], 1):
        transactions.feed(lsn, build(message))
        seen.append(transactions.block_xid)
        if transactions.block_xid is not None and isinstance(message, Insert):
            record = build(row(None, 10 * lsn))
            transactions.keep(encode_header(lsn, len(record)) + record)
    assert seen == [None, b"\0\0\0\7", b"\0\0\0\7", b"\0\0\0\10", None, None]
    assert values([(lsn, decode(record)) for lsn, record in take_all(transactions)]) == [b"1", b"30", b"2", b"40"]


@pytest.mark.parametrize(
    ("subxid", "kept", "kept_then"),
    [(9, [], []), (8, [1], [1]), (5, [1, 2, 3, 4], [1]), (10, [1, 2, 3, 4, 5], [1])],
)
def test_subtransactions_whose_records_do_not_come_in_the_order_of_their_xids(
    subxid: int, kept: list[int], kept_then: list[int]
) -> None:
    """9 is nested in 8, which has the older xid, and writes first. 5 came after the xids wrapped. Then 8 writes, and is rolled
    back.
    """
    first = [S, relation(7), row(9, 1), row(8, 2), row(9, 3), row(7, 4), row(5, 5), E]
    more = [StreamAbort(7, subxid, None, None), StreamStart(7, False), relation(7), row(8, 6), E]
    then = [StreamAbort(7, 8, None, None), StreamStart(7, False), relation(7), row(11, 7), E]
    assert values(whole(*first, *more, COMMIT)) == [b"%d" % value for value in [*kept, 6]]
    assert values(whole(*first, *more, *then, COMMIT)) == [b"%d" % value for value in [*kept_then, 7]]


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_hundred_thousand_subtransactions(is_aborted: bool) -> None:
    """Each has a row. All are released, or rolled back one by one from the first, in the order of an abort record."""
    xids = range(8, 100_008)
    transactions = Transactions(make_spill=FakeSpill, spill_threshold=1 << 20)
    for message in (S, relation(7), row(7, 0)):
        transactions.feed(1, build(message))
    change = build(row(7, 0))
    for xid in xids:
        transactions.feed(1, change[:1] + xid.to_bytes(4) + change[5:])
    starts = transactions._held.streamed[7].starts
    assert sys.getsizeof(starts._ages) + sys.getsizeof(starts._positions) < 14 * len(xids)
    assert not starts._late
    transactions.feed(4, build(E))
    if is_aborted:
        for xid in xids:
            transactions.feed(5, build(StreamAbort(7, xid, None, None)))
    transactions.feed(6, build(COMMIT))
    found = take_all(transactions)
    assert len(found) == 4 + (0 if is_aborted else len(xids))
    assert found[-1] == (6, build(Commit(0, 100, 200, 5)))


def test_what_ended_before_the_start_is_dropped() -> None:
    """Its descriptions stay known, because the server does not send them again."""
    before = [
        *(S, relation(7), row(7, 1), E, COMMIT),
        *(BeginPrepare(150, 160, 5, 9, "dropped"), row(None, 2), Prepare(0, 150, 160, 5, 9, "dropped")),
        *(BeginPrepare(170, 180, 5, 10, "g"), row(None, 3), Prepare(0, 170, 180, 5, 10, "g")),
        *(Begin(200, 5, 8), Origin(9, "o"), row(None, 4), LogicalMessage(None, 1, 201, "p", b""), Commit(0, 200, 210, 5)),
        LogicalMessage(None, 0, 215, "p", b""),
        CommitPrepared(0, 210, 220, 5, 9, "dropped"),
        CommitPrepared(0, 215, 220, 5, 12, "confirmed before it was committed"),
    ]
    after = [Begin(220, 5, 11), row(None, 5), Commit(0, 220, 230, 5), CommitPrepared(0, 230, 240, 5, 10, "g")]
    found = [message for _, message in whole(*before, *after, start_lsn=220)]
    described = relation(None)
    assert found == [
        *(Begin(220, 5, 11), described, row(None, 5), Commit(0, 220, 230, 5)),
        *(Begin(230, 5, 10), described, row(None, 3), Commit(0, 230, 240, 5)),
    ]
    assert FakeSpill.open_count == 0


def test_nothing_comes_out_before_the_commit() -> None:
    assert whole(S, relation(7), row(7, 1), E) == []


def test_a_rollback_includes_nested_subtransactions() -> None:
    """Also if the server names only the outer one. The earlier rows of its parent stay."""
    later = [StreamStart(7, False), relation(7), row(7, 5), E]
    out = whole(S, relation(7), row(7, 1), row(8, 2), row(9, 3), row(8, 4), E, StreamAbort(7, 8, None, None), *later, COMMIT)
    assert values(out) == [b"1", b"5"]


def test_the_description_in_an_undone_block_does_not_stay() -> None:
    wide = relation(7, *COLUMNS, Column(0, "new", 25, -1))
    aborted = [S, wide, Insert(7, 16385, (b"1", b"x")), E, StreamAbort(7, 7, None, None)]
    out = whole(*aborted, Begin(300, 5, 8), relation(None), row(None, 2), Commit(0, 300, 400, 5))
    assert [message for _, message in out if isinstance(message, Relation)] == [relation(None)]


def test_an_older_description_from_a_streamed_transaction_does_not_hold_afterwards() -> None:
    newer = Relation(None, 16385, "public", "t", "d", (Column(1, "renamed", 23, -1),))
    plain = [Begin(50, 5, 8), newer, row(None, 2), Commit(0, 50, 60, 5)]
    after = [Begin(300, 5, 9), Origin(1, "o"), row(None, 3), row(None, 4), Commit(0, 300, 400, 5)]
    out = [message for _, message in whole(S, relation(7), row(7, 1), E, *plain, COMMIT, *after)]
    assert out[-6:] == [after[0], after[1], newer, *after[2:]]


def test_an_empty_transaction_gives_nothing_as_with_version_1() -> None:
    assert whole(S, E, COMMIT) == []
    assert whole(S, relation(8), row(8, 1), E, StreamAbort(7, 8, None, None), COMMIT) == []


def test_a_prepared_transaction_comes_with_its_commit() -> None:
    prepare = [BeginPrepare(50, 60, 5, 7, "g"), relation(None), row(None, 1), Prepare(0, 50, 60, 5, 7, "g")]
    assert whole(*prepare) == []
    assert whole(*prepare, RollbackPrepared(0, 60, 200, 5, 6, 7, "g")) == []
    assert whole(*prepare, CommitPrepared(0, 100, 200, 6, 7, "g")) == [
        (1, Begin(100, 6, 7)),
        (0, relation(None)),
        (3, row(None, 1)),
        (5, Commit(0, 100, 200, 6)),
    ]


def test_a_rollback_of_something_that_was_never_seen_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    out = whole(
        StreamAbort(7, 7, None, None),
        RollbackPrepared(0, 1, 2, 3, 4, 5, "g"),
        *(S, row(7, 1), E, StreamAbort(7, 99, None, None), COMMIT),
    )
    assert values(out) == [b"1"]
    assert "the server rolled back transaction 7, of which it has sent nothing" in caplog.text


MALFORMED = [
    ([COMMIT], "none of its stream blocks came"),
    ([StreamPrepare(0, 1, 2, 3, 7, "g")], "none of its stream blocks came"),
    ([CommitPrepared(0, 1, 2, 3, 7, "g")], "'g' is committed, but its changes came in an earlier stream"),
    ([S, E, S], "first stream block came twice"),
    ([StreamStart(7, False)], "first stream block is missing"),
    ([S, S], "inside a stream block"),
    ([S, Begin(1, 2, 3)], "inside a stream block"),
    ([Begin(1, 2, 3), S], "inside a transaction"),
    ([Begin(1, 2, 3), Begin(1, 2, 3)], "inside a transaction"),
    ([E], "outside a transaction"),
    ([row(None, 1)], "outside a transaction"),
    ([LogicalMessage(None, 1, 1, "p", b"")], "transactional message"),
    ([BeginPrepare(1, 2, 3, 7, "g"), Commit(0, 1, 2, 3)], "being prepared"),
    ([BeginPrepare(1, 2, 3, 7, "g"), b"I\0\0"], "cut short"),
    ([BeginPrepare(1, 2, 3, 7, "g"), b"T\0\xff\xff\xff\0\0"], "do not fit"),
    (
        [BeginPrepare(1, 2, 3, 7, "g"), Prepare(0, 1, 2, 3, 7, "g"), BeginPrepare(1, 2, 3, 8, "g")],
        "prepared the transaction 'g' twice",
    ),
    ([S, E, BeginPrepare(1, 2, 3, 8, "g"), Prepare(0, 1, 2, 3, 8, "g"), StreamPrepare(0, 1, 2, 3, 7, "g")], "'g' twice"),
    ([S, b"I\0\0"], "cut short"),
    ([StreamAbort(7, 7, 5, 5)], "it should end"),
    ([b""], "an unknown kind"),
    ([b"Z"], "an unknown kind"),
]


@pytest.mark.parametrize(("messages", "what"), MALFORMED)
def test_malformed(messages: list[Message | bytes], what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        whole(*messages)


@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([build(m) for m in (S, E, COMMIT, row(7, 1), relation(7), Begin(1, 2, 3))]),
        max_size=8,
    ),
    st.booleans(),
)
def test_any_bytes_are_records_or_a_protocol_error(messages: list[bytes], parallel: bool) -> None:
    transactions = Transactions(streaming_parallel=parallel, spill_threshold=10, make_spill=FakeSpill)
    try:
        for data in messages:
            transactions.feed(1, data)
    except ProtocolError:
        pass
    take_all(transactions)
    transactions.close()
