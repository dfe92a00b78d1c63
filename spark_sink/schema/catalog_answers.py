"""Asks the database's catalog for facts that the stream does not have: keys, and numbers of columns. No Spark.

The catalog shows the present state, but the stream may be older. So the catalog's last answer about a table is used as long as it
has exactly the columns of the description in the stream, and the table cannot have got another key. Otherwise the catalog is asked
again, at most once in a micro-batch.

The catalog is that of the server of now. Behind a gap of the log to another server an OID is another table's. So nobody is asked
about changes from before such a gap (`CatalogAnswers.at`), and an earlier answer does not count behind it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cdcpipe.errors import CdcpipeError
from cdcpipe.pgoutput.messages import Column, Relation
from spark_sink.schema.column_numbers import looks
from spark_sink.schema.servers import Servers
from spark_sink.schema.table import AFTER_ALL, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["CatalogAnswers", "is_key_told"]

_logger = logging.getLogger(__name__)

_IDENTIFYING = ("d", "i")
"""The replica identities (DEFAULT, INDEX) with which a Relation message marks the columns that identify a row.

With INDEX these are the columns of the index, not the primary key, because the server sends only them of a deleted row.
"""


def is_key_told(relation: Relation) -> bool:
    """Tell whether a description names the columns that identify a row."""
    return relation.replica_identity in _IDENTIFYING


class CatalogAnswers:
    """The published tables. ``describe`` asks for them: it returns the ``tables`` that ``cdcpipe prepare`` prints."""

    def __init__(self, describe: Callable[[], Iterable[Mapping[str, Any]]] | None) -> None:
        self._describe = describe
        self._tables: dict[int, Mapping[str, Any]] = {}
        self._former: dict[int, Mapping[str, Any]] = {}
        """The answer before the last one."""
        self._asked: set[object] = set()
        self._is_fresh = False
        self._failure: CdcpipeError | None = None
        """Why the catalog could not be asked in this micro-batch. Each attempt may take a minute, so one is enough."""
        self._servers = Servers()

    def end_at(self, servers: Servers) -> None:
        """Take the servers of the log. If there is a new one, the earlier answers are those of a former one."""
        if servers.number(AFTER_ALL) != self._servers.number(AFTER_ALL):
            self._tables, self._former, self._asked, self._is_fresh = {}, {}, set(), False
        self._servers = servers

    def at(self, lsn: int) -> CatalogAnswers:
        """Return what is to be asked about a change in the transaction that ends at this LSN: nobody if it is a former server's."""
        return self if self._servers.is_last(lsn) else CatalogAnswers(None)

    def begin_batch(self) -> None:
        """Allow to ask the catalog again: it is newer than everything in the stream so far."""
        self._is_fresh, self._failure = False, None

    def primary_key(self, relation: Relation) -> tuple[str, ...] | None:
        """Return the columns of today's primary key, empty if there is none; None if the table does not exist any more."""
        found = self._find(relation, is_of_now=True)
        return None if found is None else tuple(found["primary_key"])

    def identity(self, relation: Relation) -> tuple[str, ...]:
        """Return the columns of the replica identity, also those that are not published; empty if they are not known.

        They are not if the table has other columns now. Its identity may have got one of the new columns since. An answer from
        before the description counts only if the catalog has no better one: the published columns stay when the identity changes.
        """
        now = self._described(relation, is_of_now=True)
        for found in (now, self._tables.get(relation.relation_id), self._former.get(relation.relation_id)):
            if found is not None and _has_columns(found, relation):
                return tuple(found.get("identity") or ())
        return ()

    def columns(self, relation: Relation, *, is_of_now: bool = False) -> list[Mapping[str, Any]]:
        """Return the table's columns as ``prepare`` prints them, as of the relation or later; empty if it can't be asked."""
        found = self._described(relation, is_of_now=is_of_now)
        return [] if found is None else list(found.get("columns", ()))

    def parts(self, relation: Relation) -> list[int]:
        """Return the OIDs of what holds a table's rows now: its leaf partitions, or the table; empty if nobody is to be asked."""
        found = self._find(relation, is_of_now=True)
        return [] if found is None else [int(each["relation_id"]) for each in found.get("parts") or ()]

    def parents(self, relation: Relation) -> set[Table]:
        """Return the tables of which it is a partition, or from which it inherits; none if it is gone, or nobody is to be asked."""
        found = self._find(relation, is_of_now=True)
        return set() if found is None else {Table.from_json(each) for each in found.get("parents") or ()}

    def relation(self, relation_id: int) -> Relation | None:
        """Return a table's columns from the catalog, as of the first question for this table; None if it can't be asked."""
        if relation_id not in self._tables and relation_id not in self._asked and self._describe is not None:
            self._asked.add(relation_id)
            try:
                self._ask(self._describe)
            except CdcpipeError as ex:
                _logger.info("cannot look up table %d: %s", relation_id, ex)
        found = self._tables.get(relation_id)
        if found is None:
            return None
        columns = tuple(Column(0, each["name"], each["type_id"], each["type_modifier"]) for each in found.get("columns", ()))
        return Relation(None, relation_id, found["schema"], found["name"], "d", columns)

    def _ask(self, describe: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._former, self._tables = self._tables, {table["relation_id"]: table for table in describe()}

    def _described(self, relation: Relation, *, is_of_now: bool = False) -> Mapping[str, Any] | None:
        """Return what the catalog says about a table. None also if the catalog can't be asked."""
        try:
            return self._find(relation, is_of_now=is_of_now)
        except CdcpipeError as ex:
            _logger.info("cannot look up the columns of %s.%s: %s", relation.namespace, relation.name, ex)
            return None

    def _find(self, relation: Relation, *, is_of_now: bool = False) -> Mapping[str, Any] | None:
        """Return what the catalog says about a table. Without ``is_of_now`` an earlier answer with the same columns will do."""
        found = self._tables.get(relation.relation_id)
        asked = (relation.relation_id, relation.columns)
        is_wanted = (found is None or not _has_columns(found, relation)) and asked not in self._asked
        if (is_wanted or is_of_now) and self._describe is not None:
            if self._failure is not None:
                raise self._failure
            if not self._is_fresh:
                try:
                    self._ask(self._describe)
                except CdcpipeError as ex:
                    self._failure = ex
                    raise
                self._is_fresh = True
            self._asked.add(asked)
            found = self._tables.get(relation.relation_id)
        return found


def _has_columns(table: Mapping[str, Any], relation: Relation) -> bool:
    return [(each["name"], each["type_id"], each["type_modifier"]) for each in table.get("columns", ())] == looks(relation)
