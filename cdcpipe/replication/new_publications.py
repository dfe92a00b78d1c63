"""Turns the tables that a publication has to have into the SQL that creates it, and says how an existing publication differs.

    for each in contents("shop", selection, wanted):
        each.statement      # CREATE PUBLICATION …
        each.source         # a subquery for `describe`: what it will publish

Nothing here locks a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cdcpipe.catalog_sql import published, published_by_new
from cdcpipe.errors import InitError
from cdcpipe.libpq.connection import Connection
from cdcpipe.publishing import FULL, INSERT_ONLY, NewPublication, companion, companion_name, own
from cdcpipe.replication.selected import Selected, Selection
from cdcpipe.replication.selection import select
from cdcpipe.replication.tables import describe
from cdcpipe.sql import quote_identifier, quote_literal, quote_table
from cdcpipe.units import few, listed

__all__ = [
    "Contents",
    "check_companions",
    "check_left_out",
    "contents",
    "differences",
    "identity_statements",
    "split_note",
    "unnamed_companion",
]

_COMMENT = "cdcpipe: the tables without a key of publication "


@dataclass(frozen=True, slots=True)
class Contents:
    """What one new publication gets. ``has_updates``: it publishes updates and deletes, too."""

    name: str
    tables: tuple[Selected, ...]
    is_all: bool
    via_root: bool
    has_updates: bool = True
    of: str | None = None
    """For a companion: the publication that it belongs to."""

    @property
    def statement(self) -> str:
        """The SQL that creates it."""
        names = [
            f"{'ONLY ' if each.has_heirs else ''}{quote_table(each.schema, each.name)}{each.column_list}" for each in self.tables
        ]
        target = " FOR ALL TABLES" if self.is_all else f" FOR TABLE {', '.join(names)}" if names else ""
        settings = ["publish_via_partition_root = true"] if self.via_root else []
        settings += [] if self.has_updates else ["publish = 'insert, truncate'"]
        options = f" WITH ({', '.join(settings)})" if settings else ""
        sql = f"CREATE PUBLICATION {quote_identifier(self.name)}{target}{options}"
        if self.of is not None:
            sql += f"; COMMENT ON PUBLICATION {quote_identifier(self.name)} IS {quote_literal(_COMMENT + self.of)}"
        return sql

    @property
    def source(self) -> str:
        """A subquery for `describe`: what it will publish."""
        oids = None if self.is_all else [each.relation_id for each in self.tables]
        lists = {each.relation_id: each.columns.values() for each in self.tables if each.columns is not None}
        return published_by_new(oids, via_root=self.via_root, has_updates=self.has_updates, column_lists=lists)


def contents(name: str, selection: Selection, wanted: NewPublication) -> list[Contents]:
    """Return what has to be created for the publication: itself, and with ``--keyless insert-only`` its companion."""
    if wanted.keyless != INSERT_ONLY:
        return [Contents(name, selection.tables, selection.is_all, wanted.via_root)]
    keyed = tuple(each for each in selection.tables if not each.is_refused)
    keyless = tuple(each for each in selection.tables if each.is_refused)
    is_all = selection.is_all and not keyless
    return [
        Contents(name, keyed, is_all, wanted.via_root),
        Contents(companion(name), keyless, is_all=False, via_root=wanted.via_root, has_updates=False, of=name),
    ]


def identity_statements(selection: Selection, wanted: NewPublication) -> list[str]:
    """Return the SQL of ``--keyless full``. Of a partitioned table, the partitions' identities count, and with the root its own."""
    if wanted.keyless != FULL:
        return []
    return [
        f"ALTER TABLE {quote_table(schema, name)} REPLICA IDENTITY FULL"
        for each in selection.tables
        if each.lacking
        for schema, name in (*([(each.schema, each.name)] if each.is_partitioned else []), *each.lacking)
    ]


