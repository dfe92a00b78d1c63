"""The warehouse: the paths of its tables, the source of its changes, and the positions that it has reached. No pyspark.

    _cdcpipe/warehouse.json        the source (server, database, slot), the table format, --types, the position
    _cdcpipe/tables/NAME.json      a table's versions: its keys, each with the first change to which it applies
    _cdcpipe/snapshots/NAME.json   a snapshot of the table that is being landed
    _cdcpipe/gaps.json             the gaps of the log, and whether the tables were copied since (warehouse/gaps.py)
    _cdcpipe/published.json        the published tables at the last look (snapshot/publication.py)
    _cdcpipe/copies/NAME.json      why the table needs a copy (warehouse/wanted_copies.py)
    _cdcpipe/purged/NAME.json      the LSN up to which the table's changelog may lack changes (upkeep/purge.py)
    _cdcpipe/tables*.lock          the locks for writing the tables (warehouse/lock.py)
    _cdcpipe/vacuumed.json         the time of each table's last VACUUM, and of the last purge (upkeep/upkeep.py)
    _cdcpipe/checkpoint/           Spark's checkpoint of the stream of segments (CHECKPOINT)
    changelog/NAME/                every change once (changelog/tables.py)
    changelog/_cdc_message/        every logical message once
    changelog/_cdc_schema_history/ every version of a table's schema once (changelog/history.py)
    changelog/_cdc_ddl/            every message of captured DDL once (changelog/ddl_log.py)
    replica/NAME/                  the current rows (replica/merge.py; only with Delta Lake, with Parquet a view)

If the warehouse is in an object store, locks and checkpoint are in the staging directory (`Warehouse.local_root`), and the
warehouse has a file _cdcpipe/store_check (files/places.py).

NAME is ``<schema>.<table>``; in both parts every byte but ``a-z 0-9 _ -`` is percent-encoded. The reasons: Spark skips names that
begin with ``_`` or ``.``, and reads ``{a,b}`` and ``[1]`` as patterns and ``a=1`` as a partition. A table may be called ``..``, or
have a slash in its name. Some file systems do not distinguish ``T`` from ``t``, or two forms of ``é``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.lsn import LSN, format_lsn
from spark_sink.files.places import check_store, is_local, make_directory, place, read_json, write_json
from spark_sink.files.places import name as place_name
from spark_sink.schema.table import DDL, EXACT, MESSAGES, SCHEMA_HISTORY, Table, Version
from spark_sink.staging.log import Epoch, Position
from spark_sink.warehouse.formats import FORMATS, table_format

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

__all__ = ["Source", "Warehouse", "WarehouseError", "decode_name", "encode_name"]


CHECKPOINT: Final = "_cdcpipe/checkpoint"
"""The default path of Spark's checkpoint, below `Warehouse.local_root`."""

_LAYOUT_VERSION = 1
"""The version of this layout. Other versions are refused."""

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
_HIDDEN_FIRST = frozenset(b"_-")
_NAME_LIMIT = 200
"""The most bytes of a file name. File systems allow 255, but Hadoop adds a prefix and a suffix."""


class WarehouseError(CdcpipeError):
    """The warehouse has the changes of another source, is damaged, or lacks changes that an operation needs."""


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


def encode_name(table: Table) -> str:
    """Return the name of a table's directory. It differs for each table, and is valid in any file system."""
    if not table.schema:
        return table.name  # a table of cdcpipe itself; all other names have a dot
    encoded = f"{_encode(table.schema)}.{_encode(table.name)}"
    if len(encoded) <= _NAME_LIMIT:
        return encoded
    # Too long: two names of 63 bytes, most of them encoded. The versions file still has the table's name.
    digest = hashlib.sha256(encoded.encode()).hexdigest()
    return f"{encoded[: _NAME_LIMIT - 33]}~{digest[:32]}"


