"""Tells whether ``run --available-now`` has nothing to do, so that it needs no Spark session. No Spark.

    rest = Rest(config, warehouse)
    if rest.is_possible() and (the launcher has landed nothing) and rest.is_certain(is_stopping):
        ...                                 # the run is complete
    rest.record()                           # at the end of each complete run

    _cdcpipe/complete.json      the options of the last run with --available-now that did everything

`Warehouse.open` removes the file, because the run that opens the warehouse may have other options, and need not become complete. A
run also does what new options ask for, what another program has undone, and what is due once a day. So each of these is looked at.
In any doubt the answer is that there is something to do.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final

from cdcpipe.version import own_version
from spark_sink.files.places import make_directory, map_reads, read_known, write_json
from spark_sink.schema.table import NO_COPIES, copies_until, has_key, mergeable_lsn
from spark_sink.snapshot.catalog_look import CatalogLook
from spark_sink.staging.log import list_epochs, log_end
from spark_sink.staging.readers import read_readers
from spark_sink.upkeep import recorded_times
from spark_sink.warehouse import gaps, landed_snapshots, stored_histories, unchecked_merges, wanted_copies
from spark_sink.warehouse.reached import reached_lsn
from spark_sink.warehouse.warehouse import COMPLETE, READER

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spark_sink.pipeline.config import RunConfig
    from spark_sink.schema.table import Table
    from spark_sink.staging.log import Position
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["Rest"]

_WITHOUT_EFFECT: Final = frozenset({"master", "conf", "jars_dir", "ui", "staging_shared", "checkpoint", "trigger_interval_s"})
"""The options that have no effect on the tables."""


class Rest:
    """What the last complete run has left, for the run that begins now."""

    def __init__(self, config: RunConfig, warehouse: Warehouse) -> None:
        self._config = config
        self._warehouse = warehouse

    def is_possible(self) -> bool:
        """Tell whether the last run did everything with these options, and the tables have all of the log."""
        config, house = self._config, self._warehouse
        # Names in a catalog are not looked at: another program may have dropped them, and a session's own catalog has none yet.
        if not config.launcher.available_now or config.catalog_database is not None or not house.exists:
            return False
        return read_known(self._path).get("options") == self._options() and self.position() is not None

    def is_certain(self, is_stopping: Callable[[], bool]) -> bool:
        """Tell whether there is nothing to do. Asks the server for tables that need a copy.

        Call this when the launcher has ended.
        """
        config, house = self._config, self._warehouse
        gaps.record(house, list_epochs(config.launcher.staging))
        if self.position() is None or gaps.open_gap(house) is not None:
            return False
        if landed_snapshots.unfinished(house) or unchecked_merges.unchecked(house):  # what a killed process has left
            return False
        if recorded_times.is_due(
            house,
            vacuum_retention_s=config.vacuum_retention_s,
            purges=config.keep_changelog_s is not None,
            purges_histories=config.keep_history_s is not None,
        ):
            return False
        ends = map_reads(lambda table: house.format.end(house.changelog(table)), NO_COPIES, house.root)
        if any(end is not None and end.is_restored for end in ends):  # a start names them (fit.check_tables)
            return False
        known_lsn = reached_lsn(house, house.source())
        if not all(map_reads(lambda table: self._is_done(table, known_lsn), house.tables(), house.root)):
            return False
        if config.heal_hours is None:
            return True
        # Without `create_slot`: a slot that is gone is a gap, and not made here.
        look = CatalogLook(replace(config.launcher, create_slot=False), house, copies_new=config.snapshot != "never")
        return look.look(is_stopping) and not wanted_copies.waiting(house)

    def record(self, *, has_looked: bool) -> None:
        """Record that a run has done everything. Where tables are healed, that includes a look at the catalog."""
        if not has_looked and self._config.heal_hours is not None:
            return
        make_directory(self._path.parent)
        write_json(self._path, {"options": self._options()})

    @property
    def _path(self) -> Path:
        return self._warehouse.identity_path.with_name(COMPLETE)

    def _options(self) -> str:
        """Return a digest of the version of cdcpipe, the options that have an effect on the tables, and the key of hashes."""
        launcher = self._config.launcher
        options = {each.name: getattr(self._config, each.name) for each in fields(self._config) if each.name not in _WITHOUT_EFFECT}
        options |= {"launcher": (launcher.slot, str(launcher.staging.resolve()), launcher.publications)}
        options |= {"mask_key": self._warehouse.masks.fingerprint}
        listed = [f"{name}={value!r}" for name, value in sorted(options.items())]
        return hashlib.sha256("\n".join([own_version(), *listed]).encode()).hexdigest()

    def position(self) -> Position | None:
        """Return the position of the tables if it is the end of their log, and the log is theirs; None otherwise."""
        staging = self._config.launcher.staging
        epochs, source = list_epochs(staging), self._warehouse.source()
        if not epochs or source.position is None or READER not in read_readers(staging):
            return None
        newest, end = epochs[-1], log_end(staging)
        is_theirs = (source.system_id, source.database, source.slot) == (newest.system_id, newest.database, newest.slot)
        # The launcher may have begun another epoch at the same LSN.
        return source.position if is_theirs and end is not None and source.position.lsn == end.lsn else None

    def _is_done(self, table: Table, known_lsn: int) -> bool:
        """Tell whether a table's replica and its stored history have all changes of its changelog, which nobody has set back.

        The tables have everything up to ``known_lsn``.
        """
        house = self._warehouse
        changelog, replica = house.format.end(house.changelog(table)), house.format.end(house.replica(table))
        versions = house.versions(table)
        if changelog is None or not versions or any(each is not None and each.is_restored for each in (changelog, replica)):
            return False
        merges = has_key(versions) and house.format.keeps_replicas
        if merges and (replica is None or replica.lsn < max([mergeable_lsn(versions, changelog.lsn), *copies_until(versions)])):
            return False
        return not house.keeps_history or stored_histories.missing_until(house, table, changelog.lsn, known_lsn) is None
