"""A table that is published and its slot, on several servers."""

import contextlib
from collections.abc import Iterator

import postgres
import pytest

from support.published_database import PublishedDatabase


@pytest.fixture
def on(pg: postgres.Cluster) -> Iterator[PublishedDatabase]:
    with pg.database() as database, contextlib.closing(PublishedDatabase(database)) as made:
        yield made


@pytest.fixture
def on15(pg15: postgres.Cluster) -> Iterator[PublishedDatabase]:
    with pg15.database() as database, contextlib.closing(PublishedDatabase(database)) as made:
        yield made


@pytest.fixture
def on18(pg18: postgres.Cluster) -> Iterator[PublishedDatabase]:
    with pg18.database() as database, contextlib.closing(PublishedDatabase(database)) as made:
        yield made
