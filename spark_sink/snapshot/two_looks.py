"""Finds tables whose rows have changed without a change in the stream, by two looks at the catalog. No Spark.

    begin(house, config, prepared, is_stopping)     # the first run
    ...
    before, found, homes = read(house), look(config, is_stopping), Homes(house)
    kept = undecided(before, found, homes)
    for need in compare(before, found, lambda table: False, homes, kept):
        want_copy(house, need.table, need.since_lsn, need.reason)
    write(house, seen(found, kept))

So a table that comes into a publication comes to the warehouse with its rows, even if nobody ever changes them. The record is in
the warehouse (warehouse/last_look.py), so that the next run finds what happened while nobody looked.
cdcpipe/replication/table_parts.py explains what ``cdcpipe prepare --parts`` tells.

The first look only records: tables that a pipeline leaves out on purpose (``--snapshot never``, a slot that existed before) stay as
they are. So does the first look at another server, but not after a pg_upgrade that took the slot along (`last_look.follow`).
Two looks see the same if a launcher did not ask for a publication in between. So `follow` has what such an epoch left out.

The catalog is further than the stream. So a table with another name may be one that was renamed, which the stream will tell if DDL
is captured. Such a table is undecided: its record stays as it was, until the tables have come as far as the look that saw the name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdcpipe.errors import CdcpipeError
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.client.failure import error_of
from spark_sink.client.prepare import Prepared, prepare_arguments
from spark_sink.client.process import ask
from spark_sink.schema.table import Table
from spark_sink.warehouse.last_look import Seen, SeenTable, read, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from spark_sink.client.prepare import SlotOptions
    from spark_sink.snapshot.homes import Homes
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["Need", "begin", "compare", "deleted", "gone", "look", "published", "seen", "undecided"]

_logger = logging.getLogger(__name__)

DELETED = "its files were deleted from the warehouse"
ATTACHED = "a partition came with rows, or was unlogged"
CAME = "it has come into the publication"
NOT_COPIED = "its rows from before the first change were not copied"
CAME_BACK = "it left the publication, and has come back"
KEY = "it has got a key"
MORE_COLUMNS = "a column that it had is published now, and was not before"
MORE_OPERATIONS = "its publication did not publish all of its changes"
MORE_ROWS = "its publication has another row filter, or none any more"
REPLACED = "another table has its name now"
REWRITTEN = "ALTER TABLE, or the first VACUUM FULL or CLUSTER after ADD COLUMN … DEFAULT, has rewritten its rows"


_NOTHING: Final[Mapping[int, SeenTable]] = MappingProxyType({})


class Need(NamedTuple):
    """A table that needs a copy from ``since_lsn`` or later."""

    table: Table
    since_lsn: int
    reason: str


def look(config: SlotOptions, is_stopping: Callable[[], bool]) -> Prepared:
    """Ask for the published tables and their parts. Raises an error if the server can't be asked."""
    arguments = [*prepare_arguments(config), "--in-use", "--quiet", "--parts"]
    answer = ask(arguments, command=config.command, is_stopping=is_stopping)
    if answer.code != ExitCode.SUCCESS:
        raise error_of(answer.failure)
    return Prepared.parse(answer.output)


def begin(house: Warehouse, config: SlotOptions, prepared: Prepared, is_stopping: Callable[[], bool]) -> None:
    """Make the first look, unless there was one. ``prepared`` is taken in its place if the server of the log can't be asked.

    With several hosts, the look may come to an old primary, or to one that was promoted just now. Raises InterruptedError once
    ``is_stopping`` is True.
    """
    if read(house) is not None or (house.exists and not _is_of(house, config, prepared)):
        return
    try:
        found = look(config, is_stopping)
    except CdcpipeError as ex:
        _logger.info("cannot look at the catalog for the parts of tables: %s", ex.message)
        found = prepared
    if _place(found) != _place(prepared):
        _logger.info("cannot look at the catalog for the parts of tables: this is not the server that the launcher reads from")
        found = prepared
    write(house, seen(found))


def _place(found: Prepared) -> tuple[str, int, int | None]:
    """Return what tells the server and its timeline from others: two standbys may call their timelines by the same number."""
    return found.system_id, found.timeline, found.timeline_began_at.get(found.timeline)


def _is_of(house: Warehouse, config: SlotOptions, prepared: Prepared) -> bool:
    """Tell whether the warehouse has the changes of this slot. If not, the run is about to refuse it."""
    source = house.source()
    return (source.slot, source.system_id, source.database) == (config.slot, prepared.system_id, prepared.database)


