"""Fixtures: databases with slots of the server's wal2json and of ours."""

import pytest

from support.logical_stream import both_on


@pytest.fixture
def both(pg15):
    """A database with a slot of the server's wal2json and one of pgoutput, over the same WAL."""
    with both_on(pg15, "wal2json") as made:
        yield made
