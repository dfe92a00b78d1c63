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

from typing import TYPE_CHECKING

from spark_sink.delta import file_table
from spark_sink.replica.fills import constant
from spark_sink.replica.layout import OPTIONAL
from spark_sink.replica.ordinary_changes import NotOrdinaryError, without_spark
from spark_sink.replica.target import key_of, open_target, table_columns
from spark_sink.staging.log import Position

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from spark_sink.delta.log import TableLog
    from spark_sink.replica.pieces import Piece
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["fill_without_spark"]


def fill_without_spark(warehouse: Warehouse, table: Table, piece: Piece) -> bool:
    """Give the rows of the replica the values of the piece's fills, in one commit. The replica gets the columns that it lacks.

    The commit records no position. If the process is killed before the changes are merged, the next one fills the same rows with
    the same values. Returns False, and writes no rows, if Spark has to do it. Nobody else may merge meanwhile.
    """
    return without_spark(table, lambda: _fill(warehouse, table, piece))


def _fill(warehouse: Warehouse, table: Table, piece: Piece) -> None:
    if warehouse.keeps_deleted:
        raise NotOrdinaryError("new values for deleted rows")
    if not {fill.source for fill in piece.fills}.isdisjoint(fill.column for fill in piece.fills):
        # The second time, they would get each other's values again.
        raise NotOrdinaryError("columns that have swapped their names")
    with warehouse.logs.newest(warehouse.changelog(table)) as changelog, warehouse.logs.newest(warehouse.replica(table)) as replica:
        if changelog.version < 0:
            raise NotOrdinaryError("no changelog")
        if replica.version >= 0 and (replica.lsn or 0) < piece.until_lsn:  # otherwise it has no rows from before the change
            _fill_rows(replica, table_columns(file_table.of_log(changelog).schema, piece.gone), piece)


def _fill_rows(log: TableLog, wanted: StructType, piece: Piece) -> None:
    target = open_target(log, key_of(piece), wanted, piece.gone)
    if not OPTIONAL.keys().isdisjoint(target.schema.names):
        raise NotOrdinaryError("rows with exact texts, or with marks of unknown values")
    types = {field.name: field.dataType for field in target.schema}
    constants, copies = {}, {}
    for fill in piece.fills:
        kind = types.get(fill.column)
        if kind is None:
            raise NotOrdinaryError("a value for a column that the replica lacks")
        if fill.source is None:
            constants[fill.column], exact = constant(fill.value, kind)
            if exact is not None:
                raise NotOrdinaryError("a value that its column can't have")
        elif types.get(fill.source) == kind and not fill.or_own:
            copies[fill.column] = fill.source
        else:
            raise NotOrdinaryError("values of a column of another type, or for some rows only")
    target.fill(constants, copies, Position(0, log.lsn or 0))
