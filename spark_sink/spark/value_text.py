"""A value as PostgreSQL's text of it, so that keys and checksums can be compared.

`value_text` returns a Spark SQL expression for the text. `arrow_texts` makes the texts of an Arrow array. Both make the same texts,
for every `ColumnType` of cdcpipe/types/table.py.

A ``float`` or a ``double`` becomes the hexadecimal digits of its IEEE 754 bits, because programs write the shortest decimal digits
in different ways. Spark refuses this expression in joins and in MERGE: for them, `value_text` can use Java's text instead.

No text depends on the session's time zone. A decimal's text assumes ANSI casts (canonical.exact_session).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType

from spark_sink.spark.sql import literal

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

__all__ = ["Texts", "arrow_texts", "utc_text", "value_text"]

Texts: TypeAlias = list[str | None]

# Spark SQL

_PLAIN: Final = {"byte", "short", "integer", "long", "decimal", "date", "timestamp_ntz"}
"""Types for which a cast to a string gives PostgreSQL's text."""

_BITS: Final = {"float": ("Float", "floatToIntBits", 8), "double": ("Double", "doubleToLongBits", 16)}

# The rule of PostgreSQL's array_out. Its whitespace is the same as Java's \s.
# In Java $ is also the place before a last U+0085, U+2028 or U+2029. \z is the end alone.
_QUOTED_IN_SQL: Final = r'^(?i:null)?\z|[\s"\\{},]'


def value_text(value: str, kind: DataType, *, is_joined: bool = False) -> str | None:
    """Return an SQL expression for the text of the expression ``value``; null gives null. None for a type that is not supported.

    With ``is_joined`` the text of a ``float`` or a ``double`` is Java's. Two different values have different texts, so Spark can
    compare it with another such text. It need not be PostgreSQL's.
    """
    name = kind.typeName()
    if isinstance(kind, ArrayType):
        element = value_text("x", kind.elementType, is_joined=is_joined)
        return None if element is None else _array_text(f"transform({value}, x -> {element})")
    if name == "string":
        return value
    if name == "boolean":
        return f"CASE WHEN {value} THEN 't' WHEN NOT {value} THEN 'f' END"
    if name == "timestamp":
        return f"concat({utc_text(value)}, '+00')"
    if name == "binary":
        return f"concat({literal(chr(92))}, 'x', lower(hex({value})))"
    if name in _BITS and is_joined:
        return f"CAST({value} AS STRING)"
    if name in _BITS:
        return _bits(value, *_BITS[name])
    return f"CAST({value} AS STRING)" if name in _PLAIN else None


def utc_text(value: str) -> str:
    """Return an SQL expression for the text of the ``timestamp`` ``value`` in UTC, without a zone, in whatever session.

    A cast would use the session's time zone. In the hour in which the clocks go back, two times have the same text there.
    """
    return f"CAST(timestampadd(MICROSECOND, unix_micros({value}), TIMESTAMP_NTZ'1970-01-01') AS STRING)"


def _array_text(texts: str) -> str:
    """Return the expression for an array's text. ``texts`` is an expression for the array of its elements' texts."""
    backslash, quote, both = literal("\\"), literal('"'), literal('\\"')
    escaped = f"replace(replace(e, {backslash}, {literal(chr(92) * 2)}), {quote}, {both})"
    element = f"CASE WHEN e RLIKE {literal(_QUOTED_IN_SQL)} THEN concat({quote}, {escaped}, {quote}) ELSE coalesce(e, 'NULL') END"
    return f"concat('{{', array_join(transform({texts}, e -> {element}), ','), '}}')"


def _bits(value: str, java_class: str, method: str, digits: int) -> str:
    """Return the expression for the hexadecimal digits of a number's bits. Java turns every NaN into the same bits.

    Spark takes each call of a Java method for non-deterministic.
    """
    bits = f"java_method('java.lang.{java_class}', '{method}', coalesce({value}, CAST(0 AS {java_class})))"
    return f"IF({value} IS NULL, NULL, lower(right(lpad(hex(CAST({bits} AS BIGINT)), 16, '0'), {digits})))"


# Arrow arrays

_QUOTED_IN_PYTHON: Final = re.compile(r'(?i:null)?\Z|.*[\s"\\{},]', re.ASCII | re.DOTALL)


def arrow_texts(values: pa.Array) -> Texts | None:
    """Return the texts of an array's values; None for a null, and None alone for an Arrow type that is not known here."""
    kind = values.type
    if pa.types.is_list(kind):
        return _list_texts(values)
    if pa.types.is_floating(kind):
        return _bit_texts(values)
    if pa.types.is_timestamp(kind):
        # Arrow writes six digits behind the point. PostgreSQL leaves out the zeros at the end.
        texts: Texts = pc.utf8_rtrim(pc.utf8_rtrim(values.cast(pa.timestamp("us")).cast(pa.string()), "0"), ".").to_pylist()
        return texts if kind.tz is None else [None if text is None else f"{text}+00" for text in texts]
    for is_kind, text_of in _TEXTS.items():
        if is_kind(kind):
            return [None if value is None else text_of(value) for value in values.to_pylist()]
    if pa.types.is_integer(kind) or pa.types.is_date(kind):
        return list(values.cast(pa.string()).to_pylist())
    return None


_TEXTS: Final[Mapping[Callable[[pa.DataType], bool], Callable[[Any], str]]] = {
    pa.types.is_string: str,
    pa.types.is_boolean: lambda value: "t" if value else "f",
    pa.types.is_decimal: lambda value: format(value, "f"),
    pa.types.is_binary: lambda value: f"\\x{value.hex()}",
}


def _bit_texts(values: pa.Array) -> Texts:
    """Return the hexadecimal digits of numbers' bits. Every NaN gets the same bits."""
    numbers = values.fill_null(0.0).to_numpy().copy()
    numbers[np.isnan(numbers)] = np.nan
    digits = numbers.itemsize * 2
    bits = numbers.view(f"u{numbers.itemsize}").tolist()
    return [
        f"{number:0{digits}x}" if is_there else None for number, is_there in zip(bits, values.is_valid().to_pylist(), strict=True)
    ]


def _list_texts(values: pa.Array) -> Texts | None:
    texts = arrow_texts(values.values)
    if texts is None:
        return None
    elements = [_element_text(text) for text in texts]
    offsets = values.offsets.to_pylist()
    lists = [f"{{{','.join(elements[start:end])}}}" for start, end in pairwise(offsets)]
    return [text if is_there else None for text, is_there in zip(lists, values.is_valid().to_pylist(), strict=True)]


def _element_text(text: str | None) -> str:
    if text is None:
        return "NULL"
    if _QUOTED_IN_PYTHON.match(text):
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return text
