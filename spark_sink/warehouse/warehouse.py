"""The warehouse: where each table is, whose changes it holds, how far they go. No pyspark.

    _cdcpipe/warehouse.json        whose changes these are: server, database, slot; the table format; --types; the position reached
    _cdcpipe/tables/NAME.json      a table's versions: its key, and from which change on
    _cdcpipe/snapshots/NAME.json   a snapshot of the table that is being landed
    _cdcpipe/purged/NAME.json      up to where the table's changelog may lack changes (upkeep/purge.py)
    _cdcpipe/tables*.lock          who may write the tables (warehouse/lock.py)
    _cdcpipe/vacuumed.json         when VACUUM last looked at each table, and when old changes were last dropped (upkeep/upkeep.py)
    _cdcpipe/checkpoint/           Spark's checkpoint of the stream of segments (CHECKPOINT)
    changelog/NAME/                every change once (changelog/tables.py)
    changelog/_cdc_message/        every logical message once
    changelog/_cdc_schema_history/ every version of a table's schema once (changelog/history.py)
    replica/NAME/                  the current rows (replica/merge.py; only with Delta Lake, otherwise a view)

Of a warehouse in an object store locks and checkpoint are in the staging directory (`Warehouse.local_root`), and there is a file
_cdcpipe/store_check (files/places.py).

NAME is ``<schema>.<table>``, each of the two with every byte but ``a-z 0-9 _ -`` percent-encoded: Spark skips names that
begin with ``_`` or ``.``, reads ``{a,b}`` and ``[1]`` as patterns and ``a=1`` as a partition; a name may be ``..`` or hold
a slash; and some file systems don't tell ``T`` from ``t``, or one form of ``é`` from the other.
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
from spark_sink.schema.table import EXACT, MESSAGES, SCHEMA_HISTORY, Table, Version
from spark_sink.staging.log import Epoch, Position

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Source", "Warehouse", "WarehouseError", "decode_name", "encode_name"]


CHECKPOINT: Final = "_cdcpipe/checkpoint"
"""Where below `Warehouse.local_root` Spark keeps its checkpoint unless told otherwise."""

FORMAT = 1
"""The version of this layout; another one is refused."""

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
_HIDDEN_FIRST = frozenset(b"_-")
_NAME_LIMIT = 200
"""Bytes of a file name: systems allow 255, and Hadoop puts a prefix and a suffix around it."""


class WarehouseError(CdcpipeError):
    """The warehouse holds another database's changes, is damaged, or can't go on from where it stands."""


@dataclass(frozen=True, slots=True)
class Source:
    """Whose changes a warehouse holds, from ``begin`` to ``position``; None for what was not written down."""

    system_id: str
    database: str
    slot: str
    publications: tuple[str, ...]
    staging: Path | None
    begin: Position | None
    position: Position | None


def encode_name(table: Table) -> str:
    """Return the directory's name for a table: distinct for each, and safe below any root."""
    if not table.schema:
        return table.name  # one of ours, and no other has no dot
    encoded = f"{_encode(table.schema)}.{_encode(table.name)}"
    if len(encoded) <= _NAME_LIMIT:
        return encoded
    # Two names of 63 bytes, most of them encoded. The versions file still says which table it is.
    digest = hashlib.sha256(encoded.encode()).hexdigest()
    return f"{encoded[: _NAME_LIMIT - 33]}~{digest[:32]}"


