"""The values of model.py: for each type the values at its edges, a small set of keys, and wider types that hold the same values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

if TYPE_CHECKING:
    import random

__all__ = ["EDGES", "KEYS", "KEY_COUNT", "WIDER", "literal", "value"]

EDGES: dict[str, list[str]] = {
    "boolean": ["t", "f"],
    "smallint": ["-32768", "32767"],
    "integer": ["-2147483648", "0", "2147483647"],
    "bigint": ["-9223372036854775808", "9007199254740993"],
    "real": ["0.1", "-0", "1e-45", "NaN", "Infinity"],
    "double precision": ["0.30000000000000004", "5e-324", "-Infinity", "NaN"],
    "numeric(12,2)": ["9999999999.99", "-0.01", "NaN"],
    "numeric": ["1e40", "1.10", "NaN", "0.12345678901234567890123"],
    "text": ["", "a\nb\t\\ \"'\u00e9\U0001f600", "NULL"],
    "varchar(10)": ["ab  ", ""],
    "bytea": ["\\x", "\\x00ff5c0a"],
    "date": ["0001-01-01", "1582-10-10", "9999-12-31", "infinity", "0044-03-15 BC"],
    "timestamp": ["1969-12-31 23:59:59.999999", "9999-12-31 23:59:59.999999", "-infinity", "294276-12-31 23:59:59.999999"],
    "timestamptz": ["2024-03-10 02:30:00.1-05", "0001-01-01 00:00:00+00", "infinity", "0044-03-15 01:02:03+00 BC"],
    "time": ["24:00:00", "00:00:00.000001"],
    "interval": ["1 year -2 days 03:04:05.678"],
    "uuid": ["00000000-0000-0000-0000-00000000000a"],
    "json": ['{"a":  1.10, "a": 2}'],
    "jsonb": ["12345678901234567890.123456789", '{"a": [1, null]}'],
    "inet": ["::1/64"],
    "integer[]": ["{1,NULL,3}", "{}", "[0:1]={1,2}"],
    "text[]": ['{"a,b",NULL,"NULL","\\"x\\\\"}'],
    "int4range": ["empty", "[1,5)"],
    "app.mood": ["so so", "ok"],
}

KEYS: dict[str, str] = {
    # A key made from the small number {x}. So new rows often get a key that a deleted row had.
    "integer": "{x}",
    "bigint": "({x}) * 1000000007::bigint",
    "text": "'k ' || ({x})",
    "uuid": "md5(({x})::text)::uuid",
    "date": "case when {x} = 3 then 'infinity' else date '2020-01-01' + ({x})::int end",
    "numeric(8,2)": "({x}) / 4.0",
    "timestamptz": "case when {x} = 5 then '-infinity' else timestamptz '2024-01-01' + ({x}) * interval '1 microsecond' end",
    "bytea": "int4send(({x})::int)",
}
KEY_COUNT = 120

WIDER: dict[str, list[str]] = {
    # Changes of a column's type where the old value's text, read as the new type, gives the new value.
    "smallint": ["integer", "bigint", "text"],
    "integer": ["bigint", "numeric(12,2)", "text"],
    "bigint": ["numeric", "text"],
    "real": ["double precision"],
    "numeric(12,2)": ["numeric(14,2)", "text"],
    "varchar(10)": ["varchar(20)", "text"],
    "date": ["timestamp"],
    "app.mood": ["text"],
}


def literal(text: str) -> str:
    """Return a text as an SQL literal."""
    return sql.Literal(text).as_string(None)


def value(rng: random.Random, kind: str, number: str = "i") -> str:
    """Return an expression for a random value of a type. Each value of the expression `number` gives another one."""
    base = kind.partition("(")[0]
    edges = EDGES.get(kind) or next(values for other, values in EDGES.items() if other.partition("(")[0] == base)
    forms = ["null", *(f"{literal(edge)}::{kind}" for edge in edges)]
    if kind == "text":
        # TOASTed: an update that does not change the value does not send it.
        forms += [f"repeat(md5(({number})::text || '{rng.randrange(99)}'), {rng.choice([100, 150, 400])})"] * 2
    if kind in ("integer", "bigint", "text"):
        forms.append(f"({number} + {rng.randrange(1000)})::{kind}")
    rng.shuffle(forms)
    branches = " ".join(f"when {index} then {form}" for index, form in enumerate(forms))
    return f"case abs(hashint4(({number})::int + {rng.randrange(1 << 20)})) % {len(forms)} {branches} end"
