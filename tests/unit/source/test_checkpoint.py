"""The range of a micro-batch, from the files that Spark writes. test_source.py and test_pipeline.py have Spark write them."""

import os
from pathlib import Path

import pytest

from spark_sink.source.offsets import is_recorded, make_durable, micro_batch, tidy
from spark_sink.staging.log import Position, StagingError


def note(checkpoint: Path, batch_id: int, offset: str) -> None:
    (checkpoint / "offsets").mkdir(exist_ok=True)
    (checkpoint / "offsets" / str(batch_id)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{offset}')


def test_a_range_goes_from_one_offset_to_the_next(tmp_path: Path) -> None:
    note(tmp_path, 0, '{"format": 1, "position": "1:0/10"}')
    note(tmp_path, 1, '{"format": 1, "position": "2:0/20"}')
    assert micro_batch(tmp_path, 0) == (None, Position(1, 0x10))
    assert micro_batch(tmp_path, 1) == (Position(1, 0x10), Position(2, 0x20))


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    note(tmp_path, 0, '{"format": 1, "position": "1:0/10", "said": "a\u2028b\u0085c"}')
    assert micro_batch(tmp_path, 0) == (None, Position(1, 0x10))


@pytest.mark.parametrize(
    ("offset", "problem"),
    [
        ("", "can't be read"),
        ("{", "can't be read"),
        ("7\n8", "can't be read"),
        ("[]", "an offset of format None"),
        ('{"format": 2}', "an offset of format 2"),
        ('{"format": 1, "position": "x"}', "a damaged offset"),
    ],
)
def test_an_invalid_offset_is_named(tmp_path: Path, offset: str, problem: str) -> None:
    note(tmp_path, 0, offset)
    with pytest.raises(StagingError, match=problem):
        micro_batch(tmp_path, 0)
    with pytest.raises(StagingError, match="can't be read"):
        micro_batch(tmp_path, 5)


def test_a_micro_batch_that_spark_has_recorded(tmp_path: Path) -> None:
    assert not is_recorded(tmp_path, 3)
    commits = tmp_path / "commits"
    commits.mkdir()
    (commits / ".2.0a.tmp").touch()  # a run's that was killed
    being_renamed = commits / "..3.0a.tmp.crc"
    being_renamed.touch()
    (commits / "3").touch()
    assert not is_recorded(tmp_path, 3)
    being_renamed.rename(commits / ".3.crc")
    assert is_recorded(tmp_path, 3)


def test_what_a_killed_stream_leaves_of_its_first_file_is_removed(tmp_path: Path) -> None:
    tidy(tmp_path)
    for directory in ("offsets", "commits"):
        (tmp_path / directory).mkdir()
        for name in (".0.f3a1.tmp", "..0.f3a1.tmp.crc"):
            (tmp_path / directory / name).touch()
    tidy(tmp_path)
    assert list(tmp_path.glob("*/*")) == []


@pytest.mark.parametrize("directory", ["offsets", "commits"])
def test_a_checkpoint_with_a_micro_batch_is_left_alone(tmp_path: Path, directory: str) -> None:
    (tmp_path / directory).mkdir()
    for name in ("0", ".1.f3a1.tmp"):
        (tmp_path / directory / name).touch()
    (tmp_path / "metadata").touch()
    tidy(tmp_path)
    assert len(list((tmp_path / directory).iterdir())) == 2


def test_what_is_left_of_a_deleted_checkpoint_is_removed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "offsets/3").touch()
    tidy(checkpoint)
    assert not checkpoint.exists()


def test_records_of_a_micro_batch_are_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files, and then their names."""
    for directory in ("offsets", "commits"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "3").touch()
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink().relative_to(tmp_path)))
    make_durable(tmp_path, 3)
    assert [str(path) for path in synced] == ["offsets/3", "offsets", "commits/3", "commits"]
