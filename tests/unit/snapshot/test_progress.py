"""What is recorded of a copy, so that a later run can resume it."""

import json
import logging
from pathlib import Path

import pytest

from spark_sink.files.parquet import WrittenFile
from spark_sink.snapshot.plan import Chunk
from spark_sink.snapshot.progress import Written, begin, note, resume

CHUNK = Chunk(16384, "public.t", 16384)
WRITTEN = Written(2, WrittenFile("part-0.parquet", 900, 2, {}, {}, {}), {})


def test_a_copy_is_resumed_until_its_files_may_be_moved(tmp_path: Path) -> None:
    begun = begin(tmp_path / "notes", "why", [CHUNK])
    note(begun.record_path(0), WRITTEN)
    again = resume(tmp_path / "notes", "why")
    assert again is not None
    assert (again.chunks, again.done) == ((CHUNK,), {0: WRITTEN})
    again.end()
    assert resume(tmp_path / "notes", "why") is None
    assert not (tmp_path / "notes").exists()


def test_a_copy_of_another_version_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has the fields of its own version, and this one could not read them."""
    caplog.set_level(logging.INFO, logger="spark_sink")
    begun = begin(tmp_path / "notes", "why", [CHUNK])
    note(begun.record_path(0), WRITTEN)
    path = tmp_path / "notes/begun.json"
    later = json.loads(path.read_text())
    later["chunks"][0].append("a field of a later version")
    path.write_text(json.dumps(later | {"written_by": [*later.get("written_by", []), "more"]}))
    assert resume(tmp_path / "notes", "why") is None
    assert not (tmp_path / "notes").exists()
    assert "another version of cdcpipe began the copy" in caplog.text
