"""Reads the logical messages in a slice as Arrow record batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from cdcpipe.pgoutput.messages import UNIX_2000_US
from cdcpipe.types.arrow.buffers import gather
from spark_sink.schema.types import MESSAGE_SCHEMA
from spark_sink.source.slices import MESSAGE_PREFIX_POS, OpenSlice, Slice
from spark_sink.staging.index import NO_TRANSACTION
from spark_sink.staging.log import StagingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from pyspark.sql.types import StructType

    Array = NDArray[Any]


__all__ = ["MessageReader"]


_PREFIX_BYTES: Final = 128
"""The end of a prefix is searched in this many bytes first."""


class MessageReader:
    """Reads the logical messages from a slice."""

    def __init__(self, piece: Slice | OpenSlice, schema: StructType) -> None:
        self._slice = piece if isinstance(piece, OpenSlice) else OpenSlice(piece)
        self._arrow_schema = to_arrow_schema(schema, timezone="UTC")
        for wanted in schema:
            if wanted.name not in MESSAGE_SCHEMA.names or MESSAGE_SCHEMA[wanted.name].dataType != wanted.dataType:
                msg = f"messages have no column {wanted.name} of type {wanted.dataType.simpleString()}, which the schema asks for"
                raise StagingError(msg, hint=f"the columns of messages are {', '.join(MESSAGE_SCHEMA.names)}")

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield the messages, in order."""
        numbers = self._slice.messages()
        records, places = (found[numbers] for found in self._slice.index.messages())
        for chunk in self._slice.chunks(records):
            yield self._batch(records[chunk], places[chunk], self._slice.index.message_lsn[numbers[chunk]])

    def _batch(self, record: Array, place: Array, lsn: Array) -> pa.RecordBatch:
        index = self._slice.index
        transaction = index.transaction[record]
        is_outside = transaction == NO_TRANSACTION
        inside = transaction[~is_outside]
        xid, time_us = np.zeros(len(record), np.int64), np.zeros(len(record), np.int64)
        xid[~is_outside], time_us[~is_outside] = index.xid[inside], index.commit_time_us[inside] + UNIX_2000_US
        prefix, content = self._gather(record)
        arrays = {
            "prefix": prefix,
            "content": content,
            "transactional": pa.array(~is_outside),
            "_cdc_epoch": pa.array(np.full(len(record), self._slice.epoch, np.int32)),
            "_cdc_end_lsn": pa.array(place.astype(np.int64)),
            "_cdc_ordinal": pa.array(index.ordinal[record]),
            "_cdc_lsn": pa.array(lsn.astype(np.int64)),
            "_cdc_xid": pa.array(xid, mask=is_outside),
            "_cdc_commit_time": pa.array(time_us, mask=is_outside).cast(pa.timestamp("us", "UTC")),
        }
        return pa.RecordBatch.from_arrays([arrays[name] for name in self._arrow_schema.names], schema=self._arrow_schema)

    def _gather(self, record: Array) -> tuple[pa.StringArray, pa.BinaryArray]:
        """Return the prefixes and the contents. Contents may be large: they are copied once, from the mapped segment to Arrow."""
        segment, index = self._slice.segment, self._slice.index
        start = index.offset[record] + MESSAGE_PREFIX_POS
        end = index.offset[record] + index.length[record]
        prefix_end = np.array([self._prefix_end(*ends) for ends in zip(start.tolist(), end.tolist(), strict=True)], np.int64)
        content = prefix_end + 5
        return gather(segment, start, prefix_end - start).cast(pa.string()), gather(segment, content, end - content)

    def _prefix_end(self, start: int, end: int) -> int:
        """Return the end of the prefix that begins at ``start``. Checks the prefix and the length of the content."""
        segment, size = self._slice.segment, _PREFIX_BYTES
        while (prefix := bytes(segment[start : min(start + size, end)])).find(0) < 0:
            if start + size >= end:
                self._slice.fail(start, "the prefix of a logical message has no end")
            size *= 8
        prefix = prefix[: prefix.find(0)]
        try:
            prefix.decode()
        except UnicodeDecodeError:
            msg = f"segment {self._slice.path}: the prefix of a logical message, at byte {start}, is not UTF-8"
            raise StagingError(
                msg, hint="a database with the encoding SQL_ASCII may hold bytes that are no text: give messages prefixes in UTF-8"
            ) from None
        content = start + len(prefix) + 5
        if content + int.from_bytes(segment[content - 4 : content]) != end:
            self._slice.fail(content - 4, "the content of a logical message has another length than its header says")
        return start + len(prefix)
