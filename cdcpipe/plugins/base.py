"""PostgreSQL's output plugin API, on the client.

On the server, an output plugin is a set of callbacks that take the parts of a transaction and write records. Here a plugin is a
subclass of `OutputPlugin` with the same callbacks, under the same names and in the same order, over the messages of a pgoutput
slot. `cdcpipe.plugins.renderer.Renderer` calls them. ``startup`` comes first, ``shutdown`` last. For each committed transaction::

    [filter_by_origin], begin, (change | truncate | message)*, commit

Between transactions ``message`` is called for logical messages that are not transactional. With pgoutput's option ``two_phase``, a
prepared transaction comes at its PREPARE, and its outcome later::

    [filter_by_origin], begin_prepare, (change | truncate | message)*, prepare  …  commit_prepared | rollback_prepared

With ``streaming``, a large transaction comes in blocks while it is in progress. Other transactions come between its blocks::

    [filter_by_origin], (stream_start, (stream_change | stream_truncate | stream_message)*, stream_stop | stream_abort)*,
    stream_commit | stream_abort | stream_prepare

``filter_by_origin`` is called once for each transaction with an origin. If it returns True, nothing else is called for the
transaction. ``relation`` and ``type`` are called at the stream's descriptions; PostgreSQL's plugins do not need them. Differences
to the server:

- A plugin writes all records of a transaction by the end of its last callback (``commit``, ``prepare``, ``stream_commit``). A
  transaction of which it has written nothing by then is one that the consumer does not need: the slot may move beyond it without
  the consumer. This goes for ``commit_prepared`` and ``rollback_prepared``, too.
- Since PostgreSQL 15 the server does not send a transaction without a published change. So there is no ``begin`` for it.
- There is no ``filter_prepare``: pgoutput itself follows the option ``two_phase``.
- Relations are as the publication shows them: with column lists, and before PostgreSQL 18 without generated columns. The only facts
  about a column are its name, type, type modifier, and whether it is part of the replica identity. `OutputPlugin.query` asks
  today's catalog for others. Its search path is empty, so a query names the schema of everything outside of pg_catalog.
- Values are text (`bytes`) from the type's output function, even if the server sends them in binary form. See
  `cdcpipe.pgoutput.messages` for NULL and values that were not sent.

Source: the manual, "Logical Decoding Output Plugins".
"""
# ruff: noqa: ARG002 - a callback that does nothing does not use its arguments

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.pgoutput.messages import Delete, Insert, Update
from cdcpipe.plugins.catalog import Catalog, Query

if TYPE_CHECKING:
    from cdcpipe.pgoutput.messages import LogicalMessage, Origin, Relation, Truncate, Type

__all__ = ["Change", "Handler", "Options", "OutputPlugin", "OutputWriter", "Query", "Transaction", "lacks_origins"]

Options: TypeAlias = Mapping[str, str | None]
"""Names and values as given with ``-o NAME=VALUE``; None for a name without a value."""

Change: TypeAlias = Insert | Update | Delete

Handler: TypeAlias = Callable[[int, bytes], object]
"""Renders one raw message that starts at a WAL position."""


@dataclass(slots=True)
class Transaction:
    """A transaction, like ReorderBufferTXN on the server. ``end_lsn`` is 0 until the commit."""

    xid: int
    first_lsn: int
    final_lsn: int
    end_lsn: int
    commit_time_us: int
    origin: Origin | None = None
    gid: str | None = None


class OutputWriter:
    """Takes a plugin's records. ``lsn`` goes into the record's header."""

    def __init__(self, write: Callable[[int, bytes], None], fallback: Handler) -> None:
        self.write = write
        """OutputPluginWrite: ``write(lsn, record)``."""
        self.fallback = fallback
        """For handlers: decode this message and call ``change``."""


