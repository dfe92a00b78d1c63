"""Adds one table of a snapshot to its changelog and its replica, completely or not at all.

Executors write the files (snapshot/chunk.py) into a directory beside the tables. An object store has no rename, so there they write
the files of a new table into the table's own directory. (Files of a killed attempt stay there, but no commit adds them.) While the
server holds the snapshot, the next attempt continues with the missing chunks (snapshot/progress.py).

A table without a changelog: both tables are created in that directory, from the same files, and then renamed into place
(`NewTable` in changelog/interface.py). If rows have values that their columns can't hold, the replica is made from the changelog
instead, like any replica (merge.remake).

A table with a changelog: one commit adds the files. The changelog may have changes from before and from after their position,
because a snapshot counts as the whole table at its position (replica/merge.py). The snapshot of an empty table is a TRUNCATE. Then
one commit replaces the replica's contents, made from the changelog. A record in the warehouse says beforehand that this has to be
done, so that a pipeline can finish it after a kill. The snapshot holds the right to write the tables alone meanwhile
(warehouse/lock.py), but not while rows are read from the server.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pyspark.sql.pandas.types import to_arrow_schema

from cdcpipe.error_texts import without_values
from spark_sink.changelog.schema_history import SchemaHistory
from spark_sink.changelog.tables import changelogs_of
from spark_sink.changelog.versions import check_masked, insert_snapshot
from spark_sink.client.exported import STOPPED, SnapshotError
from spark_sink.files import places
from spark_sink.replica import merge
from spark_sink.replica.layout import replica_properties
from spark_sink.schema.catalog_answers import CatalogAnswers
from spark_sink.schema.keys import identifying_columns, version_of
from spark_sink.schema.types import (
    INEXACT_MESSAGE,
    assign_columns,
    merge_columns,
    original_name,
    split_schema,
    typed_schema,
)
from spark_sink.snapshot.chunk import ChunkTask, CopiedTable, select_columns, write_chunk, write_truncate
from spark_sink.snapshot.plan import LockedError, StaleSnapshotError
from spark_sink.snapshot.progress import begin, resume
from spark_sink.spark.worker import settle
from spark_sink.warehouse import landed_snapshots, new_changelogs, purged_changes
from spark_sink.warehouse.comments import read_comments, write_comments
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.former_names import FormerNames
from spark_sink.warehouse.unchanged import check_unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from spark_sink.files.parquet import Layout, WrittenFile
    from spark_sink.schema.table import Table, Version
    from spark_sink.snapshot.plan import TablePlan
    from spark_sink.snapshot.progress import Begun, Written
    from spark_sink.staging.log import Position
    from spark_sink.warehouse.lock import TableLock
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["Copying", "copy_table"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copying:
    """What all tables of a snapshot share."""

    spark: SparkSession
    warehouse: Warehouse
    scratch: Path
    """The snapshot's directory, on the warehouse's file system."""
    connection: str
    snapshot: str
    position: Position
    time_us: int
    """The time at this position: that of the snapshot, also if the copy of a table begins hours later."""
    is_utf8: bool
    rows: Any
    chunks: Any
    """Spark accumulators for the copied rows and chunks."""
    leave_out: Callable[[int, int], None]
    """A function that is called with the numbers of chunks and rows that an earlier run has copied."""
    is_stopping: Callable[[], bool]
    lock: TableLock


def copy_table(copying: Copying, plan: TablePlan, table: Table) -> int:
    """Copy a published table to a table of the warehouse (homes.py), and return the number of its rows."""
    masks, own = copying.warehouse.masks, (plan.relation.namespace, plan.relation.name)
    names = [column.name for column in plan.relation.columns]
    masks.check_there(*own, names)
    former = {table}
    if masks.may_name(*own, names):
        parts = [chunk.relation_id for chunk in plan.chunks]
        former |= FormerNames(copying.warehouse).of(plan.relation.relation_id, copying.position.lsn, parts) | plan.relatives
    for each in sorted(former):
        masks.check_renamed((each.schema, each.name), own, names)
    masks.check_key(*own, names, plan.primary_key)
    if masks.rules:
        schemas = SchemaHistory(copying.spark, copying.warehouse, CatalogAnswers(None))
        columns = dict(zip(plan.numbers, names, strict=True))
        check_masked(copying.warehouse, schemas, table, plan.relation, columns, copying.position.lsn)
    selects = tuple(select_columns(plan.relation, masks.kinds(*own, names)))
    plan = replace(plan, relation=copying.warehouse.typed(plan.relation), selects=selects, described=plan.relation.columns)
    count = None
    if not copying.warehouse.has_changelog(table):
        count = _copy_first(copying, plan, table)
    # The table's first changes may have created the changelog meanwhile: then _copy_first returns None.
    return _copy_later(copying, plan, table) if count is None else count


def _copy_first(copying: Copying, plan: TablePlan, table: Table) -> int | None:
    """Copy a table that has no changelog. If it has got one meanwhile, change nothing and return None."""
    warehouse = copying.warehouse
    check_unchanged(warehouse)  # here, too: a copy takes long
    columns = merge_columns(None, [plan.relation], sanitize=warehouse.sanitizes_names)
    version = _version(copying, plan, columns, [])
    scratch = copying.scratch / str(plan.relation.relation_id)
    directory = scratch / "changelog" if places.is_local(warehouse.root) else warehouse.changelog(table)
    purpose = _purpose(copying, plan, "new", typed_schema(columns).json(), directory)
    begun = resume(scratch / "notes", purpose)
    changelogs = changelogs_of(copying.spark, warehouse)
    made = changelogs.new_table(
        table,
        columns,
        directory,
        replica_properties(warehouse, version.key, columns.names) if version.key else None,
        () if begun is None else begun.definition,
    )
    if begun is None:
        begun = begin(scratch / "notes", purpose, plan.chunks, made.definition)
    written = _run(copying, table, begun, _copied(copying, plan, begun, columns, made.directory, made.layout), plan.locked)
    has_exact = any(each.exact for each in written)
    made.prepare(_full(written), copying.position, with_replica=not has_exact)
    with copying.lock.alone(copying.is_stopping):
        if warehouse.has_changelog(table):
            return None
        check_unchanged(warehouse)
        landed_snapshots.record_start(warehouse, table, copying.position)
        comments = read_comments(warehouse, table)
        new_changelogs.record_begin(warehouse, table, copying.position.lsn - 1)
        warehouse.write_versions(table, [_landing(version)])
        # A replica without a changelog is left from an attempt that ended between the two renames.
        places.remove_tree(warehouse.replica(table))
        made.land()
        if warehouse.format.keeps_replicas and has_exact:
            merge.remake(copying.spark, warehouse, table, copying.position)
        if comments is not None:
            changelogs.comment(table, comments)
            write_comments(warehouse, table, comments)
        landed_snapshots.record_end(warehouse, table)
    return sum(each.rows for each in written)


def _check_not_purged(warehouse: Warehouse, table: Table, position: Position) -> None:
    """Raise StaleSnapshotError unless all changes from the copy's position on are there."""
    if purged_changes.last_lsn(warehouse, table) >= position.lsn:
        raise StaleSnapshotError(f"changes of {table} from after its copy began were purged meanwhile")


