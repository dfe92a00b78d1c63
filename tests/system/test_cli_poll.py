"""Poll mode and standby mode: which process has the slot, and when another one takes it over."""

import signal
import subprocess
import sys

import pytest

from cdcpipe.lsn import LSN
from support.cli_process import CLI, run_cli
from support.published_database import PublishedDatabase, insert
from support.waiting import until


def test_poll_mode(on: PublishedDatabase) -> None:
    base = ["-d", on.database.dsn, "-S", on.slot, "-L"]
    assert run_cli(*base)[:2] == (0, b"")
    assert run_cli("-d", on.database.dsn, "-S", "nope", "-L")[0] == 8
    assert run_cli("-d", on.database.dsn, "-S", "nope", "-L", "-u", "0")[0] == 8
    with on.cli() as active:
        until(on.is_active)
        assert run_cli(*base, "-u", "0")[0] == 9
        assert run_cli(*base, "-u", "0.5", "-i", "0.1")[0] == 9
        waiting = CLI(*base, "-i", "0.05", header=False)
        with waiting:
            assert active.quit() == 0
            assert waiting.wait() == 0


def test_poll_mode_needs_no_replication_role(on18: PublishedDatabase) -> None:
    on18.sql("create role poller login")
    try:
        assert run_cli("-d", on18.database.dsn, "-U", "poller", "-S", on18.slot, "-L")[0] == 0
    finally:
        on18.sql("drop role poller")


def test_poll_mode_refuses_a_slot_that_no_stream_can_use(on18: PublishedDatabase) -> None:
    """It would wait for ever, or say that a stream can start."""
    name = f"physical_{on18.database.name}"
    on18.connection.execute("select pg_create_physical_replication_slot(%s)", [name])
    try:
        code, _, err = run_cli("-d", on18.database.dsn, "-S", name, "-L")
        assert (code, "is a physical slot" in err) == (2, True)
    finally:
        on18.connection.execute("select pg_drop_replication_slot(%s)", [name])
    code, _, err = run_cli("-d", f"{on18.database.dsn} dbname=postgres", "-S", on18.slot, "-L")
    assert (code, f"connect to it: -d {on18.database.name}" in err) == (2, True)


def test_standby_takes_over(on: PublishedDatabase) -> None:
    """The active process is killed. One of two standbys continues from its position. The other one still waits."""
    insert(on, 1, 2)
    with on.cli() as active:
        end, _ = active.transactions(1)[0]
        active.say(f"F {end}\n")
        until(lambda: on.confirmed() == end)
        with on.cli("--standby", "-v") as one, on.cli("--standby", "-v") as two:
            until(lambda: "waiting" in one.stderr and "waiting" in two.stderr)
            active.process.kill()
            winner = until(lambda: next((cli for cli in (one, two) if "streaming" in cli.stderr), None))
            loser = two if winner is one else one
            assert winner.transactions(1)[0][1] == [b"2"]
            assert loser.process.poll() is None
            assert winner.quit() == 0
            until(lambda: "streaming" in loser.stderr)
            assert loser.quit() == 0


def test_standby_takes_over_although_its_idle_connection_was_ended(on: PublishedDatabase) -> None:
    """A proxy ends one that is idle for long, and nobody looks at it during the wait."""
    idle = (
        "from pg_stat_activity where backend_type = 'walsender' and datname = current_database()"
        " and pid not in (select active_pid from pg_replication_slots where active)"
    )
    with on.cli() as active:
        until(on.is_active)
        with on.cli("--standby", "-v") as standby:
            until(lambda: "waiting" in standby.stderr)
            assert on.value(f"select count(pg_terminate_backend(pid)) {idle}") == 1
            until(lambda: on.value(f"select count(*) {idle}") == 0)
            assert active.quit() == 0
            until(lambda: "streaming" in standby.stderr)
            assert "was lost during the wait" in standby.stderr
            insert(on, 1)
            assert standby.transactions(1)[0][1] == [b"1"]
            assert standby.quit() == 0


