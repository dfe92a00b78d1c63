"""Builds streams of pgoutput version 1 by hand, as a streamer writes them, for tests without a server."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cdcpipe.pipe.framing import encode_header

__all__ = ["Message", "Transaction", "begin", "commit", "insert", "message", "record", "relation", "truncate", "type_record"]


def record(body: bytes, lsn: int = 0) -> bytes:
    return encode_header(lsn, len(body)) + body


def begin(commit_lsn: int, xid: int) -> bytes:
    return record(b"B" + struct.pack(">QqI", commit_lsn, 0, xid), commit_lsn)


def commit(commit_lsn: int, end_lsn: int) -> bytes:
    return record(b"C" + struct.pack(">BQQq", 0, commit_lsn, end_lsn, 0), end_lsn)


def relation(relation_id: int, name: bytes = b"t", type_id: int = 25) -> bytes:
    column = b"\x01id\x00" + struct.pack(">Ii", type_id, -1)
    return record(b"R" + struct.pack(">I", relation_id) + b"public\x00" + name + b"\x00d" + struct.pack(">H", 1) + column)


def type_record(type_id: int, name: bytes = b"mood") -> bytes:
    return record(b"Y" + struct.pack(">I", type_id) + b"public\x00" + name + b"\x00")


def insert(relation_id: int, value: bytes, lsn: int = 0) -> bytes:
    row = struct.pack(">H", 1) + b"t" + struct.pack(">I", len(value)) + value
    return record(b"I" + struct.pack(">I", relation_id) + b"N" + row, lsn)


def truncate(*relation_ids: int) -> bytes:
    return record(b"T" + struct.pack(f">IB{len(relation_ids)}I", len(relation_ids), 0, *relation_ids))


def message(lsn: int, content: bytes, flags: int = 0) -> bytes:
    return record(b"M" + struct.pack(">BQ", flags, lsn) + b"p\x00" + struct.pack(">I", len(content)) + content, lsn)


@dataclass(frozen=True)
class Message:
    """A logical message, either outside of transactions or as a row of a transaction."""

    end_lsn: int
    content: bytes

    def encode(self, _described: set[int]) -> bytes:
        return message(self.end_lsn, self.content)


@dataclass(frozen=True)
class Transaction:
    """A transaction of inserts. ``rows`` has (relation id, value); a row with relation id 0 is a logical message."""

    end_lsn: int
    rows: Sequence[tuple[int, bytes]]

    def pieces(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield the records: (relation id, what describes it before its first use, a record). Without a relation the id is 0."""
        yield 0, b"", begin(self.end_lsn - 1, self.end_lsn)
        for relation_id, value in self.rows:
            if relation_id == 0:
                yield 0, b"", message(self.end_lsn - 1, value, flags=1)
                continue
            described = relation(relation_id)
            if relation_id % 2:
                described = type_record(100_000 + relation_id) + relation(relation_id, type_id=100_000 + relation_id)
            yield relation_id, described, insert(relation_id, value)
        yield 0, b"", commit(self.end_lsn - 1, self.end_lsn)

    def encode(self, described: set[int]) -> bytes:
        """Return the records. Like a server, describes a relation that is not in ``described`` before its first use."""
        parts = []
        for relation_id, description, rest in self.pieces():
            if relation_id and relation_id not in described:
                described.add(relation_id)
                parts.append(description)
            parts.append(rest)
        return b"".join(parts)


def encode_stream(transactions: Sequence[Transaction | Message]) -> bytes:
    """Return the bytes that a new connection sends for these transactions."""
    described: set[int] = set()
    return b"".join(transaction.encode(described) for transaction in transactions)


def decode_segment(data: bytes) -> list[Transaction | Message]:
    """Decode a segment on its own. Asserts that transactions are whole, and relations and types described before their use."""
    from cdcpipe.pipe.framing import RecordReader

    reader = RecordReader()
    reader.feed(data)
    transactions: list[Transaction | Message] = []
    rows: list[tuple[int, bytes]] | None = None
    relations: set[int] = set()
    types: set[int] = set()
    for _, body in reader:
        kind = body[:1]
        relation_id = int.from_bytes(body[1:5])
        if kind == b"B":
            assert rows is None
            rows = []
        elif kind == b"C":
            assert rows is not None
            transactions.append(Transaction(struct.unpack_from(">xBQQ", body)[2], tuple(rows)))
            rows = None
        elif kind == b"Y":
            types.add(relation_id)
        elif kind == b"R":
            type_id = struct.unpack(">I", body[-8:-4])[0]
            assert type_id < 16384 or type_id in types
            relations.add(relation_id)
        elif kind == b"I":
            assert rows is not None
            assert relation_id in relations
            rows.append((relation_id, body[13:]))
        elif kind == b"M":
            _, is_transactional, lsn = struct.unpack_from(">cBQ", body)
            assert is_transactional == (rows is not None)
            if rows is None:
                transactions.append(Message(lsn, body[16:]))
            else:
                rows.append((0, body[16:]))
        elif kind == b"T":
            count = relation_id
            assert set(struct.unpack_from(f">{count}I", body, 6)) <= relations
        else:
            raise AssertionError(kind)
    assert rows is None
    assert not reader.has_partial
    return transactions
