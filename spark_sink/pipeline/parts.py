"""Makes the parts of a run from its configuration: says which option each of them gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.schema.names import FOLLOW
from spark_sink.snapshot.healer import Healer
from spark_sink.snapshot.schedule import Schedule
from spark_sink.spark import session
from spark_sink.upkeep.upkeep import Upkeep
from spark_sink.warehouse.lock import lock_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from pyspark.sql import SparkSession

    from spark_sink.pipeline.config import RunConfig
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["make_healer", "make_pipeline", "make_session", "make_upkeep"]


def make_session(
    config: RunConfig, house: Warehouse, *, on_step: Callable[[str], None], on_made: Callable[[SparkSession], object]
) -> SparkSession:
    """Start Spark. ``on_step`` and ``on_made`` are those of `session.build`."""
    return session.build(
        app_name=f"cdcpipe {config.launcher.slot}",
        master=config.master,
        format=config.format,
        conf=config.conf,
        jars_dir=config.jars_dir,
        ui=config.ui,
        on_step=on_step,
        locks=[lock_file(house.local_root(config.launcher.staging))],
        on_made=on_made,
    )


def make_pipeline(
    config: RunConfig,
    spark: SparkSession,
    describe: Callable[[], Iterable[Mapping[str, Any]]],
    keyless_named: Iterable[str],
    is_stopping: Callable[[], bool],
) -> Pipeline:
    """Return the pipeline. ``describe``, ``keyless_named`` and ``is_stopping`` are those of `Pipeline`."""
    pipeline = Pipeline(
        spark,
        config.launcher.staging,
        config.warehouse,
        format=config.format,
        types=config.types,
        readers=config.readers,
        widen=config.widen,
        keys=config.keys,
        describe=describe,
        keyless_named=keyless_named,
        checkpoint=config.checkpoint,
        max_bytes_per_trigger=config.max_bytes_per_trigger,
        trigger_interval_s=config.trigger_interval_s,
        staging_shared=config.staging_shared,
        catalog_database=config.catalog_database,
        json_variants=config.json_variants,
        replica_interval_s=config.replica_interval_s,
        masks=config.masks,
        drops_columns=config.dropped_columns == "drop",
        follows_renames=config.renamed == FOLLOW,
        deletes=config.deletes,
        column_names=config.column_names,
        history=config.history,
        history_interval_s=config.history_interval_s,
        is_stopping=is_stopping,
    )
    pipeline.logs_error = False  # it ends the run, too
    return pipeline


def make_healer(
    config: RunConfig, spark: SparkSession, house: Warehouse, pipeline: Pipeline, is_stopping: Callable[[], bool]
) -> Healer:
    """Return the healer, which tells the pipeline of its copies."""
    return Healer(
        spark,
        config.launcher,
        house,
        Schedule(config.heal_hours, config.heal_tables),
        copies_new=config.snapshot != "never",
        chunk_bytes=config.snapshot_chunk_bytes,
        hold_s=config.snapshot_hold_s or 0.0,
        on_copied=pipeline.take_copied,
        is_stopping=is_stopping,
    )


def make_upkeep(config: RunConfig, spark: SparkSession, pipeline: Pipeline) -> Upkeep:
    """Return the upkeep of the pipeline's tables, which shares its lock."""
    return Upkeep(
        spark,
        pipeline.warehouse,
        pipeline.lock,
        optimize_interval_s=config.optimize_interval_s,
        vacuum_retention_s=config.vacuum_retention_s,
        log_retention_s=config.log_retention_s,
        keep_changelog_s=config.keep_changelog_s,
        keep_history_s=config.keep_history_s,
        clustering=config.cluster_replicas,
    )
