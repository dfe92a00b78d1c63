"""The doctor's checks of a server and a slot, from facts to verdicts. tests/server/test_doctor.py has them on real servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cdcpipe.ddl.script import TRIGGERS, Settings
from cdcpipe.doctor import server_checks
from cdcpipe.doctor.facts import Asked, Transaction, WALRate
from cdcpipe.libpq.connection_hints import connection_hint
from cdcpipe.libpq.server_errors import NO_REPLICATION
from cdcpipe.lsn import LSN
from cdcpipe.publishing import NewPublication
from support.doctor_facts import ASKED, GB, MB, NEW, ROLE, facts, judge, on, server, slot


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
    standby = server(is_standby=True)
    judge(server_checks.wal_level, facts(server=standby), "ok on this standby; the primary … was not asked")
    judge(server_checks.wal_level, facts(server=standby, others=(server(),)), "ok wal_level is logical")
    primary = server({"wal_level": "replica"}, address="there:5432")
    judge(server_checks.wal_level, facts(server=standby, others=(primary,)), "error replica … then restart")


def test_wal_level_of_19() -> None:
    """The first logical slot raises the level of the primary, and its standbys follow."""
    low = {"wal_level": "replica", "effective_wal_level": "replica"}
    judge(server_checks.wal_level, on(low), "ok replica … the first logical slot raises")
    judge(server_checks.wal_level, on(low | {"wal_level": "minimal", "effective_wal_level": "minimal"}), "error minimal")
    # A standby has the level of its primary, whatever its own setting is.
    standby = server(low | {"wal_level": "logical"}, is_standby=True)
    judge(server_checks.wal_level, facts(server=standby), "error effective_wal_level is replica … on the primary: ALTER SYSTEM")
    raised = server({"wal_level": "replica", "effective_wal_level": "logical"}, is_standby=True)
    judge(server_checks.wal_level, facts(server=raised), "ok effective_wal_level is logical")
    primary = server({"wal_level": "replica"}, address="there:5432")
    judge(server_checks.wal_level, facts(server=raised, others=(primary,)), "warning … loses its logical slots … on the primary")
    judge(server_checks.wal_level, facts(server=raised, others=(server(),)), "ok")


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
    without = replace(ROLE, can_replicate=False)
    refused = facts(replication_problem="must have the REPLICATION attribute", replication_hint=NO_REPLICATION, role=without)
    judge(server_checks.replication, refused, 'error cdc may not stream … ALTER ROLE "cdc" REPLICATION')
    on_rds = replace(refused, service_roles=("rds_superuser",))
    judge(server_checks.replication, on_rds, 'error a member of rds_replication may … GRANT rds_replication TO "cdc"')
    # A database that was moved from RDS has its roles, and membership does not help there.
    moved = replace(on_rds, role=replace(without, can_replicate=True))
    judge(server_checks.replication, moved, 'error REPLICATION attribute may … ALTER ROLE "cdc" REPLICATION')
    # The server's message is a translated one, so the hint is the general one.
    message = "nur Superuser und Replikationsrollen können WAL-Sender starten"
    translated = facts(replication_problem=message, replication_hint=connection_hint(f"FATAL:  {message}", {}), role=without)
    judge(server_checks.replication, translated, 'error cdc may not stream: nur … ALTER ROLE "cdc" REPLICATION')
    judge(server_checks.replication, replace(translated, role=ROLE), "error no connection for replication: nur … check host")
    # On a hosted service the role has no such attribute, whatever the problem is.
    full = facts(replication_problem="number exceeds max_wal_senders", replication_hint="raise it", role=without)
    judge(server_checks.replication, full, "error no connection for replication … max_wal_senders … raise it")
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


def test_the_primarys_transactions_are_not_said_to_be_none() -> None:
    given = facts(asked=NEW, transactions=None, server=server(is_standby=True))
    judge(server_checks.transactions, given, "warning on the primary are not known here … waits … against the primary")
    judge(server_checks.transactions, facts(transactions=None))


def test_a_transaction_whose_age_is_not_shown() -> None:
    given = facts(transactions=(replace(SESSION, age_s=None),), role=replace(ROLE, sees_others=False))
    judge(server_checks.transactions, given, 'warning 1 transaction of other users is open … GRANT pg_read_all_stats TO "cdc"')


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


def test_a_slot_that_is_not_there_on_a_standby_that_copies_slots() -> None:
    """-c alone makes none in the place of a copy."""
    copying = on({"sync_replication_slots": "on"}, is_standby=True, slots=())
    fix = "make it on the primary … cdcpipe prepare -S s --publication p -c --failover no, with the options of this connection"
    judge(server_checks.slot_state, copying, f"error not there: there is nothing to stream from … {fix}")
    judge(server_checks.slot_state, replace(copying, asked=NEW), f"warning not there … only with --failover no … {fix}")
    judge(server_checks.slot_state, replace(on(is_standby=True, slots=()), asked=NEW), "ok -c makes it")
    lost = on({"sync_replication_slots": "on"}, is_standby=True, slots=(slot(wal_status="lost"),))
    judge(server_checks.slot_state, lost, "error is lost … -c --failover no, with")


def test_the_command_that_makes_a_slot_publishes_what_was_asked_for() -> None:
    new = NewPublication.of(tables=["public.*"], exclude_columns=["public.person.the name"])
    asked = Asked("s", publications=("my pub",), new=new)
    options = "--publication 'my pub' --table 'public.*' --exclude-column 'public.person.the name' -c"
    expected = f"error cdcpipe prepare -S s {options}, with the options of this connection"
    judge(server_checks.slot_state, facts(asked=asked, server=server()), expected)
    other = Asked("s", "wal2json")
    expected = "error cdcpipe -L -S s -P wal2json -c, with the options of this connection"
    judge(server_checks.slot_state, facts(asked=other, server=server()), expected)


def test_a_copy_of_the_primarys_slot_on_a_standby() -> None:
    copy = slot(synced=True, in_recovery=True)
    for each in (copy, replace(copy, wal_status="lost"), replace(copy, wal_status="unreserved")):
        judge(server_checks.slot_state, on(slots=(each,), is_standby=True), "error copy of the primary's … -S NAME -c")
    judge(server_checks.slot_state, on(slots=(slot(synced=True),)), "ok free")  # promoted
    before_16 = slot(synced=None, in_recovery=True, decodes=False)
    judge(server_checks.slot_state, on(slots=(before_16,), is_standby=True), "error does not decode … connect to the primary")


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


def test_the_wal_of_a_slot_in_creation_is_unknown() -> None:
    judge(server_checks.slot_wal, on(slots=()))
    judge(server_checks.slot_wal, on(slots=(slot(confirmed_flush_lsn=None),)))


def test_ddl_capture() -> None:
    whole = dict.fromkeys(TRIGGERS, "A")
    judge(server_checks.ddl_capture, facts())
    judge(server_checks.ddl_capture, facts(ddl_triggers=whole, ddl_settings=Settings()), "ok DDL is captured")
    judge(server_checks.ddl_capture, facts(ddl_triggers=whole, ddl_settings=Settings(version=99)), "ok DDL is captured")
    old = "warning version 2 of DDL capture is installed … rows can be wrong … cdcpipe ddl install"
    judge(server_checks.ddl_capture, facts(ddl_triggers=whole, ddl_settings=Settings(version=2)), old)
    judge(server_checks.ddl_capture, facts(ddl_triggers=whole), "warning the version of DDL capture can't be read")
    off = facts(ddl_triggers=whole, server=server({"event_triggers": "off"}))
    judge(server_checks.ddl_capture, off, "warning event_triggers is off … no DDL … then cdcpipe ddl install")
    expected = "warning cdcpipe_sql_drop is missing … of some DDL and not of all … cdcpipe ddl install"
    judge(server_checks.ddl_capture, facts(ddl_triggers=whole | {"cdcpipe_sql_drop": "D"}), expected)
    others = {name: state for name, state in whole.items() if name != "cdcpipe_sql_drop"}
    judge(server_checks.ddl_capture, facts(ddl_triggers=others), expected)
    judge(
        server_checks.ddl_capture, facts(ddl_triggers=dict.fromkeys(TRIGGERS, "O")), "warning … are missing, or not enabled always"
    )
