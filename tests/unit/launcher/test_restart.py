"""When a streamer that has ended is started again, and with which error the launcher ends otherwise."""

import pytest

from cdcpipe.errors import GapError, LostSlotError, ServerError, UnreachableError
from spark_sink.client.failure import Failure
from spark_sink.launcher.restart import RestartPolicy, final_error


def delays(
    codes: list[tuple[int, int, str]], *, step_s: float = 1.0, reconnect_s: float | None = None, has_had_slot: bool = False
) -> list[float | None]:
    policy, now, found = RestartPolicy(lambda: 1.0, reconnect_s=reconnect_s), 0.0, []
    policy.has_had_slot = has_had_slot
    for code, end_lsn, message in codes:
        now += step_s
        found.append(policy.delay(Failure(code, message), end_lsn, now))
    return found


@pytest.mark.parametrize("code", [3, 9, 0, -9, -15])
def test_again_without_limit(code: int):
    assert delays([(code, 0x100, "same")] * 8, has_had_slot=True) == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert delays([(code, 0x100, "same")] * 500, has_had_slot=True)[-1] == 10.0


def test_a_first_start_waits_for_its_slot_for_five_minutes():
    """Another program may keep it: a run of cron with --available-now would wait, and block the next ones, for ever."""
    busy = (9, 0, "in use")
    assert delays([busy] * 400).index(None) == 300
    away = (2, 0, UnreachableError.BEGINNING)
    assert delays([busy, (3, 0, ""), away, busy] * 400).index(None) == 300  # other failures do not end this wait
    error = final_error(Failure(9, "the slot is in use", "stop that consumer, or wait for it: --poll-mode, --standby"), 0)
    assert (error.exit_code, error.hint) == (9, "stop that consumer")


@pytest.mark.parametrize("code", [1, 2, 4, 6, 7, 8, 120])
def test_not_again(code: int):
    assert delays([(code, 0x100, "")]) == [None]


def test_progress_resets_the_delay():
    assert delays([(3, 1, ""), (3, 1, ""), (3, 2, ""), (3, 2, "")]) == [0.2, 0.4, 0.2, 0.4]


def test_a_stream_that_lasted_resets_the_delay():
    """An idle stream brings no changes."""
    policy = RestartPolicy(lambda: 1.0)
    found = [
        policy.delay(Failure(code, ""), 1, now) for code, now in ((3, 0.0), (3, 1.0), (3, 11.5), (2, 40.0), (9, 60.0), (3, 75.0))
    ]
    assert found == [0.2, 0.4, 0.2, 0.4, 0.8, 0.2]  # a start that fails late, or waits for the slot, is no stream


AWAY = Failure(2, UnreachableError.BEGINNING)


def test_a_gap_is_no_progress():
    """The log goes on beyond its former end. The launcher took the next failure for one of its first start, and ended."""
    policy = RestartPolicy(lambda: 1.0)
    assert policy.delay(Failure(3, "closed"), 0x100, 1.0) == 0.2
    policy.begin_at(0x200)
    assert policy.delay(AWAY, 0x200, 2.0) == 0.4


def test_a_server_that_has_answered_during_a_wait_is_lost_from_then_on():
    """The wait for its WAL may take days, at a first start as after a lost connection."""
    policy = RestartPolicy(lambda: 1.0, reconnect_s=600.0)
    policy.begin_at(0x100)
    for now in (1.0, 5000.0):
        policy.note_answer(now)
        assert [policy.delay(AWAY, 0x100, now + after_s) for after_s in (1.0, 599.0, 600.0)] == [0.2, 0.4, None]


def test_the_same_error_at_the_same_place_is_poison():
    assert delays([(5, 1, "x")] * 5) == [0.2, 0.4, 0.8, 1.6, None]
    assert None not in delays([(5, 1, "x"), (5, 1, "y")] * 10)
    assert None not in delays([(5, n, "x") for n in range(20)])
    assert delays([(5, 1, "x")] * 4 + [(3, 1, ""), (5, 1, "x")])[-1] is None


def test_what_the_server_lacks_is_no_poison():
    """The disk of the server is full: nothing is wrong with the transaction, and it comes when there is room again."""
    full = f"{ServerError.SHORTAGE}could not write to data file for XID 743: No space left on device (53100)"
    unstarted = (2, 1, f"the stream could not be started: {full}")
    assert delays([(5, 1, full)] * 500, has_had_slot=True)[-1] == 10.0
    assert delays([(5, 1, full)] + [unstarted] * 500, has_had_slot=True)[-1] == 10.0
    assert delays([(5, 1, "x")] * 4 + [(5, 1, full), (5, 1, "x")])[-1] is None
    assert delays([(2, 1, full)]) == [None]  # at the start nothing runs yet that would go on


def test_what_the_server_lacks_is_waited_for_as_long_as_for_a_server():
    """It counts from its beginning, whatever exit code it comes with: a full disk may stay full."""
    full = f"{ServerError.SHORTAGE}No space left on device (53100)"
    short, unstarted = (5, 1, full), (2, 1, f"the stream could not be started: {full}")
    assert delays([short] * 100, reconnect_s=50, has_had_slot=True).index(None) == 50
    assert delays([short, unstarted] * 100, reconnect_s=50, has_had_slot=True).index(None) == 50
    assert delays([short] * 100, reconnect_s=300, step_s=30.0, has_had_slot=True).index(None) == 10  # each stream fills the disk
    assert None not in delays([short] * 100, reconnect_s=50, step_s=86_400.0, has_had_slot=True)  # one of each day is no state
    assert None not in delays([(5, n, full) for n in range(100)], reconnect_s=50, has_had_slot=True)
    assert delays([short] * 400).index(None) == 300  # a first start
    assert delays([(9, 1, "in use"), unstarted] * 400).index(None) == 300


