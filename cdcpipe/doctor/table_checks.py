"""Checks of publications and tables: keys, replica identities, privileges, column lists, row filters. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from cdcpipe.catalog_sql import GENERATED_COLUMNS_SINCE
from cdcpipe.doctor.facts import Facts, Partition, Publication, Restriction, Table
from cdcpipe.doctor.findings import Verdict, error, ok, warning
from cdcpipe.doctor.identity_fixes import (
    NEED_IDENTITY,
    first_publication,
    has_list,
    identify,
    needs_identity,
    takes_full,
    without_generated,
)
from cdcpipe.errors import InitError
from cdcpipe.publishing import FULL, INSERT_ONLY, companion_name, own
from cdcpipe.replication.new_publications import contents, identity_statements
from cdcpipe.replication.selection import check_identities
from cdcpipe.replication.tables import grants
from cdcpipe.sql import quote_identifier, quote_table
from cdcpipe.units import few, format_size, listed

__all__ = ["CHECKS"]

_NOT_PUBLISHED = {
    "insert": "new rows are missing",
    "update": "rows keep their old values",
    "delete": "deleted rows stay",
    "truncate": "rows stay after TRUNCATE",
}
_OF_KEYLESS = ("insert", "truncate")
"""What ``--keyless insert-only`` publishes of tables without a key."""
_NO_MATTER = "every change tells which row it is of"


def publications(facts: Facts) -> Iterator[Verdict]:
    """Judge whether the publications exist, or can be created."""
    asked = facts.asked
    if not asked.publications:
        if (facts.slot.plugin if facts.slot else asked.plugin) == "pgoutput":
            yield warning("no publication is named", "no table was looked at", "name what will be streamed: --publication NAME")
        return
    existing = {publication.name for publication in facts.publications}
    for name in asked.publications:
        what = f"publication {name!r}"
        if name in existing:
            yield ok(f"{what} is there")
        elif not asked.create:
            fix = _create_publication(facts, name) if facts.slot else "start with -c, which makes it before the slot"
            yield error(f"{what} is not there", "the server sends nothing without it", fix)
        elif _is_up_to_service(facts):
            yield warning(
                f"{what} is not there",
                "a publication of all tables takes a superuser, or on some managed services the administrator's role",
                "if the server refuses it: name tables of yours (--table SCHEMA.NAME, or --table 'SCHEMA.*')",
            )
        elif reason := _cannot_create(facts):
            yield error(f"{what} is not there", reason, _create_publication(facts, name, "let an administrator run "))
        else:
            yield ok(f"{what} is not there: -c makes it")
    problem = facts.selection_problem
    if problem is None and asked.create and asked.new.keyless == INSERT_ONLY:  # otherwise `identity` and `generated` say it
        problem = next(filter(None, (_refusal(facts, name) for name in own(asked.publications) if name not in existing)), None)
    if problem is not None:
        yield error(problem.message, "-c can't create the publication", problem.hint or "")


def _is_up_to_service(facts: Facts) -> bool:
    """Tell whether only the server knows whether it lets this user publish all tables. Nothing else forbids it."""
    role = facts.role
    is_all = facts.selection is None or facts.selection.is_all
    return is_all and role.can_create and not role.is_superuser and bool(facts.service_roles)


def _cannot_create(facts: Facts) -> str | None:
    role = facts.role
    if role.is_superuser:
        return None
    if not role.can_create:
        return f"{role.name} may not make objects in database {facts.server.database}"
    if facts.selection is None or facts.selection.is_all:
        return f"a publication of all tables takes a superuser, which {role.name} is not"
    foreign = [table.full_name for table in facts.selection.tables if not table.is_owned]
    return f"{role.name} does not own {listed(foreign)}" if foreign else None


def _refusal(facts: Facts, name: str) -> InitError | None:
    """Return the error with which ``-c`` refuses to create the publication because of replica identities; None if it does not."""
    try:
        if facts.selection is not None:
            check_identities(name, facts.selection, facts.asked.new.keyless)
    except InitError as ex:
        return ex
    return None


def _create_publication(facts: Facts, name: str, who: str = "") -> str:
    """Return the SQL that creates the publication, after ``who``; other words if the server would then refuse commands."""
    if (refusal := _refusal(facts, name)) is not None:
        return f"first mend why -c would not create it: {refusal.message}"
    if facts.selection is None:
        what = "FOR ALL TABLES" if facts.asked.new.is_all else "FOR TABLE …"
        return f"{who}CREATE PUBLICATION {quote_identifier(name)} {what}"
    wanted = facts.asked.new
    return who + "; ".join(
        (
            *identity_statements(facts.selection, wanted),
            *(each.statement for each in contents(name, facts.selection, wanted)),
        )
    )


def operations(facts: Facts) -> Iterator[Verdict]:
    """Judge whether each publication publishes all kinds of changes: that of tables without a key, those it is made for."""
    independent = own(facts.asked.publications)
    for publication in facts.publications:
        wanted = tuple(_NOT_PUBLISHED) if publication.name in independent else _OF_KEYLESS
        missing = [name for name in wanted if name not in publication.operations]
        if missing:
            yield warning(
                f"publication {publication.name!r} leaves out {', '.join(missing)}",
                "in a copy of the tables " + ", ".join(_NOT_PUBLISHED[name] for name in missing),
                _publish(facts, publication, missing),
            )
        elif publication.name in independent:
            yield ok(f"publication {publication.name!r} has all kinds of changes")
        else:
            yield ok(f"publication {publication.name!r} has INSERT and TRUNCATE of tables without a key (--keyless insert-only)")


def _publish(facts: Facts, publication: Publication, missing: Sequence[str]) -> str:
    """Return the SQL that publishes the ``missing`` operations, too; words if the server would then refuse commands."""
    publish = ", ".join(name for name in _NOT_PUBLISHED if name in publication.operations or name in missing)
    refusing = _refusing(facts, publication) if set(missing).intersection(NEED_IDENTITY) else []
    if refusing:
        return (
            f"first give {few(refusing)} a replica identity of published columns: until then the server would refuse UPDATE and"
            f" DELETE there; then publish '{publish}'"
        )
    return f"ALTER PUBLICATION {quote_identifier(publication.name)} SET (publish = '{publish}')"


def _refusing(facts: Facts, publication: Publication) -> list[str]:
    """Return the tables on which the server would refuse commands if the publication had UPDATE and DELETE.

    It is not known which table is in which publication. So a table that another one publishes may be named, too. Only tables
    without a replica identity are known to be in the companion, if there is one.
    """
    everything = frozenset(_NOT_PUBLISHED)
    has_companion = companion_name(publication.name) in {each.name for each in facts.publications}
    refusing = [table.name for table in facts.tables if (not has_companion and _lacks_identity(table)) or _has_unpublished(table)]
    then = replace(
        facts,
        publications=(replace(publication, operations=everything),),
        restrictions=tuple(
            replace(each, operations=everything) for each in facts.restrictions if each.publication == publication.name
        ),
    )
    clashing = [each.subject for each in restrictions(then) if each.level == "error"]
    return sorted({*refusing, *(name for name in clashing if name is not None)})


def _lacks_identity(table: Table) -> bool:
    """Tell whether some rows of the table have no replica identity."""
    return any(each.identity is None for each in table.partitions)


def _has_unpublished(table: Table) -> bool:
    """Tell whether a replica identity that is there may have generated columns that are not published."""
    return bool(table.published.unpublished_generated) and any(each.identity is not None for each in table.partitions)


def tables(facts: Facts) -> Iterator[Verdict]:
    """Report the number of tables."""
    if facts.tables:
        total = format_size(sum(table.size_bytes for table in facts.tables))
        count = "1 table is" if len(facts.tables) == 1 else f"{len(facts.tables)} tables are"
        yield ok(f"{count} published, about {total}")
    elif facts.publications or facts.asked.create:
        fix = f"ALTER PUBLICATION {first_publication(facts)} ADD TABLE …"
        yield warning("no table is published", "the stream has nothing", fix)


def readable(facts: Facts) -> Iterator[Verdict]:
    """Judge whether the user may read the tables. Streaming does not need this; copying and comparing do."""
    yield from _each(
        facts,
        [table for table in facts.tables if table.unreadable],
        f"{facts.role.name} may not read it, or partitions of it",
        "it can't be copied or compared",
        lambda table: "; ".join(grants(facts.role.name, table.unreadable)),
        f"{facts.role.name} may read them all",
    )


def row_security(facts: Facts) -> Iterator[Verdict]:
    """Judge whether row-level security hides rows from the user. The stream has these rows, but a copy would not."""
    yield from _each(
        facts,
        [table for table in facts.tables if table.hides_rows],
        f"row-level security hides rows from {facts.role.name}",
        "the stream has them, and it can't be copied or compared",
        lambda _: f"ALTER ROLE {quote_identifier(facts.role.name)} BYPASSRLS",
        "no row-level security hides rows",
    )


def _each(
    facts: Facts, found: Sequence[Table], message: str, why: str, fix: Callable[[Table], str], otherwise: str
) -> Iterator[Verdict]:
    """Yield a verdict for each table: an error if the table will be copied, otherwise a warning."""
    for table in found:
        yield (error if facts.asked.copy else warning)(message, why, fix(table), subject=table.name)
    if facts.tables and not found:
        yield ok(otherwise)


def identity(facts: Facts) -> Iterator[Verdict]:
    """Judge whether the server refuses the application's UPDATE and DELETE, because rows have no replica identity."""
    found = [table for table in facts.tables if table.published.refused and _lacks_identity(table)]
    if _sets_full(facts):
        if names := [table.name for table in found if not table.published.unpublished_generated]:
            yield ok(f"-c sets REPLICA IDENTITY FULL on {listed(names)}")
        return
    for table in found:
        refused = " and ".join(table.published.refused)
        partitions = [each for each in table.partitions if each.identity is None]
        in_list = has_list(facts, table)
        fixes = [identify(facts, table, each, in_list=in_list) for each in partitions[:3]]
        key = "; or give it a primary key" + (" that has only columns of the list" if in_list else "")
        yield error(
            f"{_lack(table, partitions)}, and the publication has {refused}",
            f"the server refuses {refused} on it, to every application",
            "; ".join(fixes) + ("; …" if len(partitions) > 3 else "") + key,
            subject=table.name,
        )
    if facts.tables and not found:
        yield ok("no table's UPDATE or DELETE is refused because it has no replica identity")


