"""Compares a warehouse with a model's ledger of what was committed: `compare` yields the differences, and nothing if there are
none.

For each table, under the name that its changes were published with:

- The changelog has the changes of the ledger, each once and in the same order. Each transaction has the same operations on rows
  with the same stamps. If the changelog has nothing of a transaction, then the snapshot's rows show its effect, and no later one.
- The replica has the rows of the table, column by column. PostgreSQL must print the same text for its own value and for the
  replica's value read as the column's type.
- A replay of the changelog gives the same rows.
- A stored history has the versions that `read_history` makes of the changelog up to the same LSN, whatever rounds it was made in.
  Each stamp that was there at the end of a transaction has a version, and no other stamp has one. Rows that have no value for a
  later key may lack theirs.

The changelog of logical messages has each message that was committed since the warehouse began, once.

This code shares nothing with `cdcpipe-spark verify`. The answer of `verify` is one more part of the comparison.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from model import Relation, quote
from model_ledger import Change, Ledger

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import sql as delta
from spark_sink.replica.current import read_replica
from spark_sink.replica.history import first_known, make_versions
from spark_sink.replica.replay import replay
from spark_sink.schema import types
from spark_sink.schema.table import MESSAGES, Table, has_key
from spark_sink.spark import sql
from spark_sink.verify.comparison import verify
from spark_sink.warehouse import stored_histories
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from psycopg import Connection
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["compare", "compare_changelog", "compare_history", "compare_messages"]

_SHOWN = 3
"""So many of a kind of differences are shown."""

_AS_TEXT = ("date", "timestamp", "timestamp_ntz")


def compare(
    spark: SparkSession, path: Path, dsn: str, connection: Connection[Any], ledger: Ledger, relations: dict[str, Relation]
) -> Iterator[str]:
    """Yield a sentence for each difference, with the name of the table. ``relations`` are the tables that exist now."""
    spark = spark.newSession()
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    house = Warehouse.existing(path)
    yield from compare_changelog(spark, path, ledger)
    yield from _compare_messages(spark, house, ledger)
    with_key = []
    for name, relation in relations.items():
        table = Table("app", name)
        if not has_key(house.versions(table)) or not house.has_changelog(table):
            continue
        with_key.append(str(table))
        expected = _source_rows(connection, relation)
        changes = changelogs_of(spark, house).read(table)
        for what, rows in (("replica", read_replica(spark, path, str(table))), ("replay", replay(house, table, changes))):
            for problem in _compare_rows(connection, relation, expected, _replica_rows(rows, relation)):
                yield f"{table}: {what}: {problem}"
        for problem in compare_history(spark, house, table, ledger.changes.get(name, [])):
            yield f"{table}: history: {problem}"
    for result in verify(spark, path, ("-d", dsn), tables=with_key) if with_key else ():
        if not result.is_equal:
            yield f"{result.table}: verify: {result.problem or result.differences}"


def compare_changelog(spark: SparkSession, path: Path, ledger: Ledger) -> Iterator[str]:
    """Yield the differences between the changelogs and the ledger."""
    house = Warehouse.existing(path)
    positions: set[tuple[int, int]] = set()
    for name, wanted in ledger.changes.items():
        table = Table("app", name)
        if house.has_changelog(table):
            for problem in _compare_changes(changelogs_of(spark, house).read(table), wanted, positions):
                yield f"{table}: changelog: {problem}"
        elif Ledger.stamps(wanted):
            # (A table that was empty at the snapshot, and stayed empty, needs no changelog.)
            yield f"{table}: there is no changelog"


def _compare_messages(spark: SparkSession, house: Warehouse, ledger: Ledger) -> Iterator[str]:
    found: list[int] = []
    if house.has_changelog(MESSAGES):
        rows = changelogs_of(spark, house).read(MESSAGES).where("transactional").select("_cdc_lsn").collect()
        found = [row[0] for row in rows]
    begin = house.source().begin
    assert begin is not None
    yield from compare_messages(found, [LSN.parse(lsn) for lsn in ledger.messages], begin.lsn)


def compare_messages(found: Sequence[int], committed: Sequence[int], begin_lsn: int) -> Iterator[str]:
    """Yield the differences between the LSNs of messages in a changelog that begins at ``begin_lsn``, and of committed ones.

    A snapshot has no messages, so the changelog may lack those from before its beginning. It may have some of them, because their
    transactions may have committed later.
    """
    for what, lsns in (
        ("twice", [lsn for lsn, count in Counter(found).items() if count > 1]),
        ("missing", {lsn for lsn in committed if lsn > begin_lsn}.difference(found)),
        ("surplus", set(found).difference(committed)),
    ):
        if lsns:
            yield f"messages: {len(lsns)} {what}: {[format_lsn(lsn) for lsn in sorted(lsns)[:_SHOWN]]}"


def _compare_changes(changes: DataFrame, wanted: list[Change], positions: set[tuple[int, int]]) -> Iterator[str]:
    rows = changes.select("_cdc_end_lsn", "_cdc_ordinal", "_cdc_xid", "_cdc_op", "stamp").collect()
    copies: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, int] = {}
    found: dict[int, list[tuple[str, int | None]]] = defaultdict(list)
    for end_lsn, ordinal, xid, op, stamp in sorted(rows, key=lambda row: row[:2]):
        if op == "snapshot":
            copies[end_lsn].append(stamp)
            continue
        if op == "truncate" and xid is None:  # a copy that found no rows in the table
            copies.setdefault(end_lsn, [])
            continue
        if (end_lsn, ordinal) in positions:
            yield f"position {format_lsn(end_lsn)}, {ordinal} is there twice"
        positions.add((end_lsn, ordinal))
        found[xid].append(_shown(op, stamp))
        ends[xid] = end_lsn
    committed: dict[int, list[tuple[str, int | None]]] = defaultdict(list)
    for change in wanted:
        if change.xid in found and change.op != "drop":
            committed[change.xid].append(_shown(change.op, change.stamp))
    for xid, here in found.items():
        there = committed[xid]
        if here != there:
            at = next(
                (i for i, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), min(len(here), len(there))
            )
            yield (
                f"transaction {xid} has {len(here)} changes, {len(there)} were committed; "
                f"from change {at} on {here[at : at + _SHOWN]}, not {there[at : at + _SHOWN]}"
            )
    # Only one session changes a table, one transaction after the other. So the first snapshot has the first transactions.
    has_begun = False
    for change in wanted:
        has_begun = has_begun or change.xid in found
        if has_begun and change.xid not in found and change.op != "drop":
            yield f"transaction {change.xid} is missing, and an earlier one is there"
            break
    for lsn, copied in sorted(copies.items()) or [(0, [])]:
        # A table that is copied anew has the transactions before the copy, too.
        earlier = [change for change in wanted if ends.get(change.xid, 0) < lsn or change.xid not in found]
        if earlier and earlier[-1].op == "drop":
            earlier.pop()  # later than the snapshot: nothing else came under this name, and there is a changelog
        before = Ledger.stamps(earlier)
        if len(copied) != len(set(copied)):
            yield f"{len(copied) - len(set(copied))} rows are in the snapshot at {format_lsn(lsn)} twice"
        if set(copied) != before:
            yield (
                f"at the snapshot at {format_lsn(lsn)}, {len(before)} rows were there, and {len(set(copied))} were copied: "
                f"missing {sorted(before - set(copied))[:_SHOWN]}, surplus {sorted(set(copied) - before)[:_SHOWN]}"
            )


def compare_history(spark: SparkSession, house: Warehouse, table: Table, wanted: list[Change]) -> Iterator[str]:
    """Yield the differences between a table's stored history, if there is one, and what its changelog and the ledger say."""
    known = stored_histories.facts(house, table)
    if known is None:
        return
    changes = changelogs_of(spark, house).read(table)
    stored, versions = delta.read(spark, house.history(table)), house.versions(table)
    made = make_versions(versions, table, changes, first_known(house, table, changes), known.lsn)
    if sorted(stored.columns) != sorted(made.columns):
        yield f"its columns are {sorted(stored.columns)}, not {sorted(made.columns)}"
        return
    stamps, found = _stamps(changes, wanted), {row.stamp for row in stored.select("stamp").collect()}
    lacks_key = " or ".join(f"{sql.quote(name)} is null" for name in {name for version in versions for name in version.columns})
    missing = stamps - found - {row.stamp for row in changes.where(lacks_key).select("stamp").collect()}
    if missing or found - stamps:
        yield f"stamps: missing {sorted(missing)[:_SHOWN]}, surplus {sorted(found - stamps)[:_SHOWN]}"
    chosen = [f"cast({sql.quote(name)} as string)" for name in made.columns]  # Python has no year 0
    there, expected = (Counter(map(repr, rows.selectExpr(*chosen).collect())) for rows in (stored, made))
    for what, rows in ("missing", expected - there), ("surplus", there - expected):
        if rows:
            yield f"{rows.total()} versions {what} up to {format_lsn(known.lsn)}: {[row[:400] for row in sorted(rows)[:_SHOWN]]}"


