"""Delta tables by way of Spark SQL: names, reading, and changes whose commits record how far the table is.

Delta's Python package is not used, because it pins another pyspark. SQL changes tables. Facts about a table come from its log
(delta/log.py), because asking the JVM would cost a job.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.types import StructType

from spark_sink.delta import file_table, new_columns, wider_columns
from spark_sink.delta import log as delta_log
from spark_sink.delta.file_table import ChangedError, DeltaError
from spark_sink.delta.log import APPLICATION, TableLog
from spark_sink.delta.rows import UnsupportedError
from spark_sink.delta.schema import MAPPING_MODE, columns, needed_features
from spark_sink.delta.small import plain_files
from spark_sink.files import places
from spark_sink.spark import session
from spark_sink.spark.sql import literal, only, quote

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

    from spark_sink.delta.log import Mark
    from spark_sink.files.places import Listed

__all__ = [
    "State",
    "add_columns",
    "checkpoint",
    "create",
    "drop_columns",
    "end_clustering",
    "overwrite",
    "read",
    "read_as_is",
    "read_at",
    "read_files",
    "recording",
    "replace",
    "set_properties",
    "state",
    "table_name",
    "temporary_view",
    "vacuum",
    "widen",
]

_view_numbers = itertools.count()

_PROPERTIES: Final = {"columnMapping": (MAPPING_MODE, "name"), "timestampNtz": ("delta.feature.timestampNtz", "supported")}
"""The property that turns a feature on."""


@dataclass(frozen=True, slots=True)
class State:
    """A table as it is now: its columns, and the LSN up to which it has its changes (0 for none)."""

    schema: StructType
    lsn: int
    properties: Mapping[str, str] = field(default_factory=dict)


def table_name(path: Path) -> str:
    """Return a Delta table's name in SQL. The catalog is Delta's (`session.check`); the session's current one may be another."""
    return f"spark_catalog.delta.{quote(places.name(path))}"


def read(spark: SparkSession, path: Path) -> DataFrame:
    """Return the table's rows as of now."""
    return spark.read.format("delta").load(places.name(path))


def state(path: Path) -> State | None:
    """Return the state of the table; None if there is no table."""
    log = TableLog(path).refresh()
    if log.version < 0:
        return None
    return State(columns(log.metadata), log.lsn or 0, log.metadata["configuration"])


def read_at(spark: SparkSession, log: TableLog) -> DataFrame:
    """Return the rows of the version up to which ``log`` has read.

    Delta plans each query with a query over the table's log, which takes 0.2 s. So Spark reads the files of a small table itself.
    """
    files = plain_files(log)
    if files:
        return spark.read.schema(columns(log.metadata)).parquet(*(only(places.name(file)) for file in files))
    return _read_version(spark, log.path, log.version)


def read_files(spark: SparkSession, log: TableLog, names: Collection[str]) -> DataFrame:
    """Return the rows of the table's files with these names, without directories, also rows that deletion vectors have deleted."""
    table = file_table.of_log(log)
    paths = [unquote(str(file["path"])) for file in log.files]
    wanted = [only(places.name(log.path / path)) for path in paths if path.rpartition("/")[2] in names]
    return spark.read.schema(table.physical).parquet(*wanted).toDF(*table.schema.names)


def read_as_is(spark: SparkSession, path: Path) -> DataFrame:
    """Return the rows of the newest version of this moment, also after later commits. VACUUM keeps its files for a while."""
    versions = delta_log.commits(path)
    if not versions:
        return read(spark, path)
    return read_at(spark, TableLog(path).refresh()) if delta_log.is_small(path) else _read_version(spark, path, versions[-1])


def _read_version(spark: SparkSession, path: Path, version: int) -> DataFrame:
    return spark.read.format("delta").option("versionAsOf", version).load(places.name(path))


@contextmanager
def recording(spark: SparkSession, mark: Mark) -> Iterator[None]:
    """Let the commit made inside record ``mark``. Delta skips the commit if the table has recorded this mark already."""
    settings = {
        "spark.databricks.delta.write.txnAppId": APPLICATION,
        "spark.databricks.delta.write.txnVersion": str(mark.lsn),
        "spark.databricks.delta.commitInfo.userMetadata": str(mark),
    }
    before = {key: spark.conf.get(key, None) for key in settings}
    # CREATE TABLE AS SELECT uses the settings of the thread's active session, which in a micro-batch is the query's own session.
    with session.active(spark):
        for key, value in settings.items():
            spark.conf.set(key, value)
        try:
            yield
        finally:
            for key, value in before.items():
                if value is None:
                    spark.conf.unset(key)
                else:
                    spark.conf.set(key, value)