def _sets_full(facts: Facts) -> bool:
    """Tell whether ``-c`` sets REPLICA IDENTITY FULL on the tables without an identity."""
    asked = facts.asked
    return asked.create and asked.new.keyless == FULL and facts.selection is not None and not facts.publications


def _lack(table: Table, partitions: Sequence[Partition]) -> str:
    """Return the reason why the rows have no replica identity."""
    kind = partitions[0].replica_identity if partitions else table.published.replica_identity
    who = "a partition has" if _is_root(table) else "it has"
    if kind == "n":
        return f"{who} REPLICA IDENTITY NOTHING"
    if kind == "i":
        return f"{who} an index as replica identity that is gone"
    return f"{who} a deferrable primary key alone" if table.published.has_deferrable_key else f"{who} no primary key"


def _is_root(table: Table) -> bool:
    return any((each.schema, each.name) != (table.published.schema, table.published.name) for each in table.partitions)


def keys(facts: Facts) -> Iterator[Verdict]:
    """Judge whether a key identifies the row of each change. A table without a key has a changelog, but no replica."""
    found = False
    for table in facts.tables:
        why = _keyless(table)
        if why is None or table.published.refused:
            continue
        found = True
        unpublished = set(table.published.unpublished_key)
        is_generated = any(unpublished.intersection(each.generated) for each in table.partitions)
        columns = ", ".join(quote_identifier(name) for name in table.published.primary_key) or "…"
        fix = f"ALTER TABLE {_sql(table)} ADD PRIMARY KEY ({columns})"
        if unpublished and is_generated and facts.server.version < GENERATED_COLUMNS_SINCE:
            fix = (
                "a key without the generated column, which no publication has before PostgreSQL 18: REPLICA IDENTITY USING INDEX …"
            )
        elif unpublished:
            fix = "publish the key's columns: ALTER PUBLICATION … DROP TABLE, then ADD TABLE with them in the list"
        elif table.published.has_deferrable_key:
            fix = f"ALTER TABLE {_sql(table)} DROP CONSTRAINT …, ADD PRIMARY KEY (…), this time without DEFERRABLE"
        if facts.publications and any(each.identity is None for each in table.partitions):  # and nothing is refused
            fix += "; then move the table to a publication that has UPDATE and DELETE, because its own one has not"
        yield warning(why, "it gets a changelog, and no replica of its current rows", fix, subject=table.name)
    if facts.tables and not found:
        yield ok(f"the tables have keys: {_NO_MATTER}")


