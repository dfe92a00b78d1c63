"""The doctor's checks of a failover, from facts to verdicts. tests/server/test_doctor_failover.py has them on real servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cdcpipe.doctor import failover_checks
from cdcpipe.doctor.facts import Asked, Server, Unreachable
from cdcpipe.replication.slots import Slot
from support.doctor_facts import ASKED, NEW, facts, judge, physical, server, slot

COPYING = {"sync_replication_slots": "on", "hot_standby_feedback": "on", "primary_slot_name": "b"}


def primary(*slots: Slot, settings: Mapping[str, str] | None = None, **changes: Any) -> Server:
    return server(settings, slots=slots, **changes)


def standby(*slots: Slot, settings: Mapping[str, str] | None = None, **changes: Any) -> Server:
    known = {"address": "there:5432", "is_standby": True, "has_dbname": True, "slots": slots}
    return server(COPYING | dict(settings or {}), **known | changes)


def test_servers() -> None:
    given = facts(others=(standby(), Unreachable("b:5432", "Connection refused")))
    judge(failover_checks.servers, given, "ok there:5432: a standby", "warning b:5432: no answer: Connection refused")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (primary(slot()), "ok no standby is known"),
        (primary(slot(failover=False), physical("b")), "warning not the property failover … start it with --failover yes"),
        (primary(slot(failover=True), physical("b")), "ok standbys copy"),
        (primary(physical("b")), "ok not there yet"),
        (
            primary(slot(), physical("b"), version=160009),
            "warning older than 17 … pg_failover_slots … target_session_attrs=read-write",
        ),
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
def test_standby_slots(named: str, slots: tuple[Slot, ...], expected: list[str]) -> None:
    found = primary(slot(failover=True), *slots, settings={"synchronized_standby_slots": named})
    judge(failover_checks.standby_slots, facts(server=found), *expected)
    without = primary(slot(failover=False), *slots, settings={"synchronized_standby_slots": named})
    judge(failover_checks.standby_slots, facts(server=without))


COPY = slot(synced=True, failover=True, in_recovery=True)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (standby(COPY), ["ok there:5432: it has a copy of slot 's'"]),
        (standby(), ["warning there:5432: slot 's' is not there … not there, and all tables … pg_sync_replication_slots()"]),
        (standby(slot(synced=False)), ["warning one of its own … SELECT pg_drop_replication_slot('s') there"]),
        (standby(replace(COPY, temporary=True)), ["warning not yet a lasting copy … the slot's consumer at the primary go on"]),
        (standby(replace(COPY, invalidation_reason="rows_removed")), ["warning is lost (rows_removed): … the slot on the primary"]),
        (standby(replace(COPY, wal_status="lost")), ["warning slot 's' is lost: after … look at the slot on the primary"]),
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
    """If the primary lacks something, only the finding on the primary says so."""
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