def checkpoint(spark: SparkSession, path: Path) -> None:
    """Let Delta write a checkpoint of the table, and delete the part of its log that is too old."""
    jvm = spark._jvm  # noqa: SLF001 - Delta does this by itself only after its own commits
    # Delta looks for an active session where a read that it has begun in the background has failed.
    with session.active(spark):
        found = jvm.org.apache.spark.sql.delta.DeltaLog.forTableWithSnapshot(spark._jsparkSession, places.name(path))  # noqa: SLF001
        found._1().checkpointAndCleanUpDeltaLog(found._2(), jvm.scala.Option.empty())  # noqa: SLF001 - Scala's names


def create(path: Path, rows: DataFrame, properties: dict[str, str]) -> None:
    """Create a table with its first rows, in one commit. No table must exist there."""
    # Remove the files of an attempt that did not finish: Delta would take them for a table.
    places.remove_tree(path)
    writer = rows.writeTo(table_name(path)).using("delta")
    for key, value in (dict(_PROPERTIES[each] for each in needed_features(rows.schema)) | properties).items():
        writer = writer.tableProperty(key, value)
    writer.create()


def overwrite(path: Path, rows: DataFrame, gone: Collection[str] = ()) -> None:
    """Replace all rows in one commit. The table gets the new columns, loses the columns ``gone``, and keeps the others.

    A column that is wider in the table stays so. A column that is ``gone`` may come again with another type. Call `end_clustering`
    before, because columns may get other names in the files.
    """
    present, option = columns(TableLog(path).refresh().metadata), "mergeSchema"
    if not set(gone).isdisjoint(present.names):
        option = "overwriteSchema"
        others = [field for field in present if field.name not in gone and field.name not in rows.columns]
        rows = rows.withColumns({field.name: F.lit(None).cast(field.dataType) for field in others}) if others else rows
    kept = [field for field in present if field.name not in gone and field.name in rows.columns]
    wider = [field for field in kept if rows.schema[field.name].dataType != field.dataType]
    rows = rows.withColumns({field.name: F.col(quote(field.name)).cast(field.dataType) for field in wider}) if wider else rows
    _turn_on(rows.sparkSession, path, needed_features(rows.schema))
    rows.write.format("delta").mode("overwrite").option(option, "true").save(places.name(path))


def replace(path: Path, rows: DataFrame, where: str) -> None:
    """Replace the rows for which the SQL condition ``where`` is true, in one commit. It must be true for the new rows, too."""
    rows.write.format("delta").mode("overwrite").option("replaceWhere", where).save(places.name(path))


def set_properties(spark: SparkSession, path: Path, properties: Mapping[str, str]) -> None:
    """Set properties of a table, in one commit."""
    listed = ", ".join(f"{literal(name)} = {literal(value)}" for name, value in properties.items())
    spark.sql(f"ALTER TABLE {table_name(path)} SET TBLPROPERTIES ({listed})")


def vacuum(spark: SparkSession, path: Path, files: Sequence[Listed], retention_s: float) -> None:
    """Let VACUUM look at these files alone. It deletes those that have not been part of the table for ``retention_s``."""
    place = f"file:{path}" if places.is_local(path) else places.name(path)
    rows = [(f"{place}/{file.name}", file.size, False, round(file.written_s * 1000)) for file in files]
    listed = spark.createDataFrame(rows, "path string, length long, isDir boolean, modificationTime long")
    with temporary_view(listed, "unused_files") as view:
        hours = f"{retention_s / 3600:.6f} HOURS"
        spark.sql(f"VACUUM {table_name(path)} USING INVENTORY (SELECT * FROM {view}) RETAIN {hours}")


@contextmanager
def temporary_view(rows: DataFrame, purpose: str) -> Iterator[str]:
    """Give rows a name for SQL, and yield it. No other view has it, because threads may share a session."""
    name = f"cdcpipe_{purpose}_{next(_view_numbers)}"
    rows.createOrReplaceTempView(name)
    try:
        yield name
    finally:
        rows.sparkSession.catalog.dropTempView(name)