def _keyless(table: Table) -> str | None:
    found = table.published
    is_index = found.replica_identity == "i"
    if found.has_deferrable_key and not is_index:
        return "its primary key is deferrable, so two rows may share it amid a transaction"
    if not found.primary_key and not is_index:
        return "it has no primary key"
    what = "replica identity" if is_index else "primary key"
    return f"the {what}'s {listed(found.unpublished_key)} is not published" if found.unpublished_key else None


def partitions(facts: Facts) -> Iterator[Verdict]:
    """Judge the partitions of a root that is published as one table: whether their replica identities match the table's."""
    for table in facts.tables:
        if not _is_root(table) or table.published.refused or table.identity is None or not _has_old_rows(facts, table):
            continue
        # The stream describes the table's identity, but of an old row it has what the partition's identity says.
        key = table.identity or table.published.primary_key
        for each in table.partitions:
            if each.replica_identity == "f":
                continue
            columns = set(each.identity or ())
            fix = identify(facts, table, each, in_list=has_list(facts, table))
            if not columns.issuperset(key):
                yield error(
                    f"partition {each.schema}.{each.name} identifies rows by {listed(each.identity or ())},"
                    f" and the table by {listed(key)}",
                    "of its updated and deleted rows the server does not send the table's key",
                    fix,
                    subject=table.name,
                )
            elif not table.identity:
                if not takes_full(facts, table, each) and table.published.primary_key:
                    fix = f"ALTER TABLE {_sql(table)} REPLICA IDENTITY DEFAULT"
                yield warning(
                    f"the table has REPLICA IDENTITY FULL, but partition {each.schema}.{each.name} does not",
                    f"of its updated and deleted rows the server sends only {listed(each.identity or ())}, and NULL for the rest",
                    fix,
                    subject=table.name,
                )


