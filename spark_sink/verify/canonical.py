"""Computes the checksums of a replica's rows, from the same bytes as the server's checksums (cdcpipe/subcommands/checksum.py).

The bytes are PostgreSQL's texts. A value that its type can't hold has its text in ``_cdc_exact``. Every other value is exact, so
its text can be written as PostgreSQL writes it, in a session from `exact_session`. A column with both a value and an exact text is
damaged; it gets a text that no PostgreSQL value has.

If a column's type has changed, its values are in several columns of the replica. A row has its value in the column of the time when
the row last changed. The text comes from the first of these columns with a value, the newest type first, cast to the newest type.
An array is cast only to an array type. This does not hold for a column that came in place of a dropped one. Then the rows from
before were filled with its value, and the other columns have values of the dropped column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.types import ArrayType

from cdcpipe.errors import CdcpipeError
from cdcpipe.pgoutput.messages import Column, Relation
from cdcpipe.sql import BUCKET_DIGITS, PART_DIGITS, SUM_DIGITS, TRIM_NUMBERS
from cdcpipe.types.table import NUMERIC_IDS
from spark_sink.schema.table import EXACT, NATIVE
from spark_sink.schema.types import as_typed, assign_columns, base_names, merge_columns, split_schema, versioned_name
from spark_sink.spark.sql import quote
from spark_sink.spark.value_text import value_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField, StructType

__all__ = ["Canonical", "exact_session", "sources"]

_IN_NO_TEXT = "\0"
"""A character that no PostgreSQL text contains."""


def exact_session(spark: SparkSession) -> SparkSession:
    """Return another session of the same application, whose casts to strings give the texts that `Canonical` needs."""
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    # ANSI mode never writes a decimal as 1E-10.
    session.conf.set("spark.sql.ansi.enabled", "true")
    return session


def sources(
    schema: StructType, columns: Sequence[tuple[str, int, int]], types: str, filled: Collection[str] = ()
) -> Iterator[tuple[StructField, list[StructField]]]:
    """Yield, for each column of the server, the field for its new values, and the replica's fields with values, newest first.

    ``filled``: the fields that captured DDL has filled in old rows. Such a field with a type in its name replaced a dropped column,
    so it alone has the values of all rows. Such a field with the column's own name may have had other types since, so older fields
    count, too.
    """
    described = tuple(Column(0, name, type_id, modifier) for name, type_id, modifier in columns)
    relation = as_typed(Relation(None, 0, "", "", "d", described), types)
    present, _ = split_schema(schema)
    merged = merge_columns(present, [relation])
    for name, field in zip(base_names(merged, relation), assign_columns(merged, relation), strict=True):
        has_all = field.name != name and field.name in filled
        older = [
            other
            for other in reversed(present.fields)
            if other.name != field.name and other.name in (name, versioned_name(name, other.dataType))
            if not has_all
        ]
        # The replica's column may still be narrower than the server's.
        yield field, [*(other for other in present.fields if other.name == field.name), *older]


class Canonical:
    """Computes texts and checksums of a replica's rows for the server's columns, ``(name, type's OID, type modifier)``.

    ``filled`` is that of `sources`.
    """

    def __init__(
        self, schema: StructType, columns: Sequence[tuple[str, int, int]], types: str = EXACT, filled: Collection[str] = ()
    ) -> None:
        self._has_exact = "_cdc_exact" in schema.names
        self.names = [name for name, _, _ in columns]
        self._texts = {
            name: self._text(field, having)
            for name, (field, having) in zip(self.names, sources(schema, columns, types, filled), strict=True)
        }
        if types == NATIVE:
            self._texts |= {name: _trimmed(self._texts[name]) for name, type_id, _ in columns if type_id in NUMERIC_IDS}

    def _text(self, field: StructField, having: Sequence[StructField]) -> SparkColumn:
        """Return an expression for the text of a column. ``field`` and ``having`` come from `sources`."""
        forms = []
        has_both = F.lit(False)
        for candidate in having:
            forms.append(F.expr(_form(candidate, field.dataType)))
            if self._has_exact:
                exact = F.col("_cdc_exact").getItem(candidate.name)
                forms.append(exact)
                has_both |= F.col(quote(candidate.name)).isNotNull() & exact.isNotNull()
        if not forms:
            return F.lit(None).cast("string")
        text = F.coalesce(*forms)
        return F.when(has_both, F.concat(F.lit(_IN_NO_TEXT), text)).otherwise(text) if self._has_exact else text

    def checksums(self, rows: DataFrame, key: Sequence[str], within: Collection[str] = ()) -> dict[str, tuple[int, int]]:
        """Return the number of rows and the sum of their checksums, for each bucket with rows.

        If ``within`` names buckets, return the same for each part of these buckets.
        """
        hashed, digits = self._hashed(rows, key), BUCKET_DIGITS
        if within:
            hashed, digits = _rows_in(hashed, within), BUCKET_DIGITS + PART_DIGITS
        number = F.conv(F.substring("md5", 1, SUM_DIGITS), 16, 10).cast("decimal(19,0)")
        bucket = F.substring("key_md5", 1, digits).alias("bucket")
        found = hashed.groupBy(bucket).agg(F.count("*").alias("count"), F.sum(number).alias("sum"))
        return {row["bucket"]: (row["count"], int(row["sum"])) for row in found.collect()}

    def rows(self, rows: DataFrame, key: Sequence[str], buckets: Collection[str]) -> list[tuple[str | None, ...]]:
        """Return the key (as texts) and the MD5 of each row in the buckets. Instead of buckets these may be parts of buckets."""
        return [tuple(row) for row in _rows_in(self._hashed(rows, key), buckets).drop("key_md5").collect()]

    def _hashed(self, rows: DataFrame, key: Sequence[str]) -> DataFrame:
        """Return each row's key (as texts), its MD5, and that of its key."""
        # A separate step: Spark treats the call of a Java method as not deterministic, and would repeat it.
        texts = rows.select(*(self._texts[name].alias(f"t{index}") for index, name in enumerate(self.names)))
        column = {name: F.col(f"t{index}") for index, name in enumerate(self.names)}
        keys = [column[name].alias(f"k{index}") for index, name in enumerate(key)]
        md5, key_md5 = _md5(list(column.values())), _md5([column[name] for name in key])
        return texts.select(*keys, md5.alias("md5"), key_md5.alias("key_md5"))


def _rows_in(hashed: DataFrame, buckets: Collection[str]) -> DataFrame:
    return hashed.where(F.substring("key_md5", 1, max(map(len, buckets))).isin(*buckets))


def _trimmed(text: SparkColumn) -> SparkColumn:
    for pattern, replacement in TRIM_NUMBERS:
        text = F.regexp_replace(text, pattern, replacement.replace("\\", "$"))  # in Java's syntax
    return text


def _md5(texts: Sequence[SparkColumn]) -> SparkColumn:
    null, end = F.lit(b"\xff"), F.lit(b"\x00")
    parts = [part for text in texts for part in (F.coalesce(text.cast("binary"), null), end)]
    return F.md5(F.concat(*parts))


def _form(field: StructField, kind: DataType) -> str:
    """Return SQL for the text of a field's values, cast to ``kind``, the column's type now."""
    value, own = quote(field.name), field.dataType
    if own != kind and isinstance(own, ArrayType) == isinstance(kind, ArrayType):
        value, own = f"try_cast({value} AS {kind.simpleString()})", kind
    text = value_text(value, own)
    if text is None:
        msg = f"column {field.name!r} of type {own.simpleString()} can't be compared"
        raise CdcpipeError(msg)
    return text
