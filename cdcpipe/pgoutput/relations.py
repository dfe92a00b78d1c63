"""What the stream has said about relations so far.

pgoutput describes a relation ('R', and 'Y' for its types that are not built in) before the first change to it, and again
after whatever may have changed it: a description holds from its place in the stream to the next one with the same id.
So the cache must see every Relation message, in stream order, and lives no longer than the connection.
An id that was never described is a `ProtocolError`: there is no catalog to ask here, and today's would be the wrong one.
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
        """Take a description; it replaces an earlier one of the same id."""
        self._relations[relation.relation_id] = relation

    def relation(self, relation_id: int) -> Relation:
        """Return the relation as it is at this point of the stream; raise ProtocolError if it was never described."""
        try:
            return self._relations[relation_id]
        except KeyError:
            msg = f"relation {relation_id} was never described: its Relation message is missing before this change"
            raise ProtocolError(msg) from None