def _need_identity(facts: Facts) -> bool:
    """Tell whether a publication has UPDATE or DELETE; one that -c makes has."""
    published = {kind for publication in facts.publications for kind in publication.operations} or set(NEED_IDENTITY)
    return bool(published.intersection(NEED_IDENTITY))


def _has_old_rows(facts: Facts, table: Table) -> bool:
    """Tell whether UPDATE or DELETE is published of a table on which the server refuses none.

    On a partition without an identity it would. So such a partition shows that a publication has the table's INSERT alone.
    """
    return _need_identity(facts) and all(each.identity is not None for each in table.partitions)


def generated(facts: Facts) -> Iterator[Verdict]:
    """Judge whether the server refuses UPDATE and DELETE because of generated columns that are not published (since 18).

    If there is a column list, it decides what is published, and `restrictions` judges it.
    """
    for table in facts.tables:
        refused = " and ".join(table.published.refused)
        for each in table.partitions if refused and not has_list(facts, table) else ():
            identity = each.identity or each.generated
            missing = [name for name in table.published.unpublished_generated if name in identity]
            if not missing or (each.identity is None and not _sets_full(facts)):
                continue
            whose = "its replica identity" if each.identity is not None else "REPLICA IDENTITY FULL, which -c would set,"
            yield error(
                f"{whose} has the generated column {listed(missing)}, which is not published",
                f"the server refuses {refused} on it, to every application",
                without_generated(facts, table, each, missing),
                subject=table.name,
            )


def restrictions(facts: Facts) -> Iterator[Verdict]:
    """Judge whether column lists and row filters make the server refuse UPDATE and DELETE.

    A column list must contain the columns of the replica identity, and can't be used with REPLICA IDENTITY FULL. A row filter may
    use only columns of the replica identity.
    """
    found = False
    tables_by_name = {table.name: table for table in facts.tables}
    for each in facts.restrictions:
        if not needs_identity(each):
            continue
        for partition in each.partitions:
            for verdict in _clashes(facts, each, partition, tables_by_name.get(f"{each.schema}.{each.name}")):
                found = True
                yield verdict
    if facts.restrictions and not found:
        yield ok("no column list or row filter clashes with a replica identity")


