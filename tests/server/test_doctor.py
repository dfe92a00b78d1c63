"""The doctor on real servers that have the problems that it finds. The tests also run its proposed SQL, and the problem is gone.

tests/unit/doctor has the cases of each check without a server.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from typing import Any

import postgres
import psycopg
import pytest

from cdcpipe.ddl import script
from cdcpipe.doctor import survey
from cdcpipe.doctor.facts import Asked
from cdcpipe.doctor.findings import Finding
from cdcpipe.libpq.parameters import connection_parameters
from cdcpipe.publishing import NewPublication, with_companions
from cdcpipe.replication.server import existing_roles
from cdcpipe.replication.session import connected
from cdcpipe.sql import SERVICE_ROLES
from cdcpipe.subcommands.doctor import CHECKS, doctor
from support.cli_process import CLI, run_cli
from support.requirements import need
from support.waiting import until

SLOT = "select pg_create_logical_replication_slot('s', 'pgoutput')"
EXPECTED_WARNINGS = {"server.wal_limit"}  # unlimited, which is PostgreSQL's default


def diagnose(
    database: postgres.Database, slot: str = "s", *, user: str | None = None, quick: bool = False, **asked: Any
) -> list[Finding]:
    """Return the doctor's findings. The publication is ``p`` unless others are given."""
    parameters = connection_parameters([("dbname", database.dsn), *([("user", user)] if user else [])])
    return doctor(parameters, Asked(slot, **{"publications": ("p",)} | asked), quick=quick).findings


def of(findings: list[Finding], check: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == check]


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok" and finding.check not in EXPECTED_WARNINGS]