def test_standby_honours_the_poll_duration(on18: PublishedDatabase) -> None:
    with on18.cli():
        until(on18.is_active)
        with on18.cli("--standby", "-u", "0.3") as standby:
            assert standby.wait() == 9
        with on18.cli("--standby", "-v") as standby:
            until(lambda: "waiting" in standby.stderr)
            standby.signal(signal.SIGTERM)
            assert standby.wait() == 0


def test_a_stopped_consumer_holds_the_slot_until_the_servers_timeout(on18: PublishedDatabase) -> None:
    with on18.cli("-m", "options=-c wal_sender_timeout=3s") as active:
        until(on18.is_active)
        # It waits before the consumer stops: a busy machine may need longer to start it than the server's timeout.
        with on18.cli("-L", "-v", "-i", "0.1", publication="", header=False) as poller:
            until(lambda: "waiting" in poller.stderr)
            active.signal(signal.SIGSTOP)
            try:
                assert on18.is_active()
                assert poller.process.poll() is None
                assert poller.wait() == 0
            finally:
                active.signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "pgoutput needs a publication"),
        (("-P", "test_decoding", "--publication", "p"), "would get the plugin test_decoding, which knows no publications"),
        (("-P", "test_decoding", "--whole-transactions"), "would get the plugin test_decoding"),
    ],
)
def test_poll_mode_makes_no_slot_from_which_the_stream_could_not_start(
    on15: PublishedDatabase, options: tuple[str, ...], said: str
) -> None:
    name = f"new_{on15.database.name}"
    code, _, err = run_cli("-d", on15.database.dsn, "-S", name, "-L", "-c", *options)
    assert code == 2
    assert said in err
    assert on15.value("select count(*) from pg_replication_slots where slot_name = %s", name) == 0


def test_poll_mode_makes_the_slot_and_the_publication_of_the_stream(on15: PublishedDatabase) -> None:
    """The publication may be named as pg_logical_cdc's scripts name it."""
    name = f"new_{on15.database.name}"
    try:
        code, _, err = run_cli("-d", on15.database.dsn, "-S", name, "-L", "-c", "-o", f"publication_names={name}")
        assert code == 0, err
        assert on15.value("select count(*) from pg_publication where pubname = %s", name) == 1
        assert on15.value("select plugin from pg_replication_slots where slot_name = %s", name) == "pgoutput"
    finally:
        on15.sql(f"select pg_drop_replication_slot('{name}')")


def test_a_standby_without_stdin_ends_at_once(on18: PublishedDatabase) -> None:
    """Not when it takes over: then nobody would be left. The slot is in use meanwhile, so that waiting would not end."""
    with on18.cli() as active:
        until(on18.is_active)
        arguments = ["-d", on18.database.dsn, "-S", on18.slot, "--publication", "p", "-H", "--standby"]
        for stdin in subprocess.DEVNULL, subprocess.PIPE:
            waiting = subprocess.Popen([sys.executable, "-m", "cli", *arguments], stdin=stdin, stderr=subprocess.PIPE)
            _, err = waiting.communicate(timeout=60)  # closes the pipe
            assert waiting.returncode == 4
            assert b"stdin was closed" in err
        assert active.quit() == 0


def test_a_waiting_standby_reads_its_commands(on18: PublishedDatabase) -> None:
    """The slot is in use meanwhile. Feedback confirms nothing, and more of it than a pipe holds does not block its sender."""
    with on18.cli() as active:
        until(on18.is_active)
        for ending, code in (("q\n", 0), ("nonsense\n", 6), ("", 4)):
            with on18.cli("--standby", "-v", "-i", "3600") as standby:
                until(lambda standby=standby: "waiting" in standby.stderr)
                standby.say("F FF/0\n" * 20_000 + ending)
                if not ending:
                    standby.close_stdin()
                assert standby.wait() == code, standby.stderr
        assert on18.confirmed() < LSN.parse("FF/0")
        assert active.quit() == 0