def split_note(selection: Selection, wanted: NewPublication) -> str | None:
    """Return what to say of partitioned tables that are published as their partitions; None if there are none."""
    partitioned = [each for each in selection.tables if each.is_partitioned]
    if wanted.via_root or not partitioned:
        return None
    said = listed([f"{each.full_name} as {each.partition_count}" for each in partitioned])
    return f"partitioned tables are published as their partitions: {said}; --via-root publishes each as one table"


def check_companions(publications: Sequence[str], missing: Sequence[str], wanted: NewPublication) -> None:
    """Raise InitError if ``--keyless insert-only`` finds one of its two publications, and not the other one."""
    if wanted.keyless != INSERT_ONLY:
        return
    for name in own(publications):
        second = companion(name)
        if (name in missing) != (second in missing):
            there, gone = (second, name) if name in missing else (name, second)
            raise InitError(
                f"publication {there!r} is there, and {gone!r} is not: --keyless insert-only creates both or none",
                hint=f"leave --keyless out; or drop {there!r}, and let -c create both with a new slot",
            )


def unnamed_companion(connection: Connection, publications: Sequence[str]) -> str | None:
    """Return a companion of these publications that is not among them, so that the stream would lack its tables."""
    if not publications:
        return None
    comments = ", ".join(quote_literal(_COMMENT + name) for name in publications)
    rows = connection.execute(
        "SELECT p.pubname FROM pg_catalog.pg_publication p"
        f" WHERE pg_catalog.obj_description(p.oid, 'pg_publication') IN ({comments}) ORDER BY 1"
    )
    return next((name for (name,) in rows if name and name not in publications), None)


def differences(connection: Connection, publications: Sequence[str], wanted: NewPublication) -> Iterator[str]:
    """Yield how existing publications differ from what the options ask for. The options belong to who creates a publication."""
    if wanted == NewPublication():
        return
    version = connection.server_version
    for name in own(publications):
        found = connection.execute(
            f"SELECT pubviaroot, pubupdate OR pubdelete FROM pg_catalog.pg_publication WHERE pubname = {quote_literal(name)}"
        )
        if not found:
            continue
        via_root = found[0][0] == "t"
        try:
            selection = select(connection, wanted)
        except InitError as ex:
            yield f"publication {name!r} exists, and the options do not fit the tables any more: {ex.message}"
            continue
        actual_root = replace(wanted, via_root=via_root)
        sources = [each.source for each in contents(name, selection, actual_root)]
        asked = {table for source in sources for table in _names(connection, source)}
        actual = set(_names(connection, published([name, companion_name(name)], version)))
        said = [
            *([f"it lacks {few(sorted(asked - actual))}"] if asked - actual else []),
            *([f"it also has {few(sorted(actual - asked))}"] if actual - asked else []),
            *(["it has partitions in place of partitioned tables (--via-root)"] if wanted.via_root and not via_root else []),
            *(
                [f"--keyless full does not change {few(selection.lacking)}"]
                if wanted.keyless == FULL and selection.lacking and found[0][1] == "t"
                else []
            ),
        ]
        if said:
            differs = f"publication {name!r} exists, and is not what the options ask for"
            yield f"{differs}: {'; '.join(said)}; ALTER PUBLICATION changes it"


def check_left_out(connection: Connection, publications: Sequence[str], wanted: NewPublication) -> None:
    """Raise ExcludedColumnError if an existing publication has a column that ``--exclude-column`` names."""
    if wanted.exclude_columns:
        tables = describe(connection, published(publications, connection.server_version))
        wanted.check_left_out((each.schema, each.name, [column.name for column in each.columns]) for each in tables)


def _names(connection: Connection, source: str) -> list[str]:
    rows = connection.execute(
        f"SELECT n.nspname || '.' || c.relname FROM {source} AS p JOIN pg_catalog.pg_class c ON c.oid = p.relation_id"
        " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
    )
    return [name or "" for (name,) in rows]
