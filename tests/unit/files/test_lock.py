"""Locks of files that outlive the process that took them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spark_sink.files.lock import open_alone, open_shared, share_with_child, try_lock
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


def test_a_lock_goes_on_in_a_new_file(tmp_path: Path) -> None:
    """Also after somebody has removed the directory: other processes lock the new file."""
    path = tmp_path / "lock"
    share_with_child(path)
    path.unlink()
    with open_shared(path), path.open() as other:
        assert not try_lock(other.fileno())