def run_fix(connection: psycopg.Connection[Any], finding: Finding) -> None:
    """Run the SQL that a finding proposes. If it offers a choice, run the first one."""
    assert finding.fix
    sql = finding.fix.partition("; or ")[0].partition(", or ")[0].partition(", on the standby")[0].partition(", in database ")[0]
    for statement in sql.split("; "):
        connection.execute(statement)


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the WAL rate for a short time only: few of these tests need it."""
    monkeypatch.setattr(survey, "_WATCHED_S", 0.0)


@pytest.fixture
def role(pg18: postgres.Cluster) -> Iterator[str]:
    """Make a role that may log in, and has no other privilege."""
    name = f"doctor_{uuid.uuid4().hex[:8]}"
    with pg18.connect() as connection:
        connection.execute(f"create role {name} login")
        yield name
        connection.execute(f"drop role {name}")


# --- all is well ---


def test_nothing_is_found_where_nothing_is_wrong(any_pg: postgres.Cluster) -> None:
    with any_pg.database() as database, database.connect() as connection:
        connection.execute("create table t (id int primary key, v text); create table u (id int primary key)")
        connection.execute("create publication p for all tables")
        connection.execute(SLOT)
        for asked in ({}, {"slot": "new", "publications": ("new",), "create": True, "copy": True}):
            found = diagnose(database, **asked)
            assert bad(found) == []
            assert {finding.check for finding in found} - {"server.connection"} <= CHECKS.keys()
            [tables] = of(found, "tables.published")
            assert tables.message.startswith("2 tables")


def test_the_doctor_does_not_wait_for_a_locked_table(any_pg: postgres.Cluster) -> None:
    with any_pg.database() as database, database.connect() as connection, database.connect() as holder:
        connection.execute("create table t (id int primary key, v text, r int) partition by list (id)")
        connection.execute("create table t1 partition of t for values in (1); create table u (id int primary key, v text)")
        what = "t, u where (id > 1)" if any_pg.version_num >= 150000 else "t, u"
        connection.execute(f"create publication p for table {what} with (publish_via_partition_root)")
        with holder.transaction():
            holder.execute("lock table t, t1, u in access exclusive mode")
            # Twice: for publications that are there, and for one that would be made.
            assert not of(diagnose(database), "server.connection")[0].fix
            assert of(diagnose(database, publications=("new",), create=True), "tables.keys")[0].level == "ok"


def test_ddl_capture_in_part(any_pg: postgres.Cluster) -> None:
    with any_pg.database() as database, database.connect() as connection:
        connection.execute("create publication p for all tables")
        assert of(diagnose(database), "server.ddl_capture") == []
        connection.execute(script.install("cdcpipe", script.Settings()))
        assert of(diagnose(database), "server.ddl_capture")[0].level == "ok"
        connection.execute(script.install("cdcpipe", script.Settings(version=2)))
        assert "version 2 of DDL capture is installed" in of(diagnose(database, quick=True), "server.ddl_capture")[0].message
        if any_pg.version_num >= 170000:
            connection.execute(f'alter database "{database.name}" set event_triggers = off')
            assert "event_triggers is off" in of(diagnose(database), "server.ddl_capture")[0].message
            connection.execute(f'alter database "{database.name}" reset event_triggers')
        connection.execute("alter event trigger cdcpipe_sql_drop disable")
        assert "cdcpipe_sql_drop" in of(diagnose(database), "server.ddl_capture")[0].message


# --- tables ---

NO_KEY = "create table t (id int, v int)"
KEY = "create table t (id int primary key, v int)"
REFUSED = [
    ("tables.identity", 14, f"{NO_KEY}; create publication p for table t", "it has no primary key"),
    ("tables.identity", 14, f"{KEY}; alter table t replica identity nothing; create publication p for table t", "NOTHING"),
    (
        "tables.identity",
        14,
        "create table t (id int primary key deferrable, v int); create publication p for table t",
        "a deferrable primary key alone",
    ),
    (
        "tables.identity",
        14,
        (
            "create table t (id int not null, v int); create unique index i on t (id);"
            "alter table t replica identity using index i; drop index i; create publication p for table t"
        ),
        "index as replica identity that is gone",
    ),
    (
        "tables.identity",
        14,
        (
            "create table t (id int, v int) partition by list (id); create table t1 partition of t for values in (1);"
            "create table t2 partition of t (primary key (id)) for values in (2);"
            "create publication p for table t with (publish_via_partition_root)"
        ),
        "a partition has no primary key",
    ),
    ("tables.restrictions", 15, f"{KEY}; create publication p for table t where (v > 1)", "filters its rows by v"),
    ("tables.restrictions", 15, f"{KEY}; create publication p for table t (v)", "leaves out id"),
    (
        "tables.restrictions",
        18,
        (
            "create table t (id int, v int, g int generated always as (id) stored, primary key (id, g));"
            "create publication p for table t (id, v)"
        ),
        "leaves out g",
    ),
    (
        "tables.restrictions",
        15,
        f"{KEY}; alter table t replica identity full; create publication p for table t (id)",
        "leaves out some columns",
    ),
    (
        "tables.restrictions",
        15,
        (
            "create table t (id int primary key, v int) partition by list (id); create table t1 partition of t for values in (1);"
            "create publication p for table t where (v > 1) with (publish_via_partition_root)"
        ),
        "filters its rows by v",
    ),
    (
        "tables.generated",
        18,
        (
            "create table t (id int, v int, g int generated always as (id) stored); alter table t replica identity full;"
            "create publication p for table t"
        ),
        "generated column g",
    ),
    (
        "tables.generated",
        18,
        "create table t (v int, id int, g int generated always as (id) stored primary key); create publication p for table t",
        "generated column g",
    ),
    (
        "tables.generated",
        18,
        (
            "create table t (id int primary key, v int, g int generated always as (v), h int generated always as (v) stored);"
            "alter table t replica identity full; create publication p for table t with (publish_generated_columns = stored)"
        ),
        "generated column g, which",
    ),
    (
        "tables.generated",
        18,
        (
            "create table t (id int, v int, g int generated always as (v), primary key (id)) partition by list (id);"
            "create table t1 partition of t for values in (1); alter table t1 replica identity full; alter table t replica identity"
            " full; create publication p for table t with (publish_via_partition_root)"
        ),
        "generated column g, which",
    ),
]


@pytest.mark.parametrize(("check", "since", "setup", "message"), REFUSED)
def test_commands_that_the_server_refuses(request: pytest.FixtureRequest, check: str, since: int, setup: str, message: str) -> None:
    """The application's UPDATE fails as the finding says. The proposed SQL mends it. Then there is no finding."""
    for cluster in [request.getfixturevalue(f"pg{version}") for version in ("14", "15", "18") if int(version) >= since]:
        with cluster.database() as database, database.connect() as connection:
            connection.execute("create table other (id int primary key)")
            connection.execute(setup)
            connection.execute("insert into t (id, v) values (1, 1)")
            connection.execute(SLOT)
            found = bad(diagnose(database))
            errors = [finding for finding in found if finding.level == "error"]
            assert {(finding.check, finding.subject) for finding in errors} == {(check, "public.t")}, found
            assert message in errors[0].message
            with pytest.raises(psycopg.Error, match="cannot update table"):
                connection.execute("update t set v = 2")
            for finding in errors:
                run_fix(connection, finding)
            connection.execute("update t set v = 2")
            assert not [finding for finding in diagnose(database) if finding.level == "error"]


