"""Maps PostgreSQL's types and names to Spark's, also over several versions of a table.

**Types.** A type that Spark can represent exactly gets this Spark type. Every other type becomes a string with the server's exact
text. A type that is not built in (an enum, a domain, a type of an extension) is a string, because its OID means another type in
another database. An array of a built-in type becomes an array: an array of uuids is an array of strings. The exception is box,
whose arrays have another delimiter.

With ``native`` instead of ``exact`` (`as_typed`) every numeric becomes a decimal, if necessary decimal(38,18). A number that does
not fit is in ``_cdc_exact``, like any such value. Trailing zeros (1.50) are lost.

**Names.** A column keeps its name if Spark can tell it from all others. Otherwise `column_names` writes ``_cdc_column_`` and the
name, with every byte but ``a-z 0-9 _`` as ``%XX`` (`original_name` reverses this). This is done for

- an empty name, and a name that begins with ``_cdc_``, the prefix of the metadata;
- a name that ends like a versioned name, ``total__int``;
- a name that differs only in case from an earlier column, because Spark ignores case;
- ``_metadata``, the name of Spark's hidden column: Delta finds deletion vectors by it, so it can't read such a table;
- with ``--column-names sanitize``, a name that Delta can't have without column mapping (a space, a dot, one of ``,;{}()=``).

For the last two reasons only a new column gets such a name: a column that a table has under its own name keeps it, and the other
way round.

**Versions.** A column may get another type later. In a schema that grew over several versions, a column is widened if the new type
holds every value of the old one exactly (`holds`). With any other type it becomes another column, ``NAME__TYPE``
(`versioned_name`), which is never widened. An integer that has become narrower stays in its column: PostgreSQL allows the change
only if all values fit. Other values of a narrower type stay in a wider column if a later version has its type: an earlier attempt
may have widened it for that version. `merge_columns` extends such a schema, `assign_columns` finds a relation's columns in it.

Columns of Parquet tables are not widened, because readers could not merge the schemas of the files any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from cdcpipe.masks import NO_MASKS
from cdcpipe.types.names import numeric_modifier
from cdcpipe.types.pg_type import type_ids_of
from cdcpipe.types.table import ARRAYS, NUMERIC_IDS, TYPES, UNKNOWN, ColumnType
from spark_sink.schema.table import NATIVE, SchemaError

if TYPE_CHECKING:
    from cdcpipe.masks import Masks
    from cdcpipe.pgoutput.messages import Column, Relation

__all__ = [
    "DELETED_AT",
    "ENDS",
    "INEXACT_MESSAGE",
    "MAX_PRECISION",
    "MESSAGE_SCHEMA",
    "METADATA_FIELDS",
    "METADATA_PREFIX",
    "OPS",
    "SPARK_TYPES",
    "as_typed",
    "assign_columns",
    "base_names",
    "column_names",
    "fields_by_name",
    "find_columns",
    "holds",
    "is_json",
    "json_fields",
    "merge_columns",
    "original_name",
    "plain_name",
    "replica_schema",
    "spark_type",
    "split_schema",
    "typed_schema",
    "versioned_name",
]

METADATA_PREFIX: Final = "_cdc_"
INEXACT_MESSAGE: Final = "table %s, column %s: values that its type can't hold, %d so far, are NULL; their text is in _cdc_exact"
"""The log message for a column with such values."""

OPS: Final = {"I": "insert", "U": "update", "D": "delete", "T": "truncate"}
ENDS: Final = ("truncate", "drop")
"""The operations that end all rows. The stream has no DROP TABLE, so this row comes from captured DDL."""

_JSON_IDS: Final = type_ids_of("json", "jsonb", "_json", "_jsonb")
[_TEXT_ID] = type_ids_of("text")
MAX_PRECISION: Final = 38
_NATIVE_SCALE: Final = 18

SPARK_TYPES: Final[Mapping[ColumnType, DataType]] = {
    ColumnType.BINARY: BinaryType(),
    ColumnType.BOOLEAN: BooleanType(),
    ColumnType.DATE: DateType(),
    ColumnType.FLOAT32: FloatType(),
    ColumnType.FLOAT64: DoubleType(),
    ColumnType.INT16: ShortType(),
    ColumnType.INT32: IntegerType(),
    ColumnType.INT64: LongType(),
    ColumnType.STRING: StringType(),
    ColumnType.TIMESTAMP: TimestampType(),
    ColumnType.TIMESTAMP_NTZ: TimestampNTZType(),
}
"""The Spark type of each column type. Decimals are missing, because they depend on the type modifier.

