"""What a pipeline records of the log's epochs, at its start and whenever the log has a new one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cdcpipe.lsn import format_lsn
from spark_sink.staging.log import epoch_numbers, former_system_ids, list_epochs, list_segments, log_end
from spark_sink.warehouse import gaps, last_look

if TYPE_CHECKING:
    from pathlib import Path

    from spark_sink.staging.log import Position
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["behind_gap", "record_epochs", "take_epochs"]

_logger = logging.getLogger(__name__)


def record_epochs(warehouse: Warehouse, staging: Path) -> None:
    """Record what the log's epochs say of gaps and of pg_upgrade. Once the tables have passed an epoch, the log may remove it."""
    epochs = list_epochs(staging)
    warehouse.open(epochs[-1], former_system_ids(epochs))  # the server may have been upgraded since the start of the run
    last_look.follow(warehouse, epochs)
    gaps.record(warehouse, epochs)


def take_epochs(warehouse: Warehouse, staging: Path) -> None:
    """Record the log's epochs, and warn if the tables were not copied since a gap. The pipeline itself copies nothing."""
    record_epochs(warehouse, staging)
    found = gaps.open_gap(warehouse)
    if found is not None:
        after = format_lsn(found.gap.after_lsn)
        _logger.warning("the tables are not right after %s until a run has copied them anew: %s", after, found.gap.cause)


def behind_gap(house: Warehouse, staging: Path, position: Position) -> Position:
    """Return the position from which to continue: if the log has no segments after ``position``, its end, which is recorded.

    Each micro-batch calls this. Only an epoch that begins after a gap ends beyond its segments, so a log without a newer epoch than
    that of ``position`` is not read.
    """
    if epoch_numbers(staging)[-1:] <= [position.epoch]:
        return position
    end = log_end(staging)
    if end is None or end.lsn <= position.lsn or list_segments(staging, position):
        return position
    house.record(end, staging)
    return end
