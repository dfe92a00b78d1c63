"""The doctor's checks of this machine, its directories and Spark's workers: the judgements, and the operations that it tries in a
directory.
"""

import errno
import fcntl
import os
import platform
import re
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdcpipe.doctor.findings import Verdict
from spark_sink.doctor import directories, machine, workers
from spark_sink.doctor.directories import Directory
from spark_sink.doctor.mounts import Mount, find_mount, judge_mount, parse_mounts
from spark_sink.doctor.workers import Worker

GB = 1 << 30
ROOT = Mount("/", "ext4", "/dev/vda1", frozenset({"rw"}))


def said(verdicts: Iterator[Verdict]) -> list[str]:
    """Return level and text of each verdict. Check that each problem has a reason and a fix."""
    found = list(verdicts)
    assert all((each.level == "ok") == (each.why is None) == (each.fix is None) for each in found)
    return [f"{each.level} {each.message}: {each.why}. {each.fix}" for each in found]


def judge(verdicts: Iterator[Verdict], *expected: str) -> None:
    """Check the verdicts. Each of ``expected`` is the beginning of a verdict and, after each …, words that follow."""
    found = said(verdicts)
    assert len(found) == len(expected), found
    for text, wanted in zip(found, expected, strict=True):
        start, _, words = wanted.partition(" … ")
        assert text.startswith(start), found
        assert words in text, found


# --- file systems ---

