"""The warehouse: the paths of its tables, the source of its changes, and the positions that it has reached. No pyspark.

    _cdcpipe/warehouse.json        the source (server, database, slot), the table format, --types, the position
    _cdcpipe/names.json            the names of tables that were renamed (schema/names.py)
    _cdcpipe/tables/NAME.json      a table's versions: its keys, each with the first change to which it applies
    _cdcpipe/snapshot.json         whether the initial snapshot has begun, or is complete (warehouse/initial_copy.py)
    _cdcpipe/snapshot.lock         the lock of what copies tables (snapshot/tables.py)
    _cdcpipe/snapshot/             files of the initial snapshot that are not part of a table yet (snapshot/copy.py)
    _cdcpipe/snapshot_tables/      the same of copies of single tables (snapshot/tables.py)
    _cdcpipe/snapshot_gap/         the same of copies after a gap (snapshot/gap.py)
    _cdcpipe/*_export/             the snapshot that the server holds for one of these (client/exported.py)
    _cdcpipe/snapshots/NAME.json   a snapshot of the table that is being landed (landed_snapshots.py)
    _cdcpipe/masks.json            the masked columns, and the masks before (warehouse/mask_settings.py)
    _cdcpipe/gaps.json             the gaps of the log, and whether the tables were copied since (warehouse/gaps.py)
    _cdcpipe/published.json        the published tables at the last look (snapshot/two_looks.py)
    _cdcpipe/comments/NAME.json    the comments of the table and its columns (warehouse/comments.py)
    _cdcpipe/dropped/NAME.json     where the table was dropped (dropped_tables.py)
    _cdcpipe/copies/NAME.json      why the table needs a copy (warehouse/wanted_copies.py)
    _cdcpipe/copies.lock           the lock for writing these (warehouse/wanted_copies.py)
    _cdcpipe/merges/NAME.json      a merge by Spark whose rows may not be counted yet (warehouse/unchecked_merges.py)
    _cdcpipe/purged/NAME.json      the LSN up to which the table's changelog may lack changes (purged_changes.py)
    _cdcpipe/begun/NAME.json       where the table's changelog began anew, beside a stored history (new_changelogs.py)
    _cdcpipe/tables*.lock          the locks for writing the tables (warehouse/lock.py)
    _cdcpipe/merges*.lock          those of them that merges share (warehouse/lock.py)
    _cdcpipe/pipeline.lock         the lock of the one pipeline (warehouse/lock.py)
    _cdcpipe/vacuumed.json         the time of each table's last VACUUM, and of the last purge (upkeep/recorded_times.py)
    _cdcpipe/complete.json         the options of the last run with --available-now that did everything (pipeline/at_rest.py)
    _cdcpipe/checkpoint/           Spark's checkpoint of the stream of segments (CHECKPOINT)
    changelog/NAME/                every change once (changelog/tables.py)
    changelog/_cdc_message/        every logical message once
    changelog/_cdc_schema_history/ every version of a table's schema once (changelog/schema_history.py)
    changelog/_cdc_ddl/            every message of captured DDL once (changelog/ddl_log.py)
    replica/NAME/                  the current rows (replica/merge.py; only with Delta Lake, with Parquet a view)
    history/NAME/                  every version of the rows (replica/history_table.py; only with ``--history table``)

If the warehouse is in an object store, locks, checkpoint and ``*_export/`` are in the staging directory (`Warehouse.local_root`),
and the warehouse has a file _cdcpipe/store_check (files/places.py).

NAME is ``<schema>.<table>``; in both parts every byte but ``a-z 0-9 _ -`` is percent-encoded. The reasons: Spark skips names that
begin with ``_`` or ``.``, and reads ``{a,b}`` and ``[1]`` as patterns and ``a=1`` as a partition. A table may be called ``..``, or
have a slash in its name. Some file systems do not distinguish ``T`` from ``t``, or two forms of ``é``.

A table that is renamed keeps its directories. A table that then gets the old name has the directories ``NAME~OID``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import LSN, format_lsn
from cdcpipe.masks import Masks, mask_options
from spark_sink.delta.log import LogCache
from spark_sink.files.local import NEWER
from spark_sink.files.parsed import ParsedFiles
from spark_sink.files.places import check_store, is_local, make_directory, map_reads, place, read_json, remove_files, write_json
from spark_sink.files.places import name as place_name
from spark_sink.schema.names import Names
from spark_sink.schema.table import EXACT, Table, Version, versions_from_json
from spark_sink.staging.log import Epoch, Position, epoch_of, has_log
from spark_sink.warehouse.errors import WarehouseError, undamaged
from spark_sink.warehouse.formats import APART, FORMATS, HARD, KEEP, OFF, SANITIZE, SOFT, SPARK, TABLE, YES, table_format
from spark_sink.warehouse.local_root import check_alone, check_locks, root_in_staging

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from cdcpipe.pgoutput.messages import Relation

__all__ = ["MASKS_VERSION", "Source", "Warehouse", "another", "choices", "encode_name", "masks_path", "noted_masks"]


CHECKPOINT: Final = "_cdcpipe/checkpoint"
"""The default path of Spark's checkpoint, below `Warehouse.local_root`."""

