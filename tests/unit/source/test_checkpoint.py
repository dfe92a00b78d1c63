"""The range of a micro-batch, from the files that Spark writes. test_source.py and test_pipeline.py have Spark write them."""

from pathlib import Path

import pytest

from spark_sink.source.offsets import is_recorded, micro_batch
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
