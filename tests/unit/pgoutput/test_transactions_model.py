"""`Transactions` compared with a model of the server that knows the expected output."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

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
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Type,
)
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.pipe.framing import encode_header
from support.pgoutput_build import build
from support.whole_transactions import FakeSpill, take_all


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

    A row has its number and the version of its relation at that time. The relation's column is named after the version. So a reader
    can tell whether it has the right description. A relation changes while transactions are open, as when its column list in the
    publication changes. The model describes relations as pgoutput does: it remembers for each relation, and for each streamed
    transaction, whether it was described, until something changes.
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
        for subxid, value in txn.unsent:
            relation_id = value % 2 + 1
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
            padding = b"x" * (value % 50)
            self.lsns[value] = self.send(Insert(xid, relation_id, (b"%d %d %s" % (value, version, padding),)))
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
        """Roll back a subtransaction. The subtransactions released into it come first, as in the abort record."""
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
    """Read as a consumer of version 1 does, and check the position and the relation of every record."""
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
                row, version, _ = bytes(message.new[0]).split(b" ")
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
