"""Readers of the staging log: their positions, and which segments may be removed."""

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from spark_sink.staging import readers
from spark_sink.staging.gap import Gap
from spark_sink.staging.leftovers import remove_empty_epochs
from spark_sink.staging.log import Position, StagingError, list_epochs, list_segments, log_end
from spark_sink.staging.readers import Retention, read_readers, register_reader, remove_consumed
from support.staged import make_epoch, ranges


def test_segments_go_once_all_readers_are_past_them(tmp_path: Path):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300))
    make_epoch(tmp_path, 2, 0x300, (0x300, 0x400), (0x400, 0x500))
    list_segments(tmp_path)[0].index_path.write_bytes(b"x")
    assert remove_consumed(tmp_path) == []

    register_reader(tmp_path, "fast", Position(2, 0x500))
    register_reader(tmp_path, "slow", Position(1, 0x250))
    assert read_readers(tmp_path) == {"fast": (2, 0x500), "slow": (1, 0x250)}
    assert [segment.end_lsn for segment in remove_consumed(tmp_path)] == [0x200]
    assert ranges(tmp_path) == [(1, 0x200, 0x300), (2, 0x300, 0x400), (2, 0x400, 0x500)]
    assert not list(tmp_path.glob("*/*.idx"))
    assert len(list_segments(tmp_path, Position(1, 0x250))) == 3
    with pytest.raises(StagingError, match="do not exist any more"):
        list_segments(tmp_path, Position(1, 0x150))

    (tmp_path / "readers/slow.json").unlink()
    assert [segment.end_lsn for segment in remove_consumed(tmp_path)] == [0x300, 0x400]
    assert ranges(tmp_path) == [(2, 0x400, 0x500)]  # the last one stays: the log's end stays known
    assert not (tmp_path / "000001").exists()
    assert log_end(tmp_path) == (2, 0x500)
    assert remove_consumed(tmp_path) == []


@pytest.mark.parametrize("behind_s", [0, 5 * 3600], ids=["", "on a file server whose clock is behind"])
def test_segments_are_kept_for_a_time_or_up_to_a_size(tmp_path: Path, behind_s: float, monkeypatch: pytest.MonkeyPatch):
    make_epoch(tmp_path, 1, 0x100, *((start, start + 0x100) for start in range(0x100, 0x700, 0x100)))
    segments = list_segments(tmp_path)
    register_reader(tmp_path, "r", segments[-1].end)
    now = time.time()
    for hours, segment in zip((9, 7, 5, 3, 1, 0), segments, strict=True):
        segment.path.write_bytes(b"x" * 10)
        os.utime(segment.path, (now - 3600 * hours, now - 3600 * hours))
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + behind_s)

    def removed(retention: Retention) -> list[int]:
        return [segment.end_lsn for segment in remove_consumed(tmp_path, retention)]

    assert removed(Retention(seconds=10 * 3600)) == []
    assert removed(Retention(seconds=6 * 3600)) == [0x200, 0x300]
    assert removed(Retention(size=30)) == []
    assert removed(Retention(size=29)) == [0x400]
    assert removed(Retention(seconds=4 * 3600, size=10)) == []
    assert removed(Retention()) == [0x500, 0x600]


@pytest.mark.parametrize("retention", [None, Retention(seconds=3600)])
def test_on_a_full_disk_the_indexes_make_room_for_the_position(
    tmp_path: Path, retention: Retention | None, monkeypatch: pytest.MonkeyPatch
):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300))
    [segment, _] = list_segments(tmp_path)
    segment.index_path.write_bytes(b"x")
    os.utime(segment.path, (0, 0))
    register_reader(tmp_path, "r", Position(1, 0x300))
    fsync = os.fsync

    def full(fd: int) -> None:
        if segment.index_path.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)
    assert [segment.end_lsn for segment in remove_consumed(tmp_path, retention)] == [0x200]


