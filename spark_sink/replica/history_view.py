"""Writes the SQL of a view with all versions of a table's rows, made from its changelog at each read. Text only: it reads nothing.

The view has the columns and the rows of `history.read_history`. It is a text that does not change, but a table's key and its past
do. So `history_shape` says what the text depends on, and raises UnfitError for a table whose past the SQL cannot express. The rest
the view finds in the changelog whenever it is read:

- the places where all rows end: TRUNCATE, DROP TABLE, snapshots;
- whether a purge has removed changes since the view was made. Then the history begins with the first of those places that is left,
  or there is an error;
- whether the table has a snapshot that the text does not know. It may have another key, so that is an error.

The value of an unsent column is the last one that the row had, also with an earlier key. All changes of a row, through all of its
keys, are a *chain*. A window over each chain finds the values. Only an update of the key links two keys of a chain. So the chains
are found in an array of these updates: each round doubles the number of links that are followed. (`WITH RECURSIVE` would follow one
link a round, and Spark limits the rounds.)

The text names the changelog once. So all parts of a read see the same changes, with Parquet, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql.types import StringType

from cdcpipe.errors import CdcpipeError
from spark_sink.replica.fills import constant_sql
from spark_sink.replica.history import names_beside
from spark_sink.replica.pieces import cut_pieces
from spark_sink.replica.reduction import data_columns
from spark_sink.replica.replay import LAST_LSN
from spark_sink.replica.row_keys import differs_sql, key_sql
from spark_sink.schema.table import copies_until
from spark_sink.schema.types import ENDS
from spark_sink.source.typed import OLD_PREFIX
from spark_sink.spark.sql import literal, quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql.types import DataType, StructType

    from spark_sink.replica.pieces import Key
    from spark_sink.schema.table import Fill, Place, Version

__all__ = ["HistoryShape", "Known", "UnfitError", "history_shape", "known_sql", "view_sql"]

_SENT_WHOLE: Final = (
    "boolean",
    "byte",
    "short",
    "integer",
    "long",
    "float",
    "double",
    "date",
    "timestamp",
    "timestamp_ntz",
)
"""Types of a fixed length. PostgreSQL stores their values in the row, so every update sends them."""

_POSITION: Final = "struct(_cdc_end_lsn, CAST(_cdc_ordinal AS BIGINT) AS _cdc_ordinal)"
_BEFORE_ALL: Final = -(1 << 31) - 1
"""An ordinal before those of a snapshot's rows, which have all 32 bits (snapshot/chunk.py)."""
_NO_LSNS: Final = "CAST(array() AS ARRAY<BIGINT>)"
_BARRIERS: Final = ", ".join(map(literal, (*ENDS, "snapshot")))


class UnfitError(CdcpipeError):
    """The SQL of a view cannot express a table's past."""


@dataclass(frozen=True, slots=True)
class HistoryShape:
    """A table's past, as far as a view over its changelog cannot find it there.

    - ``key`` has the columns of the key, as in a `Piece`. It is the same for all changes after ``purged_lsn``.
    - ``new_tables`` are the places from which on another table has the name.
    - ``fills`` are the values that rows from before a place got there, the newest place first.
    - ``snapshots`` are the LSNs of the table's snapshots.
    """

    key: Key
    new_tables: tuple[Place, ...] = ()
    fills: tuple[tuple[Place, tuple[Fill, ...]], ...] = ()
    snapshots: frozenset[int] = frozenset()
    purged_lsn: int = 0


@dataclass(frozen=True, slots=True)
class Known:
    """Facts of a changelog when a view of it was made: its first LSN, and the LSNs of the snapshots that are in it."""

    first_lsn: int
    snapshots: frozenset[int] = frozenset()

    @classmethod
    def of(cls, rows: Iterable[tuple[int | None, bool]]) -> Known | None:
        """Read the rows of `known_sql`; return None for an empty changelog."""
        found = list(rows)
        first_lsn = next(lsn for lsn, is_first in found if is_first)
        return None if first_lsn is None else cls(first_lsn, frozenset(lsn for lsn, is_first in found if not is_first and lsn))


