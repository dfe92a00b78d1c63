"""Two tables joined as they were: both at one LSN, or each row with the row of the other table that was valid at its own commit.

    python examples/point_in_time_join.py WAREHOUSE public.orders public.fruit fruit_id 0/171F388

The second table's key is ``id``, and the first table has it in the column named third. An LSN is what ``pg_current_wal_lsn()``
gave at the time. Both tables are read at the same place of the WAL, so a transaction that changed both is in both or in neither.
"""

import sys

from pyspark.sql import DataFrame, SparkSession

from spark_sink import build_session, read_as_of, read_history


def joined_at(spark: SparkSession, warehouse: str, facts: str, dimension: str, column: str, lsn: str) -> DataFrame:
    """Return the rows that both tables had at an LSN, joined: as a query in PostgreSQL would have returned them then."""
    left = read_as_of(spark, warehouse, facts, lsn).alias("f")
    right = read_as_of(spark, warehouse, dimension, lsn).alias("d")
    return left.join(right, left[column] == right["id"], "left")


def joined_as_committed(spark: SparkSession, warehouse: str, facts: str, dimension: str, column: str) -> DataFrame:
    """Return each version of the first table's rows, with the second table's row that was valid when the version was committed.

    The price of an order is that of the fruit when it was ordered, whatever it costs now.
    """
    left = read_history(spark, warehouse, facts).alias("f")
    right = read_history(spark, warehouse, dimension).alias("d")
    was_valid = (right["from_lsn"] <= left["from_lsn"]) & (right["to_lsn"].isNull() | (left["from_lsn"] < right["to_lsn"]))
    return left.join(right, (left[column] == right["id"]) & was_valid, "left")


if __name__ == "__main__":
    session = build_session(format="delta")
    place, first, second, key, position = sys.argv[1:]
    joined_at(session, place, first, second, key, position).show()
    joined_as_committed(session, place, first, second, key).show()
