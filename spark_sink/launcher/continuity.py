"""Judges whether a slot continues the staging log, before anything is streamed. No I/O.

The launcher has an account of the slot (staging/account.py): nothing beyond it was ever confirmed by us. `judge` compares the
account with what ``cdcpipe prepare`` has found on the server:

| what it finds | verdict |
|---|---|
| the slot is at the account, or behind it | the log goes on; what the server sends again is skipped |
| the slot is beyond the account: dropped and made again, advanced, or read by another consumer | a gap |
| a new timeline that branched off at the log's end or later | the log goes on, on the new timeline |
| a new timeline that branched off before the log's end | a gap: the log has changes that the new primary never had |
| a new timeline that branched off before the newest copy of a table, which may be beyond the log's end | a gap of the same kind |
| the same timeline, which began elsewhere: two standbys were promoted, and both called their timeline 2 | as a new timeline |
| a server that has gone back behind the log's end (diverged.json) | a gap of the same kind |
| a server that has gone back behind the newest copy of a table, but not behind the log's end | the same |
| tables beyond the log's end: the staging directory is an older copy, and the server may be one, too | a gap |
| the same, and `land` has gone on beyond them since: the log has another epoch with the number of theirs | a gap |
| tables that another log has fed: `land` has begun this one, without them | `judge_own_history` compares them with the server |
| another system id | an error, unless the user accepts this id |
| an accepted one, with a slot that pg_upgrade took along | the log goes on |
| an accepted one, with another slot | a gap: nobody knows what happened before this slot was made |
| an accepted one, and a recorded gap (diverged.json) | that gap: the slot may be one that a launcher made before it was killed |
| an accepted one, with tables whose log is not there any more | a gap |
| an accepted one that the tables know already, while the log is an older copy from before that | a gap |
| tables whose log is not there any more | `judge_lost_log`: a gap if the slot is beyond the tables |
| the same, with a timeline that branched off before the tables, or before the newest copy of one | a gap |
| the same, with a server that has gone back behind the newest copy of a table (`tables_gone_back`, diverged.json) | a gap |
| the same, with tables whose timeline is not known | a gap if any timeline branched off before them |

After a gap the log goes on at the slot's position, or if that is later, at the log's end or where the tables are. Source: the
manual, "Streaming Replication Protocol", TIMELINE_HISTORY; "Logical Decoding Concepts".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cdcpipe.errors import GapError, RewoundServerError
from cdcpipe.lsn import format_lsn
from cdcpipe.units import format_size
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import StagingError, former_system_ids, left_lsn, passing_lsn
from spark_sink.staging.same_source import check_timeline, common_history_lsn, is_elsewhere, parted_lsn, upgrade_hint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from spark_sink.client.prepare import Prepared
    from spark_sink.staging.account import Account
    from spark_sink.staging.log import Epoch, Position

__all__ = [
    "FedTables",
    "Log",
    "Verdict",
    "awaited_gap",
    "check_tables",
    "gap_error",
    "gone_back",
    "gone_back_behind_copy",
    "judge",
    "judge_lost_log",
    "judge_own_history",
    "missing_slot",
    "tables_gone_back",
    "taken_along",
]


@dataclass(frozen=True, slots=True)
class FedTables:
    """A warehouse that is fed from the log: its name, its source, and its position.

    Tables without a position that need a log from before this one's beginning have that of their oldest copy. In an epoch that is
    not known, its number is 0.
    """

    name: str
    system_id: str
    database: str
    staging: Path | None
    """The staging directory that it records."""
    position: Position
    epoch_token: str = ""
    """The token of the position's epoch, if it is known."""
    reached_lsn: int = 0
    """How far the log remembers the tables; 0 if it does not know them. Beyond the position: the tables are an older copy."""
    timeline: int = 0
    """The timeline of the position; 0 if it is not known, as right after pg_upgrade."""
    timeline_began_lsn: int = 0
    """Where that timeline branched off the one before; 0 on the first timeline, and if it is not known."""

    @property
    def at(self) -> str:
        """The position, for messages."""
        return str(self.position) if self.position.epoch else f"{format_lsn(self.position.lsn)} (their oldest copy)"


