"""Transactions put together again from a stream, in a form that compares them with version 1."""

from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import (
    Insert,
    Relation,
)
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.pipe.framing import RecordReader


def take_all(transactions: Transactions, max_bytes: int = 1 << 20) -> list[tuple[int, bytes]]:
    records = []
    reader = RecordReader()
    while piece := transactions.take(max_bytes):
        reader.feed(piece)
        records += list(reader)
        assert not reader.has_partial
    return records


def plain(records: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Leave out descriptions, which every streamed transaction has of its own, and where a Begin was sent."""
    return [(0 if data[:1] == b"B" else lsn, data) for lsn, data in records if data[:1] not in (b"R", b"Y")]


def rows_with_columns(records: list[tuple[int, bytes]]) -> list[tuple[str, tuple[object, ...]]]:
    """Each row with the names of the columns that a reader takes it to have."""
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
