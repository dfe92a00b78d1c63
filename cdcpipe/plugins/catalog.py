"""What the stream does not say: names of types, primary keys, defaults. Asked of the server's catalog, when needed.

The catalog is as it is now, not as it was when the change was made: a column that has been dropped since has no facts, a
type that has been dropped only the name that the stream gave. Types are kept, they don't change under one id within a
connection's life except for their names, which are asked for again when the stream describes the type again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from cdcpipe.errors import CdcpipeError
from cdcpipe.plugins.text import quote_identifier
from cdcpipe.plugins.type_names import built_in_type, format_built_in_type

if TYPE_CHECKING:
    from cdcpipe.pgoutput.messages import Type
    from cdcpipe.plugins.base import Query

__all__ = ["Catalog", "ColumnFacts", "TypeFacts"]


class TypeFacts(NamedTuple):
    """``base_type`` and ``base_typmod`` are a domain's, and 0 and -1 for other types."""

    name: str
    base_type: int
    base_typmod: int


class ColumnFacts(NamedTuple):
    """``default`` is the expression as pg_get_expr() gives it; ``is_primary_key``: part of it."""

    position: int
    is_not_null: bool
    default: str | None
    is_primary_key: bool


# With the modifier -1 these are other types than with none: bpchar is not character(1), "bit" not bit(1).
_WITHOUT_MODIFIER: Final = {"bpchar": "character", "bpchar[]": "character[]", '"bit"': "bit", '"bit"[]': "bit[]"}

_DEFAULT_SEARCH_PATH: Final = frozenset({"public", "pg_catalog"})


class Catalog:
    """Answers from memory where it can, else with ``query``."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._formatted: dict[tuple[int, int | None], str] = {}
        self._facts: dict[int, TypeFacts] = {}
        self._described: dict[int, Type] = {}
        self._origins: dict[str, int] = {}
        self._keywords: frozenset[str] | None = None

    def describe(self, type_: Type) -> None:
        """Take what the stream says about a type; what was known about it is to be asked again."""
        self._described[type_.type_id] = type_
        self._facts.pop(type_.type_id, None)
        self._formatted = {key: text for key, text in self._formatted.items() if key[0] != type_.type_id}

    def format_type(self, type_id: int, typmod: int | None) -> str:
        """Return the type's name with its modifier, ``character varying(10)``, as the SQL function of this name does.

        A modifier of None is SQL's NULL: the name alone, ``character varying``.
        """
        text = format_built_in_type(type_id, -1 if typmod is None else typmod)
        if text is not None and typmod is None:
            return _WITHOUT_MODIFIER.get(text, text)
        if text is None:
            text = self._formatted.get((type_id, typmod))
        if text is None:
            # Cast: a negative constant would bind as an operator.
            rows = self._query(
                f"select format_type(t.oid, ({'null' if typmod is None else typmod})::int4) from pg_type t where t.oid = {type_id}"
            )
            text = rows[0][0] if rows else None
            if text is None:
                text = self._described_name(type_id)
            self._formatted[type_id, typmod] = text
        return text

    def type(self, type_id: int) -> TypeFacts:
        """Return a type's facts."""
        built_in = built_in_type(type_id)
        if built_in is not None:
            return TypeFacts(built_in.name, 0, -1)
        facts = self._facts.get(type_id)
        if facts is None:
            rows = self._query(f"select typname, typbasetype, typtypmod from pg_type where oid = {type_id}")
            if rows:
                name, base_type, base_typmod = rows[0]
                facts = TypeFacts(name or "", int(base_type or 0), int(base_typmod or -1))
            else:
                facts = TypeFacts(self._described[type_id].name if type_id in self._described else "???", 0, -1)
            self._facts[type_id] = facts
        return facts

    def columns(self, relation_id: int) -> dict[str, ColumnFacts]:
        """Return the facts of a relation's columns by name; never from memory. Empty if the relation is gone."""
        rows = self._query(
            f"""
            select a.attname, a.attnum, a.attnotnull,
                   case when a.attgenerated = '' then pg_get_expr(d.adbin, d.adrelid) end,
                   coalesce(a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1]), false)
            from pg_attribute a
                 left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
                 left join pg_index i on i.indrelid = a.attrelid and i.indisprimary and i.indimmediate and i.indisvalid
            where a.attrelid = {relation_id} and a.attnum > 0 and not a.attisdropped
            """
        )
        return {
            name or "": ColumnFacts(int(position or 0), not_null == "t", default, primary_key == "t")
            for name, position, not_null, default, primary_key in rows
        }

    def origin_id(self, name: str) -> int:
        """Return the number of a replication origin."""
        if name not in self._origins:
            rows = self._query("select roname, roident from pg_replication_origin")
            self._origins = {origin or "": int(number or 0) for origin, number in rows}
        if name not in self._origins:
            msg = f"the replication origin {name!r} is no longer in pg_replication_origin: its number is not known"
            raise CdcpipeError(msg, hint="leave include-origin and filter-origins out")
        return self._origins[name]

    @property
    def keywords(self) -> frozenset[str]:
        """The words that must be quoted to be names."""
        if self._keywords is None:
            rows = self._query("select word from pg_get_keywords() where catcode <> 'U'")
            self._keywords = frozenset(word or "" for (word,) in rows)
        return self._keywords

    def _described_name(self, type_id: int) -> str:
        """Return the name of a type that the catalog has no longer, from the stream."""
        type_ = self._described.get(type_id)
        if type_ is None:
            return "???"
        if type_.namespace in _DEFAULT_SEARCH_PATH:
            return quote_identifier(type_.name, self.keywords)
        return f"{quote_identifier(type_.namespace, self.keywords)}.{quote_identifier(type_.name, self.keywords)}"
