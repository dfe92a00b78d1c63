"""Tells which changes one snapshot of the server sees, and waits until the tables have all of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import LSN, format_lsn
from spark_sink.staging.log import log_end

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import Column

    from spark_sink.client.checksum import ChecksumServer
    from spark_sink.delta.rows import Flags, Numbers
    from spark_sink.warehouse.warehouse import Source, Warehouse

__all__ = ["POLL_S", "VerifyError", "Visibility", "wait_for_log", "wait_for_tables"]

POLL_S = 0.2
_ABSENCE_S = 10.0
"""How long changes may wait in the slot without a consumer, because a launcher that is started again needs a moment."""

_XIDS = 1 << 32
_RECENT_BYTES = 1 << 36
"""In this much WAL no transaction id occurs twice, because each id costs a record of more than 16 bytes.

Older transactions count as visible, because their ids may have been used again.
"""


class VerifyError(CdcpipeError):
    """The tables could not be compared."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which transactions the server's snapshot sees: those with an id below ``xmax`` that are not in ``running``.

    Everything that it sees is in the WAL before ``wal_lsn``.
    """

    xmax: int
    running: tuple[int, ...]
    wal_lsn: int

    @property
    def recent_lsn(self) -> int:
        """The LSN up to which all transactions count as visible."""
        return self.wal_lsn - _RECENT_BYTES

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


def wait_for_log(server: ChecksumServer, source: Source, upto: int, deadline: float, tell: Callable[[str, float], None]) -> None:
    """Wait until the slot's consumer has everything up to ``upto``, or until nothing before it is left to take."""
    absent_since: float | None = None
    while True:
        slot = server.ask({"slot": source.slot, "publications": source.publications, "upto": format_lsn(upto)})
        if LSN.parse(slot["confirmed_flush_lsn"]) >= upto or not (slot["active"] or slot["pending"]):
            return
        now = time.monotonic()
        absent_since = None if slot["active"] else absent_since or now
        if absent_since is not None and now - absent_since > _ABSENCE_S:
            raise VerifyError(
                f"slot {source.slot} has changes that the tables lack, and no process takes them",
                hint="start cdcpipe-spark run first; with --available-now it ends when it has taken them",
            )
        if now > deadline:
            raise VerifyError(
                f"the log is at {slot['confirmed_flush_lsn']}, and did not reach {format_lsn(upto)} in time",
                hint="the server is sending a large transaction, or the launcher is behind: raise --timeout",
            )
        tell(f"waiting for the log to reach {format_lsn(upto)}, it is at {slot['confirmed_flush_lsn']}", 0)
        time.sleep(POLL_S)


def wait_for_tables(house: Warehouse, staging: Path, deadline: float, tell: Callable[[str, float], None]) -> None:
    """Wait until the tables are at the end of the log."""
    end = log_end(staging)
    if end is None:
        raise VerifyError(f"{staging} has no log")
    while True:
        position = house.source().position
        if position is not None and position.lsn >= end.lsn:
            return
        if time.monotonic() > deadline:
            raise VerifyError(
                f"the tables are at {position}, and did not reach {end} in time",
                hint="is cdcpipe-spark run running? If so, raise --timeout",
            )
        tell(f"waiting for the tables to reach {end}, they are at {position}", 0)
        time.sleep(POLL_S)
