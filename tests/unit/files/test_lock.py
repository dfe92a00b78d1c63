"""Locks of files that outlive the process that took them."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_sink.files import lock
from spark_sink.files.lock import hold_alone, open_alone, open_shared, share_with_child, try_lock
from spark_sink.warehouse.lock import TableLock, lock_file
from support.locks import held_elsewhere
from support.waiting import until

_HOLDER = """
import subprocess, sys, time
from pathlib import Path
from spark_sink.files import lock
path, hold = Path(sys.argv[1]), getattr(lock, sys.argv[2])
child = subprocess.Popen(["sleep", "600"], pass_fds=lock.share_with_child(path), start_new_session=True)
for _ in range(2):  # the first release must not depend on the child's end
    with hold(path) as fd:
        assert lock.try_lock(fd, is_shared=hold is lock.open_shared)
with lock.open_alone(path) as fd, open(path) as other:
    assert lock.try_lock(fd) and not lock.try_lock(other.fileno(), is_shared=True)
with open(path) as other:
    assert lock.try_lock(other.fileno())
with hold(path) as fd:
    assert lock.try_lock(fd, is_shared=hold is lock.open_shared)
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("hold", ["open_alone", "open_shared"])
def test_a_lock_of_a_killed_process_is_free_when_its_child_has_ended(tmp_path: Path, hold: str) -> None:
    """The JVM of a killed purge may still commit."""
    path = tmp_path / "new" / "lock"
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, path, hold], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        holder.kill()
        holder.wait()
        with open_alone(path) as fd:
            assert not try_lock(fd)
            assert try_lock(fd, is_shared=True) is (hold == "open_shared")
    finally:
        os.kill(child, signal.SIGKILL)

    def is_free() -> bool:
        with open_alone(path) as fd:
            return try_lock(fd)

    until(is_free, "the end of the child")


@pytest.mark.parametrize("has_child", [False, True])
def test_a_thread_that_gives_up_leaves_the_lock_with_another_thread(tmp_path: Path, has_child: bool) -> None:
    """A snapshot copies several tables at once, and ^C ends the one that waits. The JVM still commits for the other one."""
    path, tables = lock_file(tmp_path), TableLock(tmp_path)
    if has_child:
        share_with_child(path)
    with tables.alone():
        with pytest.raises(InterruptedError), tables.alone(lambda: True):
            pass
        with path.open() as other:
            assert not try_lock(other.fileno(), is_shared=True)
    with path.open() as other:
        assert try_lock(other.fileno())


def test_a_lock_goes_on_in_a_new_file(tmp_path: Path) -> None:
    """Also after somebody has removed the directory: other processes lock the new file."""
    path = tmp_path / "lock"
    share_with_child(path)
    path.unlink()
    with open_shared(path), path.open() as other:
        assert not try_lock(other.fileno())


@pytest.mark.parametrize("hold", [hold_alone, open_alone, open_shared])
def test_a_forked_child_does_not_keep_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: Any) -> None:
    """A notebook may have a pool of processes: a child has the files that were open when it was forked, for as long as it lives."""
    of_child: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(lock, "try_lock", lambda fd, **how: of_child.append(os.dup(fd)) or try_lock(fd, **how))
        with hold(tmp_path / "lock") as fd:
            if hold is open_alone:
                assert lock.try_lock(fd)
    with hold_alone(tmp_path / "lock") as is_alone:
        assert is_alone
    assert len(of_child) == 1
    os.close(of_child[0])


_FORKED = """
import os, sys
from contextlib import ExitStack
from pathlib import Path
from spark_sink.files import lock
path, hold = Path(sys.argv[1]), getattr(lock, sys.argv[2])
if sys.argv[3] == "True":
    lock.share_with_child(path)
def is_free():
    with lock.open_alone(path) as fd:
        return lock.try_lock(fd)
with ExitStack() as held:
    fd = held.enter_context(hold(path))
    assert hold is not lock.open_alone or lock.try_lock(fd)
    if not (child := os.fork()):
        if is_free():
            os._exit(1)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    with open(path) as other:
        assert not lock.try_lock(other.fileno())
assert is_free()
"""


