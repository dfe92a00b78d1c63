"""The writer of the staging log: crashes and errors at every step, and the order in which files become durable."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from spark_sink.staging.filler import Cut, SegmentFiller, Write
from spark_sink.staging.lock import lock_owner
from spark_sink.staging.log import StagingError, list_segments
from spark_sink.staging.readers import register_reader
from spark_sink.staging.writer import Boundaries, Failpoint, Sealing, StagingWriter
from support.pgoutput_stream import (
    encode_stream,
)
from support.staged import BIG, SOURCE, WORK, Server, fill, land, landed, seal_all


class Crash(BaseException):
    """Stands for the death of the process at this point."""


def test_the_writer_lands_everything_once(tmp_path: Path):
    server = Server(WORK)
    land(tmp_path, server)
    assert landed(tmp_path) == WORK
    assert server.confirmed_lsn == WORK[-1].end_lsn == list_segments(tmp_path)[-1].end_lsn
    assert len(list_segments(tmp_path)) > 4
    assert not list(tmp_path.glob("*/*.open"))


class At:
    """A hook that raises when a failpoint is passed for the n-th time."""

    def __init__(self, failpoint: Failpoint, turn: int, error: BaseException) -> None:
        self.failpoint, self.turn, self.error = failpoint, turn, error
        self.passed = 0

    def __call__(self, failpoint: Failpoint) -> None:
        if failpoint == self.failpoint:
            self.passed += 1
            if self.passed == self.turn:
                raise self.error


@pytest.mark.parametrize("failpoint", Failpoint)
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_crash_at_any_point_loses_nothing_and_repeats_nothing(tmp_path: Path, failpoint: Failpoint, turn: int):
    server, crashes = Server(WORK), 0
    for attempt in range(40):
        hook = At(failpoint, turn, Crash())
        try:
            land(tmp_path, server, hook if attempt < 8 else None)
        except Crash:
            crashes += 1
            ends = [segment.end_lsn for segment in list_segments(tmp_path)]
            assert server.confirmed_lsn <= max([0x100, *ends])
            assert landed(tmp_path) == WORK[: len(landed(tmp_path))]
        else:
            break
    assert crashes > 0 or (turn > 1 and failpoint.name.startswith("EPOCH"))
    assert landed(tmp_path) == WORK
    assert server.confirmed_lsn <= WORK[-1].end_lsn
    assert not list(tmp_path.glob("*/*.open"))
    assert not list(tmp_path.glob("**/.tmp-*"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize(
    "failpoint",
    [
        Failpoint.BEFORE_WRITE,
        Failpoint.AFTER_WRITE,
        Failpoint.BEFORE_FSYNC,
        Failpoint.AFTER_FSYNC,
        Failpoint.AFTER_RENAME,
        Failpoint.AFTER_DIRECTORY_FSYNC,
        Failpoint.EPOCH_MADE,
    ],
)
def test_an_error_of_the_disk_stops_and_confirms_nothing(tmp_path: Path, failpoint: Failpoint, turn: int, code: int):
    server = Server(WORK)
    if failpoint == Failpoint.EPOCH_MADE:
        turn = 1
    with pytest.raises(StagingError, match=os.strerror(code)) as caught:
        land(tmp_path, server, At(failpoint, turn, OSError(code, os.strerror(code))))
    assert caught.value.hint
    assert server.confirmed_lsn <= max([0x100, *(segment.end_lsn for segment in list_segments(tmp_path))])
    if failpoint in (Failpoint.BEFORE_WRITE, Failpoint.AFTER_WRITE):
        assert not list(tmp_path.glob("*/*.open"))  # it had the last room of the disk
    land(tmp_path, server)
    assert landed(tmp_path) == WORK


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.ENOSPC, "the file system is full"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EROFS, "mounted read-only"),
        (errno.EACCES, "as the owner"),
        (errno.EBADMSG, "make room or repair the disk; then start again"),
    ],
)
def test_the_hint_fits_the_error(tmp_path: Path, code: int, hint: str):
    with pytest.raises(StagingError) as caught:
        land(tmp_path, Server(WORK), At(Failpoint.BEFORE_WRITE, 1, OSError(code, os.strerror(code))))
    assert hint in (caught.value.hint or "")
    assert (caught.value.hint or "").endswith("; nothing is lost, because only sealed segments were confirmed")


def test_a_directory_that_was_removed_is_no_place_to_create(tmp_path: Path):
    """Its segments are confirmed to the server, so "nothing is lost" is not true, and an empty directory is no help."""
    with StagingWriter(tmp_path, slot="s") as writer:
        epoch = writer.begin_epoch(SOURCE)
        filler = SegmentFiller(epoch.start_lsn, BIG)
        operations = filler.feed(encode_stream(WORK[:3]), 0) + filler.finish()
        shutil.rmtree(tmp_path)
        with pytest.raises(StagingError) as caught:
            seal_all(writer, operations)
    hint = caught.value.hint or ""
    assert hint.startswith("it was removed, moved or unmounted while the launcher wrote there: put it back")
    assert "nothing is lost" not in hint


@pytest.mark.parametrize("left", ["nothing", "an empty directory", "an earlier epoch"])
def test_a_directory_whose_log_was_removed_meanwhile_is_named(tmp_path: Path, left: str):
    """A file that is open takes writes and fsync also when its directory is gone."""
    root = tmp_path / "staging"
    land(root, Server(WORK[:3]))
    with StagingWriter(root, slot="s") as writer:
        epoch = writer.begin_epoch(SOURCE)
        sealing = fill(writer, WORK[3:])
        if left == "an earlier epoch":
            shutil.rmtree(root / f"{epoch.number:06d}")
        else:
            root.rename(tmp_path / "old")
        if left == "an empty directory":
            root.mkdir()
        with pytest.raises(StagingError, match="what this launcher has written is not there any more") as caught:
            writer.seal(sealing)
        assert (caught.value.hint or "").startswith("it was removed, moved or unmounted while the launcher wrote there")
        none = np.zeros(0, np.int64)
        with pytest.raises(StagingError, match="an earlier write"):
            writer.apply(Write(b"x" * (1 << 20), none, none, 0))


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_the_system_call_itself_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    with StagingWriter(tmp_path, slot="s") as writer:
        epoch = writer.begin_epoch(SOURCE)
        filler = SegmentFiller(epoch.start_lsn, BIG)
        operations = filler.feed(encode_stream(WORK[:3]), 0) + filler.finish()
        calls = 0

        def fail(*_: object) -> int:
            nonlocal calls
            calls += 1
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(StagingError, match="Input/output error"):
                seal_all(writer, operations)
        assert calls == 1
        # The disk works again, which proves nothing: nothing is tried again.
        with pytest.raises(StagingError, match="an earlier write"):
            writer.seal(Sealing(-1, tmp_path, Cut(0, 1, 1, 1, 1), Boundaries()))
        with pytest.raises(StagingError, match="an earlier write"):
            writer.apply(Write(bytes(2 << 20), np.array([]), np.array([]), 0))
    assert list_segments(tmp_path) == []
    server = Server(WORK)
    land(tmp_path, server)
    assert landed(tmp_path) == WORK


class FullDisk:
    """Makes the first launcher's open segments fill the disk: no file can be written while there is one in ``root``."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.fsync, self.pwrite = root, os.fsync, os.pwrite
        monkeypatch.setattr(os, "fsync", lambda fd: self.check() or self.fsync(fd))
        monkeypatch.setattr(os, "pwrite", lambda fd, data, pos: self.check() or self.pwrite(fd, data, pos))

    def check(self) -> None:
        if list(self.root.glob("*/*.open")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_on_a_full_disk_a_start_first_deletes_open_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = Server(WORK)
    with pytest.raises(Crash):
        land(tmp_path, server, At(Failpoint.BEFORE_FSYNC, 2, Crash()))
    assert list(tmp_path.glob("*/*.open"))
    register_reader(tmp_path, "r", list_segments(tmp_path)[-1].end)
    disk = FullDisk(tmp_path, monkeypatch)
    with StagingWriter(tmp_path, slot="s"):
        assert not list(tmp_path.glob("*/*.open"))
        assert (lock_owner(tmp_path) or {}).get("pid") == os.getpid()
    assert not (tmp_path / "removed.json").exists()  # no segment had to go
    monkeypatch.setattr(os, "fsync", disk.fsync)
    land(tmp_path, server)
    assert landed(tmp_path) == WORK


def test_a_start_deletes_what_killed_processes_have_left(tmp_path: Path):
    land(tmp_path, Server(WORK))
    (tmp_path / "readers").mkdir()
    old = [".tmp-1", "readers/.tmp-2"]
    being_written = [".tmp-doctor-3", "readers/.tmp-4"]  # by other programs than the launcher
    names = [*old, *being_written, "000001/.tmp-5", "000001/.0000000000000100-0000000000000200.idx.47-11"]
    for name in names:
        (tmp_path / name).touch()
    for name in old:
        os.utime(tmp_path / name, (0, 0))
    land(tmp_path, Server(WORK))
    assert [name for name in names if (tmp_path / name).exists()] == being_written


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    land(tmp_path, Server(WORK))
    assert landed(tmp_path) == WORK


def test_a_copy_of_an_open_segment_is_not_sealed(tmp_path: Path):
    """`mv staging old; cp -a old staging` while the launcher runs: the copy lacks what is written to the moved file after it."""
    root, server = tmp_path / "staging", Server(WORK)
    with StagingWriter(root, slot="s") as writer:
        writer.begin_epoch(SOURCE)
        sealing = fill(writer, WORK)
        root.rename(tmp_path / "old")
        shutil.copytree(tmp_path / "old", root)
        os.truncate(sealing.path, 10)
        with pytest.raises(StagingError, match="is not the file that this launcher has written") as caught:
            writer.seal(sealing)
        assert "nothing is lost" in (caught.value.hint or "")
    assert list_segments(root) == []
    land(root, server)
    assert landed(root) == WORK


def test_the_order_of_durability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each file before its name, each name before the fsync of its directory, and all of it before `seal` returns."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(fd: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).relative_to(tmp_path)}")
        fsync(fd)

    def note_rename(self: Path, target: Path) -> Path:
        done.append(f"rename {target.relative_to(tmp_path)}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    root = tmp_path / "staging"
    with StagingWriter(root, slot="s") as writer:
        assert done[0] == "fsync ."
        assert done[1:4] == [done[1], "rename staging/.tmp-trial", "fsync staging"]  # what the file system can do
        assert len(done) == 4
        done.clear()
        writer.begin_epoch(SOURCE)
        assert done[0] == "fsync staging"
        assert done[1].startswith("fsync staging/000001/.tmp-")
        assert done[2:] == ["rename staging/000001/epoch.json", "fsync staging/000001"]
        done.clear()
        segment = writer.seal(fill(writer, WORK))
        assert done == [
            "fsync staging/000001/0000000000000100.open",
            f"rename {segment.path.relative_to(tmp_path)}",
            "fsync staging/000001",
        ]
    with StagingWriter(root, slot="s") as writer:
        done.clear()
        writer.begin_epoch(SOURCE)
        # The launcher before may have been killed between the rename of its last segment and the fsync of the directory.
        assert done[:2] == ["fsync staging", "fsync staging/000001"]
        assert done[3:] == ["rename staging/000002/epoch.json", "fsync staging/000002"]
