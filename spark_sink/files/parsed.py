"""JSON files that one process reads again and again. A large file is parsed again only if its contents have changed. No pyspark.

    files = ParsedFiles()
    files.read(path, Names.from_json)       # parses the file
    files.read(path, Names.from_json)       # compares a digest of its bytes

Some files of a warehouse grow for years: a table's versions by each copy, the names of tables by each RENAME. A merge reads them
several times. To parse 5 MB takes 100 ms, to read and compare them 5 ms.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final, TypeVar

from spark_sink.files.local import parse_json
from spark_sink.files.places import read_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_Parsed = TypeVar("_Parsed")

__all__ = ["ParsedFiles"]

_LARGE_BYTES: Final = 16 << 10
"""A smaller file is parsed each time. So a warehouse of many small tables takes no memory here."""


class ParsedFiles:
    """Reads JSON files. Each path is read with one function. Threads may share an object."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[bytes, Any]] = {}

    def read(self, path: Path, parse: Callable[[dict[str, Any]], _Parsed]) -> _Parsed | None:
        """Return what ``parse`` makes of the file's object; None if there is no file. Callers share it, and must not change it.

        Raises what `read_json` raises, and the errors of ``parse``.
        """
        data = read_file(path)
        if data is None:
            return None
        if len(data) < _LARGE_BYTES:
            return parse(parse_json(path, data))
        digest, known = hashlib.sha256(data).digest(), self._known.get(path)
        if known is not None and known[0] == digest:
            found: _Parsed = known[1]
            return found
        found = parse(parse_json(path, data))
        self._known[path] = digest, found
        return found