def _copy_later(copying: Copying, plan: TablePlan, table: Table) -> int:
    """Copy a table that has a changelog."""
    spark, warehouse, position = copying.spark, copying.warehouse, copying.position
    if any(version.place == (position.lsn, 0) for version in warehouse.versions(table)):
        raise StaleSnapshotError(
            f"the copy of {table} was killed while it added rows to the changelog, which may have them already"
        )
    _check_not_purged(warehouse, table, position)  # here, too: a copy takes long
    columns, layout = _prepare_changelog(copying, plan, table)
    scratch = copying.scratch / f"{plan.relation.relation_id}-later"
    directory = scratch / "files"
    purpose = _purpose(copying, plan, "later", columns.json(), layout)
    begun = resume(scratch / "notes", purpose) or begin(scratch / "notes", purpose, plan.chunks)
    places.make_directory(directory)
    written = _run(copying, table, begun, _copied(copying, plan, begun, columns, directory, layout), plan.locked)
    full = _full(written)
    places.remove_other_files(directory, (file.name for file in full))
    if not full:
        full = [write_truncate(places.name(directory), layout, position.epoch, position.lsn, copying.time_us)]
    with copying.lock.alone(copying.is_stopping):
        check_unchanged(warehouse)
        _check_not_purged(warehouse, table, position)
        begun.end()
        landed_snapshots.record_start(warehouse, table, position, adds_rows=True)
        versions = warehouse.versions(table)
        schemas = SchemaHistory(spark, warehouse, CatalogAnswers(None))
        version = _landing(_version(copying, plan, columns, versions))
        warehouse.write_versions(table, insert_snapshot(versions, version, schemas, columns, warehouse, table))
        changelogs_of(spark, warehouse).add_snapshot(table, directory, full, position)
        if warehouse.format.keeps_replicas:
            merge.remake(spark, warehouse, table, position)
        landed_snapshots.record_end(warehouse, table)
    return sum(each.rows for each in written)


