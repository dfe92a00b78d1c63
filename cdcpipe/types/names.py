"""The names that PostgreSQL's format_type() gives to types: ``character varying(10)``, ``numeric(12,2)[]``, ``mood``.

Only for built-in types, so that no server is needed.
Source: src/backend/utils/adt/format_type.c and the types' typmod output functions.
"""

from __future__ import annotations

from typing import Final

from cdcpipe.types.pg_type import PG_TYPES
from cdcpipe.types.shape import Kind

__all__ = ["format_built_in_type", "numeric_modifier"]


def format_built_in_type(type_id: int, typmod: int) -> str | None:
    """Return format_type(type_id, typmod), or None if the type is not built in."""
    type_ = PG_TYPES.get(type_id)
    if type_ is None:
        return None
    if typmod < 0:
        return type_.formatted
    if type_.kind is Kind.ARRAY:
        return f"{format_built_in_type(type_.of, typmod)}[]"
    if type_.name in _CHARACTER:
        return _CHARACTER[type_.name] + (f"({typmod - 4})" if typmod > 4 else "")
    if type_.name in _BIT:
        return f"{_BIT[type_.name]}({typmod})"
    if type_.name in _TIME:
        before, after = _TIME[type_.name]
        return f"{before}({typmod}) {after}"
    if type_.name == "numeric":
        precision, scale = numeric_modifier(typmod)
        return f"numeric({precision},{scale})" if typmod >= 4 else "numeric"
    if type_.name == "interval":
        fields, precision = typmod >> 16 & 0x7FFF, typmod & 0xFFFF
        return f"interval{_INTERVAL_FIELDS.get(fields, '')}" + (f"({precision})" if precision != 0xFFFF else "")
    return f"{type_.formatted}({typmod})"


def numeric_modifier(typmod: int) -> tuple[int, int]:
    """Return precision and scale. The scale is a signed number of 11 bits (numeric.c, make_numeric_typmod)."""
    bits = typmod - 4
    return bits >> 16 & 0xFFFF, ((bits & 0x7FF) ^ 1024) - 1024


_CHARACTER: Final = {"varchar": "character varying", "bpchar": "character"}
_BIT: Final = {"varbit": "bit varying", "bit": "bit"}
_TIME: Final = {
    "time": ("time", "without time zone"),
    "timetz": ("time", "with time zone"),
    "timestamp": ("timestamp", "without time zone"),
    "timestamptz": ("timestamp", "with time zone"),
}

_MONTH, _YEAR, _DAY, _HOUR, _MINUTE, _SECOND = (1 << bit for bit in (1, 2, 3, 10, 11, 12))
_INTERVAL_FIELDS: Final = {
    _YEAR: " year",
    _MONTH: " month",
    _DAY: " day",
    _HOUR: " hour",
    _MINUTE: " minute",
    _SECOND: " second",
    _YEAR | _MONTH: " year to month",
    _DAY | _HOUR: " day to hour",
    _DAY | _HOUR | _MINUTE: " day to minute",
    _DAY | _HOUR | _MINUTE | _SECOND: " day to second",
    _HOUR | _MINUTE: " hour to minute",
    _HOUR | _MINUTE | _SECOND: " hour to second",
    _MINUTE | _SECOND: " minute to second",
}
