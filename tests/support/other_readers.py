"""Other programs that read the tables: each gives a table's rows, or says why it refuses the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import duckdb_extension_delta
import polars as pl
import pyarrow as pa

__all__ = ["READERS", "comparable"]


def _duckdb(path: str) -> pa.Table:
    (extension,) = Path(duckdb_extension_delta.__file__).parent.rglob("*.duckdb_extension")
    with duckdb.connect(config={"allow_unsigned_extensions": "true"}) as connection:
        connection.execute(f"load '{extension}'")
        connection.execute("set timezone = 'UTC'")
        return connection.sql(f"select * from delta_scan('{path}')").to_arrow_table()


def _polars(path: str) -> pa.Table:
    return pl.scan_delta(path).collect().to_arrow()


def _query_engine(path: str) -> pa.Table:
    engine = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(path))
    return pa.table(engine.execute("select * from t").read_all())


READERS: dict[str, Callable[[str], Any]] = {
    "deltalake `to_pyarrow_table`": lambda path: deltalake.DeltaTable(path).to_pyarrow_table(),
    "deltalake `to_pandas`": lambda path: deltalake.DeltaTable(path).to_pandas(),
    "deltalake `QueryBuilder`": _query_engine,
    "polars `scan_delta`": _polars,
    "DuckDB `delta_scan`": _duckdb,
}
"""Each reader by its name in docs/spark/readers.md. It gets the path of a Delta table, and returns an Arrow table or a frame."""


def comparable(found: Any, schema: pa.Schema) -> list[str]:
    """Return a table's rows as texts in order, with the columns and the types of ``schema``. So NaN is equal to itself.

    A frame of pandas, in which NULL and NaN are one, is compared with a frame.
    """
    if not isinstance(found, pa.Table):
        return sorted(map(repr, found[schema.names].itertuples(index=False, name=None)))
    columns = [found.column(name).cast(kind) for name, kind in zip(schema.names, schema.types, strict=True)]
    assert set(found.column_names) == set(schema.names)
    rows = pa.table(columns, schema=schema).to_pylist()
    return sorted(repr(list(row.values())) for row in rows)