def test_no_false_alarm_of_lists_and_filters(pg18: postgres.Cluster) -> None:
    with pg18.database() as database, database.connect() as connection:
        connection.execute(f"{KEY}; create table full_t (id int, v int); alter table full_t replica identity full")
        connection.execute("create publication p for table t (id, v) where (id > 1 and t.id <> 7), full_t where (v = 1)")
        connection.execute("create publication q for table t (id) where (v > 1) with (publish = 'insert')")
        connection.execute(SLOT)
        connection.execute("update t set v = 2; update full_t set v = 3")
        assert [finding.check for finding in bad(diagnose(database))] == ["tables.keys"]  # of full_t
        both = bad(diagnose(database, publications=("p", "q")))
        assert {finding.check for finding in both} == {"tables.keys", "tables.column_lists", "publications.operations"}


def test_publications_with_different_columns_end_the_stream(pg18: postgres.Cluster) -> None:
    with pg18.database() as database, database.connect() as connection:
        connection.execute(f"{KEY}; create publication p for table t (id); create publication q for table t")
        connection.execute(SLOT)
        [found] = of(diagnose(database, publications=("p", "q")), "tables.column_lists")
        assert (found.level, found.subject) == ("error", "public.t")
        with CLI("-d", database.dsn, "-S", "s", "--publication", "p", "--publication", "q") as cli:
            connection.execute("insert into t values (1, 1)")
            assert cli.wait() == 5
            assert "different column lists" in cli.stderr


def test_keys_and_partitions_of_tables_that_work(pg18: postgres.Cluster) -> None:
    """The server accepts changes of these tables, but they would have no replica, or a wrong one."""
    with pg18.database() as database, database.connect() as connection:
        connection.execute(
            "create table keyless (v int); alter table keyless replica identity full;"
            "create table deferred (id int primary key deferrable); alter table deferred replica identity full;"
            "create table root (id int primary key, v int not null) partition by list (id);"
            "create table leaf partition of root for values in (1); create unique index i on leaf (v);"
            "alter table leaf replica identity using index i;"
            "create table by_index (a int not null unique); alter table by_index replica identity using index by_index_a_key;"
            "create publication p for table keyless, deferred, root, by_index with (publish_via_partition_root)"
        )
        connection.execute(SLOT)
        found = {(finding.check, finding.subject): finding for finding in bad(diagnose(database))}
        assert found.keys() == {
            ("tables.keys", "public.keyless"),
            ("tables.keys", "public.deferred"),
            ("tables.partitions", "public.root"),
        }
        run_fix(connection, found["tables.partitions", "public.root"])
        assert not of(diagnose(database), "tables.partitions")