cdcpipe/types/table.py has the column type of each PostgreSQL type.
"""


def spark_type(column: Column) -> DataType:
    """Return the Spark type that holds the column's values exactly; StringType, for its text, if there is no other."""
    element = ARRAYS.get(column.type_id)
    if element is not None:
        # The modifier of an array applies to its elements.
        return ArrayType(_scalar_type(element, column.type_modifier))
    return _scalar_type(column.type_id, column.type_modifier)


def _scalar_type(type_id: int, type_modifier: int) -> DataType:
    column_type = TYPES.get(type_id, UNKNOWN).column_type
    if column_type is not ColumnType.DECIMAL:
        return SPARK_TYPES[column_type]
    if type_modifier >= 0:
        precision, scale = numeric_modifier(type_modifier)
        if 0 <= scale <= precision <= MAX_PRECISION and precision > 0:  # 0 only in a message that no server has written
            return DecimalType(precision, scale)
    return StringType()


def as_typed(relation: Relation, types: str, masks: Masks = NO_MASKS) -> Relation:
    """Return the relation for a warehouse with these types and masks.

    With ``native`` every numeric gets a precision that fits a decimal. A masked column is a text.
    """
    if types == NATIVE:
        relation = replace(relation, columns=tuple(map(_native, relation.columns)))
    masked = masks.kinds(relation.namespace, relation.name, [column.name for column in relation.columns]) if masks.rules else {}
    if masked:
        columns = (_as_text(column) if column.name in masked else column for column in relation.columns)
        relation = replace(relation, columns=tuple(columns))
    return relation


def _as_text(column: Column) -> Column:
    return replace(column, type_id=_TEXT_ID, type_modifier=-1)


def _native(column: Column) -> Column:
    if column.type_id not in NUMERIC_IDS:
        return column
    precision, scale = MAX_PRECISION, _NATIVE_SCALE
    if column.type_modifier >= 0:
        precision, scale = numeric_modifier(column.type_modifier)
        # numeric(5,-2) has multiples of 100. numeric(3,5) has two zeros after its point.
        precision, scale = max(precision - min(scale, 0), scale), max(scale, 0)
        if precision > MAX_PRECISION:
            precision, scale = MAX_PRECISION, min(scale, _NATIVE_SCALE)
    return replace(column, type_modifier=(precision << 16 | scale) + 4)


_ESCAPED_PREFIX: Final = METADATA_PREFIX + "column_"
_VERSIONED: Final = re.compile(
    r"(.*)__(?:array_)?(?:boolean|smallint|int|bigint|float|double|decimal_\d+_\d+|string|binary|date|timestamp|timestamp_ntz)",
    re.IGNORECASE | re.DOTALL,
)