def _clashes(facts: Facts, found: Restriction, partition: Partition, table: Table | None) -> Iterator[Verdict]:
    """Yield a verdict for each conflict of a publication's column list and row filter with a table's or partition's identity.

    No fix takes columns out of the list in silence: they may be those that must not leave the server.
    """
    name = f"{found.schema}.{found.name}"
    key = table.published.primary_key if table is not None else ()
    refused = " and ".join(kind.upper() for kind in NEED_IDENTITY if kind in found.operations)
    why = f"the server refuses {refused} on it, to every application"
    if partition.identity is None:
        return
    is_full = partition.replica_identity == "f"
    outside = [] if is_full else [column for column in found.filtered_by or () if column not in partition.identity]
    if outside:
        message = f"publication {found.publication!r} filters its rows by {listed(outside)}, which the replica identity lacks"
        yield error(message, why, identify(facts, table, partition, in_list=found.columns is not None), subject=name)
    if found.columns is None:
        return
    leaves_out = f"the column list of publication {found.publication!r} leaves out"
    missing = [column for column in partition.identity if column not in found.columns]
    if is_full:
        fix = identify(facts, table, partition, in_list=True)
        if key and set(found.filtered_by or ()) <= set(key) <= set(found.columns):
            fix = f"ALTER TABLE {quote_table(partition.schema, partition.name)} REPLICA IDENTITY DEFAULT"
        yield error(f"{leaves_out} some columns, and the replica identity is FULL", why, fix, subject=name)
    elif missing:
        root = quote_table(found.schema, found.name)
        columns = ", ".join(map(quote_identifier, (*found.columns, *missing)))
        where = "" if found.filtered_by is None else " WHERE (…as before…)"
        alter = f"ALTER PUBLICATION {quote_identifier(found.publication)}"
        fix = f"BEGIN; {alter} DROP TABLE {root}; {alter} ADD TABLE {root} ({columns}){where}; COMMIT"
        fix += f", or if {listed(missing)} must not be published, another replica identity"
        if facts.server.version < GENERATED_COLUMNS_SINCE and set(missing).intersection(partition.generated):
            fix = identify(facts, table, partition, in_list=True)
        yield error(f"{leaves_out} {listed(missing)} of the replica identity", why, fix, subject=name)


def column_lists(facts: Facts) -> Iterator[Verdict]:
    """Judge whether all publications publish the same columns of a table."""
    for table in facts.tables:
        if table.column_sets > 1:
            yield error(
                "the publications have different columns of it",
                "the server ends the stream at its first change",
                "give it the same column list in each publication, or name one publication",
                subject=table.name,
            )


def left_out(facts: Facts) -> Iterator[Verdict]:
    """Name tables whose changes never arrive, because they are not in the WAL."""
    for each in facts.left_out:
        what = f"it is {'a foreign table' if each.kind == 'foreign' else 'unlogged'}"
        what += f", and a partition of {each.parent}" if each.parent else ""
        fix = (
            f"ALTER TABLE {quote_table(each.schema, each.name)} SET LOGGED"
            if each.kind == "unlogged"
            else "stream it from the server that has it"
        )
        yield warning(what, "the WAL does not have its changes, so they never come", fix, subject=f"{each.schema}.{each.name}")


def binary(facts: Facts) -> Iterator[Verdict]:
    """Name columns that can't be sent with --binary."""
    for table, column, type_name in facts.without_binary:
        yield warning(
            f"column {column!r} has values of type {type_name}, which has no binary form",
            "with --binary the server ends the stream at its first change",
            "leave --binary out",
            subject=table,
        )


def _sql(table: Table) -> str:
    return quote_table(table.published.schema, table.published.name)


CHECKS: Mapping[str, Callable[[Facts], Iterator[Verdict]]] = MappingProxyType(
    {
        "publications.there": publications,
        "publications.operations": operations,
        "tables.published": tables,
        "tables.readable": readable,
        "tables.row_security": row_security,
        "tables.identity": identity,
        "tables.keys": keys,
        "tables.partitions": partitions,
        "tables.generated": generated,
        "tables.restrictions": restrictions,
        "tables.column_lists": column_lists,
        "tables.left_out": left_out,
        "tables.binary": binary,
    }
)
"""The checks by the names that their findings have, in the order in which the findings are shown."""
