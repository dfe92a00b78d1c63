"""`Transactions` against a model of the server that knows what must come out, by hand, and with garbage."""

import os
import random
import resource
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdcpipe.errors import OutputError, ProtocolError
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.held import PIECE_BYTES
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
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
)
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.pipe.framing import RecordReader, encode_header
from cdcpipe.pipe.spill import MAX_FILES, Spill, Spills
from support.pgoutput_build import build
from support.whole_transactions import take_all


class FakeSpill:
    open_count = 0

    def __init__(self) -> None:
        self.data = bytearray()
        FakeSpill.open_count += 1

    def append(self, data: bytearray) -> None:
        self.data += data

    def read(self, pos: int, size: int) -> bytes:
        assert pos + size <= len(self.data)
        return bytes(self.data[pos : pos + size])

    def truncate(self, size: int) -> None:
        assert size <= len(self.data)
        del self.data[size:]

    def close(self) -> None:
        self.data.clear()
        FakeSpill.open_count -= 1


def whole(*messages: Message | bytes, **options: object) -> list[tuple[int, Message]]:
    """Feed messages with WAL starts 1, 2, … and return what comes out, decoded."""
    transactions = Transactions(**{"make_spill": FakeSpill, **options})  # type: ignore[arg-type]
    for lsn, message in enumerate(messages, 1):
        transactions.feed(
            0 if isinstance(message, Relation | Type) else lsn, message if isinstance(message, bytes) else build(message)
        )
    return [(lsn, decode(record)) for lsn, record in take_all(transactions)]


# A model of the server


class Transaction:
    def __init__(self, xid: int) -> None:
        self.xid = xid
        self.is_streamed = False
        self.subs = [xid]
        """The open subtransactions, outermost first."""
        self.children: dict[int, list[int]] = {xid: []}
        """Those that were released into each."""
        self.unsent: list[tuple[int, int]] = []
        self.rows: list[tuple[int, int]] = []
        """(subxid, row number) of all that was written and not undone."""
        self.streamed_subs: set[int] = set()