READER: Final = "tables"
"""The name of the reader in the staging directory that records the position of the tables."""

COMPLETE: Final = "complete.json"
"""The file, beside warehouse.json, with the options of a run that left nothing to do."""

FIRST_CHANGES: Final = "wait until cdcpipe-spark run has brought the first changes"
"""The hint for a warehouse that no changes have reached."""

_LAYOUT_VERSION = 1
"""The version of this layout. Every command refuses a warehouse of another version.

An older program works with every warehouse of a version that it knows, and ignores what it does not know. So a new choice of a run
that an older program would undo or misread needs another version. Only warehouses with that choice get it.
"""

MASKS_VERSION: Final = 1
"""The version of masks.json."""

_NO_TIMELINE: Final[Mapping[str, Any]] = {"timeline": 0, "timeline_began": format_lsn(0)}
"""What warehouse.json has of the position's timeline if it is not known."""

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
_HIDDEN_FIRST = frozenset(b"_-")
_NAME_LIMIT = 200
"""The most bytes of a file name. File systems allow 255, but Hadoop adds a prefix and a suffix."""


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a warehouse's changes, and their range from ``begin`` to ``position``. Facts that are not recorded are None."""

    system_id: str
    database: str
    slot: str
    publications: tuple[str, ...]
    staging: Path | None
    begin: Position | None
    position: Position | None
    epoch_token: str = ""
    """The token of the epoch in ``position`` (staging/log.py); empty if it is not recorded."""
    timeline: int = 0
    """The server's timeline in that epoch, or without a position in the first one; 0 if it is not known: after pg_upgrade, or if
    the log lacked the epoch."""
    timeline_began_lsn: int = 0
    """Where that timeline branched off the one before; 0 on the first timeline, and if it is not known."""

    @classmethod
    def of(cls, found: Mapping[str, Any], path: Path) -> Source:
        """Return the source that ``found`` tells, the contents of warehouse.json. Raises WarehouseError if the file is damaged."""
        with undamaged(path):
            return cls(
                system_id=str(found["system_id"]),
                database=str(found["database"]),
                slot=str(found["slot"]),
                publications=tuple(found.get("publications", ())),
                staging=Path(found["staging"]) if "staging" in found else None,
                begin=Position.parse(found["begin"]) if "begin" in found else None,
                position=Position.parse(found["position"]) if "position" in found else None,
                epoch_token=str(found.get("epoch_token", "")),
                timeline=int(found.get("timeline", 0)),
                timeline_began_lsn=int(LSN.parse(found.get("timeline_began", "0/0"))),
            )

    def check(self, warehouse: str, theirs: str, hint: str, **values: str) -> None:
        """Raise InvalidArgumentsError unless the source has these values; ``theirs`` says in the message whose they are."""
        for name, value in values.items():
            if getattr(self, name) != value:
                raise InvalidArgumentsError(
                    f"{warehouse} has the changes of {name} {getattr(self, name)!r}, {theirs} {value!r}", hint=hint
                )