@dataclass(frozen=True, slots=True)
class Log:
    """What the staging directory says before the launcher begins an epoch."""

    epochs: Sequence[Epoch]
    end_lsn: int
    account: Account
    """`Account.lsn` is at least ``end_lsn``."""
    tables: FedTables | None = None
    """The warehouse that is fed from this log, if there is one."""
    recorded_gap: Gap | None = None
    """The gap that an earlier start has recorded (staging/recorded_gap.py)."""
    copied_lsn: int = 0
    """The LSN of the newest copy of a table. Only a server that has gone back, a new timeline and another server need it."""
    begin_lsn: int = 0
    """Where the log began when the launcher started; 0 later, when ``tables`` are not news any more."""

    @property
    def fed_by_another(self) -> FedTables | None:
        """The tables, if their position is not in this log: another log has fed them, or this one is an older copy of theirs.

        A launcher that knows tables begins an epoch with a number beyond theirs (`Opening`).
        """
        tables = self.tables
        if tables is None:
            return None
        is_other = tables.position.epoch > self.epochs[-1].number
        return tables if is_other or left_lsn(self.epochs, tables.position, tables.epoch_token) is not None else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the log goes on."""

    gap: Gap | None = None
    account_lsn: int | None = None
    """The account has to become this before the epoch begins; None if it stays."""
    former_system_id: str | None = None
    is_new_timeline: bool = False
    """Whether the server has left the timeline of the last epoch."""
    resume_lsn: int = 0
    """Where the stream goes on after a gap."""
    lost_after_lsn: int | None = None
    """The LSN after which the log has changes that never happened. None if it is the gap's ``after_lsn``."""

    @property
    def is_new_epoch(self) -> bool:
        """Whether a launcher that is already in an epoch needs another one."""
        return self.gap is not None or self.former_system_id is not None or self.is_new_timeline


def judge(log: Log, prepared: Prepared, accepted_system_id: str | None, now: float) -> Verdict:
    """Return how ``log``, which has an epoch, goes on with the slot that ``prepared`` describes."""
    last = log.epochs[-1]
    confirmed = int(prepared.confirmed_flush_lsn)
    known_lsn = max(log.end_lsn, log.copied_lsn)
    common_lsn = max(confirmed, log.end_lsn, 0 if log.tables is None else log.tables.position.lsn)
    # Beyond the copy, because a copy from there on counts as one that was made after the gap.
    resume_lsn = max(common_lsn, log.copied_lsn + 1)
    if prepared.system_id != last.system_id and prepared.system_id == accepted_system_id:
        return replace(_judge_other_server(log, prepared, resume_lsn, now), former_system_id=last.system_id)
    if log.recorded_gap is not None:
        return Verdict(log.recorded_gap, log.recorded_gap.after_lsn, resume_lsn=resume_lsn)
    right_lsn = log.account.lsn
    if prepared.timeline > last.timeline:
        branch_lsn: int | None = common_history_lsn(log.epochs, prepared)
    else:
        branch_lsn = parted_lsn(last.timeline, last.timeline_began_lsn, prepared)
    is_new_timeline = branch_lsn is not None
    if branch_lsn is not None:
        if branch_lsn < known_lsn:
            gap = _diverged(log, prepared, branch_lsn, now)
            return Verdict(gap, gap.after_lsn, resume_lsn=resume_lsn)
        right_lsn, resume_lsn = min(right_lsn, branch_lsn), common_lsn  # the copies are of what both timelines have
    account_lsn = right_lsn if right_lsn < log.account.lsn else None
    if log.tables is not None and (left := _left(log, log.tables)) is not None:
        cause = (
            f"the tables are at {log.tables.position}, and have other changes than the log after {format_lsn(left)}: the staging"
            " directory is an older copy, with which a launcher has gone on"
        )
        gap = Gap(min(left, right_lsn), cause, log.account.time, now)
        return Verdict(gap, account_lsn, resume_lsn=resume_lsn)
    if log.tables is not None and _is_before(log, log.tables):
        cause = (
            f"the tables are at {log.tables.at}, but the log begins at {format_lsn(log.begin_lsn)}: their log was lost,"
            " and this one was begun without them"
        )
        gap = Gap(log.tables.position.lsn, cause, 0.0, now)
        return Verdict(gap, account_lsn, resume_lsn=resume_lsn)
    cause = _cause(log, prepared, right_lsn)
    if cause:
        gap = Gap(right_lsn, cause, log.account.time, now, is_divergence=confirmed < resume_lsn)
        return Verdict(gap, account_lsn, resume_lsn=resume_lsn)
    return Verdict(account_lsn=account_lsn, is_new_timeline=is_new_timeline)


