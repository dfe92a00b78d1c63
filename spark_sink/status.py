"""``cdcpipe-spark status``: what is in a staging directory, who writes to it, how far its readers are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from cdcpipe.lsn import format_lsn
from spark_sink.options import CONTEXT_SETTINGS, format_size, staging_option
from spark_sink.staging import (
    epoch_directory,
    list_epochs,
    list_segments,
    log_end,
    read_readers,
    removed_position,
)
from spark_sink.staging_writer import lock_owner, owner_text

if TYPE_CHECKING:
    from pathlib import Path

    from spark_sink.staging import Position, Segment

__all__ = ["command", "describe"]

_EXAMPLE = """\b
Example:
  cdcpipe-spark status --staging /var/lib/cdc/shop --json"""


@click.command("status", context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@staging_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, for programs.")
def command(staging: Path, *, as_json: bool) -> None:
    """Show a staging directory: what its log holds, who writes to it, how far its readers are."""
    found = describe(staging)
    click.echo(json.dumps(found, indent=1) if as_json else _render(found))


def describe(root: Path) -> dict[str, Any]:
    """Return what `status` shows; StagingError for a directory that is none, or is damaged."""
    epochs, segments, end = list_epochs(root), list_segments(root), log_end(root)
    sizes = {segment.path: _size(segment.path) for segment in segments}
    removed = removed_position(root)
    return {
        "staging": str(root),
        "launcher": lock_owner(root),
        "source": None
        if not epochs
        else {
            "system_id": epochs[-1].system_id,
            "timeline": epochs[-1].timeline,
            "database": epochs[-1].database,
            "slot": epochs[-1].slot,
            "publications": list(epochs[-1].publications),
        },
        "begin": str(segments[0].start if segments else end) if end is not None else None,
        "end": None if end is None else str(end),
        "removed": None if removed is None else str(removed),
        "segments": len(segments),
        "size": sum(sizes.values()),
        "epochs": [
            {
                "number": epoch.number,
                "start_lsn": format_lsn(epoch.start_lsn),
                "segments": sum(segment.epoch == epoch.number for segment in segments),
                "size": sum(sizes[segment.path] for segment in segments if segment.epoch == epoch.number),
                "open_size": _open_size(epoch_directory(root, epoch.number)),
            }
            for epoch in epochs
        ],
        "readers": {
            name: {"position": str(position), **_behind(position, segments, sizes)} for name, position in read_readers(root).items()
        },
    }


def _open_size(directory: Path) -> int:
    return sum(_size(path) for path in directory.glob("*.open"))


def _size(path: Path) -> int:
    """Return a file's size, 0 for one that was sealed or removed in this moment."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _behind(position: Position, segments: list[Segment], sizes: dict[Path, int]) -> dict[str, int]:
    """Return how much of the log a reader does not have yet."""
    ahead = [sizes[segment.path] for segment in segments if segment.end_lsn > position.lsn]
    return {"segments_behind": len(ahead), "size_behind": sum(ahead)}


def _render(found: dict[str, Any]) -> str:
    lines = [f"staging    {found['staging']}"]
    source = found["source"]
    if source is None:
        return f"{lines[0]}\nlog        not begun"
    owner = found["launcher"]
    lines += [
        f"source     slot {source['slot']}, database {source['database']}, publications {', '.join(source['publications'])}",
        f"           server {source['system_id']}, timeline {source['timeline']}",
        f"launcher   {'none is running' if owner is None else owner_text(owner)}",
        f"log        {found['begin']} to {found['end']}, {found['segments']} segments, {format_size(found['size'])}",
    ]
    if found["removed"]:
        lines.append(f"removed    up to {found['removed']}")
    lines += ["", _row("epoch", "start", "segments", "size", "open")]
    lines += [
        _row(
            str(epoch["number"]),
            epoch["start_lsn"],
            str(epoch["segments"]),
            format_size(epoch["size"]),
            format_size(epoch["open_size"]) if epoch["open_size"] else "",
        )
        for epoch in found["epochs"]
    ]
    for name, reader in found["readers"].items():
        behind = f"{reader['segments_behind']} segments, {format_size(reader['size_behind'])} behind"
        lines += ["", f"reader     {name}: {reader['position']}, {behind}"]
    return "\n".join(lines)


def _row(number: str, start: str, segments: str, size: str, open_size: str) -> str:
    return f"{number:>9}  {start:<17}  {segments:>8}  {size:>10}  {open_size:>10}".rstrip()
