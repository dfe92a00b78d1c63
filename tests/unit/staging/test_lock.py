"""Only one launcher at a time: the lock of a staging directory, also if the file system has no locks."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from cdcpipe.errors import CdcpipeError
from spark_sink.staging import account, last_error
from spark_sink.staging import lock as staging_lock
from spark_sink.staging import writer as staging_writer
from spark_sink.staging.lock import StagingLock, is_own, lock_owner
from spark_sink.staging.log import StagingError, list_epochs, list_segments
from spark_sink.staging.readers import read_readers
from spark_sink.staging.writer import Failpoint, StagingWriter
from support.staged import SOURCE, WORK, fill, landed


def tree(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}


def test_a_second_launcher_is_refused_and_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a notebook it may be one of the same process: to end that process would end the notebook."""
    with StagingWriter(tmp_path, slot="s") as writer:
        writer.begin_epoch(SOURCE)
        before = tree(tmp_path)
        assert lock_owner(tmp_path)["pid"] == os.getpid()
        with pytest.raises(StagingError, match=r"another run or land uses .*: this process$") as raised:
            StagingWriter(tmp_path, slot="s")
        assert str(raised.value.hint).startswith("call its stop(), or wait() for its end")
        monkeypatch.setattr(staging_lock, "_TOKEN", "0123456789abcdef")  # as in another process
        with pytest.raises(StagingError, match=f"another run or land uses .* process {os.getpid()} on") as raised:
            StagingWriter(tmp_path, slot="s")
        assert str(raised.value.hint).startswith("wait until that has ended")
        assert tree(tmp_path) == before
    assert lock_owner(tmp_path) is None
    with StagingWriter(tmp_path, slot="s"):
        pass


def test_a_process_knows_its_own_lock(tmp_path: Path):
    with closing(StagingLock(tmp_path)):
        owner = lock_owner(tmp_path)
    assert owner is not None
    assert is_own(owner)
    # The second one stands for a process in a container of the same host name, which has the same id there.
    for changed in ({"pid": owner["pid"] + 1}, {"token": "0123456789abcdef"}, {"token": None}):
        assert not is_own(owner | changed)


def test_a_lock_says_that_its_owner_lands_nothing_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with closing(StagingLock(tmp_path)) as lock:
        before = lock_owner(tmp_path)
        assert before is not None
        monkeypatch.setattr(staging_lock, "_now", lambda: "later")
        with StagingWriter(tmp_path, slot="s", lock=lock):
            assert lock_owner(tmp_path) == before
        assert lock_owner(tmp_path) == before | {"lands": False}
        with StagingWriter(tmp_path, slot="s", lock=lock) as writer:
            monkeypatch.setattr(os, "getpid", lambda: -1)
            writer.close()  # in a forked child
            assert lock_owner(tmp_path) == before
            monkeypatch.undo()


@pytest.mark.parametrize("slot", ["s", "t"], ids=["", "a launcher that is refused"])
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path, slot: str, monkeypatch: pytest.MonkeyPatch):
    """A notebook may have a pool of processes: a child has the files that were open when it was forked, for as long as it lives."""
    of_child: list[int] = []

    class ForkedLock(StagingLock):
        def __init__(self, root: Path) -> None:
            super().__init__(root)
            of_child.append(os.dup(self._fd))

    with StagingWriter(tmp_path, slot="s") as writer:
        writer.begin_epoch(SOURCE)
    monkeypatch.setattr(staging_writer, "StagingLock", ForkedLock)
    with suppress(StagingError), StagingWriter(tmp_path, slot=slot):
        assert lock_owner(tmp_path) is not None
    assert lock_owner(tmp_path) is None
    assert len(of_child) == 1
    os.close(of_child[0])