def drop_columns(spark: SparkSession, path: Path, gone: Collection[str]) -> None:
    """Drop these columns, as far as the table has them. No file is rewritten."""
    there = [name for name in columns(TableLog(path).refresh().metadata).names if name in gone]
    if there:
        _turn_on(spark, path, {"columnMapping"})  # a column of this name may come again, and must not have the old values then
        end_clustering(spark, path, there)
        spark.sql(f"ALTER TABLE {table_name(path)} DROP COLUMNS ({', '.join(map(quote, there))})")


def end_clustering(spark: SparkSession, path: Path, gone: Collection[str]) -> None:
    """End the clustering of a table that is going to lose columns. The next OPTIMIZE sets it again (upkeep/upkeep.py)."""
    log = TableLog(path).refresh()
    if log.clustering and not set(gone).isdisjoint(columns(log.metadata).names):
        spark.sql(f"ALTER TABLE {table_name(path)} CLUSTER BY NONE")


def add_columns(spark: SparkSession, path: Path, present: StructType, wanted: StructType) -> bool:
    """Add the wanted columns, and fields of structs, that are not present. Returns whether there were any.

    Spark takes half a second for it, so Spark does it only where this process can't.
    """
    missing = _missing(present, wanted)
    if missing:
        try:
            new_columns.add(path, wanted)
        except (ChangedError, DeltaError, UnsupportedError):
            _add_by_spark(spark, path, missing, needed_features(wanted))
    return bool(missing)


def _missing(present: StructType, wanted: StructType) -> list[tuple[str, DataType]]:
    """Return the columns, and fields of structs, that are not present: their names in SQL, and their types."""
    missing = []
    for each in wanted.fields:
        if each.name not in present.names:
            missing.append((quote(each.name), each.dataType))
        elif isinstance(each.dataType, StructType):
            known = present[each.name].dataType.names
            missing += [(f"{quote(each.name)}.{quote(f.name)}", f.dataType) for f in each.dataType.fields if f.name not in known]
    return missing


def _add_by_spark(spark: SparkSession, path: Path, missing: Sequence[tuple[str, DataType]], needed: set[str]) -> None:
    _turn_on(spark, path, needed)
    # Names inside of types have to be quoted, too, which pyspark's text of a type does not do.
    types = spark._jvm.org.apache.spark.sql.types.DataType  # noqa: SLF001
    listed = ", ".join(f"{name} {types.fromJson(kind.json()).sql()}" for name, kind in missing)
    spark.sql(f"ALTER TABLE {table_name(path)} ADD COLUMNS ({listed})")


def widen(spark: SparkSession, path: Path, present: StructType, wanted: StructType) -> bool:
    """Widen columns to their ``wanted`` types, which hold the present values exactly (`types.holds`). Returns whether any changed.

    A column that is wider in the table stays so: another program may have widened it. No file is rewritten. Turns on Delta Lake's
    type widening for a table that needs it. From then on, other programs must support this feature to read the table. As with
    `add_columns`, Spark does it only where this process can't.
    """
    have = dict(_leaves(present))
    leaves = ((names, have.get(names, kind), kind) for names, kind in _leaves(wanted))
    changed = {names: kind for names, now, kind in leaves if now != kind and not wider_columns.is_wider(now, kind)}
    if changed:
        try:
            wider_columns.widen(path, wanted)
        except (ChangedError, DeltaError, UnsupportedError):
            _widen_by_spark(spark, path, changed, needed_features(wanted))
    return bool(changed)


def _widen_by_spark(spark: SparkSession, path: Path, changed: Mapping[tuple[str, ...], DataType], needed: set[str]) -> None:
    _turn_on(spark, path, needed)
    set_properties(spark, path, {wider_columns.ENABLED: "true"})
    listed = ", ".join(f"{'.'.join(map(quote, names))} TYPE {kind.simpleString()}" for names, kind in changed.items())
    spark.sql(f"ALTER TABLE {table_name(path)} ALTER COLUMN {listed}")


def _turn_on(spark: SparkSession, path: Path, needed: set[str]) -> None:
    """Turn on the features that a table does not have. Delta does not do so by itself."""
    if needed:
        missing = needed - TableLog(path).refresh().features("writerFeatures")
        if missing:
            set_properties(spark, path, dict(_PROPERTIES[each] for each in sorted(missing)))


def _leaves(struct: StructType) -> Iterator[tuple[tuple[str, ...], DataType]]:
    """Yield a table's columns with their types; for a struct its fields, by path."""
    for each in struct.fields:
        if isinstance(each.dataType, StructType):
            yield from (((each.name, *path), kind) for path, kind in _leaves(each.dataType))
        else:
            yield (each.name,), each.dataType