def _stamps(changes: DataFrame, wanted: list[Change]) -> set[int]:
    """Return the stamps that were there at the end of any transaction in a changelog, or when it began."""
    streamed = {row[0] for row in changes.where("_cdc_op != 'snapshot'").select("_cdc_xid").distinct().collect()}
    ends = [number for number, (change, after) in enumerate(pairwise(wanted), 1) if change.xid != after.xid]
    found, has_begun = set(), False
    for begin, end in pairwise([0, *ends, len(wanted)] if wanted else []):
        is_streamed = wanted[begin].xid in streamed
        if is_streamed and not has_begun:
            found |= Ledger.stamps(wanted[:begin])  # the snapshot's rows
            has_begun = True
        if is_streamed or end == len(wanted):
            found |= Ledger.stamps(wanted[:end])
    return found


def _shown(op: str, stamp: int | None) -> tuple[str, int | None]:
    # Which columns of a deleted row are sent depends on the table.
    return op, stamp if op in ("insert", "update") else None


def _source_rows(connection: Connection[Any], relation: Relation) -> dict[int, dict[str, str | None]]:
    """Return the table's rows as texts, by their stamps."""
    listed = ", ".join(f"{quote(name)}::text" for name in relation.columns)
    rows = connection.execute(f"select {listed} from {relation.sql}".encode())
    found = [dict(zip(relation.columns, row, strict=True)) for row in rows]
    return {int(row["stamp"]): row for row in found}


