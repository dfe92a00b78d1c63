"""The tables of a publication that has to be created, as `selection.select` finds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cdcpipe.sql import quote_identifier

__all__ = ["Selected", "Selection"]


@dataclass(frozen=True, slots=True)
class Selected:
    """A table that is to be published. A partitioned table stands for all its partitions.

    The server would refuse a published UPDATE or DELETE on some of the relations with its rows (schema, name):

    - ``lacking``: they have neither a usable primary key nor another replica identity;
    - ``generated``, since PostgreSQL 18: their replica identity has generated columns, and a new publication has none. Those that
      are lacking, too, have generated columns, so that the server would also refuse the commands with REPLICA IDENTITY FULL.
    """

    relation_id: int
    schema: str
    name: str
    is_partitioned: bool
    partition_count: int
    has_heirs: bool
    """Whether ordinary tables inherit from it."""
    is_owned: bool
    lacking: tuple[tuple[str, str], ...]
    generated: tuple[tuple[str, str], ...] = ()
    has_better_key: bool = False
    """Whether one of ``generated`` has a primary key with which the server would take the commands, if it were the identity."""
    columns: Mapping[str, int] | None = None
    """With a column list: the published columns, with their numbers in pg_attribute."""

    @property
    def column_list(self) -> str:
        """What follows the name in CREATE PUBLICATION."""
        return "" if self.columns is None else f" ({', '.join(map(quote_identifier, self.columns))})"

    @property
    def is_refused(self) -> bool:
        """Whether the server would refuse commands on it if its updates and deletes were published."""
        return bool(self.lacking or self.generated)

    @property
    def has_generated_identity(self) -> bool:
        """Whether a replica identity that is there has generated columns."""
        return not set(self.generated).issubset(self.lacking)

    @property
    def takes_full(self) -> bool:
        """Whether the server would take UPDATE and DELETE once what is lacking has REPLICA IDENTITY FULL."""
        return not self.generated

    @property
    def full_name(self) -> str:
        """``schema.name``."""
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The tables of a publication, by name. With ``is_all`` it is FOR ALL TABLES."""

    tables: tuple[Selected, ...]
    is_all: bool

    @property
    def lacking(self) -> list[str]:
        """The names of the tables without a key."""
        return [each.full_name for each in self.tables if each.lacking]

    @property
    def with_generated_identity(self) -> list[str]:
        """The names of the tables that have generated columns in a replica identity."""
        return [each.full_name for each in self.tables if each.has_generated_identity]

    @property
    def with_better_key(self) -> list[str]:
        """The names of the tables with generated columns in a replica identity, and a primary key without any."""
        return [each.full_name for each in self.tables if each.has_better_key]