def test_tables_that_never_come(pg18: postgres.Cluster) -> None:
    with pg18.database() as database, database.connect() as connection:
        connection.execute(
            "create unlogged table u (id int primary key); create temporary table temporary (id int); create view v as select 1;"
            "create foreign data wrapper w; create server far foreign data wrapper w; create foreign table f (id int) server far;"
            "create table root (id int primary key) partition by list (id);"
            "create unlogged table leaf partition of root for values in (1);"
            "create publication p for all tables; create publication q for table root"
        )
        connection.execute(SLOT)
        found = of(diagnose(database), "tables.left_out")
        assert [(finding.subject, finding.message) for finding in found] == [
            ("public.f", "it is a foreign table"),
            ("public.leaf", "it is unlogged"),
            ("public.u", "it is unlogged"),
        ]
        [of_root] = of(diagnose(database, publications=("q",)), "tables.left_out")
        assert of_root.message == "it is unlogged, and a partition of public.root"
        [new] = of(
            diagnose(database, publications=("r",), new=NewPublication.of(tables=["public.root"]), create=True), "tables.left_out"
        )
        assert new == of_root
        for finding in found[1:]:
            run_fix(connection, finding)
        assert [finding.subject for finding in of(diagnose(database), "tables.left_out")] == ["public.f"]
        # Named for a new publication, they make it fail.
        asked = {
            "publications": ("r",),
            "create": True,
            "new": NewPublication.of(tables=("public.f", "public.v", "no.such", "public.u")),
        }
        [named] = [finding for finding in of(diagnose(database, **asked), "publications.there") if finding.level == "error"]
        assert named.message == (
            "--table public.f matches no table that it can publish: public.f is a foreign table;"
            " --table public.v matches no table that it can publish: public.v is a view; --table no.such matches no table"
        )


def test_publications_in_part_and_of_schemas(pg15: postgres.Cluster) -> None:
    with pg15.database() as database, database.connect() as connection:
        connection.execute(
            "create schema s; create table s.t (id int primary key); create unlogged table s.u (id int);"
            "create unlogged table u ();"
            "create publication p for tables in schema s with (publish = 'insert, update')"
        )
        connection.execute(SLOT)
        found = bad(diagnose(database))
        assert [(finding.check, finding.subject) for finding in found] == [
            ("publications.operations", None),
            ("tables.left_out", "s.u"),
        ]
        run_fix(connection, found[0])
        assert [finding.check for finding in bad(diagnose(database))] == ["tables.left_out"]


def test_types_without_a_binary_form(pg18: postgres.Cluster) -> None:
    with pg18.database() as database, database.connect() as connection:
        connection.execute("create table t (id int primary key, c aclitem[]); create publication p for table t")
        [found] = of(diagnose(database), "tables.binary")
        assert (found.subject, found.message) == ("public.t", "column 'c' has values of type aclitem, which has no binary form")


# --- privileges ---


def test_privileges(pg18: postgres.Cluster, role: str) -> None:
    """A role gets one privilege after the other. Each time it runs the SQL of the finding that asks for the privilege."""
    with pg18.database() as database, database.connect() as connection:
        connection.execute(
            "create schema s; create table s.t (id int primary key, secret text); alter table s.t enable row level security"
        )
        connection.execute("create publication p for table s.t")
        connection.execute(SLOT)
        found = bad(diagnose(database, user=role, copy=True))
        assert [(finding.check, finding.level) for finding in found] == [
            ("server.replication", "error"),
            ("tables.readable", "error"),
            ("tables.row_security", "error"),
        ]
        assert {finding.level for finding in bad(diagnose(database, user=role))} == {"error", "warning"}
        for finding in found:
            run_fix(connection, finding)
        assert bad(diagnose(database, user=role, copy=True)) == []
        connection.execute(f"revoke all on all tables in schema s from {role}; grant select (id) on s.t to {role}")
        assert [finding.check for finding in bad(diagnose(database, user=role))] == ["tables.readable"]
        connection.execute("alter publication p set table s.t (id)")
        assert bad(diagnose(database, user=role)) == []
        connection.execute(f"drop owned by {role}")


