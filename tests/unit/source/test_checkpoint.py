"""The range of a micro-batch, from the files that Spark writes. test_source.py and test_pipeline.py have Spark write them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from spark_sink.source.offsets import discard, is_recorded, make_durable, micro_batch, tidy
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


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint as Spark leaves it when it is killed in the middle of micro-batch 3."""
    made = tmp_path / "checkpoint"
    (made / "commits").mkdir(parents=True)
    (made / "metadata").write_text('{"id":"32f908df"}')
    for batch_id in range(4):
        note(made, batch_id, f'{{"format": 1, "position": "1:0/{batch_id + 1}0"}}')
        if batch_id < 3:
            (made / "commits" / str(batch_id)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    for name in ("offsets/.3.crc", "offsets/.4.f3a1.tmp", ".metadata.crc"):
        (made / name).touch()
    return made


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def test_a_checkpoint_with_micro_batches_is_left_alone(checkpoint: Path) -> None:
    before = names(checkpoint)
    # Spark reads none of these again.
    (checkpoint / "offsets/1").write_bytes(b"")
    (checkpoint / "commits/0").write_bytes(b"")
    tidy(checkpoint)
    assert names(checkpoint) == before
    for batch_id in (1, 2, 3):
        (checkpoint / "offsets" / str(batch_id)).unlink()
    for batch_id in (0, 1, 2):
        (checkpoint / "commits" / str(batch_id)).unlink()
    before = names(checkpoint)
    tidy(checkpoint)
    assert names(checkpoint) == before


def test_an_offset_of_a_newer_version_stays(checkpoint: Path) -> None:
    note(checkpoint, 3, '{"format": 2}')
    tidy(checkpoint)
    with pytest.raises(StagingError, match="an offset of format 2"):
        micro_batch(checkpoint, 3)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(bytes(45))])
@pytest.mark.parametrize("name", ["metadata", "offsets/3", "offsets/2", "commits/2"])
def test_a_checkpoint_with_which_spark_could_not_go_on_is_removed(
    checkpoint: Path, name: str, damage: Callable[[Path], object]
) -> None:
    """A power cut leaves such files, or somebody has deleted a part."""
    if damage is Path.unlink and name in ("offsets/3", "commits/2"):
        (checkpoint / "offsets/3").unlink()
        name = "offsets/2"  # Spark goes on without the newest record, but not with a commit that has no offset
    damage(checkpoint / name)
    tidy(checkpoint)
    assert not checkpoint.exists()


def test_what_is_left_of_a_deleted_checkpoint_is_removed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    for directory in ("offsets", "commits"):
        (checkpoint / directory).mkdir(parents=True)
        (checkpoint / directory / "3").touch()
        tidy(checkpoint)
        assert not checkpoint.exists()


@pytest.mark.parametrize("contents", [b"", bytes(45)])
def test_metadata_that_a_power_cut_has_emptied_before_the_first_micro_batch(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "metadata").write_bytes(contents)
    tidy(tmp_path)
    assert not (tmp_path / "metadata").exists()
    (tmp_path / "metadata").write_bytes(b'{"id":"32f908df"}')
    tidy(tmp_path)
    assert (tmp_path / "metadata").exists()


def test_files_beside_a_checkpoint_stay(checkpoint: Path) -> None:
    (checkpoint / "mine").touch()
    discard(checkpoint)
    assert names(checkpoint) == {"mine"}
    (checkpoint / "metadata").mkdir()
    discard(checkpoint)
    assert names(checkpoint) == {"mine", "metadata"}


@pytest.mark.parametrize("offset", ['{"topic":{"0":5}}', "17"])
def test_the_checkpoint_of_another_program_stays(checkpoint: Path, offset: str) -> None:
    """Somebody has named it with --checkpoint by mistake. Its newest record may be damaged."""
    for batch_id in (1, 2, 3):
        note(checkpoint, batch_id, offset)
    (checkpoint / "offsets" / "4").write_text("v1\n{}")
    before = sorted(checkpoint.rglob("*"))
    with pytest.raises(StagingError, match="is the checkpoint of another program"):
        discard(checkpoint)
    assert sorted(checkpoint.rglob("*")) == before


def test_records_of_a_micro_batch_are_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files, and then their names."""
    for directory in ("offsets", "commits"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "3").touch()
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink().relative_to(tmp_path)))
    make_durable(tmp_path, 3)
    assert [str(path) for path in synced] == ["offsets/3", "offsets", "commits/3", "commits"]