MOUNTINFO = r"""
22 1 253:1 / / rw,relatime - ext4 /dev/vda1 rw,errors=remount-ro
23 22 0:21 / /proc rw,nosuid shared:5 - proc proc rw
24 22 0:22 / /mnt/my\040lake rw,relatime shared:7 master:2 - nfs4 files:/lake rw,vers=4.2,local_lock=none
25 24 0:23 / /mnt/my\040lake/memory rw - tmpfs none rw,size=1g
26 22 0:24 / /mnt/hidden rw - ext4 /dev/vdb1 rw
27 22 0:25 / /mnt/hidden rw - fuse.s3fs s3fs rw
no line of this file
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/staging", "ext4"),
        ("/mnt/my lake", "nfs4"),
        ("/mnt/my lake/memory/x", "tmpfs"),
        ("/mnt/my lake2", "ext4"),
        ("/mnt/hidden/x", "fuse.s3fs"),
    ],
)
def test_which_file_system(path: str, kind: str) -> None:
    mounts = parse_mounts(MOUNTINFO)
    assert len(mounts) == 6
    found = find_mount(Path(path), mounts)
    assert found is not None
    assert found.kind == kind


def test_no_file_system_is_known() -> None:
    assert find_mount(Path("/srv"), []) is None
    judge(judge_mount(None, "staging"))


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("ext4", "rw", "ok staging is on ext4 (/srv)"),
        ("nfs4", "rw,local_lock=none", "ok staging is on nfs4"),
        ("nfs", "rw,nolock", "warning staging is on nfs … only processes of this machine"),
        ("nfs", "rw,local_lock=flock", "warning … without nolock and local_lock"),
        ("cifs", "rw", "warning … only processes of this machine"),
        ("virtiofs", "rw", "warning … only processes of this machine"),
        ("lustre", "rw,flock", "ok staging is on lustre"),
        ("lustre", "rw,localflock", "warning … mount it with flock"),
        ("tmpfs", "rw", "warning … gone when the machine restarts"),
        ("overlay", "rw", "warning … gone with the container"),
        ("fuse.gcsfuse", "rw", "error … a mounted object store"),
        ("fuse.blobfuse2", "rw", "error … a mounted object store"),
    ],
)
def test_file_systems(kind: str, options: str, expected: str) -> None:
    judge(judge_mount(Mount("/srv", kind, "x", frozenset(options.split(","))), "staging"), expected)


# --- directories ---


def directory(what: str = "warehouse", **changes: Any) -> Directory:
    known: dict[str, Any] = {
        "what": what,
        "path": Path("/srv/lake"),
        "probed": Path("/srv/lake"),
        "is_directory": True,
        "owner": 1000,
        "user": 1000,
        "failures": {},
        "mount": ROOT,
        "free_bytes": 100 * GB,
    }
    return Directory(**known | changes)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (directory(), "ok /srv/lake is there, and writable"),
        (directory(probed=Path("/srv")), "ok /srv/lake is not there yet, and can be made"),
        (directory(is_directory=False, probed=Path("/srv")), "error /srv/lake: /srv is not a directory … --warehouse"),
        (
            directory(failures={"write": "Permission denied"}),
            "error /srv/lake: /srv/lake is not writable: Permission denied … chown 1000 /srv/lake",
        ),
        (
            directory(failures={"write": "Read-only file system"}),
            "error /srv/lake: /srv/lake is not writable: Read-only file system … mount it for writing",
        ),
        (directory(failures={"write": "No, no"}), "error /srv/lake: /srv/lake is not writable: No, no … --warehouse"),
        (directory("staging", owner=0), "error /srv/lake belongs to user id 0, and not to 1000 … --staging"),
        (directory("staging", owner=0, probed=Path("/srv")), "ok /srv/lake is not there yet"),
        (directory(owner=0), "ok /srv/lake is there"),
    ],
)
def test_places(found: Directory, expected: str) -> None:
    judge(directories.place(found), expected)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (directory(), ["ok warehouse is on ext4"]),
        (directory(failures={"flock": ""}), ["error flock does not work in /srv/lake: a second lock is granted … at one time"]),
        (directory(failures={"fsync": "Invalid argument"}), ["error fsync does not work in /srv/lake: Invalid argument … durable"]),
        (directory(failures={"link": "Operation not permitted"}), ["error link"]),
        (directory("staging", failures={"link": "Operation not permitted"}), ["ok staging is on ext4"]),
        (directory(failures={"rename": "x", "flock": "y"}), ["error flock", "error rename"]),
        (directory(failures={"write": "x"}), []),
        (directory(is_directory=False), []),
    ],
)
def test_the_operations_of_a_file_system(found: Directory, expected: list[str]) -> None:
    judge(directories.file_system(found), *expected)


@pytest.mark.parametrize(
    ("free", "needed", "rate", "expected"),
    [
        (100 * GB, 0, None, "ok 100.0 GiB are free"),
        (1 * GB, 0, None, "warning 1.0 GiB are free"),
        (1 << 20, 0, None, "error 1.0 MiB are free"),
        (100 * GB, 99 * GB, None, "ok"),
        (100 * GB, 101 * GB, None, "warning 100.0 GiB are free … about 101.0 GiB on the server, and are copied"),
        (36 * GB, 0, float(GB) / 100, "ok"),
        (35 * GB, 0, float(GB) / 100, "warning 35.0 GiB … full in 58.3 min"),
        (1 << 20, 99 * GB, None, "error"),
    ],
)
def test_space(free: int, needed: int, rate: float | None, expected: str) -> None:
    judge(directories.space(directory(free_bytes=free), needed, rate), expected)


@pytest.mark.parametrize(
    ("free", "expected"),
    [(None, "ok"), (500_000, "ok 100.0 GiB are free"), (499_999, "warning the file system of warehouse allows 499,999 more files")],
)
def test_space_for_files(free: int | None, expected: str) -> None:
    judge(directories.space(directory(free_files=free)), expected)


def test_what_makes_fewer_files() -> None:
    """Compacting more often does not: it adds files, and the small ones stay for `--vacuum-retention` even so."""
    (found,) = directories.space(directory(free_files=1000))
    options = re.findall(r"--[a-z-]+", found.fix or "")
    assert options == ["--seal-interval", "--replica-interval", "--vacuum-retention", "--log-retention"]


def test_no_space_is_known_where_there_is_no_directory() -> None:
    judge(directories.space(directory(is_directory=False, free_bytes=0)))


def test_clocks_of_file_systems() -> None:
    judge(directories.clock(directory(clock_ahead_s=0.5)), "ok the clock of warehouse")
    judge(directories.clock(directory(clock_ahead_s=-90.0)), "warning the clock of warehouse is 90 s behind … by their age")
    judge(directories.clock(directory(clock_ahead_s=7200.0)), "warning the clock of warehouse is 2 h ahead of")


def test_a_directory_is_tried(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("stays")
    for path in (tmp_path, tmp_path / "not/there/yet"):
        found = directories.probe("staging", path)
        assert (found.probed, found.is_directory, found.failures, found.clock_ahead_s) == (tmp_path, True, {}, 0.0)
        assert (found.owner, found.is_there) == (os.geteuid(), path == tmp_path)
        assert found.free_bytes > 0
    # Nothing is left behind.
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    found = directories.probe("staging", tmp_path / "mine/below")
    assert (found.probed, found.is_directory) == (tmp_path / "mine", False)
    judge(directories.clock(found))


def test_folders_of_a_warehouse_on_two_file_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A copy of a table took hours, and failed when its files were moved. The hint was to start again."""
    judge(directories.folders(directories.probe("warehouse", tmp_path)))
    for name in ("_cdcpipe", "changelog"):
        (tmp_path / name).mkdir()
    judge(directories.folders(directories.probe("warehouse", tmp_path)), f"ok the folders of {tmp_path} are on one file system")
    (tmp_path / "replica").symlink_to("/proc")
    judge(
        directories.folders(directories.probe("warehouse", tmp_path)),
        f"error replica of {tmp_path} is on another file system … each copy of a table fails",
    )
    (tmp_path / "replica").unlink()
    mount = f"36 25 0:32 / {tmp_path}/changelog rw - ext4 /dev/sda1 rw\n"  # a bind mount of the same file system
    (tmp_path / "mounts").write_text(mount)
    monkeypatch.setattr(directories, "_MOUNTS", tmp_path / "mounts")
    judge(directories.folders(directories.probe("warehouse", tmp_path)), f"error changelog of {tmp_path}")


