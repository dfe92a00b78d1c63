"""Finds the checkpoints of a Delta table's log by the names of its files, and reads their actions. No Spark.

    version, files = newest_checkpoint(names)
    actions = [action for name in files for action in checkpoint_actions(log / name)]

A checkpoint is one file, or several files of the same version; or, in the format V2, a file that may name others ("sidecars").
"""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_sink.files import places

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "Hint",
    "before_checkpoint",
    "checkpoint_actions",
    "has_v2_checkpoint",
    "last_checkpoint",
    "names_since_checkpoint",
    "newest_checkpoint",
]

_CHECKPOINT = re.compile(r"([0-9]{20})\.checkpoint(?:\.([0-9]{10})\.([0-9]{10}))?\.parquet", re.ASCII)
_CHECKPOINT_V2 = re.compile(r"([0-9]{20})\.checkpoint\.[0-9a-f-]{36}\.(?:json|parquet)", re.ASCII)
"""A checkpoint in this format is one file, which may name others ("sidecars")."""
_OF_VERSION = re.compile(r"\.?([0-9]{20})\.", re.ASCII)
"""Matches the beginning of the names of all files of a version, checksums included."""
_LAST_CHECKPOINT = "_last_checkpoint"


class Hint(NamedTuple):
    """What `_last_checkpoint` tells of the last checkpoint; zeros if it does not, because it is only a hint."""

    version: int = 0
    actions: int = 0
    """Files of the table, files that have left it (tombstones), and some more."""
    files: int = 0
    """The files of the table; if their number is not told, the number of actions."""


def last_checkpoint(log: Path) -> Hint:
    """Return what the log says of its last checkpoint."""
    try:
        hint = json.loads(places.read_bytes(log / _LAST_CHECKPOINT))
        actions = int(hint.get("size", 0))
        return Hint(int(hint["version"]), actions, int(hint.get("numOfAddFiles", actions)))
    except (OSError, ValueError, KeyError, TypeError):
        return Hint()


def newest_checkpoint(names: Iterable[str]) -> tuple[int, list[str]]:
    """Return version and files of the newest complete checkpoint; -1 and no files if there is none."""
    return max(_checkpoints(names), default=(-1, []))


def _checkpoints(names: Iterable[str]) -> list[tuple[int, list[str]]]:
    """Return versions and files of the complete checkpoints."""
    found: dict[tuple[int, int], list[str]] = {}
    complete = []
    for name in names:
        if (match := _CHECKPOINT.fullmatch(name)) is not None:
            found.setdefault((int(match[1]), int(match[3] or 1)), []).append(name)
        elif (match := _CHECKPOINT_V2.fullmatch(name)) is not None:
            complete.append((int(match[1]), [name]))
    return complete + [(version, sorted(parts)) for (version, count), parts in found.items() if len(parts) == count]


def names_since_checkpoint(log: Path) -> list[str]:
    """Return the names in a log from its last checkpoint on: earlier names may be many. All names, if there is no checkpoint."""
    names = places.list_names(log)
    if _LAST_CHECKPOINT not in names:
        return names
    first = f"{last_checkpoint(log).version:020d}."
    kept = [name for name in names if name >= first]
    return kept if f"{first}json" in kept and newest_checkpoint(kept)[1] else names


def has_v2_checkpoint(names: Iterable[str]) -> bool:
    """Tell whether there is a checkpoint in the format V2."""
    return any(map(_CHECKPOINT_V2.fullmatch, names))


def before_checkpoint(log: Path, names: Sequence[str], until: float) -> list[str]:
    """Return the names of the versions before the newest checkpoint that was written at ``until`` or earlier.

    They are in order, so that a commit exists as long as the one before it. Each new commit checks its predecessor (file_table.py).
    """
    checkpoints = sorted(_checkpoints(names))
    old = bisect_right(checkpoints, until, key=lambda each: (log / each[1][-1]).stat().st_mtime)
    first = checkpoints[old - 1][0] if old else 0
    return sorted(name for name in names if (match := _OF_VERSION.match(name)) and int(match[1]) < first)


def checkpoint_actions(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the actions in a file of a checkpoint, and in its sidecars, in the form of a commit's actions."""
    if path.suffix == ".json":
        actions: Iterable[Mapping[str, Any]] = map(json.loads, places.read_lines(path))
    else:
        actions = _parquet_actions(path)
    for action in actions:
        if (sidecar := action.get("sidecar")) is None:
            yield action
        else:
            yield from _parquet_actions(path.parent / "_sidecars" / sidecar["path"])


def _parquet_actions(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow.compute as pc

    file = places.parquet_reader(path)
    wanted = [
        name for name in ("add", "txn", "metaData", "protocol", "domainMetadata", "sidecar") if name in file.schema_arrow.names
    ]
    for batch in file.iter_batches(columns=wanted):
        # Most rows may be of files that have left the table.
        is_any = functools.reduce(pc.or_, (batch.column(name).is_valid() for name in wanted))
        for action in batch.filter(is_any).to_pylist(maps_as_pydicts="strict"):
            yield {kind: _said(body) for kind, body in action.items() if body}


def _said(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an action of a checkpoint in the form of a commit: without nulls, and without parsed copies of other fields."""
    return {key: value for key, value in _without_nulls(body).items() if not key.endswith("_parsed")}


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    # The keys of a map, such as a table's properties, are the user's: their names say nothing.
    return {key: _without_nulls(each) if isinstance(each, dict) else each for key, each in value.items() if each is not None}
