"""The doctor's checks of publications and tables, from facts to verdicts. tests/server/test_doctor.py has them on real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from cdcpipe.doctor import table_checks
from cdcpipe.doctor.facts import Asked, Facts, LeftOut, Partition, Restriction, Role, Table
from cdcpipe.doctor.findings import Verdict
from cdcpipe.errors import InitError
from cdcpipe.publishing import NewPublication
from cdcpipe.replication.selected import Selected, Selection
from cdcpipe.replication.tables import TypeWithoutBinary, Unreadable
from support.doctor_facts import ALL, ASKED, NEW, PUBLICATION, ROLE, facts, judge, on, server, table

MINE = Selected(7, "public", "t", False, 0, False, True, ())


def test_publications() -> None:
    check = table_checks.publications
    judge(check, facts(), "ok 'p' is there")
    judge(check, facts(publications=()), 'error not there … CREATE PUBLICATION "p" FOR ALL TABLES')
    judge(check, replace(on(slots=()), publications=()), "error not there … -c")
    judge(check, facts(asked=Asked("s")), "warning no publication is named … --publication")
    judge(check, facts(asked=Asked("s", "wal2json"), server=server()))


@pytest.mark.parametrize(
    ("role", "selection", "expected"),
    [
        (replace(ROLE, is_superuser=True), Selection((), is_all=True), "ok -c makes it"),
        (ROLE, Selection((), is_all=True), "error a superuser, which cdc is not … an administrator run CREATE PUBLICATION"),
        (ROLE, Selection((MINE,), is_all=False), "ok -c makes it"),
        (
            ROLE,
            Selection((replace(MINE, is_owned=False),), is_all=False),
            'error cdc does not own public.t … FOR TABLE "public"."t"',
        ),
        (
            replace(ROLE, can_create=False),
            Selection((MINE,), is_all=False),
            "error may not make objects in database shop",
        ),
    ],
)
def test_publications_that_are_made(role: Role, selection: Selection, expected: str) -> None:
    judge(table_checks.publications, facts(asked=NEW, role=role, selection=selection, publications=()), expected)


@pytest.mark.parametrize(("keyless", "is_refused"), [("refuse", True), ("full", True), ("insert-only", False)])
def test_no_sql_for_an_administrator_makes_the_server_refuse_commands(keyless: str, *, is_refused: bool) -> None:
    """With REPLICA IDENTITY FULL, which has the generated column, each UPDATE of the applications failed."""
    lacking = replace(MINE, lacking=(("public", "t"),), generated=(("public", "t"),))
    asked = replace(NEW, new=NewPublication.of(keyless=keyless))
    role = replace(ROLE, can_create=False)
    looked = facts(asked=asked, role=role, selection=Selection((lacking,), is_all=False), publications=())
    expected = "first mend … refuse every UPDATE and DELETE … public.t" if is_refused else "an administrator run CREATE PUBLICATION"
    judge(table_checks.publications, looked, f"error … {expected}")
    existing_slot = facts(selection=looked.selection, publications=())
    judge(table_checks.publications, existing_slot, "error not there … first mend … refuse every UPDATE and DELETE … public.t")


def test_what_c_refuses_with_insert_only() -> None:
    """No other check says it: nothing is refused of a table whose INSERT alone is published."""
    asked = replace(NEW, new=NewPublication.of(keyless="insert-only"))
    keyed = replace(MINE, generated=(("public", "t"),), has_better_key=True)
    for made, expected in (MINE, []), (keyed, ["error tables that have a primary key … public.t … REPLICA IDENTITY DEFAULT"]):
        looked = facts(asked=asked, selection=Selection((made,), is_all=False), publications=())
        judge(table_checks.publications, looked, "ok -c makes it", *expected)


def test_publications_of_all_tables_on_a_managed_service() -> None:
    on_rds = facts(asked=NEW, service_roles=("rds_superuser",), selection=Selection((), is_all=True), publications=())
    judge(table_checks.publications, on_rds, "warning managed services … --table SCHEMA.NAME")
    judge(table_checks.publications, replace(on_rds, role=replace(ROLE, is_superuser=True)), "ok -c makes it")
    expected = "error may not make objects in database shop … an administrator run CREATE PUBLICATION"
    judge(table_checks.publications, replace(on_rds, role=replace(ROLE, can_create=False)), expected)


def test_tables_that_no_publication_can_have() -> None:
    problem = InitError("--table public.v matches no table", hint="names are taken as they are")
    judge(table_checks.publications, facts(selection_problem=problem), "ok", "error public.v matches no table … names are taken")


def test_operations() -> None:
    judge(table_checks.operations, facts(), "ok all kinds")
    given = facts(publications=(replace(PUBLICATION, operations=frozenset({"insert", "update"})),))
    expected = "warning leaves out delete, truncate … deleted rows stay … SET (publish = 'insert, update, delete, truncate')"
    judge(table_checks.operations, given, expected)


def test_operations_of_tables_without_a_key() -> None:
    """The server would refuse UPDATE and DELETE on them, to every application, if somebody ran such a fix."""
    check, keyless = table_checks.operations, frozenset({"insert", "truncate"})
    companion = replace(PUBLICATION, name="p_keyless", operations=keyless)
    log = table("log", identity=None, partitions=(Partition("public", "log", "d", None),))
    asked = Asked("s", publications=("p", "p_keyless"))
    judge(
        check, facts(asked=asked, publications=(PUBLICATION, companion), tables=(log,)), "ok all kinds", "ok tables without a key"
    )
    fewer = replace(companion, operations=frozenset({"insert"}))
    given = facts(asked=asked, publications=(fewer,), tables=(log,))
    judge(check, given, "warning leaves out truncate … SET (publish = 'insert, truncate')")
    own = replace(PUBLICATION, operations=frozenset({"insert", "update"}))  # log is in the other one
    given = facts(asked=asked, publications=(own, companion), tables=(log,))
    judge(
        check,
        given,
        "warning leaves out delete, truncate … SET (publish = 'insert, update, delete, truncate')",
        "ok tables without a key",
    )
    # So it is with a publication of one's own.
    mine = facts(publications=(replace(PUBLICATION, operations=keyless),), tables=(table(), log))
    judge(check, mine, "warning leaves out update, delete … first give public.log a replica identity")
    assert "ALTER" not in str([each.fix for each in check(mine)])
    judge(check, replace(mine, tables=(table(),)), "warning … ALTER PUBLICATION")
    generated = table(published={"unpublished_generated": ("g",)})
    judge(check, replace(mine, tables=(generated,)), "warning … first give public.t")
    # One that has a replica identity may be in the first publication, also if there is a companion.
    both = replace(given, publications=(replace(PUBLICATION, operations=keyless), companion), tables=(generated, log))
    judge(check, both, "warning leaves out update, delete … first give public.t a replica identity", "ok tables without a key")
    id_left_out = Restriction("p", "public", "t", keyless, ("v",), None, table().partitions)
    judge(check, replace(mine, tables=(table(),), restrictions=(id_left_out,)), "warning … first give public.t")


def test_tables() -> None:
    judge(table_checks.tables, facts(tables=(table(), table("u"))), "ok 2 tables are published, about 16.0 KiB")
    judge(table_checks.tables, facts(tables=(table(),)), "ok 1 table is published, about 8.0 KiB")
    judge(table_checks.tables, facts(), 'warning no table … ALTER PUBLICATION "p" ADD TABLE')
    judge(table_checks.tables, facts(publications=()))


def test_readable() -> None:
    hidden = facts(tables=(table(), table("u", unreadable=(Unreadable("s", "part", False, 1),))))
    fix = 'public.u: … GRANT USAGE ON SCHEMA "s" TO "cdc"; GRANT SELECT ON "s"."part" TO "cdc"'
    judge(table_checks.readable, hidden, f"warning {fix}")
    for asked in (ASKED, NEW):  # -c copies into a new warehouse although the slot exists
        judge(table_checks.readable, replace(hidden, asked=replace(asked, copy=True)), f"error {fix}")
    judge(table_checks.readable, facts(tables=(table(),)), "ok may read them all")
    judge(table_checks.readable, facts())


def test_row_security() -> None:
    hidden = facts(tables=(table(hides_rows=True),))
    judge(table_checks.row_security, hidden, 'warning public.t: row-level security … ALTER ROLE "cdc" BYPASSRLS')
    judge(table_checks.row_security, replace(hidden, asked=replace(ASKED, copy=True)), "error public.t")
    judge(table_checks.row_security, facts(tables=(table(),)), "ok no row-level security")


def refusing(kind: str, *, is_deferrable: bool = False, partitions: int = 0) -> Table:
    leaves = [Partition("public", f"t{number}", kind, None) for number in range(partitions)] or [
        Partition("public", "t", kind, None)
    ]
    published = {"replica_identity": kind, "primary_key": (), "has_deferrable_key": is_deferrable, "refused": ("UPDATE", "DELETE")}
    return table(published=published, identity=None, partitions=tuple(leaves))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (table(), "ok no table's UPDATE"),
        (
            refusing("d"),
            (
                "error public.t: it has no primary key … refuses UPDATE and DELETE on it … "
                'ALTER TABLE "public"."t" REPLICA IDENTITY FULL; or give it a primary key'
            ),
        ),
        (refusing("d", is_deferrable=True), "error a deferrable primary key alone"),
        (refusing("n"), "error REPLICA IDENTITY NOTHING"),
        (refusing("i"), "error an index as replica identity that is gone"),
        (refusing("d", partitions=5), 'error a partition has … "t0" … "t2" REPLICA IDENTITY FULL; …'),
    ],
)
def test_identity(given: Table, expected: str) -> None:
    judge(table_checks.identity, facts(tables=(given,)), expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (table(), "ok have keys"),
        (table(published={"replica_identity": "f"}), "ok have keys"),
        (table(published={"replica_identity": "i", "primary_key": ()}), "ok have keys"),
        (
            table(published={"replica_identity": "i", "identity": ("id", "part"), "has_deferrable_key": True}),
            "warning the replica identity's part is not published … the list",
        ),
        (
            table(published={"replica_identity": "f", "primary_key": ()}),
            'warning no primary key … no replica … ALTER TABLE "public"."t" ADD PRIMARY KEY (…)',
        ),
        (
            table(published={"replica_identity": "f", "primary_key": (), "has_deferrable_key": True}),
            "warning deferrable … two rows may share it … without DEFERRABLE",
        ),
        (table(columns="v"), "warning the primary key's id is not published … the list"),
        (refusing("d"), "ok have keys"),  # said by another check
        (
            # In the publication of --keyless insert-only.
            table(published={"primary_key": ()}, partitions=(Partition("public", "t", "d", None),)),
            "warning no primary key … ADD PRIMARY KEY (…); then move the table to a publication that has UPDATE and DELETE",
        ),
    ],
)
def test_keys(given: Table, expected: str) -> None:
    judge(table_checks.keys, facts(tables=(given,)), expected)


def test_a_table_without_a_key_for_which_c_makes_the_publications() -> None:
    given = table(published={"primary_key": ()}, partitions=(Partition("public", "t", "d", None),))
    (found,) = table_checks.keys(facts(publications=(), tables=(given,)))
    assert found.fix == 'ALTER TABLE "public"."t" ADD PRIMARY KEY (…)'


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        ({}, ()),
        ({"identity": ("g", "id")}, ("g",)),
        ({"replica_identity": "f", "identity": (), "primary_key": ("g", "id")}, ("g",)),
        ({"replica_identity": "i", "identity": ("v",), "primary_key": ("g", "id")}, ()),
        ({"primary_key": (), "identity": ()}, ()),
    ],
)
def test_columns_of_the_key_that_are_not_published(published: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert table(published=published).published.unpublished_key == expected


def test_a_key_with_a_generated_column() -> None:
    leaf = Partition("public", "t", "d", ("id", "g"), ("g",))
    tables = (table(published={"primary_key": ("id", "g"), "identity": ("id", "g")}, partitions=(leaf,)),)
    older = facts(tables=tables, server=server(version=170010))
    judge(table_checks.keys, older, "warning the primary key's g is not published … no replica … without the generated column")
    judge(table_checks.keys, facts(tables=tables), "warning the primary key's g is not published … publish the key's columns")


def test_partitions() -> None:
    def root(*leaves: Partition) -> Facts:
        return facts(tables=(table(partitions=leaves),))

    same, full = Partition("public", "a", "d", ("id",)), Partition("public", "b", "f", ())
    other = Partition("public", "c", "i", ("v",))
    judge(table_checks.partitions, facts(tables=(table(),)))
    judge(table_checks.partitions, root(same, full))
    judge(table_checks.partitions, root(Partition("public", "d", "i", ("id", "v"))))  # the server sends the table's key, and v
    expected = 'error partition public.c identifies rows by v, and the table by id … ALTER TABLE "public"."c" REPLICA IDENTITY FULL'
    judge(table_checks.partitions, root(same, other), expected)


def test_partitions_of_which_no_old_rows_are_published() -> None:
    """The server refuses nothing, and sends only new rows: it is no matter what identifies old ones."""
    inserts = (replace(PUBLICATION, operations=frozenset({"insert"})),)
    nothing, other = Partition("public", "a", "n", None), Partition("public", "b", "i", ("v",))
    for kind, identity in (("f", ()), ("d", ("id",))):
        given = table(published={"replica_identity": kind}, identity=identity, partitions=(other, nothing))
        judge(table_checks.partitions, facts(tables=(given,), publications=inserts))
        judge(table_checks.partitions, facts(tables=(given,), publications=(*inserts, PUBLICATION)))  # which has other tables
        given = replace(given, partitions=(other,))
        judge(table_checks.partitions, facts(tables=(given,), publications=inserts))


def test_partitions_do_not_inherit_replica_identity_full() -> None:
    """The stream then describes all columns as the identity, but the old rows have only the partition's."""
    same, full = Partition("public", "a", "d", ("id",)), Partition("public", "b", "f", ())
    other = Partition("public", "c", "i", ("v",))
    given = facts(tables=(table(published={"replica_identity": "f"}, identity=(), partitions=(same, full)),))
    expected = 'warning partition public.a does not … sends only id, and NULL … ALTER TABLE "public"."a" REPLICA IDENTITY FULL'
    judge(table_checks.partitions, given, expected)
    given = facts(tables=(table(published={"replica_identity": "f"}, identity=(), partitions=(other, full)),))
    judge(table_checks.partitions, given, "error partition public.c identifies rows by v, and the table by id")
    keyless = {"replica_identity": "f", "primary_key": ()}
    given = facts(tables=(table(published=keyless, identity=(), partitions=(other,)),))
    judge(table_checks.partitions, given, "warning partition public.c does not … sends only v")


