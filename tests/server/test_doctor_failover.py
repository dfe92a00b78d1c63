"""The doctor on a primary and its physical standby. Its findings would leave a promoted standby without the slot; its SQL mends
them.
"""

from __future__ import annotations

from collections.abc import Iterator

import postgres
import pytest

from cdcpipe.doctor import survey
from cdcpipe.doctor.facts import Asked
from cdcpipe.doctor.findings import Finding
from cdcpipe.libpq.parameters import connection_parameters
from cdcpipe.subcommands.doctor import doctor
from support.cli_process import run_cli
from support.requirements import need
from support.waiting import until

VERSION = "18"
SETTINGS = {"max_connections": 30, "wal_receiver_status_interval": "1s"}


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_WATCHED_S", 0.0)


@pytest.fixture
def pair() -> Iterator[tuple[postgres.Cluster, postgres.Cluster]]:
    """A primary with a table and a publication, and a standby that only streams from it."""
    need(VERSION)
    with postgres.Cluster(VERSION, settings=SETTINGS) as primary:
        with primary.connect() as connection:
            connection.execute("create table t (id int primary key); create publication p for table t")
        with postgres.Cluster(VERSION, settings=SETTINGS, standby_of=primary) as standby:
            yield primary, standby


def diagnose(*servers: postgres.Cluster, create: bool = False) -> list[Finding]:
    """Return the doctor's findings with a connection that names these servers, and leads to the first suitable one."""
    parameters = {"host": ",".join(str(each.directory) for each in servers), "port": ",".join(str(each.port) for each in servers)}
    given = connection_parameters([*parameters.items(), ("user", "postgres"), ("dbname", "postgres")])
    return doctor(given, Asked("s", publications=("p",), create=create)).findings


def failover(findings: list[Finding]) -> list[tuple[str, str, str]]:
    """Return check, level and message of each finding on failover."""
    return [(found.check.removeprefix("failover."), found.level, found.message) for found in findings if "failover." in found.check]


def fix_of(findings: list[Finding], message: str) -> str:
    [found] = [each for each in findings if message in each.message]
    assert found.fix
    return found.fix


def run(cluster: postgres.Cluster, fix: str) -> None:
    """Run the SQL that a finding proposes."""
    with cluster.connect() as connection:
        for statement in fix.partition(", on the standby")[0].split("; "):
            connection.execute(statement)


def test_a_failover_is_made_ready(pair: tuple[postgres.Cluster, postgres.Cluster]) -> None:
    primary, standby = pair
    with primary.connect() as connection:
        connection.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
        found = diagnose(primary, standby)
        assert failover(found) == [
            ("servers", "ok", "a standby"),
            ("slot", "warning", "slot 's' has not the property failover"),
            ("standbys", "warning", "sync_replication_slots is off"),
            ("standbys", "warning", "hot_standby_feedback is off"),
        ]
        # The primary alone shows that there is a standby, too, and not how it is set up.
        assert failover(diagnose(primary)) == [("slot", "warning", "slot 's' has not the property failover")]

        assert "start it with --failover yes" in fix_of(found, "not the property failover")
        code, _, errors = run_cli("prepare", "-d", primary.dsn, "-S", "s", "--publication", "p", "--failover", "yes")
        assert code == 0, errors
        for message in ("sync_replication_slots", "hot_standby_feedback"):
            run(standby, fix_of(found, message))

        def is_copied() -> bool:
            # A copy lasts once the primary's slot has moved on.
            connection.execute("insert into t select coalesce(max(id), 0) + 1 from t")
            options = "'proto_version', '1', 'publication_names', 'p'"
            connection.execute(f"select count(*) from pg_logical_slot_get_binary_changes('s', null, null, {options})")
            return ("standbys", "ok", "it has a copy of slot 's'") in failover(diagnose(primary, standby))

        until(is_copied, "the copy of the slot")
        found = diagnose(primary, standby)
        assert [each for each in failover(found) if each[1] != "ok"] == [
            ("standby_slots", "warning", "synchronized_standby_slots is empty")
        ]
        run(primary, fix_of(found, "synchronized_standby_slots is empty"))
        until(lambda: all(level == "ok" for _, level, _ in failover(diagnose(primary, standby))), "nothing to be found")

        # From the standby itself the copy can't be streamed before it is promoted.
        [state] = [each for each in diagnose(standby) if each.check == "slot.state"]
        assert (state.level, state.message) == ("error", "slot 's' is a copy of the primary's")
        connection.execute("alter system set synchronized_standby_slots = 'standby', 'nobody'")
        connection.execute("select pg_reload_conf()")
        message = "synchronized_standby_slots names 'nobody', which is no slot of a standby"
        until(lambda: ("standby_slots", "error", message) in failover(diagnose(primary)), "the new setting")
        run(primary, fix_of(diagnose(primary), message))
        until(lambda: all(level == "ok" for _, level, _ in failover(diagnose(primary))), "the setting from before")

    primary.stop("immediate")
    standby.promote()
    found = diagnose(primary, standby)
    assert failover(found)[0][:2] == ("servers", "warning")
    assert "No such file" in failover(found)[0][2] or "refused" in failover(found)[0][2]
    assert [(each.level, each.message) for each in found if each.check == "slot.state"] == [("ok", "slot 's' is there, and free")]


def test_streaming_from_a_standby(pair: tuple[postgres.Cluster, postgres.Cluster]) -> None:
    _, standby = pair
    found = diagnose(standby, create=True)
    assert ("source", "warning", "the connection leads to a standby, where hot_standby_feedback is off") in failover(found)
    run(standby, fix_of(found, "hot_standby_feedback is off"))
    message = "the connection leads to a standby; on an idle primary run SELECT pg_log_standby_snapshot() while the slot is made"
    until(lambda: ("source", "ok", message) in failover(diagnose(standby, create=True)), "the new setting")
    assert [each for each in diagnose(standby, create=True) if each.level == "error"] == []


def test_a_standby_of_15_does_not_decode() -> None:
    need("15")
    with postgres.Cluster("15") as primary, postgres.Cluster("15", standby_of=primary) as standby:
        [source] = [each for each in diagnose(standby, create=True) if each.check == "failover.source"]
        assert (source.level, source.why) == ("error", "standbys older than 16 do not decode")
        # With both named, and the fix, the connection leads to the primary.
        parameters = {
            "host": f"{standby.directory},{primary.directory}",
            "port": f"{standby.port},{primary.port}",
            "target_session_attrs": "read-write",
        }
        given = connection_parameters([*parameters.items(), ("user", "postgres"), ("dbname", "postgres")])
        found = failover(doctor(given, Asked("s", create=True)).findings)
        assert [(check, level) for check, level, _ in found] == [("servers", "ok"), ("slot", "warning")]
