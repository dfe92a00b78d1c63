"""The little that is needed of Delta Lake: names, a table's state, commits that record where the table stands.

Delta's Python package is not used (it pins another pyspark): SQL does what changes a table, and what is to be known of one is
read in its log (delta/log.py), without the JVM, for which it is a job.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from spark_sink.delta.log import APPLICATION, TableLog
from spark_sink.delta.schema import COLUMN_MAPPING, columns
from spark_sink.files import places as storage
from spark_sink.spark.sql import quote

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

    from spark_sink.delta.log import Mark

__all__ = [
    "State",
    "add_columns",
    "checkpoint",
    "create",
    "overwrite",
    "read",
    "read_version",
    "recording",
    "state",
    "table_name",
    "widen",
]

_PROPERTIES = {
    **COLUMN_MAPPING,
    # A later column may be the first of this type; Delta does not turn the feature on for an existing table.
    "delta.feature.timestampNtz": "supported",
}


@dataclass(frozen=True, slots=True)
class State:
    """A table as it is now: its columns, and the LSN up to which it has its changes (0 for none)."""

    schema: StructType
    lsn: int
    properties: Mapping[str, str] = field(default_factory=dict)


def table_name(path: Path) -> str:
    """Return a Delta table's name in SQL."""
    return f"delta.{quote(storage.name(path))}"


def read(spark: SparkSession, path: Path) -> DataFrame:
    """Return the table's rows as of now."""
    return spark.read.format("delta").load(storage.name(path))


def state(path: Path) -> State | None:
    """Return the state of the table, None if there is none."""
    log = TableLog(path).refresh()
    if log.version < 0:
        return None
    return State(columns(log.metadata), log.lsn or 0, log.metadata["configuration"])


def read_version(spark: SparkSession, path: Path, version: int) -> DataFrame:
    """Return the rows that the table had as of one of its versions."""
    return spark.read.format("delta").option("versionAsOf", version).load(storage.name(path))


@contextmanager
def recording(spark: SparkSession, mark: Mark) -> Iterator[None]:
    """Let the commit made inside record ``mark``, and be skipped if the table has it already."""
    settings = {
        "spark.databricks.delta.write.txnAppId": APPLICATION,
        "spark.databricks.delta.write.txnVersion": str(mark.lsn),
        "spark.databricks.delta.commitInfo.userMetadata": str(mark),
    }
    before = {key: spark.conf.get(key, None) for key in settings}
    # CREATE TABLE AS SELECT takes the settings of the thread's active session: in a micro-batch that is the query's own.
    sessions = spark._jvm.org.apache.spark.sql.classic.SparkSession  # noqa: SLF001
    active = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)  # noqa: SLF001
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        if active.isDefined():
            sessions.setActiveSession(active.get())
        else:
            sessions.clearActiveSession()
        for key, value in before.items():
            if value is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, value)


def checkpoint(spark: SparkSession, path: Path) -> None:
    """Let Delta write the table's state down as a whole, for readers, and drop what is too old of its log."""
    jvm, session = spark._jvm, spark._jsparkSession  # noqa: SLF001 - only its own commits do that by themselves
    found = jvm.org.apache.spark.sql.delta.DeltaLog.forTableWithSnapshot(session, storage.name(path))
    found._1().checkpointAndCleanUpDeltaLog(found._2(), jvm.scala.Option.empty())  # noqa: SLF001 - Scala's names


def create(path: Path, rows: DataFrame, properties: dict[str, str]) -> None:
    """Make a table with its first rows, in one commit; there is none."""
    # Files that an attempt left which did not come to its end would be taken for a table.
    storage.remove_tree(path)
    writer = rows.writeTo(table_name(path)).using("delta")
    for key, value in (_PROPERTIES | properties).items():
        writer = writer.tableProperty(key, value)
    writer.create()


def overwrite(path: Path, rows: DataFrame) -> None:
    """Replace all rows in one commit; the table's columns stay, new ones are added."""
    rows.write.format("delta").mode("overwrite").option("mergeSchema", "true").save(storage.name(path))


def add_columns(spark: SparkSession, path: Path, present: StructType, wanted: StructType) -> bool:
    """Add those of the wanted columns, and of the fields of structs, that are not present; return whether there were any."""
    missing = []
    for each in wanted.fields:
        if each.name not in present.names:
            missing.append((quote(each.name), each.dataType))
        elif isinstance(each.dataType, StructType):
            known = present[each.name].dataType.names
            missing += [(f"{quote(each.name)}.{quote(f.name)}", f.dataType) for f in each.dataType.fields if f.name not in known]
    if missing:
        # Nested names, too, have to be quoted; pyspark's own text of a type does not.
        types = spark._jvm.org.apache.spark.sql.types.DataType  # noqa: SLF001
        listed = ", ".join(f"{name} {types.fromJson(kind.json()).sql()}" for name, kind in missing)
        spark.sql(f"ALTER TABLE {table_name(path)} ADD COLUMNS ({listed})")
    return bool(missing)


def widen(spark: SparkSession, path: Path, present: StructType, wanted: StructType) -> bool:
    """Give the columns that are ``present`` the types that are ``wanted``, which hold their values exactly (`types.holds`).

    Return whether there were any.

    Files stay as they are. Delta Lake's type widening is turned on for a table that needs it: from then on others have to know
    it, too, to read the table.
    """
    have = dict(_leaves(present))
    changed = [
        f"{'.'.join(map(quote, names))} TYPE {kind.simpleString()}"
        for names, kind in _leaves(wanted)
        if have.get(names, kind) != kind
    ]
    if changed:
        table = table_name(path)
        spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')")
        spark.sql(f"ALTER TABLE {table} ALTER COLUMN {', '.join(changed)}")
    return bool(changed)


def _leaves(struct: StructType) -> Iterator[tuple[tuple[str, ...], DataType]]:
    """Yield a table's columns, and the fields of those that are structs, by path."""
    for each in struct.fields:
        if isinstance(each.dataType, StructType):
            yield from (((each.name, *path), kind) for path, kind in _leaves(each.dataType))
        else:
            yield (each.name,), each.dataType
