"""Keeps the stream's latest description of each relation.

pgoutput describes a relation ('R', and 'Y' for its types that are not built in) before the first change to it, and again
after a possible change of the relation. A description applies from its place in the stream to the next one with the same id.
So the cache must see every Relation message, in stream order, and must not live longer than the connection.

A relation id without a description raises `ProtocolError`. Today's catalog could not help: it may describe another state.
"""

from __future__ import annotations

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.messages import Relation

__all__ = ["RelationCache"]


class RelationCache:
    """Relations by their ids."""

    def __init__(self) -> None:
        self._relations: dict[int, Relation] = {}

    def add(self, relation: Relation) -> None:
        """Add a description. It replaces an earlier one with the same id."""
        self._relations[relation.relation_id] = relation

    def relation(self, relation_id: int) -> Relation:
        """Return the relation as of this point of the stream. Raises ProtocolError if the stream has not described it."""
        try:
            return self._relations[relation_id]
        except KeyError:
            msg = f"relation {relation_id} was never described: its Relation message is missing before this change"
            raise ProtocolError(msg) from None
