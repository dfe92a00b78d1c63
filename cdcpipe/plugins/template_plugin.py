"""The base of plugins that render each change by a template: for each kind of change a list of bytes and places for values.

A plugin returns what it has to know about a relation (`TemplatePlugin.describe`), and a template for each kind of change
(`TemplatePlugin.template`). This module renders the rows: with compiled functions if possible, else with the same template from the
decoded message. See `cdcpipe.plugins.row_compiler`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Generic, TypeAlias, TypeVar

from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, Delete, Insert
from cdcpipe.plugins.base import OutputPlugin
from cdcpipe.plugins.row_compiler import compile_row, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cdcpipe.pgoutput.messages import Relation, Row
    from cdcpipe.plugins.base import Change, Handler, Options, OutputWriter, Query, Transaction
    from cdcpipe.plugins.row_compiler import Template

__all__ = ["Absent", "TemplatePlugin"]

Absent: TypeAlias = "frozenset[tuple[int, int]]"
"""Unsent values, and NULLs if these are left out: number of the tuple in the message, number of the column.

A NULL in a key tuple is always one of them: the columns of the partition's key have no NULL, and the server sends NULL for others.
The relation's flags do not tell the key: with publish_via_partition_root they are the root's, and the key is the partition's.
"""

T = TypeVar("T")

_AT_MOST_TEMPLATES: Final = 100


class TemplatePlugin(OutputPlugin, Generic[T]):
    """An output plugin with templates. ``T`` is the type of the facts that it keeps about a relation."""

    leaves_out_null_in_old: ClassVar[bool] = False
    """Whether a NULL in a whole old row is `Absent`, too."""

    def __init__(self, options: Options, query: Query) -> None:
        super().__init__(options, query)
        self._tables: dict[int, T] = {}
        # Templates for rows that the compiled functions don't take: by relation, then by kind of change and absent values.
        self._templates: dict[int, dict[object, Template]] = {}
        self._names: dict[str, object] = {}
        self._emit = "write(wal_start, {record})"

    def describe(self, relation: Relation) -> T:
        """Return the facts about the relation as it is now."""
        raise NotImplementedError

    def renders(self, table: T, kind: str) -> bool:
        """Tell whether changes of this kind (I, U or D) are written."""
        del table, kind
        return True

    def template(self, table: T, kind: str, first: str, absent: Absent) -> Template:
        """Return the template for a kind of change. ``first`` is the kind of the message's first tuple: N, K or O."""
        raise NotImplementedError

    def add(self, lsn: int, record: bytes) -> None:
        """Take a record that was not rendered by a compiled function."""
        self.output.write(lsn, record)

    def emit(self, table: T) -> str:
        """Return the statement with which compiled functions pass on ``{record}``; it does the same as `add`."""
        del table
        return self._emit

    def emit_long(self, table: T) -> str:
        """Return the statement for rows whose values may be of any length; by default that of `emit`."""
        return self.emit(table)

    def startup(self, output: OutputWriter) -> None:
        """Start."""
        super().startup(output)
        self._names["write"] = output.write

    def relation(self, relation: Relation) -> Mapping[bytes, Callable[[], Handler]]:
        """Return a maker of a compiled function for each kind of change."""
        table = self._tables[relation.relation_id] = self.describe(relation)
        self._templates[relation.relation_id] = {}
        relation_id = relation.relation_id.to_bytes(4, "big")
        count = len(relation.columns).to_bytes(2, "big")
        keys = frozenset(number for number, column in enumerate(relation.columns) if column.is_key)
        makers: dict[bytes, Callable[[], Handler]] = {}
        for kind, first in ("IN", "UN", "UK", "UO", "DK", "DO"):
            head = kind.encode() + relation_id + first.encode() + count
            makers[head] = partial(self._handler, table, head, keys) if self.renders(table, kind) else _get_ignore
        return makers

    def change(self, txn: Transaction, relation: Relation, change: Change, lsn: int) -> None:
        """Render a change that no compiled function took."""
        del txn
        table = self._tables[relation.relation_id]
        kind = type(change).__name__[0]
        if not self.renders(table, kind):
            return
        rows, first = _rows(change)
        absent = self._absent(rows, first)
        templates = self._templates[relation.relation_id]
        template = templates.get((kind, first, absent))
        if template is None:
            if len(templates) >= _AT_MOST_TEMPLATES:
                templates.clear()
            template = templates[kind, first, absent] = self.template(table, kind, first, absent)
        self.add(lsn, fill(template, rows, self._names, lsn))

    def _handler(self, table: T, head: bytes, keys: frozenset[int]) -> Handler:
        kind, first = chr(head[0]), chr(head[5])
        columns = range(int.from_bytes(head[6:8], "big"))
        sent = None
        if self._leaves_out_null(first):
            # Compile the usual row: a key tuple with the relation's key columns, or an old row without a NULL.
            sent = keys if first == "K" else frozenset(columns)
        absent = frozenset((0, column) for column in columns if sent is not None and column not in sent)
        return compile_row(
            head,
            self.template(table, kind, first, absent),
            self.emit(table),
            self._names,
            self.output.fallback,
            emit_long=self.emit_long(table),
            second_row=b"N" if kind == "U" and first != "N" else b"",
            sent=sent,
        )

    def _leaves_out_null(self, first: str) -> bool:
        """Tell whether a NULL in a first tuple of this kind is absent."""
        return first == "K" or (first == "O" and self.leaves_out_null_in_old)

    def _absent(self, rows: Sequence[Row], first: str) -> Absent:
        absent = set()
        for number, row in enumerate(rows):
            leaves_out_null = number == 0 and self._leaves_out_null(first)
            for column, value in enumerate(row):
                if value is UNCHANGED_TOAST or (value is None and leaves_out_null):
                    absent.add((number, column))
        return frozenset(absent)


def _rows(change: Change) -> tuple[list[Row], str]:
    """Return the message's tuples in its order, and the kind of the first one."""
    rows = []
    first = "N"
    if not isinstance(change, Insert):
        old, first = (change.old, "O") if change.key is None else (change.key, "K")
        if old is None:
            first = "N"
        else:
            rows.append(old)
    if not isinstance(change, Delete):
        rows.append(change.new)
    return rows, first


def _ignore(wal_start: int, data: bytes) -> None:
    """Handle a change that is not written."""


def _get_ignore() -> Handler:
    return _ignore