def history_shape(versions: Sequence[Version], purged_lsn: int = 0) -> HistoryShape:
    """Return the past of a table with these versions. Its changelog may lack changes up to ``purged_lsn``.

    Raises UnfitError, with the reason, if `view_sql` cannot express it: a change of the key, or a column that was renamed.
    """
    since = max((index for index, version in enumerate(versions) if version.end_lsn <= purged_lsn), default=0)
    pieces = list(cut_pieces(versions, purged_lsn, LAST_LSN))
    if any(not version.key for version in versions[since:]):
        raise UnfitError("some of its changes are from a time when it had no key")
    if len({piece.columns for piece in pieces}) != 1:
        raise UnfitError("its key has changed")
    fills = tuple(((piece.after_lsn + 1, piece.first_ordinal), piece.fills) for piece in reversed(pieces) if piece.fills)
    moved = sorted({fill.column for _, each in fills for fill in each if fill.source is not None})
    if moved:
        raise UnfitError(f"old rows have values of a renamed column or of another type in {', '.join(moved)}")
    if any(piece.is_new_key for piece in pieces):
        raise UnfitError("a column of its key was added or replaced")
    return HistoryShape(
        key=pieces[0].columns,
        new_tables=tuple((piece.after_lsn + 1, piece.first_ordinal) for piece in pieces if piece.is_new_table),
        fills=fills,
        snapshots=copies_until(versions),
        purged_lsn=purged_lsn,
    )


def known_sql(changelog: str, shape: HistoryShape) -> str:
    """Return a query for the members of `Known`. Afterwards read the purged position, for the shape of the view."""
    first = f"SELECT min(_cdc_end_lsn) AS lsn, true AS is_first FROM {changelog}"
    if not shape.snapshots:
        return first
    listed = ", ".join(map(str, sorted(shape.snapshots)))
    copies = f"SELECT DISTINCT _cdc_end_lsn, false FROM {changelog} WHERE _cdc_op = 'snapshot' AND _cdc_end_lsn IN ({listed})"
    return f"{first} UNION ALL {copies}"


def view_sql(changelog: str, schema: StructType, shape: HistoryShape, known: Known) -> str:
    """Return the query of a view with all versions of a table's rows.

    ``changelog`` is the quoted name of the changelog, or another relation of SQL, and ``schema`` its schema.
    """
    columns = data_columns(schema)
    unsent = _may_be_unsent(schema, shape)
    parts = [
        ("_cdc_changes", f"SELECT * FROM {changelog}"),
        ("_cdc_ends", _ends_sql(shape)),
        ("_cdc_frame", _frame_sql(shape, known)),
        ("_cdc_placed", _placed_sql(columns, schema, shape.key)),
        ("_cdc_events", _events_sql(len(shape.key))),
        ("_cdc_followed", _followed_sql()),
    ]
    if unsent:
        parts += [
            ("_cdc_lives", _lives_sql()),
            ("_cdc_links", _links_sql()),
            ("_cdc_chains", _chains_sql()),
            ("_cdc_versions", _versions_sql(unsent, schema, shape)),
        ]
    else:
        parts.append(("_cdc_versions", "SELECT * FROM _cdc_followed WHERE NOT _cdc_gone"))
    texts = ",\n".join(f"{name} AS (\n{sql}\n)" for name, sql in parts)
    return f"WITH {texts}\n{_final_sql(columns, unsent, schema, shape)}"


def _may_be_unsent(schema: StructType, shape: HistoryShape) -> list[str]:
    """Return the columns whose value may be another one than that of the change itself: unsent, or filled."""
    filled = {fill.column for _, fills in shape.fills for fill in fills}
    return [name for name in data_columns(schema) if name in filled or schema[name].dataType.typeName() not in _SENT_WHOLE]


def _place_sql(place: Place) -> str:
    return f"named_struct('_cdc_end_lsn', {place[0]}L, '_cdc_ordinal', {place[1]}L)"


def _lsns_sql(lsns: Iterable[int]) -> str:
    found = ", ".join(f"{lsn}L" for lsn in sorted(lsns))
    return f"array({found})" if found else _NO_LSNS


def _raise_sql(message: str) -> str:
    return f"raise_error({literal(message)})"


def _ends_sql(shape: HistoryShape) -> str:
    """Return a query for the places where all rows end, as `ends.all_ends` has them, and where another table gets the name."""
    ordinal = f"CASE _cdc_op WHEN 'snapshot' THEN {_BEFORE_ALL}L WHEN 'drop' THEN _cdc_ordinal - 1 ELSE _cdc_ordinal END"
    changes = (
        "SELECT _cdc_place, _cdc_op, min(_cdc_commit_time) AS _cdc_time FROM (SELECT _cdc_op, _cdc_commit_time, "
        f"struct(_cdc_end_lsn, {ordinal} AS _cdc_ordinal) AS _cdc_place FROM _cdc_changes WHERE _cdc_op IN ({_BARRIERS})) "
        "GROUP BY _cdc_place, _cdc_op"
    )
    new_tables = [
        f"SELECT {_place_sql((lsn, ordinal - 1))}, 'table', min(_cdc_commit_time) FROM _cdc_changes WHERE _cdc_end_lsn = {lsn}L"
        for lsn, ordinal in shape.new_tables
    ]
    return "\nUNION ALL ".join([changes, *new_tables])