def _diverged(log: Log, prepared: Prepared, branch_lsn: int, now: float) -> Gap:
    """Return the gap on a timeline that branched off the log's last one at ``branch_lsn``, before its end or the newest copy."""
    last, known_lsn = log.epochs[-1], max(log.end_lsn, log.copied_lsn)
    is_same = prepared.timeline == last.timeline
    theirs = f"another server's timeline {last.timeline}" if is_same else f"timeline {last.timeline}"
    said = f"timeline {prepared.timeline} branched off at {format_lsn(branch_lsn)}"
    gap = Gap(min(branch_lsn, log.account.lsn), "", log.account.time, now, is_divergence=True)
    awaited = awaited_gap(log.epochs, log.end_lsn)
    if awaited is not None and log.copied_lsn < log.end_lsn:  # what the log has before its end is lost already, with that gap
        cause = f"{said}, before {format_lsn(log.end_lsn)}, after which nothing has come from {theirs} yet. Before, {awaited.cause}"
        return replace(gap, cause=cause, lost=awaited.lost if branch_lsn >= awaited.after_lsn else None)
    has = f"the log has changes of {theirs} up to" if branch_lsn < log.end_lsn else f"a table was copied on {theirs} at"
    cause = f"{said}, but {has} {format_lsn(known_lsn)}: the server that was promoted or restored never had these"
    return replace(gap, cause=cause)


def awaited_gap(epochs: Sequence[Epoch], end_lsn: int) -> Gap | None:
    """Return the gap of changes that never happened, at the end of the log: the server's WAL may still be before it. None if none.

    Each start begins an epoch. So the one with the gap is not the last one after a start during the wait.
    """
    found = [epoch.gap for epoch in epochs if epoch.start_lsn == end_lsn and epoch.gap is not None and epoch.gap.is_divergence]
    return found[-1] if found else None


def _judge_other_server(log: Log, prepared: Prepared, resume_lsn: int, now: float) -> Verdict:
    """Return how the log goes on with a server that the user has named: the former one after pg_upgrade, or another one.

    pg_upgrade refuses slots with changes that were not consumed, and makes the others anew in the new cluster, whose WAL begins
    after that of the old one. So a slot from before that, or one that was made just now, is none that pg_upgrade took along.
    """
    confirmed, slot = int(prepared.confirmed_flush_lsn), log.epochs[-1].slot
    if log.recorded_gap is not None:
        return Verdict(log.recorded_gap, log.end_lsn, resume_lsn=resume_lsn)
    if confirmed >= log.account.lsn and not prepared.slot_created:
        return Verdict(account_lsn=confirmed)
    which = "is a new one" if prepared.slot_created else f"is at {format_lsn(confirmed)}, before {format_lsn(log.account.lsn)}"
    cause = f"the server has system id {prepared.system_id} now, and pg_upgrade has not taken slot {slot!r} along: it {which}"
    gap = Gap(log.account.lsn, cause, log.account.time, now, is_divergence=confirmed < resume_lsn)
    return Verdict(gap, log.end_lsn, resume_lsn=resume_lsn)


def _cause(log: Log, prepared: Prepared, right_lsn: int) -> str:
    """Say what has happened if the slot is beyond ``right_lsn``, or the tables beyond the log; empty if neither is."""
    confirmed, cause = int(prepared.confirmed_flush_lsn), ""
    at = format_lsn(confirmed)
    if confirmed > right_lsn:
        cause = f"slot {log.epochs[-1].slot!r} is at {at}, but the log has everything only up to {format_lsn(right_lsn)}"
        if prepared.slot_created:
            cause += ": the slot was gone, and is a new one"
    if log.tables is not None and log.tables.position.lsn > log.end_lsn:
        cause += ". The " if cause else "the "
        cause += f"tables are at {log.tables.position}, beyond the end of the log: the staging directory is an older copy"
        if confirmed < log.tables.position.lsn:
            cause += f". The slot is at {at}: the server may be an older copy, too, which never had their last changes"
    return cause


def _left(log: Log, tables: FedTables) -> int | None:
    """Return from where on the log and ``tables`` differ, although the log goes on beyond them; None if they don't."""
    return None if tables.position.lsn > log.end_lsn else left_lsn(log.epochs, tables.position, tables.epoch_token)


