"""Finds the keys of former rows that a copy may have in another form: nobody can tell whether it has such a row again. No writes.

An ALTER TYPE of a key's column puts new values into another column, or gives old values another text. The forms are those since the
last copy. If that does not say its types, or if there is none, the stream's descriptions do: the schema history has them. Unknown
types are not taken for equal. Old values of the same type have another text after ALTER TYPE … RENAME VALUE: captured DDL tells it,
once the tables have come as far as the copy. Nobody tells what was altered in a gap of the log, or without captured DDL.
"""

from __future__ import annotations

from functools import reduce as fold
from operator import or_
from typing import TYPE_CHECKING, TypeAlias

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from cdcpipe.masks import HASH
from cdcpipe.types.names import format_built_in_type
from spark_sink.changelog.ddl_log import DdlLog
from spark_sink.changelog.schema_history import SchemaHistory
from spark_sink.changelog.unknown_rows import ALTER_TYPE, changes_texts
from spark_sink.schema.casts import keeps_values
from spark_sink.schema.catalog_answers import CatalogAnswers
from spark_sink.spark.sql import quote
from spark_sink.warehouse import gaps
from spark_sink.warehouse.reached import reached_lsn
from spark_sink.warehouse.table_names import mask_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pyspark.sql import Column, DataFrame

    from spark_sink.changelog.schema_history import SchemaVersion
    from spark_sink.replica.pieces import Piece
    from spark_sink.schema.table import Table, Version
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["has_uncertain_key", "is_hashed", "types_told"]

_Type: TypeAlias = tuple[int, int]
"""The OID and the modifier of a type."""


def has_uncertain_key(warehouse: Warehouse, table: Table, changes: DataFrame, piece: Piece, snapshot_lsn: int) -> Column | None:
    """Return an expression: whether the snapshot may have the key of a former row in another form. None if no row has such a key.

    A date as a timestamp has another text, and an earlier value is in another column. A new type may also give values another
    text in the same column.
    """
    versions = [each for each in warehouse.versions(table) if each.end_lsn <= snapshot_lsn]
    copy = next((each for each in reversed(versions) if each.snapshot and each.end_lsn == snapshot_lsn), None)
    before = [each for each in versions if each.end_lsn < snapshot_lsn]
    is_copy = (F.col("_cdc_end_lsn") == snapshot_lsn) & (F.col("_cdc_op") == "snapshot")
    if copy is None or not before or before[-1].relation_id != copy.relation_id or changes.where(is_copy).isEmpty():
        return None  # the rows are those of another table, or the copy has none
    now, former = _types(copy), _former_types(warehouse, changes, before, copy)
    altered = _altered_types(warehouse, changes, before, copy, {name for names in piece.columns for name in names})
    forms = []
    for names in piece.columns:
        has_key = fold(or_, map(_has, names))
        for number, name in copy.snapshot:
            if name not in names:
                continue
            is_text = is_hashed(warehouse, table, copy, number)
            is_altered = number in now and now[number][0] in altered
            if number in now and (is_altered or not _keep(former.get(number), now[number], is_text=is_text)):
                forms.append(has_key)
            elif len(names) > 1:
                forms.append(has_key & ~_has(name))
    return fold(or_, forms) if forms else None


def _keep(former: Iterable[_Type] | None, now: _Type, *, is_text: bool) -> bool:
    return former is not None and all(keeps_values(each, now, is_text=is_text) for each in former)


def _altered_types(
    warehouse: Warehouse, changes: DataFrame, before: Sequence[Version], copy: Version, keys: Collection[str]
) -> frozenset[int]:
    """Return the types whose values may have other texts since the copy before. If all ``keys`` have built-in types, none."""
    numbers = {number for number, name in copy.snapshot if name in keys}
    types = {found[0] for number, found in _types(copy).items() if number in numbers and format_built_in_type(*found) is None}
    if not types:
        return frozenset()
    copied = _copy_before(before, copy)
    log, after_lsn = DdlLog(changes.sparkSession, warehouse), 0 if copied is None else copied.end_lsn
    is_ahead = reached_lsn(warehouse, warehouse.source()) < copy.end_lsn
    if log.exists and (is_ahead or _has_gap(warehouse, after_lsn, copy.end_lsn)):
        return frozenset(types)  # the stream may yet tell of an ALTER TYPE from before the copy, or never does
    return frozenset().union(*(each.types for each in log.messages(ALTER_TYPE, after_lsn, copy.end_lsn) if changes_texts(each)))


