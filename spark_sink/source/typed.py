"""Reads the changes of one table in a slice as Arrow record batches of a Spark schema. Runs in executors, without Python per row.

datasource.py explains the columns. `EnvelopeReader` (envelope.py) reads the changes of all tables with the same columns, row by
row. `MessageReader` (messages.py) reads the logical messages.

Each record is decoded with the relation that applies at its place in the segment. If the schema has no place for a column, for a
TOAST value that was not sent, or for a value that its type cannot hold, the reader raises StagingError. It drops nothing silently.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type

from cdcpipe.errors import ProtocolError
from cdcpipe.masks import NO_MASKS, NULL
from cdcpipe.pgoutput.columnar import Changes, decode_changes
from cdcpipe.pgoutput.messages import Relation
from cdcpipe.types.arrow.readers import to_arrow
from cdcpipe.types.arrow.values import Values
from spark_sink.schema.exact_texts import ExactTexts, list_offsets
from spark_sink.schema.masking import masked
from spark_sink.schema.table import EXACT
from spark_sink.schema.types import OPS, as_typed, assign_columns, spark_type, split_schema
from spark_sink.source.slices import OpenSlice, RelationVersion, Slice
from spark_sink.staging.log import StagingError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from pyspark.sql.types import StructField, StructType

    from cdcpipe.masks import Masks

    Array = NDArray[Any]

__all__ = ["OLD_PREFIX", "TypedReader"]


_OP_CODES: Final = np.zeros(256, np.int8)
_OP_CODES[[ord(kind) for kind in OPS]] = np.arange(len(OPS))

_NO_RECORDS: Final = np.zeros(0, np.int64)
OLD_PREFIX: Final = "_cdc_old."
"""In ``_cdc_exact``, the names of an old row's columns begin with this."""


@functools.cache
def _op_names() -> pa.StringArray:
    return pa.array(list(OPS.values()))  # not at import: this makes pyarrow import pandas


