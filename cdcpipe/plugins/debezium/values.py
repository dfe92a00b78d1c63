"""Chooses how the values of a type are written, as Debezium's PostgreSQL connector does under its options.

`Values` finds the form of a type. The forms come from recorded events of the connector (``tests/data/debezium``).
docs/output-plugins.md has a numbered list of intended differences. numbers.py, times.py, binary.py and containers.py have the
functions that write values.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from cdcpipe.plugins import row_compiler
from cdcpipe.plugins.catalog import NoCatalogError, TypeFacts
from cdcpipe.plugins.debezium.binary import BINARY, bit, bits, point, unhex, uuid_of
from cdcpipe.plugins.debezium.containers import array, hstore_pairs, json_object
from cdcpipe.plugins.debezium.numbers import FLOAT, decimal, money
from cdcpipe.plugins.debezium.times import (
    ISO,
    MICROS,
    MILLIS,
    NANOS,
    TIMES,
    TIMESTAMPS,
    days,
    duration,
    interval_us,
    iso_date,
    zoned_time,
    zoned_timestamp,
)
from cdcpipe.plugins.row_compiler import Style, escape, json_string
from cdcpipe.types.pg_type import type_id_of

if TYPE_CHECKING:
    from cdcpipe.plugins.catalog import Catalog

__all__ = ["Form", "ValueOptions", "Values"]


@dataclass(frozen=True, slots=True)
class ValueOptions:
    """The connector's options for values, with underscores in their names, and with the connector's defaults."""

    decimal_handling_mode: str = "precise"
    time_precision_mode: str = "adaptive"
    interval_handling_mode: str = "numeric"
    binary_handling_mode: str = "bytes"
    hstore_handling_mode: str = "json"
    include_unknown_datatypes: bool = False
    money_fraction_digits: int = 2
    unavailable_value_placeholder: str = "__debezium_unavailable_value"

    @property
    def placeholder(self) -> bytes:
        """The placeholder for an unsent value. An option that begins with ``hex:`` gives its bytes."""
        text = self.unavailable_value_placeholder
        return bytes.fromhex(text[4:]) if text.startswith("hex:") else text.encode()


@dataclass(frozen=True, slots=True)
class Form:
    """How the values of a type are written, and what is written for an unsent value."""

    style: Style
    unavailable: bytes
    is_integer: bool = False


# Types whose text the connector writes as a string, by pg_type.typname.
_QUOTED: Final = frozenset(["uuid", "inet", "cidr", "macaddr", "macaddr8"])
_STRINGS: Final = _QUOTED | {
    *("char", "name", "text", "varchar", "bpchar", "json", "jsonb", "xml", "tsvector", "citext", "ltree", "isbn"),
    *("int4range", "int8range", "numrange", "tsrange", "tstzrange", "daterange"),
}
_INTEGERS: Final = frozenset(["int2", "int4", "int8", "oid"])
# Arrays for which the connector has no form, although it has one for their elements.
_UNKNOWN_ARRAYS: Final = frozenset(["_money", "_name", "_interval", "_varbit", "_xml", "_point", "_refcursor"])


class Values:
    """Finds the form of a type."""

    def __init__(self, options: ValueOptions, catalog: Catalog) -> None:
        self._options = options
        self._catalog = catalog
        placeholder = options.placeholder
        self._text_unavailable = json_string(placeholder.decode(errors="replace"))
        self._binary = BINARY[options.binary_handling_mode]
        is_text = options.binary_handling_mode == "hex"
        self._binary_unavailable = self._text_unavailable if is_text else b'"%b"' % self._binary(placeholder)

    def binary(self, data: bytes) -> bytes:
        """Return the JSON string for bytes."""
        return b'"%b"' % self._binary(data)

    def form(self, type_id: int, typmod: int) -> Form | None:
        """Return how values of the type are written; None if they are left out."""
        facts = self._type(type_id)
        if facts.base_type:
            return self.form(facts.base_type, facts.base_typmod)
        if facts.kind == "e":
            return self._form(row_compiler.STRING)
        if facts.element:
            return self._array(facts, typmod)
        form = self._scalar(facts.name, typmod)
        if form is None and self._options.include_unknown_datatypes:
            return Form(Style.call(self._binary, b'"'), self._binary_unavailable)
        return form

    def _form(self, style: Style) -> Form:
        return Form(style, self._text_unavailable)

    def _scalar(self, name: str, typmod: int) -> Form | None:
        options = self._options
        if name in _INTEGERS:
            return replace(self._form(row_compiler.VERBATIM), is_integer=True)
        if name in _STRINGS:
            return self._form(row_compiler.QUOTED if name in _QUOTED else row_compiler.STRING)
        match name:
            case "bool":
                return self._form(row_compiler.BOOLEAN)
            case "float4" | "float8":
                return self._form(FLOAT)
            case "numeric":
                return self._form(decimal(options.decimal_handling_mode, typmod))
            case "money":
                return self._form(Style.call(partial(money, options.decimal_handling_mode, options.money_fraction_digits)))
            case "date":
                style = Style.call(iso_date, b'"') if self._unit(0) == ISO else Style.call(days)
                return replace(self._form(style), is_integer=self._unit(0) != ISO)
            case "time":
                is_adaptive = options.time_precision_mode == "adaptive_time_microseconds"
                return self._form(TIMES[MICROS if is_adaptive else self._unit(typmod)])
            case "timestamp":
                return self._form(TIMESTAMPS[self._unit(typmod)])
            case "timestamptz":
                return self._form(zoned_timestamp(6 if typmod < 0 else typmod))
            case "timetz":
                return self._form(Style.call(zoned_time, b'"'))
            case "interval":
                return self._form(Style.call(duration) if options.interval_handling_mode == "string" else Style.call(interval_us))
            case "bit" | "varbit":
                is_boolean = typmod == 1 or (name == "bit" and typmod < 0)
                return self._form(Style.call(bit) if is_boolean else Style.call(bits, b'"'))
            case "bytea":
                return Form(Style.call(lambda value: self._binary(unhex(value)), b'"'), self._binary_unavailable)
            case "point":
                return self._form(Style.call(point))
            case "hstore":
                return self._hstore()
            case "int2vector" | "oidvector":
                return self._form(Style.call(lambda value: b"[%b]" % b",".join(value.split(b" ") if value else [])))
        return None

    def _hstore(self) -> Form:
        pair = {self._text_unavailable: self._text_unavailable}
        if self._options.hstore_handling_mode == "map":
            return Form(Style.call(lambda value: json_object(hstore_pairs(value))), json_object(pair))
        return Form(Style.call(lambda value: escape(json_object(hstore_pairs(value))), b'"'), b'"%b"' % escape(json_object(pair)))

    def _array(self, facts: TypeFacts, typmod: int) -> Form | None:
        element_facts = self._type(facts.element)
        element = self.form(facts.element, typmod)
        if (facts.name in _UNKNOWN_ARRAYS and element_facts.kind == "b") or element_facts.kind == "d":
            if not self._options.include_unknown_datatypes:
                return None
            element = Form(Style.call(self._binary, b'"'), self._binary_unavailable)
        if element is None:
            return None
        unavailable = b"[%b]" % element.unavailable
        if element.is_integer:
            signed = struct.unpack(f"{len(self._options.placeholder)}b", self._options.placeholder)
            unavailable = b"[%b]" % b",".join(b"%d" % byte for byte in signed)
        elif element_facts.name == "uuid":
            unavailable = b'["%b"]' % uuid_of(self._options.placeholder)
        delimiter = b";" if element_facts.name == "box" else b","
        return Form(Style.call(partial(array, element.style.render, delimiter)), unavailable)

    def _unit(self, typmod: int) -> str:
        match self._options.time_precision_mode:
            case "adaptive" | "adaptive_time_microseconds":
                return MILLIS if 0 <= typmod <= 3 else MICROS
            case "connect":
                return MILLIS
            case "isostring":
                return ISO
            case "nanoseconds":
                return NANOS
        return MICROS

    def _type(self, type_id: int) -> TypeFacts:
        try:
            facts = self._catalog.type(type_id)
        except NoCatalogError:
            return self._type_as_described(type_id)
        if not facts.kind:  # the type was dropped since: only the text of its values is known
            return TypeFacts("text", "b")
        # The forms of names are those of base types. A user's composite may be called interval, too.
        return facts if facts.kind == "b" else facts._replace(name="")

    def _type_as_described(self, type_id: int) -> TypeFacts:
        """Return the facts about a type from the stream, if they are sufficient."""
        described = self._catalog.described(type_id)
        # In the stream, a domain has the name of its base type.
        if described is not None and described.namespace == "pg_catalog":
            return TypeFacts(described.name, "d", base_type=type_id_of(described.name) or 0)
        if described is not None and described.name in {*_STRINGS, "hstore"}:
            return TypeFacts(described.name, "b")
        known = f"{described.namespace}.{described.name}" if described else str(type_id)
        raise NoCatalogError(f"what kind of type {known} is")
