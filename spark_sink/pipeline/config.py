"""The options of `cdcpipe-spark run`, for programs and for its command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.masks import parse_masks
from spark_sink.doctor.pipeline_doctor import PlannedRun
from spark_sink.pipeline.catalog import check_options
from spark_sink.pipeline.pace import MICRO_BATCH_BYTES
from spark_sink.schema.names import FOLLOW, RENAMED
from spark_sink.schema.table import EXACT, TYPES
from spark_sink.snapshot.copy import CHUNK_BYTES
from spark_sink.snapshot.schedule import parse_hours
from spark_sink.warehouse.formats import ANY, COLUMN_NAMES, DELETES, HISTORY, READERS, WIDEN
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from spark_sink.launcher.config import LauncherConfig
    from spark_sink.snapshot.schedule import Hours

__all__ = ["RunConfig"]

_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3_600.0, 86_400.0

_HEAL_TABLES, _HISTORY_INTERVAL_S = 3, 60.0

_LEAST = {
    "max_bytes_per_trigger": 1,
    "trigger_interval_s": 0,
    "replica_interval_s": 0,
    "history_interval_s": 0,
    "snapshot_chunk_bytes": 1,
    "snapshot_hold_s": _MINUTE_S,
    "heal_tables": 1,
    "optimize_interval_s": _MINUTE_S,
    "vacuum_retention_s": _HOUR_S,
    "log_retention_s": _HOUR_S,
    "keep_changelog_s": _HOUR_S,
    "keep_history_s": _HOUR_S,
}
"""The least values of the options that are numbers, as on the command line. A purge of an age of 0 would remove all changes."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The options of ``cdcpipe-spark run``. What None means is said at each one: the default, or that the feature is off."""

    launcher: LauncherConfig
    """The slot and the staging directory. With ``available_now``, the run ends when the tables have everything committed by now."""
    warehouse: Path | str
    """Where the tables are: a directory, or a URL of an object store."""

    # --- tables ---
    format: str = "delta"
    """``delta`` or ``parquet``."""
    types: str = EXACT
    """``exact`` or ``native``: with native every numeric is a decimal. A warehouse keeps the choice that it was created with."""
    readers: Literal["spark", "any"] = "spark"
    """Who reads the tables: with ``any``, new replicas and stored histories have no deletion vectors, and merges
    write files anew."""
    widen: Literal["yes", "apart"] | None = None
    """What becomes of a column whose type gets wider: Delta widens it (``yes``), or the new values go to another column beside it
    (``apart``), as always with Parquet. None: ``yes``, or ``apart`` with ``readers="any"``, because not every reader knows it."""
    column_names: Literal["keep", "sanitize"] = "keep"
    """With ``sanitize``, a new column whose name Delta can't have without column mapping gets a safe name (schema/types.py)."""
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Columns that identify a table's rows where PostgreSQL has no primary key, ``{"public.orders": ["id"]}``: see `Pipeline`."""
    masks: Mapping[str, str] = field(default_factory=dict)
    """Columns that are masked in the tables, ``{"public.person.ssn": "hash"}``: null, redact, hash, or off again."""
    catalog_database: str | None = None
    """The database, as DATABASE or CATALOG.DATABASE, in which the tables get names."""
    json_variants: bool = False
    """Whether each table with json columns also gets a view that shows them as VARIANT. Requires ``catalog_database``."""
    renamed: str = FOLLOW
    """With captured DDL: whether a renamed table goes on in its tables under the new name (``follow``) or in others (``apart``)."""
    max_bytes_per_trigger: int = MICRO_BATCH_BYTES
    """The largest total size of a micro-batch's segments. A micro-batch always takes at least one segment."""
    trigger_interval_s: float = 0.1
    """The shortest time between the starts of two micro-batches."""
    replica_interval_s: float | None = None
    """How often the replicas catch up with the changelogs; 0: after each micro-batch. None: every second, or less often, down to
    every ten seconds, so that it takes at most a quarter of the time."""
    deletes: Literal["hard", "soft"] = "hard"
    """With ``soft``, a replica keeps deleted rows, with the time in ``_cdc_deleted_at``; NULL in the rows that exist."""
    history: Literal["off", "view", "table"] = "off"
    """With ``table``, each table with a key has a history with every version of its rows (replica/history_table.py).

    With ``view``, the history is a view in the catalog (replica/history_view.py). Requires ``catalog_database``.
    """
    history_interval_s: float = _HISTORY_INTERVAL_S
    """How often the stored histories catch up with the changelogs; 0: only at the start, and at the end with ``available_now``."""
    dropped_columns: Literal["keep", "drop"] = "keep"
    """Whether a column that was dropped stays in the replica, NULL in new rows, or leaves it. ``drop`` needs captured DDL, and does
    not go with ``readers="any"`` and Delta."""
    checkpoint: Path | str | None = None
    """The directory of Spark's checkpoint; None: in the warehouse, or in the staging directory if the warehouse is in a store."""

    # --- snapshot ---
    snapshot: Literal["initial", "never"] | None = None
    """Whether to copy the existing rows of the tables first; None: only with ``create_slot`` and a new warehouse."""
    snapshot_chunk_bytes: int = CHUNK_BYTES
    """The approximate size of the chunks in which a snapshot reads a table."""
    snapshot_hold_s: float | None = 600.0
    """How long the server holds the snapshot after a kill or an error, so that the next start can resume the copy.
    None: not at all."""

    # --- heal ---
    heal: str | None = None
    """When to copy tables anew whose rows the stream cannot tell: ``now``, ``off``, or ``HH:MM-HH:MM``, the hours (local time) in
    which a copy may begin. None: ``now``, or ``off`` with ``snapshot="never"``."""
    heal_tables: int = _HEAL_TABLES
    """The most tables that are copied at a time."""

    # --- upkeep (Delta) ---
    optimize_interval_s: float | None = 3600.0
    """How often to check each table for small files, and to compact them. None: never."""
    cluster_replicas: bool = False
    """Whether compaction also sorts replicas by key."""
    vacuum_retention_s: float | None = _DAY_S
    """How long a file is kept after it was removed from its table. None: for ever."""
    log_retention_s: float | None = _DAY_S
    """How long the entries of the tables' logs are kept. None: 30 days, as Delta Lake does."""
    keep_changelog_s: float | None = None
    """The age beyond which changes are removed from the changelogs. None: none is removed."""
    keep_history_s: float | None = None
    """The age beyond which versions of rows that have ended are removed from the stored histories. None: none is removed."""

    # --- Spark ---
    master: str | None = None
    """Spark's master; None: ``local[2]``, or with spark-submit the master given there."""
    conf: Mapping[str, str] = field(default_factory=dict)
    """Spark's configuration properties."""
    jars_dir: Path | str | None = None
    """A directory with jars for Spark, for machines that can't reach Maven Central."""
    ui: bool = False
    """Whether Spark serves its web UI."""
    staging_shared: bool = True
    """Whether executors see the staging directory at the same path. Otherwise this process serves the segments to them."""

    def __post_init__(self) -> None:
        """Raise InvalidArgumentsError for what the command line refuses, too: unknown and too small values, contradictions."""
        for name, choices in (
            ("types", TYPES),
            ("renamed", RENAMED),
            ("readers", READERS),
            ("widen", (None, *WIDEN)),
            ("snapshot", (None, "initial", "never")),
            ("dropped_columns", ("keep", "drop")),
            ("deletes", DELETES),
            ("column_names", COLUMN_NAMES),
            ("history", HISTORY),
        ):
            if getattr(self, name) not in choices:
                raise InvalidArgumentsError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(map(repr, choices))}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            # A comparison with NaN is never true.
            if value is not None and not value >= least:
                raise InvalidArgumentsError(f"{name} is {value!r}; it is at least {least:g}")
        parse_masks(f"{pattern}={kind}" for pattern, kind in self.masks.items())
        house = self.house()
        check_options(self.catalog_database, json_variants=self.json_variants, history=self.history)
        try:
            parse_hours(self.heal or "now")
        except ValueError as ex:
            raise InvalidArgumentsError(f"heal: {ex}") from ex
        if self.keep_changelog_s is not None and not house.format.has_upkeep:
            raise InvalidArgumentsError(
                "--keep-changelog is for Delta tables: with Parquet the current rows are made of the changelog",
                hint="now and then cdcpipe-spark snapshot --table, and cdcpipe-spark purge for what is before it",
            )
        if self.readers == ANY and self.dropped_columns == "drop" and house.format.keeps_replicas:
            raise InvalidArgumentsError(
                "--dropped-columns drop gives replicas Delta's column mapping, which not every reader knows; --readers any asks "
                "for tables without it",
                hint="leave one of the two out; without --dropped-columns drop such a column stays, NULL in new rows",
            )

    def without_effect(self) -> Iterator[str]:
        """Yield a text for each option that does nothing, or nothing for long, beside the others."""
        form = self.house().format
        if self.widen == "yes" and not form.widens_columns:
            yield f"--widen yes has no effect with {form.name} tables: the new values of a wider column go to another column"
        if self.cluster_replicas and not (form.has_upkeep and self.optimize_interval_s):
            yield "--cluster-replicas has no effect without --optimize-interval, and with tables that are not Delta's"
        if self.keep_history_s is not None and not form.has_upkeep:
            yield f"--keep-history has no effect with {form.name} tables: they have no stored histories"
        if self.heal_hours is None and self.heal_tables != _HEAL_TABLES:
            yield "--heal-tables has no effect while healing is off"
        if self.history != "table" and self.history_interval_s != _HISTORY_INTERVAL_S:
            yield "--history-interval has no effect without --history table"
        is_seldom = self.history == "table" and self.history_interval_s == 0 and not self.launcher.available_now
        if self.keep_changelog_s is not None and is_seldom:
            yield (
                "--keep-changelog removes no changes from after the start with --history-interval 0, because the histories lack"
                " them until the end"
            )

    def house(self) -> Warehouse:
        """Return the warehouse, with the choices of these options."""
        return Warehouse(
            self.warehouse,
            self.format,
            types=self.types,
            readers=self.readers,
            widen=self.widen,
            masks=self.masks,
            deletes=self.deletes,
            column_names=self.column_names,
            history=self.history,
        )

    def planned(self) -> PlannedRun:
        """Return what the doctor needs to know of the run."""
        launcher = self.launcher
        return PlannedRun(
            connection=launcher.connection,
            slot=launcher.slot,
            publications=launcher.publications,
            staging=launcher.staging,
            new_publication=launcher.new_publication,
            create_slot=launcher.create_slot,
            snapshot=self.snapshot,
            warehouse=self.house().root,
            format=self.format,
            jars=None if self.jars_dir is None else Path(self.jars_dir),
            conf=self.conf,
            staging_shared=self.staging_shared,
        )

    @property
    def heal_hours(self) -> Hours | None:
        """When a copy of a table may begin; None: never."""
        return parse_hours(self.heal or ("off" if self.snapshot == "never" else "now"))