def test_an_index_that_somebody_makes_meanwhile_ends_no_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`status` and readers make a missing index. The directory stays until the next launcher."""
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300))
    make_epoch(tmp_path, 2, 0x300, (0x300, 0x400))
    register_reader(tmp_path, "r", Position(2, 0x400))
    late = list_segments(tmp_path)[1].index_path
    remove = Path.rmdir

    def rmdir(path: Path) -> None:
        late.write_bytes(b"x")
        remove(path)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    assert [segment.end_lsn for segment in remove_consumed(tmp_path)] == [0x200, 0x300]
    assert late.exists()
    monkeypatch.undo()
    assert ranges(tmp_path) == [(2, 0x300, 0x400)]
    remove_empty_epochs(tmp_path, list_epochs(tmp_path)[-1].number)
    assert not late.parent.exists()


def test_a_removal_that_the_file_system_refuses_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300))
    register_reader(tmp_path, "r", Position(1, 0x300))

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(readers, "write_json", refuse)
    with pytest.raises(StagingError, match="cannot remove segments") as caught:
        remove_consumed(tmp_path)
    assert "mounted read-only" in (caught.value.hint or "")
    assert len(list_segments(tmp_path)) == 2


def test_a_removal_that_was_cut_short_is_no_gap(tmp_path: Path):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300), (0x300, 0x400))
    (tmp_path / "removed.json").write_text('{"position": "1:0/300"}')
    next(tmp_path.glob("000001/*200-*.cdc")).unlink()  # and the one before it is still there
    assert ranges(tmp_path) == [(1, 0x300, 0x400)]
    register_reader(tmp_path, "r", Position(1, 0x300))
    assert remove_consumed(tmp_path) == []
    assert len(list(tmp_path.glob("000001/*.cdc"))) == 1


@pytest.mark.parametrize(("reached_lsn", "is_known"), [(0x1FF, False), (0x200, True), (0x250, True), (0x280, True)])
def test_a_reader_goes_on_behind_a_gap_whose_earlier_segments_were_removed(tmp_path: Path, reached_lsn: int, is_known: bool):
    """The account of the log went on to 280 after the last segment, without changes. `run` did not start behind this gap."""
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200))
    make_epoch(tmp_path, 2, 0x300, (0x300, 0x400))
    path = tmp_path / "000002" / "epoch.json"
    gap = Gap(0x280, "somebody moved the slot", since=1.0, found=2.0)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"gap": gap.to_json()}))
    register_reader(tmp_path, "r", Position(1, 0x200))
    assert [segment.end_lsn for segment in remove_consumed(tmp_path)] == [0x200]
    assert not (tmp_path / "000001").exists()
    if is_known:
        assert [segment.end_lsn for segment in list_segments(tmp_path, Position(1, reached_lsn))] == [0x400]
    else:
        with pytest.raises(StagingError, match="the segments from 1:0/1FF to 0/200 do not exist any more"):
            list_segments(tmp_path, Position(1, reached_lsn))


@pytest.mark.parametrize(
    ("start_lsn", "says"),
    [
        (0x300, {"gap": Gap(0x280, "timeline 2 branched off", since=1.0, found=2.0, is_divergence=True).to_json()}),
        (0x500, {"gap": Gap(0x300, "somebody moved the slot", since=1.0, found=2.0).to_json()}),
        (0x300, {"former_system_id": "6"}),
        (0x300, {"left_out": ["q"]}),
    ],
    ids=["gap at the end of the log", "gap beyond it", "pg_upgrade", "a publication is left out"],
)
def test_an_epoch_with_news_stays_until_all_readers_are_in_it(tmp_path: Path, start_lsn: int, says: dict[str, Any]):
    """No change came in this epoch. The first ones came in later epochs, after the tables had read all that was before."""
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300), system_id=says.get("former_system_id", "7"))
    register_reader(tmp_path, "tables", Position(1, 0x300))
    register_reader(tmp_path, "other", Position(2, start_lsn))
    make_epoch(tmp_path, 2, start_lsn, **says)
    make_epoch(tmp_path, 3, start_lsn, (start_lsn, start_lsn + 0x100))
    make_epoch(tmp_path, 4, start_lsn + 0x100, (start_lsn + 0x100, start_lsn + 0x200))
    remove_empty_epochs(tmp_path, 4)
    assert [segment.end_lsn for segment in remove_consumed(tmp_path)] == [0x200, 0x300]
    assert [epoch.number for epoch in list_epochs(tmp_path)] == [2, 3, 4]
    assert list_epochs(tmp_path)[0].is_news
    assert [segment.start_lsn for segment in list_segments(tmp_path, Position(1, 0x300))] == [start_lsn, start_lsn + 0x100]

    register_reader(tmp_path, "tables", Position(3, start_lsn + 0x100))
    register_reader(tmp_path, "other", Position(3, start_lsn + 0x100))
    assert [segment.end_lsn for segment in remove_consumed(tmp_path)] == [start_lsn + 0x100]
    assert [epoch.number for epoch in list_epochs(tmp_path)] == [4]
    assert [segment.start_lsn for segment in list_segments(tmp_path, Position(3, start_lsn + 0x100))] == [start_lsn + 0x100]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-x", "x" * 101, "a b", "é"])
def test_names_of_readers(tmp_path: Path, name: str):
    with pytest.raises(StagingError, match="not a reader's name"):
        register_reader(tmp_path, name, Position(1, 1))


def test_a_hidden_file_is_no_reader(tmp_path: Path):
    """docs/staging-format.md says so: it may be a half-written file of another program."""
    register_reader(tmp_path, "r", Position(1, 2))
    (tmp_path / "readers" / ".audit.json").write_text('{"position": "1:0/1"}')
    assert read_readers(tmp_path) == {"r": (1, 2)}


def test_a_damaged_reader_is_reported(tmp_path: Path):
    register_reader(tmp_path, "r", Position(1, 1))
    (tmp_path / "readers" / "r.json").write_text('{"position": "x"}')
    with pytest.raises(StagingError, match="damaged"):
        read_readers(tmp_path)
