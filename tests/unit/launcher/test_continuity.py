"""Whether a slot continues the log: each way in which a slot or a server can have changed meanwhile."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.client.prepare import Prepared
from spark_sink.launcher.continuity import (
    FedTables,
    Log,
    Verdict,
    gap_error,
    gone_back,
    gone_back_behind_copy,
    judge,
    judge_lost_log,
    judge_own_history,
    missing_slot,
    tables_gone_back,
    taken_along,
)
from spark_sink.staging.account import Account
from spark_sink.staging.gap import Gap, LostChanges
from spark_sink.staging.log import Epoch, OtherSourceError, Position, StagingError

EPOCH = Epoch(1, "7", 1, "db", "s", ("p",), {}, 0x100)
LOG = Log([EPOCH], 0x500, Account(0x600, 1700000000.0))
TABLES = FedTables("/warehouse", "7", "db", Path("/staging"), Position(3, 0x700))
SERVER = Prepared(180000, "7", 1, "db", LSN(0x900), LSN(0x600), ())


def judged(log: Log = LOG, accepted: str | None = None, **server: Any) -> Verdict:
    return judge(log, replace(SERVER, **server), accepted, 1700000100.0)


@pytest.mark.parametrize("confirmed", [0x100, 0x4FF, 0x500, 0x5FF, 0x600])
def test_a_slot_up_to_the_account_continues_the_log(confirmed: int):
    assert judged(confirmed_flush_lsn=LSN(confirmed)) == Verdict()


def test_a_slot_beyond_the_account_is_a_gap():
    verdict = judged(confirmed_flush_lsn=LSN(0x601))
    assert verdict.gap is not None
    assert (verdict.gap.after_lsn, verdict.resume_lsn, verdict.is_new_epoch, verdict.account_lsn) == (0x600, 0x601, True, None)
    assert (verdict.gap.since, verdict.gap.found) == (1700000000.0, 1700000100.0)
    assert "0/601" in verdict.gap.cause
    assert "0/600" in verdict.gap.cause


def test_the_cause_names_a_new_slot_and_an_older_copy():
    new = judged(confirmed_flush_lsn=LSN(0x800), slot_created=True).gap
    older = judged(replace(LOG, tables=TABLES), confirmed_flush_lsn=LSN(0x800)).gap
    assert new is not None
    assert "is a new one" in new.cause
    assert older is not None
    assert "tables are at 3:0/700" in older.cause
    assert "older copy" in older.cause


def test_another_promotion_before_anything_has_come_loses_nothing_more():
    """The cause was that the log had changes of timeline 2. It had none: its end is that of timeline 1's, lost before."""
    lost = LostChanges(3, {}, 0x500)
    first = Gap(0x400, "timeline 2 branched off at 0/400, but the log has changes", 1.0, 2.0, is_divergence=True, lost=lost)
    after = [EPOCH, replace(EPOCH, number=2, timeline=2, start_lsn=0x500, gap=first)]
    after.append(replace(after[1], number=3, gap=None))  # the next start
    third = {"timeline": 3, "timeline_history": ((1, 0x400), (2, 0x450))}
    found = judged(replace(LOG, epochs=after), **third).gap
    assert found is not None
    begins = "timeline 3 branched off at 0/450, before 0/500, after which nothing has come from timeline 2 yet. Before, timeline 2 "
    assert (found.cause.startswith(begins), found.lost, found.after_lsn) == (True, lost, 0x450)
    below = judged(replace(LOG, epochs=after), timeline=3, timeline_history=((1, 0x400), (2, 0x350))).gap
    assert below is not None
    assert (below.lost, below.after_lsn) == (None, 0x350)  # more is lost, and has to be counted
    # A change from timeline 2, or a copy, is lost.
    for log in replace(LOG, epochs=after, end_lsn=0x550), replace(LOG, epochs=after, copied_lsn=0x510):
        found = judged(log, **third).gap
        assert found is not None
        assert (" on timeline 2 " in found.cause or "changes of timeline 2 " in found.cause, found.lost) == (True, None)


def test_tables_beyond_the_log_are_a_gap_also_if_the_slot_is_not():
    """Server and staging directory were restored from one older copy. The tables have changes that never happened there."""
    log = replace(LOG, tables=TABLES)
    verdict = judged(log)
    assert verdict.gap is not None
    assert verdict.gap.is_divergence  # the stream waits until the server's WAL has passed the position of the tables
    assert (verdict.gap.after_lsn, verdict.resume_lsn, verdict.is_new_epoch) == (0x600, 0x700, True)
    assert "the server may be an older copy, too" in verdict.gap.cause
    promoted = judged(log, timeline=2, timeline_history=((1, 0x580),))
    assert promoted.gap is not None
    assert (promoted.gap.after_lsn, promoted.account_lsn, promoted.resume_lsn) == (0x580, 0x580, 0x700)
    branched = judged(log, timeline=2, timeline_history=((1, 0x480),))
    assert branched.resume_lsn == 0x700