@pytest.mark.parametrize(
    ("kind", "key", "virtual", "fix"),
    [
        (
            "f",
            ("id",),
            (),
            'ALTER PUBLICATION "p" SET (publish_generated_columns = stored), or ALTER TABLE … REPLICA IDENTITY DEFAULT',
        ),
        ("f", (), (), "publish_generated_columns = stored), or another replica identity: … USING INDEX"),
        ("d", ("id", "g"), (), "publish_generated_columns = stored), or another replica identity: … USING INDEX"),
        # No publication has a virtual column.
        ("f", ("id",), ("g",), 'to every application. ALTER TABLE "public"."t" REPLICA IDENTITY DEFAULT'),
        ("f", (), ("g",), "to every application. another replica identity: … USING INDEX"),
    ],
)
def test_generated(kind: str, key: tuple[str, ...], virtual: tuple[str, ...], fix: str) -> None:
    leaf = Partition("public", "t", kind, key if kind == "d" else (), ("g",), virtual)
    published = {"primary_key": key, "unpublished_generated": ("g",), "refused": ("UPDATE",)}
    given = facts(tables=(table(published=published, partitions=(leaf,)),))
    judge(table_checks.generated, given, f"error generated column g … refuses UPDATE on it … {fix}")
    judge(table_checks.identity, given, "ok no table's UPDATE or DELETE is refused because it has no replica identity")
    # A publication that has only inserts of the table does no harm. And one that is not there can't be altered.
    judge(table_checks.generated, facts(tables=(table(published=published | {"refused": ()}, partitions=(leaf,)),)))
    assert "ALTER PUBLICATION" not in str(list(table_checks.generated(replace(given, publications=()))))


