"""Spark SQL expressions that turn a value into PostgreSQL's text of it, so that keys and checksums can be compared.

A ``float`` or a ``double`` becomes the hexadecimal digits of its IEEE 754 bits, because programs write the shortest decimal digits
in different ways. Text that depends on the session assumes UTC and ANSI casts (canonical.exact_session).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.types import ArrayType

from spark_sink.spark.sql import literal

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

__all__ = ["value_text"]

_PLAIN: Final = {"byte", "short", "integer", "long", "decimal", "date", "timestamp_ntz"}
"""Types for which a cast to a string gives PostgreSQL's text."""

_BITS: Final = {"float": ("Float", "floatToIntBits", 8), "double": ("Double", "doubleToLongBits", 16)}

# The rule of PostgreSQL's array_out. Its whitespace is the same as Java's \s.
_NEEDS_QUOTES: Final = r'^(?i:null)?$|[\s"\\{},]'


def value_text(value: str, kind: DataType) -> str | None:
    """Return an SQL expression for the text of the expression ``value``; null gives null. None for a type that is not supported."""
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
    """Return the expression for an array's text. ``texts`` is an expression for the array of its elements' texts."""
    backslash, quote, both = literal("\\"), literal('"'), literal('\\"')
    escaped = f"replace(replace(e, {backslash}, {literal(chr(92) * 2)}), {quote}, {both})"
    element = f"CASE WHEN e RLIKE {literal(_NEEDS_QUOTES)} THEN concat({quote}, {escaped}, {quote}) ELSE coalesce(e, 'NULL') END"
    return f"concat('{{', array_join(transform({texts}, e -> {element}), ','), '}}')"


def _bits(value: str, java_class: str, method: str, digits: int) -> str:
    """Return the expression for the hexadecimal digits of a number's bits. Java turns every NaN into the same bits."""
    bits = f"java_method('java.lang.{java_class}', '{method}', coalesce({value}, CAST(0 AS {java_class})))"
    return f"IF({value} IS NULL, NULL, lower(right(lpad(hex(CAST({bits} AS BIGINT)), 16, '0'), {digits})))"
