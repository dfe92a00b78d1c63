"""Reads the changes of all tables in a slice as rows with the same columns for every table (the envelope)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.binary import row_to_text
from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, Delete, Insert, Relation, Truncate, Update
from spark_sink.source.slices import OpenSlice, Slice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from pyspark.sql.types import StructType

    from cdcpipe.pgoutput.messages import Column, Row, Value

    Array = NDArray[Any]


__all__ = ["ENVELOPE_ROWS", "EnvelopeReader"]


ENVELOPE_ROWS: Final = 4096


class EnvelopeReader:
    """Reads the changes of all tables from a slice, row by row, in the same columns for every table."""

    def __init__(self, piece: Slice, schema: StructType) -> None:
        self._slice = OpenSlice(piece)
        self._arrow_schema = to_arrow_schema(schema, timezone="UTC")

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield the changes, in order."""
        records = self._slice.records(b"IUDT").tolist()
        descriptions = deque(self._slice.descriptions())
        relations: dict[int, Relation] = {}
        rows: list[_EnvelopeRow] = []
        for record in records:
            while descriptions and descriptions[0][0] < record:
                relation = descriptions.popleft()[1]
                relations[relation.relation_id] = relation
            try:
                rows += self._rows(record, relations)
            except ProtocolError as ex:
                self._slice.fail(int(self._slice.index.offset[record]), ex.message)
            if len(rows) >= ENVELOPE_ROWS:
                yield self._batch(rows)
                rows = []
        if rows:
            yield self._batch(rows)

    def _rows(self, record: int, relations: dict[int, Relation]) -> Iterator[_EnvelopeRow]:
        match self._slice.message(record):
            case Insert(_, relation_id, new):
                yield _EnvelopeRow.of(record, "insert", relations[relation_id], new)
            case Update(_, relation_id, key, old, new):
                yield _EnvelopeRow.of(record, "update", relations[relation_id], new, old, key)
            case Delete(_, relation_id, key, old):
                yield _EnvelopeRow.of(record, "delete", relations[relation_id], None, old, key)
            case Truncate(_, _, relation_ids):
                for step, relation_id in enumerate(relation_ids):
                    yield _EnvelopeRow.of(record, "truncate", relations[relation_id], step=step)

    def _batch(self, rows: list[_EnvelopeRow]) -> pa.RecordBatch:
        record = np.array([row.record for row in rows])
        arrays = self._slice.metadata(record)
        arrays["_cdc_ordinal"] = pa.array(self._slice.index.ordinal[record] + np.array([r.step for r in rows], np.int32))
        values = {
            "_cdc_op": [row.op for row in rows],
            "_cdc_unchanged": [row.unchanged for row in rows],
            "table_schema": [row.relation.namespace for row in rows],
            "table_name": [row.relation.name for row in rows],
            "relation_id": [row.relation.relation_id for row in rows],
            "new": [row.new for row in rows],
            "old": [row.old for row in rows],
        }
        for name in values.keys() & set(self._arrow_schema.names):
            arrays[name] = pa.array(values[name], self._arrow_schema.field(name).type)
        return pa.RecordBatch.from_arrays([arrays[name] for name in self._arrow_schema.names], schema=self._arrow_schema)


@dataclass(slots=True)
class _EnvelopeRow:
    record: int
    step: int
    op: str
    relation: Relation
    unchanged: list[str]
    new: list[tuple[str, str | None]] | None
    old: list[tuple[str, str | None]] | None

    @classmethod
    def of(
        cls,
        record: int,
        op: str,
        relation: Relation,
        new: Row | None = None,
        old: Row | None = None,
        key: Row | None = None,
        step: int = 0,
    ) -> _EnvelopeRow:
        """Make the envelope's row of a change. As in typed rows, an unchanged TOAST value is taken from the old row or key."""
        after, before = _pairs(relation, new), _pairs(relation, key if old is None else old)
        if before:
            known = [n if o is None or n is not UNCHANGED_TOAST else o for (_, n), (_, o) in zip(after, before, strict=False)]
            after = [(column, value) for (column, _), value in zip(after, known, strict=True)]
        if old is None:
            # The key's columns are those that are not NULL. The relation's flags may be those of a root, and the key a partition's.
            before = [(column, value) for column, value in before if value is not None]
        return cls(
            record,
            step,
            op,
            relation,
            [column.name for column, value in after if value is UNCHANGED_TOAST],
            None if new is None else _texts(after),
            None if old is None and key is None else _texts(before),
        )


def _pairs(relation: Relation, row: Row | None) -> list[tuple[Column, Value]]:
    if row is None:
        return []
    if len(row) != len(relation.columns):
        msg = f"a row has {len(row)} columns, its relation {len(relation.columns)}"
        raise ProtocolError(msg)
    return list(zip(relation.columns, row_to_text(relation, row), strict=True))


def _texts(pairs: list[tuple[Column, Value]]) -> list[tuple[str, str | None]]:
    """Return the entries of a map column, without values that were not sent."""
    texts: list[tuple[str, str | None]] = []
    for column, value in pairs:
        if value is UNCHANGED_TOAST:
            continue
        try:
            texts.append((column.name, None if value is None else value.decode()))
        except UnicodeDecodeError:
            msg = f"a value of column {column.name!r} is not UTF-8"
            raise ProtocolError(msg) from None
    return texts
