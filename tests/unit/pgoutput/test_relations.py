"""The relation cache: the last description counts, and a relation without a description is an error."""

from __future__ import annotations

import pytest

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.messages import Column, Relation
from cdcpipe.pgoutput.relations import RelationCache

OLD = Relation(None, 16385, "public", "t", "d", (Column(1, "id", 23, -1),))
NEW = Relation(None, 16385, "public", "renamed", "d", (Column(1, "id", 20, -1),))


def test_a_relation_that_was_never_described_is_named():
    with pytest.raises(ProtocolError, match="relation 16385 was never described"):
        RelationCache().relation(16385)


def test_the_last_description_counts():
    cache = RelationCache()
    cache.add(OLD)
    assert cache.relation(16385) is OLD
    cache.add(NEW)
    assert cache.relation(16385) is NEW
