"""A value in Spark as the text that PostgreSQL has for it, in Spark's SQL: what keys and checksums are compared by.

A ``float`` or a ``double`` is the hexadecimal digits of its IEEE 754 bits instead, because the shortest decimal digits are
spelled differently by everybody. Text that depends on the session is as in UTC and with ANSI casts (canonical.exact_session).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.types import ArrayType

from spark_sink.spark.sql import literal

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

__all__ = ["value_text"]

_PLAIN: Final = {"byte", "short", "integer", "long", "decimal", "date", "timestamp_ntz"}
"""Types of which a cast to a string gives PostgreSQL's text."""

_BITS: Final = {"float": ("Float", "floatToIntBits", 8), "double": ("Double", "doubleToLongBits", 16)}

# array_out: whitespace is what Java's \s is.
_NEEDS_QUOTES: Final = r'^(?i:null)?$|[\s"\\{},]'


def value_text(value: str, kind: DataType) -> str | None:
    """Return the expression for the text of ``value``, an expression, null where it is; None for a type that has none here."""
    name = kind.typeName()
    if isinstance(kind, ArrayType):
        element = value_text("x", kind.elementType)
        return None if element is None else _array_text(f"transform({value}, x -> {element})")
    if name == "string":
        return value
    if name == "boolean":
        return f"CASE WHEN {value} THEN 't' WHEN NOT {value} THEN 'f' END"
    if name == "timestamp":
        return f"concat(CAST({value} AS STRING), '+00')"
    if name == "binary":
        return f"concat({literal(chr(92))}, 'x', lower(hex({value})))"
    if name in _BITS:
        return _bits(value, *_BITS[name])
    return f"CAST({value} AS STRING)" if name in _PLAIN else None


def _array_text(texts: str) -> str:
    """Return the text of an array, of the texts of its elements."""
    backslash, quote, both = literal("\\"), literal('"'), literal('\\"')
    escaped = f"replace(replace(e, {backslash}, {literal(chr(92) * 2)}), {quote}, {both})"
    element = f"CASE WHEN e RLIKE {literal(_NEEDS_QUOTES)} THEN concat({quote}, {escaped}, {quote}) ELSE coalesce(e, 'NULL') END"
    return f"concat('{{', array_join(transform({texts}, e -> {element}), ','), '}}')"


def _bits(value: str, java_class: str, method: str, digits: int) -> str:
    """Return the hexadecimal digits of a number's bits, of which Java has one NaN."""
    bits = f"java_method('java.lang.{java_class}', '{method}', coalesce({value}, CAST(0 AS {java_class})))"
    return f"IF({value} IS NULL, NULL, lower(right(lpad(hex(CAST({bits} AS BIGINT)), 16, '0'), {digits})))"
