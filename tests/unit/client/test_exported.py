"""The snapshot that a subprocess holds: how its description is read."""

import json
import os
from pathlib import Path

import pytest

from cdcpipe.errors import ExcludedColumnError
from cdcpipe.publishing import NewPublication
from spark_sink.client.exported import ExportedSnapshot, drop_left
from spark_sink.files.lock import hold_alone
from spark_sink.launcher.config import LauncherConfig
from support.children import python

DESCRIPTION = {
    "server_version": 180000,
    "system_id": "7",
    "timeline": 1,
    "database": "db",
    "wal_lsn": "0/200",
    "slot": {"confirmed_flush_lsn": "0/100", "created": True},
    "tables": [{"schema": "public", "name": "fruit", "columns": [{"name": "id"}, {"name": "price"}]}],
    "snapshot": "00000003-1",
    "consistent_point": "0/100",
    "snapshot_time": "1970-01-01T00:00:01.000007Z",
    "slot_created": True,
    "connection": {"host": "/run"},
}

IN_LINES = """
import fcntl, struct, sys, termios, time
for line in sys.argv[1].splitlines(keepends=True):
    sys.stdout.write(line)
    sys.stdout.flush()
    while struct.unpack("i", fcntl.ioctl(1, termios.FIONREAD, bytes(4)))[0]:  # until it is read
        time.sleep(0.001)
sys.stdin.readline()
"""


def test_a_description_may_come_in_pieces(tmp_path: Path) -> None:
    """That of many tables is larger than a pipe. A piece may end with an inner object."""
    command = (*python(IN_LINES), json.dumps(DESCRIPTION, indent=2) + "\n")
    with ExportedSnapshot(LauncherConfig("s", tmp_path, command=command), lambda: False, tmp_path / "export") as export:
        assert (export.name, export.consistent_point, export.connection) == ("00000003-1", 0x100, {"host": "/run"})
        assert export.time_us == 1_000_007


def test_nothing_is_copied_of_a_column_that_is_to_stay_on_the_server(tmp_path: Path) -> None:
    command = (*python(IN_LINES), json.dumps(DESCRIPTION, indent=2) + "\n")
    config = LauncherConfig("s", tmp_path, command=command, new_publication=NewPublication.of(exclude_columns=["*.*.price"]))
    with pytest.raises(ExcludedColumnError, match=r"public\.fruit\.price"):
        ExportedSnapshot(config, lambda: False, tmp_path / "export")


def test_what_a_killed_process_has_left_is_dropped(tmp_path: Path) -> None:
    """Here the test reads from the pipe, as the subprocess does that holds the snapshot."""
    drop_left(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []
    os.mkfifo(tmp_path / "hold")
    (tmp_path / "export.json").write_text("{}")
    reader = os.open(tmp_path / "hold", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with hold_alone(tmp_path / "lock") as is_alone:
            assert is_alone
            drop_left(tmp_path)
        assert (tmp_path / "export.json").exists()  # the other process goes on with it
        drop_left(tmp_path)
        assert os.read(reader, 10) == b"q\n"
    finally:
        os.close(reader)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    os.mkfifo(tmp_path / "hold")
    drop_left(tmp_path)  # nobody reads from it
    assert not (tmp_path / "hold").exists()