def test_a_managed_service_is_known_by_its_roles(pg18: postgres.Cluster) -> None:
    with pg18.database() as database, connected(connection_parameters([("dbname", database.dsn)])) as connection:
        assert existing_roles(connection, SERVICE_ROLES) == ()
        connection.execute("BEGIN")  # nobody else sees the roles
        connection.execute("CREATE ROLE rds_superuser")
        connection.execute("CREATE ROLE supabase_admin")
        assert existing_roles(connection, SERVICE_ROLES) == ("rds_superuser", "supabase_admin")
        connection.execute("ROLLBACK")


def test_who_may_make_a_publication(pg18: postgres.Cluster, role: str) -> None:
    with pg18.database() as database, database.connect() as connection:
        connection.execute(
            f"create table t (id int primary key); create table mine (id int primary key); alter table mine owner to {role}"
        )
        connection.execute(f'alter role {role} replication; grant create on database "{database.name}" to {role}')

        def found(*tables: str) -> Finding:
            asked = NewPublication.of(tables=[f"public.{table}" for table in tables])
            return of(diagnose(database, user=role, new=asked, create=True), "publications.there")[0]

        assert (found().level, found("t").level, found("mine").level) == ("error", "error", "ok")
        sql = found("t").fix
        assert sql
        connection.execute(sql.removeprefix("let an administrator run "))
        assert found("t").message == "publication 'p' is there"


def test_a_member_of_rds_replication_may_stream(pg18: postgres.Cluster, role: str) -> None:
    """The doctor said that only a member may, when the connection for replication of one broke."""
    with pg18.database() as database, connected(connection_parameters([("dbname", database.dsn)])) as connection:

        def can_replicate() -> bool:
            connection.execute(f"SET ROLE {role}")
            try:
                return survey._role(connection).can_replicate
            finally:
                connection.execute("RESET ROLE")

        connection.execute("BEGIN")  # nobody else sees the role
        connection.execute("CREATE ROLE rds_replication")
        assert not can_replicate()
        connection.execute(f"GRANT rds_replication TO {role}")
        assert can_replicate()
        connection.execute("ROLLBACK")
        connection.execute(f"drop owned by {role}")


def test_a_user_who_sees_little(pg18: postgres.Cluster, role: str) -> None:
    with pg18.database() as database, database.connect() as connection, database.connect() as writer:
        connection.execute(f"create table t (id int primary key); alter role {role} replication")
        with writer.transaction():
            writer.execute("insert into t values (1)")
            [found] = of(diagnose(database, user=role, publications=(), create=True), "server.transactions")
            assert (found.level, found.message[:22]) == ("warning", "1 transaction of other")
            run_fix(connection, Finding(found.level, found.check, None, "", "", (found.fix or "").removeprefix("to see it: ")))
            [found] = of(diagnose(database, user=role, publications=(), create=True), "server.transactions")
            assert found.level == "ok"


# --- transactions and slots ---


def test_a_prepared_transaction_holds_back_a_new_slot(pg18: postgres.Cluster) -> None:
    with pg18.database() as database, database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        connection.execute("begin; insert into t values (1); savepoint a; insert into t values (2); prepare transaction 'it''s'")
        [found] = of(diagnose(database, create=True), "server.transactions")
        assert (found.level, f'prepared transaction "it\'s" in database {database.name}' in found.message) == ("error", True)
        code, _, stderr = run_cli("prepare", "-d", database.dsn, "-S", "s", "--publication", "p", "-c", "--create-timeout", "0.5")
        assert code == 2
        assert "waits for running transactions" in stderr
        assert "pg_prepared_xacts" in stderr
        run_fix(connection, found)
        assert of(diagnose(database, create=True), "server.transactions")[0].level == "ok"


