"""For tests of merges without Spark: the schema of a changelog, and changes that come in several ranges of keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from pyspark.sql.types import BinaryType, IntegerType, StringType

from spark_sink.replica import ordinary_changes
from spark_sink.replica.ordinary_changes import ChangeReader
from spark_sink.schema.types import typed_schema
from support.delta_tables import struct

SCHEMA: Final = typed_schema(struct(case=IntegerType(), id=IntegerType(), a=IntegerType(), blob=StringType(), other=BinaryType()))
"""The schema of a changelog with the changes of `changelog_rows.Source`."""


@contextmanager
def in_ranges(monkeypatch: pytest.MonkeyPatch, count: int = 20) -> Iterator[list[int]]:
    """Have changes read in about ``count`` ranges. The list gets the numbers of ranges."""
    numbers: list[int] = []
    ranges = ChangeReader.ranges

    def counted(reader: ChangeReader, wanted: int) -> list[Any]:
        found = ranges(reader, wanted)
        numbers.append(len(found))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(ordinary_changes, "_RANGES", (count,))
        patched.setattr(ChangeReader, "ranges", counted)
        yield numbers
