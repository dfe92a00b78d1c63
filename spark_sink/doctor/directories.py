"""Checks a directory: whether its file system is durable, locks, links, has enough space, and has the same clock as this machine.

`probe` writes a few small files, and removes them afterwards. If the directory does not exist yet, it uses the nearest existing
parent. The functions that judge do no I/O.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cdcpipe.doctor.findings import Verdict, error, ok, warning
from cdcpipe.units import format_duration, format_size
from spark_sink.doctor.mounts import Mount, find_mount, judge_mount, parse_mounts
from spark_sink.files.clock import difference_s
from spark_sink.files.local import TEMPORARY_PREFIX, fsync_directory
from spark_sink.files.lock import try_lock
from spark_sink.files.system_hints import hint_in

__all__ = ["Directory", "clock", "file_system", "folders", "judge_clock", "place", "probe", "space"]

_MOUNTS: Final = Path("/proc/self/mountinfo")
_LEAST_FREE: Final = 256 << 20
_LITTLE_FREE: Final = 2 << 30
_FEW_FILES: Final = 500_000
_SOON_S: Final = 3600.0
_CLOCK_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Directory:
    """The facts about a directory.

    ``failures`` has the system's error message for each operation that failed. The message is empty if the operation raised no
    error but did not have its effect.
    """

    what: str
    path: Path
    probed: Path
    """The directory itself, or its nearest existing parent."""
    is_directory: bool
    owner: int
    user: int
    failures: Mapping[str, str]
    mount: Mount | None
    free_bytes: int
    free_files: int | None = None
    """How many more files the file system allows; None if it has no limit."""
    clock_ahead_s: float | None = None
    """How far the clock of the file system is ahead of this machine's; None if no file could be written."""
    apart: tuple[str, ...] | None = None
    """Which folders of a warehouse are on another file system than its ``_cdcpipe``; None if it has none of them."""

    @property
    def is_there(self) -> bool:
        """Whether the directory exists already."""
        return self.path == self.probed


def probe(what: str, path: Path) -> Directory:
    """Return the facts about ``path``, or about its nearest existing parent."""
    path = path.absolute()
    probed = next(each for each in (path, *path.parents) if os.path.lexists(each))
    is_directory = probed.is_dir()
    failures: dict[str, str] = {}
    ahead = _try(probed, failures) if is_directory else None
    try:
        mounts = parse_mounts(_MOUNTS.read_text(errors="replace"))
    except OSError:  # no /proc
        mounts = []
    return Directory(
        what=what,
        path=path,
        probed=probed,
        is_directory=is_directory,
        owner=probed.lstat().st_uid,
        user=os.geteuid(),
        failures=failures,
        mount=find_mount(probed.resolve(), mounts),
        free_bytes=shutil.disk_usage(probed).free if is_directory else 0,
        free_files=_free_files(probed) if is_directory else None,
        clock_ahead_s=ahead,
        apart=_apart(path, mounts),
    )


def _free_files(directory: Path) -> int | None:
    found = os.statvfs(directory)
    return found.f_favail if found.f_files else None


def _apart(root: Path, mounts: list[Mount]) -> tuple[str, ...] | None:
    """Return which folders with tables are where a file from ``_cdcpipe`` can't be moved to: another device, or another mount."""

    def is_where(path: Path) -> tuple[int, Mount | None]:
        return path.stat().st_dev, find_mount(path.resolve(), mounts)

    with suppress(OSError):  # without `_cdcpipe` it is no warehouse yet
        own = is_where(root / "_cdcpipe")
        return tuple(name for name in ("changelog", "replica") if (root / name).is_dir() and is_where(root / name) != own)
    return None


def _try(directory: Path, failures: dict[str, str]) -> float | None:
    """Write, sync, lock, link and rename files. Returns how far the clock of the file system is ahead; None without a file."""
    name = directory / f"{TEMPORARY_PREFIX}doctor-{secrets.token_hex(8)}"
    link, renamed = name.with_suffix(".link"), name.with_suffix(".renamed")
    ahead: float | None = None
    try:
        before = time.time()
        with _noting(failures, "write"):
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                os.write(fd, b"doctor")
                with _noting(failures, "fsync"):
                    os.fsync(fd)
                    fsync_directory(directory)
                written_at, after = os.fstat(fd).st_mtime, time.time()
                ahead = difference_s(written_at, before, after)
                with _noting(failures, "flock"):
                    if not (try_lock(fd) and _keeps_others_out(name)):
                        failures["flock"] = ""
            finally:
                os.close(fd)
            with _noting(failures, "link"):
                os.link(name, link)
            with _noting(failures, "rename"):
                name.rename(renamed)
    finally:
        for each in (name, link, renamed):
            with suppress(OSError):  # a file system that is mounted read-only refuses this even where there is no such file
                each.unlink()
    return ahead


@contextmanager
def _noting(failures: dict[str, str], operation: str) -> Iterator[None]:
    try:
        yield
    except OSError as ex:
        failures[operation] = ex.strerror or str(ex)