def test_the_states_of_a_slot(pg15: postgres.Cluster) -> None:
    with pg15.database() as database, pg15.database() as other, database.connect() as connection, other.connect() as elsewhere:

        def state(name: str, **asked: Any) -> tuple[str, str]:
            [found] = of(diagnose(database, name, **asked), "slot.state")
            return found.level, found.message

        connection.execute("create table t (id int primary key); create publication p for table t")
        for name, plugin, where in (("doctor_wj", "test_decoding", connection), ("doctor_far", "pgoutput", elsewhere)):
            where.execute(f"select pg_create_logical_replication_slot('{name}', '{plugin}')")
        connection.execute("select pg_create_physical_replication_slot('doctor_phys')")
        try:
            assert state("doctor_none") == ("error", "slot 'doctor_none' is not there")
            assert state("doctor_none", create=True)[0] == "ok"
            assert state("doctor_far") == ("error", f"slot 'doctor_far' belongs to database '{other.name}'")
            assert state("doctor_phys") == ("error", "slot 'doctor_phys' is a physical slot")
            assert state("doctor_wj") == ("error", "slot 'doctor_wj' has the plugin test_decoding")
            assert state("doctor_wj", publications=(), plugin="wal2json")[0] == "ok"
            with CLI("-d", database.dsn, "-S", "doctor_own", "--publication", "p", "-c") as cli:
                connection.execute("select 1")
                until(lambda: "in use" in state("doctor_own")[1], "the slot in use")
                assert cli.quit() == 0
        finally:
            connection.execute("select pg_drop_replication_slot('doctor_phys')")


def test_a_server_that_is_not_configured() -> None:
    """All settings that need a restart. After each proposed setting is applied, there is no finding."""
    need("18")
    settings = {"wal_level": "replica", "max_replication_slots": "1", "max_wal_senders": "1", "idle_replication_slot_timeout": "1h"}
    with postgres.Cluster("18", settings=settings) as cluster, cluster.connect() as connection:
        database = postgres.Database(cluster, "postgres")
        connection.execute("create table t (id int primary key); alter role postgres set wal_sender_timeout = '2s'")
        connection.execute("select pg_create_physical_replication_slot('only')")
        found = bad(diagnose(database, create=True))
        assert [(finding.check, finding.level) for finding in found] == [
            ("server.wal_level", "error"),
            ("server.slots_left", "error"),
            ("server.walsenders_left", "warning"),
            ("server.walsender_timeout", "warning"),
            ("server.idle_slots", "warning"),
        ]
        for finding in [*found, *of(diagnose(database), "server.wal_limit")]:
            sql = (finding.fix or "").partition("; then restart")[0].partition(", or drop one")[0]
            for statement in sql.split("; "):
                connection.execute(statement)

        connection.close()
        cluster.restart()
        database = postgres.Database(cluster, "postgres")
        with cluster.connect() as again:
            again.execute("select pg_drop_replication_slot('only')")
        after = diagnose(database, create=True)
        assert [finding for finding in after if finding.level != "ok"] == []
        [limit] = of(after, "server.wal_limit")
        assert limit.message.startswith("max_slot_wal_keep_size is 10.0 GiB")


