"""The clocks of file systems and stores, compared with this machine's."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from upath import UPath

from spark_sink.files import clock, places
from spark_sink.files.places import StorageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("written_at", "ahead"), [(100.0, 0.0), (109.0, 0.0), (99.0, 0.0), (111.0, 0.0), (98.0, -7.0), (3705.0, 3600.0)]
)
def test_a_clock_is_read_from_the_time_of_a_file(written_at: float, ahead: float) -> None:
    assert clock.difference_s(written_at, before=100.0, after=110.0) == ahead


@pytest.fixture(params=["file system", "store"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return tmp_path if request.param == "file system" else UPath(f"memory://{tmp_path.name}")


def test_a_place_is_behind_a_clock_that_is_ahead(directory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (clock.ahead_s(directory), clock.behind_s(directory)) == (0.0, 0.0)
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + 7200.0)
    assert clock.behind_s(directory) == pytest.approx(7200.0, abs=600.0)
    monkeypatch.setattr(time, "time", lambda: true_time() - 7200.0)
    assert clock.ahead_s(directory) == pytest.approx(7200.0, abs=600.0)
    assert clock.behind_s(directory) == 0.0
    assert places.list_names(directory) == []


def test_a_store_that_keeps_what_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As S3 does for a role without this right. s3fs does not tell."""
    directory: Any = UPath(f"memory://{tmp_path.name}")
    monkeypatch.setattr(directory.fs, "rm", lambda *_args, **_options: None)
    with pytest.raises(StorageError, match=r"does not delete objects: _cdcpipe_clock-.* is still there"):
        clock.behind_s(directory)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=os.strerror(2)):
        clock.behind_s(tmp_path / "gone")
