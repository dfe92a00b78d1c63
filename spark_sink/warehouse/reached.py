"""Up to which LSN the tables have all published changes. No Spark."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spark_sink.files.local import DamagedFileError
from spark_sink.staging import account
from spark_sink.staging.log import StagingError, log_end

if TYPE_CHECKING:
    from spark_sink.warehouse.warehouse import Source, Warehouse

__all__ = ["reached_lsn"]

_logger = logging.getLogger(__name__)


def reached_lsn(house: Warehouse, source: Source) -> int:
    """Return the LSN up to which the tables have all published changes; 0 for tables without any change.

    It is beyond their last change if the tables have the whole log, and the log is known to be complete up to there.
    """
    if source.position is None:
        return 0
    try:
        known = account.Account() if source.staging is None else account.read(source.staging)
        if source.staging is not None and known.lsn > source.position.lsn:
            end, position = log_end(source.staging), house.source().position
            if end is not None and position is not None and position.lsn >= end.lsn:
                return known.of_log(end.lsn).lsn or source.position.lsn
    except (OSError, StagingError, DamagedFileError) as ex:
        _logger.info("cannot read the log in %s: %s", source.staging, ex)
    return source.position.lsn