def _prepare_changelog(copying: Copying, plan: TablePlan, table: Table) -> tuple[StructType, Layout]:
    """Add to a changelog the columns that it needs. Returns its columns, and the layout of its files."""
    warehouse, changelogs = copying.warehouse, changelogs_of(copying.spark, copying.warehouse)
    with copying.lock.alone(copying.is_stopping):
        check_unchanged(warehouse)
        state = changelogs.state(table)
        if state is None:
            raise WarehouseError(f"the changelog of {table} does not exist any more", hint="start again")
        known, how = split_schema(state.schema)[0], {"widen": warehouse.widens_columns, "sanitize": warehouse.sanitizes_names}
        columns = merge_columns(known, [plan.relation], **how)
        return columns, changelogs.snapshot_layout(table, typed_schema(columns))


def _version(copying: Copying, plan: TablePlan, columns: StructType, versions: Sequence[Version]) -> Version:
    """Return the table's version at the snapshot. If PostgreSQL has no key for it, the key of the last version is used."""
    relation = plan.relation
    before = [version for version in versions if version.relation_id == relation.relation_id]
    known = plan.primary_key or tuple(original_name(name) for name in (before[-1].key if before else ()))
    version = version_of(
        copying.position.lsn, 0, relation, columns, identifying_columns(relation, lambda: known, lambda: plan.identity)
    )
    fields = assign_columns(columns, relation)
    return replace(
        version,
        snapshot=tuple(zip(plan.numbers, (field.name for field in fields), strict=True)),
        described=tuple(
            (number, column.name, column.type_id, column.type_modifier)
            for number, column in zip(plan.numbers, plan.described, strict=True)
        ),
        is_whole=plan.is_whole,
    )


def _landing(version: Version) -> Version:
    """Return the version of a snapshot whose rows come to the tables now: reading them may have taken hours."""
    return replace(version, copied_at=int(time.time()))


def _copied(copying: Copying, plan: TablePlan, begun: Begun, columns: StructType, directory: Path, layout: Layout) -> CopiedTable:
    """Return what the tasks of a table share. ``columns`` are the columns of the changelog."""
    return CopiedTable(
        connection=copying.connection,
        snapshot=copying.snapshot,
        shares=sum(chunk.share for chunk in begun.chunks),
        condition=plan.condition,
        selects=plan.selects,
        masks=copying.warehouse.masks.with_key(),
        names=tuple(field.name for field in assign_columns(columns, plan.relation)),
        types=to_arrow_schema(columns, timezone="UTC"),
        epoch=copying.position.epoch,
        lsn=copying.position.lsn,
        time_us=copying.time_us,
        directory=places.name(directory),
        layout=layout,
        is_utf8=copying.is_utf8,
    )


