"""Assembles whole transactions from a stream, in a form that can be compared with version 1."""

from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import (
    Insert,
    Message,
    Relation,
    StreamCommit,
    StreamStart,
    StreamStop,
    Type,
)
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.pipe.framing import RecordReader
from support.pgoutput_build import build


def take_all(transactions: Transactions, max_bytes: int = 1 << 20) -> list[tuple[int, bytes]]:
    records = []
    reader = RecordReader()
    while piece := transactions.take(max_bytes):
        reader.feed(piece)
        records += list(reader)
        assert not reader.has_partial
    return records


def plain(records: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Remove descriptions, because every streamed transaction has its own, and set the LSN of each Begin to 0."""
    return [(0 if data[:1] == b"B" else lsn, data) for lsn, data in records if data[:1] not in (b"R", b"Y")]


def rows_with_columns(records: list[tuple[int, bytes]]) -> list[tuple[str, tuple[object, ...]]]:
    """Return each row with the column names from the description that applies to it."""
    relations: dict[int, Relation] = {}
    rows = []
    for _, record in records:
        match message := decode(record):
            case Relation():
                relations[message.relation_id] = message
            case Insert():
                columns = relations[message.relation_id].columns
                rows.append((message.relation_id, tuple(zip((c.name for c in columns), message.new, strict=True))))
    return rows


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
    """Feed messages with WAL starts 1, 2, …. Returns the resulting messages, decoded."""
    transactions = Transactions(**{"make_spill": FakeSpill, **options})
    for lsn, message in enumerate(messages, 1):
        transactions.feed(
            0 if isinstance(message, Relation | Type) else lsn, message if isinstance(message, bytes) else build(message)
        )
    return [(lsn, decode(record)) for lsn, record in take_all(transactions)]


def row(xid: int | None, value: int) -> Insert:
    return Insert(xid, 16385, (b"%d" % value,))


S, E = StreamStart(7, True), StreamStop()
COMMIT = StreamCommit(7, 0, 100, 200, 5)
