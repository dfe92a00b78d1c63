"""Tells which changes one snapshot of the server sees, and waits until the tables have all of them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from cdcpipe.errors import InitError, InvalidArgumentsError, RewoundServerError
from cdcpipe.lsn import LSN, format_lsn
from spark_sink.client.checksum import ChecksumServer
from spark_sink.staging.lock import lock_owner, owner_text
from spark_sink.staging.log import list_epochs, log_end
from spark_sink.warehouse import gaps
from spark_sink.warehouse.belonging import check_log_of_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import Column

    from spark_sink.delta.rows import Flags, Numbers
    from spark_sink.warehouse.warehouse import Source, Warehouse

__all__ = [
    "POLL_S",
    "VerifyError",
    "Visibility",
    "check_log",
    "check_server",
    "check_taken",
    "history_lsn_of",
    "wait_for",
    "wait_for_log",
    "wait_for_tables",
]

POLL_S = 0.2
_ABSENCE_S = 3.0
"""How long changes may wait in the slot when no launcher runs, because one that is started again needs a moment."""
_LOOK_S = 30.0
"""The time between two looks for changes in the slot while a launcher runs, because it can't take the slot during a look."""
_STALL_S = 30.0
"""How long the tables may stand still when no launcher runs. A pipeline of a program's own may be slow."""
_STAGING_HINT = "give the directory that cdcpipe-spark run has as --staging: --staging DIR"
_START_HINT = "start cdcpipe-spark run, or run --available-now, which ends when the tables have all changes"

_XIDS = 1 << 32
_RECENT_BYTES = 1 << 36
"""In this much WAL no transaction id occurs twice, because each id costs a record of more than 16 bytes.

Older transactions count as visible, because their ids may have been used again.
"""


class VerifyError(InitError):
    """The comparison could not be prepared: the tables did not get the changes that the server has (exit code 2)."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which transactions the server's snapshot sees: those with an id below ``xmax`` that are not in ``running``.

    Everything that it sees is in the WAL before ``wal_lsn``. Up to ``history_lsn`` the changelogs may have changes of another
    history, from before a failover or a restore. Its transaction ids say nothing about this server.
    """

    xmax: int
    running: tuple[int, ...]
    wal_lsn: int
    history_lsn: int = 0

    @property
    def recent_lsn(self) -> int:
        """The LSN up to which all transactions count as visible."""
        return max(self.wal_lsn - _RECENT_BYTES, self.history_lsn)

    def sees(self) -> Column:
        """Return an expression: whether the snapshot sees a change."""
        xid = F.col("_cdc_xid")
        # Compare modulo 2^32, as PostgreSQL does: the stream has only the lower half of an id.
        is_later = F.pmod(xid - F.lit(self.xmax % _XIDS), F.lit(_XIDS)) < _XIDS // 2
        is_running = xid.isin([running % _XIDS for running in self.running])
        is_old = F.col("_cdc_end_lsn") <= self.recent_lsn
        # Rows that were copied by a snapshot have no transaction id. Those of a later snapshot are not visible.
        is_taken_later = xid.isNull() & (F.col("_cdc_end_lsn") > self.wal_lsn)
        return is_old | ~F.coalesce(is_later | is_running | is_taken_later, F.lit(False))

    def seen(self, end_lsn: Numbers, xids: pa.Array) -> Flags:
        """Return for each of some changes whether the snapshot sees it, from their end LSNs and transaction ids."""
        xid, has_xid = xids.fill_null(0).to_numpy(), xids.is_valid().to_numpy(zero_copy_only=False)
        is_later = (xid - self.xmax) % _XIDS < _XIDS // 2
        is_running = np.isin(xid, [running % _XIDS for running in self.running])
        is_old = end_lsn <= self.recent_lsn
        return is_old | np.where(has_xid, ~(is_later | is_running), end_lsn <= self.wal_lsn)


def check_log(house: Warehouse, staging: Path) -> None:
    """Raise InvalidArgumentsError unless the staging directory has the log that the tables are made of."""
    epochs = list_epochs(staging)
    if not epochs:
        raise InvalidArgumentsError(f"{staging} has no log, so it is not known how far the tables have to come", hint=_STAGING_HINT)
    check_log_of_tables(house, staging, epochs)


def history_lsn_of(house: Warehouse) -> int:
    """Return the LSN up to which the tables may have changes of another history: the end of the newest gap; 0 without one."""
    return max((each.start.lsn for each in gaps.read(house)), default=0)


def check_server(server: ChecksumServer, house: Warehouse) -> LSN:
    """Return where the server's WAL ends. Raises an error if the server is not the one that the tables' changes come from.

    It is not if it has gone back behind these changes, and no gap is recorded for that yet. A server that has gone back and has
    written as much since then can't be told from the right one here. The launcher can, if there is a new timeline.
    """
    # Before the server is asked, because the tables go on.
    position, history_lsn = house.source().position, history_lsn_of(house)
    begun = server.ask({"begin": []})
    hint = "connect to the server and the database of these changes"
    house.check_source("but the server has", hint, system_id=begun["system_id"], database=begun["database"])
    wal_lsn = LSN.parse(begun["wal_lsn"])
    if position is not None and position.lsn > max(wal_lsn, history_lsn):
        raise VerifyError(
            f"{RewoundServerError.BEGINNING}its WAL ends at {wal_lsn}, but {house.name} has its changes up to"
            f" {format_lsn(position.lsn)}",
            hint="connect to the server of these changes; or, if this one was restored from an older copy or lacked them when it"
            " was promoted, start cdcpipe-spark run, which says how to go on",
        )
    return wal_lsn


