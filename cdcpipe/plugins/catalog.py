"""Asks the server's catalog for facts that the stream does not have: names and kinds of types, primary keys, defaults.

The catalog is of today, not of the time of a change. A column that was dropped since has no facts, and a dropped type has only the
name from the stream. Facts about types are kept, because a type with one id does not change, except for its name. The name is asked
again when the stream describes the type again.

Without a server (`NoCatalogError`), as for a capture, types have the names from the stream: for a domain that of its base type, and
no type modifiers. Any other fact raises an error that names it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from cdcpipe.catalog_sql import identity_of, key_numbers, leaves_of
from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.plugins.keywords import KEYWORDS
from cdcpipe.plugins.text import quote_identifier
from cdcpipe.types.names import format_built_in_type
from cdcpipe.types.pg_type import PG_TYPES, type_id_of, type_ids_of
from cdcpipe.types.shape import Kind, Shape
from cdcpipe.types.table import REG_TYPES

if TYPE_CHECKING:
    from cdcpipe.pgoutput.messages import Type
    from cdcpipe.types.binary.reading import ToText

__all__ = ["Catalog", "ColumnFacts", "NoCatalogError", "Query", "TypeFacts"]

Query: TypeAlias = Callable[[str], Sequence[tuple[str | None, ...]]]
"""Runs SQL on an ordinary connection, as one message, and returns the last command's rows as text. The search path is empty."""


class NoCatalogError(InvalidArgumentsError):
    """There is no server to ask for the fact ``what``."""

    def __init__(self, what: str = "a fact that the output plugin needs") -> None:
        super().__init__(
            f"{what} can't be found in the stream, and there is no server to ask",
            hint="name the server of the changes (-d, -h, -p, -U, -m), or leave out the option that needs its catalog",
        )


class TypeFacts(NamedTuple):
    """Facts from pg_type. ``kind`` is typtype; it is empty for a type that does not exist any more.

    ``element`` is for arrays, ``base_type`` and ``base_typmod`` are for domains; for other types they are 0, 0 and -1.
    """

    name: str
    kind: str
    element: int = 0
    base_type: int = 0
    base_typmod: int = -1


class ColumnFacts(NamedTuple):
    """Facts about a column. ``default`` is the text of pg_get_expr(). ``is_primary_key``: part of the primary key."""

    position: int
    is_not_null: bool
    default: str | None
    is_primary_key: bool


# With the modifier -1 these types differ from those without a modifier: bpchar is not character(1), "bit" is not bit(1).
_WITHOUT_MODIFIER: Final = {"bpchar": "character", "bpchar[]": "character[]", '"bit"': "bit", '"bit"[]': "bit[]"}

(_MONEY_ID,) = type_ids_of("money")
_INT8, _UINT4 = struct.Struct(">q"), struct.Struct(">I")
_MAX_TEXTS: Final = 10_000

# A type of an extension may use the functions of a built-in type. citext uses those of text, and so has its binary form.
_BINARY_FORM: Final = """
select t.typtype, e.oid, t.typbasetype, r.rngsubtype, m.rngtypid,
       (select min(b.oid)
        from pg_type b join pg_proc send on send.oid = b.typsend join pg_proc output on output.oid = b.typoutput
        where b.oid < 10000 and b.typtype = 'b' and b.typelem = 0
              and (send.prolang, send.prosrc) = (select prolang, prosrc from pg_proc where oid = t.typsend)
              and (output.prolang, output.prosrc) = (select prolang, prosrc from pg_proc where oid = t.typoutput)),
       e.typdelim
from pg_type t
     left join pg_type e on e.oid = t.typelem and t.typsend = 'pg_catalog.array_send'::regproc
     left join pg_range r on r.rngtypid = t.oid
     left join pg_range m on m.rngmultitypid = t.oid
where t.oid = {type_id}
"""

# An array has typlen -1 and an element type. So do some types that are no arrays (box, point), but these do not use array_out.
_TYPE: Final = """
select typname, typtype, case when typoutput = 'array_out'::regproc then typelem else 0 end, typbasetype, typtypmod
from pg_type
where oid = {type_id}
"""

_WITH_SEARCH_PATH: Final = "set local search_path to default; "
"""Lets a query find names as the role does, so that they have a schema where a plugin on the server would write one.

No other query does so. The query itself must name the schema of everything that it uses, operators too (`NO_SEARCH_PATH`).
"""

_DEFAULT_SEARCH_PATH: Final = frozenset({"public", "pg_catalog"})