def _has_gap(warehouse: Warehouse, after_lsn: int, until_lsn: int) -> bool:
    """Tell whether the log lacks changes from between the two positions."""
    return any(each.gap.after_lsn < until_lsn and after_lsn < each.start.lsn for each in gaps.read(warehouse))


def _copy_before(before: Sequence[Version], copy: Version) -> Version | None:
    return next((each for each in reversed(before) if each.snapshot and each.relation_id == copy.relation_id), None)


def _former_types(
    warehouse: Warehouse, changes: DataFrame, before: Sequence[Version], copy: Version
) -> Mapping[int, Iterable[_Type]]:
    """Return the types that rows from before a copy have in its columns, by the columns' numbers. Those not known are missing."""
    copied = _copy_before(before, copy)
    schemas = SchemaHistory(changes.sparkSession, warehouse, CatalogAnswers(None))
    # What a row from before looked like is a question to the server from which it came: the copy's may have lost these changes. All
    # of its descriptions count: one with another type of the key need not begin a version.
    servers, of_table = schemas.captured.servers, [each for each in (*before, copy) if each.relation_id == copy.relation_id]
    asked = {min(servers.last_place(each.place), (copy.end_lsn, -1)) for each in of_table}
    found = {each.place: each for place in asked for each in schemas.until(copy.relation_id, place)}
    told = [found[place] for place in sorted(found)]
    if copied is not None and copied.described:
        return types_told([each for each in told if each.place > copied.place], copy, copied)
    if copied is not None and (not told or told[0].place > copied.place):
        return {}  # an older cdcpipe has copied the table before the stream described it
    return types_told(told, copy)


def types_told(told: Iterable[SchemaVersion], copy: Version, copied: Version | None = None) -> Mapping[int, set[_Type]]:
    """Return the types that the columns of a copy have in the copy before it and in these descriptions, as far as they are known.

    If the numbers of a description are not certain, a column is that with its name.
    """
    former = {} if copied is None else _types(copied)
    found = {number: {former[number]} if number in former else set() for number, *_ in copy.described}
    for version in told:
        types = [(column.type_id, column.type_modifier) for column in version.relation.columns]
        if version.facts is not None:
            known = dict(zip((fact.number for fact in version.facts), types, strict=True))
            for number in found.keys() & known.keys():  # one that it lacks came later
                found[number].add(known[number])
            continue
        named = dict(zip((column.name for column in version.relation.columns), types, strict=True))
        for number, name, *_ in copy.described:
            if name in named and number in found:
                found[number].add(named[name])
            else:  # it may have had another name
                found.pop(number, None)
    return {number: types for number, types in found.items() if types}


def _types(copy: Version) -> dict[int, _Type]:
    return {number: (type_id, modifier) for number, _, type_id, modifier in copy.described}


def is_hashed(warehouse: Warehouse, table: Table, copy: Version, number: int) -> bool:
    """Tell whether the tables have hashes of a column of a copy: under one of the names of `mask_names`."""
    names = [name for each, name, *_ in copy.described if each == number]
    called = mask_names(warehouse, [table])[table]
    return any(HASH in warehouse.masks.kinds(*each, names).values() for each in called)


def _has(name: str) -> Column:
    """Return an expression: whether a row in a changelog's layout has a value in this column."""
    is_exact = F.coalesce(F.map_contains_key("_cdc_exact", name), F.lit(False))
    return F.col(quote(name)).isNotNull() | is_exact