def _frame_sql(shape: HistoryShape, known: Known) -> str:
    """Return a query for one row: the ends of all rows, in order, and the LSN from which on the changelog has every change."""
    unknown = _raise_sql("the table was copied after this view was made: start cdcpipe-spark run, which makes the view again")
    purged = _raise_sql(
        "old changes were purged, and no later copy of the table makes up for them: cdcpipe-spark snapshot copies it"
    )
    lost = f"coalesce(array_max(array_except({_lsns_sql(known.snapshots)}, _cdc_copies)), 0L)"
    is_whole = "false" if shape.purged_lsn else f"_cdc_first_lsn <= {known.first_lsn}L AND {lost} = 0L"
    return (
        "SELECT _cdc_all_ends, CASE "
        f"WHEN size(array_except(_cdc_copies, {_lsns_sql(shape.snapshots)})) > 0 THEN {unknown} "
        f"WHEN {is_whole} THEN 0L "
        f"ELSE coalesce(array_min(filter(_cdc_begins, lsn -> lsn > greatest({shape.purged_lsn}L, {lost}))), {purged}) "
        "END AS _cdc_from_lsn FROM (SELECT "
        "array_sort(collect_list(struct(_cdc_place AS place, _cdc_time AS commit_time))) AS _cdc_all_ends, "
        "collect_set(CASE WHEN _cdc_op <> 'table' THEN _cdc_place._cdc_end_lsn END) AS _cdc_begins, "
        "collect_set(CASE WHEN _cdc_op = 'snapshot' THEN _cdc_place._cdc_end_lsn END) AS _cdc_copies FROM _cdc_ends)\n"
        "CROSS JOIN (SELECT min(_cdc_end_lsn) AS _cdc_first_lsn FROM _cdc_changes)"
    )


def _placed_sql(columns: Sequence[str], schema: StructType, key: Key) -> str:
    """Return a query for the changes with their keys, and the place where their rows end with all others."""
    after, before = key_sql(schema, key), key_sql(schema, key, OLD_PREFIX, exact_prefix=OLD_PREFIX)
    new, old = _key_struct(after), _key_struct(before)
    ends = ", ".join(map(literal, ENDS))
    return (
        f"SELECT {_listed(columns)}, _cdc_op, _cdc_end_lsn, _cdc_commit_time, _cdc_exact, "
        "coalesce(_cdc_unchanged, array()) AS _cdc_unsent, "
        f"{_POSITION} AS _cdc_position, get(filter(_cdc_all_ends, ending -> ending.place >= {_POSITION}), 0) AS _cdc_end, "
        f"get(filter(_cdc_all_ends, ending -> ending.place >= {_POSITION}), 0).place AS _cdc_segment, "
        f"{new} AS _cdc_new_key, CASE WHEN _cdc_op = 'delete' AND _cdc_old IS NULL THEN {new} ELSE {old} END AS _cdc_old_key, "
        f"_cdc_op = 'update' AND _cdc_old IS NOT NULL AND ({differs_sql(before, after)}) AS _cdc_is_move\n"
        f"FROM _cdc_changes CROSS JOIN _cdc_frame WHERE _cdc_op NOT IN ({ends}) AND _cdc_end_lsn >= _cdc_from_lsn"
    )


def _key_struct(fields: Iterable[str]) -> str:
    return f"struct({', '.join(f'{field} AS k{index}' for index, field in enumerate(fields))})"


def _events_sql(width: int) -> str:
    """Return a query for an event for each key in a change. An update of the key ends one row and begins another."""
    used = "CASE WHEN _cdc_op = 'delete' THEN _cdc_old_key ELSE _cdc_new_key END"
    lacks = " OR ".join(f"({used}).k{index} IS NULL" for index in range(width))
    error = _raise_sql("a change has no value for the key of the table")

    def event(key: str, gone: str, moved: str) -> str:
        return f"struct(CASE WHEN {lacks} THEN {error} ELSE {key} END AS _cdc_key, {gone} AS _cdc_gone, {moved} AS _cdc_is_moved)"

    last, first = event("_cdc_old_key", "true", "false"), event("_cdc_new_key", "false", "true")
    return (
        f"SELECT * FROM _cdc_placed\nLATERAL VIEW inline(CASE WHEN _cdc_is_move THEN array({last}, {first}) "
        f"WHEN _cdc_op = 'delete' THEN array({last}) ELSE array({event('_cdc_new_key', 'false', 'false')}) END) _cdc_event "
        "AS _cdc_key, _cdc_gone, _cdc_is_moved"
    )


