"""What the database's catalog says of published tables, where the stream does not: keys and the numbers of columns. No Spark.

The catalog is of today and the stream of yesterday: it is asked anew, once in a micro-batch at most, when what is known of a
table has not just the columns that its description in the stream has, or when it may have got another key.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cdcpipe.errors import CdcpipeError
from cdcpipe.pgoutput.messages import Column, Relation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["PublishedTables", "is_key_told"]

_logger = logging.getLogger(__name__)

_IDENTIFYING = ("d", "i")
"""The replica identities (DEFAULT, INDEX) under which a Relation message flags the columns that identify a row.

With INDEX these are the index's columns, not the primary key: of a deleted row the server sends nothing else.
"""


def is_key_told(relation: Relation) -> bool:
    """Tell whether a description says what identifies a row."""
    return relation.replica_identity in _IDENTIFYING


class PublishedTables:
    """The tables that ``describe`` returns: what ``cdcpipe prepare`` prints as ``tables``."""

    def __init__(self, describe: Callable[[], Iterable[Mapping[str, Any]]] | None) -> None:
        self._describe = describe
        self._tables: dict[int, Mapping[str, Any]] = {}
        self._asked: set[object] = set()
        self._is_fresh = False

    def begin_batch(self) -> None:
        """Let the catalog be asked again: what was in the stream by now is in it, or has been changed since."""
        self._is_fresh = False

    def primary_key(self, relation: Relation) -> tuple[str, ...] | None:
        """Return the columns of the primary key as it is now, none where there is none; None where the table has gone."""
        found = self._find(relation, is_of_now=True)
        return None if found is None else tuple(found["primary_key"])

    def columns(self, relation: Relation) -> list[Mapping[str, Any]]:
        """Return what ``prepare`` says of the table's columns, the relation's or later ones; none if it can't be asked."""
        try:
            found = self._find(relation)
        except CdcpipeError as ex:
            _logger.info("the columns of %s.%s can't be looked up: %s", relation.namespace, relation.name, ex)
            return []
        return [] if found is None else list(found.get("columns", ()))

    def relation(self, relation_id: int) -> Relation | None:
        """Return a table's columns as the catalog has them when it is asked for this table the first time; None if it can't be."""
        if relation_id not in self._tables and relation_id not in self._asked and self._describe is not None:
            self._asked.add(relation_id)
            try:
                self._tables = {table["relation_id"]: table for table in self._describe()}
            except CdcpipeError as ex:
                _logger.info("table %d can't be looked up: %s", relation_id, ex)
        found = self._tables.get(relation_id)
        if found is None:
            return None
        columns = tuple(Column(0, each["name"], each["type_id"], each["type_modifier"]) for each in found.get("columns", ()))
        return Relation(None, relation_id, found["schema"], found["name"], "d", columns)

    def _find(self, relation: Relation, *, is_of_now: bool = False) -> Mapping[str, Any] | None:
        """Return what the catalog says of a table; without ``is_of_now`` it may have said that before, of the same columns."""
        found = self._tables.get(relation.relation_id)
        asked = (relation.relation_id, relation.columns)
        is_wanted = (found is None or not _has_columns(found, relation)) and asked not in self._asked
        if (is_wanted or is_of_now) and self._describe is not None:
            if not self._is_fresh:
                self._tables = {table["relation_id"]: table for table in self._describe()}
                self._is_fresh = True
            self._asked.add(asked)
            found = self._tables.get(relation.relation_id)
        return found


def _has_columns(table: Mapping[str, Any], relation: Relation) -> bool:
    found = [(column["name"], column["type_id"], column["type_modifier"]) for column in table.get("columns", ())]
    return found == [(column.name, column.type_id, column.type_modifier) for column in relation.columns]
