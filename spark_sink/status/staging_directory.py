"""Finds the staging directory of a command that reads a warehouse or a log. No pyspark.

The directory is the one that the command line names, or else the one that the warehouse records. It has to exist: a path that is
not there is a mistake of the command line (exit code 1), and must not look like a log that is empty or behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdcpipe.errors import InvalidArgumentsError

if TYPE_CHECKING:
    from pathlib import Path

    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["staging_directory"]


def staging_directory(named: Path | None, house: Warehouse | None) -> Path:
    """Return the staging directory ``named``, or by default the one that the warehouse records.

    Raises InvalidArgumentsError if neither says a path, if there is no such directory, or if it is a warehouse.
    """
    if named is not None:
        if (named / "_cdcpipe").is_dir():
            raise InvalidArgumentsError(f"--staging {named} is a warehouse", hint="give the warehouse as --warehouse")
        if not named.is_dir():
            raise InvalidArgumentsError(
                f"--staging {named}: there is no such directory",
                hint="give the directory that cdcpipe-spark run or land has as --staging",
            )
        return named
    if house is None:
        raise InvalidArgumentsError("--staging DIR or --warehouse DIR has to be given", hint="--help shows the options")
    recorded = house.source().staging
    if recorded is None:
        raise InvalidArgumentsError(f"{house.name} does not record its staging directory", hint="name it: --staging DIR")
    if not recorded.is_dir():
        raise InvalidArgumentsError(
            f"{house.name} records the staging directory {recorded}, which is not here",
            hint="was it moved? Name its place: --staging DIR. Or run this command on the machine of cdcpipe-spark run",
        )
    return recorded
