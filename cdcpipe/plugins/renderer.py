"""Calls an output plugin's callbacks for raw pgoutput messages, in stream order, and passes on the plugin's records.

A relation's usual changes go to the plugin's handlers of raw messages, if there are any (`OutputPlugin.relation`). All other
messages are decoded. `cdcpipe.plugins.base` describes the order of the callbacks. A message out of place raises `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.binary import row_to_text
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
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
    Update,
)
from cdcpipe.pgoutput.relations import RelationCache
from cdcpipe.plugins.base import Change, Handler, OutputPlugin, OutputWriter, Transaction
from cdcpipe.types.binary.decoder import ValueDecoder

if TYPE_CHECKING:
    from cdcpipe.pgoutput.messages import Message

__all__ = ["Renderer"]

_CHANGE_KINDS = (b"I", b"U", b"D")


class _Handlers(dict[bytes, Handler]):
    """Handlers by a message's first eight bytes, with one handler for all other messages."""

    def __init__(self, other: Handler) -> None:
        super().__init__()
        self._other = other

    def __missing__(self, head: bytes) -> Handler:
        return self._other


class Renderer:
    """Drives a plugin with raw pgoutput messages, in stream order.

    It calls ``write(lsn, record)`` with the plugin's records. ``streaming_parallel`` as in `cdcpipe.pgoutput.decode`.
    """

    def __init__(
        self, plugin: OutputPlugin, write: Callable[[int, bytes], None], *, streaming_parallel: bool | None = False
    ) -> None:
        self._plugin = plugin
        self._streaming_parallel = streaming_parallel
        self._relations = RelationCache()
        self._types = ValueDecoder(plugin.catalog.binary_form)
        self._txn: Transaction | None = None
        self._has_begun = False
        """False between Begin and the next message, because that may be the transaction's Origin."""
        self._is_filtered = False
        self._is_preparing = False
        self._stream_txn: Transaction | None = None
        self._stream_origins: dict[int, Origin | None] = {}
        """The origins of transactions in progress, by xid. The first block has it; it applies to all later blocks."""
        self._held_back: set[int | str] = set()
        """Xids of transactions in progress, and gids of prepared ones, that are dropped because of their origin."""
        self._handlers = _Handlers(self._feed_unusual)
        self._makers: dict[bytes, Callable[[], Handler]] = {}
        self._heads: dict[int, list[bytes]] = {}
        # Outside of transactions, and inside dropped ones, no message goes to a handler.
        self._no_handlers = _Handlers(self._feed_unusual)
        self._active = self._no_handlers
        plugin.startup(OutputWriter(write, self._feed_decoded))

    def feed(self, wal_start: int, data: bytes) -> None:
        """Render one message. ``data`` is exactly one message; ``wal_start`` comes from its WALData."""
        try:
            self._active[data[:8]](wal_start, data)
        except ProtocolError as ex:
            # Relation and Type have no position. Then use the commit of the transaction, which is near.
            ex.locate(wal_start or (self._txn.final_lsn if self._txn else 0))
            raise

    def close(self) -> None:
        """Tell the plugin that the stream has ended."""
        self._plugin.shutdown()

    def _feed_unusual(self, wal_start: int, data: bytes) -> None:
        """Find or make the handler, for the first change of a transaction or of a relation."""
        if self._txn is not None and data[:1] in _CHANGE_KINDS:
            self._begin(self._txn)
            head = data[:8]
            if head in self._makers and self._active is self._handlers:
                self._handlers[head] = self._makers.pop(head)()
            if head in self._active:
                self._active[head](wal_start, data)
                return
        self._feed_decoded(wal_start, data)

    def _feed_decoded(self, lsn: int, data: bytes) -> None:
        message = decode(data, in_stream=self._stream_txn is not None, streaming_parallel=self._streaming_parallel)
        if self._stream_txn is not None:
            self._streamed(self._stream_txn, message, lsn)
            return
        match message:
            case Insert() | Update() | Delete():
                relation = self._relations.relation(message.relation_id)
                self._check(relation, message)
                txn = self._transaction(message)
                if not self._is_filtered:
                    self._plugin.change(txn, relation, message, lsn)
            case Begin():
                self._open(message, Transaction(message.xid, lsn, message.final_lsn, 0, message.commit_time_us))
            case Origin():
                self._origin(message, lsn)
            case Commit():
                txn = self._transaction(message)
                txn.end_lsn = message.end_lsn
                self._close()
                if not self._is_filtered:
                    self._plugin.commit(txn, message.commit_lsn, lsn)
            case Relation() | Type():
                self._describe(message)
            case Truncate():
                relations = [self._relations.relation(relation_id) for relation_id in message.relation_ids]
                txn = self._transaction(message)
                if not self._is_filtered:
                    self._plugin.truncate(txn, relations, message, lsn)
            case LogicalMessage():
                if not message.is_transactional:
                    self._plugin.message(None, message, lsn)
                    return
                txn = self._transaction(message)
                if not self._is_filtered:
                    self._plugin.message(txn, message, lsn)
            case _:
                self._rare(message, lsn)

    def _rare(self, message: Message, lsn: int) -> None:
        """Take a message that exists only with streaming or two-phase commit."""
        match message:
            case StreamStart():
                if self._txn is not None:
                    raise _out_of_place(message, "inside a transaction")
                self._stream_txn = Transaction(message.xid, lsn, 0, 0, 0)
                self._has_begun = False
            case StreamAbort():
                txn = Transaction(message.xid, lsn, 0, 0, 0, self._stream_origins.get(message.xid))
                is_filtered = message.xid in self._held_back
                if message.subxid == message.xid:
                    self._end_stream(message.xid)
                if not is_filtered:
                    self._plugin.stream_abort(txn, message.subxid, lsn)
            case StreamCommit():
                txn = Transaction(message.xid, lsn, message.commit_lsn, message.end_lsn, message.commit_time_us)
                txn.origin, is_filtered = self._end_stream(message.xid)
                if not is_filtered:
                    self._plugin.stream_commit(txn, message.commit_lsn, lsn)
            case StreamPrepare():
                txn = _prepared(message, message.prepare_lsn, lsn)
                txn.origin, is_filtered = self._end_stream(message.xid)
                if is_filtered:
                    self._held_back.add(message.gid)
                else:
                    self._plugin.stream_prepare(txn, message.prepare_lsn, lsn)
            case BeginPrepare():
                txn = Transaction(message.xid, lsn, message.prepare_lsn, 0, message.prepare_time_us, gid=message.gid)
                self._open(message, txn)
                self._is_preparing = True
            case Prepare():
                txn = self._transaction(message)
                txn.end_lsn = message.end_lsn
                self._close()
                if self._is_filtered:
                    self._held_back.add(message.gid)
                else:
                    self._plugin.prepare(txn, message.prepare_lsn, lsn)
            case CommitPrepared() | RollbackPrepared() if message.gid in self._held_back:
                self._held_back.remove(message.gid)
            case CommitPrepared():
                self._plugin.commit_prepared(_prepared(message, message.commit_lsn, lsn), message.commit_lsn, lsn)
            case RollbackPrepared():
                txn = Transaction(message.xid, lsn, 0, message.rollback_end_lsn, message.rollback_time_us, gid=message.gid)
                self._plugin.rollback_prepared(txn, message.prepare_end_lsn, message.prepare_time_us, lsn)
            case _:
                raise _out_of_place(message, "outside a stream block")

    def _streamed(self, txn: Transaction, message: Message, lsn: int) -> None:
        if isinstance(message, Origin):
            if self._has_begun:
                raise _out_of_place(message, "not after StreamStart")
            txn.origin = message
            txn.first_lsn = txn.first_lsn or lsn
            return
        if not self._has_begun:
            self._begin_block(txn)
        match message:
            case Insert() | Update() | Delete():
                relation = self._relations.relation(message.relation_id)
                self._check(relation, message)
                if not self._is_filtered:
                    self._plugin.stream_change(txn, relation, message, lsn)
            case Truncate():
                relations = [self._relations.relation(relation_id) for relation_id in message.relation_ids]
                if not self._is_filtered:
                    self._plugin.stream_truncate(txn, relations, message, lsn)
            case LogicalMessage():
                if not self._is_filtered:
                    self._plugin.stream_message(txn, message, lsn)
            case Relation() | Type():
                self._describe(message)
            case StreamStop():
                self._stream_txn = None
                if not self._is_filtered:
                    self._plugin.stream_stop(txn, lsn)
            case _:
                raise _out_of_place(message, "inside a stream block")

    def _begin_block(self, txn: Transaction) -> None:
        """Call ``stream_start``, after the transaction's origin is known; only its first block has it."""
        self._has_begun = True
        if txn.xid not in self._stream_origins:
            self._stream_origins[txn.xid] = txn.origin
            if txn.origin is not None and self._plugin.filter_by_origin(txn.origin):
                self._held_back.add(txn.xid)
        txn.origin = self._stream_origins[txn.xid]
        self._is_filtered = txn.xid in self._held_back
        if not self._is_filtered:
            self._plugin.stream_start(txn, txn.first_lsn)

    def _end_stream(self, xid: int) -> tuple[Origin | None, bool]:
        """Forget a transaction in progress. Returns its origin, and whether it was dropped because of it."""
        is_filtered = xid in self._held_back
        self._held_back.discard(xid)
        return self._stream_origins.pop(xid, None), is_filtered

    def _check(self, relation: Relation, change: Change) -> None:
        """Check that a change fits its relation, and replace values in binary form by text."""
        _check_columns(relation, change)
        for name in ("key", "old", "new"):
            row = getattr(change, name, None)
            if row is not None:
                setattr(change, name, row_to_text(relation, row, self._types))

    def _describe(self, message: Relation | Type) -> None:
        if isinstance(message, Type):
            self._plugin.catalog.describe(message)
            self._types.forget()
            self._plugin.type(message)
            return
        self._relations.add(message)
        makers = self._plugin.relation(message)
        for head in self._heads.pop(message.relation_id, ()):
            self._makers.pop(head, None)
            self._handlers.pop(head, None)
        self._makers.update(makers)
        self._heads[message.relation_id] = list(makers)

    def _open(self, message: Message, txn: Transaction) -> None:
        if self._txn is not None:
            raise _out_of_place(message, "inside a transaction")
        self._txn = txn
        self._has_begun = False
        self._is_filtered = False
        self._is_preparing = False

    def _origin(self, message: Origin, lsn: int) -> None:
        if self._txn is None or self._has_begun:
            raise _out_of_place(message, "not after Begin")
        self._txn.origin = message
        # For a transaction with an origin, Begin has no position.
        self._txn.first_lsn = self._txn.first_lsn or lsn

    def _transaction(self, message: Message) -> Transaction:
        """Return the open transaction. Calls its ``begin`` at the first message after Begin and Origin."""
        txn = self._txn
        if txn is None:
            raise _out_of_place(message, "outside a transaction")
        self._begin(txn)
        return txn

    def _begin(self, txn: Transaction) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self._is_filtered = txn.origin is not None and self._plugin.filter_by_origin(txn.origin)
        if not self._is_filtered:
            if self._is_preparing:
                self._plugin.begin_prepare(txn)
            else:
                self._plugin.begin(txn)
            self._active = self._handlers

    def _close(self) -> None:
        self._txn = None
        self._has_begun = False
        self._active = self._no_handlers


def _prepared(message: CommitPrepared | StreamPrepare, final_lsn: int, lsn: int) -> Transaction:
    time_us = message.commit_time_us if isinstance(message, CommitPrepared) else message.prepare_time_us
    return Transaction(message.xid, lsn, final_lsn, message.end_lsn, time_us, gid=message.gid)


def _check_columns(relation: Relation, change: Change) -> None:
    """Raise ProtocolError if the numbers of values and columns differ. They belong together by position."""
    rows = [None if isinstance(change, Delete) else change.new]
    if not isinstance(change, Insert):
        rows += [change.key, change.old]
    for row in rows:
        if row is not None and len(row) != len(relation.columns):
            msg = (
                f"{type(change).__name__} for relation {relation.relation_id} ({relation.namespace}.{relation.name}) "
                f"has {len(row)} values, the relation {len(relation.columns)} columns"
            )
            raise ProtocolError(msg)


def _out_of_place(message: Message, where: str) -> ProtocolError:
    return ProtocolError(f"the server sent a {type(message).__name__} message {where}")