def test_tables_of_another_log_with_the_same_positions_are_a_gap():
    """`land` has gone on with an older copy of server and staging directory, beyond the position of the tables."""
    later = replace(EPOCH, number=3, start_lsn=0x300, token="new")
    log = replace(LOG, epochs=[EPOCH, later], tables=replace(TABLES, position=Position(3, 0x400), epoch_token="old"))
    verdict = judged(log)
    assert verdict.gap is not None
    assert (verdict.gap.after_lsn, verdict.resume_lsn, verdict.is_new_epoch) == (0x300, 0x600, True)
    assert not verdict.gap.is_divergence  # what the log has did happen on this server
    assert "have other changes than the log after 0/300" in verdict.gap.cause
    for tables in (Position(3, 0x400), "new"), (Position(3, 0x400), ""), (Position(1, 0x300), "old"):
        assert judged(replace(log, tables=replace(TABLES, position=tables[0], epoch_token=tables[1]))) == Verdict()
    assert judged(replace(log, tables=replace(TABLES, position=Position(1, 0x301)))).gap is not None
    beyond = judged(replace(log, tables=replace(TABLES, position=Position(3, 0x700), epoch_token="old"))).gap
    assert beyond is not None
    assert "beyond the end of the log" in beyond.cause


def test_a_log_goes_on_where_the_tables_are_if_the_slot_is_behind_them():
    verdict = judged(replace(LOG, tables=TABLES), confirmed_flush_lsn=LSN(0x680))
    assert verdict.gap is not None
    assert (verdict.gap.after_lsn, verdict.resume_lsn) == (0x600, 0x700)
    at_the_end = replace(TABLES, position=Position(1, 0x500))
    assert judged(replace(LOG, tables=at_the_end)) == Verdict()


@pytest.mark.parametrize(
    ("branch", "confirmed", "expected"),
    [
        (0x700, 0x600, Verdict(is_new_timeline=True)),  # the standby had more than we
        (0x600, 0x500, Verdict(is_new_timeline=True)),
        (0x580, 0x500, Verdict(account_lsn=0x580, is_new_timeline=True)),  # idle positions of the old timeline do not count
        (0x500, 0x500, Verdict(account_lsn=0x500, is_new_timeline=True)),
    ],
)
def test_a_new_timeline_that_branches_off_after_the_log_continues_it(branch: int, confirmed: int, expected: Verdict):
    assert judged(timeline=2, timeline_history=((1, branch),), confirmed_flush_lsn=LSN(confirmed)) == expected


def test_a_new_timeline_that_branches_off_before_the_logs_end_is_a_gap():
    verdict = judged(timeline=2, timeline_history=((1, 0x480),), confirmed_flush_lsn=LSN(0x400))
    assert verdict.gap is not None
    assert (verdict.gap.after_lsn, verdict.account_lsn, verdict.resume_lsn) == (0x480, 0x480, 0x500)
    assert verdict.gap.is_divergence
    assert "never had these" in verdict.gap.cause


def test_a_new_timeline_that_branches_off_before_a_copy_is_a_gap():
    """The log had nothing after 0/500 on timeline 1, but the copy may have rows that the new primary never had."""
    log = replace(LOG, copied_lsn=0x700)
    verdict = judged(log, timeline=2, timeline_history=((1, 0x680),), confirmed_flush_lsn=LSN(0x600))
    assert verdict.gap is not None
    # The tables are copied again when the WAL has passed the first copy. Otherwise that one would count as the later one.
    assert (verdict.gap.after_lsn, verdict.account_lsn, verdict.resume_lsn) == (0x600, 0x600, 0x701)
    assert verdict.gap.is_divergence
    assert "a table was copied on timeline 1 at 0/700" in verdict.gap.cause
    same = judged(log, timeline=2, timeline_history=((1, 0x700),), confirmed_flush_lsn=LSN(0x600))
    assert same == Verdict(is_new_timeline=True)
    other = judged(log, "8", system_id="8", confirmed_flush_lsn=LSN(0x300))
    assert other.gap is not None
    assert other.resume_lsn == 0x701


def test_an_earlier_gap_does_not_matter():
    """The log had changes beyond the first branch, and goes on behind them on timeline 2. Now timeline 3 left that later."""
    gap = Gap(0x480, "diverged", 0.0, 0.0, is_divergence=True)
    log = replace(LOG, epochs=[EPOCH, replace(EPOCH, number=2, timeline=2, start_lsn=0x500, gap=gap)], end_lsn=0x700)
    log = replace(log, account=Account(0x700, 0.0))
    history = ((1, 0x480), (2, 0x780))
    assert judged(log, timeline=3, timeline_history=history, confirmed_flush_lsn=LSN(0x650)) == Verdict(is_new_timeline=True)
    lost = judged(log, timeline=3, timeline_history=((1, 0x480), (2, 0x680)), confirmed_flush_lsn=LSN(0x650)).gap
    assert lost is not None
    assert lost.after_lsn == 0x680