def _is_before(log: Log, tables: FedTables) -> bool:
    """Tell whether the log lacks changes that the tables need, before its beginning. An older copy of the tables is no such case.

    The pipeline refuses such a copy, because the newer one may still be there.
    """
    lsn = tables.position.lsn
    return tables.reached_lsn <= lsn < log.begin_lsn and passing_lsn(log.epochs, lsn, log.begin_lsn) is None


def judge_lost_log(
    tables: FedTables,
    prepared: Prepared,
    accepted_system_id: str | None,
    copied_lsn: int,
    now: float,
    recorded_gap: Gap | None = None,
) -> Verdict:
    """Return how a new log begins for ``tables`` whose former log is not there any more, and whose newest copy is ``copied_lsn``.

    ``recorded_gap`` is the gap of `tables_gone_back`, of this start or an earlier one.

    The new log begins where the tables are. The former log may have had changes that are not in the tables and that the server has
    forgotten: then there is a gap. So there is if the tables have changes that the server never had, and with another server that
    the user has accepted: pg_upgrade takes a slot along only if the log had all of its changes. Raises StagingError if the tables
    have those of another server or database, or of a newer timeline.
    """
    is_accepted = prepared.system_id == accepted_system_id
    check_tables(tables, prepared.system_id, prepared.database, is_accepted=is_accepted)
    confirmed, reached = int(prepared.confirmed_flush_lsn), tables.position.lsn
    resume_lsn = max(confirmed, reached, copied_lsn + 1)  # beyond the copy, as in `judge`
    if prepared.system_id != tables.system_id:
        gap = _lost_log(tables, f"the server has system id {prepared.system_id} now", now)
        gap = recorded_gap or replace(gap, is_divergence=confirmed < resume_lsn)
        return Verdict(gap, former_system_id=tables.system_id, resume_lsn=resume_lsn)
    check_timeline(f"the tables in {tables.name} have", tables.timeline, prepared.timeline)
    if recorded_gap is not None:
        return Verdict(recorded_gap, resume_lsn=resume_lsn)
    branch_lsn = _tables_branch(tables, prepared)
    if branch_lsn is not None and branch_lsn < max(reached, copied_lsn):
        return Verdict(_diverged_tables(tables, prepared, branch_lsn, copied_lsn, now), resume_lsn=resume_lsn)
    if confirmed <= reached and not prepared.slot_created:
        return Verdict(resume_lsn=reached)
    at = "is new, and begins at" if prepared.slot_created else "is at"
    return Verdict(_lost_log(tables, f"the slot {at} {format_lsn(confirmed)}", now), resume_lsn=max(confirmed, reached))


def judge_own_history(log: Log, verdict: Verdict, prepared: Prepared, copied_lsn: int, now: float) -> Verdict:
    """Return how ``log`` goes on if another log has fed its tables. ``verdict`` is that of `judge`, and stays if they have no gap.

    The log tells nothing of the tables' own history, so they are compared with the server as if there were no log. Raises
    StagingError if they have the changes of a server that the log has never had, or what `judge_lost_log` raises.
    """
    tables = log.fed_by_another
    if tables is None:
        return verdict
    last = log.epochs[-1]
    if tables.system_id not in {prepared.system_id, last.system_id, *former_system_ids(log.epochs)}:
        raise StagingError(
            f"the tables in {tables.name} come from the server with system id {tables.system_id}, and their log is not there: this"
            f" one was begun without them, on the server with system id {last.system_id}",
            hint="connect to their server, and give their staging directory if it still exists; otherwise move everything but"
            f" masks.json out of this one, and start run with --accept-system-id {prepared.system_id} --on-gap resnapshot",
        )
    tables = replace(tables, staging=None)  # what is there now is not their log
    own = judge_lost_log(tables, prepared, prepared.system_id, copied_lsn, now)  # `judge` has refused one that is not accepted
    found = verdict.gap
    if found is None and verdict.former_system_id is not None and (own.gap is not None or tables.position.lsn > log.end_lsn):
        # The log is that of the server before pg_upgrade. So it cannot tell what they lack, and they are not in it.
        own_gap = own.gap or _lost_log(tables, f"the slot is at {format_lsn(int(prepared.confirmed_flush_lsn))}", now)
    elif own.gap is None or not (own.gap.is_divergence or own.former_system_id):
        return verdict  # whether the slot is beyond what they have: the log tells that
    else:
        own_gap = own.gap
    resume_lsn = max(verdict.resume_lsn, own.resume_lsn, log.end_lsn)
    if found is not None and found.is_divergence and found.after_lsn <= own_gap.after_lsn:
        return replace(verdict, resume_lsn=resume_lsn)
    after_lsn = own_gap.after_lsn if found is None else min(own_gap.after_lsn, found.after_lsn)
    is_divergence = own_gap.is_divergence or int(prepared.confirmed_flush_lsn) < resume_lsn
    gap = replace(own_gap, after_lsn=after_lsn, is_divergence=is_divergence)
    lost_after_lsn = log.end_lsn
    if found is not None and found.is_divergence:  # the log, too, has changes that never happened
        gap, lost_after_lsn = replace(gap, lost=found.lost), found.after_lsn
    return replace(verdict, gap=gap, resume_lsn=resume_lsn, lost_after_lsn=lost_after_lsn)


