"""Finds the file system of a directory, and judges whether a staging log and Delta tables are safe on it.

Source: proc_pid_mountinfo(5), nfs(5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cdcpipe.doctor.findings import Verdict, error, ok, warning

__all__ = ["Mount", "find_mount", "judge_mount", "parse_mounts"]

_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_CONTAINER: Final = frozenset({"overlay", "aufs"})
_MOUNTED_STORES: Final = re.compile(r"fuse\.(s3fs|goofys|geesefs|gcsfuse|blobfuse2?|rclone|mountpoint-s3|juicefs)")
_NFS: Final = frozenset({"nfs", "nfs4"})
_LOCAL_LOCKS: Final = frozenset({"cifs", "smb3", "9p", "fuse.sshfs"})
"""Network file systems on which flock works only within one machine."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system, and where it is mounted. ``options`` has the options of the mount and those of the file system."""

    point: str
    kind: str
    source: str
    options: frozenset[str]


def parse_mounts(text: str) -> list[Mount]:
    """Parse the text of /proc/self/mountinfo. Skips lines that are not valid."""
    mounts: list[Mount] = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        fields, behind = before.split(" "), after.split(" ")
        if dash and len(fields) >= 6 and len(behind) >= 3:
            options = frozenset([*fields[5].split(","), *behind[2].split(",")])
            mounts.append(Mount(_unescape(fields[4]), behind[0], _unescape(behind[1]), options))
    return mounts


def _unescape(text: str) -> str:
    """Return a path from mountinfo, which writes space, tab, newline and backslash as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def find_mount(path: Path, mounts: list[Mount]) -> Mount | None:
    """Return the file system of an absolute path without symbolic links. A later mount hides an earlier one at the same place."""
    found: Mount | None = None
    for mount in mounts:
        if path.is_relative_to(mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def judge_mount(mount: Mount | None, what: str) -> Iterator[Verdict]:
    """Judge whether the files of ``what`` survive a restart, and whether its locks exclude other machines."""
    if mount is None:
        return
    where = f"{what} is on {mount.kind} ({mount.point})"
    disk = f"give it a directory on a disk, or on a volume that is mounted: --{what.rpartition(' ')[2]}"
    if mount.kind in _MEMORY:
        yield warning(where, "which is memory: it is gone when the machine restarts", disk)
    elif mount.kind in _CONTAINER:
        yield warning(where, "which is a container's own layer: it is gone with the container", disk)
    elif _MOUNTED_STORES.fullmatch(mount.kind):
        yield error(where, "a mounted object store has no reliable renames and locks", disk)
    elif (mount.kind in _NFS and _has_local_locks(mount)) or mount.kind in _LOCAL_LOCKS:
        why = "its locks exclude only processes of this machine, and not a launcher on another machine"
        fix = "mount it with NFS 4 and without nolock and local_lock" if mount.kind in _NFS else disk
        yield warning(where, why, fix)
    else:
        yield ok(where)


def _has_local_locks(mount: Mount) -> bool:
    return bool(mount.options & {"nolock", "local_lock=all", "local_lock=flock"})