def decode_name(name: str) -> Table:
    """Return the table for a name from ``encode_name``. Raises ValueError for any other name, and for a name that was cut."""
    if name in (DDL.name, MESSAGES.name, SCHEMA_HISTORY.name):
        return Table("", name)
    schema, dot, table = name.partition(".")
    decoded = Table(unquote(schema), unquote(table))  # for bytes that are not UTF-8, encoding does not give the same name again
    if not dot or encode_name(decoded) != name:
        msg = f"not the directory of a table: {name!r}"
        raise ValueError(msg)
    return decoded


def _encode(text: str) -> str:
    data = text.encode()
    return "".join(
        chr(byte) if byte in _PLAIN and (index or byte not in _HIDDEN_FIRST) else f"%{byte:02X}" for index, byte in enumerate(data)
    )


class Warehouse:
    """A warehouse, in a directory of a local or mounted file system or in an object store.

    ``root`` is its place; ``name`` is its name in messages and in Spark.
    """

    def __init__(self, root: Path | str, format: str, types: str = EXACT) -> None:  # noqa: A002 - Spark's own word for it
        self.root = place(root, "the warehouse")
        self.name = place_name(self.root)
        self.format = table_format(format)
        if not self.format.fits_stores and not is_local(self.root):
            raise InvalidArgumentsError(
                f"{self.name}: {format.capitalize()} tables can't be in an object store, because an append renames a directory",
                hint=f"use --format {' or '.join(name for name, each in FORMATS.items() if each.fits_stores)}",
            )
        self.types = types

    @classmethod
    def existing(cls, root: Path | str) -> Warehouse:
        """Return the existing warehouse at ``root``."""
        found = read_json(place(root, "the warehouse") / "_cdcpipe/warehouse.json")
        if found is None:
            raise InvalidArgumentsError(
                f"{root} is not a warehouse of cdcpipe: it has no _cdcpipe/warehouse.json",
                hint="give the directory that cdcpipe-spark run has as --warehouse; run creates the file at its start",
            )
        return cls(root, str(found.get("format")), str(found.get("types", EXACT)))

    def local_root(self, staging: Path | None = None) -> Path:
        """Return the directory of locks and checkpoint, which must be in a file system; they are below ``_cdcpipe`` there.

        It is the warehouse's own directory. For a warehouse in an object store it is in the staging directory: ``staging``, or by
        default the recorded one. Raises WarehouseError if the staging directory does not exist.
        """
        if is_local(self.root):
            return self.root
        staging = staging or self.source().staging
        if staging is None or not staging.is_dir():
            raise WarehouseError(
                f"the locks of {self.name} are in its staging directory, which is not here: {staging or 'path not recorded'}",
                hint="run this command where the staging directory is, at the same path as for cdcpipe-spark run",
            )
        bucket_and_key = self.name.partition("://")[2].rstrip("/")  # s3a and s3 are the same store
        return staging / f"warehouse-{hashlib.sha256(bucket_and_key.encode()).hexdigest()[:8]}"

    def changelog(self, table: Table) -> Path:
        """Return the place of the table's changelog."""
        return self.root / "changelog" / encode_name(table)

    def replica(self, table: Table) -> Path:
        """Return the place of the table's replica."""
        return self.root / "replica" / encode_name(table)

    def has_changelog(self, table: Table) -> bool:
        """Tell whether the table has a changelog, if only an empty one."""
        return self.format.exists(self.changelog(table))

    @property
    def exists(self) -> bool:
        """Whether a pipeline has begun the warehouse."""
        return read_json(self._identity_path) is not None

    @property
    def _identity_path(self) -> Path:
        return self.root / "_cdcpipe/warehouse.json"

    def open(self, epoch: Epoch, staging: Path | None = None, former_system_ids: Collection[str] = ()) -> Position | None:
        """Bind a new warehouse to the staging directory's source, or check an existing one. Returns the position of the warehouse.

        ``former_system_ids`` are those that the log's server had before pg_upgrade: the warehouse may have one of them. The method
        also records the path of the staging directory and the publications, for later commands. Raises WarehouseError if the
        warehouse has another source or format.
        """
        found = read_json(self._identity_path)
        check_store(self.root)
        identity = {"system_id": epoch.system_id, "database": epoch.database, "slot": epoch.slot}
        facts = {"publications": list(epoch.publications)} | ({} if staging is None else {"staging": str(staging)})
        if found is None:
            for kind in ("changelog", "replica"):
                if (self.root / kind).is_dir() and any((self.root / kind).iterdir()):
                    raise WarehouseError(
                        f"{self.name} has tables, but lacks the file _cdcpipe/warehouse.json, which names their source",
                        hint="restore that file, or give an empty directory as warehouse",
                    )
            make_directory(self._identity_path.parent)
            write_json(
                self._identity_path,
                {"version": _LAYOUT_VERSION, "format": self.format.name, "types": self.types, **identity, **facts},
            )
            return None
        if found.get("version") != _LAYOUT_VERSION:
            raise WarehouseError(
                f"{self._identity_path} has version {found.get('version')!r}; this program knows {_LAYOUT_VERSION}"
            )
        if found.get("system_id") in former_system_ids:
            facts |= {"system_id": epoch.system_id}
            identity.pop("system_id")
        self.check_source("but the staging directory has those of", "give each slot its own warehouse", **identity)
        if found.get("format") != self.format.name:
            raise WarehouseError(
                f"{self.name} has {found.get('format')} tables, not {self.format.name}",
                hint=f"use --format {found.get('format')}, or another warehouse",
            )
        if found.get("types", EXACT) != self.types:
            raise WarehouseError(
                f"the tables in {self.name} have {found.get('types', EXACT)} types, not {self.types} ones",
                hint=f"use --types {found.get('types', EXACT)}, or another warehouse: a table's columns keep their types",
            )
        if found | facts != found:
            write_json(self._identity_path, found | facts)
        return self.source().position

    def record(self, position: Position) -> None:
        """Record that every table has all changes up to ``position``. The first recorded position is the warehouse's beginning."""
        found = read_json(self._identity_path)
        if found is None:
            raise WarehouseError(f"{self._identity_path} does not exist any more")
        begin = {} if "position" in found else {"begin": str(position)}
        write_json(self._identity_path, found | begin | {"position": str(position)})

    def source(self) -> Source:
        """Return the source of the changes, and their range."""
        found = read_json(self._identity_path) or {}
        try:
            return Source(
                system_id=str(found["system_id"]),
                database=str(found["database"]),
                slot=str(found["slot"]),
                publications=tuple(found.get("publications", ())),
                staging=Path(found["staging"]) if "staging" in found else None,
                begin=Position.parse(found["begin"]) if "begin" in found else None,
                position=Position.parse(found["position"]) if "position" in found else None,
            )
        except (KeyError, TypeError, ValueError) as ex:
            raise WarehouseError(f"{self._identity_path} is damaged: {ex!r}") from ex

    def check_source(self, theirs: str, hint: str, **values: str) -> None:
        """Raise WarehouseError unless the warehouse's `Source` has these values; ``theirs`` says in the message whose they are."""
        source = self.source()
        for name, value in values.items():
            if getattr(source, name) != value:
                raise WarehouseError(
                    f"{self.name} has the changes of {name} {getattr(source, name)!r}, {theirs} {value!r}", hint=hint
                )

    def _versions_path(self, table: Table) -> Path:
        return self.root / "_cdcpipe/tables" / f"{encode_name(table)}.json"

    def versions(self, table: Table) -> list[Version]:
        """Return a table's versions, the oldest first."""
        path = self._versions_path(table)
        found = read_json(path)
        try:
            return [] if found is None else [Version.from_json(value) for value in found["versions"]]
        except (KeyError, TypeError, ValueError, AttributeError) as ex:
            raise WarehouseError(f"{path} is damaged: {ex!r}") from ex

    def write_versions(self, table: Table, versions: list[Version]) -> None:
        """Replace a table's versions."""
        path = self._versions_path(table)
        make_directory(path.parent)
        write_json(
            path,
            {"schema": table.schema, "name": table.name, "versions": [version.to_json() for version in versions]},
        )

    def forget(self, table: Table) -> None:
        """Delete the versions of a table that has no changelog and no replica."""
        self._versions_path(table).unlink(missing_ok=True)

    def _snapshot_path(self, table: Table) -> Path:
        return self.root / "_cdcpipe/snapshots" / f"{encode_name(table)}.json"

    def note_snapshot(self, table: Table, position: Position) -> None:
        """Record the start of landing a table's snapshot. Call this before any of its rows are in the tables."""
        path = self._snapshot_path(table)
        make_directory(path.parent)
        write_json(path, {"schema": table.schema, "name": table.name, "position": str(position)})

    def note_finished(self, table: Table) -> None:
        """Record that a snapshot is complete in changelog and replica."""
        self._snapshot_path(table).unlink(missing_ok=True)

    def unfinished_snapshots(self) -> list[tuple[Table, Position]]:
        """Return the tables whose snapshot may be incomplete, each with the position of the snapshot."""
        found = _read_all(self.root / "_cdcpipe/snapshots")
        return sorted((_table(value), Position.parse(value["position"])) for value in found)

    def _dropped_path(self, table: Table) -> Path:
        return self.root / "_cdcpipe/dropped" / f"{encode_name(table)}.json"

    def note_dropped(self, table: Table, relation_id: int, position: Position) -> None:
        """Record that the table with this OID was dropped in the transaction that ends at ``position``."""
        path = self._dropped_path(table)
        make_directory(path.parent)
        write_json(path, {"schema": table.schema, "name": table.name, "relation_id": relation_id, "position": str(position)})

    def dropped(self, table: Table, versions: Sequence[Version]) -> Position | None:
        """Return where the table was dropped; None if it was not, or if there are changes of another table with its name."""
        found = read_json(self._dropped_path(table))
        if found is None or (versions and versions[-1].relation_id != found["relation_id"]):
            return None
        return Position.parse(found["position"])

    def _purged_path(self, table: Table) -> Path:
        return self.root / "_cdcpipe/purged" / f"{encode_name(table)}.json"

    def note_purged(self, table: Table, lsn: int) -> None:
        """Record that a table's changelog may lack changes up to ``lsn``. Call this before any are removed."""
        path = self._purged_path(table)
        make_directory(path.parent)
        write_json(path, {"schema": table.schema, "name": table.name, "lsn": format_lsn(max(lsn, self.purged_lsn(table)))})

    def purged_lsn(self, table: Table) -> int:
        """Return the LSN up to which the table's changelog may lack changes; 0 if it is complete."""
        found = read_json(self._purged_path(table))
        return 0 if found is None else int(LSN.parse(found["lsn"]))

    def check_changes(self, table: Table, after_lsn: int) -> None:
        """Raise WarehouseError if changes after ``after_lsn`` were purged from the table's changelog.

        Call this after pinning the changelog version and before using its rows.
        """
        lsn = self.purged_lsn(table)
        if after_lsn < lsn:
            raise WarehouseError(
                f"this needs changes of {table} that were removed: its changelog was purged up to {format_lsn(lsn)}",
                hint=f"cdcpipe-spark snapshot --table {table} gives the table a new beginning",
            )

    def tables(self) -> list[Table]:
        """Return all tables of the warehouse, in order."""
        return sorted(map(_table, _read_all(self.root / "_cdcpipe/tables")))

    def find(self, name: str) -> Table:
        """Return the table with the name ``schema.name``. Raises InvalidArgumentsError if the warehouse has no such table."""
        tables = self.tables()
        for table in tables:
            if str(table) == name:
                return table
        raise InvalidArgumentsError(f"{self.name} has no table {name!r}; it has {', '.join(map(str, tables)) or 'none'}")


def _read_all(directory: Path) -> list[dict[str, Any]]:
    return [value for path in directory.glob("*.json") if (value := read_json(path)) is not None]


def _table(value: Mapping[str, Any]) -> Table:
    return Table(str(value["schema"]), str(value["name"]))