def published(tables: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return those of the published ``tables`` that have columns: without any there is nothing to copy anew."""
    return [each for each in tables if each["columns"]]


def seen(found: Prepared, kept: Mapping[int, SeenTable] = _NOTHING, homes: Homes | None = None) -> Seen:
    """Return what is kept of an answer, with those that are ``kept`` of the look before. ``homes`` has the warehouse's tables."""
    tables: Iterable[SeenTable] = map(SeenTable.of, published(found.tables))
    if homes is not None:
        tables = [replace(each, is_known=homes.has(each.relation_id, each.table)) for each in tables]
    return Seen(found.system_id, int(found.wal_lsn), {each.relation_id: kept.get(each.relation_id, each) for each in tables})


def undecided(before: Seen | None, found: Prepared, homes: Homes) -> dict[int, SeenTable]:
    """Return what is to be kept of tables that have another name now, if the stream has not told yet whether they were renamed."""
    if before is None or before.system_id != found.system_id:
        return {}
    kept = {}
    for now in map(SeenTable.of, published(found.tables)):
        then = before.tables.get(now.relation_id)
        lsn = None if then is None else then.undecided_lsn
        if then is not None and then.table == now.table and lsn is None:
            continue
        lsn = int(found.wal_lsn) if lsn is None else lsn
        if not homes.is_certain(now.relation_id, now.table) and not homes.knows(lsn):
            kept[now.relation_id] = replace(then or now, undecided_lsn=lsn)
    return kept


def deleted(before: Seen | None, homes: Homes) -> list[Need]:
    """Return the tables that the warehouse had at the look ``before``, and has not any more: somebody has deleted their files."""
    if before is None:
        return []
    gone = [each for each in before.tables.values() if each.is_known and not homes.has(each.relation_id, each.table)]
    return [Need(homes.table(each.relation_id, each.table), before.lsn, DELETED) for each in gone]


def gone(before: Seen | None, found: Prepared, homes: Homes, kept: Mapping[int, SeenTable]) -> dict[Table, Table | None]:
    """Return the tables of the warehouse that were published at the look ``before``, and get no changes any more.

    Each has the name under which its rows are published now, in other tables of the warehouse; None if they are not. What is
    ``kept`` may have been renamed with its tables.
    """
    if before is None or before.system_id != found.system_id:
        return {}
    now = {each.relation_id: each for each in map(SeenTable.of, found.tables)}
    fed = {homes.table(each.relation_id, each.table) for each in {**now, **kept}.values()}
    left = {homes.table(each.relation_id, each.table): each.relation_id for each in before.tables.values() if each.is_known}
    return {table: now[number].table if number in now else None for table, number in sorted(left.items()) if table not in fed}


def compare(
    before: Seen | None,
    found: Prepared,
    is_keyed: Callable[[Table], bool],
    homes: Homes,
    kept: Mapping[int, SeenTable],
) -> list[Need]:
    """Return the tables that need a copy, without those that are ``kept``.

    ``is_keyed`` tells whether the warehouse knows a key of the table already. ``homes`` has the tables of the warehouse.
    """
    if before is None or before.system_id != found.system_id:
        return []
    new = [each for each in published(found.tables) if int(each["relation_id"]) not in kept]
    return [need for each in new for need in _compare(before, each, int(found.wal_lsn), is_keyed, homes)]


def _may_let_more_through(then: SeenTable, now: SeenTable) -> bool:
    """Tell whether a filter is gone, or is another one: nobody can tell whether that one lets more rows through.

    Each operation counts for itself. Rows that an UPDATE has changed, or a DELETE has removed, may be in the tables as they were.
    """
    if then.filters is None or now.filters is None:
        return False
    for operation in now.operations or ():
        before, after = ({each for each in filters if each.startswith(f"{operation} ")} for filters in (then.filters, now.filters))
        if before and (not after or after - before):
            return True
    return False


def _compare(before: Seen, found: Mapping[str, Any], lsn: int, is_keyed: Callable[[Table], bool], homes: Homes) -> Iterator[Need]:
    now = SeenTable.of(found)
    then, table = before.tables.get(now.relation_id), homes.table(now.relation_id, now.table)
    is_new = then is None or (then.table == now.table and then.undecided_lsn is not None)
    if then is None or is_new or homes.table(then.relation_id, then.table) != table:
        others = (each for each in before.tables.values() if each.relation_id != now.relation_id)
        is_replaced = any(each.table == now.table for each in others)
        # A copy from before this look does not settle it: what has changed since that copy is not found in what this look records.
        yield Need(table, lsn, REPLACED if is_replaced else CAME)
        return
    if then.published_by and now.published_by and not set(then.published_by) & set(now.published_by):
        yield Need(table, lsn, CAME_BACK)
    if then.operations is not None and now.operations is not None and now.operations - then.operations:
        yield Need(table, lsn, MORE_OPERATIONS)
    if _may_let_more_through(then, now):
        yield Need(table, lsn, MORE_ROWS)
    if then.unpublished and now.unpublished is not None and then.unpublished - now.unpublished:
        yield Need(table, lsn, MORE_COLUMNS)
    if now.has_key and not then.has_key and not is_keyed(table):
        yield Need(table, lsn, KEY)
    if then.parts is None or now.parts is None:
        return
    files = [(then.parts[number], part) for number, part in now.parts.items() if number in then.parts]
    if any(old[0] != new[0] and old[1] != new[1] for old, new in files):
        yield Need(table, lsn, REWRITTEN)
    # Of an unlogged part, whose file is 0, the stream has neither the rows nor that a crash of the server has emptied it.
    was_unlogged = any(not old[0] and new[0] for old, new in files)
    if was_unlogged or any(each["has_rows"] and each["relation_id"] not in then.parts for each in found["parts"]):
        yield Need(table, lsn, ATTACHED)