def _followed_sql() -> str:
    """Return a query for the events with the next one of the same key, and whether a row begins.

    A row begins with an insert, with an update of its key, and with the first change after its key was gone.
    """
    return (
        "SELECT *, lead(struct(_cdc_position AS place, _cdc_commit_time AS commit_time)) OVER _cdc_order AS _cdc_next, "
        "NOT _cdc_gone AND (_cdc_op IN ('insert', 'snapshot') OR _cdc_is_moved OR coalesce(lag(_cdc_gone) OVER _cdc_order, false)) "
        "AS _cdc_begins\n"
        "FROM _cdc_events WINDOW _cdc_order AS (PARTITION BY _cdc_key, _cdc_segment ORDER BY _cdc_position)"
    )


def _lives_sql() -> str:
    """Return a query for the events with the life that they belong to: the time during which one row has one key.

    ``_cdc_began`` is the update of the key with which it began, ``_cdc_left`` the one with which it ended.
    """
    began = "max(CASE WHEN _cdc_is_moved THEN _cdc_position END)"
    left = "max(CASE WHEN _cdc_gone AND _cdc_op = 'update' THEN _cdc_position END)"
    return (
        f"SELECT *, {began} OVER _cdc_whole AS _cdc_began, {left} OVER _cdc_whole AS _cdc_left\n"
        "FROM (SELECT *, sum(CAST(_cdc_begins AS INT)) OVER (PARTITION BY _cdc_key, _cdc_segment ORDER BY _cdc_position "
        "ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS _cdc_life FROM _cdc_followed)\n"
        "WINDOW _cdc_whole AS (PARTITION BY _cdc_key, _cdc_segment, _cdc_life)"
    )


def _links_sql() -> str:
    """Return a query for one row: the updates of keys, in order, with the number of the one before in their chain, or their own."""
    # Each update is in two groups: its own, and that of the update with which its life began.
    own = "struct(move.place AS place, number AS number, NULL AS child)"
    child = "struct(coalesce(move.up, move.place) AS place, NULL AS number, struct(number AS number, move.place AS place) AS child)"
    return (
        "SELECT array_sort(collect_list(struct(child.number AS number, child.place AS place, _cdc_up AS up))) AS _cdc_links\nFROM ("
        "SELECT max(own_number) AS _cdc_up, collect_list(child) AS _cdc_children FROM (\n"
        "SELECT array_sort(collect_list(struct(_cdc_position AS place, _cdc_began AS up))) AS _cdc_moves FROM _cdc_lives "
        "WHERE _cdc_gone AND _cdc_op = 'update')\n"
        "LATERAL VIEW posexplode(_cdc_moves) _cdc_move AS number, move\n"
        f"LATERAL VIEW inline(array({own}, {child})) _cdc_row AS place, own_number, child\n"
        "GROUP BY place)\n"
        "LATERAL VIEW explode(_cdc_children) _cdc_child AS child"
    )


def _chains_sql() -> str:
    """Return a query for the number of the chain to which each update of a key belongs: that of its first update."""
    rounds = "sequence(1, greatest(1, CAST(ceil(log2(size(_cdc_links) + 1)) AS INT)))"
    firsts = f"aggregate({rounds}, _cdc_links.up, (found, round) -> transform(found, up -> get(found, up)))"
    return (
        "SELECT link.place AS _cdc_place, link.chain AS _cdc_chain FROM (\n"
        "SELECT arrays_zip(place, chain) AS _cdc_chains FROM (\n"
        f"SELECT _cdc_links.place AS place, {firsts} AS chain FROM _cdc_links))\n"
        "LATERAL VIEW explode(_cdc_chains) _cdc_chain AS link"
    )


def _versions_sql(unsent: Sequence[str], schema: StructType, shape: HistoryShape) -> str:
    """Return a query for the events with rows, and the value of the N-th ``unsent`` column as ``_cdc_known_N``, null if unknown."""
    known = [f"last({_held_sql(name, schema, shape)}, true) OVER _cdc_so_far AS _cdc_known_{i}" for i, name in enumerate(unsent)]
    alone = "CASE WHEN _cdc_chain IS NULL THEN struct(_cdc_key, _cdc_segment, _cdc_life) END"
    return (
        f"SELECT *, {', '.join(known)}\n"
        "FROM _cdc_lives LEFT JOIN _cdc_chains ON _cdc_place = coalesce(_cdc_began, _cdc_left) WHERE NOT _cdc_gone\n"
        f"WINDOW _cdc_so_far AS (PARTITION BY _cdc_chain, {alone} ORDER BY _cdc_position "
        "ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
    )


