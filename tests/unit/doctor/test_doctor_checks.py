"""Each check of the doctor, from facts to verdicts, without a server. tests/server/test_doctor.py has them on real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from cdcpipe.doctor import failover_checks, server_checks, table_checks
from cdcpipe.doctor.facts import (
    Asked,
    Facts,
    LeftOut,
    Partition,
    Publication,
    Restriction,
    Role,
    Server,
    SlotState,
    Table,
    Transaction,
    Unreachable,
    WALRate,
)
from cdcpipe.doctor.findings import Verdict
from cdcpipe.lsn import LSN
from cdcpipe.replication.tables import PublishedTable, TableColumn, TypeWithoutBinary

MB, GB = 1 << 20, 1 << 30

SETTINGS = {
    "wal_level": "logical",
    "max_replication_slots": "10",
    "max_wal_senders": "10",
    "max_slot_wal_keep_size": "-1",
    "wal_sender_timeout": "60000",
}


def server(settings: Mapping[str, str] | None = None, **changes: Any) -> Server:
    known: dict[str, Any] = {
        "address": "here:5432",
        "version": 180004,
        "version_text": "18.4",
        "database": "shop",
        "encoding": "UTF8",
        "is_standby": False,
        "settings": SETTINGS | dict(settings or {}),
        "wal_lsn": LSN(100 * GB),
        "slots": (),
        "walsenders": 0,
        "has_dbname": None,
        "clock_ahead_s": 0.0,
    }
    return Server(**known | changes)


def slot(**changes: Any) -> SlotState:
    known: dict[str, Any] = {
        "name": "s",
        "plugin": "pgoutput",
        "slot_type": "logical",
        "database": "shop",
        "temporary": False,
        "active_pid": None,
        "restart_lsn": LSN(100 * GB - MB),
        "confirmed_flush_lsn": LSN(100 * GB),
        "wal_status": "reserved",
        "safe_wal_bytes": None,
        "two_phase": False,
    }
    return SlotState(**known | changes)


def physical(name: str, pid: int | None = 7, **changes: Any) -> SlotState:
    return slot(name=name, slot_type="physical", plugin=None, database=None, active_pid=pid, **changes)


def table(name: str = "t", *, columns: str = "id v", **changes: Any) -> Table:
    """A table with the primary key id; ``published`` are changes to its PublishedTable."""
    published: dict[str, Any] = {
        "schema": "public",
        "name": name,
        "relation_id": 1,
        "replica_identity": "d",
        "primary_key": ("id",),
        "has_deferrable_key": False,
        "refused": (),
        "columns": tuple(TableColumn(column, number, 23, -1, None, False) for number, column in enumerate(columns.split(), 1)),
    } | changes.pop("published", {})
    known: dict[str, Any] = {
        "published": PublishedTable(**published),
        "is_readable": True,
        "hides_rows": False,
        "is_owned": True,
        "size_bytes": 8192,
        "identity": ("id",),
        "partitions": (Partition("public", name, published["replica_identity"], ("id",)),),
    }
    return Table(**known | changes)


ROLE = Role("cdc", is_superuser=False, can_replicate=True, sees_others=True, can_create=True)
ALL = frozenset({"insert", "update", "delete", "truncate"})
PUBLICATION = Publication("p", all_tables=False, schemas=(), operations=ALL)
ASKED = Asked("s", publications=("p",))
NEW = Asked("s", publications=("p",), create=True)


def facts(**changes: Any) -> Facts:
    known: dict[str, Any] = {"asked": ASKED, "server": server(slots=(slot(),)), "role": ROLE, "publications": (PUBLICATION,)}
    return Facts(**known | changes)


def on(settings: Mapping[str, str] | None = None, **changes: Any) -> Facts:
    """The facts with a slot on a server with these settings and properties."""
    return facts(server=server(settings, **{"slots": (slot(),)} | changes))


def said(check: Callable[[Facts], Iterator[Verdict]], given: Facts) -> list[tuple[str, str]]:
    """The level, and all words, of each verdict."""
    found = list(check(given))
    for verdict in found:
        # What is not in order says why that matters, and what to do.
        assert (verdict.level == "ok") == (verdict.why is None) == (verdict.fix is None), verdict
        assert verdict.message
        assert not any("\n" in text for text in (verdict.message, verdict.why or "", verdict.fix or ""))
    return [(verdict.level, f"{verdict.subject}: {verdict.message}: {verdict.why}. {verdict.fix}") for verdict in found]


def judge(check: Callable[[Facts], Iterator[Verdict]], given: Facts, *expected: str) -> None:
    """Each of ``expected`` is a level, and words that the verdict has, in this order, with … for what is between them."""
    found = said(check, given)
    assert len(found) == len(expected), found
    for (level, text), wanted in zip(found, expected, strict=True):
        wanted_level, _, words = wanted.partition(" ")
        assert level == wanted_level, found
        position = 0
        for part in words.split("…"):
            position = text.find(part.strip(), position)
            assert position >= 0, (part, text)


# --- the server ---


@pytest.mark.parametrize(
    ("version", "text", "expected"),
    [
        (180004, "18.4", "ok PostgreSQL 18.4"),
        (170005, "17.5", "ok PostgreSQL 17.5"),
        (170004, "17.4", "warning PostgreSQL 17.4 … before 17.5 … update it to 17.5"),
        (140017, "14.17", "warning … before 14.18"),
        (130022, "13.22", "error … needs PostgreSQL 14"),
        (190000, "19.0", "warning … not tested"),
    ],
)
def test_version(version: int, text: str, expected: str) -> None:
    judge(server_checks.version, on(version=version, version_text=text), expected)


def test_encoding() -> None:
    judge(server_checks.encoding, on(), "ok UTF8")
    judge(server_checks.encoding, on(encoding="SQL_ASCII"), "warning SQL_ASCII … stops the stream … ENCODING 'UTF8'")


def test_wal_level() -> None:
    judge(server_checks.wal_level, on(), "ok logical")
    judge(
        server_checks.wal_level,
        on({"wal_level": "replica"}),
        "error replica … ALTER SYSTEM SET wal_level = 'logical'; then restart",
    )


@pytest.mark.parametrize(
    ("ahead_s", "expected"),
    [
        (0.0, "ok agree"),
        (-1.9, "ok agree"),
        (30.0, "warning 30 s ahead of … lag"),
        (-7200.0, "warning 2 h behind … timedatectl"),
    ],
)
def test_clock(ahead_s: float, expected: str) -> None:
    judge(server_checks.clock, on(clock_ahead_s=ahead_s), expected)


def test_replication() -> None:
    judge(server_checks.replication, facts(), "ok cdc may stream … every row")
    refused = facts(replication_problem="must have the REPLICATION attribute", role=replace(ROLE, can_replicate=False))
    judge(server_checks.replication, refused, 'error cdc may not stream … ALTER ROLE "cdc" REPLICATION')
    judge(server_checks.replication, facts(replication_problem="no pg_hba.conf entry"), "error no pg_hba.conf entry … pg_hba.conf")
    # A hosted service may let a role stream that has not the attribute.
    judge(server_checks.replication, facts(role=replace(ROLE, can_replicate=False)), "ok may stream")


@pytest.mark.parametrize(
    ("others", "has_slot", "expected"),
    [
        (8, False, "ok 2 of 10"),
        (9, False, "warning 1 of 10 … temporary slot"),
        (10, False, "error 0 of 10 … 's' can't be made … max_replication_slots = '15'"),
        (8, True, "ok 1 of 10"),
        (9, True, "warning 0 of 10"),
    ],
)
def test_slots_left(others: int, has_slot: bool, expected: str) -> None:
    slots = tuple(slot(name=f"other{number}") for number in range(others)) + ((slot(),) if has_slot else ())
    judge(server_checks.slots_left, on(slots=slots), expected)


@pytest.mark.parametrize(
    ("used", "pid", "expected"),
    [
        (8, None, "ok 2 of 10"),
        (9, None, "warning 1 of 10"),
        (10, None, "error 0 of 10 … max_wal_senders = '15'; then restart"),
        (9, 4711, "ok 1 of 10"),
        (10, 4711, "warning 0 of 10"),
    ],
)
def test_walsenders_left(used: int, pid: int | None, expected: str) -> None:
    judge(server_checks.walsenders_left, on(walsenders=used, slots=(slot(active_pid=pid),)), expected)


@pytest.mark.parametrize(
    ("limit", "rate", "expected"),
    [
        ("-1", None, "warning unlimited … fills the server's disk … '10GB'"),
        ("-1", WALRate(MB, 1.0, None), "warning unlimited … '254GB'"),  # three days at 1 MiB/s
        ("-1", WALRate(0.0, 1.0, 2.0 * MB), "warning unlimited … '507GB'"),
        ("1024", None, "ok 1.0 GiB"),
        ("1024", WALRate(0.0, 1.0, None), "ok 1.0 GiB … no WAL is being written"),
        ("1024", WALRate(MB, 1.0, None), "warning 1.0 GiB, which lasts 17.1 min … 1.0 MiB/s … copied anew"),
        ("1024", WALRate(0.0, 1.0, MB), "warning lasts 17.1 min … on average 1.0 MiB/s"),
        ("102400", WALRate(MB, 1.0, None), "ok 100.0 GiB, which lasts 28.4 h"),
    ],
)
def test_wal_limit(limit: str, rate: WALRate | None, expected: str) -> None:
    given = replace(on({"max_slot_wal_keep_size": limit}), wal_rate=rate)
    judge(server_checks.wal_limit, given, expected)


def test_idle_slots() -> None:
    judge(server_checks.idle_slots, on(), "ok has no idle_replication_slot_timeout")
    judge(server_checks.idle_slots, on({"idle_replication_slot_timeout": "0"}), "ok off")
    expected = "warning 24 h … lost … ALTER SYSTEM SET idle_replication_slot_timeout = '0'; SELECT pg_reload_conf()"
    judge(server_checks.idle_slots, on({"idle_replication_slot_timeout": "86400"}), expected)


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        ("60000", "ok 60 s"),
        ("10000", "ok 10 s"),
        ("3000", 'warning 3 s … ALTER ROLE "cdc" SET wal_sender_timeout'),
        ("0", "warning off … holds the slot"),
    ],
)
def test_walsender_timeout(timeout: str, expected: str) -> None:
    judge(server_checks.walsender_timeout, on({"wal_sender_timeout": timeout}), expected)


@pytest.mark.parametrize(
    ("listed", "plugin", "expected"),
    [
        (None, "pgoutput", "ok no list"),
        ("pgoutput, test_decoding", "pgoutput", "ok pgoutput"),
        ('"pgoutput","wal2json"', "wal2json", "ok wal2json"),
        ("pgoutput, test_decoding", "wal2json", "error not wal2json … = 'pgoutput', 'test_decoding', 'wal2json'; SELECT"),
        ("", "pgoutput", "error nothing, and not pgoutput … = 'pgoutput';"),
    ],
)
def test_output_plugins(listed: str | None, plugin: str, expected: str) -> None:
    given = on({} if listed is None else {"output_plugin_libraries": listed}, slots=())
    judge(server_checks.output_plugins, replace(given, asked=Asked("s", plugin)), expected)


def test_the_plugin_of_a_slot_that_is_there_counts() -> None:
    given = on({"output_plugin_libraries": "pgoutput"}, slots=(slot(plugin="wal2json"),))
    judge(server_checks.output_plugins, given, "error not wal2json")


SESSION, PREPARED = Transaction(4711, None, "shop", 0.0), Transaction(None, "it's", "crm", 0.0)


@pytest.mark.parametrize(
    ("transactions", "asked", "expected"),
    [
        ((), NEW, ["ok no transaction … 60 s"]),
        ((replace(SESSION, age_s=59.0),), NEW, ["ok no transaction"]),
        ((replace(SESSION, age_s=61.0),), NEW, ["warning 4711 … 61 s … the new slot waits … pg_terminate_backend(4711)"]),
        ((PREPARED,), NEW, ["error it's … in database crm … the new slot waits … COMMIT PREPARED 'it''s'"]),
        ((replace(SESSION, age_s=61.0),), ASKED, ["ok no transaction"]),
        ((PREPARED,), ASKED, ["ok no transaction"]),
        ((replace(SESSION, age_s=4000.0),), ASKED, ["warning 4711 … keeps all WAL"]),
        ((replace(PREPARED, age_s=9000.0),), ASKED, ["warning 2.5 h … keeps all WAL … ROLLBACK PREPARED 'it''s', in database crm"]),
    ],
)
def test_transactions(transactions: tuple[Transaction, ...], asked: Asked, expected: list[str]) -> None:
    given = facts(asked=asked, transactions=transactions, server=server(slots=() if asked.create else (slot(),)))
    judge(server_checks.transactions, given, *expected)


def test_a_transaction_whose_age_is_not_shown() -> None:
    given = facts(transactions=(replace(SESSION, age_s=None),), role=replace(ROLE, sees_others=False))
    judge(server_checks.transactions, given, 'warning 1 transactions of other users … GRANT pg_read_all_stats TO "cdc"')


# --- the slot ---


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ok there, and free"),
        ({"active_pid": 12}, "ok in use by server process 12"),
        ({"slot_type": "physical"}, "error physical"),
        ({"database": "crm"}, "error 'crm' … to 'shop' … -d crm"),
        ({"plugin": "wal2json"}, "error wal2json … publications"),
        ({"wal_status": "lost"}, "error is lost: changes are missing … pg_drop_replication_slot('s'); then cdcpipe prepare -S s"),
        ({"invalidation_reason": "idle_timeout"}, "error is lost (idle_timeout)"),
        ({"wal_status": "unreserved"}, "error beyond max_slot_wal_keep_size … checkpoint"),
        ({"confirmed_flush_lsn": None}, "warning still being made"),
    ],
)
def test_slot_state(changes: dict[str, Any], expected: str) -> None:
    judge(server_checks.slot_state, on(slots=(slot(**changes),)), expected)


def test_a_slot_that_is_not_there() -> None:
    judge(server_checks.slot_state, on(slots=()), "error not there … cdcpipe prepare -S s --publication p -c")
    judge(server_checks.slot_state, replace(on(slots=()), asked=NEW), "ok -c makes it")


def test_a_copy_of_the_primarys_slot_on_a_standby() -> None:
    judge(server_checks.slot_state, on(slots=(slot(synced=True),), is_standby=True), "error copy of the primary's … -S NAME -c")
    judge(server_checks.slot_state, on(slots=(slot(synced=True),)), "ok free")  # promoted


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ok 's' keeps 1.0 MiB of WAL, of which 0 B are not confirmed"),
        ({"restart_lsn": LSN(90 * GB)}, "warning 10.0 GiB … nobody reads it … pg_drop_replication_slot('s')"),
        ({"restart_lsn": LSN(90 * GB), "active_pid": 3}, "warning 10.0 GiB … still open … backend_xid"),
        (
            {"restart_lsn": LSN(90 * GB), "confirmed_flush_lsn": LSN(91 * GB), "active_pid": 3},
            "warning 9.0 GiB are not confirmed … behind",
        ),
        ({"safe_wal_bytes": 60 * MB}, "ok lost after 60.0 MiB more, in 60 s"),
    ],
)
def test_slot_wal(changes: dict[str, Any], expected: str) -> None:
    given = replace(on(slots=(slot(**changes),)), wal_rate=WALRate(MB, 1.0, None))
    judge(server_checks.slot_wal, given, expected)


def test_a_slot_that_is_being_made_keeps_what_nobody_knows() -> None:
    judge(server_checks.slot_wal, on(slots=()))
    judge(server_checks.slot_wal, on(slots=(slot(confirmed_flush_lsn=None),)))


# --- publications and tables ---


def test_publications() -> None:
    check = table_checks.publications
    judge(check, facts(), "ok 'p' is there")
    judge(check, facts(publications=()), 'error not there … CREATE PUBLICATION "p" FOR ALL TABLES')
    judge(check, replace(on(slots=()), publications=()), "error not there … -c")
    judge(check, facts(asked=Asked("s")), "warning no publication is named … --publication")
    judge(check, facts(asked=Asked("s", "wal2json"), server=server()))


@pytest.mark.parametrize(
    ("role", "tables", "found", "expected"),
    [
        (replace(ROLE, is_superuser=True), (), (), "ok -c makes it"),
        (ROLE, (), (), "error a superuser, which cdc is not … an administrator run CREATE PUBLICATION"),
        (ROLE, (("public", "t"),), (table(),), "ok -c makes it"),
        (ROLE, (("public", "t"),), (table(is_owned=False),), 'error cdc does not own public.t … FOR TABLE "public"."t"'),
        (replace(ROLE, can_create=False), (("public", "t"),), (table(),), "error may not make objects in database shop"),
    ],
)
def test_publications_that_are_made(
    role: Role, tables: tuple[tuple[str, str], ...], found: tuple[Table, ...], expected: str
) -> None:
    asked = replace(NEW, tables=tables)
    judge(table_checks.publications, facts(asked=asked, role=role, tables=found, publications=()), expected)


def test_tables_that_no_publication_can_have() -> None:
    judge(table_checks.publications, facts(unknown_tables=("public.v",)), "ok", "error public.v: it can't be published … --table")


def test_operations() -> None:
    judge(table_checks.operations, facts(), "ok all kinds")
    given = facts(publications=(replace(PUBLICATION, operations=frozenset({"insert", "update"})),))
    expected = "warning leaves out delete, truncate … deleted rows stay … SET (publish = 'insert, update, delete, truncate')"
    judge(table_checks.operations, given, expected)


def test_tables() -> None:
    judge(table_checks.tables, facts(tables=(table(), table("u"))), "ok 2 tables are published, about 16.0 KiB")
    judge(table_checks.tables, facts(tables=(table(),)), "ok 1 table is published, about 8.0 KiB")
    judge(table_checks.tables, facts(), 'warning no table … ALTER PUBLICATION "p" ADD TABLE')
    judge(table_checks.tables, facts(publications=()))


def test_readable() -> None:
    hidden = facts(tables=(table(), table("u", is_readable=False)))
    fix = 'public.u: … GRANT USAGE ON SCHEMA "public" TO "cdc"; GRANT SELECT ON "public"."u" TO "cdc"'
    judge(table_checks.readable, hidden, f"warning {fix}")
    judge(table_checks.readable, replace(hidden, asked=replace(ASKED, copy=True)), f"error {fix}")
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
            table(published={"replica_identity": "f", "primary_key": ()}),
            'warning no primary key … no replica … ALTER TABLE "public"."t" ADD PRIMARY KEY (…)',
        ),
        (
            table(published={"replica_identity": "f", "primary_key": (), "has_deferrable_key": True}),
            "warning deferrable … two rows may share it … without DEFERRABLE",
        ),
        (table(columns="v"), "warning the primary key's id is not published … the list"),
        (refusing("d"), "ok have keys"),  # said by another check
    ],
)
def test_keys(given: Table, expected: str) -> None:
    judge(table_checks.keys, facts(tables=(given,)), expected)


def test_partitions() -> None:
    def root(*leaves: Partition) -> Facts:
        return facts(tables=(table(partitions=leaves),))

    same, full = Partition("public", "a", "d", ("id",)), Partition("public", "b", "f", ())
    other = Partition("public", "c", "i", ("v",))
    judge(table_checks.partitions, facts(tables=(table(),)))
    judge(table_checks.partitions, root(same, full))
    expected = 'error partition public.c identifies rows by v, and the table by id … ALTER TABLE "public"."c" REPLICA IDENTITY FULL'
    judge(table_checks.partitions, root(same, other), expected)


@pytest.mark.parametrize(
    ("kind", "identity", "columns", "version", "is_refused"),
    [
        ("d", ("id",), "id v", 180004, False),
        ("d", ("id", "g"), "id v g", 180004, False),
        ("d", ("id", "g"), "id v", 180004, True),
        ("f", (), "id v", 180004, True),
        ("f", (), "id v", 170010, False),
    ],
)
def test_generated(kind: str, identity: tuple[str, ...], columns: str, version: int, is_refused: bool) -> None:
    leaf = Partition("public", "t", kind, identity, generated=("g",))
    given = replace(on(version=version), tables=(table(columns=columns, partitions=(leaf,)),))
    expected = ["error generated column g … publish_generated_columns = stored"] if is_refused else []
    judge(table_checks.generated, given, *expected)


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
        (restriction(columns=("id", "v"), partitions=FULL), ["error leaves out some columns, and … FULL"]),
        (restriction(columns=("v",), filtered_by=("v",)), ["error filters", "error leaves out … WHERE (…as before…)"]),
        (restriction(columns=("v",), filtered_by=("v",), operations=frozenset({"insert"})), ["ok no column list"]),
        (restriction(filtered_by=("v",), operations=frozenset({"insert", "delete"})), ["error the server refuses DELETE on it"]),
        (restriction(filtered_by=("v",), partitions=(Partition("public", "t", "n", None),)), ["ok no column list"]),
    ],
)
def test_restrictions(given: Facts, expected: list[str]) -> None:
    judge(table_checks.restrictions, given, *expected)


def test_column_lists() -> None:
    judge(table_checks.column_lists, facts(tables=(table(), table("u", column_sets=2))), "error public.u: … different columns")


def test_what_is_left_out() -> None:
    found = (LeftOut("public", "u", "unlogged"), LeftOut("public", "f", "foreign", "public.root"))
    expected = (
        'warning public.u: … unlogged … ALTER TABLE "public"."u" SET LOGGED',
        "warning public.f: … a partition of public.root",
    )
    judge(table_checks.left_out, facts(left_out=found), *expected)


def test_binary() -> None:
    judge(table_checks.binary, facts(without_binary=(TypeWithoutBinary("public.t", "c", "aclitem[]"),)), "warning 'c' … --binary")


# --- failover ---

COPYING = {"sync_replication_slots": "on", "hot_standby_feedback": "on", "primary_slot_name": "b"}


def primary(*slots: SlotState, settings: Mapping[str, str] | None = None, **changes: Any) -> Server:
    return server(settings, slots=slots, **changes)


def standby(*slots: SlotState, settings: Mapping[str, str] | None = None, **changes: Any) -> Server:
    known = {"address": "there:5432", "is_standby": True, "has_dbname": True, "slots": slots}
    return server(COPYING | dict(settings or {}), **known | changes)


def test_servers() -> None:
    given = facts(others=(standby(), Unreachable("b:5432", "Connection refused")))
    judge(failover_checks.servers, given, "ok there:5432: a standby", "warning b:5432: no answer: Connection refused")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (primary(slot()), "ok no standby is known"),
        (primary(slot(failover=False), physical("b")), "warning not the property failover … ALTER_REPLICATION_SLOT s (FAILOVER)"),
        (primary(slot(failover=True), physical("b")), "ok standbys copy"),
        (primary(physical("b")), "ok not there yet"),
        (primary(slot(), physical("b"), version=160009), "warning older than 17 … pg_failover_slots"),
        (primary(slot(), physical("b", temporary=True)), "ok no standby is known"),  # pg_basebackup's
    ],
)
def test_the_primarys_slot(found: Server, expected: str) -> None:
    judge(failover_checks.slot, facts(server=found), expected)


@pytest.mark.parametrize(
    ("named", "slots", "expected"),
    [
        ("", (physical("b"),), ["warning synchronized_standby_slots is empty … SET synchronized_standby_slots = 'b'"]),
        ("b", (physical("b"),), ["ok wait until the standby of slot 'b'"]),
        ("b", (physical("b", None),), ["error no standby uses 'b' … sends nothing … start the standby"]),
        ("b, c", (physical("b"),), ["ok 'b'", "error 'c', which is no slot of a standby … synchronized_standby_slots = 'b';"]),
        ("c", (physical("b"),), ["error 'c' … synchronized_standby_slots = '';"]),
    ],
)
def test_standby_slots(named: str, slots: tuple[SlotState, ...], expected: list[str]) -> None:
    found = primary(slot(failover=True), *slots, settings={"synchronized_standby_slots": named})
    judge(failover_checks.standby_slots, facts(server=found), *expected)
    without = primary(slot(failover=False), *slots, settings={"synchronized_standby_slots": named})
    judge(failover_checks.standby_slots, facts(server=without))


COPY = slot(synced=True, failover=True)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (standby(COPY), ["ok there:5432: it has a copy of slot 's'"]),
        (standby(), ["warning there:5432: slot 's' is not there … not there, and all tables … pg_sync_replication_slots()"]),
        (standby(slot(synced=False)), ["warning one of its own"]),
        (standby(replace(COPY, temporary=True)), ["warning not yet a lasting copy"]),
        (standby(replace(COPY, invalidation_reason="rows_removed")), ["warning is lost (rows_removed)"]),
        (standby(COPY, settings={"sync_replication_slots": "off"}), ["warning sync_replication_slots is off … on the standby"]),
        (standby(COPY, settings={"hot_standby_feedback": "off"}), ["warning hot_standby_feedback is off"]),
        (
            standby(COPY, settings={"primary_slot_name": ""}),
            ["warning primary_slot_name is empty … pg_create_physical_replication"],
        ),
        (standby(COPY, has_dbname=False), ["warning names no database … dbname=postgres"]),
        (standby(COPY, has_dbname=None), ["warning not shown … pg_read_all_settings"]),
        (standby(settings=dict.fromkeys(COPYING, ""), has_dbname=False), ["warning"] * 4),
        (standby(version=160009), []),
    ],
)
def test_standbys(found: Server, expected: list[str]) -> None:
    given = facts(server=primary(slot(failover=True), physical("b")), others=(found,))
    judge(failover_checks.standbys, given, *expected)


def test_standbys_wait_for_the_primarys_slot() -> None:
    """What the primary lacks is said of the primary."""
    judge(failover_checks.standbys, facts(server=primary(slot(failover=False)), others=(standby(),)))


@pytest.mark.parametrize(
    ("found", "asked", "expected"),
    [
        (primary(), ASKED, []),
        (standby(version=150013), ASKED, ["error standbys older than 16"]),
        (standby(settings={"hot_standby_feedback": "off"}), ASKED, ["warning hot_standby_feedback is off … invalidates"]),
        (standby(settings={"primary_slot_name": ""}), ASKED, ["warning without primary_slot_name"]),
        (standby(), NEW, ["ok pg_log_standby_snapshot()"]),
        (standby(slot()), ASKED, ["ok leads to a standby"]),
    ],
)
def test_streaming_from_a_standby(found: Server, asked: Asked, expected: list[str]) -> None:
    judge(failover_checks.source, facts(server=found, asked=asked), *expected)


def test_a_standby_that_is_streamed_from_needs_no_copy() -> None:
    judge(failover_checks.standbys, facts(server=standby(slot(synced=False), settings={"sync_replication_slots": "off"})))
    # Without a slot of its own somebody looks for the primary's.
    judge(failover_checks.standbys, facts(server=standby(settings={"sync_replication_slots": "off"})), "warning off")
