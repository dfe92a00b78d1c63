"""The table of built-in types: one row has all rules of cdcpipe and cdcpipe-spark for the values of a type.

A new mapping of a type begins here, in `_ROWS`, and most mappings end here. Each column of a row is the rule for one place that
values pass:

- ``to_text``: a value in binary form becomes the text that the server prints (binary/decoder.py).
- ``column_type``: the column of Arrow and of Spark that holds the values exactly (arrow/, spark_sink/schema/types.py).
- ``selected``: a snapshot selects a column so that its values equal the stream's (spark_sink/snapshot/chunk.py).
- ``canonical``: the server writes the text that checksums are made of (cdcpipe/subcommands/checksum.py).
- ``is_plain``: the text needs no escaping in JSON (plugins/).
- ``delimiter``: what stands between the elements of an array (binary/decoder.py).

Arrays, vectors, ranges and multiranges have no row in `_ROWS`. `TYPES` has a row for each of them, derived from the type of its
parts (pg_type.py) and that type's row. A type that is not in `TYPES` belongs to a user or an extension: its row is `UNKNOWN`.

The text of a type is the text of its output function under the settings that cdcpipe pins (`cdcpipe.sql.SESSION_SETTINGS`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from cdcpipe.types.binary import geometry, network, numbers, strings, system, text_search, times
from cdcpipe.types.binary.reading import ToText
from cdcpipe.types.pg_type import PG_TYPES, type_ids_of
from cdcpipe.types.shape import Kind, Shape

__all__ = [
    "ARRAYS",
    "NUMERIC_IDS",
    "OUTPUT",
    "PLAIN_IDS",
    "REG_TYPES",
    "TYPES",
    "UNKNOWN",
    "BuiltInType",
    "ColumnType",
    "NoText",
    "Selected",
]


class ColumnType(enum.Enum):
    """The kinds of columns that hold values exactly, for types for which text is not the best representation.

    arrow/casts.py has the Arrow type of each and the cast from text, spark_sink/schema/types.py the Spark type, and
    spark_sink/spark/value_text.py the way back to text.
    """

    BINARY = "binary"
    BOOLEAN = "boolean"
    DATE = "date"
    DECIMAL = "decimal"
    """For a numeric with a precision and scale that Spark's decimal can have. Other numerics are strings."""
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    STRING = "string"
    """The server's text."""
    TIMESTAMP = "timestamp"
    """An instant: timestamp with time zone."""
    TIMESTAMP_NTZ = "timestamp_ntz"


@dataclass(frozen=True, slots=True)
class Selected:
    """How a snapshot selects a column: an SQL expression with ``{0}`` for the column.

    With ``is_text`` the expression gives the type's text, which is cast like the stream's texts. Otherwise the expression's values
    arrive exactly in the Arrow column. ``fits`` is the condition for values that the Arrow column can hold. The text of all others
    is selected in a second column.
    """

    expression: str
    is_text: bool = False
    fits: str | None = None


AS_IS: Final = Selected("{0}")
AS_INT8: Final = Selected("{0}::pg_catalog.int8")
CAST_TO_TEXT: Final = Selected("{0}::pg_catalog.text", is_text=True)
"""For types whose cast to text gives the same as their output function."""
PRINTED: Final = Selected("CASE WHEN {0} IS DISTINCT FROM NULL THEN pg_catalog.format('%s', {0}) END", is_text=True)
"""No cast: for char, inet or a user's type the cast to text differs from the type's output function."""


def _in_years_1_to_9999(name: str, time: str = "") -> Selected:
    """Return the rule for dates and times: infinity and other years come as text."""
    low, high = (f"'{date}{time}'::pg_catalog.{name}" for date in ("0001-01-01", "10000-01-01"))
    return Selected("{0}", fits=f"{{0}} >= {low} AND {{0}} < {high}")


OUTPUT: Final = "CASE WHEN {0} IS DISTINCT FROM NULL THEN concat({0}) END"
"""The text of a type's output function. A cast to text gives another text for some types (boolean, character(n), inet). concat uses
the output function, but never returns NULL. IS NULL would be true for a composite value whose fields are all NULL.
"""