def _tasks(begun: Begun) -> list[ChunkTask]:
    """Return the tasks for the chunks that are not copied yet."""
    first_ordinals = accumulate((chunk.share for chunk in begun.chunks), initial=0)
    return [
        ChunkTask(chunk, number, places.name(begun.record_path(number)), first_ordinal)
        for number, (chunk, first_ordinal) in enumerate(zip(begun.chunks, first_ordinals, strict=False))
        if number not in begun.done
    ]


def _run(copying: Copying, table: Table, begun: Begun, copied: CopiedTable, locked: frozenset[int]) -> list[Written]:
    """Let executors write the missing chunks. Logs the columns with values that their type can't hold.

    ``locked`` has the relations whose chunks wait for a lock.
    """
    if copying.is_stopping():
        raise SnapshotError(STOPPED)
    there = list(begun.done.values())
    if there:
        _logger.info("%s: an earlier run has copied %d of %d chunks", table, len(there), len(begun.chunks))
        copying.leave_out(len(there), sum(each.rows for each in there))
    rows, chunks = copying.rows, copying.chunks

    def write(task: ChunkTask) -> Written | str:
        try:
            with without_values():
                written = write_chunk(copied, task, rows.add)
        except LockedError as ex:  # the task has not read anything yet, so it can be tried again
            return ex.message
        settle()
        chunks.add(1)
        return written

    tasks, found, is_told, number = _tasks(begun), there, False, 0
    # A partitioned table without partitions has no chunks. A copy that was killed at its end has none left.
    while tasks:
        number += 1
        trying = [replace(task, round=number) for task in _without_waiting(tasks, locked)]
        answers = copying.spark.sparkContext.parallelize(trying, len(trying)).map(write).collect()
        found += [each for each in answers if not isinstance(each, str)]
        waiting = [(task, each) for task, each in zip(trying, answers, strict=True) if isinstance(each, str)]
        if waiting and not is_told:
            _logger.warning("waiting: %s", waiting[0][1])
            is_told = True
        locked = frozenset(task.chunk.relation_id for task, _ in waiting)
        written = {task.number for task in trying}.difference(task.number for task, _ in waiting)
        tasks = [task for task in tasks if task.number not in written]
        if tasks and copying.is_stopping():
            raise SnapshotError(STOPPED)
    exact: Counter[str] = sum((Counter(each.exact) for each in found), Counter())
    for name, count in sorted(exact.items()):
        _logger.warning(INEXACT_MESSAGE, table, name, count)
    return found


def _without_waiting(tasks: Sequence[ChunkTask], locked: frozenset[int]) -> list[ChunkTask]:
    """Return the tasks to try now: of each locked relation only one. Those behind it would only find the lock, too."""
    tried: set[int] = set()
    found = []
    for task in tasks:
        own = task.chunk.relation_id
        if own not in locked or own not in tried:
            found.append(task)
        tried.add(own)
    return found


def _purpose(copying: Copying, plan: TablePlan, *more: object) -> str:
    """Return a digest of what must be the same to resume a copy: the snapshot, the table, the copied part of it, and ``more``."""
    parts = sorted({(chunk.relation_id, chunk.table, chunk.file) for chunk in plan.chunks})
    described = (
        copying.snapshot,
        copying.position,
        plan.relation,
        plan.numbers,
        plan.condition,
        parts,
        plan.selects,
        copying.warehouse.masks.fingerprint,
        *more,
    )
    return hashlib.sha256("\n".join(map(str, described)).encode()).hexdigest()


def _full(written: Iterable[Written]) -> list[WrittenFile]:
    """Return the files that have rows."""
    return [each.file for each in written if each.rows]
