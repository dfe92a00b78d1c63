"""Where the locks of a warehouse in an object store are: in the staging directory of `run`, because they need a file system.

    root_in_staging(name, staging)                      # the warehouse's `Warehouse.local_root`
    check_locks(name, staging, position, epoch_token)   # before a command that is not `run` relies on locks there
    check_alone(name, staging, position)                # before `run` replaces the position that it has found

The recorded path may be that of another directory here: the staging directory was moved to another machine, say, and a copy stayed.
A lock there excludes nobody. Two programs would write the tables at one time, and a commit of the one could replace the other's.
So the log in the directory has to be the one that the tables have followed. No pyspark.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from spark_sink.staging.log import epoch_numbers, left_lsn, list_epochs
from spark_sink.warehouse.errors import WarehouseError

if TYPE_CHECKING:
    from pathlib import Path

    from spark_sink.staging.log import Position

__all__ = ["check_alone", "check_locks", "root_in_staging"]

_ELSEWHERE: Final = "run this command where the staging directory is, at the same path as for cdcpipe-spark run"


def root_in_staging(name: str, staging: Path | None) -> Path:
    """Return the directory in ``staging`` with the locks of the warehouse ``name``. Raises WarehouseError without ``staging``."""
    if staging is None or not staging.is_dir():
        raise WarehouseError(
            f"the locks of {name} are in its staging directory, which is not here: {staging or 'path not recorded'}",
            hint=_ELSEWHERE,
        )
    bucket_and_key = name.partition("://")[2].rstrip("/")  # s3a and s3 are the same store
    return staging / f"warehouse-{hashlib.sha256(bucket_and_key.encode()).hexdigest()[:8]}"


def check_locks(name: str, staging: Path, position: Position | None, epoch_token: str) -> None:
    """Raise WarehouseError if the log in ``staging`` is not that of tables which are at ``position``, or is an older copy of it.

    Each start of `run` begins an epoch, which a copy from before lacks. Ask for the position before this, because the log may go on
    meanwhile. Raises StagingError if the log is damaged.
    """
    if position is None:
        return
    epochs = list_epochs(staging)
    last = max((epoch.number for epoch in epochs), default=0)
    if last < position.epoch or left_lsn(epochs, position, epoch_token) is not None:
        raise WarehouseError(
            f"the locks of {name} are in its staging directory: {staging} here is another one, or an older copy of it",
            hint=_ELSEWHERE,
        )


def check_alone(name: str, staging: Path, position: Position) -> None:
    """Raise WarehouseError if ``position``, which the warehouse has, is beyond the epochs in ``staging``: another `run` wrote it.

    That one has a copy of the staging directory. A start refuses such a position, so it came since. If both have begun an epoch
    with the same number since the copy was made, this does not see it.
    """
    if position.epoch > epoch_numbers(staging)[-1]:
        raise WarehouseError(
            f"another run writes the tables in {name}, too: they are at {position}, which is of another staging directory",
            hint="stop the one that is not to write them: a copy of an environment needs a warehouse of its own. Then start the"
            " other one again, with --on-gap resnapshot if it says that changes are missing, and copy all tables with cdcpipe-spark"
            " snapshot",
        )