class TypedReader:
    """Reads one table's changes from a slice.

    ``relations`` are the names that the table has in the slice, as schema and name, each with its OIDs; None for all OIDs.
    """

    def __init__(
        self,
        piece: Slice | OpenSlice,
        relations: Mapping[tuple[str, str], Collection[int] | None],
        schema: StructType,
        types: str = EXACT,
        masks: Masks = NO_MASKS,
    ) -> None:
        self._slice = piece if isinstance(piece, OpenSlice) else OpenSlice(piece)
        self._relations = relations
        self._types = types
        self._masks = masks
        self._arrow_schema = to_arrow_schema(schema, timezone="UTC")
        self._columns, self._old_columns = split_schema(schema)

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield the changes in batches; all changes of a batch have the same version of the relation."""
        versions = [
            version
            for name, ids in self._relations.items()
            for version in self._slice.versions.get(name, ())
            if ids is None or version.relation.relation_id in ids
        ]
        for version in versions:
            records = self._slice.changes.get(version.relation.relation_id, _NO_RECORDS)
            low, high = np.searchsorted(records, [version.first, version.last])
            mine = records[low:high]
            for chunk in self._slice.chunks(mine):
                yield self._batch(mine[chunk], version.relation)
        truncates = self._truncates(versions)
        if truncates is not None:
            yield truncates

    def _batch(self, record: Array, described: Relation) -> pa.RecordBatch:
        index = self._slice.index
        try:
            changes = decode_changes(self._slice.segment, index.offset[record], index.length[record].astype(np.int64), described)
            relation = as_typed(described, self._types, self._masks)
            fields = assign_columns(self._columns, relation)
            exact = ExactTexts(len(record))
            arrays = self._convert(changes.columns, relation, fields, self._arrow_schema, exact, "")
            self._add_old(arrays, changes, relation, exact)
        except ProtocolError as ex:
            msg = f"segment {self._slice.path} is corrupt: {ex.message}"
            raise StagingError(msg, hint=ex.hint) from ex
        arrays["_cdc_op"] = _op_names().take(pa.array(_OP_CODES[changes.kind]))
        arrays |= self._slice.metadata(record)
        kinds = self._masks.kinds(relation.namespace, relation.name, [column.name for column in relation.columns])
        # Whether it was sent or not, a value with the mask `null` is NULL.
        hidden = {target.name for target, column in zip(fields, relation.columns, strict=True) if kinds.get(column.name) == NULL}
        self._add_lists(arrays, changes, fields, exact, hidden)
        return self._assemble(arrays, len(record))

    def _convert(
        self,
        columns: Sequence[Values],
        relation: Relation,
        fields: Sequence[StructField],
        types: pa.Schema | pa.StructType,
        exact: ExactTexts,
        prefix: str,
    ) -> dict[str, pa.Array]:
        arrays = {}
        kinds = self._masks.kinds(relation.namespace, relation.name, [column.name for column in relation.columns])
        for values, target, column in zip(columns, fields, relation.columns, strict=True):
            if column.name in kinds:
                arrays[target.name] = masked(values.text(), kinds[column.name], self._masks)
                continue
            converted = to_arrow(values, to_arrow_type(spark_type(column), timezone="UTC"))
            # The cast changes only a column that was widened.
            arrays[target.name] = converted.array.cast(types.field(target.name).type)
            exact.add(prefix + target.name, converted.exact_rows, converted.exact)
        return arrays

    def _add_old(self, arrays: dict[str, pa.Array], changes: Changes, relation: Relation, exact: ExactTexts) -> None:
        if self._old_columns is None or changes.old is None:
            return
        old_type = self._arrow_schema.field("_cdc_old").type
        fields = assign_columns(self._old_columns, relation)
        old = self._convert(changes.old, relation, fields, old_type, exact, OLD_PREFIX)
        count = len(changes.kind)
        arrays["_cdc_old"] = pa.StructArray.from_arrays(
            [old[target.name] if target.name in old else pa.nulls(count, target.type) for target in old_type],
            fields=list(old_type),
            mask=pa.array(changes.old_kind == 0),
        )

    def _add_lists(
        self,
        arrays: dict[str, pa.Array],
        changes: Changes,
        fields: Sequence[StructField],
        exact: ExactTexts,
        hidden: Collection[str],
    ) -> None:
        """Add ``_cdc_unchanged``, without the columns ``hidden``, and ``_cdc_exact``.

        Raises StagingError if one is not empty and the schema lacks it.
        """
        rows, names = _unchanged(changes.columns, [target.name for target in fields], hidden)
        for name, entries, reason in (
            ("_cdc_unchanged", len(rows), "a TOAST value was not sent"),
            ("_cdc_exact", exact.count, "a value does not fit its type"),
        ):
            if entries and name not in self._arrow_schema.names:
                table = ".".join(next(iter(self._relations)))
                msg = f"segment {self._slice.path}, table {table!r}: {reason}, and the schema has no {name}"
                raise StagingError(msg, hint=f"add {name} to the schema")
        count = len(changes.kind)
        if "_cdc_unchanged" in self._arrow_schema.names:
            list_type = self._arrow_schema.field("_cdc_unchanged").type
            arrays["_cdc_unchanged"] = pa.ListArray.from_arrays(list_offsets(rows, count), names, type=list_type)
        if "_cdc_exact" in self._arrow_schema.names:
            arrays["_cdc_exact"] = exact.to_arrow(self._arrow_schema.field("_cdc_exact").type)

    def _truncates(self, versions: Sequence[RelationVersion]) -> pa.RecordBatch | None:
        """Return a row for each truncate of the table."""
        found = sorted(
            (record, step)
            for version in versions
            for record, step in self._slice.truncates.get(version.relation.relation_id, ())
            if version.first < record < version.last
        )
        if not found:
            return None
        records, steps = np.array(found).T
        arrays = self._slice.metadata(records)
        arrays["_cdc_ordinal"] = pa.array(self._slice.index.ordinal[records] + steps.astype(np.int32))
        arrays["_cdc_op"] = pa.array(["truncate"] * len(found))
        for name in ("_cdc_unchanged", "_cdc_exact"):
            if name in self._arrow_schema.names:
                arrays[name] = pa.array([[]] * len(found), self._arrow_schema.field(name).type)
        return self._assemble(arrays, len(found))

    def _assemble(self, arrays: dict[str, pa.Array], count: int) -> pa.RecordBatch:
        """Put the columns in the schema's order. Columns that ``arrays`` lacks become null."""
        columns = [arrays[f.name] if f.name in arrays else pa.nulls(count, f.type) for f in self._arrow_schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow_schema)


def _unchanged(columns: Sequence[Values], names: Sequence[str], hidden: Collection[str]) -> tuple[Array, pa.StringArray]:
    """Return the row and the column name of each value that was not sent, ordered by row, without the columns ``hidden``."""
    found = [(name, values.unchanged) for name, values in zip(names, columns, strict=True) if name not in hidden]
    found = [(name, mask) for name, mask in found if mask.any()]
    if not found:
        return np.zeros(0, np.int64), pa.array([], pa.string())
    rows, numbers = np.nonzero(np.stack([mask for _, mask in found], axis=1))
    return rows, pa.array([name for name, _ in found]).take(pa.array(numbers))