def _bits(send: str, nan: str) -> str:
    """Return the expression for a number's bits. All of PostgreSQL's NaN get the bits ``nan``."""
    return f"CASE WHEN {{0}} = 'NaN' THEN '{nan}' ELSE encode({send}({{0}}), 'hex') END"


class NoText(NamedTuple):
    """The reason why cdcpipe can't turn a binary value into text without the server's catalog."""

    reason: str


@dataclass(frozen=True, slots=True)
class BuiltInType:
    """One row: the columns are those of the first lines of this module.

    ``to_text`` is a function, or what the type is made of. ``canonical`` is SQL with ``{0}`` for the column.
    """

    to_text: ToText | Shape | NoText
    column_type: ColumnType = ColumnType.STRING
    selected: Selected = PRINTED
    canonical: str = OUTPUT
    is_plain: bool = False
    delimiter: bytes = b","


UNKNOWN: Final = BuiltInType(NoText("it is not built in"))
"""The row of all types that are not built in: their OIDs mean other types in another database."""

_OBJECT_NAMES: Final = (
    "regclass",
    "regcollation",
    "regconfig",
    "regdictionary",
    "regnamespace",
    "regoper",
    "regoperator",
    "regproc",
    "regprocedure",
    "regrole",
    "regtype",
)
"""Types whose values are names of the server's objects."""

_TEXT: Final = BuiltInType(strings.plain_text)
_AS_IS_TEXT: Final = replace(_TEXT, selected=AS_IS)

_ROWS: Final[Mapping[str, BuiltInType]] = {
    "bool": BuiltInType(numbers.bool_text, ColumnType.BOOLEAN, AS_IS),
    "bytea": BuiltInType(strings.bytea_text, ColumnType.BINARY, AS_IS),
    # Numbers
    "int2": BuiltInType(numbers.int2_text, ColumnType.INT16, AS_IS, is_plain=True),
    "int4": BuiltInType(numbers.int4_text, ColumnType.INT32, AS_IS, is_plain=True),
    "int8": BuiltInType(numbers.int8_text, ColumnType.INT64, AS_IS, is_plain=True),
    "oid": BuiltInType(numbers.oid_text, ColumnType.INT64, AS_INT8, is_plain=True),
    "float4": BuiltInType(numbers.float4_text, ColumnType.FLOAT32, AS_IS, _bits("float4send", "7fc00000"), is_plain=True),
    "float8": BuiltInType(numbers.float8_text, ColumnType.FLOAT64, AS_IS, _bits("float8send", "7ff8000000000000"), is_plain=True),
    "numeric": BuiltInType(numbers.numeric_text, ColumnType.DECIMAL, CAST_TO_TEXT, is_plain=True),
    "money": BuiltInType(
        NoText("a value of type money has no currency and no decimal point in binary form: the server's lc_monetary has them")
    ),
    # Dates and times
    "date": BuiltInType(times.date_text, ColumnType.DATE, _in_years_1_to_9999("date"), is_plain=True),
    "timestamp": BuiltInType(
        times.timestamp_text, ColumnType.TIMESTAMP_NTZ, _in_years_1_to_9999("timestamp", " 00:00:00"), is_plain=True
    ),
    "timestamptz": BuiltInType(
        times.timestamptz_text, ColumnType.TIMESTAMP, _in_years_1_to_9999("timestamptz", " 00:00:00+00"), is_plain=True
    ),
    "time": BuiltInType(times.time_text, selected=CAST_TO_TEXT, is_plain=True),
    "timetz": BuiltInType(times.timetz_text, selected=CAST_TO_TEXT, is_plain=True),
    "interval": BuiltInType(times.interval_text, selected=CAST_TO_TEXT, is_plain=True),
    # Texts
    "text": _AS_IS_TEXT,
    "varchar": _AS_IS_TEXT,
    "bpchar": _AS_IS_TEXT,
    "char": BuiltInType(strings.char_text),
    "name": _TEXT,
    "uuid": BuiltInType(strings.uuid_text, selected=CAST_TO_TEXT, is_plain=True),
    "json": replace(_TEXT, selected=CAST_TO_TEXT),
    "jsonb": BuiltInType(strings.versioned_text, selected=CAST_TO_TEXT),
    "jsonpath": BuiltInType(strings.versioned_text),
    "xml": _TEXT,
    "bit": BuiltInType(strings.bit_text, is_plain=True),
    "varbit": BuiltInType(strings.bit_text, is_plain=True),
    "tsvector": BuiltInType(text_search.tsvector_text),
    "tsquery": BuiltInType(text_search.tsquery_text),
    "refcursor": _TEXT,
    # Network addresses
    "inet": BuiltInType(network.inet_text, is_plain=True),
    "cidr": BuiltInType(network.inet_text, is_plain=True),
    "macaddr": BuiltInType(network.macaddr_text, is_plain=True),
    "macaddr8": BuiltInType(network.macaddr8_text, is_plain=True),
    # Geometry
    "point": BuiltInType(geometry.point_text),
    "line": BuiltInType(geometry.line_text),
    "lseg": BuiltInType(geometry.lseg_text),
    "box": BuiltInType(geometry.box_text, delimiter=b";"),  # its text has commas
    "path": BuiltInType(geometry.path_text),
    "polygon": BuiltInType(geometry.polygon_text),
    "circle": BuiltInType(geometry.circle_text),
    # Identifiers that the server makes
    "xid": BuiltInType(numbers.oid_text, is_plain=True),
    "xid8": BuiltInType(numbers.xid8_text, is_plain=True),
    "cid": BuiltInType(numbers.oid_text, is_plain=True),
    "tid": BuiltInType(system.tid_text, is_plain=True),
    "pg_lsn": BuiltInType(system.pg_lsn_text, is_plain=True),
    "pg_snapshot": BuiltInType(system.snapshot_text),
    "txid_snapshot": BuiltInType(system.snapshot_text),
    **{
        name: BuiltInType(NoText(f"a value of type {name} is a number in binary form: the name is in the server's catalog"))
        for name in _OBJECT_NAMES
    },
    # Types of columns of the catalog, and pseudo-types
    "aclitem": BuiltInType(NoText("type aclitem has no binary form")),
    "gtsvector": BuiltInType(NoText("type gtsvector has no binary form")),
    "pg_ndistinct": BuiltInType(NoText("the text of type pg_ndistinct depends on the server's version")),
    "pg_dependencies": BuiltInType(NoText("the text of type pg_dependencies depends on the server's version")),
    "pg_mcv_list": BuiltInType(strings.bytea_text),
    "pg_node_tree": _TEXT,
    "record": BuiltInType(Shape(Kind.COMPOSITE)),
    "unknown": _TEXT,
    "cstring": _TEXT,
}
"""The types that are not made of others, by pg_type.typname."""