def test_timelines_from_before_an_upgrade_do_not_matter():
    upgraded = replace(EPOCH, number=2, system_id="8", former_system_id="7", start_lsn=0x500)
    log = replace(LOG, epochs=[replace(EPOCH, timeline=4), upgraded], end_lsn=0x700, account=Account(0x700, 0.0))
    server = {"system_id": "8", "timeline": 2, "timeline_history": ((1, 0x780),), "confirmed_flush_lsn": LSN(0x700)}
    assert judged(log, **server) == Verdict(is_new_timeline=True)


def test_a_server_that_has_gone_back_is_a_gap_from_its_slot_on():
    recorded = gone_back(LOG, replace(SERVER, confirmed_flush_lsn=LSN(0x300)), "gone back", 1700000100.0)
    assert (recorded.after_lsn, recorded.is_divergence) == (0x300, True)
    verdict = judged(replace(LOG, recorded_gap=recorded), confirmed_flush_lsn=LSN(0x480))
    assert verdict == Verdict(recorded, 0x300, resume_lsn=0x500)


def test_changes_that_never_happened_are_named_with_their_number():
    lost = LostChanges(2, {f"public.t{number}": number for number in range(1, 8)}, 0x500)
    gap = Gap(0x400, "gone back", 0.0, 0.0, is_divergence=True, lost=lost)
    assert Gap.from_json(gap.to_json()) == gap
    error = gap_error(gap, "staging", 0x500)
    named = "public.t7: 7, public.t6: 6, public.t5: 5, public.t4: 4, public.t3: 3, 2 more tables: 3"
    assert f"they are 2 transactions up to 0/500, changes of {named}" in error.message
    assert "the wrong server" in (error.hint or "")
    assert str(replace(lost, transactions=1, rows={}, is_complete=False)) == "at least 1 transaction up to 0/500"


def test_a_slot_that_was_moved_on_the_new_timeline_is_a_gap():
    verdict = judged(timeline=2, timeline_history=((1, 0x580),), confirmed_flush_lsn=LSN(0x590))
    assert verdict.gap is not None
    assert (verdict.gap.after_lsn, verdict.account_lsn, verdict.resume_lsn) == (0x580, 0x580, 0x590)


@pytest.mark.parametrize(
    ("history", "branch"),
    [
        (((1, 0x300), (2, 0x900)), None),  # the timeline that we followed
        (((1, 0x200),), 0x200),  # another child of timeline 1, which branched off before ours
        (((1, 0x350),), 0x300),  # another child, which branched off after ours
        ((), 0),  # nothing in common
    ],
)
def test_the_common_history_of_several_timelines(history: tuple[tuple[int, int], ...], branch: int | None):
    log = replace(LOG, epochs=[EPOCH, replace(EPOCH, number=2, timeline=2, start_lsn=0x300)])
    verdict = judged(log, timeline=3, timeline_history=history)
    assert (None if verdict.gap is None else verdict.gap.after_lsn) == branch


@given(st.integers(0, 0x900), st.integers(0, 0x900), st.integers(0, 0x900), st.integers(0, 0x300))
def test_no_change_is_lost_or_invented_without_a_gap(branch: int, confirmed: int, end: int, idle: int):
    """The new timeline begins at the branch. The server sends what is after ``confirmed``, the log takes what is after its end."""
    log = Log([EPOCH], end, Account(end + idle, 0.0))
    verdict = judged(log, timeline=2, timeline_history=((1, branch),), confirmed_flush_lsn=LSN(confirmed))
    is_right = end <= branch and confirmed <= min(end + idle, branch)
    assert (verdict.gap is None) == is_right


@pytest.mark.parametrize("confirmed", [0x600, 0x2000])
def test_a_slot_that_pg_upgrade_took_along_continues_the_log(confirmed: int):
    verdict = judged(accepted="8", system_id="8", confirmed_flush_lsn=LSN(confirmed))
    assert verdict == Verdict(account_lsn=confirmed, former_system_id="7")


def test_a_slot_that_pg_upgrade_took_along_is_named_because_the_log_may_be_a_copy_from_before():
    text = taken_along(LOG, replace(SERVER, system_id="8", confirmed_flush_lsn=LSN(0x10600)), "staging")
    assert "last known to be complete at 2023-11-14 22:13:20+00:00, up to 0/600, and the slot is at 0/10600, 64" in text
    assert "If staging is a copy from before the upgrade, stop, put the copy back once more, drop the slot" in text