def _tables_branch(tables: FedTables, prepared: Prepared) -> int | None:
    """Return the LSN up to which the tables and the server's timeline have the same history; None if the timeline is theirs."""
    if not tables.timeline:
        # They may be on any timeline, also on one that the server does not know. All have what is before the first branch.
        return min((lsn for _, lsn in prepared.timeline_history), default=None)
    parted = parted_lsn(tables.timeline, tables.timeline_began_lsn, prepared)
    if parted is not None or prepared.timeline <= tables.timeline:
        return parted
    return dict(prepared.timeline_history).get(tables.timeline, 0)


def _diverged_tables(tables: FedTables, prepared: Prepared, branch_lsn: int, copied_lsn: int, now: float) -> Gap:
    reached = tables.position.lsn
    theirs = f"timeline {tables.timeline}"
    if tables.timeline == prepared.timeline:
        theirs = f"another server's {theirs}"
    elif not tables.timeline:
        theirs = "a timeline that is not known"
    # Nobody knows on which timeline a copy was made.
    never = "never had" if tables.timeline and branch_lsn < reached else "may never have had"
    copied = f", and have a copy from {format_lsn(copied_lsn)}" if copied_lsn > reached else ""
    cause = (
        f"timeline {prepared.timeline} branched off at {format_lsn(branch_lsn)}, but the tables in {tables.name} have changes of"
        f" {theirs} up to {format_lsn(reached)}{copied}: the server that was promoted or restored {never} these, and"
        f" {_their_log(tables)} is not there"
    )
    return Gap(min(branch_lsn, reached), cause, 0.0, now, is_divergence=True)


def check_tables(tables: FedTables, system_id: str, database: str | None, *, is_accepted: bool = False) -> None:
    """Raise StagingError if ``tables`` have the changes of another server or database. None for a database that is not known.

    ``is_accepted``: the user has accepted this system id.
    """
    is_other = system_id != tables.system_id
    if (is_other and not is_accepted) or database not in (None, tables.database):
        this = "a database" if database is None else repr(database)
        upgraded = f"; {upgrade_hint(system_id, is_log_lost=True)}" if is_other else ""
        raise StagingError(
            f"the tables in {tables.name} come from database {tables.database!r} of the server with system id {tables.system_id},"
            f" and this is {this} of {system_id}",
            hint=f"connect to their server; give another database its own slot, staging directory and warehouse{upgraded}",
        )


def _lost_log(tables: FedTables, slot: str, now: float) -> Gap:
    cause = f"the tables in {tables.name} are at {tables.at}; {_their_log(tables)} is not there, and {slot}"
    return Gap(tables.position.lsn, cause, 0.0, now)


def _their_log(tables: FedTables) -> str:
    return "their log" if tables.staging is None else f"their log, {tables.staging},"


def gone_back(log: Log, prepared: Prepared, cause: str, now: float) -> Gap:
    """Return the gap if the server's WAL ends before the log, on the same timeline. ``cause`` is what the streamer says of it.

    Nothing tells where the histories parted. But the slot was restored with the server, so they did not part before its position.
    """
    after_lsn = min(int(prepared.confirmed_flush_lsn), log.end_lsn)
    return Gap(after_lsn, cause, log.account.time, now, is_divergence=True)


