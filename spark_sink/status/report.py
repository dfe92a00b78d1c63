"""Collects the facts for ``cdcpipe-spark status``: how far each stage is, the size of log and tables, the last error.

It reads files only, and takes no lock. If a connection is given, it asks the server through ``cdcpipe slot``. It needs no Spark and
no Java. The JSON object is a contract (docs/spark/operate.md): its keys stay.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import format_lsn
from spark_sink.files.places import map_reads
from spark_sink.schema.table import MESSAGES, mergeable_lsn, replica_begin
from spark_sink.staging import account, last_error
from spark_sink.staging.commit_times import CommitTimes
from spark_sink.staging.lock import lock_owner, read_owner
from spark_sink.staging.log import Position, epoch_directory, read_chain, removed_position
from spark_sink.staging.readers import read_readers
from spark_sink.status import ladder
from spark_sink.warehouse import dropped_tables, gaps, last_look, purged_changes, wanted_copies
from spark_sink.warehouse.belonging import check_log_of_tables
from spark_sink.warehouse.gaps import TablesGap
from spark_sink.warehouse.quiet import quiet_until
from spark_sink.warehouse.warehouse import Warehouse, encode_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_sink.client.slot_monitor import SlotReport
    from spark_sink.schema.table import Table, Version
    from spark_sink.staging.log import Epoch, Segment
    from spark_sink.status.ladder import Rung
    from spark_sink.warehouse.wanted_copies import WantedCopy

__all__ = ["Tables", "describe"]


def describe(
    root: Path,
    tables: Tables | None = None,
    report: SlotReport | None = None,
    server_error: CdcpipeError | None = None,
    *,
    least_lsn: int = 0,
) -> dict[str, Any]:
    """Return the object that `status` shows. Raises StagingError if ``root`` is no staging directory, or is damaged.

    Raises InvalidArgumentsError if the tables are not made of this log.
    ``least_lsn`` is where the log ended before the server was asked. A report of another server counts as a ``server_error``.
    """
    now = time.time()
    recorded = account.read(root)  # after the server was asked, and before the end of the log is read (account.py)
    epochs, segments, end = read_chain(root)
    if tables is not None and epochs:
        check_log_of_tables(tables.house, root, epochs)
    if report is not None and epochs and (why := _strange(report, epochs[-1], least_lsn)):
        report, server_error = None, CdcpipeError(why)
    recorded = recorded.of_log(0 if end is None else end.lsn)
    sizes = {segment.path: _size(segment.path) for segment in segments}
    removed = removed_position(root)
    rows = [] if tables is None else tables.describe()
    stages = [] if tables is None else tables.rungs(rows)
    rungs = ladder.build(report, end, stages, CommitTimes(segments), now, recorded)
    owner = lock_owner(root)
    return {
        "time": _iso(now),
        "staging": str(root),
        "warehouse": None if tables is None else tables.house.name,
        "launcher": None if owner is None else {key: owner[key] for key in owner if key != "token"},
        "last_start": read_owner(root / "lock").get("since"),
        "last_error": last_error.read(root),
        "source": None
        if not epochs
        else {
            "system_id": epochs[-1].system_id,
            "timeline": epochs[-1].timeline,
            "database": epochs[-1].database,
            "slot": epochs[-1].slot,
            "publications": list(epochs[-1].publications),
        },
        "server": None if report is None else report.found,
        "server_error": None if server_error is None else server_error.message,
        "server_error_code": None if server_error is None else int(server_error.exit_code),
        "ladder": [_rung(rung) for rung in rungs],
        "begin": str(segments[0].start if segments else end) if end is not None else None,
        "end": None if end is None else str(end),
        "account": format_lsn(max(end.lsn, recorded.lsn)) if end is not None else None,
        "removed": None if removed is None else str(removed),
        "segments": len(segments),
        "size": sum(sizes.values()),
        "epochs": [
            {
                "number": epoch.number,
                "start_lsn": format_lsn(epoch.start_lsn),
                "segments": sum(segment.epoch == epoch.number for segment in segments),
                "size": sum(sizes[segment.path] for segment in segments if segment.epoch == epoch.number),
                **_open(epoch_directory(root, epoch.number), now),
            }
            for epoch in epochs
        ],
        "readers": {
            name: {"position": str(position), **_behind(position, segments, sizes)} for name, position in read_readers(root).items()
        },
        "tables": rows,
        "gaps": [each.to_json() for each in _gaps(epochs, tables)],
        "waiting": [] if tables is None else [_waiting(each) for each in wanted_copies.waiting(tables.house)],
    }


def _waiting(wanted: WantedCopy) -> dict[str, Any]:
    """Describe a table that waits for a copy."""
    failures = wanted.failures
    return {
        "table": str(wanted.table),
        "reasons": [
            {"reason": each.text, "since": format_lsn(each.since_lsn), "found": _iso(each.found_at)} for each in wanted.reasons
        ],
        "failures": 0 if failures is None else failures.count,
        "last_failure": None if failures is None else {"time": _iso(failures.at), "message": failures.message},
    }


def _gaps(epochs: Sequence[Epoch], tables: Tables | None) -> list[TablesGap]:
    """Return the gaps of the tables, and those of the log that are not known there yet."""
    found = [] if tables is None else gaps.read(tables.house)
    return found + gaps.unrecorded(found, epochs)


def _strange(report: SlotReport, epoch: Epoch, least_lsn: int) -> str:
    """Say why the server that was asked tells nothing of the log, whose last epoch is ``epoch``; empty if it does.

    A new timeline is no reason: the server was promoted, and the launcher goes on there.
    """
    system_id, database = report.found.get("system_id"), report.found["database"]
    if system_id not in (None, epoch.system_id):
        return f"this one has system id {system_id}, but the log comes from {epoch.system_id}"
    if database != epoch.database:
        its = "is a physical one" if database is None else f"is of database {database!r}"
        return f"slot {epoch.slot!r} {its}, but the log comes from database {epoch.database!r}"
    if report.wal_lsn < least_lsn:
        ends, ended = format_lsn(report.wal_lsn), format_lsn(least_lsn)
        return f"the WAL of this one ends at {ends}, before the log's end at {ended}: it is a copy or a standby, or has gone back"
    return ""


class Tables:
    """Describes the tables of a warehouse from their own files."""

    def __init__(self, house: Warehouse) -> None:
        self.house = house
        self._tables: dict[str, Table] = {}
        self._versions: dict[str, list[Version]] = {}
        self._unpublished: set[Table] | None = None

    def describe(self) -> list[dict[str, Any]]:
        """Return an object for each table. `rungs` takes these objects."""
        tables, root = self.house.tables(), self.house.root
        versions = map_reads(self.house.versions, tables, root)
        self._tables = {str(table): table for table in tables}
        self._versions = {str(table): found for table, found in zip(tables, versions, strict=True)}
        self._unpublished = last_look.unpublished(self.house, dict(zip(tables, versions, strict=True)))
        if self.house.changelog(MESSAGES).is_dir():
            tables.append(MESSAGES)
        position = self.house.source().position
        epoch = 0 if position is None else position.epoch
        return map_reads(lambda table: self._describe(table, epoch), tables, root)

    def _describe(self, table: Table, epoch: int) -> dict[str, Any]:
        house, purged_lsn = self.house, purged_changes.last_lsn(self.house, table)
        return {
            "table": str(table),
            "directory": encode_name(table),
            "versions": len(self._versions.get(str(table), [])),
            "dropped": self._dropped(table),
            "published": None if self._unpublished is None or table == MESSAGES else table not in self._unpublished,
            "purged": format_lsn(purged_lsn) if purged_lsn else None,
            "changelog": self._facts(house.changelog(table), epoch),
            "replica": self._facts(house.replica(table), epoch) if house.format.keeps_replicas else None,
            "history": self._facts(house.history(table), epoch) if house.format.keeps_replicas else None,
        }

    def _dropped(self, table: Table) -> str | None:
        position = dropped_tables.where(self.house, table, self._versions.get(str(table), ()))
        return None if position is None else str(position)

    def rungs(self, rows: Sequence[dict[str, Any]]) -> list[tuple[str, Position | None]]:
        """Return the positions of all changelogs, all replicas and all stored histories: of each kind the one that lacks most."""
        kinds = (["replica"] if self.house.format.keeps_replicas else []) + (["history"] if self.house.keeps_history else [])
        return [("changelog", self.house.source().position), *((kind, self._lowest(rows, kind)) for kind in kinds)]

    def _lowest(self, rows: Sequence[dict[str, Any]], kind: str) -> Position | None:
        """Return the position of the replica, or of the history, that lacks most of its changelog."""
        lowest = self.house.source().position
        for row in rows:
            changelog, own = (Position.parse(row[each]["position"]) if row[each] else None for each in ("changelog", kind))
            if own is None and changelog is not None and changelog.lsn:
                own = self._beginning(row["table"])
            versions = self._versions.get(row["table"], [])
            wanted_lsn = 0 if changelog is None else mergeable_lsn(versions, changelog.lsn)
            if lowest is not None and own is not None and own.lsn < min(wanted_lsn, lowest.lsn):
                # A table may have had no change for days. Then its replica lacks only what has come since.
                has_lsn = quiet_until(self.house, self._tables[row["table"]], own.lsn)
                lowest = min(lowest, Position(lowest.epoch, has_lsn), key=lambda each: each.lsn)
        return lowest

    def _beginning(self, name: str) -> Position | None:
        """Return the position of a replica that does not exist yet, before the table's first change; None without a key."""
        begin, lsn = self.house.source().begin or Position(0, 0), replica_begin(self._versions.get(name, []))
        return None if lsn is None else Position(begin.epoch, max(begin.lsn, lsn))

    def _facts(self, path: Path, epoch: int) -> dict[str, Any] | None:
        facts = self.house.format.facts(path)
        if facts is None:
            return None
        return {
            "position": str(Position(epoch, facts.lsn)),
            "rows": facts.rows,
            "files": facts.files,
            "size": facts.size,
            "version": facts.version,
            "written": None if facts.written_ms is None else _iso(facts.written_ms / 1000),
        }