def decode_name(name: str) -> Table:
    """Return the table that ``encode_name`` gave this name; ValueError for a name that it did not, or that it cut."""
    if name in (MESSAGES.name, SCHEMA_HISTORY.name):
        return Table("", name)
    schema, dot, table = name.partition(".")
    decoded = Table(unquote(schema), unquote(table))  # what is not UTF-8 is not encoded in the same way again
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

    ``name`` is what messages and Spark call it, ``root`` the place.
    """

    def __init__(self, root: Path | str, format: str, types: str = EXACT) -> None:  # noqa: A002 - Spark's own word for it
        self.root = place(root, "the warehouse")
        self.name = place_name(self.root)
        self.format = format
        if format != "delta" and not is_local(self.root):
            raise InvalidArgumentsError(
                f"{self.name}: Parquet tables can't be in an object store: an append is a directory that is renamed",
                hint="use --format delta",
            )
        self.types = types

    @classmethod
    def existing(cls, root: Path | str) -> Warehouse:
        """Return the warehouse at ``root`` in the format that it has."""
        found = read_json(place(root, "the warehouse") / "_cdcpipe/warehouse.json")
        if found is None:
            raise InvalidArgumentsError(
                f"{root} is not a warehouse of cdcpipe: it has no _cdcpipe/warehouse.json",
                hint="give the directory that cdcpipe-spark run has as --warehouse; once it has begun, the file is there",
            )
        return cls(root, str(found.get("format")), str(found.get("types", EXACT)))

    def local_root(self, staging: Path | None = None) -> Path:
        """Return where locks and checkpoint are, below ``_cdcpipe``: what has to be in a file system.

        That is the warehouse's own directory. For one in an object store it is in the staging directory, the noted one if left out;
        WarehouseError if that is not there.
        """
        if is_local(self.root):
            return self.root
        staging = staging or self.source().staging
        if staging is None or not staging.is_dir():
            raise WarehouseError(
                f"the locks of {self.name} are in its staging directory, {staging or 'which is not noted'}, and that is not here",
                hint="do this where the staging directory is, at the path where cdcpipe-spark run had it",
            )
        bucket_and_key = self.name.partition("://")[2].rstrip("/")  # s3a and s3 are the same store
        return staging / f"warehouse-{hashlib.sha256(bucket_and_key.encode()).hexdigest()[:8]}"

    def changelog(self, table: Table) -> Path:
        """Return where the table's changelog is."""
        return self.root / "changelog" / encode_name(table)

    def replica(self, table: Table) -> Path:
        """Return where the table's replica is."""
        return self.root / "replica" / encode_name(table)

    @property
    def _identity_path(self) -> Path:
        return self.root / "_cdcpipe/warehouse.json"

    def open(self, epoch: Epoch, staging: Path | None = None) -> Position | None:
        """Bind a new warehouse to the staging directory's source, or check an old one; return the position that it has reached.

        Raises WarehouseError for a warehouse of another source or format. Where the staging directory is, and what the
        publications are, is noted for those who look at the warehouse later.
        """
        found = read_json(self._identity_path)
        check_store(self.root)
        identity = {"system_id": epoch.system_id, "database": epoch.database, "slot": epoch.slot}
        facts = {"publications": list(epoch.publications)} | ({} if staging is None else {"staging": str(staging)})
        if found is None:
            for kind in ("changelog", "replica"):
                if (self.root / kind).is_dir() and any((self.root / kind).iterdir()):
                    raise WarehouseError(
                        f"{self.name} holds tables, and not the file _cdcpipe/warehouse.json that says whose they are",
                        hint="restore that file, or give an empty directory as warehouse",
                    )
            make_directory(self._identity_path.parent)
            write_json(self._identity_path, {"version": FORMAT, "format": self.format, "types": self.types, **identity, **facts})
            return None
        if found.get("version") != FORMAT:
            raise WarehouseError(f"{self._identity_path} has version {found.get('version')!r}; this program knows {FORMAT}")
        for name, value in identity.items():
            if found.get(name) != value:
                raise WarehouseError(
                    f"{self.name} holds the changes of {name} {found.get(name)!r}, the staging directory those of {value!r}",
                    hint="give each slot a warehouse of its own",
                )
        if found.get("format") != self.format:
            raise WarehouseError(
                f"{self.name} holds {found.get('format')} tables, not {self.format}",
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
        """Note that every table has all changes up to ``position``."""
        self._note(position=str(position))

    def _note(self, **values: str) -> None:
        found = read_json(self._identity_path)
        if found is None:
            raise WarehouseError(f"{self._identity_path} has gone")
        if "position" not in found and "position" in values:
            values = {"begin": values["position"]} | values
        write_json(self._identity_path, found | values)

    def source(self) -> Source:
        """Return whose changes these are, and how far they go."""
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

    def _versions_path(self, table: Table) -> Path:
        return self.root / "_cdcpipe/tables" / f"{encode_name(table)}.json"

    def versions(self, table: Table) -> list[Version]:
        """Return a table's versions, oldest first."""
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
        """Forget a table of which there are only versions."""
        self._versions_path(table).unlink(missing_ok=True)

    def _snapshot_path(self, table: Table) -> Path:
        return self.root / "_cdcpipe/snapshots" / f"{encode_name(table)}.json"

    def note_snapshot(self, table: Table, position: Position) -> None:
        """Note, before anything of a table's snapshot comes to the warehouse, that it begins."""
        path = self._snapshot_path(table)
        make_directory(path.parent)
        write_json(path, {"schema": table.schema, "name": table.name, "position": str(position)})

    def note_finished(self, table: Table) -> None:
        """Note that a snapshot is in changelog and replica."""
        self._snapshot_path(table).unlink(missing_ok=True)

    def unfinished_snapshots(self) -> list[tuple[Table, Position]]:
        """Return the tables of whose snapshot something may be lacking, and its position."""
        found = _read_all(self.root / "_cdcpipe/snapshots")
        return sorted((_table(value), Position.parse(value["position"])) for value in found)

    def _purged_path(self, table: Table) -> Path:
        return self.root / "_cdcpipe/purged" / f"{encode_name(table)}.json"

    def note_purged(self, table: Table, lsn: int) -> None:
        """Note, before anything is removed from a table's changelog, that changes up to ``lsn`` may be missing there."""
        path = self._purged_path(table)
        make_directory(path.parent)
        write_json(path, {"schema": table.schema, "name": table.name, "lsn": format_lsn(max(lsn, self.purged_lsn(table)))})

    def purged_lsn(self, table: Table) -> int:
        """Return the LSN up to which the table's changelog may lack changes, 0 if it has all."""
        found = read_json(self._purged_path(table))
        return 0 if found is None else int(LSN.parse(found["lsn"]))

    def check_changes(self, table: Table, after_lsn: int) -> None:
        """Raise WarehouseError unless the table's changelog has all changes that it ever had from after ``after_lsn``.

        To be asked wherever something is made of these changes: once the changelog is being read as it is at that moment.
        """
        lsn = self.purged_lsn(table)
        if after_lsn < lsn:
            raise WarehouseError(
                f"changes of {table} that this takes are gone: its changelog was purged up to {format_lsn(lsn)}",
                hint=f"cdcpipe-spark snapshot --table {table} gives it a new beginning",
            )

    def tables(self) -> list[Table]:
        """Return every table that the warehouse knows, in order."""
        return sorted(map(_table, _read_all(self.root / "_cdcpipe/tables")))

    def find(self, name: str) -> Table:
        """Return the table of which ``schema.name`` is the name; InvalidArgumentsError if the warehouse has no such table."""
        tables = self.tables()
        for table in tables:
            if str(table) == name:
                return table
        raise InvalidArgumentsError(f"{self.name} has no table {name!r}; it has {', '.join(map(str, tables)) or 'none'}")


def _read_all(directory: Path) -> list[dict[str, Any]]:
    return [value for path in directory.glob("*.json") if (value := read_json(path)) is not None]


def _table(value: Mapping[str, Any]) -> Table:
    return Table(str(value["schema"]), str(value["name"]))
