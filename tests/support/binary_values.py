"""Values of every PostgreSQL type, and a server that returns them in text and in binary form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import pq

from cdcpipe.plugins.catalog import Catalog
from cdcpipe.sql import SESSION_SETTINGS
from cdcpipe.types.binary.decoder import ValueDecoder, to_text
from cdcpipe.types.shape import Shape
from cdcpipe.types.table import TYPES, NoText

FLOATS = ["0", "-0", "1", "-1.5", "0.1", "1e-10", "1e-4", "1e-5", "123456", "1234567", "NaN", "Infinity", "-Infinity"]

DATES = ["2000-01-01", "1999-12-31", "2024-02-29", "infinity", "-infinity", "0001-01-01", "0001-12-31 BC", "0044-03-15 BC",
         "4714-11-24 BC", "9999-12-31", "10000-01-01", "99999-02-28"]  # fmt: skip


TIMES = ["00:00", "24:00", "23:59:59.999999", "12:34:56.7", "00:00:00.000001", "01:02:03"]

STRINGS = [
    "",
    " ",
    "plain",
    'a"b\\c/d',
    "äö世界\U0001f600",
    "NULL",
    "null",
    "{a,b}",
    "(x)",
    "[y]",
    "it's",
    "t\tn\nr\rv\vf\f",
    "x" * 300,
]


RANGES = {
    "int4range": ["empty", "[1,5)", "(,)", "[,5)", "[5,)", "[-5,-1)"],
    "int8range": ["[9223372036854775806,9223372036854775807)"],
    "numrange": ["empty", "(,3.5]", "[1.50,NaN]", "(-Infinity,Infinity)", "(1,2)"],
    "daterange": ["[2024-01-01,infinity)", "[-infinity,0044-03-15 BC)", "(,)"],
    "tsrange": ["[2024-01-01 00:00:00.5,2024-01-02)", "(,infinity]", "[0044-03-15 01:02:03 BC,)"],
    "tstzrange": ["[2024-01-01 00:00:00+02,2024-01-02)"],
}


IPV6 = ["::", "::1", "1::", "::1.2.3.4", "::ffff:1.2.3.4", "::ffff:0:1.2.3.4", "2001:db8::8:800:200c:417a", "1:0:0:2:0:0:0:3",
    "0:1::1",
        "1:0:0:4:5:0:0:8", "fe80::1:2:3:4", "1:2:3:4:5:6:7:8", "1:0:3:4:5:6:7:8", "::2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::1:0:0:0",
        "::ffff:ffff", "0:0:0:0:0:ffff::", "::5:6:7:8", "::1:ffff:1.2.3.4"]  # fmt: skip


VALUES: dict[str, list[str]] = {
    "bool": ["t", "f"],
    "bytea": ["", "\\x00ff5c22", "plain"],
    "char": ["", "a", "\\", '"', " "],
    "name": ["n", 'Ünï "q"', "x" * 63],
    "int8": ["0", "9223372036854775807", "-9223372036854775808"],
    "int2": ["32767", "-32768"],
    "int2vector": ["", "1", "1 -2 3"],
    "int4": ["2147483647", "-2147483648"],
    "text": STRINGS,
    "oid": ["0", "4294967295"],
    "tid": ["(0,1)", "(4294967295,65535)"],
    "xid": ["0", "4294967295"],
    "cid": ["1", "4294967295"],
    "oidvector": ["", "1 4294967295"],
    "json": ['{"a": [1, "\\u00e4\\n"]}', " 1 ", '"\\"x, y"'],
    "xml": ['<a b="c"/>', "text", '<?xml version="1.0" encoding="UTF-8"?><a>ä</a>', '<?xml version="1.1" standalone="yes"?>\n<a/>',
            '<?xml version="1.0"?>\n<a/>', ""],
    "point": ["(1,2)", "(-0,1e-7)", "(NaN,Infinity)", "(1e15,1e300)"],
    "lseg": ["[(1,2),(3,4.5)]"],
    "path": ["((1,2),(3,4))", "[(1,2),(3,4),(5,6)]", "[(0,0)]"],
    "box": ["(3,4),(1,2)", "(1,1),(-1,-1)"],
    "polygon": ["((1,2),(3,4),(5,6))", "((0,0))"],
    "line": ["{1,2,3}", "{-1,0,0.5}"],
    "cidr": ["10.0.0.0/8", "1.2.3.4/32", "::/0", "2001:db8::/32", "::1/128", "0.0.0.0/0"],
    "float4": [*FLOATS, "1e30", "3.4028235e38", "1e-45", "1.1754944e-38", "16777216", "8388608.5", "999999.94", "0.3"],
    "float8": [*FLOATS, "1e15", "123456789012345", "1234567890123456", "1e23", "5e-324", "1.7976931348623157e308",
        "9007199254740993",
               "2.2250738585072014e-308", "5.684341886080801e-14", "9.5e22", "144115188075855872"],
    "circle": ["<(1,2),3>", "<(0,0),0.1>"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "money": ["0", "12.34", "-1234567.89", "92233720368547758.07", "-92233720368547758.08"],
    "macaddr": ["08:00:2b:01:02:0f"],
    "inet": ["192.168.0.1/24", "1.2.3.4", "0.0.0.0/0", "1.2.3.4/31", *IPV6, *(f"{address}/64" for address in IPV6)],
    "bpchar": ["c  ", "", "ä"],
    "varchar": STRINGS,
    "date": [*DATES, "5874897-12-31"],
    "time": TIMES,
    "timestamp": [*(f"{day.removesuffix(' BC')} {time}{day[10:]}" for day in DATES[:3] + DATES[5:10] for time in TIMES),
                  "infinity", "-infinity", "294276-12-31 23:59:59.999999", "4714-11-24 00:00:00 BC", "10000-01-01 00:00:00.5"],
    "timestamptz": ["2026-11-21 12:34:56.789+02", "infinity", "-infinity", "0001-01-01 00:00+14", "0044-03-15 12:00-08 BC",
                    "294276-12-31 23:59:59.999999+00", "1900-01-01 00:00:00+00"],
    "interval": ["0", "1 year 2 mons -3 days 04:05:06.789", "-1 s", "1 mon", "-1 mon", "-1 mon 1 day", "1 day -1 s", "-1 day 1 s",
                 "-1 year 1 mon", "11 mons", "-13 mons 5 days -00:00:00.000001", "1 day", "100 years", "2 days",
                 "-14 mons -1 day -1 us",
                 "2562047788:00:54.775807", "-2562047788:00:54.775807", "178956970 years 7 mons 2147483647 days", "00:00:01.5",
                 "1000 hours"],
    "timetz": ["12:34:56+05:30", "24:00:00-15:59", "00:00:00.000001+00", "01:02:03-07:52:58", "01:02:03+00:00:01"],
    "bit": ["0", "1", "10101010", "101010101", "0" * 33],
    "varbit": ["", "1", "00000000", "000000001", "1" * 100],
    "numeric": ["0", "0.00", "1.50", "-0.01", "12345678901234567890.123456789", "NaN", "Infinity", "-Infinity", "1e40", "1e-20",
        "10000",
                "-1e131071", "0.0001", "0.00001", "100000000", "1" + "0" * 30 + ".5", "9999.9999", "0." + "0" * 50 + "1",
                "1e-16383",
                "1.0000000000"],
    "refcursor": ["c", "<unnamed portal 1>"],
    "regprocedure": ["lower(text)", "-"],
    "regproc": ["now", "-"],
    "regoper": ["pg_catalog.||/", "0"],
    "regoperator": ["+(integer,integer)", "0"],
    "regclass": ["pg_class", '"Odd table"'],
    "regtype": ["integer", "text[]", "-"],
    "regconfig": ["english"],
    "regdictionary": ["simple"],
    "regnamespace": ["public"],
    "regrole": ["postgres"],
    "regcollation": ['"C"'],
    "uuid": ["00000000-0000-0000-0000-0123456789ab"],
    "txid_snapshot": ["10:20:10,14,15", "1:1:"],
    "pg_snapshot": ["10:20:10,14,15", "1:1:", "9223372036854775806:9223372036854775807:9223372036854775806"],
    "pg_lsn": ["16/B374D848", "0/0", "FFFFFFFF/FFFFFFFF"],
    "tsvector": ["", "'a\\\\b':1A 'it''s':2B,3C,4,16383D", "a b c", "ä:1", "' '"],
    "tsquery": ["", "a", "a & !'b'", "!(a | b) & c", "a <-> b <2> (c <-> d)", "(a <-> b) <-> c", "a <-> (b <-> c)",
        "a:*AB & b:D", "!!a",
                "(a | b) & (c | d)", "a | b & c", "'it''s\\\\x'", "!(a <-> b)", "(a & b) | c", "a & (b & c)", "a & b & c & d",
                "a <0> b",
                "!a <-> b", "(a | !b) <-> (c & d)"],
    "jsonb": ['{"a": [1, "x", null]}', "1.50", '""'],
    "jsonpath": ["$.a[*] ? (@ > 1)", "strict $"],
    "xid8": ["0", "18446744073709551615"],
    **RANGES,
    **{
        name.replace("range", "multirange"): ["{}", "{" + values[0] + "}", "{" + ",".join(values) + "}"]
        for name, values in RANGES.items()
    },
}  # fmt: skip


ONLY_ON_18 = {"interval": ["infinity", "-infinity"]}

SINCE_15 = {"char": ["\\351", "\\377"]}


def is_built_in(type_id: int) -> bool:
    """Tell whether `to_text` supports the type."""
    row = TYPES.get(type_id)
    if row is None or isinstance(row.to_text, NoText):
        return False
    part = TYPES.get(row.to_text.of) if isinstance(row.to_text, Shape) else None
    return part is None or not isinstance(part.to_text, NoText)


class Server:
    """A database whose values can be queried in text and in binary form."""

    def __init__(self, database: Any) -> None:
        self.connection = database.connect()
        self.version = int(database.cluster.version)
        for name, value in SESSION_SETTINGS.items():
            self.connection.execute(f"set {name} = '{value}'")
        self.types = ValueDecoder(Catalog(self.query).binary_form)
        built_with = self.query("select setting from pg_config() where name = 'CONFIGURE'")[0][0] or ""
        self.has_xml = "--with-libxml" in built_with

    def query(self, sql: str) -> list[tuple[str | None, ...]]:
        rows = self._taken(sql, self.connection.pgconn.exec_(sql.encode()))
        return [tuple(None if v is None else v.decode() for v in row) for row in rows]

    def _rows(self, sql: str, parameters: Sequence[bytes | None], form: pq.Format) -> list[list[bytes | None]]:
        return self._taken(sql, self.connection.pgconn.exec_params(sql.encode(), parameters or None, result_format=form))

    def _taken(self, sql: str, result: pq.abc.PGresult) -> list[list[bytes | None]]:
        assert result.status == pq.ExecStatus.TUPLES_OK, f"{sql}: {result.get_error_message()}"
        self.type_id = result.ftype(0)
        return [[result.get_value(row, column) for column in range(result.nfields)] for row in range(result.ntuples)]

    def compare(self, sql: str, *parameters: bytes) -> list[bytes]:
        """Run a query with one column, and compare its values in the two forms. Returns the texts."""
        sent = self._rows(sql, parameters, pq.Format.BINARY)
        type_id = self.type_id
        printed = [row[0] for row in self._rows(sql, parameters, pq.Format.TEXT)]
        ours = [None if row[0] is None else self.types.to_text(type_id, row[0]) for row in sent]
        assert ours == printed, sql
        if is_built_in(type_id) and type_id != 2249:
            assert [None if row[0] is None else to_text(type_id, row[0]) for row in sent] == printed
        return [text for text in printed if text is not None]


def texts(values: Sequence[str]) -> str:
    return "array[" + ", ".join("'" + value.replace("'", "''") + "'" for value in values) + "]::text[]"


def values_of(server: Server, name: str) -> list[str]:
    more = ONLY_ON_18.get(name, []) if server.version >= 17 else []
    return VALUES[name] + more + (SINCE_15.get(name, []) if server.version >= 15 else [])


def array_of(values: Sequence[str]) -> bytes:
    """Return the text form of an array of texts."""
    return ("{" + ",".join('"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values) + "}").encode()