@pytest.mark.parametrize(("version", "reason"), [("16", ""), ("18", " (wal_removed)")])
def test_a_slot_that_is_about_to_be_lost_and_then_is(version: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need(version)
    monkeypatch.setattr(survey, "_AVERAGE_AFTER_S", 0.0)
    settings = {"max_slot_wal_keep_size": "32MB", "min_wal_size": "32MB", "max_wal_size": "64MB", "checkpoint_timeout": "1h"}
    with postgres.Cluster(version, settings=settings) as cluster, cluster.connect() as connection:
        database = postgres.Database(cluster, "postgres")
        connection.execute("create table t (id int primary key); create publication p for table t")
        connection.execute(SLOT)

        def left() -> str:
            """Return what the doctor says of the WAL that the slot may still keep."""
            connection.execute("select pg_stat_force_next_flush()")  # the rate is of the server's statistics
            [wal] = of(diagnose(database), "slot.wal")
            return wal.message.partition("; it may be lost after ")[2]

        assert re.fullmatch(r"[\d.]+ MiB more, in [\d.]+ \w+", left())

        def write(megabytes: int) -> None:
            for _ in range(megabytes // 16):
                connection.execute("select pg_logical_emit_message(false, 'x', 'y'), pg_switch_wal()")

        write(48)
        [limit] = of(diagnose(database), "server.wal_limit")
        assert limit.message.startswith("max_slot_wal_keep_size is 32.0 MiB")
        [state] = of(diagnose(database), "slot.state")
        assert (state.level, state.message) == ("error", "slot 's' is beyond max_slot_wal_keep_size")
        assert left() == "0 B more, in 0 s"
        write(96)
        connection.execute("checkpoint")
        [state] = of(diagnose(database), "slot.state")
        assert (state.level, state.message) == ("error", f"slot 's' is lost{reason}")


def test_output_plugins(pg15: postgres.Cluster) -> None:
    """Servers since August 2026 have the list. Here a setting of the session stands for the server's setting."""
    with pg15.database() as database, database.connect() as connection:
        if connection.execute("select 1 from pg_settings where name = 'output_plugin_libraries'").fetchone() is None:
            pytest.skip("this PostgreSQL 15 is older than 15.19")
        parameters = connection_parameters([("dbname", database.dsn), ("options", "-c output_plugin_libraries=test_decoding")])
        found = of(doctor(parameters, Asked("s", create=True)).findings, "server.output_plugins")
        assert [finding.level for finding in found] == ["error"]
        # How a list is written in SQL: as one text it would be the name of one library.
        sql = (found[0].fix or "").partition("; ")[0].replace("ALTER SYSTEM SET", "SET")
        connection.execute(sql)
        assert connection.execute("show output_plugin_libraries").fetchone() == ("test_decoding, pgoutput",)
        assert of(diagnose(database, create=True), "server.output_plugins")[0].level == "ok"


def test_how_fast_the_server_writes(any_pg: postgres.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_AVERAGE_AFTER_S", 0.0)
    with any_pg.database() as database, database.connect() as connection:
        connection.execute("create table t (id int primary key, v text)")
        with connected(connection_parameters([("dbname", database.dsn)])) as looking:
            begun_at, server = time.monotonic(), survey.look(looking)
            connection.execute("insert into t select n, repeat('x', 1000) from generate_series(1, 3000) n")
            rate = survey._watch(looking, server, begun_at)
        assert rate.bytes_per_s * rate.seconds > 3 << 20
        assert rate.average is not None
        # 14's statistics come with a delay.
        assert rate.average > 0 or any_pg.version_num < 150000


def test_a_new_publication_with_tables_without_a_key(pg18: postgres.Cluster) -> None:
    """The doctor judges what -c would make with the same options, and -c makes it."""
    with pg18.database() as database, database.connect() as connection:
        connection.execute("create table keyed (id int primary key); create table plain (v text)")

        def found(keyless: str) -> list[Finding]:
            wanted = NewPublication.of(keyless=keyless)
            names = with_companions(("new",), wanted)
            return of(diagnose(database, publications=names, new=wanted, create=True), "tables.identity")

        assert [(each.level, each.subject) for each in found("refuse")] == [("error", "public.plain")]
        assert [(each.level, each.subject) for each in found("insert-only")] == [("ok", None)]
        [full] = found("full")
        assert (full.level, full.message) == ("ok", "-c sets REPLICA IDENTITY FULL on public.plain")
        # -c refuses what the doctor calls an error.
        connection.execute("create table log (v text, g text generated always as (v)); alter table log replica identity full")
        connection.execute("create table other (v text, g text generated always as (v))")
        for keyless, names in ("refuse", {"public.log"}), ("full", {"public.log", "public.other"}), ("insert-only", set()):
            wanted = NewPublication.of(keyless=keyless)
            said = diagnose(database, publications=with_companions(("new",), wanted), new=wanted, create=True)
            assert {each.subject for each in of(said, "tables.generated")} == names
        connection.execute("drop table log, other")
        wanted = NewPublication.of(tables=["public.*"], exclude_tables=["public.plain"])
        [tables] = of(diagnose(database, publications=("new",), new=wanted, create=True), "tables.published")
        assert tables.message.startswith("1 table is published")