def _held_sql(name: str, schema: StructType, shape: HistoryShape) -> str:
    """Return an expression for a column's value that an event gives to its row, and the exact text; null if it gives none."""
    kind = schema[name].dataType
    has_texts, cases = _has_texts(kind), []

    def held(value: str, text: str) -> str:
        return f"struct({value} AS value, {text} AS text)" if has_texts else f"struct({value} AS value)"

    for place, fills in shape.fills:
        for fill in (fill for fill in fills if fill.column == name):
            at, (filled, its_text) = _place_sql(place), constant_sql(fill.value, kind)
            is_there = (
                f"_cdc_position < {at} AND coalesce(_cdc_next.place >= {at}, true) AND coalesce(_cdc_end.place >= {at}, true)"
            )
            cases.append(f"WHEN {is_there} THEN {held(filled, its_text)}")
    own = f"IF(array_contains(_cdc_unsent, {literal(name)}), NULL, {held(quote(name), f'_cdc_exact[{literal(name)}]')})"
    return f"CASE {' '.join(cases)} ELSE {own} END" if cases else own


def _mark_sql(name: str, known: str, schema: StructType, shape: HistoryShape) -> str:
    """Return an expression for the column's name if its value is not known, else for null.

    It is not known, too, if the last change left it out, and it is NULL: only a value that is not NULL is left out.
    """
    kind = schema[name].dataType
    unknown = f"{known} IS NULL"
    if kind.typeName() not in _SENT_WHOLE:
        is_filled = any(fill.column == name for _, fills in shape.fills for fill in fills)
        gives_none = f"{_held_sql(name, schema, shape)} IS NULL" if is_filled else f"array_contains(_cdc_unsent, {literal(name)})"
        text = f" AND {known}.text IS NULL" if _has_texts(kind) else ""
        unknown += f" OR ({known}.value IS NULL{text} AND {gives_none})"
    return f"IF({unknown}, {literal(name)}, NULL)"


def _has_texts(kind: DataType) -> bool:
    """Tell whether values of this type may have a text in ``_cdc_exact``: a string holds every value."""
    return not isinstance(kind, StringType)


def _final_sql(columns: Sequence[str], unsent: Sequence[str], schema: StructType, shape: HistoryShape) -> str:
    """Return the query for the columns that `read_history` promises."""
    known = {name: f"_cdc_known_{i}" for i, name in enumerate(unsent)}
    own = ("_cdc_commit_time", "_cdc_to.commit_time", "_cdc_to IS NULL", "_cdc_end_lsn", "_cdc_to.place._cdc_end_lsn")
    exact = f"map_filter(_cdc_exact, (name, text) -> NOT startswith(name, {literal(OLD_PREFIX)}))"
    with_texts = [name for name in unsent if _has_texts(schema[name].dataType)]
    if with_texts:
        names = ", ".join(map(literal, with_texts))
        pairs = ", ".join(f"{literal(name)}, {known[name]}.text" for name in with_texts)
        kept = f"map_filter(coalesce({exact}, CAST(map() AS MAP<STRING, STRING>)), (name, text) -> name NOT IN ({names}))"
        exact = f"map_concat({kept}, map_filter(map({pairs}), (name, text) -> text IS NOT NULL))"
    marks = ", ".join(_mark_sql(name, value, schema, shape) for name, value in known.items())
    marked = f"array_compact(CAST(array({marks}) AS ARRAY<STRING>))"
    values = [f"{known[name]}.value AS {quote(name)}" if name in known else quote(name) for name in columns]
    values += [f"{value} AS {name}" for name, value in zip(names_beside(columns), own, strict=True)]
    return (
        f"SELECT {', '.join(values)}, CASE WHEN size(_cdc_texts) > 0 THEN _cdc_texts END AS _cdc_exact, "
        "CASE WHEN size(_cdc_marks) > 0 THEN _cdc_marks END AS _cdc_unchanged\n"
        f"FROM (SELECT * EXCEPT (_cdc_exact), {exact} AS _cdc_texts, {marked} AS _cdc_marks, "
        "coalesce(_cdc_next, _cdc_end) AS _cdc_to FROM _cdc_versions)\n"
        "WHERE _cdc_to IS NULL OR _cdc_to.place._cdc_end_lsn > _cdc_end_lsn"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(quote, names))