@pytest.mark.parametrize(
    ("confirmed", "created", "words"),
    [
        (0x2000, True, "it is a new one"),  # after pg_upgrade of a server before 17, which takes no slot along
        (0x300, True, "it is a new one"),  # a server into which a dump was restored: its WAL begins anew
        (0x300, False, "it is at 0/300, before 0/600"),
        (0x5FF, False, "it is at 0/5FF, before 0/600"),
    ],
)
def test_another_slot_of_another_server_is_a_gap(confirmed: int, created: bool, words: str):
    verdict = judged(accepted="8", system_id="8", confirmed_flush_lsn=LSN(confirmed), slot_created=created)
    assert verdict.gap is not None
    assert verdict.gap.cause.endswith(words)
    assert (verdict.former_system_id, verdict.is_new_epoch, verdict.account_lsn) == ("7", True, 0x500)
    # The stream begins when the server's WAL has passed the end of the log. The tables are copied after that.
    assert (verdict.resume_lsn, verdict.gap.is_divergence) == ((0x500, True) if confirmed < 0x500 else (confirmed, False))


def test_a_recorded_gap_is_one_on_another_server_too():
    recorded = Gap(0x600, "the slot was missing", 0.0, 0.0, is_divergence=True)
    verdict = judged(replace(LOG, recorded_gap=recorded), accepted="8", system_id="8", confirmed_flush_lsn=LSN(0x2000))
    assert verdict == Verdict(recorded, 0x500, former_system_id="7", resume_lsn=0x2000)


def test_a_slot_that_is_gone_is_a_gap_after_the_account():
    gap = missing_slot(LOG, None, "s", 5.0)
    assert gap is not None
    assert (gap.after_lsn, gap.since, gap.found) == (0x600, 1700000000.0, 5.0)
    assert "does not exist any more" in gap.cause


@pytest.mark.parametrize("confirmed", [0x100, 0x6FF, 0x700])
def test_a_new_log_begins_where_the_tables_are(confirmed: int):
    """The former log is lost, and the server still has everything that the tables lack."""
    found = judge_lost_log(TABLES, replace(SERVER, confirmed_flush_lsn=LSN(confirmed)), None, 0, 5.0)
    assert found == Verdict(resume_lsn=0x700)


@pytest.mark.parametrize(("confirmed", "created"), [(0x701, False), (0x800, True)])
def test_what_only_the_lost_log_had_is_a_gap(confirmed: int, created: bool):
    found = judge_lost_log(TABLES, replace(SERVER, confirmed_flush_lsn=LSN(confirmed), slot_created=created), None, 0, 5.0)
    assert found.gap is not None
    assert (found.gap.after_lsn, found.resume_lsn) == (0x700, confirmed)
    assert all(words in found.gap.cause for words in ("/warehouse are at 3:0/700", "their log, /staging, is not there"))
    assert ("is new" in found.gap.cause) == created
    missing = missing_slot(None, TABLES, "s", 5.0)
    assert missing is not None
    assert missing.after_lsn == 0x700
    assert missing_slot(None, None, "s", 5.0) is None


@pytest.mark.parametrize("change", [{"system_id": "8"}, {"database": "other"}])
def test_tables_of_another_server_get_no_new_log(change: dict[str, str]):
    with pytest.raises(StagingError, match="come from database 'db' of the server with system id 7") as caught:
        judge_lost_log(TABLES, replace(SERVER, **change), None, 0, 5.0)
    assert "connect to their server" in (caught.value.hint or "")
    assert ("after a pg_upgrade: --accept-system-id 8 --on-gap resnapshot" in (caught.value.hint or "")) == ("system_id" in change)


@pytest.mark.parametrize(("confirmed", "resume_lsn"), [(0x200, 0x901), (0x700, 0x901), (0x2000, 0x2000)])
def test_tables_that_lost_their_log_go_on_with_an_accepted_server_after_a_gap(confirmed: int, resume_lsn: int):
    """Also with a slot that pg_upgrade took along, and whatever timeline the former server had: nobody has the rest of the log."""
    server = replace(SERVER, system_id="8", confirmed_flush_lsn=LSN(confirmed))
    found = judge_lost_log(replace(TABLES, timeline=3), server, "8", 0x900, 5.0)
    assert found.gap is not None
    assert (found.gap.after_lsn, found.resume_lsn, found.former_system_id) == (0x700, resume_lsn, "7")
    assert found.gap.is_divergence == (confirmed < resume_lsn)  # the stream begins when the WAL has passed the tables
    assert "the server has system id 8 now" in found.gap.cause
    with pytest.raises(StagingError, match="come from database 'db'"):
        judge_lost_log(TABLES, replace(server, database="other"), "8", 0x900, 5.0)
    assert judge_lost_log(TABLES, SERVER, "8", 0, 5.0) == Verdict(resume_lsn=0x700)  # still the former one


