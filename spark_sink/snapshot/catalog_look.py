"""Looks at the server's catalog for tables that need a copy, and records which ones do. No Spark.

    CatalogLook(config, warehouse).look(is_stopping)

two_looks.py compares two looks. `wanted_copies` has the tables that wait; the healer copies them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cdcpipe.errors import CdcpipeError
from cdcpipe.publishing import own
from spark_sink.snapshot import two_looks
from spark_sink.snapshot.homes import Homes
from spark_sink.staging.log import list_epochs
from spark_sink.staging.same_source import is_elsewhere
from spark_sink.warehouse import gaps, last_look, wanted_copies
from spark_sink.warehouse.former_names import carried
from spark_sink.warehouse.last_look import SeenTable
from spark_sink.warehouse.reached import reached_lsn

if TYPE_CHECKING:
    from collections.abc import Callable

    from spark_sink.client.prepare import Prepared
    from spark_sink.launcher.config import LauncherConfig
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.last_look import Seen
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["CatalogLook", "look_before_copies", "want_deleted"]

_logger = logging.getLogger(__name__)

RENAMED: Final = "it was changed under another name, and these changes are in the tables of that name"


def want_deleted(house: Warehouse) -> None:
    """Record that tables need a copy whose files somebody has deleted since the last look.

    Call this before changes make these tables anew, without their earlier rows.
    """
    for table, since_lsn, reason in two_looks.deleted(last_look.read(house), Homes(house)):
        wanted_copies.want_copy(house, table, since_lsn, reason)


def look_before_copies(config: LauncherConfig, house: Warehouse, is_stopping: Callable[[], bool]) -> None:
    """Look at the catalog before all tables are copied, so that these copies settle what it finds, and what comes later is found.

    The next look would have tables that came before the copies copied once more. The first look at another server only records.
    """
    catalog = CatalogLook(replace(config, create_slot=False), house)
    if not catalog.look(is_stopping) and catalog.failure is not None:
        _logger.warning(
            "run could not look at the catalog before the copies, so it may not notice tables that are rewritten, or get a"
            " partition, before the next look: %s",
            catalog.failure,
        )


class CatalogLook:
    """The looks of one run. ``copies_new``: whether a table that comes into a publication is copied."""

    def __init__(self, config: LauncherConfig, warehouse: Warehouse, *, copies_new: bool = True) -> None:
        self._config = config
        self._warehouse = warehouse
        self._copies_new = copies_new
        self.failure: str | None = None
        """Why the last look failed; None if it did not, or was stopped."""
        self._named_at: dict[int, int] = {}
        """For each table that had its name at the last look, too: the LSN of the first look that has seen it under this name."""
        self._compared: object = None
        """The tables' position, and the names, of the last comparison in `_want_renamed`."""
        self._told_keyed: set[int] = set()
        """The OIDs of the tables that `_tell_keyed` has named."""

    def look(self, is_stopping: Callable[[], bool]) -> bool:
        """Find tables whose rows have changed without a change in the stream, and forget those that are not published any more.

        Returns False if the server could not be asked or is not where the log goes on from (then `failure` says which), or once
        ``is_stopping`` is True. Raises ExcludedColumnError if a column is published that is to stay on the server, and then wants
        no copy.
        """
        self.failure = None
        try:
            found = two_looks.look(self._config, is_stopping)
        except InterruptedError:
            return False
        except CdcpipeError as ex:
            _logger.info("cannot look at the catalog for new tables, trying again: %s", ex.message)
            self.failure = ex.message
            return False
        house, epochs = self._warehouse, list_epochs(self._config.staging)
        if epochs and is_elsewhere(epochs[-1], found):
            # It is none if the launcher is only late. The owner says failures only if they last, or if this was the last look.
            self.failure = "the launcher does not read from the server that was asked, or has not begun with its timeline yet"
            _logger.info("cannot look at the catalog for new tables, trying again: %s", self.failure)
            return False
        found.check_left_out(self._config)
        before, homes = last_look.follow(house, epochs), Homes(house)
        kept = two_looks.undecided(before, found, homes)
        is_at_it = gaps.is_at_server_of_now(house, epochs)
        # This look has the tables of the publications that it asked for, perhaps before the launcher asks for them again.
        left_out = before.left_out.intersection(self._config.publications) if before is not None else frozenset[str]()
        looked = replace(two_looks.seen(found, kept, homes), epoch=epochs[-1].number if epochs else 0, left_out=left_out)
        now = carried(before, looked, house.masks, is_at_server_of_now=is_at_it)
        for table, since_lsn, reason in two_looks.compare(before, found, self._is_keyed, homes, kept):
            if self._copies_new or reason != two_looks.CAME:
                wanted_copies.want_copy(house, table, since_lsn, reason)
        if before is not None and before.system_id == found.system_id and is_at_it:
            self._want_renamed(before, now, homes)
        for table, name in two_looks.gone(before, found, homes, kept).items():
            if name is None:
                _logger.warning("table %s is not published any more: its tables get no changes from now on", table)
            else:
                apart = f"table {table} is published as {name} now, in tables of its own"
                _logger.warning("%s: the tables of %s get no changes from now on", apart, table)
        if before != now:
            last_look.write(house, now)
        self._tell_keyed(found)
        known = {homes.table(each.relation_id, each.table) for each in now.tables.values()}
        for each in wanted_copies.waiting(house):
            versions = house.versions(each.table)
            if each.table not in known and not (versions and versions[-1].relation_id in kept):
                _logger.info("table %s is not published any more, or has no columns: it waits for no copy", each.table)
                if any(reason.text == wanted_copies.MASKS_CHANGED for reason in each.reasons):
                    _logger.warning(
                        "table %s gets no copy with the new masks, because it is not published any more: its tables keep the values"
                        " from before, until you remove them",
                        each.table,
                    )
                wanted_copies.give_up(house, each.table)
        return True

    def _tell_keyed(self, found: Prepared) -> None:
        """Warn, once, of each table with a key in the publication that ``--keyless insert-only`` makes for tables without one.

        Such a table has a replica, and the server sends neither its updates nor its deletes.
        """
        publications = own(self._config.publications)
        companions = [each for each in self._config.publications if each not in publications]
        for table in found.tables if companions else ():
            each = SeenTable.of(table)
            if not each.has_key or each.operations is None or each.operations & {"update", "delete"}:
                continue
            if each.relation_id in self._told_keyed:
                continue
            self._told_keyed.add(each.relation_id)
            # Without a usable identity, the server would refuse UPDATE and DELETE in the other publication.
            has_identity = (table["identity"] or table["replica_identity"] == "f") and not table["unpublished_generated"]
            _logger.warning(
                "table %s has a key, and its publication (%s) has neither UPDATE nor DELETE, so its replica gets none: %smove it to"
                " the other publication (%s) in one transaction: ALTER PUBLICATION … DROP TABLE, then ADD TABLE, with its column"
                " list if it has one",
                each.table,
                " or ".join(companions),
                "" if has_identity else "give it a replica identity (ALTER TABLE … REPLICA IDENTITY DEFAULT), then ",
                " or ".join(publications),
            )

    def _want_renamed(self, before: Seen, now: Seen, homes: Homes) -> None:
        """Record tables that had another name for a while, between two looks, and changed under it.

        The stream has these changes, but in the tables of the other name. A table that has another name since the look before is
        not among them: it is one that came. Nor is a table whose changes from before it got its name may still be on the way.
        """
        same = {
            number: each
            for number, each in now.tables.items()
            if number in before.tables and before.tables[number].table == each.table
        }
        self._named_at = {number: self._named_at.get(number, before.lsn) for number in same}
        source = self._warehouse.source()
        reached = reached_lsn(self._warehouse, source)
        steady = [each for number, each in same.items() if self._named_at[number] <= reached]
        compared = source.position, [(each.relation_id, each.table) for each in steady]
        if compared != self._compared:  # otherwise nothing can have come to other tables
            for table, lsn in homes.changed_elsewhere(steady):
                wanted_copies.want_copy(self._warehouse, table, lsn, RENAMED)
            self._compared = compared

    def _is_keyed(self, table: Table) -> bool:
        versions = self._warehouse.versions(table)
        return bool(versions) and bool(versions[-1].key)
