"""The settings with which cdcpipe makes a session. All of them can be overridden."""

from __future__ import annotations

from spark_sink.spark import refused_settings
from spark_sink.spark.environment import python_path
from spark_sink.spark.java_options import java_options

__all__ = ["DELTA_CATALOG", "DELTA_EXTENSION", "DELTA_SETTINGS", "LOCAL_SETTINGS", "general_settings"]

DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
DELTA_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
_CHECKPOINT_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
DELTA_SETTINGS = {
    "spark.sql.extensions": DELTA_EXTENSION,
    "spark.sql.catalog.spark_catalog": DELTA_CATALOG,
    # By default 50 tasks read a table's log, which is far too many for a small log.
    "spark.databricks.delta.snapshotPartitions": "1",
    # Otherwise Delta refuses to read a version that is not the newest if its commit is older than VACUUM's retention. A table that
    # rested for so long could not be read as it was before its next commit. VACUUM itself goes by when a file has left the table.
    "spark.databricks.delta.vacuum.enforceTimeTravelWithinDeletedFileRetentionDuration": "false",
}
LOCAL_SETTINGS = {
    # With a local master the executor is in the driver's JVM, and can't be lost. But Spark counts it as lost if no heartbeat came
    # for two minutes by the system's clock: after a laptop's sleep, a paused container, a clock that was set. Then it logs errors,
    # and ends the JVM ten minutes later.
    "spark.storage.blockManagerHeartbeatTimeoutMs": "36500d",
    # Every user of this machine can connect to the ports of the JVM, over which rows and code go. Spark makes the secret itself.
    "spark.authenticate": "true",
}


def general_settings(*, ui: bool) -> dict[str, str]:
    """Return the settings for change data on one machine that do not depend on the table format."""
    return {
        "spark.driver.memory": "2g",
        "spark.driver.extraJavaOptions": java_options(),
        "spark.log.level": "WARN",
        "spark.ui.enabled": str(ui).lower(),
        "spark.ui.killEnabled": "false",  # it asks for no password
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        # Micro-batches are small: Spark's default of 200 partitions and 32 listing tasks would cost more than the work itself.
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
        "spark.sql.streaming.metricsEnabled": "false",
        # How long a stop of Spark waits for listeners. A program's own one, in Python, may wait for the thread that stops Spark. By
        # default there is no limit.
        "spark.scheduler.listenerbus.exitTimeout": "10s",
        # The checkpoint is in a local directory (docs/decisions/0040). There Spark's default starts `readlink` five times for each
        # file that it renames, because Hadoop's FileContext asks whether a path is a link. Both rename in one step.
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINT_FILES,
        # A Python worker imports numpy and pyarrow, which is slow: start workers once and reuse them.
        "spark.python.worker.reuse": "true",
        # Otherwise each session, and each streaming query with its copy of one, would start Python workers of its own.
        "spark.sql.artifact.isolation.enabled": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # Otherwise pyspark looks up the caller of each function of a column and tells it to the JVM, for error messages about our
        # own code. That is half of the driver's CPU time for making a plan.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        # How long driver, JVM and workers wait for one another to connect. Spark's default of 15 s is too short on a busy machine.
        "spark.python.authenticate.socketTimeout": "120s",
        "spark.executorEnv.PYTHONPATH": python_path(),
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        # Among others: write timestamps of any year without conversion. No reader here is older than Spark 3.
        **refused_settings.RIGHT,
    }