def test_a_forked_child_that_closes_the_writer_leaves_the_lock_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer = StagingWriter(tmp_path, slot="s")
    with os.fdopen(os.dup(writer._lock._fd)):  # the parent's
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            writer.close()
        assert lock_owner(tmp_path) is not None
    assert lock_owner(tmp_path) is None


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path):
    program = (
        "import sys, time; from spark_sink.staging.writer import StagingWriter; "
        "StagingWriter(sys.argv[1], slot='s'); print('x', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"x\n"
            assert lock_owner(tmp_path)["pid"] == process.pid
            with pytest.raises(StagingError, match=str(process.pid)):
                StagingWriter(tmp_path, slot="s")
        finally:
            process.send_signal(signal.SIGKILL)
    assert lock_owner(tmp_path) is None
    with StagingWriter(tmp_path, slot="s"):
        assert lock_owner(tmp_path)["pid"] == os.getpid()


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file system whose locks have no effect."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


@pytest.mark.usefixtures("no_locks")
def test_a_replaced_launcher_cannot_seal(tmp_path: Path):
    with StagingWriter(tmp_path, slot="s") as old:
        old.begin_epoch(SOURCE)
        old.seal(fill(old, WORK[:2]))
        sealing = fill(old, WORK[2:3])  # and here it is paused
        with StagingWriter(tmp_path, slot="s") as new:
            assert new.begin_epoch(SOURCE).start_lsn == WORK[1].end_lsn
            with pytest.raises(StagingError, match="another launcher has taken over"):
                old.seal(sealing)
            new.seal(fill(new, WORK[2:]))
    assert landed(tmp_path) == WORK


@pytest.mark.usefixtures("no_locks")
def test_a_launcher_that_is_replaced_after_its_rename_does_not_confirm(tmp_path: Path):
    made: list[StagingWriter] = []

    def replace(failpoint: Failpoint) -> None:
        if failpoint == Failpoint.AFTER_RENAME and not made:
            made.append(StagingWriter(tmp_path, slot="s"))
            # The segment is there already, so it is in the log, and not sent again.
            assert made[0].begin_epoch(SOURCE).start_lsn == WORK[1].end_lsn

    with StagingWriter(tmp_path, slot="s", hook=replace) as old:
        old.begin_epoch(SOURCE)
        with pytest.raises(StagingError, match="another launcher has taken over"):
            old.seal(fill(old, WORK[:2]))
    with made[0] as new:
        new.seal(fill(new, WORK[2:]))
    assert landed(tmp_path) == WORK


@pytest.mark.usefixtures("no_locks")
def test_a_launcher_that_is_replaced_right_before_its_rename_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with StagingWriter(tmp_path, slot="s") as old, StagingWriter(tmp_path, slot="s") as new:
        old.begin_epoch(SOURCE)
        # Its open file stays this time: the new launcher has cleaned up before it was made.
        assert new.begin_epoch(SOURCE).start_lsn == 0x100
        (tmp_path / "000001").mkdir(exist_ok=True)
        passed = iter([True])
        check = StagingWriter._check_fence
        monkeypatch.setattr(StagingWriter, "_check_fence", lambda self: next(passed, False) or check(self))
        with pytest.raises(StagingError, match="another launcher has taken over"):
            old.seal(fill(old, WORK[:2]))
        staging_writer._write_epoch(tmp_path / "000001" / "epoch.json", list_epochs(tmp_path)[-1])
        assert list((tmp_path / "000001").glob("*.cdc"))
        assert list_segments(tmp_path) == []
        monkeypatch.undo()
        new.seal(fill(new, WORK))
    assert landed(tmp_path) == WORK


@pytest.mark.usefixtures("no_locks")
def test_an_epoch_begins_where_the_log_ends_once_it_is_made(tmp_path: Path):
    with StagingWriter(tmp_path, slot="s") as old, StagingWriter(tmp_path, slot="s") as new:
        old.begin_epoch(SOURCE)
        old.seal(fill(old, WORK[:2]))  # the new one has looked at the log before, and makes its epoch after
        assert new.begin_epoch(SOURCE).start_lsn == WORK[1].end_lsn
        new.seal(fill(new, WORK[2:]))
    assert landed(tmp_path) == WORK


@pytest.mark.parametrize("name", ["lock", "removed.json", "000001/epoch.json", "readers/tables.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_named_and_not_waited_for(tmp_path: Path, name: str, make: Callable[[Path], None]):
    """To open a named pipe would wait for ever."""
    path = put(tmp_path, name, make)
    with pytest.raises(CdcpipeError, match=re.escape(f"{path} is no file")) as caught, StagingWriter(tmp_path, slot="s"):
        read_readers(tmp_path)
    assert "move away what is there" in (caught.value.hint or "")
    last_error.note(tmp_path, "land", caught.value)
    noted = last_error.read(tmp_path)
    assert noted is not None
    assert str(path) in noted["message"]


def test_an_account_that_is_no_file_is_a_lost_account(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = put(tmp_path, "known.json", os.mkfifo)
    assert account.read(tmp_path) == account.read(tmp_path) == account.Account()
    (said,) = caplog.messages  # once, although the file is read again and again
    assert f"{path} is no file" in said


def put(root: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Begin a log, and put something that is no file where one of its files is."""
    with StagingWriter(root, slot="s") as writer:
        writer.begin_epoch(SOURCE)
    path = root / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    make(path)
    return path


@pytest.mark.parametrize(
    ("code", "hint"), [(errno.ENOSPC, "the file system is full"), (errno.EPERM, "POSIX"), (errno.ENOTSUP, "POSIX")]
)
def test_the_hint_of_the_trial_fits_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, hint: str) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(staging_lock, "write_json", refuse)
    with pytest.raises(StagingError, match="can't hold a staging log") as caught:
        staging_lock.try_file_system(tmp_path)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.EIO, "dmesg"), (errno.EROFS, "read-only"), (errno.ENOLCK, "a mounted object store cannot")],
)
def test_the_hint_fits_what_keeps_the_lock_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(StagingError) as raised:
        StagingLock(tmp_path)
    assert hint in str(raised.value.hint)


def test_a_full_disk_does_not_keep_the_launcher_from_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        lock = StagingLock(tmp_path)
    with closing(lock):
        lock.sign()  # as soon as it has made room
        assert (lock_owner(tmp_path) or {}).get("pid") == os.getpid()
