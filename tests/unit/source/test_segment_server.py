"""Segments that executors get from the driver: which ones it serves, to whom, and what happens to the copies."""

from __future__ import annotations

import errno
import http.client
import os
import pickle
import stat
import threading
import time
from pathlib import Path
from typing import IO

import pytest

from cdcpipe.pgoutput.messages import Insert
from spark_sink.source import server as segment_server
from spark_sink.source.datasource import CdcpipeDataSource
from spark_sink.source.server import SegmentAddress, SegmentServer, fetch, name_of
from spark_sink.staging import index as segment_index
from spark_sink.staging.log import Segment, StagingError
from support.segments import Log, relation

A = relation(11, "a", ("id", 23))


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Spark's local directory, which has the copies."""
    path = tmp_path / "local"
    path.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{path},/nowhere")
    return path


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    return Log(tmp_path / "staging").segment([A, Insert(None, 11, (b"1",))])


def test_rows_come_by_way_of_the_driver_alone(tmp_path: Path, segment: Segment, local: Path) -> None:
    """An executor gets no path of the staging directory, and can read when the directory no longer exists."""
    segment_index.load(segment.path)
    root = tmp_path / "staging"
    with SegmentServer(root, "127.0.0.1") as server:
        options = {"path": str(root), "table": "public.a", "server": str(server.path)}
        made = CdcpipeDataSource(options)
        reader = made.reader(made.schema())
        [part] = [pickle.loads(pickle.dumps(part)) for part in reader.partitions()]
        assert str(root) not in repr(part)
        for _ in range(2):  # from the driver, then from the copy
            assert [row["id"] for batch in reader.read(part) for row in batch.to_pylist()] == [1]
            segment.path.unlink(missing_ok=True)
    copies = {path.name: path for path in local.rglob("*") if path.is_file()}
    assert copies.keys() == {segment.path.name, segment.index_path.name}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in copies.values())
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in local.rglob("*") if path.is_dir())
    with pytest.raises(StagingError, match="not describe a segment server"):
        reader.partitions()


def test_only_segments_are_served_and_only_with_the_key(tmp_path: Path, segment: Segment, local: Path) -> None:
    with SegmentServer(tmp_path / "staging", "127.0.0.1") as server:
        assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
        address = server.address
        assert SegmentAddress.read(server.path) == address
        for stranger in (address._replace(key="another"), address._replace(key="")):
            with pytest.raises(StagingError, match=r"from the driver at 127\.0\.0\.1:\d+: 403") as caught:
                fetch(stranger, name_of(segment.path))
            assert address.key not in str(caught.value)
        for name in ("000001/epoch.json", "lock", "../secret", "000001/../../secret", name_of(segment.path) + "x"):
            connection = http.client.HTTPConnection(address.host, address.port)
            connection.request("GET", f"/{name}", headers={"X-Cdcpipe-Signature": address.sign(name)})
            assert connection.getresponse().status == 404
            connection.close()
        connection = http.client.HTTPConnection(address.host, address.port)
        connection.request("GET", f"/{name_of(segment.path)}")
        assert connection.getresponse().status == 403
        connection.close()
    assert [path for path in local.rglob("*.cdc") if path.name[0] != "."] == []
    with pytest.raises(StagingError, match="from the driver") as caught:
        fetch(address, name_of(segment.path))
    assert "spark.cdcpipe.segments.port" in (caught.value.hint or "")


def test_tasks_that_want_the_same_segment_get_it_once(
    tmp_path: Path, segment: Segment, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = []
    download = segment_server._download

    def count(address: SegmentAddress, name: str, *arguments: object, **options: bool) -> bool:
        downloads.append(name)
        return download(address, name, *arguments, **options)

    monkeypatch.setattr(segment_server, "_download", count)
    segment_index.load(segment.path)
    with SegmentServer(tmp_path / "staging", "127.0.0.1") as server:
        address = SegmentAddress.read(server.path)
        threads = [threading.Thread(target=fetch, args=(address, name_of(segment.path))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(downloads) == sorted([name_of(segment.path), name_of(segment.index_path)])
    assert fetch(address, name_of(segment.path)).read_bytes() == segment.path.read_bytes()


def test_a_transfer_that_broke_off_is_made_again(
    tmp_path: Path, segment: Segment, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = segment.path.read_bytes()
    with SegmentServer(tmp_path / "staging", "127.0.0.1") as server, monkeypatch.context() as patch:
        address = SegmentAddress.read(server.path)
        real = os.fstat
        # The file seems longer than it is: the connection ends early.
        patch.setattr(os, "fstat", lambda fd: _Longer(real(fd).st_size + 1))
        with pytest.raises(StagingError, match=f"{len(data)} of {len(data) + 1} bytes|IncompleteRead"):
            fetch(address, name_of(segment.path))
        patch.undo()
        assert fetch(address, name_of(segment.path)).read_bytes() == data


class _Longer:
    def __init__(self, st_size: int) -> None:
        self.st_size = st_size


def test_old_copies_go(tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path / "staging")
    made = [log.segment([A, Insert(None, 11, (b"%d" % number,))]) for number in range(4)]
    monkeypatch.setattr(segment_server, "CACHE_BYTES", 2 * made[0].path.stat().st_size)
    with SegmentServer(log.root, "127.0.0.1") as server:
        address = SegmentAddress.read(server.path)
        copies = [fetch(address, name_of(segment.path)) for segment in made]
        assert all(copy.exists() for copy in copies), "in use"
        for age, copy in enumerate(reversed(copies)):
            os.utime(copy, (time.time() - 1000 - age,) * 2)
        fetch(address, name_of(made[0].path))
        assert [copy.exists() for copy in copies] == [True, False, False, True]
        assert fetch(address, name_of(made[1].path)).read_bytes() == made[1].path.read_bytes()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with SegmentServer(tmp_path, "127.0.0.1") as server:
        port = SegmentAddress.read(server.path).port
        with pytest.raises(StagingError, match=f"cannot listen on 127.0.0.1, port {port}"):
            SegmentServer(tmp_path, "127.0.0.1", port=port)


def test_a_full_disk_of_the_executor_is_named(
    tmp_path: Path, segment: Segment, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network has no fault, and the part that was copied gives its room back."""

    def download(_address: SegmentAddress, _name: str, sink: IO[bytes], *, is_optional: bool) -> bool:
        sink.write(b"x" * 100)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(segment_server, "_download", download)
    with SegmentServer(tmp_path / "staging", "127.0.0.1") as server, pytest.raises(StagingError) as caught:
        fetch(SegmentAddress.read(server.path), name_of(segment.path))
    assert "the file system is full" in (caught.value.hint or "")
    assert [path.stat().st_size for path in local.rglob("*.part")] == [0]
