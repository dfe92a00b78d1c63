"""The masks of the tables that a log feeds (``masks.json``), which a new warehouse on this log must not lose. No pyspark.

    record(staging, masks, key)   call this when the warehouse has noted its masks; nothing is written if they are recorded already
    read(staging)                 the recorded masks; nothing if there are none
    read_key(staging)             what tells the key of their hashes from another key

The warehouse notes its masks itself, so that a start does not have to repeat them (warehouse/mask_settings.py). But a warehouse may
be deleted, to make it anew from a copy of the rows. The log stays then, and with it this record. An older cdcpipe leaves it alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from spark_sink.files.local import NEWER, RESTORE, read_json, write_json
from spark_sink.files.system_hints import hint_of
from spark_sink.staging.log import StagingError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["read", "read_key", "record"]

_NAME = "masks.json"

_VERSION: Final = 1


def record(root: Path, masks: Mapping[str, str], key: str | None) -> None:
    """Record durably that the tables have these masks. Raises StagingError if the file system refuses it.

    ``key`` tells the key of their hashes from another one (`Masks.fingerprint`); None if no column was ever hashed.
    """
    if masks == read(root) and key == read_key(root):
        return
    try:
        write_json(root / _NAME, {"version": _VERSION, "masks": dict(masks), "key": key})
    except OSError as ex:
        msg = f"cannot record the masks of the tables in {root}: {ex}"
        raise StagingError(msg, hint=hint_of(ex)) from ex


def read(root: Path) -> dict[str, str]:
    """Return what is recorded. Raises DamagedFileError or StagingError if it can't be read: it is a protection, and not a cache."""
    found = _read(root)
    masks = found.get("masks", None if found else {})
    if not isinstance(masks, dict):
        raise StagingError(f"{root / _NAME} is damaged: it has no masks", hint=RESTORE)
    return masks


def read_key(root: Path) -> str | None:
    """Return what tells the key of the recorded hashes from another one; None if that is not known. Raises as `read` does."""
    return _read(root).get("key")


def _read(root: Path) -> dict[str, Any]:
    path = root / _NAME
    found = read_json(path)
    if found is not None and found.get("version") != _VERSION:
        raise StagingError(f"{path} has version {found.get('version')!r}; this program knows {_VERSION}", hint=NEWER)
    return found or {}