def refuse(*_: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


@pytest.mark.parametrize(
    ("module", "function", "operation"),
    [(os, "fsync", "fsync"), (os, "link", "link"), (fcntl, "flock", "flock"), (Path, "rename", "rename"), (os, "write", "write")],
)
def test_operations_that_fail_are_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: Any, function: str, operation: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, function, refuse)
        found = directories.probe("warehouse", tmp_path)
    assert found.failures == {operation: "Operation not supported"}
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_is_mounted_read_only_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It also refuses to delete a file that is not there."""

    def refuse_all(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse_all)
        patch.setattr(Path, "unlink", refuse_all)
        found = directories.probe("warehouse", tmp_path)
    judge(directories.place(found), "error … is not writable: Read-only file system")
    judge(directories.clock(found))  # no file has told its time


def test_a_lock_that_is_granted_twice_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert directories.probe("staging", tmp_path).failures == {"flock": ""}


# --- machine and workers ---

VERSIONS = {"pyspark": "4.2.1", "pyarrow": "26.0.1", "numpy": "2.4"}


def test_packages() -> None:
    judge(machine.packages(VERSIONS), f"ok Python {platform.python_version()}, pyspark 4.2.1")
    judge(machine.packages(VERSIONS | {"numpy": None}), "error numpy not installed … pip install 'cdcpipe[spark]'")
    judge(machine.packages(VERSIONS | {"pyspark": "4.1.0"}), "error pyspark is 4.1.0")
    assert None not in machine.installed().values()


def test_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    judge(machine.java(), "ok Java is /")
    monkeypatch.setattr("spark_sink.spark.java_home._java_homes", lambda: [tmp_path])
    judge(machine.java(), "error no Java 17 or newer; found only")


def test_jars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    judge(machine.jars("delta", None, {"spark.jars.ivy": str(tmp_path)}), "ok Delta Lake … fetches it from Maven Central")
    judge(machine.jars("parquet", None, {}), "ok Spark needs no jars")
    judge(machine.jars("delta", tmp_path, {}), "error no delta-spark")
    judge(machine.jars("delta", tmp_path / "no", {}), "error no such directory")
    for name in ("delta-spark_4.2_2.13-4.4.0.jar", "delta-storage-4.4.0.jar"):
        zipfile.ZipFile(tmp_path / name, "w").close()
    judge(machine.jars("delta", tmp_path, {}), f"ok Spark gets 2 jars from {tmp_path}")
    (tmp_path / "delta-storage-4.4.0.jar").write_text("404: Not Found")
    judge(machine.jars("delta", tmp_path, {}), "error … delta-storage-4.4.0.jar is missing, damaged or not readable")
    (tmp_path / "delta-storage-4.4.0.jar").unlink()
    (tmp_path / "delta-storage-4.4.0.jar").symlink_to("nowhere")
    judge(machine.jars("delta", tmp_path, {}), "error … delta-storage-4.4.0.jar is missing, damaged or not readable")


WORKER = Worker("node1", platform.python_version(), (), (), 0.0)


def test_workers() -> None:
    judge(
        workers.modules([WORKER, replace(WORKER, missing=("pyarrow",))]),
        "ok workers on node1",
        "error workers on node1 lack pyarrow",
    )
    judge(workers.modules([replace(WORKER, python="3.9.1")]), "error workers on node1 have Python 3.9.1 … PYSPARK_PYTHON")
    paths = [Path("/srv/staging"), Path("/srv/lake")]
    judge(workers.directories([WORKER], paths), "ok the workers see /srv/staging and /srv/lake")
    judge(workers.directories([WORKER], []))
    unseen = replace(WORKER, unseen=("/srv/staging",))
    judge(workers.directories([WORKER, unseen], paths), "error workers on node1 do not see /srv/staging … --staging-shared no")
    judge(workers.clocks([WORKER]), "ok")
    judge(workers.clocks([WORKER, replace(WORKER, clock_ahead_s=-3.0)]), "warning the clock of node1 is 3 s behind the driver's")