class OutputPlugin:
    """The callbacks. A plugin overrides those for which it writes something."""

    name: ClassVar[str]

    pgoutput_options: Mapping[str, str] = {}
    """Options of pgoutput that the plugin needs for complete output, such as ``messages``.

    Leave ``proto_version`` out: cdcpipe chooses the lowest version that all options together need.
    """

    needs_origin: str | None = None
    """The option, if one is set, that needs the origin of every transaction.

    Of a transaction in progress the server sends only the origin of its first change, and the change to a catalog has none.
    """

    def __init__(self, options: Options, query: Query) -> None:
        """Take the options. Raises InvalidArgumentsError for an option that is unknown or not supported.

        There is no connection yet: keep ``query``, but do not call it before ``startup``.
        """
        self.options = options
        self.query = query
        self.catalog = Catalog(query)
        """Facts that the stream does not have. It gets each type before ``type`` is called."""

    def startup(self, output: OutputWriter) -> None:
        """Start: called once, before anything else. Gets the writer for records, and keeps it as ``self.output``."""
        self.output = output

    def shutdown(self) -> None:
        """End: called once, after the last message, even if the stream ends inside a transaction or with an error."""

    def filter_by_origin(self, origin: Origin) -> bool:
        """Decide about a transaction that was replayed from another server: True drops the whole transaction.

        Called before ``begin``, ``begin_prepare`` or the first ``stream_start``, only for a transaction with an origin. Gets the
        origin's name, and the LSN of the transaction's commit there.
        """
        return False

    def relation(self, relation: Relation) -> Mapping[bytes, Callable[[], Handler]]:
        """Take a relation's description, which applies from here on. Called before its first change, and when it may have changed.

        The result is only for speed: by the first eight bytes of a raw message (kind, relation id, kind of the first tuple, number
        of its columns) a function that makes a handler. Such a message then goes to the handler, which is made when it is first
        needed, instead of to ``change``. The handler must write exactly the same bytes as ``change``, and must pass any message
        that it does not understand to `OutputWriter.fallback`.
        """
        return {}

    def type(self, type_: Type) -> None:
        """Take a type that is not built in. Called before the relation that uses it."""

    def begin(self, txn: Transaction) -> None:
        """Begin a committed transaction: called before its first change.

        ``txn`` has its xid, position and time of its commit, and its origin; ``txn.end_lsn`` is not known before ``commit``. All
        callbacks up to ``commit`` get the same object.
        """

    def change(self, txn: Transaction, relation: Relation, change: Change, lsn: int) -> None:
        """Take an insert, update or delete of one row: called for each, in the transaction's order.

        Gets the relation as of the change, the message with the rows' values, and the position of the change in the WAL.
        """

    def truncate(self, txn: Transaction, relations: Sequence[Relation], change: Truncate, lsn: int) -> None:
        """Take a TRUNCATE: called once for each statement, with all published tables that it emptied."""

    def message(self, txn: Transaction | None, message: LogicalMessage, lsn: int) -> None:
        """Take a message of pg_logical_emit_message(): called for each, if pgoutput's option ``messages`` is set.

        A transactional message comes at its place in its transaction. For other messages ``txn`` is None: they come at the time
        when they are written, before the transaction that wrote them, even if that rolls back.
        """

    def commit(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        """End the transaction: called after its last change. ``txn.end_lsn`` is known now, and ``lsn`` is the same."""

    # Two-phase commit. A plugin without these callbacks cannot take prepared transactions.

    def begin_prepare(self, txn: Transaction) -> None:
        """Begin a transaction that comes at its PREPARE: called before its first change. ``prepare`` ends it.

        ``txn`` also has its gid, and position and time of the PREPARE instead of those of the commit.
        """
        raise self._unsupported("two_phase")

    def prepare(self, txn: Transaction, prepare_lsn: int, lsn: int) -> None:
        """End the transaction of ``begin_prepare``: called after its last change. It is prepared, but not committed."""
        raise self._unsupported("two_phase")

    def commit_prepared(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        """Take a COMMIT PREPARED, which may come in a later run than its PREPARE. There are no changes."""
        raise self._unsupported("two_phase")

    def rollback_prepared(self, txn: Transaction, prepare_end_lsn: int, prepare_time_us: int, lsn: int) -> None:
        """Take a ROLLBACK PREPARED, as ``commit_prepared``. Gets end and time of the PREPARE, which identify it."""
        raise self._unsupported("two_phase")

    # Transactions in progress. A plugin without these callbacks cannot take streamed transactions.

    def stream_start(self, txn: Transaction, lsn: int) -> None:
        """Begin a block of a transaction in progress: called before the block's first change.

        ``txn`` has its xid and origin. Positions and time of its commit are not known, and 0. In a transaction's first block the
        xid is new.
        """
        raise self._unsupported("streaming")

    def stream_stop(self, txn: Transaction, lsn: int) -> None:
        """End the block: called after its last change. Other blocks, and whole transactions, may come before its next block."""
        raise self._unsupported("streaming")

    def stream_change(self, txn: Transaction, relation: Relation, change: Change, lsn: int) -> None:
        """Take a change of one row in a block. ``change.xid`` is the id of its subtransaction."""
        raise self._unsupported("streaming")

    def stream_truncate(self, txn: Transaction, relations: Sequence[Relation], change: Truncate, lsn: int) -> None:
        """Take a TRUNCATE in a block."""
        raise self._unsupported("streaming")

    def stream_message(self, txn: Transaction, message: LogicalMessage, lsn: int) -> None:
        """Take a transactional message in a block."""
        raise self._unsupported("streaming")

    def stream_abort(self, txn: Transaction, subxid: int, lsn: int) -> None:
        """Undo a subtransaction and those inside it: called between blocks. If ``subxid`` equals ``txn.xid``, undo everything."""
        raise self._unsupported("streaming")

    def stream_prepare(self, txn: Transaction, prepare_lsn: int, lsn: int) -> None:
        """End the blocks at the PREPARE. ``commit_prepared`` or ``rollback_prepared`` follows."""
        raise self._unsupported("streaming")

    def stream_commit(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        """End the blocks at the commit: everything that was not undone is committed. Positions and time are known now."""
        raise self._unsupported("streaming")

    def check_callbacks(self, options: Iterable[str]) -> None:
        """Raise InvalidArgumentsError for an option of pgoutput for whose messages the plugin has no callbacks."""
        for option in options:
            callback = _CALLBACKS[option][0]
            if getattr(type(self), callback) is getattr(OutputPlugin, callback):
                raise self._unsupported(option)

    def _unsupported(self, option: str) -> InvalidArgumentsError:
        return InvalidArgumentsError(
            f"the output plugin {self.name} can't render {_CALLBACKS[option][1]}",
            hint=f"leave the option {option!r} out, or let cdcpipe assemble the transactions (--whole-transactions)",
        )


def lacks_origins(plugin: OutputPlugin, hint: str) -> InvalidArgumentsError:
    """Return the error for a plugin that needs the origin of every transaction, in a stream with transactions in progress."""
    return InvalidArgumentsError(
        f"with streaming, {plugin.name}'s option {plugin.needs_origin!r} can't be honoured: the server does not send the origin"
        " of a large transaction that begins with DDL",
        hint=hint,
    )


_CALLBACKS = {
    "two_phase": ("begin_prepare", "prepared transactions"),
    "streaming": ("stream_start", "transactions in progress"),
}
"""For options of pgoutput: the first callback that they need, and what they add to the stream."""
