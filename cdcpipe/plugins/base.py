"""PostgreSQL's output plugin API, on our side of the wire.

A logical decoding output plugin on the server is a set of callbacks that are handed transactions and write records. Here
a plugin is a subclass of `OutputPlugin` with the same callbacks under the same names, called in the same order, over the
messages of a pgoutput slot; `Renderer` does the calling. ``startup`` comes first, ``shutdown`` last. For each committed
transaction::

    [filter_by_origin], begin, (change | truncate | message)*, commit

and between transactions ``message`` for logical messages that are not transactional. With pgoutput's option ``two_phase``, a
prepared transaction comes at its PREPARE, and later what became of it::

    [filter_by_origin], begin_prepare, (change | truncate | message)*, prepare  …  commit_prepared | rollback_prepared

With ``streaming``, a large one comes in blocks while it is in progress, and between the blocks come other transactions::

    [filter_by_origin], (stream_start, (stream_change | stream_truncate | stream_message)*, stream_stop | stream_abort)*,
    stream_commit | stream_abort | stream_prepare

``filter_by_origin`` is asked once for each transaction that has an origin; if it says so, nothing else is called for it.
``relation`` and ``type``, which PostgreSQL's plugins don't need, come where descriptions do. What is different from the server:

- A transaction without a published change is never sent (since PostgreSQL 15), so there is no ``begin`` for it.
- There is no ``filter_prepare``: the option ``two_phase`` decides, and pgoutput has acted on it already.
- Relations are as the publication shows them: column lists, no generated columns before PostgreSQL 18, no catalog facts
  beyond name, type, type modifier and "part of the replica identity". `OutputPlugin.query` asks the catalog, as it is now.
- Values come as text (`bytes`), as the type's output function gives it, also when the server sends them in binary form; see
  `cdcpipe.pgoutput.messages` for NULL and values that were not sent.

Source: the manual, "Logical Decoding Output Plugins".
"""
# ruff: noqa: ARG002 - a callback that does nothing does not use what it is given

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from cdcpipe.errors import InvalidArgumentsError, ProtocolError
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
from cdcpipe.plugins.catalog import Catalog, Query
from cdcpipe.types.binary.decoder import ValueDecoder

if TYPE_CHECKING:
    from cdcpipe.pgoutput.messages import Message

__all__ = ["Change", "Handler", "Options", "OutputPlugin", "OutputWriter", "Query", "Renderer", "Transaction"]

Options: TypeAlias = Mapping[str, str | None]
"""Names and values as given with ``-o NAME=VALUE``; None for a name without a value."""

Change: TypeAlias = Insert | Update | Delete

Handler: TypeAlias = Callable[[int, bytes], object]
"""Renders one raw message that starts at a WAL position."""

_CHANGE_KINDS = (b"I", b"U", b"D")


@dataclass(slots=True)
class Transaction:
    """What the server's plugins know as ReorderBufferTXN; ``end_lsn`` is 0 until the commit."""

    xid: int
    first_lsn: int
    final_lsn: int
    end_lsn: int
    commit_time_us: int
    origin: Origin | None = None
    gid: str | None = None


class OutputWriter:
    """What a plugin writes its records to; ``lsn`` goes into the record's header."""

    def __init__(self, write: Callable[[int, bytes], None], fallback: Handler) -> None:
        self.write = write
        """OutputPluginWrite: ``write(lsn, record)``."""
        self.fallback = fallback
        """For handlers: render this message by decoding it and calling ``change``."""