def masks_path(root: Path) -> Path:
    """Return the path of the file with the masks (warehouse/mask_settings.py)."""
    return root / "_cdcpipe/masks.json"


def noted_masks(root: Path) -> dict[str, Any]:
    """Return the contents of the file with the masks, or nothing. Raises WarehouseError if its version is another one."""
    path = masks_path(root)
    found: dict[str, Any] = read_json(path) or {}
    if found and found.get("version") != MASKS_VERSION:
        raise WarehouseError(f"{path} has version {found.get('version')!r}; this program knows {MASKS_VERSION}", hint=NEWER)
    return found


def another(root: Path) -> str:
    """Return the advice to begin another warehouse than the one at ``root``. It names the masks that the new one would lack."""
    masks = noted_masks(root).get("masks", {})
    kept = f", and the masks of this one: {mask_options(masks)}" if masks else ""
    return f"begin another warehouse (--warehouse, --staging and -S, each another one{kept})"


def encode_name(table: Table) -> str:
    """Return the name of a table's directory. It differs for each table, and is valid in any file system."""
    if not table.schema:
        return table.name  # a table of cdcpipe itself; all other names have a dot
    encoded = f"{_encode(table.schema)}.{_encode(table.name)}"
    if len(encoded) > _NAME_LIMIT:
        # Too long: two names of 63 bytes, most of them encoded. The versions file still has the table's name.
        digest = hashlib.sha256(encoded.encode()).hexdigest()
        encoded = f"{encoded[: _NAME_LIMIT - 33]}~{digest[:32]}"
    return f"{encoded}~{table.number}" if table.number else encoded


def _encode(text: str) -> str:
    data = text.encode()
    return "".join(
        chr(byte) if byte in _PLAIN and (index or byte not in _HIDDEN_FIRST) else f"%{byte:02X}" for index, byte in enumerate(data)
    )


def choices(house: Warehouse) -> dict[str, Any]:
    """Return what warehouse.json has of how tables are written. Each start of a run may choose otherwise (unchanged.py)."""
    return {
        "readers": house.readers,
        "widens_columns": house.widens_columns,
        "deletes": SOFT if house.keeps_deleted else HARD,
        "column_names": SANITIZE if house.sanitizes_names else KEEP,
        "history": TABLE if house.keeps_history else OFF,
    }


