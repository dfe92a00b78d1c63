"""``--failover``: which slots a primary's standbys may copy."""

import json
from pathlib import Path

import postgres

from support.cli_process import run_cli, run_spark_cli
from support.published_database import PublishedDatabase
from support.waiting import until


def has_failover(on: PublishedDatabase, slot: str) -> bool:
    return bool(on.value("select failover from pg_replication_slots where slot_name = %s", slot))


def test_a_new_slot_gets_it_unless_told_otherwise(on18: PublishedDatabase) -> None:
    end = str(on18.value("select pg_current_wal_lsn()"))
    stream = ("-A", "--endpos", end)
    export = ("prepare", "--export-snapshot")
    for number, (command, options, expected) in enumerate(
        [((), stream, True), ((), ("--failover", "no", *stream), False), (export, (), True), (export, ("--failover", "no"), False)]
    ):
        slot = f"{on18.slot}_{number}"
        code, out, err = run_cli(*command, "-d", on18.database.dsn, "-S", slot, "--publication", "p", "-c", *options)
        assert code == 0, err
        assert has_failover(on18, slot) == expected
        if command:
            assert json.loads(out)["slot"]["failover"] == expected


def test_an_existing_slot_gets_it_when_asked_for(on18: PublishedDatabase) -> None:
    end = str(on18.value("select pg_current_wal_lsn()"))
    code, _, err = on18.run("-v", "-c", "-A", "--endpos", end)
    assert code == 0
    assert "--failover yes lets them" in err
    on18.released()
    assert not has_failover(on18, on18.slot)
    for _ in range(2):
        code, _, err = on18.run("-v", "--failover", "yes", "-A", "--endpos", end)
        assert code == 0, err
        assert "lets them" not in err
        on18.released()
        assert has_failover(on18, on18.slot)
    code, _, err = on18.run("--failover", "no", "-A", "--endpos", end)
    assert code == 0
    assert "--failover no has no effect" in err
    assert has_failover(on18, on18.slot)


def test_a_slot_in_use_stays_as_it_is(on18: PublishedDatabase) -> None:
    asking = ("prepare", "-d", on18.database.dsn, "-S", on18.slot, "--publication", "p", "--in-use", "--failover", "yes")
    with on18.cli() as cli:
        until(on18.is_active)
        code, out, _ = run_cli(*asking)
        assert (code, json.loads(out)["slot"]["failover"]) == (0, False)
        assert cli.quit() == 0
    on18.released()
    code, out, _ = run_cli(*asking)
    assert (code, json.loads(out)["slot"]["failover"]) == (0, True)


def test_a_server_without_it_is_named(on15: PublishedDatabase) -> None:
    for slot in (on15.slot, f"new_{on15.slot}"):
        asking = ("prepare", "-d", on15.database.dsn, "-S", slot, "--publication", "p", "-c", "--failover")
        code, _, err = run_cli(*asking, "yes")
        assert code == 2
        assert "PostgreSQL 15: its slots have no property failover" in err
        assert run_cli(*asking, "no")[0] == 0


def test_a_standby_has_a_copy_after_its_promotion(pg18: postgres.Cluster) -> None:
    """The copy of a slot that ``-c`` has made goes on where the consumer was."""
    del pg18  # it skips the test where there is no 18
    primary_settings = {"synchronized_standby_slots": "standby"}
    standby_settings = {"sync_replication_slots": "on", "hot_standby_feedback": "on"}
    with postgres.Cluster("18", settings=primary_settings) as primary, primary.connect() as connection:
        connection.execute("create table t(id int primary key); create publication p for table t")
        with postgres.Cluster("18", settings=standby_settings, standby_of=primary) as standby:
            on_standby = standby.connect()
            info = str(on_standby.execute("show primary_conninfo").fetchone()[0])
            on_standby.execute(f"alter system set primary_conninfo = '{info.replace(chr(39), chr(39) * 2)} dbname=postgres'")
            on_standby.execute("select pg_reload_conf()")
            stream = ("-S", "s", "--publication", "p", "-J", "-N", "-A", "--endpos")
            connection.execute("insert into t values (0)")
            now = "select pg_current_wal_insert_lsn()::text"
            code, _, err = run_cli("-d", primary.dsn, *stream, connection.execute(now).fetchone()[0], "-c")
            assert code == 0, err

            def is_copied() -> bool:
                connection.execute("insert into t select coalesce(max(id), 0) + 1 from t")  # an idle primary's slot is not copied
                run_cli("-d", primary.dsn, *stream, connection.execute(now).fetchone()[0])
                found = on_standby.execute("select synced and not temporary from pg_replication_slots").fetchone()
                return found == (True,)

            until(is_copied, "the copy of the slot")
            connection.execute("insert into t values (-1)")
            sent = connection.execute("select pg_current_wal_lsn()").fetchone()
            until(
                lambda: on_standby.execute("select pg_last_wal_replay_lsn() >= %s::pg_lsn", sent).fetchone() == (True,),
                "the last transaction on the standby",
            )
            on_standby.close()
            standby.promote()
            with standby.connect() as promoted:
                end = promoted.execute(now).fetchone()[0]
            code, out, err = run_cli("-d", standby.dsn, *stream, end)
            assert code == 0, err
            assert b'"value":-1' in out


def test_land_passes_it_on(on18: PublishedDatabase, tmp_path: Path) -> None:
    slot = f"{on18.slot}_landed"
    arguments = ("land", "-d", on18.database.dsn, "-S", slot, "--publication", "p", "--staging", str(tmp_path), "--available-now")
    for more, expected in ((("-c", "--failover", "no"), False), (("-c",), False), (("--failover", "yes"), True)):
        done = run_spark_cli(*arguments, *more)
        assert done.returncode == 0, done.stderr
        assert has_failover(on18, slot) == expected