class Server:
    """Sends what a walsender sends for random transactions.

    A row holds its number and the version of its relation when it was sent, and the relation's column is named after the version:
    so a reader can tell whether the description that it has is the right one. A relation changes while transactions are open, as
    one does whose column list in the publication is changed. It is described as pgoutput does it, which remembers for
    each relation whether it was, and for each streamed transaction, until something changes.
    """

    def __init__(self, rng: random.Random, *, parallel: bool) -> None:
        self.rng = rng
        self.parallel = parallel
        self.sent: list[tuple[int, bytes]] = []
        self.expected: list[tuple[int, int, int, list[int]] | bytes] = []
        self.lsns: dict[int, int] = {}
        """Where each row was sent."""
        self.open: list[Transaction] = []
        self.prepared: list[tuple[str, Transaction]] = []
        self.position = self.last_xid = self.last_row = 0
        self.version = {1: 0, 2: 0}
        self.is_described: set[int] = set()
        self.is_described_in: set[tuple[int, int]] = set()

    def send(self, message: Message) -> int:
        self.position += 1
        self.sent.append((0 if isinstance(message, Relation | Type) else self.position, build(message)))
        return self.position

    def new_xid(self) -> int:
        self.last_xid += 1
        return self.last_xid

    def send_rows(self, txn: Transaction, *, in_block: bool) -> None:
        for subxid, row in txn.unsent:
            relation_id = row % 2 + 1
            xid = subxid if in_block else None
            version = self.version[relation_id]
            if (relation_id, txn.xid) not in self.is_described_in if in_block else relation_id not in self.is_described:
                if relation_id == 2:
                    self.send(Type(xid, 90_000, "public", "mood"))
                columns = (Column(1, f"v{version}", 90_000 if relation_id == 2 else 25, -1),)
                self.send(Relation(xid, relation_id, "public", f"t{relation_id}", "d", columns))
                if in_block:
                    self.is_described_in.add((relation_id, txn.xid))
                else:
                    self.is_described.add(relation_id)
            padding = b"x" * (row % 50)
            self.lsns[row] = self.send(Insert(xid, relation_id, (b"%d %d %s" % (row, version, padding),)))
            if in_block:
                txn.streamed_subs.add(subxid)
        txn.unsent.clear()

    def block(self, txn: Transaction) -> None:
        self.send(StreamStart(txn.xid, not txn.is_streamed))
        txn.is_streamed = True
        self.send_rows(txn, in_block=True)
        self.send(StreamStop())

    def abort(self, txn: Transaction, subxid: int) -> None:
        if subxid in txn.streamed_subs or (subxid == txn.xid and txn.is_streamed):
            where = (self.position, 5) if self.parallel else (None, None)
            self.send(StreamAbort(txn.xid, subxid, *where))
            self.is_described_in = {key for key in self.is_described_in if key[1] != txn.xid}

    def undo(self, txn: Transaction, subxid: int) -> None:
        """Roll back a subtransaction: what was released into it comes first, as in the abort record."""
        for child in txn.children.pop(subxid):
            self.undo(txn, child)
        self.abort(txn, subxid)
        txn.unsent = [each for each in txn.unsent if each[0] != subxid]
        txn.rows = [each for each in txn.rows if each[0] != subxid]

    def finish(self, xid: int, txn: Transaction, commit_lsn: int) -> None:
        if txn.rows:
            self.expected.append((xid, commit_lsn, self.position, [row for _, row in txn.rows]))

    # What a step may be

    def begin(self) -> None:
        self.open.append(Transaction(self.new_xid()))

    def write(self) -> None:
        txn = self.rng.choice(self.open)
        for _ in range(self.rng.randint(1, 4)):
            self.last_row += 1
            for rows in (txn.unsent, txn.rows):
                rows.append((txn.subs[-1], self.last_row))

    def savepoint(self) -> None:
        txn = self.rng.choice(self.open)
        txn.subs.append(self.new_xid())
        txn.children[txn.subs[-1]] = []

    def release(self) -> None:
        txn = self.rng.choice(self.open)
        if len(txn.subs) > 1:
            subxid = txn.subs.pop()
            txn.children[txn.subs[-1]].append(subxid)

    def roll_back_to(self) -> None:
        txn = self.rng.choice(self.open)
        if len(txn.subs) > 1:
            self.undo(txn, txn.subs.pop())

    def stream(self) -> None:
        self.block(self.rng.choice(self.open))

    def commit(self) -> None:
        txn = self.open.pop(self.rng.randrange(len(self.open)))
        if txn.is_streamed:
            if txn.unsent:
                self.block(txn)
            commit_lsn = self.position
            self.send(StreamCommit(txn.xid, 0, commit_lsn, commit_lsn + 1, txn.xid))
            for key in [key for key in self.is_described_in if key[1] == txn.xid]:
                self.is_described_in.discard(key)
                self.is_described.add(key[0])
        elif txn.rows:
            commit_lsn = self.position + 1000
            self.send(Begin(commit_lsn, txn.xid, txn.xid))
            self.send_rows(txn, in_block=False)
            self.send(Commit(0, commit_lsn, commit_lsn + 1, txn.xid))
        else:
            return
        self.finish(txn.xid, txn, commit_lsn)

    def roll_back(self) -> None:
        txn = self.open.pop(self.rng.randrange(len(self.open)))
        if self.rng.random() < 0.5:
            while len(txn.subs) > 1:
                self.undo(txn, txn.subs.pop())
        self.abort(txn, txn.xid)

    def prepare(self) -> None:
        txn = self.open.pop(self.rng.randrange(len(self.open)))
        gid = f"g{txn.xid}"
        place = (self.position, self.position + 1, 5, txn.xid, gid)
        if txn.is_streamed:
            if txn.unsent:
                self.block(txn)
            self.send(StreamPrepare(0, *place))
        else:
            self.send(BeginPrepare(*place))
            self.send_rows(txn, in_block=False)
            self.send(Prepare(0, *place))
        self.prepared.append((gid, txn))

    def end_prepared(self) -> None:
        if not self.prepared:
            return
        gid, txn = self.prepared.pop(self.rng.randrange(len(self.prepared)))
        commit_lsn = self.position
        if self.rng.random() < 0.6:
            self.send(CommitPrepared(0, commit_lsn, commit_lsn + 1, txn.xid, txn.xid, gid))
            self.finish(txn.xid, txn, commit_lsn)
        else:
            self.send(RollbackPrepared(0, commit_lsn, commit_lsn + 1, 5, 5, txn.xid, gid))

    def change_relation(self) -> None:
        relation_id = self.rng.choice([1, 2])
        self.version[relation_id] += 1
        self.is_described.discard(relation_id)
        self.is_described_in = {key for key in self.is_described_in if key[0] != relation_id}

    def message(self) -> None:
        content = b"%d" % self.position
        self.send(LogicalMessage(None, 0, self.position, "p", content))
        self.expected.append(content)

    def step(self) -> None:
        names = (
            "begin write write write savepoint release roll_back_to stream stream commit commit roll_back"
            " prepare end_prepared change_relation message"
        )
        if not self.open:
            self.begin()
        getattr(self, self.rng.choice(names.split()))()