OF_2 = replace(TABLES, timeline=2, timeline_began_lsn=0x300)
LOST = {"confirmed_flush_lsn": LSN(0x600), "timeline": 2, "timeline_history": ((1, 0x650),)}
"""A standby that was promoted, with a copy of the slot. The staging directory was lost together with the primary."""


@pytest.mark.parametrize(
    ("tables", "server", "copied_lsn", "after_lsn", "resume_lsn", "cause"),
    [
        (replace(TABLES, timeline=1), {}, 0, 0x650, 0x700, "timeline 2 branched off at 0/650, but the tables"),
        (replace(TABLES, timeline=1), {"slot_created": True, "confirmed_flush_lsn": LSN(0x800)}, 0, 0x650, 0x800, "timeline 1"),
        (replace(TABLES, timeline=1), {"timeline_history": ((1, 0x780),)}, 0x900, 0x700, 0x901, "have a copy from 0/900"),
        (OF_2, {}, 0, 0x300, 0x700, "another server's timeline 2"),  # both standbys were promoted
        (OF_2, {"timeline": 3}, 0, 0, 0x700, "timeline 3 branched off at 0/0"),  # the server does not know their timeline
        (TABLES, {}, 0, 0x650, 0x700, "a timeline that is not known up to 0/700"),
    ],
)
def test_tables_that_lost_their_log_have_what_a_new_primary_never_had(
    tables: FedTables, server: dict[str, Any], copied_lsn: int, after_lsn: int, resume_lsn: int, cause: str
):
    """The WAL of the new primary has already passed the tables, so their position alone tells nothing."""
    found = judge_lost_log(tables, replace(SERVER, **(LOST | server)), None, copied_lsn, 5.0)
    assert found.gap is not None
    assert (found.gap.after_lsn, found.resume_lsn, found.gap.is_divergence) == (after_lsn, resume_lsn, True)
    assert cause in found.gap.cause
    assert "their log, /staging, is not there" in found.gap.cause


@pytest.mark.parametrize(
    ("tables", "server"),
    [
        (replace(TABLES, timeline=1), {"timeline_history": ((1, 0x700),)}),
        (replace(TABLES, timeline=2, timeline_began_lsn=0x650), {}),
        (replace(TABLES, timeline=2, timeline_began_lsn=0x650), {"timeline": 3, "timeline_history": ((1, 0x650), (2, 0x800))}),
        (TABLES, {"timeline_history": ((1, 0x700),)}),  # their timeline is not known
        (TABLES, {"timeline": 1, "timeline_history": ()}),
    ],
)
def test_tables_that_lost_their_log_go_on_if_the_server_has_all_of_theirs(tables: FedTables, server: dict[str, Any]):
    assert judge_lost_log(tables, replace(SERVER, **(LOST | server)), None, 0x700, 5.0) == Verdict(resume_lsn=0x700)


OLDER: dict[str, Any] = {"wal_lsn": LSN(0x8FF), "confirmed_flush_lsn": LSN(0x600)}
"""An older copy of the server. A table was copied at 0x900."""


@pytest.mark.parametrize("tables", [TABLES, replace(TABLES, timeline=1)])
def test_tables_that_lost_their_log_have_a_copy_from_beyond_the_wal_of_a_server_that_has_gone_back(tables: FedTables):
    server = replace(SERVER, **OLDER)
    gap = tables_gone_back(tables, server, 0x900, 5.0)
    assert gap is not None
    assert (gap.after_lsn, gap.found, gap.is_divergence) == (0x600, 5.0, True)
    assert gap.cause.startswith("the server has gone back: its WAL ends at 0/8FF, before 0/900, where tables were copied, and")
    # The WAL may have passed the copy since the gap was recorded.
    later = replace(server, wal_lsn=LSN(0x2000))
    assert judge_lost_log(tables, later, None, 0x900, 6.0, gap) == Verdict(gap, resume_lsn=0x901)
    other = replace(later, system_id="8")
    assert judge_lost_log(tables, other, "8", 0x900, 6.0, gap) == Verdict(gap, former_system_id="7", resume_lsn=0x901)
    with pytest.raises(StagingError, match="come from database 'db'"):
        judge_lost_log(tables, other, None, 0x900, 6.0, gap)