def _escaped_name(name: str) -> str:
    spelled = re.sub(r"[^a-z0-9_]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), name)
    # Two underscores would look like the beginning of a version.
    return _ESCAPED_PREFIX + spelled.replace("__", "_%5F")


_HIDDEN: Final = "_metadata"
"""The hidden column of Spark's tables of files."""
_UNFIT: Final = re.compile(r"[ ,;{}()\n\t=.]")
"""The characters for which delta/schema.py turns on column mapping."""


def original_name(name: str) -> str:
    """Return the name of a column in PostgreSQL. ``name`` must not be a versioned name."""
    return unquote(name.removeprefix(_ESCAPED_PREFIX)) if name.startswith(_ESCAPED_PREFIX) else name


def plain_name(name: str) -> str:
    """Return the name in PostgreSQL of a changelog's column. ``name`` may be a versioned name."""
    versioned = _VERSIONED.fullmatch(name)
    return original_name(name if versioned is None else versioned[1])


def column_names(relation: Relation) -> list[str]:
    """Return the names of the relation's columns in Spark, in order."""
    names: list[str] = []
    taken: set[str] = set()
    for column in relation.columns:
        name, folded = column.name, column.name.lower()
        if not name or folded.startswith(METADATA_PREFIX) or folded in taken or _VERSIONED.fullmatch(name):
            name = _escaped_name(name)
        taken.add(name.lower())
        names.append(name)
    return names


def base_names(columns: StructType, relation: Relation) -> list[str]:
    """Return the names of the relation's columns in a schema that has them, without the type that a versioned name ends with."""
    known = _Columns(columns)
    return [known.base_name(name, column) for name, column in zip(column_names(relation), relation.columns, strict=True)]


def versioned_name(name: str, data_type: DataType) -> str:
    """Return the name of a column if ``name`` is already a column of another type."""
    return f"{name}__{re.sub('[(,<]', '_', data_type.simpleString()).rstrip(')>')}"


_INTEGERS: Final = (ShortType(), IntegerType(), LongType())
_INTEGER_DIGITS: Final = {ShortType(): 10, IntegerType(): 10, LongType(): 20}
"""How many digits before the point a decimal needs so that Delta Lake and Spark's Parquet reader can widen an integer to it."""


def holds(wide: DataType, narrow: DataType) -> bool:
    """Tell whether ``wide`` holds all values of ``narrow`` exactly, and readers can read files with ``narrow`` as ``wide``."""
    if wide in _INTEGERS and narrow in _INTEGERS:
        return _INTEGERS.index(wide) >= _INTEGERS.index(narrow)
    match wide, narrow:
        case DecimalType(), DecimalType():
            return bool(wide.scale >= narrow.scale and wide.precision - wide.scale >= narrow.precision - narrow.scale)
        case DecimalType(), ShortType() | IntegerType() | LongType():
            return bool(wide.precision - wide.scale >= _INTEGER_DIGITS[narrow])
        case (DoubleType(), ShortType() | IntegerType() | FloatType()) | (TimestampNTZType(), DateType()):
            return True
    return bool(wide == narrow)


def merge_columns(
    columns: StructType | None, relations: Iterable[Relation], *, widen: bool = True, sanitize: bool = False
) -> StructType:
    """Return ``columns``, widened and extended as the relations need it.

    ``columns`` are the table's columns so far, without metadata; ``relations`` are the later versions, in order. Without ``widen``
    a column with another type becomes another column. With ``sanitize`` new columns have only names that need no column mapping.

    Merged again with the same relations, the result stays as it is: a changelog gets its columns before the rows, and the next
    attempt must find the same places for these.
    """
    merged = _Columns(columns or StructType())
    # A table that is made anew again and again has the same columns each time.
    described = [
        list(zip(column_names(first), first.columns, strict=True)) for _, (first, *_) in groupby(relations, attrgetter("columns"))
    ]
    for number, named in enumerate(described, 1):
        for name, column in named:
            merged.find_or_add(name, column, islice(described, number, None), widen=widen, sanitize=sanitize)
    return StructType(merged.fields)


def assign_columns(columns: StructType, relation: Relation) -> list[StructField]:
    """Return the field for each of the relation's columns. Raises SchemaError if a column has no field of its name and type."""
    known = _Columns(columns)
    found = []
    for name, column in zip(column_names(relation), relation.columns, strict=True):
        field = known.find(name, column)
        if field is None:
            table = f"{relation.namespace}.{relation.name}"
            kind = spark_type(column)
            msg = f"table {table!r} has a column {column.name!r} of Spark type {kind.simpleString()}, but the given schema does not"
            raise SchemaError(
                msg, hint=f"add a column {name!r} to the schema, or {versioned_name(name, kind)!r} if {name!r} has another type"
            )
        found.append(field)
    return found


def fields_by_name(columns: StructType, relation: Relation) -> dict[str, StructField]:
    """Return what `assign_columns` returns, by the columns' names in PostgreSQL."""
    return dict(zip([column.name for column in relation.columns], assign_columns(columns, relation), strict=True))


def find_columns(columns: StructType, relation: Relation) -> list[StructField | None]:
    """Return the field for each of the relation's columns; None for a column without one."""
    known = _Columns(columns)
    return [known.find(name, column) for name, column in zip(column_names(relation), relation.columns, strict=True)]


def is_json(column: Column) -> bool:
    """Tell whether a column is json or jsonb, or an array of one of them."""
    return column.type_id in _JSON_IDS


def json_fields(columns: StructType, relation: Relation) -> list[StructField]:
    """Return the fields for the relation's columns of type json and jsonb, and of arrays of them, as far as there are fields."""
    found = zip(find_columns(columns, relation), relation.columns, strict=True)
    return [field for field, column in found if field is not None and is_json(column)]


class _Columns:
    """Fields that are found by name, ignoring case."""

    def __init__(self, columns: StructType) -> None:
        self.fields = [StructField(field.name, field.dataType) for field in columns.fields]
        self._by_name = {field.name.lower(): field for field in self.fields}

    def base_name(self, name: str, column: Column) -> str:
        """Return the plain name, or the escaped one if the table has that: it was sanitized, or there was another such column."""
        longer = _escaped_name(column.name)
        return longer if longer.lower() in self._by_name else name

    def find(self, name: str, column: Column) -> StructField | None:
        """Return the field for the column: one of its type, or a widened one. None if there is none."""
        base, kind = self.base_name(name, column), spark_type(column)
        for candidate in (base, versioned_name(base, kind)):
            field = self._by_name.get(candidate.lower())
            if field is not None and field.dataType == kind:
                return field
        field = self._by_name.get(base.lower())
        return field if field is not None and holds(field.dataType, kind) else None

    def find_or_add(
        self, name: str, column: Column, later: Iterable[Iterable[tuple[str, Column]]], *, widen: bool, sanitize: bool
    ) -> None:
        """Widen the column's field, or add a field, if no field holds the column. ``later`` has the columns of later versions."""
        base, kind = self.base_name(name, column), spark_type(column)
        field, found = self._by_name.get(base.lower()), self.find(name, column)
        if found is not None and (found.dataType == kind or (widen and self._is_place(found, later))):
            return
        if field is not None and widen and holds(kind, field.dataType):
            field.dataType = kind
            return
        if field is None and (base.lower() == _HIDDEN or (sanitize and _UNFIT.search(base))):
            base = _escaped_name(column.name)
        field = StructField(base if field is None else versioned_name(base, kind), kind)
        self.fields.append(field)
        self._by_name[field.name.lower()] = field

    def _is_place(self, wider: StructField, later: Iterable[Iterable[tuple[str, Column]]]) -> bool:
        """Tell whether values of a narrower type go to this field: it has integers, or a later version of the column its type."""
        return wider.dataType in _INTEGERS or any(
            spark_type(column) == wider.dataType and self.base_name(name, column).lower() == wider.name.lower()
            for named in later
            for name, column in named
        )


def typed_schema(columns: StructType) -> StructType:
    """Return the schema of typed changes: the table's columns and the metadata.

    A table without columns has no ``_cdc_old``, because no file format has an empty struct.
    """
    old = [StructField("_cdc_old", StructType(columns.fields))] if columns.fields else []
    return StructType(
        [
            *columns.fields,
            *CHANGE_FIELDS,
            StructField("_cdc_unchanged", ArrayType(StringType())),
            *old,
            StructField("_cdc_exact", MapType(StringType(), StringType())),
        ]
    )


CHANGE_FIELDS: Final = (
    StructField("_cdc_op", StringType()),
    StructField("_cdc_epoch", IntegerType()),
    StructField("_cdc_end_lsn", LongType()),
    StructField("_cdc_ordinal", IntegerType()),
    StructField("_cdc_xid", LongType()),
    StructField("_cdc_commit_time", TimestampType()),
)


MESSAGE_SCHEMA: Final = StructType(
    [
        StructField("prefix", StringType()),
        StructField("content", BinaryType()),
        StructField("transactional", BooleanType()),
        StructField("_cdc_epoch", IntegerType()),
        StructField("_cdc_end_lsn", LongType()),
        StructField("_cdc_ordinal", IntegerType()),
        StructField("_cdc_lsn", LongType()),
        StructField("_cdc_xid", LongType()),
        StructField("_cdc_commit_time", TimestampType()),
    ]
)
"""The columns of logical messages, in the data source and in their changelog."""


METADATA_FIELDS: Final = {field.name: field for field in typed_schema(StructType([StructField("c", StringType())])).fields[1:]}
"""The metadata columns of a typed row, by name. The type of ``_cdc_old`` depends on the table."""


DELETED_AT: Final = "_cdc_deleted_at"
"""The column of a replica that keeps deleted rows: when the row was deleted; NULL for a row that exists."""


def replica_schema(columns: StructType, *, keeps_deleted: bool) -> StructType:
    """Return the schema of a new replica with these columns."""
    return StructType([*columns.fields, StructField(DELETED_AT, TimestampType())]) if keeps_deleted else columns


def split_schema(schema: StructType) -> tuple[StructType, StructType | None]:
    """Return the table's columns of a typed schema, and the columns of ``_cdc_old``.

    Raises SchemaError if a metadata column has another type than expected.
    """
    columns, old = [], None
    for field in schema:
        name = field.name
        if not name.startswith(METADATA_PREFIX) or name.startswith(_ESCAPED_PREFIX):
            columns.append(field)
        elif name == "_cdc_old" and isinstance(field.dataType, StructType):
            old = field.dataType
        elif name not in METADATA_FIELDS or METADATA_FIELDS[name].dataType != field.dataType:
            msg = f"the given schema has a column {name} of type {field.dataType.simpleString()}"
            raise SchemaError(msg, hint=f"names with {METADATA_PREFIX} are reserved for the metadata of typed rows")
    return StructType(columns), old
