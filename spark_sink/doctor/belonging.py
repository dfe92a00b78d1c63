"""Checks whether slot, staging directory, warehouse and server belong together, and how the tables of a new warehouse begin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cdcpipe.doctor.findings import Finding, Level, Verdict, error, ok, warning
from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import LSN, format_lsn
from cdcpipe.sql import quote_literal
from spark_sink.files.places import name
from spark_sink.launcher.continuity import gap_error
from spark_sink.staging import account, recorded_gap
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import OtherSourceError, has_log, list_epochs, log_end
from spark_sink.staging.same_source import check_timeline
from spark_sink.warehouse.belonging import check_belonging, fed_tables
from spark_sink.warehouse.initial_copy import oldest_copy_lsn
from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["Begun", "begin", "begun", "gone_back", "right_server", "together", "without_making"]

_WHY: Final = "run refuses them"
_REFUSED: Final = "run and land refuse it"
_SLOT_STATE: Final = "slot.state"
"""The check of ``cdcpipe doctor`` that says what is wrong with the slot."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A pipeline that has a log, or tables without their log: where, and of which server, or empty if that can't be read."""

    place: str
    system_id: str
    is_certain: bool = True
    """False if ``place`` can't be read: then nobody knows whether the pipeline is new."""
    timeline: int = 0
    """The server's timeline at the end of the changes; 0 if it is not known."""
    account_lsn: int | None = None
    """Up to where the log has everything; None without a log."""


def together(root: Path, table_format: str, staging: Path, slot: str) -> Iterator[Verdict]:
    """Judge whether ``run`` accepts the three. Reads the small files with which each side records the other.

    Only the launcher compares tables whose log is not there with the slot (launcher/continuity.py).
    """
    try:
        house = Warehouse(root, table_format)
        if house.exists:
            house = Warehouse.existing(root)  # with the choices of its first run
        check_belonging(house, staging, slot)
        tables = None if has_log(staging) else fed_tables(house, staging)
    except CdcpipeError as ex:
        yield error(ex.message, _WHY, ex.hint or "give the directories of this slot")
        return
    except OSError:  # such as a directory of another user: the checks of the directories say so
        return
    if tables is None:
        yield ok(f"{house.name} and {staging} {'belong together' if house.exists else 'can be used together'}")
    else:
        yield warning(
            f"{staging} has no log, and the tables in {house.name} are at {tables.at}",
            "if the slot is beyond that, changes may be missing, and run refuses to start",
            "give the staging directory that has their log; if it is lost, start with --on-gap resnapshot, which copies all tables"
            " anew if there is a gap",
        )


def begin(
    root: Path, table_format: str, server: Mapping[str, Any], *, creates_slot: bool, snapshot: str | None
) -> Iterator[Verdict]:
    """Judge whether a new warehouse begins with a copy of the tables' rows, given the facts about the server.

    With ``--snapshot`` the user has said what the tables begin with.
    """
    try:
        if creates_slot or snapshot is not None or not server.get("slot_exists") or Warehouse(root, table_format).exists:
            return
    except OSError:  # as in `together`
        return
    yield warning(
        "the warehouse is new, and the slot is not",
        "its tables begin without the rows from before the slot's first change",
        "run with --snapshot initial, or with -c",
    )


def begun(staging: Path, root: Path | None, table_format: str) -> Begun | None:
    """Return what was begun in the staging directory, or else in the warehouse; None for a new pipeline."""
    place, is_certain = str(staging), False
    try:
        if is_certain := has_log(staging):
            recorded, epoch = account.read(staging), list_epochs(staging)[-1]  # before the end of the log is read (account.py)
            end_lsn = 0 if (end := log_end(staging)) is None else end.lsn
            return Begun(place, epoch.system_id, True, epoch.timeline, max(end_lsn, recorded.of_log(end_lsn).lsn))
        if root is None:
            return None
        place = name(root)
        house = Warehouse(root, table_format)
        source = house.source() if house.exists else None
        if source is not None and (source.position is not None or oldest_copy_lsn(house) is not None):
            return Begun(house.name, source.system_id, True, source.timeline)
    except (CdcpipeError, OSError):  # other checks say so
        return Begun(place, "", is_certain)
    return None