def check_taken(connection: Sequence[str], house: Warehouse, staging: Path, tell: Callable[[str, float], None]) -> None:
    """Raise an error if the server or the staging directory is another one, or if nobody takes the changes. Takes a second.

    The command calls this before it starts Spark, which takes longer.
    """
    check_log(house, staging)
    tell("asking the server", 0)
    with ChecksumServer(connection) as server:
        wal_lsn = check_server(server, house)
        wait_for_log(server, house.source(), staging, int(wal_lsn), math.inf, tell, until_taken=True)


def wait_for_log(
    server: ChecksumServer,
    source: Source,
    staging: Path,
    upto: int,
    deadline: float,
    tell: Callable[[str, float], None],
    *,
    until_taken: bool = False,
) -> None:
    """Wait until the slot's consumer has everything up to ``upto``, or until nothing before it is left to take.

    If nobody takes the changes, this is an error within seconds: no process that lands holds the lock of the staging directory, and
    no connection uses the slot. With ``until_taken``, return as soon as somebody takes them.
    """
    absent_since: float | None = None
    look_at = -math.inf
    while True:
        slot = server.ask({"slot": source.slot})
        owner = lock_owner(staging)
        now = time.monotonic()
        is_absent = not slot["active"] and (owner is None or not owner.get("lands", True))
        if LSN.parse(slot["confirmed_flush_lsn"]) >= upto or (until_taken and not is_absent):
            return
        if is_absent and absent_since is not None and (now - absent_since > _ABSENCE_S or now > deadline):
            raise _not_taken(source.slot, owner)
        if not slot["active"] and (is_absent or now >= look_at):
            if not server.ask({"pending": source.slot, "publications": source.publications, "upto": format_lsn(upto)}):
                return
            look_at = now + _LOOK_S
        absent_since = (absent_since or now) if is_absent else None
        if not is_absent and now > deadline:
            raise VerifyError(
                f"the log is at {slot['confirmed_flush_lsn']}, and did not reach {format_lsn(upto)} in time",
                hint="the server is sending a large transaction, or the launcher is behind: raise --timeout"
                if owner is None or slot["active"]
                else f"the launcher ({owner_text(owner)}) does not use the slot now: its messages say why",
            )
        where = f"the log to reach {format_lsn(upto)}, it is at {slot['confirmed_flush_lsn']}"
        tell(f"waiting for {where}{'; no launcher runs' if is_absent else ''}", 0)
        time.sleep(POLL_S)


def _not_taken(slot: str, owner: dict[str, Any] | None) -> VerifyError:
    """Return the error that nobody takes the slot's changes. ``owner`` holds the staging directory, and lands nothing any more."""
    what = f"slot {slot} may have changes that the tables lack, and no process takes them"
    if owner is None:
        return VerifyError(what, hint=_START_HINT)
    return VerifyError(
        f"{what}: run ({owner_text(owner)}) only brings the tables up to date", hint="wait until it has ended, and start run again"
    )


def wait_for_tables(house: Warehouse, staging: Path, deadline: float, tell: Callable[[str, float], None]) -> None:
    """Wait until the tables are at the end of the log.

    If no launcher runs and the tables do not come further for a while, this is an error before the deadline.
    """
    end = log_end(staging)
    if end is None:
        raise VerifyError(f"{staging} has no log", hint=_STAGING_HINT)

    def missing() -> str | None:
        position = house.source().position
        return None if position is not None and position.lsn >= end.lsn else f"the tables to reach {end}, they are at {position}"

    if not wait_for(missing, staging, deadline, tell):
        raise VerifyError(
            f"the tables are at {house.source().position}, and did not reach {end}, the end of the log, in time",
            hint=_START_HINT
            if lock_owner(staging) is None
            else "is it cdcpipe-spark land that runs? Then start run in its place. If run is behind, raise --timeout",
        )


def wait_for(missing: Callable[[], str | None], staging: Path, deadline: float, tell: Callable[[str, float], None]) -> bool:
    """Wait for something that a pipeline makes, and tell whether it is there.

    ``missing`` says what is waited for; None once it is there. Without a launcher, and with the same text, the wait is short.
    """
    last: str | None = None
    last_at = time.monotonic()
    while (what := missing()) is not None:
        now, is_absent = time.monotonic(), lock_owner(staging) is None
        if what != last or not is_absent:
            last, last_at = what, now
        if now > deadline or now - last_at > _STALL_S:
            return False
        tell(f"waiting for {what}{'; no launcher runs' if is_absent else ''}", 0)
        time.sleep(POLL_S)
    return True