class OutputPlugin:
    """The callbacks. A plugin overrides the ones that it has something to write for."""

    name: ClassVar[str]

    pgoutput_options: Mapping[str, str] = {}
    """Options of pgoutput without which the plugin's output would not be whole, such as ``messages``.

    Leave ``proto_version`` out: the lowest that serves all options together is chosen.
    """

    def __init__(self, options: Options, query: Query) -> None:
        """Take the options, and raise InvalidArgumentsError for any that is unknown or can't be honoured.

        Nothing is connected to yet: ``query`` may be kept, but is not to be called before ``startup``.
        """
        self.options = options
        self.query = query
        self.catalog = Catalog(query)
        """What the stream does not say; it has been told of a type before ``type`` is called."""

    def startup(self, output: OutputWriter) -> None:
        """Start: called once, before anything else. Gets where the records go, which is kept as ``self.output``."""
        self.output = output

    def shutdown(self) -> None:
        """End: called once, after the last message, also when the stream ends inside a transaction or with an error."""

    def filter_by_origin(self, origin: Origin) -> bool:
        """Decide about a transaction that was replayed from elsewhere: True drops all of it.

        Called before ``begin``, ``begin_prepare`` or the first ``stream_start``, only for a transaction that has an origin. Gets
        the origin's name, and where the transaction's commit is there.
        """
        return False

    def relation(self, relation: Relation) -> Mapping[bytes, Callable[[], Handler]]:
        """Learn how a relation looks from here on; called before its first change, and whenever it may have changed.

        What is returned is for speed only: makers of handlers of raw messages by their first eight bytes (kind,
        relation id, kind of the first tuple, number of its columns). A message with these first bytes then goes to the
        handler, made when it is first needed, instead of to ``change``; it must write the very same bytes, and hand what
        it does not understand to `OutputWriter.fallback`.
        """
        return {}

    def type(self, type_: Type) -> None:
        """Learn about a type that is not built in; called before the relation that has it."""

    def begin(self, txn: Transaction) -> None:
        """Begin a transaction: called before its first change. All that is in it is committed.

        Gets its xid, the position and the time of its commit, and its origin; ``txn.end_lsn`` is not known before ``commit``, which
        gets the same object, as all that comes between them does.
        """

    def change(self, txn: Transaction, relation: Relation, change: Change, lsn: int) -> None:
        """Take one row's insert, update or delete: called for each, in the order in which the transaction made them.

        Gets the relation as it was then, the message with the rows' values, and where the change is in WAL.
        """

    def truncate(self, txn: Transaction, relations: Sequence[Relation], change: Truncate, lsn: int) -> None:
        """Take a TRUNCATE: called once for each statement. Gets all published tables that it emptied."""

    def message(self, txn: Transaction | None, message: LogicalMessage, lsn: int) -> None:
        """Take what pg_logical_emit_message() wrote: called for each, if pgoutput's option ``messages`` is set.

        A transactional one comes in its place within its transaction. For others ``txn`` is None: they come when they are written,
        before the transaction that wrote them, and also if that is rolled back.
        """

    def commit(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        """End the transaction: called after its last change. ``txn.end_lsn`` is known now; ``lsn``, the header's, is the same."""

    # Two-phase commit. A plugin that does not override them can't be given prepared transactions.

    def begin_prepare(self, txn: Transaction) -> None:
        """Begin a transaction that comes at its PREPARE: called before its first change; ``prepare`` follows.

        Gets its gid as well, and the position and time of its PREPARE where ``begin`` has those of the commit.
        """
        raise self._unsupported("prepared transactions", "two_phase")

    def prepare(self, txn: Transaction, prepare_lsn: int, lsn: int) -> None:
        """End what ``begin_prepare`` began: called after the last change. The transaction is prepared, not committed."""
        raise self._unsupported("prepared transactions", "two_phase")

    def commit_prepared(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        """Take a COMMIT PREPARED: called when it is committed, maybe in a later run than its PREPARE. Gets no changes."""
        raise self._unsupported("prepared transactions", "two_phase")

    def rollback_prepared(self, txn: Transaction, prepare_end_lsn: int, prepare_time_us: int, lsn: int) -> None:
        """Take a ROLLBACK PREPARED: called as ``commit_prepared`` is. Gets end and time of the PREPARE, to tell it by."""
        raise self._unsupported("prepared transactions", "two_phase")

    # Transactions in progress. A plugin that does not override them can't be given streamed transactions.

    def stream_start(self, txn: Transaction, lsn: int) -> None:
        """Begin a block of a transaction in progress: called before the block's first change.

        Gets its xid and origin; positions and time of its commit are not known, and 0. A transaction's first block is told by its
        xid, which was not there before.
        """
        raise self._unsupported("transactions in progress", "streaming")

    def stream_stop(self, txn: Transaction, lsn: int) -> None:
        """End the block: called after its last change. Others' blocks and whole transactions may come before the next one."""
        raise self._unsupported("transactions in progress", "streaming")

    def stream_change(self, txn: Transaction, relation: Relation, change: Change, lsn: int) -> None:
        """Take one row's change: called for each in a block. ``change.xid`` is the id of its subtransaction."""
        raise self._unsupported("transactions in progress", "streaming")

    def stream_truncate(self, txn: Transaction, relations: Sequence[Relation], change: Truncate, lsn: int) -> None:
        """Take a TRUNCATE: called for each in a block."""
        raise self._unsupported("transactions in progress", "streaming")

    def stream_message(self, txn: Transaction, message: LogicalMessage, lsn: int) -> None:
        """Take a transactional message: called for each in a block."""
        raise self._unsupported("transactions in progress", "streaming")

    def stream_abort(self, txn: Transaction, subxid: int, lsn: int) -> None:
        """Undo a subtransaction and those in it: called between blocks. All is undone if ``subxid`` is the transaction's own id."""
        raise self._unsupported("transactions in progress", "streaming")

    def stream_prepare(self, txn: Transaction, prepare_lsn: int, lsn: int) -> None:
        """End the blocks: called after the last one, at the PREPARE; ``commit_prepared`` or ``rollback_prepared`` follows."""
        raise self._unsupported("transactions in progress", "streaming")

    def stream_commit(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        """End the blocks: called after the last one. What was not undone is committed; positions and time are known now."""
        raise self._unsupported("transactions in progress", "streaming")

    def check_callbacks(self, options: Iterable[str]) -> None:
        """Raise InvalidArgumentsError for an option of pgoutput that brings what the plugin has no callbacks for."""
        for option in options:
            callback, what = _CALLBACKS[option]
            if getattr(type(self), callback) is getattr(OutputPlugin, callback):
                raise self._unsupported(what, option)

    def _unsupported(self, what: str, option: str) -> InvalidArgumentsError:
        return InvalidArgumentsError(
            f"the output plugin {self.name} can't render {what}",
            hint=f"leave the option {option!r} out, or have the transactions put together (--whole-transactions)",
        )


_CALLBACKS = {
    "two_phase": ("begin_prepare", "prepared transactions"),
    "streaming": ("stream_start", "transactions in progress"),
}
"""Options of pgoutput: the first of the callbacks that they take, and what they bring."""


class _Handlers(dict[bytes, Handler]):
    """Handlers by a message's first eight bytes, and one for all others."""

    def __init__(self, other: Handler) -> None:
        super().__init__()
        self._other = other

    def __missing__(self, head: bytes) -> Handler:
        return self._other


class Renderer:
    """Drives a plugin with raw pgoutput messages, in stream order.

    ``write(lsn, record)`` gets what the plugin writes. ``streaming_parallel`` as in `cdcpipe.pgoutput.decode`.
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
        """False between Begin and what follows it: the transaction's origin comes in a message of its own."""
        self._is_filtered = False
        self._is_preparing = False
        self._stream_txn: Transaction | None = None
        self._stream_origins: dict[int, Origin | None] = {}
        """Of transactions in progress, by xid: their first block tells it, and it holds for all that follows."""
        self._held_back: set[int | str] = set()
        """Xids of transactions in progress, and gids of prepared ones, that are dropped for their origin."""
        self._handlers = _Handlers(self._feed_unusual)
        self._makers: dict[bytes, Callable[[], Handler]] = {}
        self._heads: dict[int, list[bytes]] = {}
        # Outside transactions, and inside those that are dropped, no message goes to a handler.
        self._no_handlers = _Handlers(self._feed_unusual)
        self._active = self._no_handlers
        plugin.startup(OutputWriter(write, self._feed_decoded))

    def feed(self, wal_start: int, data: bytes) -> None:
        """Render one message; ``data`` is exactly one, ``wal_start`` is what its WALData said."""
        try:
            self._active[data[:8]](wal_start, data)
        except ProtocolError as ex:
            # Relation and Type come without a position; the transaction's end is near.
            ex.locate(wal_start or (self._txn.final_lsn if self._txn else 0))
            raise

    def close(self) -> None:
        """Tell the plugin that the stream has ended."""
        self._plugin.shutdown()

    def _feed_unusual(self, wal_start: int, data: bytes) -> None:
        """Find or make the handler after all: for a transaction's first change, and for a relation's."""
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
        """Take what comes with streaming and two-phase commit only."""
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
        """Call ``stream_start``, once it is known where the transaction is from; only its first block says so."""
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
        """Forget a transaction in progress; return its origin, and whether it is dropped for that."""
        is_filtered = xid in self._held_back
        self._held_back.discard(xid)
        return self._stream_origins.pop(xid, None), is_filtered

    def _check(self, relation: Relation, change: Change) -> None:
        """Check that a change fits its relation, and put text in place of values in binary form."""
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
        # With an origin, Begin comes without a position of its own.
        self._txn.first_lsn = self._txn.first_lsn or lsn

    def _transaction(self, message: Message) -> Transaction:
        """Return the open transaction, begun: what comes after Begin and Origin says that there is no more to know."""
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
    """Compare the number of values with the number of columns: they belong together by position alone."""
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