def test_replica_identity_full_is_no_remedy_for_a_table_with_generated_columns() -> None:
    leaf = Partition("public", "t", "d", None, ("g",))
    published = {"primary_key": (), "unpublished_generated": ("g",), "refused": ("UPDATE", "DELETE")}
    given = facts(tables=(table(published=published, identity=None, partitions=(leaf,)),))
    judge(table_checks.identity, given, "error no primary key … without generated columns … USING INDEX; or give it a primary key")
    judge(table_checks.generated, given)
    full = replace(
        given, asked=replace(NEW, new=NewPublication.of(keyless="full")), publications=(), selection=Selection((), is_all=True)
    )
    judge(table_checks.identity, full)
    judge(table_checks.generated, full, "error REPLICA IDENTITY FULL, which -c would set, has the generated column g")
    older = replace(given, server=server(version=170010))
    judge(table_checks.identity, older, 'error no primary key … ALTER TABLE "public"."t" REPLICA IDENTITY FULL; or')
    # Of a root that has FULL, a partition can't have it.
    leaf = Partition("public", "leaf", "d", ("id",), ("g",))
    root = table(published={"replica_identity": "f"}, identity=(), partitions=(leaf,))
    judge(table_checks.partitions, facts(tables=(root,)), 'warning … ALTER TABLE "public"."t" REPLICA IDENTITY DEFAULT')