def read(server: Server, records: list[tuple[int, bytes]]) -> list[tuple[int, int, int, list[int]] | bytes]:
    """Read the way a consumer of version 1 does, and check every record's position and relation."""
    groups: list[tuple[int, int, int, list[int]] | bytes] = []
    columns: dict[int, str] = {}
    types: set[int] = set()
    rows: list[int] | None = None
    begin = Begin(0, 0, 0)
    for lsn, record in records:
        match message := decode(record):
            case Begin():
                assert rows is None
                begin, rows = message, []
            case Commit():
                assert rows is not None
                assert (begin.final_lsn, begin.commit_time_us, begin.xid) == (message.commit_lsn, message.commit_time_us, begin.xid)
                assert begin.commit_time_us == begin.xid
                groups.append((begin.xid, message.commit_lsn, lsn, rows))
                rows = None
            case Type():
                assert rows is not None
                types.add(message.type_id)
            case Relation():
                assert rows is not None
                assert (lsn, message.columns[0].type_id in {25, *types}) == (0, True)
                columns[message.relation_id] = message.columns[0].name
            case Insert():
                assert rows is not None
                row, version, _ = bytes(message.new[0]).split(b" ")  # type: ignore[arg-type]
                assert columns[message.relation_id] == f"v{version.decode()}"
                assert lsn == server.lsns[int(row)]
                rows.append(int(row))
            case LogicalMessage():
                assert rows is None
                groups.append(message.content)
            case _:
                raise AssertionError(message)
    assert rows is None
    return groups


@given(
    st.randoms(use_true_random=False),
    st.sampled_from([0, 100, 1000, 1 << 20]),
    st.sampled_from([1, 64, 1 << 20]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=400)
def test_any_interleaving_gives_committed_transactions_in_commit_order(
    rng: random.Random, spill_threshold: int, max_bytes: int, parallel: bool, at_once: bool
) -> None:
    server = Server(rng, parallel=parallel)
    for _ in range(rng.randint(1, 120)):
        server.step()
    while server.open:
        rng.choice([server.commit, server.roll_back, server.prepare])()
    while server.prepared:
        server.end_prepared()
    FakeSpill.open_count = 0
    transactions = Transactions(streaming_parallel=parallel, spill_threshold=spill_threshold, make_spill=FakeSpill)
    records = []
    for lsn, data in server.sent:
        if at_once and data[:1] == b"I" and data[1:5] == transactions.block_xid:
            record = data[:1] + data[5:]
            transactions.keep(encode_header(lsn, len(record)) + record)
        elif at_once and transactions.lets_by(data):
            assert not transactions.has_pending
            records.append((lsn, data))
        elif transactions.is_direct and data[:1] in (b"I", b"U", b"D", b"T", b"M"):
            assert not transactions.has_pending or not at_once
            transactions.feed(lsn, memoryview(data))
            if at_once:
                assert take_all(transactions) == [(lsn, data)]
                records.append((lsn, data))
        else:
            transactions.feed(lsn, memoryview(data))
            if at_once:
                records += take_all(transactions, max_bytes)
    records += take_all(transactions, max_bytes)
    assert read(server, records) == server.expected
    assert FakeSpill.open_count == 0
    assert not transactions._held.all()


# By hand

COLUMNS = (Column(1, "id", 23, -1),)


def relation(xid: int | None, *columns: Column) -> Relation:
    return Relation(xid, 16385, "public", "t", "d", columns or COLUMNS)


def row(xid: int | None, value: int) -> Insert:
    return Insert(xid, 16385, (b"%d" % value,))


def values(messages: list[tuple[int, Message]]) -> list[bytes]:
    return [bytes(message.new[0]) for _, message in messages if isinstance(message, Insert)]  # type: ignore[arg-type]


S, E = StreamStart(7, True), StreamStop()
COMMIT = StreamCommit(7, 0, 100, 200, 5)


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
    """9 nests in 8, which has the older xid, and writes first; 5 came after the xids wrapped. Then 8 writes, and is undone."""
    first = [S, relation(7), row(9, 1), row(8, 2), row(9, 3), row(7, 4), row(5, 5), E]
    more = [StreamAbort(7, subxid, None, None), StreamStart(7, False), relation(7), row(8, 6), E]
    then = [StreamAbort(7, 8, None, None), StreamStart(7, False), relation(7), row(11, 7), E]
    assert values(whole(*first, *more, COMMIT)) == [b"%d" % value for value in [*kept, 6]]
    assert values(whole(*first, *more, *then, COMMIT)) == [b"%d" % value for value in [*kept_then, 7]]


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_hundred_thousand_subtransactions(is_aborted: bool) -> None:
    """Each with a row; released, or undone one by one from the first, as an abort record lists them."""
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


def test_nothing_comes_out_before_the_commit() -> None:
    assert whole(S, relation(7), row(7, 1), E) == []


def test_what_nests_in_an_undone_subtransaction_goes_with_it() -> None:
    """Also where the server names the outer one alone; what its parent wrote before stays."""
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
    assert "transaction 7 was rolled back" in caplog.text


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


# The files


def test_memory_is_bounded_and_the_files_have_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    transactions = Transactions(spill_threshold=100_000)
    fds = set(os.listdir("/proc/self/fd"))
    for xid in (7, 8):
        transactions.feed(1, build(StreamStart(xid, True)))
        for number in range(5_000):
            transactions.feed(number, build(Insert(xid, 16385, (b"x" * 200,))))
            assert transactions._held.free_bytes() >= 0
        transactions.feed(1, build(E))
    assert list(tmp_path.iterdir()) == []
    transactions.feed(1, build(StreamAbort(7, 7, None, None)))
    transactions.feed(1, build(StreamCommit(8, 0, 100, 200, 5)))
    lsns = []
    while piece := transactions.take(1000):
        assert len(piece) < 1000 + PIECE_BYTES + 300
        reader = RecordReader()
        reader.feed(piece)
        lsns += [lsn for lsn, data in reader if data[:1] == b"I"]
        assert not reader.has_partial
    assert lsns == list(range(5_000))
    assert set(os.listdir("/proc/self/fd")) == fds


def test_close_gives_everything_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fds = set(os.listdir("/proc/self/fd"))
    transactions = Transactions(spill_threshold=0)
    for message in (S, row(7, 1), E, BeginPrepare(1, 2, 3, 8, "g"), row(None, 1), Prepare(0, 1, 2, 3, 8, "g"), COMMIT):
        transactions.feed(1, build(message))
    transactions.take(1)
    transactions.close()
    assert not transactions.has_pending
    assert set(os.listdir("/proc/self/fd")) == fds


def test_a_full_disk_is_an_error_that_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes, pos: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match=r"cannot keep .*: No space left on device"):
        whole(S, row(7, 1), spill_threshold=0, make_spill=Spills().open)


