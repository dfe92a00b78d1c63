"""A replica's rows as the bytes of which the server makes its checksums (cdcpipe/subcommands/checksum.py), and their checksums.

A column's text is the server's: what its type can't hold stands in ``_cdc_exact``, and everything else is exact and can be
written as PostgreSQL writes it. The session must write it so: `exact_session`. A column with both a value and an exact text
is damaged, and has a text that no value of PostgreSQL's has.

A column whose type changed has its values in several columns of the replica, a row's in the one that had its name when the
row last changed: the text is that of the first that has one, the newest type first, cast to that; an array's is never cast to
another type than an array's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.types import ArrayType

from cdcpipe.errors import CdcpipeError
from cdcpipe.pgoutput.messages import Column, Relation
from cdcpipe.sql import TRIM_NUMBERS
from cdcpipe.types.table import NUMERIC_IDS
from spark_sink.schema.table import EXACT, NATIVE
from spark_sink.schema.types import as_typed, assign_columns, column_names, merge_columns, split_schema, versioned_name
from spark_sink.spark.sql import quote
from spark_sink.spark.value_text import value_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField, StructType

__all__ = ["BUCKET_DIGITS", "SUM_DIGITS", "Canonical", "exact_session", "sources"]

BUCKET_DIGITS = 3
SUM_DIGITS = 15
"""How many of an MD5's digits tell the bucket, and how many are added up."""

_IN_NO_TEXT = "\0"
"""A character that no text of PostgreSQL's has."""


def exact_session(spark: SparkSession) -> SparkSession:
    """Return another session on the same application, in which casts to strings are as `Canonical` needs them."""
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    # With it a decimal is never written as 1E-10.
    session.conf.set("spark.sql.ansi.enabled", "true")
    return session


def sources(
    schema: StructType, columns: Sequence[tuple[str, int, int]], types: str
) -> Iterator[tuple[StructField, list[StructField]]]:
    """Yield, for each column of the server's, the field that its values go to now, and those that a replica has values in.

    The newest of these is the first.
    """
    described = tuple(Column(0, name, type_id, modifier) for name, type_id, modifier in columns)
    relation = as_typed(Relation(None, 0, "", "", "d", described), types)
    present, _ = split_schema(schema)
    fields = assign_columns(merge_columns(present, [relation]), relation)
    for name, field in zip(column_names(relation), fields, strict=True):
        older = [
            other
            for other in reversed(present.fields)
            if other.name != field.name and other.name in (name, versioned_name(name, other.dataType))
        ]
        # The column itself may still be narrower here than on the server.
        yield field, [*(other for other in present.fields if other.name == field.name), *older]


class Canonical:
    """The columns of a table of the server's, ``(name, type's OID, type modifier)``, as the rows of its replica have them."""

    def __init__(self, schema: StructType, columns: Sequence[tuple[str, int, int]], types: str = EXACT) -> None:
        self._has_exact = "_cdc_exact" in schema.names
        self.names = [name for name, _, _ in columns]
        self._texts = {
            name: self._text(field, having)
            for name, (field, having) in zip(self.names, sources(schema, columns, types), strict=True)
        }
        if types == NATIVE:
            self._texts |= {name: _trimmed(self._texts[name]) for name, type_id, _ in columns if type_id in NUMERIC_IDS}

    def _text(self, field: StructField, having: Sequence[StructField]) -> SparkColumn:
        """Return the text of a column of the server's of which `sources` says this."""
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

    def checksums(self, rows: DataFrame, key: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return the number of rows and the sum of their checksums for each bucket that has any."""
        number = F.conv(F.substring("md5", 1, SUM_DIGITS), 16, 10).cast("decimal(19,0)")
        found = self._hashed(rows, key).groupBy("bucket").agg(F.count("*").alias("count"), F.sum(number).alias("sum"))
        return {row["bucket"]: (row["count"], int(row["sum"])) for row in found.collect()}

    def rows(self, rows: DataFrame, key: Sequence[str], buckets: Collection[str]) -> list[tuple[str | None, ...]]:
        """Return the key, as texts, and the MD5 of each row in the buckets."""
        chosen = self._hashed(rows, key).where(F.col("bucket").isin(*buckets))
        return [tuple(row) for row in chosen.drop("bucket").collect()]

    def _hashed(self, rows: DataFrame, key: Sequence[str]) -> DataFrame:
        """Return each row's key, as texts, its MD5, and its bucket."""
        # A step of its own: Spark takes the call of a Java method for something that may come out otherwise the next time.
        texts = rows.select(*(self._texts[name].alias(f"t{index}") for index, name in enumerate(self.names)))
        column = {name: F.col(f"t{index}") for index, name in enumerate(self.names)}
        keys = [column[name].alias(f"k{index}") for index, name in enumerate(key)]
        md5, key_md5 = _md5(list(column.values())), _md5([column[name] for name in key])
        return texts.select(*keys, md5.alias("md5"), F.substring(key_md5, 1, BUCKET_DIGITS).alias("bucket"))


def _trimmed(text: SparkColumn) -> SparkColumn:
    for pattern, replacement in TRIM_NUMBERS:
        text = F.regexp_replace(text, pattern, replacement.replace("\\", "$"))  # as Java has it
    return text


def _md5(texts: Sequence[SparkColumn]) -> SparkColumn:
    null, end = F.lit(b"\xff"), F.lit(b"\x00")
    parts = [part for text in texts for part in (F.coalesce(text.cast("binary"), null), end)]
    return F.md5(F.concat(*parts))


def _form(field: StructField, kind: DataType) -> str:
    """Return the text of a column's values, as they are where the column has another type now."""
    value, own = quote(field.name), field.dataType
    if own != kind and isinstance(own, ArrayType) == isinstance(kind, ArrayType):
        value, own = f"try_cast({value} AS {kind.simpleString()})", kind
    text = value_text(value, own)
    if text is None:
        msg = f"column {field.name!r} of type {own.simpleString()} can't be compared"
        raise CdcpipeError(msg)
    return text
