"""Fills new columns of a small replica without Spark.

    fill_without_spark(warehouse, table, piece)      # True: the rows have the values, and the changes of the piece can be merged

After ``ADD COLUMN … DEFAULT 5`` all rows have the value 5; after ``RENAME COLUMN`` the column of the new name has the values of the
old one. Spark takes seconds to write a replica anew, and a migration may alter hundreds of tables. `fill_without_spark` writes no
rows and returns False, and Spark does the work (merge.py), for

- columns that have swapped their names;
- values of a column of another type;
- a large replica;
- a replica that keeps deleted rows, exact texts, or marks of unknown values.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from cdcpipe.retry import RetryPolicy
from spark_sink.delta import file_table
from spark_sink.delta.file_table import ChangedError, DeltaError
from spark_sink.delta.rows import UnsupportedError
from spark_sink.replica.fills import constant
from spark_sink.replica.layout import OPTIONAL
from spark_sink.replica.target import key_of, open_target, table_columns
from spark_sink.staging.log import Position

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from spark_sink.delta.log import TableLog
    from spark_sink.replica.pieces import Piece
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["fill_without_spark"]

_logger = logging.getLogger(__name__)

_FILLS = RetryPolicy(attempts=3)

_EXPECTED: Final = (DeltaError, UnsupportedError, OSError)
"""Errors whose text may be logged. The text of another error may contain values of a row."""


def fill_without_spark(warehouse: Warehouse, table: Table, piece: Piece) -> bool:
    """Give the rows of the replica the values of the piece's fills, in one commit. The replica gets the columns that it lacks.

    The commit records no position. If the process is killed before the changes are merged, the next one fills the same rows with
    the same values. Returns False, and writes no rows, if Spark has to do it. Nobody else may merge meanwhile.
    """
    # The second time, columns that have swapped their names would get each other's values again.
    sources = {fill.source for fill in piece.fills}
    if warehouse.keeps_deleted or not sources.isdisjoint(fill.column for fill in piece.fills):
        return False
    try:
        with warehouse.logs.newest(warehouse.changelog(table)) as changelog, warehouse.logs.newest(warehouse.replica(table)) as log:
            if changelog.version < 0:
                return False
            if log.version < 0 or (log.lsn or 0) >= piece.until_lsn:
                return True  # there are no rows from before the change
            wanted = table_columns(file_table.of_log(changelog).schema, piece.gone)
            return _FILLS.call(lambda: _fill(log.refresh(), wanted, piece), ChangedError)
    except Exception as ex:  # noqa: BLE001 - other programs may have written anything to the table; Spark knows more cases
        _logger.debug("Spark fills the new columns of %s: %s", table, ex if isinstance(ex, _EXPECTED) else repr(type(ex)))
        return False


def _fill(log: TableLog, wanted: StructType, piece: Piece) -> bool:
    target = open_target(log, key_of(piece), wanted, piece.gone)
    if not OPTIONAL.keys().isdisjoint(target.schema.names):
        return False
    types = {field.name: field.dataType for field in target.schema}
    constants, copies = {}, {}
    for fill in piece.fills:
        kind = types.get(fill.column)
        if kind is None:
            return False
        if fill.source is None:
            constants[fill.column], exact = constant(fill.value, kind)
            if exact is not None:
                return False
        elif types.get(fill.source) == kind and not fill.or_own:
            copies[fill.column] = fill.source
        else:
            return False
    target.fill(constants, copies, Position(0, log.lsn or 0))
    return True
