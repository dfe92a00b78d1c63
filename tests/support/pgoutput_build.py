"""Encodes messages as pgoutput's bytes: the inverse of ``cdcpipe.pgoutput.decode``."""

from __future__ import annotations

import struct

from hypothesis import strategies as st

from cdcpipe.pgoutput.messages import (
    UNCHANGED_TOAST,
    Begin,
    BeginPrepare,
    Binary,
    Column,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    Row,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)


def build(message: Message) -> bytes:
    """Return the wire form of a message. The xid of a change is written unless it is None."""
    match message:
        case Begin(final_lsn, time_us, xid):
            return b"B" + struct.pack(">QqI", final_lsn, time_us, xid)
        case Commit(flags, commit_lsn, end_lsn, time_us):
            return b"C" + struct.pack(">BQQq", flags, commit_lsn, end_lsn, time_us)
        case Origin(lsn, name):
            return b"O" + struct.pack(">Q", lsn) + _string(name)
        case Relation(xid, relation_id, namespace, name, identity, columns):
            parts = [b"R", _xid(xid), struct.pack(">I", relation_id), _namespace(namespace), _string(name)]
            parts.append(identity.encode() + struct.pack(">H", len(columns)))
            parts += [bytes([c.flags]) + _string(c.name) + struct.pack(">Ii", c.type_id, c.type_modifier) for c in columns]
            return b"".join(parts)
        case Type(xid, type_id, namespace, name):
            return b"Y" + _xid(xid) + struct.pack(">I", type_id) + _namespace(namespace) + _string(name)
        case Insert(xid, relation_id, new):
            return b"I" + _xid(xid) + struct.pack(">I", relation_id) + b"N" + build_row(new)
        case Update(xid, relation_id, key, old, new):
            parts = [b"U", _xid(xid), struct.pack(">I", relation_id)]
            if key is not None:
                parts.append(b"K" + build_row(key))
            if old is not None:
                parts.append(b"O" + build_row(old))
            return b"".join(parts) + b"N" + build_row(new)
        case Delete(xid, relation_id, key, old):
            row = b"O" + build_row(old) if key is None else b"K" + build_row(key)
            return b"D" + _xid(xid) + struct.pack(">I", relation_id) + row
        case Truncate(xid, flags, relation_ids):
            return (
                b"T"
                + _xid(xid)
                + struct.pack(">IB", len(relation_ids), flags)
                + struct.pack(f">{len(relation_ids)}I", *relation_ids)
            )
        case LogicalMessage(xid, flags, lsn, prefix, content):
            return b"M" + _xid(xid) + struct.pack(">BQ", flags, lsn) + _string(prefix) + struct.pack(">I", len(content)) + content
        case StreamStart(xid, first_segment):
            return b"S" + struct.pack(">I?", xid, first_segment)
        case StreamStop():
            return b"E"
        case StreamCommit(xid, flags, commit_lsn, end_lsn, time_us):
            return b"c" + struct.pack(">IBQQq", xid, flags, commit_lsn, end_lsn, time_us)
        case StreamAbort(xid, subxid, None, None):
            return b"A" + struct.pack(">II", xid, subxid)
        case StreamAbort(xid, subxid, abort_lsn, abort_time_us):
            return b"A" + struct.pack(">IIQq", xid, subxid, abort_lsn, abort_time_us)
        case BeginPrepare(prepare_lsn, end_lsn, time_us, xid, gid):
            return b"b" + struct.pack(">QQqI", prepare_lsn, end_lsn, time_us, xid) + _string(gid)
        case Prepare(flags, lsn, end_lsn, time_us, xid, gid):
            return b"P" + struct.pack(">BQQqI", flags, lsn, end_lsn, time_us, xid) + _string(gid)
        case CommitPrepared(flags, lsn, end_lsn, time_us, xid, gid):
            return b"K" + struct.pack(">BQQqI", flags, lsn, end_lsn, time_us, xid) + _string(gid)
        case StreamPrepare(flags, lsn, end_lsn, time_us, xid, gid):
            return b"p" + struct.pack(">BQQqI", flags, lsn, end_lsn, time_us, xid) + _string(gid)
        case RollbackPrepared(flags, prepare_end_lsn, rollback_end_lsn, prepare_time_us, rollback_time_us, xid, gid):
            fields = (flags, prepare_end_lsn, rollback_end_lsn, prepare_time_us, rollback_time_us, xid)
            return b"r" + struct.pack(">BQQqqI", *fields) + _string(gid)


def build_row(row: Row | None) -> bytes:
    """Return the TupleData of a row."""
    assert row is not None
    parts = [struct.pack(">H", len(row))]
    for value in row:
        if value is None:
            parts.append(b"n")
        elif value is UNCHANGED_TOAST:
            parts.append(b"u")
        else:
            assert isinstance(value, bytes)
            parts.append((b"b" if isinstance(value, Binary) else b"t") + struct.pack(">I", len(value)) + value)
    return b"".join(parts)


def _xid(xid: int | None) -> bytes:
    return b"" if xid is None else struct.pack(">I", xid)


def _string(text: str) -> bytes:
    return text.encode() + b"\0"


def _namespace(namespace: str) -> bytes:
    return _string("" if namespace == "pg_catalog" else namespace)


u8 = st.integers(0, 0xFF)
u32 = st.integers(0, 0xFFFFFFFF)
lsns = st.integers(0, 0xFFFFFFFFFFFFFFFF)
times = st.integers(-(1 << 63), (1 << 63) - 1)
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
values = st.one_of(st.none(), st.just(UNCHANGED_TOAST), st.binary(max_size=300), st.binary(max_size=20).map(Binary))
rows = st.lists(values, max_size=12).map(tuple)
columns = st.builds(Column, st.integers(0, 1), names, u32, st.integers(-(1 << 31), (1 << 31) - 1))


def changes(xid: st.SearchStrategy[int | None]) -> st.SearchStrategy[Message]:
    """Return a strategy for the messages that have an xid inside a stream block."""
    return st.one_of(
        st.builds(Relation, xid, u32, names, names, st.sampled_from("dnfi"), st.lists(columns, max_size=12).map(tuple)),
        st.builds(Type, xid, u32, names, names),
        st.builds(Insert, xid, u32, rows),
        st.builds(Update, xid, u32, st.none(), st.none() | rows, rows),
        st.builds(Update, xid, u32, rows, st.none(), rows),
        st.builds(Delete, xid, u32, rows, st.none()),
        st.builds(Delete, xid, u32, st.none(), rows),
        st.builds(Truncate, xid, u8, st.lists(u32, max_size=5).map(tuple)),
        st.builds(LogicalMessage, xid, u8, lsns, names, st.binary(max_size=300)),
    )


_no_flags = st.just(0)
controls: st.SearchStrategy[Message] = st.one_of(
    st.builds(Begin, lsns, times, u32),
    st.builds(Commit, _no_flags, lsns, lsns, times),
    st.builds(Origin, lsns, names),
    st.builds(StreamStart, u32, st.booleans()),
    st.builds(StreamStop),
    st.builds(StreamCommit, u32, _no_flags, lsns, lsns, times),
    st.builds(BeginPrepare, lsns, lsns, times, u32, names),
    st.builds(Prepare, _no_flags, lsns, lsns, times, u32, names),
    st.builds(CommitPrepared, _no_flags, lsns, lsns, times, u32, names),
    st.builds(StreamPrepare, _no_flags, lsns, lsns, times, u32, names),
    st.builds(RollbackPrepared, _no_flags, lsns, lsns, times, times, u32, names),
)