@pytest.mark.parametrize("has_child", [False, True])
@pytest.mark.parametrize("hold", ["hold_alone", "open_alone", "open_shared"])
def test_a_forked_child_that_ends_leaves_the_lock_with_its_parent(tmp_path: Path, hold: str, has_child: bool) -> None:
    """A child that ends with `sys.exit` leaves the blocks in which it was forked."""
    arguments = [sys.executable, "-c", _FORKED, tmp_path / "lock", hold, str(has_child)]
    ended = subprocess.run(arguments, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("right", ["alone", "append", "merge", "reading"])
def test_a_wait_for_a_stopped_process_names_it(
    tmp_path: Path, right: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A `snapshot` that a user stopped with ^Z keeps the tables: `run` said nothing and stood still."""
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.0)
    path = lock_file(tmp_path)

    def take() -> None:
        with getattr(TableLock(tmp_path), right)():
            pass

    thread = threading.Thread(target=take)
    with held_elsewhere(path) as holder:
        holder.send_signal(signal.SIGSTOP)
        thread.start()
        until(lambda: caplog.messages, "the warning")
    thread.join()
    assert [message.partition(" has it")[0] for message in caplog.messages] == [
        f"still waiting for the lock {path}: process {holder.pid}"
    ]


@pytest.mark.parametrize("has_child", [False, True])
@pytest.mark.parametrize("right", ["alone", "append", "merge", "reading"])
def test_a_stop_ends_a_wait_for_another_process(tmp_path: Path, right: str, has_child: bool) -> None:
    """`run` said which process has the tables, and waited for it also after SIGTERM: until systemd killed it."""
    path, answers = lock_file(tmp_path), iter((False, False, True))
    tables = TableLock(tmp_path, lambda: next(answers))
    if has_child:
        share_with_child(path)
    take = getattr(tables, right)
    with held_elsewhere(path), pytest.raises(InterruptedError), take():
        pass
    assert not list(answers)
    with take(), path.open() as other:  # one that is free is given: a last round of merges needs it
        assert not try_lock(other.fileno())
    with path.open() as other:
        assert try_lock(other.fileno())


@pytest.mark.parametrize("has_child", [False, True])
@pytest.mark.parametrize("right", ["append", "merge", "reading"])
def test_a_stop_does_not_end_a_wait_for_this_process(tmp_path: Path, right: str, has_child: bool) -> None:
    """The stop ends the copy or the purge that has the tables. `run` left out its last merges, because nobody waited for that."""
    looks = threading.Semaphore(0)
    tables = TableLock(tmp_path, lambda: looks.release() is None)
    if has_child:
        share_with_child(lock_file(tmp_path))
    taken = []

    def take() -> None:
        with getattr(tables, right)():
            taken.append(right)

    thread = threading.Thread(target=take)
    with TableLock(tmp_path).alone():  # as a copy: with a lock of its own
        thread.start()
        assert looks.acquire(timeout=60)
        assert looks.acquire(timeout=60), "it gave up after its first look"
        assert not taken
        with pytest.raises(InterruptedError), tables.alone():
            pass
    thread.join()
    assert taken == [right]


def test_a_wait_for_a_thread_of_this_process_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A snapshot of `run` itself may keep the tables for minutes."""
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.0)
    answers = iter((False, False, True))
    with (tmp_path / "lock").open("w") as ours, (tmp_path / "lock").open() as other:
        fcntl.flock(ours, fcntl.LOCK_EX)
        with pytest.raises(InterruptedError):
            lock.wait_for_lock(other.fileno(), tmp_path / "lock", gives_up=lambda: next(answers))
    assert not caplog.messages


def test_who_has_a_lock_is_known_on_btrfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stat tells another device than the kernel's list of locks. `run` was told that another process has what it had itself."""
    with (
        (tmp_path / "ours").open("w") as ours,
        held_elsewhere(tmp_path / "theirs") as holder,
        (tmp_path / "theirs").open() as theirs,
    ):
        fcntl.flock(ours, fcntl.LOCK_EX)
        inodes = {each.fileno(): os.fstat(each.fileno()).st_ino for each in (ours, theirs)}
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", lambda fd: SimpleNamespace(st_dev=os.makedev(0, 4711), st_ino=inodes[fd]))
            found = [lock._other_holder(each.fileno()) for each in (ours, theirs)]
        assert found == [None, f"process {holder.pid}"]


def test_a_wait_for_another_machine_has_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file server's locks may belong to processes of other machines, which this machine does not list."""
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.0)
    answers = iter((False, True))
    monkeypatch.setattr(lock, "try_lock", lambda _fd, **_: False)
    with (tmp_path / "lock").open("w") as file, pytest.raises(InterruptedError):
        lock.wait_for_lock(file.fileno(), tmp_path / "lock", is_stopping=lambda: next(answers))
    assert "another process, on this machine or another one, has it" in caplog.text