@pytest.mark.parametrize(
    ("copied_lsn", "server"),
    [
        (0x8FF, {}),
        (0x700, {"wal_lsn": LSN(0x6FF)}),  # the streamer finds that the WAL ends before the tables
        (0x900, {"is_standby": True}),  # it was restarted, and replays WAL again
        (0x900, {"system_id": "8"}),
        (0x900, {"database": "other"}),
        (0x900, {"timeline": 3, "timeline_history": ((1, 0x100), (2, 0x800))}),  # `judge_lost_log` compares with this branch
        (0x900, {"timeline": 1}),  # an old primary
    ],
)
def test_no_server_that_has_gone_back_behind_tables_that_lost_their_log(copied_lsn: int, server: dict[str, Any]):
    tables = replace(TABLES, timeline=2, timeline_began_lsn=0x100)
    here = {"timeline": 2, "timeline_history": ((1, 0x100),)}
    assert tables_gone_back(tables, replace(SERVER, **(OLDER | here | server)), copied_lsn, 5.0) is None


def test_an_old_primary_gets_no_new_log():
    with pytest.raises(OtherSourceError, match="timeline 1, but the tables in /warehouse have changes of timeline 2") as caught:
        judge_lost_log(OF_2, SERVER, None, 0, 5.0)
    assert "above 2 (restart it with standby.signal" in (caught.value.hint or "")


def test_the_error_names_positions_size_time_and_what_to_do():
    gap = judged(confirmed_flush_lsn=LSN(0x600 + (3 << 20))).gap
    assert gap is not None
    error = gap_error(gap, "/staging", 0x600 + (3 << 20))
    for words in ("changes are missing", "0/600", "0/300600", "3.0 MiB", "2023-11-14 22:13:20"):
        assert words in error.message
    assert error.exit_code == 2
    assert "/staging" in (error.hint or "")
    assert "--on-gap resnapshot" in (error.hint or "")


SECOND = Log([EPOCH, replace(EPOCH, number=2, timeline=2, start_lsn=0x200, timeline_began_lsn=0x300)], 0x500, Account(0x600, 1.0))


@pytest.mark.parametrize(("timeline", "later"), [(2, ()), (3, ((2, 0x700),))])
@pytest.mark.parametrize(("began", "after"), [(0x280, 0x280), (0x400, 0x300)])
def test_another_timeline_with_the_number_of_the_logs_is_a_gap(timeline: int, later: Any, began: int, after: int):
    """Two standbys were promoted apart from each other. Their histories are one up to where the first of them was promoted."""
    verdict = judged(SECOND, timeline=timeline, timeline_history=((1, began), *later), confirmed_flush_lsn=LSN(0x200))
    assert verdict.gap is not None
    assert verdict.gap.is_divergence
    assert (verdict.gap.after_lsn, verdict.account_lsn, verdict.resume_lsn, verdict.is_new_epoch) == (after, after, 0x500, True)
    assert ("another server's timeline 2" in verdict.gap.cause) == (timeline == 2)


def test_a_log_that_ends_before_they_parted_goes_on_in_a_new_epoch():
    log = replace(SECOND, end_lsn=0x280, account=Account(0x290, 1.0))
    theirs = {"timeline": 2, "timeline_history": ((1, 0x2A0),), "confirmed_flush_lsn": LSN(0x200)}
    assert judged(log, **theirs) == Verdict(is_new_timeline=True)
    third = replace(log.epochs[1], number=3, start_lsn=0x280, timeline_began_lsn=0x2A0)
    later = replace(log, epochs=[*log.epochs, third], end_lsn=0x500, account=Account(0x500, 1.0))
    assert judged(later, **theirs) == Verdict()
    assert judged(later, **(theirs | {"timeline": 3, "timeline_history": ((1, 0x2A0), (2, 0x500))})) == Verdict(
        is_new_timeline=True
    )


@pytest.mark.parametrize(("recorded", "history"), [(0x300, ((1, 0x300),)), (0, ((1, 0x300),)), (0x300, ())])
def test_the_same_timeline_goes_on_also_where_nothing_says_where_it_began(recorded: int, history: Any):
    log = replace(SECOND, epochs=[EPOCH, replace(SECOND.epochs[1], timeline_began_lsn=recorded)])
    assert judged(log, timeline=2, timeline_history=history) == Verdict()


def test_a_server_behind_a_copy_has_gone_back():
    cause = gone_back_behind_copy(LOG, SERVER, 0x901)
    assert cause == "the server has gone back: its WAL ends at 0/900, before 0/901, where tables were copied"
    assert not gone_back_behind_copy(LOG, SERVER, 0x900)


@pytest.mark.parametrize(
    ("log", "server"),
    [
        (LOG, {"is_standby": True}),  # it replays WAL again after a restart
        (LOG, {"timeline": 2}),  # `judge` compares the copy with the place where the timelines parted
        (LOG, {"system_id": "8"}),
        (replace(LOG, end_lsn=0xA00), {}),  # the stream waits until the WAL has passed this, or the streamer refuses the server
        (replace(LOG, recorded_gap=Gap(0x400, "gone back", 0.0, 0.0, is_divergence=True)), {}),
    ],
)
def test_something_else_tells_of_the_copy(log: Log, server: dict[str, Any]):
    assert not gone_back_behind_copy(log, replace(SERVER, **server), 0xA00)


