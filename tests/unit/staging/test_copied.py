"""The record of the newest copy's position: it only grows, and a damaged file is no record."""

from pathlib import Path

import pytest

from spark_sink.staging import copied
from spark_sink.staging.log import StagingError


def test_the_newest_copy_counts(tmp_path: Path):
    assert copied.read(tmp_path) == 0
    copied.record(tmp_path, 0x200)
    copied.record(tmp_path, 0x100)
    assert copied.read(tmp_path) == 0x200


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"lsn": "x"}', '{"lsn": null}'])
def test_a_damaged_file_is_no_record(tmp_path: Path, text: str):
    (tmp_path / "copied.json").write_text(text)
    assert copied.read(tmp_path) == 0
    copied.record(tmp_path, 0x100)
    assert copied.read(tmp_path) == 0x100


def test_a_copy_without_its_record_does_not_begin(tmp_path: Path):
    with pytest.raises(StagingError, match="cannot record the position of the tables' copy"):
        copied.record(tmp_path / "missing", 0x100)
