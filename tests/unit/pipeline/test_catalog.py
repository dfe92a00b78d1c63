"""Names of a catalog's database that are refused."""

from __future__ import annotations

import pytest

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.pipeline.catalog import parse_database


@pytest.mark.parametrize("name", ["", ".", "a.", ".b", "a.b.c"])
def test_invalid_names(name: str) -> None:
    with pytest.raises(InvalidArgumentsError, match="--catalog-database takes"):
        parse_database(name)
