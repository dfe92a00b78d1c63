"""Finds the slot of a stream, or creates it with its publications; checks that plugin and publications fit the stream."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from cdcpipe.catalog_sql import published
from cdcpipe.config import SlotConfig, StreamConfig
from cdcpipe.errors import CdcpipeError, InitError, LostSlotError
from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.waiting import NO_LIMIT
from cdcpipe.publishing import INSERT_ONLY, own
from cdcpipe.replication.commands import parse_publication_names
from cdcpipe.replication.failover import failover_of_existing_slot, failover_of_new_slot
from cdcpipe.replication.new_publications import check_companions, check_left_out, contents, differences
from cdcpipe.replication.publications import (
    check_companion,
    check_named,
    check_publications,
    create_publication,
    missing_publications,
)
from cdcpipe.replication.selection import check_identities, check_owned, select
from cdcpipe.replication.server import check_wal_level, copies_slots, is_standby
from cdcpipe.replication.slot_creation import NewSlot, check_creatable, create_slot
from cdcpipe.replication.slots import Slot, check_usable, drop_lost, find_slot, missing_slot_error
from cdcpipe.replication.tables import PublishedTable, describe, published_tables
from cdcpipe.sql import quote_literal
from cdcpipe.units import few

__all__ = [
    "asked_publications",
    "check_new_slot",
    "check_plugin",
    "check_published",
    "find_or_create_slot",
    "telling_of_new_slot",
]

log = logging.getLogger(__name__)


def find_or_create_slot(
    connection: Connection,
    config: SlotConfig,
    publications: list[str],
    make: Callable[[NewSlot], None] | None = None,
    check: Callable[[list[PublishedTable]], None] | None = None,
    await_copy: Callable[[], None] | None = None,
    deadline: float | None = None,
) -> Slot:
    """Return the slot's state. If the slot does not exist and the configuration asks for it, create publications and slot first.

    The publications are created before the slot. For changes older than a publication, the publication does not exist.
    ``make`` replaces the SQL function that creates the slot. ``check`` is called before anything is made, with the tables of the
    stream (none if the plugin is not pgoutput). It should refuse whatever would stop the stream later: a slot that nobody reads
    retains WAL.

    A standby that copies slots may not have made its copy yet. A slot of its own with the name of the copy would stop its copying
    of all slots. So it gets none, unless the configuration asks for one without a copy. ``await_copy`` waits for the copy, or for
    the promotion, also if no slot is to be created. Without it, InitError is raised if one is.

    The creation may take the configuration's limit, and no longer than until ``deadline``, a time of `time.monotonic`.
    """
    slot = find_slot(connection, config.slot)
    is_to_be_there = config.create or await_copy is not None
    while slot is None and is_to_be_there and config.failover is not False and copies_slots(connection):
        if await_copy is None:
            raise _copy_missing_error(config.slot)
        await_copy()
        slot = find_slot(connection, config.slot)
    lost = slot if slot is not None and _is_to_be_replaced(connection, config, slot) else None
    if config.plugin == "pgoutput":
        check_left_out(connection, publications, config.new_publication)
        for text in differences(connection, publications, config.new_publication):
            log.warning("%s", text)
    if slot is None or lost is not None:
        check_wal_level(connection)  # where there is a logical slot, the server has this level
        if not config.create:
            raise missing_slot_error(config.slot)
        if lost is None:
            check_creatable(connection, config.slot)
        failover = failover_of_new_slot(connection, config.plugin, config.failover)
        new = NewSlot(config.slot, config.plugin, failover, is_standby(connection), _creation_limit_s(config, deadline))
        if config.plugin == "pgoutput":
            _create_publications(connection, config, publications, check)
        elif check is not None:
            check([])
        if lost is not None:
            drop_lost(connection, lost)
        log.info("creating replication slot %r with plugin %s", config.slot, config.plugin)
        if make is None:
            is_new = create_slot(connection, new)
        else:
            make(new)
            is_new = True
        slot = find_slot(connection, config.slot)
        if slot is None:
            raise missing_slot_error(config.slot)
        slot = replace(slot, is_new=is_new)
    check_usable(connection, slot)
    if config.is_plugin_asked and slot.plugin != config.plugin:
        log.warning("replication slot %r exists with the plugin %s: -P %s has no effect", slot.name, slot.plugin, config.plugin)
    if not slot.is_new and failover_of_existing_slot(connection, slot, config.failover):
        slot = replace(slot, failover=True)
    return slot


def _creation_limit_s(config: SlotConfig, deadline: float | None) -> float | None:
    if deadline is None:
        return config.create_timeout_s
    return min(config.create_timeout_s or NO_LIMIT, max(deadline - time.monotonic(), 0.1))


def _copy_missing_error(name: str) -> InitError:
    return InitError(
        f"the server is a standby that copies its primary's slots (sync_replication_slots), and has no copy of a slot {name!r}: a"
        " slot that is made here would stop the copying of all slots if the primary has, or gets, one of this name",
        hint="connect to the primary; or wait for the promotion (cdcpipe --poll-mode, cdcpipe --standby); or make a slot for this"
        " standby alone, with a name that no slot of the primary has: --failover no",
    )


def _is_to_be_replaced(connection: Connection, config: SlotConfig, slot: Slot) -> bool:
    """Tell whether the slot is lost, and the configuration asks for another one in its place.

    Raises InitError for a slot of another kind or database.
    """
    if not (config.create and config.replace_lost):
        return False
    try:
        check_usable(connection, slot)
    except LostSlotError:
        return True
    return False


@contextmanager
def telling_of_new_slot(slot: Slot) -> Iterator[None]:
    """Add to the hint of an error that this process has created the slot, and how to drop it.

    A signal or a closed pipe ends the command without a message. Then a warning says the same.
    """
    made = (
        f"replication slot {slot.name!r} is there now, and retains WAL until it is used or dropped"
        f" (SELECT pg_drop_replication_slot({quote_literal(slot.name)}))"
    )
    try:
        yield
    except CdcpipeError as ex:
        if slot.is_new:
            ex.hint = made if ex.hint is None else f"{ex.hint}; {made}"
        raise
    except BaseException as ex:
        is_end = isinstance(ex, BrokenPipeError) or not isinstance(ex, Exception)
        if slot.is_new and is_end:
            log.warning("%s", made)
        raise


def _create_publications(
    connection: Connection,
    config: SlotConfig,
    publications: list[str],
    check: Callable[[list[PublishedTable]], None] | None,
) -> None:
    """Create the publications that do not exist. Whatever can be refused is refused before the first one is created."""
    wanted = config.new_publication
    missing = missing_publications(connection, publications)
    check_companion(connection, publications)
    check_companions(publications, missing, wanted)
    selection = select(connection, wanted) if missing else None
    sources = [published(publications, connection.server_version)] if publications else []
    if selection is not None:
        made = contents(missing[0], selection, wanted)
        if not made[0].is_all:
            check_owned(connection, selection)
        check_identities(missing[0], selection, wanted.keyless)
        sources += [each.source for each in made]
    if check is not None:
        check([table for source in sources for table in describe(connection, source)])
    if selection is not None:
        for name in own(missing) if wanted.keyless == INSERT_ONLY else missing:
            log.info("creating publication %r", name)
            create_publication(connection, name, selection, wanted)


def asked_publications(config: StreamConfig) -> list[str]:
    """Return the publications that a stream asks for: those of ``-o publication_names=…``, if it is given."""
    value = config.options.get("publication_names")
    return parse_publication_names(value) if value else list(config.slot.publications)


def check_plugin(config: StreamConfig, plugin: str | None, verb: str = "has") -> None:
    """Refuse what needs a pgoutput slot, if the slot has another plugin of the server."""
    if plugin == "pgoutput":
        return
    what = f"replication slot {config.slot.slot!r} {verb} the plugin {plugin}"
    if config.slot.publications:
        raise InitError(f"{what}, which knows no publications", hint="leave --publication out, or name a slot with pgoutput")
    if config.output not in (None, plugin):
        raise InitError(
            f"{what}; cdcpipe can write the records of {config.output} only from a slot with the plugin pgoutput",
            hint="name a slot with pgoutput, or create one: -c -P pgoutput",
        )
    if config.whole_transactions:
        raise InitError(
            f"{what}; cdcpipe can put whole transactions together only from a slot with the plugin pgoutput",
            hint="leave --whole-transactions out, or name a slot with pgoutput",
        )


def check_new_slot(config: StreamConfig, publications: list[str]) -> None:
    """Refuse to create a slot from which the stream of this configuration could not start."""
    check_plugin(config, config.slot.plugin, "would get")
    if config.slot.plugin == "pgoutput":
        check_named(publications)


def check_published(connection: Connection, publications: list[str], *, quiet: bool = False) -> list[PublishedTable]:
    """Check the publications, and return their tables.

    Unless ``quiet``, warn of tables on which the server refuses UPDATE or DELETE.
    """
    check_publications(connection, publications)
    tables = published_tables(connection, publications)
    for table in tables:
        if table.refused and not quiet:
            remedy = "give it a primary key (one that is not deferrable), or ALTER TABLE … REPLICA IDENTITY FULL"
            if table.unpublished_generated:
                remedy = (
                    f"a usable one lacks the generated columns that are not published ({few(table.unpublished_generated)}): ALTER"
                    " TABLE … REPLICA IDENTITY DEFAULT for the primary key, or USING INDEX"
                )
            log.warning(
                "table %s.%s has no usable replica identity: the server refuses %s on it while that is published; %s",
                table.schema,
                table.name,
                " and ".join(table.refused),
                remedy,
            )
    return tables