def restriction(**changes: Any) -> Facts:
    known: dict[str, Any] = {
        "publication": "p",
        "schema": "public",
        "name": "t",
        "operations": ALL,
        "columns": None,
        "filtered_by": None,
        "partitions": (Partition("public", "t", "d", ("id",)),),
    }
    return facts(restrictions=(Restriction(**known | changes),))


FULL = (Partition("public", "t", "f", ()),)
GENERATED_KEY = (Partition("public", "t", "d", ("id", "g"), ("g",)),)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (facts(), []),
        (restriction(filtered_by=("id",)), ["ok no column list"]),
        (restriction(columns=("id", "v")), ["ok no column list"]),
        (
            restriction(filtered_by=("id", "v")),
            ['error \'p\' filters its rows by v … UPDATE and DELETE … ALTER TABLE "public"."t" REPLICA IDENTITY FULL'],
        ),
        (restriction(filtered_by=("v",), partitions=FULL), ["ok no column list"]),
        (
            restriction(columns=("v",)),
            ['error leaves out id of the replica identity … DROP TABLE "public"."t"; … ADD TABLE "public"."t" ("v", "id"); COMMIT'],
        ),
        (
            restriction(columns=("id",), partitions=GENERATED_KEY),
            ['error leaves out g of the replica identity … ADD TABLE "public"."t" ("id", "g")'],
        ),
        (  # where no list may have it
            replace(restriction(columns=("id",), partitions=GENERATED_KEY), server=server(version=170010)),
            ["error leaves out g of the replica identity … only columns of the column list, by REPLICA IDENTITY USING INDEX"],
        ),
        (
            restriction(columns=("id", "v"), partitions=FULL),
            ["error leaves out some columns, and … FULL … only columns of the column list, by REPLICA IDENTITY USING INDEX"],
        ),
        (
            replace(restriction(columns=("id",), partitions=FULL), tables=(table(columns="id"),)),
            ['error leaves out some columns, and … FULL … ALTER TABLE "public"."t" REPLICA IDENTITY DEFAULT'],
        ),
        (
            replace(restriction(columns=("id", "v"), filtered_by=("v",), partitions=FULL), tables=(table(),)),
            ["error leaves out some columns, and … FULL … REPLICA IDENTITY USING INDEX"],
        ),
        (
            restriction(columns=("v",), filtered_by=("v",)),
            ["error filters … USING INDEX", "error leaves out … WHERE (…as before…) … if id must not be published, another"],
        ),
        (restriction(columns=("v",), filtered_by=("v",), operations=frozenset({"insert"})), ["ok no column list"]),
        (restriction(filtered_by=("v",), operations=frozenset({"insert", "delete"})), ["error the server refuses DELETE on it"]),
        (restriction(filtered_by=("v",), partitions=(Partition("public", "t", "n", None),)), ["ok no column list"]),
    ],
)
def test_restrictions(given: Facts, expected: list[str]) -> None:
    judge(table_checks.restrictions, given, *expected)