def test_as_many_held_transactions_as_the_server_allows_and_few_files() -> None:
    """1,500 prepared transactions on disk, some of them ended in between, with 256 descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = set(os.listdir("/proc/self/fd"))
    transactions = Transactions(spill_threshold=0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        for xid in range(1, 1501):
            prepare = (BeginPrepare(1, 2, 3, xid, f"g{xid}"), row(None, xid), Prepare(0, 1, 2, 3, xid, f"g{xid}"))
            for message in prepare:
                transactions.feed(xid, build(message))
            if xid % 3 == 0:
                transactions.feed(xid, build(RollbackPrepared(0, 1, 2, 3, 4, xid, f"g{xid}")))
        for xid in range(1, 1501):
            if xid % 3:
                transactions.feed(xid, build(CommitPrepared(0, 1, 2, 3, xid, f"g{xid}")))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    rows = [lsn for lsn, data in take_all(transactions) if data[:1] == b"I"]
    assert rows == [xid for xid in range(1, 1501) if xid % 3]
    assert set(os.listdir("/proc/self/fd")) == fds


@given(
    st.lists(
        st.tuples(st.integers(0, 39), st.sampled_from(["append", "append", "truncate", "close"]), st.integers(0, 200_000)),
        max_size=120,
    )
)
def test_spills_that_share_files_keep_their_bytes(steps: list[tuple[int, str, int]]) -> None:
    spills = Spills()
    held: dict[int, tuple[Spill, bytes]] = {}
    fds = len(os.listdir("/proc/self/fd"))
    for number, (which, step, size) in enumerate(steps):
        spill, data = held.get(which) or (spills.open(), b"")
        if step == "append":
            added = bytes([number + 1]) * size
            spill.append(added)
            data += added
        elif step == "truncate":
            data = data[: size % (len(data) + 1)]
            spill.truncate(len(data))
        held[which] = spill, data
        if step == "close":
            held.pop(which)[0].close()
        assert len(os.listdir("/proc/self/fd")) <= fds + MAX_FILES
        for other, expected in held.values():
            assert other.size == len(expected)
            assert other.read(0, other.size) == expected
    for spill, data in held.values():
        assert spill.read(len(data) // 2, len(data) - len(data) // 2) == data[len(data) // 2 :]
        spill.close()
    assert len(os.listdir("/proc/self/fd")) == fds
