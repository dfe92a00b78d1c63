"""A slot that moved, or a server that went back: ``--expect-lsn`` refuses it, before anything is written or confirmed."""

import contextlib
from collections.abc import Callable

import pytest

from cdcpipe.errors import GapError, RewoundServerError
from cdcpipe.lsn import LSN, format_lsn
from support.cli_process import run_cli
from support.published_database import PublishedDatabase, insert
from support.waiting import until


def now(on: PublishedDatabase) -> str:
    return str(on.value("select pg_current_wal_insert_lsn()"))


def consume(on: PublishedDatabase, *ids: int) -> LSN:
    """Insert these rows, stream and confirm them. Return the position that the consumer notes with its data."""
    insert(on, *ids)
    with on.cli() as cli:
        end = cli.transactions(len(ids))[-1][0]
        cli.say(f"F {end}\nq\n")
        assert cli.wait() == 0, cli.stderr
    on.released()
    return on.confirmed()


def drop_and_make_again(on: PublishedDatabase) -> None:
    on.sql(f"select pg_drop_replication_slot('{on.slot}')")
    on.make_slot()


def advance(on: PublishedDatabase) -> None:
    on.sql(f"select pg_replication_slot_advance('{on.slot}', pg_current_wal_flush_lsn())")


def take_elsewhere(on: PublishedDatabase) -> None:
    taken = on.connection.execute(
        "select data from pg_logical_slot_get_binary_changes(%s, null, 1, 'proto_version', '1', 'publication_names', 'p')",
        [on.slot],
    ).fetchall()
    assert taken


def another_cdcpipe(on: PublishedDatabase) -> None:
    code, out, err = on.run("-H", "-A", "--endpos", now(on))
    assert (code, bool(out)) == (0, True), err
    on.released()


MOVES = [drop_and_make_again, advance, take_elsewhere, another_cdcpipe]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_a_slot_that_moved_is_refused(on18: PublishedDatabase, move: Callable[[PublishedDatabase], None]) -> None:
    has = consume(on18, 1)
    insert(on18, 2, 3)
    move(on18)
    code, out, err = on18.run("-c", "-H", "-A", "--endpos", now(on18), "--expect-lsn", str(has))
    assert (code, out) == (2, b"")
    moved = on18.confirmed()
    assert moved > has
    assert f"cdcpipe: error: {GapError.BEGINNING}replication slot '{on18.slot}' is at {moved}" in err
    assert f"of WAL beyond {has}" in err
    assert "hint: the slot was dropped and made again" in err

    # The refused start has confirmed nothing: whoever goes on without the gap's changes gets all that follow.
    insert(on18, 4)
    code, out, err = on18.run("-J", "-N", "-A", "--endpos", now(on18), "--expect-lsn", str(moved))
    assert code == 0, err
    assert b'"value":4' in out


def test_the_refused_start_does_not_move_the_slot(on18: PublishedDatabase) -> None:
    has = consume(on18, 1)
    insert(on18, 2)
    advance(on18)
    insert(on18, 3)
    before = on18.confirmed()
    with on18.cli("-s", "0.1", "-A", "--expect-lsn", str(has)) as cli:
        assert cli.wait() == 2
        assert cli.read_bytes() == b""
    on18.released()
    assert on18.confirmed() == before


@pytest.mark.parametrize("behind", [0, 1])
def test_a_slot_at_the_position_or_behind_it_starts(on18: PublishedDatabase, behind: int) -> None:
    has = consume(on18, 1)
    insert(on18, 2)
    code, out, err = on18.run("-J", "-N", "-A", "--endpos", now(on18), "--expect-lsn", format_lsn(has + behind))
    assert code == 0, err
    assert b'"value":2' in out


@pytest.mark.parametrize("makes_slot", [False, True])
def test_a_server_whose_wal_ends_before_the_position_is_refused(on18: PublishedDatabase, makes_slot: bool) -> None:
    """The server was restored from an older copy: it will use the consumer's positions again, for other changes."""
    slot = f"{on18.slot}_new" if makes_slot else on18.slot
    insert(on18, 1)
    before = on18.confirmed()
    stream = ("-d", on18.database.dsn, "-S", slot, "--publication", "p", "-c", "-A", "--endpos", now(on18))
    code, out, err = run_cli(*stream, "--expect-lsn", "FF/0")
    assert (code, out) == (2, b"")
    assert f"cdcpipe: error: {RewoundServerError.BEGINNING}its WAL ends at 0/" in err
    assert "before FF/0, up to which the changes were taken (--expect-lsn)" in err
    assert on18.confirmed() == before
    assert on18.value(f"select count(*) from pg_replication_slots where slot_name = '{slot}'") == (0 if makes_slot else 1)


@pytest.mark.parametrize("output", [(), ("-J",), ("--output", "test_decoding")])
def test_rendering_makes_no_difference(on18: PublishedDatabase, output: tuple[str, ...]) -> None:
    has = consume(on18, 1)
    insert(on18, 2)
    advance(on18)
    code, out, err = on18.run(*output, "-A", "--endpos", now(on18), "--expect-lsn", str(has))
    assert (code, out) == (2, b"")
    assert GapError.BEGINNING in err


def test_other_plugins(on15: PublishedDatabase) -> None:
    slot = on15.make_slot("test_decoding", "_text")
    has = now(on15)
    insert(on15, 1)
    on15.connection.execute("select count(*) from pg_logical_slot_get_changes(%s, null, null)", [slot])
    stream = ("-d", on15.database.dsn, "-S", slot, "-A", "--endpos", now(on15))
    code, out, err = run_cli(*stream, "--expect-lsn", has)
    assert (code, out) == (2, b"")
    assert GapError.BEGINNING in err
    code, _, err = run_cli(*stream, "--expect-lsn", now(on15))
    assert code == 0, err


def test_a_standby_asks_when_the_slot_is_its_own(on18: PublishedDatabase) -> None:
    """While it waits, the active consumer confirms more. What counts is where the slot is then."""
    has = consume(on18, 1)
    with contextlib.ExitStack() as stack:
        active = stack.enter_context(on18.cli())
        until(on18.is_active)
        standby = stack.enter_context(on18.cli("--standby", "-v", "--expect-lsn", str(has)))
        until(lambda: "; waiting" in standby.stderr, "the standby's wait")
        insert(on18, 2)
        end, _ = active.transactions(1)[0]
        active.say(f"F {end}\nq\n")
        assert active.wait() == 0, active.stderr
        assert standby.wait() == 2
        assert GapError.BEGINNING in standby.stderr