class Warehouse:
    """A warehouse, in a directory of a local or mounted file system or in an object store.

    ``root`` is its place; ``name`` is its name in messages and in Spark. Other ``readers`` and another ``widen``
    (warehouse/formats.py) apply to tables and columns that begin later. Without ``widen``, columns are widened only for Spark.
    """

    def __init__(
        self,
        root: Path | str,
        format: str,  # noqa: A002 - Spark's own word for it
        *,
        types: str = EXACT,
        readers: str = SPARK,
        widen: str | None = None,
        masks: Mapping[str, str] | None = None,
        deletes: str = HARD,
        column_names: str = KEEP,
        history: str = OFF,
    ) -> None:
        self.root = place(root, "the warehouse")
        self.name = place_name(self.root)
        self.format = table_format(format)
        if not self.format.fits_stores and not is_local(self.root):
            raise InvalidArgumentsError(
                f"{self.name}: {format.capitalize()} tables can't be in an object store, because an append renames a directory",
                hint=f"use --format {' or '.join(name for name, each in FORMATS.items() if each.fits_stores)}",
            )
        self.logs = LogCache()
        """The logs of its Delta tables, for those who read the same logs again and again: merges, histories and upkeep."""
        self._files = ParsedFiles()
        self.types = types
        self.readers = readers
        self.widens_columns = self.format.widens_columns and widen != APART and (widen is not None or readers == SPARK)
        """Whether a column is widened. Otherwise values of a wider type go to another column (schema/types.py)."""
        self.new_masks = masks or {}
        """What the arguments of this object change in the masks that the warehouse has noted."""
        self.sanitizes_names = column_names == SANITIZE
        """Whether new columns get names that need no column mapping (schema/types.py)."""
        self.keeps_deleted = deletes == SOFT
        """Whether replicas keep deleted rows, with the time in ``_cdc_deleted_at``."""
        if history == TABLE and not self.format.keeps_replicas:
            raise InvalidArgumentsError(
                f"{format.capitalize()} tables can't be changed, so there is no history table in this format",
                hint="use --format delta, or --history view",
            )
        self.keeps_history = history == TABLE
        """Whether each table with a key has a stored history (replica/history_table.py)."""

    @cached_property
    def masks(self) -> Masks:
        """The masked columns: as the warehouse has noted, and as the arguments of this object change that."""
        return Masks.of({**noted_masks(self.root).get("masks", {}), **self.new_masks})

    def typed(self, relation: Relation) -> Relation:
        """Return a table's description with the types that its columns have in this warehouse."""
        from spark_sink.schema.types import as_typed  # not above: it imports pyspark, which `status` does without

        return as_typed(relation, self.types, self.masks)

    @classmethod
    def existing(cls, root: Path | str) -> Warehouse:
        """Return the existing warehouse at ``root``.

        Raises InvalidArgumentsError if there is none, WarehouseError if it has another layout.
        """
        house = place(root, "the warehouse")
        found = read_json(house / "_cdcpipe/warehouse.json")
        if found is None:
            raise InvalidArgumentsError(
                f"{root} is not a warehouse of cdcpipe: it has no _cdcpipe/warehouse.json",
                hint="it is a staging directory: give the warehouse's directory, which run has as --warehouse"
                if is_local(house) and has_log(house)
                else "give the directory that cdcpipe-spark run has as --warehouse; run creates the file at its start",
            )
        _check_layout(house / "_cdcpipe/warehouse.json", found)
        return cls(
            root,
            str(found.get("format")),
            types=str(found.get("types", EXACT)),
            readers=str(found.get("readers", SPARK)),
            widen=YES if found.get("widens_columns", True) else APART,
            deletes=str(found.get("deletes", HARD)),
            column_names=str(found.get("column_names", KEEP)),
            history=str(found.get("history", OFF)),
        )

    def local_root(self, staging: Path | None = None) -> Path:
        """Return the directory of locks and checkpoint, which must be in a file system; they are below ``_cdcpipe`` there.

        It is the warehouse's own directory. For a warehouse in an object store it is in the staging directory: ``staging``, or by
        default the recorded one, which `check_locks` checks. Raises WarehouseError if the staging directory does not exist.
        """
        if is_local(self.root):
            return self.root
        if staging is not None:
            return root_in_staging(self.name, staging)
        source = self.source()
        root = root_in_staging(self.name, source.staging)
        check_locks(self.name, root.parent, source.position, source.epoch_token)
        return root

    def changelog(self, table: Table) -> Path:
        """Return the place of the table's changelog."""
        return self.root / "changelog" / encode_name(table)

    def replica(self, table: Table) -> Path:
        """Return the place of the table's replica."""
        return self.root / "replica" / encode_name(table)

    def history(self, table: Table) -> Path:
        """Return the place of the table's stored history."""
        return self.root / "history" / encode_name(table)

    def has_changelog(self, table: Table) -> bool:
        """Tell whether the table has a changelog, if only an empty one."""
        return self.format.exists(self.changelog(table))

    @property
    def exists(self) -> bool:
        """Whether a pipeline has begun the warehouse."""
        return read_json(self.identity_path) is not None

    @property
    def identity_path(self) -> Path:
        """The file with the source of the changes, the choices of the first run, and the position."""
        return self.root / "_cdcpipe/warehouse.json"

    def open(self, epoch: Epoch, former_system_ids: Collection[str] = ()) -> Position | None:
        """Bind a new warehouse to the staging directory's source, or check an existing one. Returns the position of the warehouse.

        ``former_system_ids`` are those that the log's server had before pg_upgrade: the warehouse may have one of them. The method
        also records, for later commands, the publications, and how new tables are written. It removes `COMPLETE`: who opens the
        warehouse may change it. Raises InvalidArgumentsError if the warehouse has another source, and what `check_choices` raises.
        """
        found = read_json(self.identity_path)
        check_store(self.root)
        identity = {"system_id": epoch.system_id, "database": epoch.database, "slot": epoch.slot}
        facts: dict[str, Any] = {"publications": list(epoch.publications), **choices(self)}
        if found is None:
            for kind in ("changelog", "replica", "history"):
                if (self.root / kind).is_dir() and any((self.root / kind).iterdir()):
                    raise WarehouseError(
                        f"{self.name} has tables, but lacks the file _cdcpipe/warehouse.json, which names their source",
                        hint="restore that file, or give an empty directory as warehouse",
                    )
            make_directory(self.identity_path.parent)
            facts |= _of_epoch(epoch)  # until there is a position: no copy is on an earlier timeline
            layout = {"version": _LAYOUT_VERSION, "format": self.format.name, "types": self.types}
            write_json(self.identity_path, layout | identity | facts)
            return None
        if found.get("system_id") in former_system_ids and found.get("system_id") != epoch.system_id:
            facts |= {"system_id": epoch.system_id, **_NO_TIMELINE}  # that of the position is one of the former server
            identity.pop("system_id")
        self.check_choices(found)
        source = Source.of(found, self.identity_path)
        source.check(self.name, "but the staging directory has those of", "give each slot its own warehouse", **identity)
        remove_files(self.identity_path.parent, [COMPLETE])
        if found | facts != found:
            write_json(self.identity_path, found | facts)
        return source.position

    def check_choices(self, found: Mapping[str, Any]) -> None:
        """Raise InvalidArgumentsError for a choice that warehouse.json does not allow, WarehouseError for another layout.

        ``found`` are the contents of that file.
        """
        _check_layout(self.identity_path, found)
        if found.get("format") != self.format.name:
            raise InvalidArgumentsError(
                f"{self.name} has {found.get('format')} tables, not {self.format.name}",
                hint=f"use --format {found.get('format')}, or {another(self.root)}",
            )
        if found.get("types", EXACT) != self.types:
            raise InvalidArgumentsError(
                f"the tables in {self.name} have {found.get('types', EXACT)} types, not {self.types} ones",
                hint=f"use --types {found.get('types', EXACT)}, or {another(self.root)}: a table's columns keep their types",
            )
        if found.get("deletes") == SOFT and not self.keeps_deleted:
            raise InvalidArgumentsError(
                f"the replicas in {self.name} have deleted rows, with the time in _cdc_deleted_at",
                hint=f"use --deletes soft; for replicas without them, {another(self.root)}",
            )

    def record(self, position: Position, staging: Path | None = None) -> None:
        """Record that every table has all changes up to ``position``. The first recorded position is the warehouse's beginning.

        ``staging`` is the log of ``position``. The token of its epoch is recorded, to tell the log from a restored copy; and its
        timeline, because after a failover a position means something only together with it. Raises WarehouseError if another run
        has recorded a position since.
        """
        found = read_json(self.identity_path)
        if found is None:
            raise WarehouseError(
                f"{self.identity_path} does not exist any more",
                hint="put the warehouse back; or start cdcpipe-spark run again with -c, which makes it anew",
            )
        begin = {} if "position" in found else {"begin": str(position)}
        epoch = None if staging is None else epoch_of(staging, position.epoch)
        before = Source.of(found, self.identity_path)
        if epoch is not None and staging is not None and before.position is not None:
            check_alone(self.name, staging, before.position)
        write_json(self.identity_path, found | begin | {"position": str(position), **_of_epoch(epoch)})

    def source(self) -> Source:
        """Return the source of the changes, and their range."""
        return Source.of(read_json(self.identity_path) or {}, self.identity_path)

    def check_source(self, theirs: str, hint: str, **values: str) -> None:
        """Raise InvalidArgumentsError as `Source.check` does."""
        self.source().check(self.name, theirs, hint, **values)

    def versions(self, table: Table) -> list[Version]:
        """Return a table's versions, the oldest first."""
        found = _read_versions(self._files, _versions_path(self.root, table))
        return [] if found is None else list(found[1])

    def write_versions(self, table: Table, versions: list[Version]) -> None:
        """Replace a table's versions."""
        path = _versions_path(self.root, table)
        make_directory(path.parent)
        write_json(path, {**table.to_json(), "versions": [version.to_json() for version in versions]})

    def forget(self, table: Table) -> None:
        """Delete the versions of a table that has no changelog and no replica."""
        _versions_path(self.root, table).unlink(missing_ok=True)

    @property
    def _names_path(self) -> Path:
        """The file with the names of the tables."""
        return self.root / "_cdcpipe/names.json"

    def recorded_names(self) -> Names:
        """Return the names of the tables as names.json has them. Which of them a server has lost: `table_names.names`."""
        with undamaged(self._names_path):
            found = self._files.read(self._names_path, Names.from_json)
        return Names() if found is None else found.copy()

    def write_names(self, names: Names) -> None:
        """Replace the names of the tables. Call this before any change is in a table that depends on them."""
        make_directory(self._names_path.parent)
        write_json(self._names_path, names.to_json())

    def tables(self) -> list[Table]:
        """Return all tables of the warehouse, in order. Each prints as its name now."""
        shown = self.recorded_names().shown
        return sorted(shown(table) for table, _ in _read_all_versions(self._files, self.root / "_cdcpipe/tables"))

    def all_versions(self) -> dict[Table, tuple[Version, ...]]:
        """Return the versions of each table that has some. This reads each table's file once."""
        return {table: versions for table, versions in _read_all_versions(self._files, self.root / "_cdcpipe/tables") if versions}

    def find(self, name: str) -> Table:
        """Return the table that is called ``schema.name`` now. Raises InvalidArgumentsError if the warehouse has no such table."""
        tables = self.tables()
        for table in tables:
            if str(table) == name:
                return table
        schema, _, plain = name.partition(".")
        since = self.recorded_names().since(Table(schema, plain))
        raise InvalidArgumentsError(
            f"{self.name} has no table {name!r}; it has {', '.join(map(str, tables)) or 'none'}",
            hint=None if since is None else f"{name} was renamed: it is {since} now",
        )