def _keeps_others_out(path: Path) -> bool:
    """Tell whether a held lock excludes a second one. A lock belongs to an open file, so one process can test this."""
    fd = os.open(path, os.O_RDWR)
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


def place(found: Directory) -> Iterator[Verdict]:
    """Judge whether the directory exists or can be created, is writable, and in the case of staging belongs to this user."""
    option = f"give another directory: --{found.what.rpartition(' ')[2]}"
    if not found.is_directory:
        yield error(f"{found.path}: {found.probed} is not a directory", f"{found.what} can't be made there", option)
    elif "write" in found.failures:
        said = found.failures["write"]
        is_of_another = said in {os.strerror(number) for number in (errno.EACCES, errno.EPERM)}
        fix = f"chown {found.user} {found.probed}" if is_of_another else hint_in(said) or option
        yield error(f"{found.path}: {found.probed} is not writable: {said}", f"{found.what} can't be made there", fix)
    elif found.is_there and found.what == "staging" and found.owner != found.user:
        why = "the launcher refuses a directory that another user can change"
        yield error(
            f"{found.path} belongs to user id {found.owner}, and not to {found.user}", why, f"run as its owner, or {option}"
        )
    else:
        yield ok(f"{found.path} is {'there' if found.is_there else 'not there yet, and can be made'}, and writable")


_NEEDED_FOR: Final = {
    "fsync": "what is confirmed to the server would not be durable",
    "flock": "two processes could write at one time",
    "link": "one commit could overwrite another",
    "rename": "files could be seen half-written",
}


def file_system(found: Directory) -> Iterator[Verdict]:
    """Judge whether the file system supports the operations that a log and a table need."""
    if not found.is_directory or "write" in found.failures:
        return
    for operation, why in _NEEDED_FOR.items():
        # A log needs no links.
        if operation in found.failures and not (operation == "link" and found.what == "staging"):
            said = found.failures[operation] or "a second lock is granted beside the first"
            yield error(f"{operation} does not work in {found.probed}: {said}", why, "use a local disk, or NFS 4")
    if not found.failures.keys() - ({"link"} if found.what == "staging" else set()):
        yield from judge_mount(found.mount, found.what)


def folders(found: Directory) -> Iterator[Verdict]:
    """Judge whether the folders of a warehouse are on one file system. Copies of tables are moved from one folder to others."""
    if found.apart:
        said = f"{' and '.join(found.apart)} of {found.path} {'is' if len(found.apart) == 1 else 'are'} on another file system"
        why = "each copy of a table fails at its end, when its files are moved there"
        yield error(said, why, "bring the folders of the warehouse together: move the whole warehouse to the larger disk")
    elif found.apart is not None:
        yield ok(f"the folders of {found.path} are on one file system")


def space(found: Directory, needed_bytes: int = 0, bytes_per_s: float | None = None) -> Iterator[Verdict]:
    """Judge whether there is room: for ``needed_bytes``, for some time at the rate ``bytes_per_s``, and for files."""
    if not found.is_directory:
        return
    said = f"{format_size(found.free_bytes)} are free for {found.what}"
    fix = "make room there, or use another disk"
    if found.free_bytes < _LEAST_FREE:
        yield error(said, "a full disk stops the pipeline", fix)
        return
    if needed_bytes and found.free_bytes < needed_bytes:
        yield warning(said, f"the tables are about {format_size(needed_bytes)} on the server, and are copied", fix)
    elif found.free_bytes < _LITTLE_FREE:
        yield warning(said, "a full disk stops the pipeline", fix)
    elif bytes_per_s and found.free_bytes / bytes_per_s < _SOON_S:
        lasts = format_duration(found.free_bytes / bytes_per_s)
        why = f"at the rate at which the server writes WAL, the disk is full in {lasts} if the tables do not progress"
        yield warning(said, why, fix)
    elif found.free_files is not None and found.free_files < _FEW_FILES:
        said = f"the file system of {found.what} allows {found.free_files:,} more files"
        why = (
            "each micro-batch adds files to each table that it touches; without room for one, the pipeline stops as on a full disk"
        )
        fix = (
            "use a file system with more inodes, or make --seal-interval and --replica-interval longer, or --vacuum-retention and "
            "--log-retention shorter"
        )
        yield warning(said, why, fix)
    else:
        yield ok(said)


def clock(found: Directory) -> Iterator[Verdict]:
    """Judge whether file times follow this machine's clock. Old files are deleted by these times."""
    if found.clock_ahead_s is not None:
        yield from judge_clock(found.what, found.clock_ahead_s)


def judge_clock(where: str, ahead_s: float) -> Iterator[Verdict]:
    """Judge the clock of a place where files are deleted by age."""
    if abs(ahead_s) > _CLOCK_S:
        how = f"{format_duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
        yield warning(
            f"the clock of {where} is {how}",
            "files are deleted by their age, too early or too late",
            "timedatectl set-ntp true, on the machine whose clock is wrong",
        )
    else:
        yield ok(f"the clock of {where} and this machine's agree")