def _types() -> dict[int, BuiltInType]:
    rows = dict(zip(type_ids_of(*_ROWS), _ROWS.values(), strict=True))
    # In this order, because a multirange is made of ranges, and an array may be made of either.
    for kinds in ((Kind.VECTOR, Kind.RANGE), (Kind.MULTIRANGE,), (Kind.ARRAY,)):
        made = {type_id: row for type_id, row in PG_TYPES.items() if row.kind in kinds and row.of in rows}
        for type_id, row in made.items():
            assert row.kind is not None
            rows[type_id] = BuiltInType(Shape(row.kind, row.of, rows[row.of].delimiter))
    return rows


TYPES: Final[Mapping[int, BuiltInType]] = _types()
"""All types that cdcpipe knows without a server's catalog, by OID."""

ARRAYS: Final[Mapping[int, int]] = {
    type_id: PG_TYPES[type_id].of
    for type_id, row in TYPES.items()
    if PG_TYPES[type_id].kind is Kind.ARRAY and isinstance(row.to_text, Shape) and row.to_text.delimiter == b","
}
"""The type of the elements of each array type that becomes a list in Arrow and Spark. Not box[]: it has another delimiter."""

NUMERIC_IDS: Final = type_ids_of("numeric", "_numeric")
"""The types whose texts lose trailing zeros when numbers are compared without their scale."""

PLAIN_IDS: Final = tuple(type_id for type_id, row in TYPES.items() if row.is_plain)
"""The types whose texts have no character that JSON escapes."""

REG_TYPES: Final[Mapping[int, str]] = dict(zip(type_ids_of(*_OBJECT_NAMES), _OBJECT_NAMES, strict=True))
"""Names of the server's objects, which are numbers in binary form."""