def _of_epoch(epoch: Epoch | None) -> dict[str, Any]:
    """Return what warehouse.json says of the position's epoch; None if nothing is known of it."""
    if epoch is None:
        return {"epoch_token": "", **_NO_TIMELINE}
    return {"epoch_token": epoch.token, "timeline": epoch.timeline, "timeline_began": format_lsn(epoch.timeline_began_lsn)}


def _check_layout(path: Path, found: Mapping[str, Any]) -> None:
    """Raise WarehouseError unless this program knows the layout. ``found`` are the contents of the file, warehouse.json."""
    if found.get("version") != _LAYOUT_VERSION:
        raise WarehouseError(f"{path} has version {found.get('version')!r}; this program knows {_LAYOUT_VERSION}", hint=NEWER)


def _read_all_versions(files: ParsedFiles, directory: Path) -> list[tuple[Table, tuple[Version, ...]]]:
    found = map_reads(lambda path: _read_versions(files, path), list(directory.glob("*.json")), directory)
    return [value for value in found if value is not None]


def _read_versions(files: ParsedFiles, path: Path) -> tuple[Table, tuple[Version, ...]] | None:
    """Return a table and its versions, None if there is no such file."""
    with undamaged(path):
        return files.read(path, lambda value: (Table.from_json(value), versions_from_json(value["versions"])))


def _versions_path(root: Path, table: Table) -> Path:
    return root / "_cdcpipe/tables" / f"{encode_name(table)}.json"