LISTED = Restriction("p", "public", "t", ALL, ("id", "v"), None, FULL)


@pytest.mark.parametrize(
    ("check", "given"),
    [
        (table_checks.identity, refusing("d")),
        (table_checks.identity, refusing("d", partitions=2)),
        (table_checks.partitions, table(partitions=(Partition("public", "c", "i", ("v",)),))),
        (
            table_checks.partitions,
            table(published={"replica_identity": "f"}, identity=(), partitions=(Partition("public", "a", "d", ("id",)),)),
        ),
        (table_checks.restrictions, table(columns="id v secret", published={"primary_key": ()})),
    ],
)
def test_no_fix_leads_past_a_column_list(check: Callable[[Facts], Iterator[Verdict]], given: Table) -> None:
    """REPLICA IDENTITY FULL clashes with the list. Without the list, the server would publish what it must never send."""
    found = list(check(facts(tables=(given,), restrictions=(LISTED,))))
    assert [verdict.level for verdict in found if verdict.fix] != []
    for verdict in found:
        fix = verdict.fix or ""
        assert "a unique index that has only columns of the column list, by REPLICA IDENTITY USING INDEX" in fix
        assert not any(part in fix for part in ("ALTER TABLE", "IDENTITY FULL", "ADD TABLE"))
        assert ("primary key" in fix) == ("primary key that has only columns of the list" in fix)