def test_no_transaction_is_left_out_for_what_the_server_lacks():
    error = final_error(
        Failure(5, f"{ServerError.SHORTAGE}No space left on device (53100)", "make room on the server's disk"), 0x100
    )
    assert error.exit_code == 5
    assert error.hint == "make room on the server's disk; then start again: nothing is lost, the slot keeps the WAL"


def test_the_way_past_a_transaction_names_only_options_that_run_has():
    said = f"invalid byte sequence (22021): {ServerError.UNSENDABLE}, which commits at 0/FF"
    error = final_error(Failure(5, said, hint="start with --startpos 0/100"), 1)
    assert said in error.message
    assert "--startpos" not in str(error.hint)
    assert "--on-gap resnapshot" in str(error.hint)


def test_the_same_error_once_a_month_is_not_poison():
    """An idle stream ends with the same words each time, and there are no changes in between that would tell the cause."""
    assert delays([(5, 1, "x")] * 50, step_s=30 * 86_400.0) == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4] + [10.0] * 44
    policy = RestartPolicy(lambda: 1.0)
    found = [policy.delay(Failure(5, "x"), 1, now) for now in (0.0, 1.0, 5000.0, 5001.0, 5002.0, 5003.0, 5004.0)]
    assert found.index(None) == 6  # the five of the second hour


def test_a_failed_start_is_tried_again_after_a_lost_connection():
    assert delays([(3, 1, ""), (2, 1, "refused"), (2, 1, "refused")])[1:] == [0.4, 0.8]
    refused, away = (2, 1, "refused"), (2, 1, UnreachableError.BEGINNING)
    assert delays([(3, 1, "")] + [refused] * 400).index(None) == 301
    assert delays([(3, 1, "")] + [away] * 5000)[-1] == 10.0
    assert delays([(3, 1, "")] + [away] * 100, reconnect_s=50).index(None) == 50
    assert delays([away]) == [None]
    assert delays([(3, 1, ""), (2, 2, "")])[1] is None  # it has been streaming since


def test_an_error_of_long_ago_does_not_count_as_the_last_connection():
    """An idle stream brings no changes, and may last for months between two errors."""
    policy = RestartPolicy(lambda: 1.0)
    assert policy.delay(Failure(5, "x"), 1, 0.0) is not None
    assert policy.delay(Failure(5, "x"), 1, 1e7) is not None
    assert policy.delay(Failure(2, "the database system is starting up"), 1, 1e7 + 1) is not None
    assert policy.delay(Failure(5, "x"), 1, 1e7 + 3) is not None  # it did not last
    assert policy.delay(Failure(2, "the database system is starting up"), 1, 1e7 + 301) is None


def test_a_server_that_was_away_for_long_may_refuse_as_long_as_one_that_comes_back_at_once():
    """A refusal counts from the first one: a standby takes the address of a primary that is gone, and is promoted later."""
    away, refused = (2, 1, UnreachableError.BEGINNING), (2, 1, "refused")
    assert delays([(3, 1, "")] + [away] * 600 + [refused])[-1] == 10.0
    assert delays([(3, 1, "")] + [away] * 600 + [refused] * 400).index(None) == 901
    assert delays([(3, 1, "")] + [refused] * 299 + [away, refused])[-1] == 10.0
    assert delays([(3, 1, "")] + [away] * 30 + [refused] * 100, reconnect_s=50).index(None) == 50


def test_a_slot_that_has_moved_is_looked_at_again():
    assert delays([(2, 1, GapError.BEGINNING + "moved")]) == [0.2]


def test_a_lost_slot_is_not_tried_again():
    """No stream ever comes from it, even if the connection was lost a moment ago: the server ends the walsender of such a slot."""
    assert delays([(3, 1, ""), (2, 1, LostSlotError.BEGINNING + "it is lost")]) == [0.2, None]
    error = final_error(Failure(2, LostSlotError.BEGINNING + "it is lost", "drop the slot"), 0x100)
    assert isinstance(error, LostSlotError)
    assert "-c --on-gap resnapshot" in (error.hint or "")
    assert (error.hint or "").endswith("drop the slot")


def test_a_slot_that_is_gone_is_not_merely_to_be_created():
    """If there is a log, `-c` alone reports a gap."""
    gone = Failure(8, "replication slot 's' does not exist", "-c creates it")
    hint = final_error(gone, 0x100).hint or ""
    assert hint.startswith("the log has everything up to 0/100, ")
    assert "-c --on-gap resnapshot" in hint
    assert "drop it there" in hint  # a pipeline that goes to a standby leaves its slot on the primary
    assert final_error(gone, 0).hint == "-c creates it"


def test_the_jitter_is_between_half_and_all_of_the_delay():
    assert RestartPolicy(lambda: 0.0).delay(Failure(3, ""), 0, 0.0) == 0.1


@pytest.mark.parametrize("code", [1, 2, 3, 5, 8, 9])
def test_an_error_has_the_exit_code_of_the_streamer(code: int):
    error = final_error(Failure(code, "what it said", "what to do"), 0x100)
    assert error.exit_code == code
    assert "what it said" in str(error)


@pytest.mark.parametrize("code", [4, 6, 7, -11, 120])
def test_an_unexpected_exit_code_is_a_system_error(code: int):
    error = final_error(Failure(code, ""), 0x100)
    assert error.exit_code == 7
    assert f"ended with {code}" in str(error)


def test_the_hint_names_no_option_that_land_and_run_do_not_have():
    hint = final_error(Failure(5, f"x: {ServerError.NO_PUBLICATION}", "go on (--startpos) with another"), 0x100).hint or ""
    assert "--startpos" not in hint
    assert "run once with -c --on-gap resnapshot" in hint
