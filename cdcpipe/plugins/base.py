"""PostgreSQL's output plugin API, on our side of the wire.

A logical decoding output plugin on the server is a set of callbacks that are handed transactions and write records. Here
a plugin is a subclass of `OutputPlugin` with the same callbacks under the same names, called in the same order, over the
messages of a pgoutput slot. `cdcpipe.plugins.renderer.Renderer` does the calling. ``startup`` comes first, ``shutdown`` last.
For each committed transaction::

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

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.pgoutput.messages import Delete, Insert, Update
from cdcpipe.plugins.catalog import Catalog, Query

if TYPE_CHECKING:
    from cdcpipe.pgoutput.messages import LogicalMessage, Origin, Relation, Truncate, Type

__all__ = ["Change", "Handler", "Options", "OutputPlugin", "OutputWriter", "Query", "Transaction"]

Options: TypeAlias = Mapping[str, str | None]
"""Names and values as given with ``-o NAME=VALUE``; None for a name without a value."""

Change: TypeAlias = Insert | Update | Delete

Handler: TypeAlias = Callable[[int, bytes], object]
"""Renders one raw message that starts at a WAL position."""


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