def _replica_rows(frame: DataFrame, relation: Relation) -> list[dict[str, Any]]:
    """Return the replica's rows with the values of the table's columns. An unknown value is an Ellipsis."""
    from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

    kinds = dict(frame.dtypes)
    chosen = []
    for name, kind in kinds.items():
        column = F.col(sql.quote(name))
        chosen.append((column.cast("string") if kind in _AS_TEXT else column).alias(name))
    forms = {column: _forms(column, frame.columns) for column in relation.columns}
    found = []
    for row in frame.select(*chosen).collect():
        values = row.asDict()
        exact, unsent = values.get("_cdc_exact") or {}, values.get("_cdc_unchanged") or []
        found.append({column: _value(values, exact, unsent, names, kinds) for column, names in forms.items()})
    return found


def _forms(column: str, names: list[str]) -> list[str]:
    """Return the replica's columns that have held a column of the table. There are several if the column had several types."""
    return [name for name in names if types.original_name(name) == column or name.startswith(f"{column}__")]


def _value(values: dict[str, Any], exact: dict[str, str], unsent: list[str], names: list[str], kinds: dict[str, str]) -> Any:
    for name in names:
        if name in unsent:
            return ...
        if name in exact:
            return exact[name]
        if values[name] is not None:
            return _input(values[name]) + ("+00" if kinds[name] == "timestamp" else "")
    return None


def _input(value: Any) -> str:
    """Return a value as a text that PostgreSQL reads."""
    if isinstance(value, bytes | bytearray):
        return f"\\x{value.hex()}"
    if isinstance(value, list):
        return "{" + ",".join("NULL" if item is None else _element(_input(item), item) for item in value) + "}"
    return str(value)


def _element(text: str, item: Any) -> str:
    return text if isinstance(item, list) else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _compare_rows(
    connection: Connection[Any], relation: Relation, wanted: dict[int, dict[str, str | None]], found: list[dict[str, Any]]
) -> Iterator[str]:
    by_stamp = {int(row["stamp"]): row for row in found if row["stamp"] not in (None, ...)}
    if len(by_stamp) != len(found) or by_stamp.keys() != wanted.keys():
        missing, surplus = sorted(wanted.keys() - by_stamp.keys()), sorted(by_stamp.keys() - wanted.keys())
        yield f"{len(found)} rows, not {len(wanted)}: missing {missing[:_SHOWN]}, surplus {surplus[:_SHOWN]} (stamps)"
    stamps = sorted(wanted.keys() & by_stamp.keys())
    for name, kind in relation.columns.items():
        pairs = [(stamp, wanted[stamp][name], by_stamp[stamp][name]) for stamp in stamps]
        different = [pair for pair in pairs if pair[1] != pair[2]]
        if not different:
            continue
        read = _printed(connection, kind, [None if value is ... else value for _, _, value in different])
        wrong = [
            (stamp, theirs, ours)
            for (stamp, theirs, ours), printed in zip(different, read, strict=True)
            if ours is ... or printed != theirs
        ]
        if wrong:
            shown = "; ".join(
                f"stamp {stamp}: {str(ours)[:60]!r}, not {str(theirs)[:60]!r}" for stamp, theirs, ours in wrong[:_SHOWN]
            )
            yield f"column {name!r} ({kind}) differs in {len(wrong)} rows: {shown}"


def _printed(connection: Connection[Any], kind: str, values: list[str | None]) -> list[str | None]:
    """Return the texts that PostgreSQL prints for values of a type."""
    query = f"select v::{kind}::text from unnest(%s::text[]) with ordinality as given(v, n) order by n"
    return [text for (text,) in connection.execute(query.encode(), [values])]