@pytest.mark.parametrize(
    ("begin", "reached", "is_gap"),
    [
        (0x700, 0, False),
        (0x701, 0, True),
        (0x701, 0x700, True),
        (0x701, 0x701, False),  # an older copy of the tables: the pipeline refuses it
        (0, 0, False),
    ],
)
def test_tables_before_the_beginning_of_the_log_are_a_gap(begin: int, reached: int, is_gap: bool):
    """Their log was lost, and `land` has begun another one, which knows nothing of them."""
    tables = replace(TABLES, reached_lsn=reached)
    log = Log([replace(EPOCH, start_lsn=0x701)], 0x900, Account(0x900, 5.0), tables, begin_lsn=begin)
    found = judged(log)
    assert (found.gap is not None) == is_gap
    if found.gap is not None:
        assert (found.gap.after_lsn, found.resume_lsn, found.is_new_epoch, found.gap.is_divergence) == (0x700, 0x900, True, False)
        assert "tables are at 3:0/700, but the log begins at 0/701" in found.gap.cause
        # A launcher that is killed before the tables have passed the gap needs no other one.
        passed = [*log.epochs, replace(EPOCH, number=4, start_lsn=0x900, gap=found.gap)]
        assert judged(replace(log, epochs=passed)) == Verdict()


LANDED = Log(
    [replace(EPOCH, start_lsn=0x600, timeline=2, timeline_began_lsn=0x650)],
    0x900,
    Account(0x900, 5.0),
    replace(TABLES, timeline=1),
    begin_lsn=0x600,
)
"""What `land` has begun with the server of LOST, before `run` was started again. So the tables are not before its beginning."""


def judged_with_tables(log: Log, copied_lsn: int = 0, accepted: str | None = None, **server: Any) -> Verdict:
    found = replace(SERVER, **(LOST | {"confirmed_flush_lsn": LSN(0x900)} | server))
    return judge_own_history(log, judge(log, found, accepted, 6.0), found, copied_lsn, 6.0)


@pytest.mark.parametrize(("copied_lsn", "resume_lsn"), [(0, 0x900), (0x8FF, 0x900), (0x900, 0x901)])
def test_tables_of_another_log_have_what_a_new_primary_never_had(copied_lsn: int, resume_lsn: int):
    """The new log goes on beyond the tables, and has nothing that never happened."""
    found = judged_with_tables(LANDED, copied_lsn)
    assert found.gap is not None
    assert (found.gap.after_lsn, found.resume_lsn, found.gap.is_divergence) == (0x650, resume_lsn, True)
    assert (found.is_new_epoch, found.account_lsn, found.lost_after_lsn) == (True, None, 0x900)
    cause = "timeline 2 branched off at 0/650, but the tables in /warehouse have changes of timeline 1 up to 0/700"
    assert found.gap.cause.startswith(cause)
    assert found.gap.cause.endswith("and their log is not there")  # it was in /staging, where there is another log now
    passed = [*LANDED.epochs, replace(LANDED.epochs[0], number=4, start_lsn=resume_lsn, gap=found.gap)]
    assert judged_with_tables(replace(LANDED, epochs=passed, end_lsn=resume_lsn), copied_lsn) == Verdict()  # one is enough


def test_tables_of_another_log_with_the_numbers_of_theirs_have_a_history_of_their_own():
    """`land` was started as often as their launcher. They differ from the branch on, not from the beginning of an epoch."""
    starts = (0x600, 0x640, 0x680, 0x880)
    epochs = [replace(LANDED.epochs[0], number=number, start_lsn=lsn, token="new") for number, lsn in enumerate(starts, 1)]
    assert LANDED.tables is not None
    log = replace(LANDED, epochs=epochs, tables=replace(LANDED.tables, epoch_token="theirs"))
    found = judged_with_tables(log, 0x980)
    assert found.gap is not None
    assert (found.gap.after_lsn, found.resume_lsn, found.gap.is_divergence) == (0x650, 0x981, True)
    assert "branched off at 0/650" in found.gap.cause


@pytest.mark.parametrize(
    ("tables", "server"),
    [
        (replace(TABLES, timeline=1), {"timeline_history": ((1, 0x700),)}),
        (replace(TABLES, timeline=2, timeline_began_lsn=0x650), {}),
        (replace(TABLES, timeline=1, position=Position(1, 0x700)), {}),  # this log has fed them: the log's timeline counts
        (None, {}),
    ],
)
def test_tables_of_another_log_go_on_if_the_server_has_all_of_theirs(tables: FedTables | None, server: dict[str, Any]):
    began = replace(LANDED.epochs[0], timeline_began_lsn=0)
    assert judged_with_tables(replace(LANDED, epochs=[began], tables=tables), 0x650, **server) == Verdict()