def gone_back_behind_copy(log: Log, prepared: Prepared, copied_lsn: int) -> str:
    """Say that the server's WAL ends before ``copied_lsn``, a copy's position that was known before the server was asked.

    Empty if it does not, or if something else tells. A log that ends beyond the copy is compared with the WAL by the streamer.
    """
    is_other = is_elsewhere(log.epochs[-1], prepared) or prepared.is_standby
    if log.recorded_gap is not None or is_other or not max(prepared.wal_lsn, log.end_lsn) < copied_lsn:
        return ""
    return _ends_before_copy(prepared, copied_lsn)


def tables_gone_back(tables: FedTables, prepared: Prepared, copied_lsn: int, now: float) -> Gap | None:
    """Return the gap if the server's WAL ends before the newest copy of ``tables``, whose log has gone; None if there is none."""
    is_source = (prepared.system_id, prepared.database) == (tables.system_id, tables.database)
    is_there = tables.timeline in (0, prepared.timeline) and _tables_branch(tables, prepared) is None
    if not (is_source and is_there) or prepared.is_standby or not max(prepared.wal_lsn, tables.position.lsn) < copied_lsn:
        return None
    after_lsn = min(int(prepared.confirmed_flush_lsn), tables.position.lsn)  # as in `gone_back`
    cause = f"{_ends_before_copy(prepared, copied_lsn)}, and {_their_log(tables)} is not there"
    return Gap(after_lsn, cause, 0.0, now, is_divergence=True)


def _ends_before_copy(prepared: Prepared, copied_lsn: int) -> str:
    ends, at = format_lsn(prepared.wal_lsn), format_lsn(copied_lsn)
    return f"{RewoundServerError.BEGINNING}its WAL ends at {ends}, before {at}, where tables were copied"


def missing_slot(log: Log | None, tables: FedTables | None, slot: str, now: float) -> Gap | None:
    """Return the gap if the slot does not exist any more; None if there is neither a log nor tables yet."""
    if log is None:
        return None if tables is None else _lost_log(tables, f"slot {slot!r} does not exist any more", now)
    at = format_lsn(log.account.lsn)
    return Gap(log.account.lsn, f"slot {slot!r} does not exist any more; the log has everything up to {at}", log.account.time, now)


_HINT = (
    "a slot gets there if it was dropped and made again, if pg_replication_slot_advance() moved it, or if another consumer read"
    " from it; the same is seen if {place} is an older copy. If there is a newer copy of it, restore that one. Otherwise"
    " --on-gap resnapshot goes on with the slot and copies all tables anew"
)


_DIVERGENCE_HINT = (
    "if this is the wrong server, connect to the right one{record}. Otherwise --on-gap resnapshot goes on with this server and"
    " copies all tables anew, so that what never happened there leaves them"
)


def gap_error(gap: Gap, place: str, resume_lsn: int = 0, record: str | None = None) -> GapError:
    """Return the error for a gap in the log in ``place``, for users who want to stop there.

    ``record`` is the path of the file in which the gap is recorded, if there is one.
    """
    size = f"; {format_size(resume_lsn - gap.after_lsn)} of WAL lie between" if resume_lsn > gap.after_lsn else ""
    hint = _HINT.format(place=place)
    if gap.is_divergence:
        size = "" if gap.lost is None else f"; they are {gap.lost}"
        hint = _DIVERGENCE_HINT.format(record="" if record is None else f", after you have deleted {record}")
    return GapError(f"{GapError.BEGINNING}{gap.cause}{size} ({_last_known(gap.since)})", hint=hint)


def taken_along(log: Log, prepared: Prepared, place: str) -> str:
    """Return the warning that the slot of an accepted server counts as taken along by pg_upgrade, so that nothing is missing.

    Nothing tells whether the log in ``place`` is a copy from before the upgrade. Then what came between the two is missing.
    """
    slot, confirmed = log.epochs[-1].slot, prepared.confirmed_flush_lsn
    return (
        f"slot {slot!r} counts as taken along by pg_upgrade, so that no change is missing: {_last_known(log.account.time)}, up to"
        f" {format_lsn(log.account.lsn)}, and the slot is at {confirmed}, {format_size(confirmed - log.account.lsn)} of WAL later."
        f" If {place} is a copy from before the upgrade, stop, put the copy back once more, drop the slot, and start once"
        " with -c --on-gap resnapshot"
    )


def _last_known(time: float) -> str:
    when = datetime.fromtimestamp(time, UTC).isoformat(" ", "seconds") if time else "an unknown time"
    return f"the log was last known to be complete at {when}"
