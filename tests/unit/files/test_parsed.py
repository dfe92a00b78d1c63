"""Files that are read again and again: each is parsed once for each of its contents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from spark_sink.files.local import DamagedFileError, write_json
from spark_sink.files.parsed import ParsedFiles

if TYPE_CHECKING:
    from pathlib import Path


class _Parser:
    """Counts what it parses."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, value: dict[str, Any]) -> str:
        self.count += 1
        return str(value["text"])


def test_a_large_file_is_parsed_again_only_if_it_has_changed(tmp_path: Path) -> None:
    path, files, parser = tmp_path / "a.json", ParsedFiles(), _Parser()
    assert files.read(path, parser) is None
    for number, text in enumerate(("a" * 20_000, "b" * 20_000, "a" * 20_000), 1):  # of one length
        write_json(path, {"text": text})
        for _ in range(3):
            assert files.read(path, parser) == text
        assert parser.count == number
    path.unlink()
    assert files.read(path, parser) is None


def test_small_files_take_no_memory(tmp_path: Path) -> None:
    path, files, parser = tmp_path / "a.json", ParsedFiles(), _Parser()
    write_json(path, {"text": "a"})
    assert [files.read(path, parser) for _ in range(3)] == ["a"] * 3
    assert parser.count == 3


def test_a_file_that_was_damaged_since_is_an_error(tmp_path: Path) -> None:
    path, files, parser = tmp_path / "a.json", ParsedFiles(), _Parser()
    write_json(path, {"text": "a" * 20_000})
    files.read(path, parser)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DamagedFileError, match="is damaged: not JSON"):
        files.read(path, parser)