def test_an_old_primary_does_not_go_on_with_tables_of_another_log():
    log = replace(LANDED, epochs=[replace(EPOCH, start_lsn=0x600)], tables=OF_2)
    with pytest.raises(OtherSourceError, match="timeline 1, but the tables in /warehouse have changes of timeline 2"):
        judged_with_tables(log, timeline=1, timeline_history=())


def test_a_server_that_only_another_log_has_had_needs_an_empty_directory():
    """`land` was started after a dump and restore. Its log cannot say that the tables are of the former server."""
    log = replace(LANDED, epochs=[replace(LANDED.epochs[0], system_id="8")])
    for accepted in (None, "8"):
        with pytest.raises(StagingError, match=r"system id 7, and their log is not there: this one .* with system id 8") as caught:
            judged_with_tables(log, accepted=accepted, system_id="8")
        assert "move everything but masks.json out of this one" in (caught.value.hint or "")
        assert "--accept-system-id 8 --on-gap resnapshot" in (caught.value.hint or "")


@pytest.mark.parametrize("is_accepted_before", [False, True])
def test_tables_of_another_log_go_on_with_an_accepted_server_after_a_gap(is_accepted_before: bool):
    """The new log goes on with a slot that pg_upgrade took along. But nobody knows what the former log had beyond the tables."""
    upgraded = replace(LANDED.epochs[0], number=2, system_id="8", former_system_id="7", start_lsn=0x900)
    log = replace(LANDED, epochs=[*LANDED.epochs, upgraded]) if is_accepted_before else LANDED
    found = judged_with_tables(log, 0x980, "8", system_id="8", confirmed_flush_lsn=LSN(0x900))
    assert found.gap is not None
    assert (found.gap.after_lsn, found.resume_lsn, found.gap.is_divergence) == (0x700, 0x981, True)
    assert found.former_system_id == (None if is_accepted_before else "7")


@pytest.mark.parametrize(("later", "after", "lost_after", "is_own"), [(0x800, 0x650, 0x800, True), (0x640, 0, None, False)])
def test_the_first_place_where_tables_or_log_differ_from_the_server_counts(
    later: int, after: int, lost_after: int | None, is_own: bool
):
    """After another promotion the log, too, has changes that never happened. The second server does not know the log's timeline."""
    history = ((1, 0x650), (2, later)) if is_own else ((1, later),)
    found = judged_with_tables(LANDED, timeline=3, timeline_history=history)
    assert found.gap is not None
    assert (found.gap.after_lsn, found.resume_lsn, found.lost_after_lsn) == (after, 0x900, lost_after)


def test_the_lost_changes_of_a_recorded_gap_stay_counted():
    lost = LostChanges(2, {"public.a": 3}, 0x900)
    recorded = Gap(0x800, "gone back", 0.0, 0.0, is_divergence=True, lost=lost)
    found = judged_with_tables(replace(LANDED, recorded_gap=recorded))
    assert found.gap is not None
    assert (found.gap.after_lsn, found.gap.lost, found.lost_after_lsn) == (0x650, lost, 0x800)


@pytest.mark.parametrize(("confirmed", "resume_lsn"), [(0x2000, 0x2000), (0x900, 0x900), (0x800, 0x900)])
def test_tables_of_an_accepted_server_do_not_go_on_with_the_log_from_before_pg_upgrade(confirmed: int, resume_lsn: int):
    """An older copy of the staging directory: the slot goes on where the log ends, but the tables are not in the log."""
    tables = replace(TABLES, system_id="8", position=Position(5, 0x900))
    log = Log([EPOCH], 0x600, Account(0x600, 5.0), tables)
    server = {"system_id": "8", "timeline": 1, "timeline_history": (), "confirmed_flush_lsn": LSN(confirmed)}
    found = judged_with_tables(log, accepted="8", **server)
    assert found.gap is not None
    assert (found.gap.after_lsn, found.resume_lsn, found.former_system_id) == (0x900, resume_lsn, "7")
    assert found.gap.is_divergence == (confirmed < resume_lsn)
    assert f"and the slot is at {format_lsn(confirmed)}" in found.gap.cause
    in_order = replace(log, tables=replace(tables, position=Position(5, 0x600)))
    assert judged_with_tables(in_order, accepted="8", **server | {"confirmed_flush_lsn": LSN(0x600)}).gap is None


def test_a_plain_gap_of_the_log_begins_where_its_tables_differ():
    found = judged_with_tables(LANDED, confirmed_flush_lsn=LSN(0x1000))
    assert found.gap is not None
    assert (found.gap.after_lsn, found.resume_lsn, found.gap.is_divergence) == (0x650, 0x1000, True)
