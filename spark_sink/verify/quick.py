"""Computes the checksums of small replicas in this process, because a Spark job takes long even for a small table.

The texts are the same as in verify/canonical.py. These checksums can only show that a replica equals its table, which is true for
nearly all replicas: equal checksums mean equal rows. If they differ, or if `checksums` returns None, Spark computes the checksums
that count.
"""

from __future__ import annotations

import hashlib
import logging
import re
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from cdcpipe.sql import BUCKET_DIGITS, SUM_DIGITS, TRIM_NUMBERS
from cdcpipe.types.table import NUMERIC_IDS
from spark_sink.delta.rows import (
    Budget,
    UnsupportedError,
    fields_of,
    files_between,
    present_rows,
    read_between,
    read_columns,
    statistics,
)
from spark_sink.delta.schema import columns, physical_columns
from spark_sink.schema.table import NATIVE
from spark_sink.schema.types import DELETED_AT
from spark_sink.spark.value_text import Texts, arrow_texts
from spark_sink.verify.canonical import sources

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from spark_sink.delta.log import TableLog
    from spark_sink.delta.rows import Flags, Numbers


__all__ = ["any_change", "checksums"]

_logger = logging.getLogger(__name__)

_MOST_ROWS: Final = 100_000
_MOST_BYTES: Final = 64 << 20
"""For replicas whose values take more bytes in memory than this, Spark is faster."""

_KNOWN_FEATURES: Final = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
"""The reader features that this module supports."""

_NULL, _END = b"\xff", b"\x00"

_EXPECTED: Final = (UnsupportedError, OSError, ValueError, pa.ArrowException)


def checksums(
    log: TableLog, described: Sequence[tuple[str, int, int]], key: Sequence[str], types: str, filled: Collection[str] = ()
) -> dict[str, tuple[int, int]] | None:
    """Return the same as canonical.Canonical.checksums for the rows of a Delta table; None if Spark has to do it.

    ``described`` are the columns of the server's table: name, type's OID, type modifier. ``filled`` is that of canonical.sources.
    """
    try:
        return _checksums(log, described, key, types, filled)
    except _EXPECTED as ex:
        _logger.debug("%s is left to Spark: %s", log.path.name, ex)
        return None


def any_change(log: TableLog, after_lsn: int, until_lsn: int, wanted: Callable[[Numbers, pa.Array], Flags]) -> bool | None:
    """Tell whether a changelog has a change in (after_lsn, until_lsn] that is ``wanted``; None if Spark has to do it.

    ``wanted`` takes ``_cdc_end_lsn`` and ``_cdc_xid`` of some changes, and returns a flag for each.
    """
    try:
        return any(wanted(*positions).any() for positions in _positions(log, after_lsn, until_lsn))
    except _EXPECTED as ex:
        _logger.debug("%s is left to Spark: %s", log.path.name, ex)
        return None


def _positions(log: TableLog, after_lsn: int, until_lsn: int) -> Iterator[tuple[Numbers, pa.Array]]:
    """Yield the end LSNs and transaction ids of changes in (after_lsn, until_lsn], file by file."""
    fields = _fields(log, ["_cdc_end_lsn", "_cdc_xid"])
    for file in files_between(log.files, fields["_cdc_end_lsn"].name, after_lsn, until_lsn):
        rows = read_between(log.path, file, fields, "_cdc_end_lsn", after_lsn, until_lsn)
        yield rows["_cdc_end_lsn"].to_numpy(), rows["_cdc_xid"]


def _fields(log: TableLog, names: Sequence[str]) -> dict[str, pa.Field]:
    """Return columns as the table's files have them."""
    if log.version < 0:
        raise UnsupportedError("no table")
    if (obstacle := log.obstacle("readerFeatures", _KNOWN_FEATURES)) is not None:
        raise UnsupportedError(f"a table with {obstacle}")
    physical = dict(zip(columns(log.metadata).names, physical_columns(log.metadata).fields, strict=True))
    if not physical.keys() >= set(names):
        raise UnsupportedError("a table that lacks some of these columns")
    return fields_of(StructType([physical[name] for name in names]), names)


def _checksums(
    log: TableLog, described: Sequence[tuple[str, int, int]], key: Sequence[str], types: str, filled: Collection[str]
) -> dict[str, tuple[int, int]]:
    if sum(statistics(file)["numRecords"] for file in log.files) > _MOST_ROWS:
        raise UnsupportedError("many rows")
    schema = columns(log.metadata)
    if "_cdc_exact" in schema.names:
        raise UnsupportedError("exact texts")
    names: list[str | None] = []
    present = StructType([field for field in schema if field.name != DELETED_AT])
    for field, having in sources(present, described, types, filled):
        if having and having != [field]:
            raise UnsupportedError(f"{field.name} has several types, or another type than on the server")
        names.append(having[0].name if having else None)
    trimmed = [types == NATIVE and type_id in NUMERIC_IDS for _, type_id, _ in described]
    places = [[name for name, _, _ in described].index(name) for name in key]
    deleted_at = [DELETED_AT] if DELETED_AT in schema.names else []
    fields = _fields(log, [*(name for name in names if name is not None), *deleted_at])
    found: dict[str, tuple[int, int]] = {}
    budget = Budget(_MOST_BYTES)
    for file in log.files:
        parts = _file_parts(log, file, fields, names, trimmed, budget)
        for row, of_key in zip(zip(*parts, strict=True), zip(*(parts[place] for place in places), strict=True), strict=True):
            bucket = _md5(of_key)[:BUCKET_DIGITS]
            count, total = found.get(bucket, (0, 0))
            found[bucket] = count + 1, total + int(_md5(row)[:SUM_DIGITS], 16)
    return found


def _file_parts(
    log: TableLog,
    file: Mapping[str, Any],
    fields: Mapping[str, pa.Field],
    names: Sequence[str | None],
    trimmed: Sequence[bool],
    budget: Budget,
) -> list[list[bytes]]:
    """Return, for each column of the server, the bytes of a file's rows for their checksums."""
    rows = read_columns(log.path, file, fields, budget)
    present = pa.array(present_rows(log.path, file, statistics(file)["numRecords"]))
    if DELETED_AT in fields:
        present = pc.and_(present, rows[DELETED_AT].is_null())
    absent: Texts = [None] * present.true_count
    parts = []
    for name, is_trimmed in zip(names, trimmed, strict=True):
        texts = absent if name is None else _texts(rows[name].filter(present))
        if is_trimmed:
            texts = [None if text is None else _trim(text) for text in texts]
        parts.append([_NULL + _END if text is None else text.encode() + _END for text in texts])
    return parts


def _md5(parts: Sequence[bytes]) -> str:
    return hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()


def _trim(text: str) -> str:
    for pattern, replacement in TRIM_NUMBERS:
        text = re.sub(pattern, replacement, text)
    return text


def _texts(values: pa.Array) -> Texts:
    texts = arrow_texts(values)
    if texts is None:
        raise UnsupportedError(f"values of type {values.type}")
    return texts