def right_server(known: Begun | None, slot: str, server: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge whether the server and the slot go on with the changes that the pipeline has, given the facts about the server."""
    if known is None:
        return
    if not _is_other(known, server):
        yield from _right_place(known, slot, server)
        return
    fix = f"connect to the former server; after a pg_upgrade or a restored dump without the slot, {_anew(known, server)}"
    if server.get("slot_exists"):
        fix = (
            "connect to the former server; after a pg_upgrade that took the slot along, start with --accept-system-id"
            f" {server['system_id']}. If the slot was made since, or {known.place} is a copy from before,"
            f" SELECT pg_drop_replication_slot({quote_literal(slot)}); then {_anew(known, server)}"
        )
    said = f"{known.place} has the changes of the server with system id {known.system_id}; this server is {server['system_id']}"
    yield error(said, _REFUSED, fix)


def _right_place(known: Begun, slot: str, server: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge the timeline and the slot's position on the server of the changes. Where timelines parted, only the launcher knows."""
    if timeline := server.get("timeline"):
        try:
            check_timeline(f"{known.place} has", known.timeline, timeline)
        except OtherSourceError as ex:
            yield error(ex.message, _REFUSED, ex.hint or "")
            return
    at = LSN.parse(server.get("confirmed_flush_lsn") or "0/0")
    if known.account_lsn is not None and at > known.account_lsn:
        cause = f"slot {slot!r} is at {at}; the log has everything only up to {format_lsn(known.account_lsn)}"
        gap = gap_error(Gap(known.account_lsn, cause, 0.0, 0.0), known.place)
        yield error(cause, "the log lacks the changes in between: run and land refuse to start", gap.hint or "")


def gone_back(staging: Path) -> Iterator[Verdict]:
    """Judge whether a start has recorded a gap that no epoch of the log has yet. Each later start is refused for it."""
    try:
        gap = recorded_gap.read(staging)
        if gap is not None and all(epoch.gap != gap for epoch in list_epochs(staging)):
            refused = gap_error(gap, str(staging), record=str(staging / recorded_gap.NAME))
            yield error(refused.message, _REFUSED, refused.hint or "")
    except CdcpipeError as ex:
        yield error(ex.message, _REFUSED, ex.hint or "")
    except OSError:  # as in `together`
        return


def without_making(findings: Iterable[Finding], known: Begun | None, server: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the findings of ``cdcpipe doctor`` without the advice to make a slot, if the pipeline has or may have changes already.

    The launcher takes a slot that others have made on an upgraded server for one that pg_upgrade took along, and sees no gap
    (launcher/continuity.py).
    """
    for each in findings:
        if known is None or each.check != _SLOT_STATE:
            yield each
        elif server.get("slot_exists") is False and known.is_certain:
            message = each.message.partition(": ")[0]
            why = f"changes are missing after those in {known.place}"
            fix = f"if server and name are right, {_anew(known, server)}"
            yield replace(each, level=Level.ERROR, message=message, why=why, fix=fix)
        elif "cdcpipe prepare" in (each.fix or ""):
            unread = f"{known.place} cannot be read: make it readable, and start the doctor again before you make a slot"
            yield replace(each, fix=_anew(known, server) if known.is_certain else unread)
        else:
            yield each


def _is_other(known: Begun, server: Mapping[str, Any]) -> bool:
    return bool(known.system_id and server.get("system_id")) and known.system_id != server["system_id"]


def _anew(known: Begun, server: Mapping[str, Any]) -> str:
    accepted = f"--accept-system-id {server['system_id']} " if _is_other(known, server) else ""
    return f"start once with {accepted}-c --on-gap resnapshot, which makes the slot and copies all tables anew"