def test_an_identity_may_be_full_where_only_inserts_have_a_column_list() -> None:
    inserts = replace(LISTED, operations=frozenset({"insert"}))
    judge(table_checks.identity, facts(tables=(refusing("d"),), restrictions=(inserts,)), "error … REPLICA IDENTITY FULL")
    other = replace(LISTED, name="u")
    judge(table_checks.identity, facts(tables=(refusing("d"),), restrictions=(other,)), "error … REPLICA IDENTITY FULL")


def test_a_publication_that_cannot_be_made_is_not_proposed_for_all_tables() -> None:
    asked = replace(ASKED, new=NewPublication.of(exclude_columns=("public.t.secret",)))
    judge(table_checks.publications, facts(asked=asked, publications=()), 'error not there … CREATE PUBLICATION "p" FOR TABLE …')


def test_column_lists() -> None:
    judge(table_checks.column_lists, facts(tables=(table(), table("u", column_sets=2))), "error public.u: … different columns")


def test_tables_that_are_left_out() -> None:
    found = (LeftOut("public", "u", "unlogged"), LeftOut("public", "f", "foreign", "public.root"))
    expected = (
        'warning public.u: … unlogged … ALTER TABLE "public"."u" SET LOGGED',
        "warning public.f: … a partition of public.root",
    )
    judge(table_checks.left_out, facts(left_out=found), *expected)


def test_binary() -> None:
    judge(table_checks.binary, facts(without_binary=(TypeWithoutBinary("public.t", "c", "aclitem[]"),)), "warning 'c' … --binary")
