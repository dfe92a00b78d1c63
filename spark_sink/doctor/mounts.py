"""Finds the file system of a directory, and judges whether a staging log and Delta tables are safe on it.

Source: proc_pid_mountinfo(5), nfs(5), mount.lustre(8).
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
_OF_NFS: Final = "mount it with NFS 4 and without nolock and local_lock"
_FIXES: Final = {"nfs": _OF_NFS, "nfs4": _OF_NFS, "lustre": "mount it with flock, and not with localflock"}
"""How to mount file systems whose options say how far locks reach."""
_LOCAL_LOCKS: Final = frozenset({"cifs", "smb3", "9p", "fuse.sshfs", "virtiofs", "beegfs"})
"""File systems of a network, or of a virtual machine's host, on which flock works within one machine only, unless set otherwise."""
_LOCAL_OPTIONS: Final = frozenset({"nolock", "local_lock=all", "local_lock=flock", "localflock"})
"""Options of mounts that do the same: of NFS and Lustre."""


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
    elif mount.kind in _LOCAL_LOCKS or (mount.kind in _FIXES and mount.options & _LOCAL_OPTIONS):
        why = "its locks exclude only processes of this machine, and not a launcher on another machine"
        yield warning(where, why, _FIXES.get(mount.kind, disk))
    else:
        yield ok(where)