def _rung(rung: Rung) -> dict[str, Any]:
    return {
        "rung": rung.name,
        "position": rung.position,
        "commit_time": None if rung.commit_time is None else _iso(rung.commit_time),
        "behind_bytes": rung.behind_bytes,
        "behind_seconds": None if rung.behind_seconds is None else round(rung.behind_seconds, 3),
        "at_most": rung.at_most,
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _open(directory: Path, now: float) -> dict[str, Any]:
    """Return the size of an epoch's open segments, and for how long nothing was written to the one that has rested longest.

    Several are open if they wait for the disk.
    """
    size, written_at = 0, []
    for path in directory.glob("*.open"):
        with suppress(FileNotFoundError):  # sealed at this moment
            found = path.stat()
            size += found.st_size
            written_at.append(found.st_mtime)
    return {"open_size": size, "open_seconds": round(max(0.0, now - min(written_at)), 3) if written_at else None}


def _size(path: Path) -> int:
    """Return a file's size; 0 if it was sealed or removed at this moment."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _behind(position: Position, segments: list[Segment], sizes: dict[Path, int]) -> dict[str, int]:
    """Return how many segments, and how many bytes of them, a reader does not have yet."""
    ahead = [sizes[segment.path] for segment in segments if segment.end_lsn > position.lsn]
    return {"segments_behind": len(ahead), "size_behind": sum(ahead)}