class Catalog:
    """Answers from memory if it can, else with ``query``."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._formatted: dict[tuple[int, int | None], str] = {}
        self._facts: dict[int, TypeFacts] = {}
        self._described: dict[int, Type] = {}
        self._origins: dict[str, int] = {}
        self._keywords: frozenset[str] | None = None
        self._texts: dict[str, bytes] = {}

    def describe(self, type_: Type) -> None:
        """Take the stream's description of a type, and forget what was known about the type."""
        self._described[type_.type_id] = type_
        self._facts.pop(type_.type_id, None)
        self._formatted = {key: text for key, text in self._formatted.items() if key[0] != type_.type_id}

    def described(self, type_id: int) -> Type | None:
        """Return the stream's description of a type."""
        return self._described.get(type_id)

    def format_type(self, type_id: int, typmod: int | None) -> str:
        """Return the type's name with its modifier, ``character varying(10)``, as the SQL function of this name does.

        With the modifier None (SQL's NULL) the result is only the name, ``character varying``.
        """
        text = format_built_in_type(type_id, -1 if typmod is None else typmod)
        if text is not None and typmod is None:
            return _WITHOUT_MODIFIER.get(text, text)
        if text is None:
            text = self._formatted.get((type_id, typmod))
        if text is None:
            modifier = "null" if typmod is None else f"'{typmod}'"
            sql = (
                f"{_WITH_SEARCH_PATH}select pg_catalog.format_type(t.oid, {modifier}::pg_catalog.int4)"
                f" from pg_catalog.pg_type t where t.oid operator(pg_catalog.=) '{type_id}'::pg_catalog.oid"
            )
            try:
                rows = self._ask(f"the name of type {type_id}", sql)
            except NoCatalogError:
                if type_id not in self._described:
                    raise
                rows = []
            text = rows[0][0] if rows else None
            if text is None:
                text = self._described_name(type_id)
            self._formatted[type_id, typmod] = text
        return text

    def type(self, type_id: int) -> TypeFacts:
        """Return a type's facts."""
        built_in = PG_TYPES.get(type_id)
        if built_in is not None:
            return TypeFacts(built_in.name, "b", built_in.of if built_in.kind is Kind.ARRAY else 0)
        facts = self._facts.get(type_id)
        if facts is None:
            what = f"whether type {type_id} is a domain, and its bare name (include-domain-data-type, include-typmod)"
            rows = self._ask(what, _TYPE.format(type_id=type_id))
            if rows:
                name, kind, element, base_type, base_typmod = rows[0]
                facts = TypeFacts(name or "", kind or "", int(element or 0), int(base_type or 0), int(base_typmod or -1))
            else:
                facts = TypeFacts(self._described[type_id].name if type_id in self._described else "???", "")
            self._facts[type_id] = facts
        return facts

    def binary_form(self, type_id: int) -> Shape | ToText | None:
        """Return how a type's binary form becomes text, for `ValueDecoder`; None if that is not known."""
        if type_id == _MONEY_ID:
            return self._money
        if type_id in REG_TYPES:
            return partial(self._object_name, REG_TYPES[type_id])
        try:
            rows = self._ask(f"the text of values of type {type_id} in binary form", _BINARY_FORM.format(type_id=type_id))
        except NoCatalogError:
            # A type that is not built in, but is described as a built-in type, is a domain over that type.
            described = self._described.get(type_id)
            base_id = type_id_of(described.name) if described and described.namespace == "pg_catalog" else None
            if base_id is None:
                raise
            return Shape(Kind.DOMAIN, base_id)
        if not rows:
            return None
        kind, *ids, delimiter = rows[0]
        element, base, subtype, range_, same = (int(each or 0) for each in ids)
        if element:
            return Shape(Kind.ARRAY, element, (delimiter or ",").encode())
        match kind:
            case "c":
                return Shape(Kind.COMPOSITE)
            case "d":
                return Shape(Kind.DOMAIN, base)
            case "e":
                return Shape(Kind.ENUM)
            case "m":
                return Shape(Kind.MULTIRANGE, range_)
            case "r":
                return Shape(Kind.RANGE, subtype)
        return Shape(Kind.DOMAIN, same) if same else None

    def _object_name(self, type_name: str, data: bytes) -> bytes:
        (oid,) = _UINT4.unpack(data)
        return self._text(f"'{oid}'::pg_catalog.oid::pg_catalog.{type_name}")

    def _money(self, data: bytes) -> bytes:
        """Return the text of an amount according to lc_monetary. The binary number counts its smallest unit."""
        (units,) = _INT8.unpack(data)
        scale = len(self._text("1::pg_catalog.money::pg_catalog.numeric").partition(b".")[2])
        return self._text(f"'{units}e-{scale}'::pg_catalog.numeric::pg_catalog.money")

    def _text(self, expression: str) -> bytes:
        """Return the text of an expression. The server is asked once for each, until too many are kept."""
        text = self._texts.get(expression)
        if text is None:
            if len(self._texts) >= _MAX_TEXTS:
                self._texts.clear()
            what = f"the text of values of type {expression.rpartition('.')[2]} in binary form"
            ((answer,),) = self._ask(what, f"{_WITH_SEARCH_PATH}select ({expression})::pg_catalog.text")
            text = self._texts[expression] = (answer or "").encode()
        return text

    def columns(self, relation_id: int, *, with_defaults: bool) -> dict[str, ColumnFacts]:
        """Return the facts of a relation's columns by name, never from memory; empty if the relation does not exist any more.

        Without ``with_defaults`` every default is None. To get the text of a default, the server waits while the table is locked
        exclusively.
        """
        what = "a column's entry in the catalog (include-not-null, include-default, include-column-positions, include-pk)"
        rows = self._ask(
            what,
            f"""
            select a.attname, a.attnum, a.attnotnull, a.attgenerated,
                   coalesce(a.attnum = any ({key_numbers("i")}), false)
            from pg_attribute a
                 left join pg_index i on i.indrelid = a.attrelid and i.indisprimary and i.indimmediate and i.indisvalid
            where a.attrelid = {relation_id} and a.attnum > 0 and not a.attisdropped
            """,
        )
        defaults = {}
        if with_defaults:
            sql = (
                f"{_WITH_SEARCH_PATH}select d.adnum, pg_catalog.pg_get_expr(d.adbin, d.adrelid) from pg_catalog.pg_attrdef d"
                f" where d.adrelid operator(pg_catalog.=) '{relation_id}'::pg_catalog.oid"
            )
            defaults = {row[0]: row[1] for row in self._ask(what, sql)}
        return {
            name or "": ColumnFacts(
                int(position or 0), not_null == "t", None if generated else defaults.get(position), primary_key == "t"
            )
            for name, position, not_null, generated, primary_key in rows
        }

    def partitions_key(self, relation_id: int, table: str) -> frozenset[str]:
        """Return the columns that the keys of all partitions of a partitioned table have, never from memory.

        Partitions with REPLICA IDENTITY FULL do not count: each of their updates comes with the old row. An error names ``table``.
        """
        rows = self._ask(
            f"the key of the partitions of {table}",
            f"select {identity_of('leaf')}::text from pg_class leaf"
            f" where leaf.oid in {leaves_of(str(relation_id))} and leaf.relreplident <> 'f'",
        )
        keys = [frozenset[str](json.loads(names)) for (names,) in rows if names is not None]
        return frozenset.intersection(*keys) if keys else frozenset()

    def origin_id(self, name: str) -> int:
        """Return the number of a replication origin."""
        if name not in self._origins:
            what = f"the number of the replication origin {name!r} (include-origin, filter-origins)"
            rows = self._ask(what, "select roname, roident from pg_replication_origin")
            self._origins = {origin or "": int(number or 0) for origin, number in rows}
        if name not in self._origins:
            msg = f"the replication origin {name!r} is no longer in pg_replication_origin: its number is not known"
            raise CdcpipeError(msg, hint="leave include-origin and filter-origins out")
        return self._origins[name]

    @cached_property
    def server_version(self) -> int | None:
        """The server's version, such as 180004; None without a server."""
        try:
            rows = self._query("show server_version_num")
        except NoCatalogError:
            return None
        return int(rows[0][0] or 0)

    @property
    def keywords(self) -> frozenset[str]:
        """The words that must be quoted when they are names."""
        if self._keywords is None:
            try:
                rows = self._query("select word from pg_get_keywords() where catcode <> 'U'")
                self._keywords = frozenset(word or "" for (word,) in rows)
            except NoCatalogError:
                self._keywords = KEYWORDS
        return self._keywords

    def _ask(self, what: str, sql: str) -> Sequence[tuple[str | None, ...]]:
        try:
            return self._query(sql)
        except NoCatalogError:
            raise NoCatalogError(what) from None

    def _described_name(self, type_id: int) -> str:
        """Return the name from the stream for a type that is not in the catalog."""
        type_ = self._described.get(type_id)
        if type_ is None:
            return "???"
        # The server names array types after their elements.
        is_array = len(type_.name) > 1 and type_.name.startswith("_")
        name = quote_identifier(type_.name[is_array:], self.keywords) + "[]" * is_array
        if type_.namespace in _DEFAULT_SEARCH_PATH:
            return name
        return f"{quote_identifier(type_.namespace, self.keywords)}.{name}"
