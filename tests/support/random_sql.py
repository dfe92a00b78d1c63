"""Runs random transactions on random tables, to compare plugins. The same seed gives the same statements in both sessions.

The tables have unusual names, any types, all replica identities, and partitions. The transactions insert, update, delete and
truncate rows, send logical messages, and change schemas. They have nested savepoints, which are rolled back or released.
Transactions of two sessions interleave, and some are prepared. Each session has its own tables, so that the sessions never wait for
each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import random_transaction

from cdcpipe.sql import quote_identifier

NAMES = ["t", "T a", 'q"u', "back\\slash", "nl\n", "\u00e4\u4e16", "select", "a.b,c", "x" * 63, "%s{record}", "'", "1a", "B"]
IDENTITIES = ["default", "default", "default", "full", "index", "nothing"]


@dataclass
class Table:
    name: str
    identity: str
    columns: dict[str, str] = field(default_factory=dict)
    """The type of each column by its name. `RandomSQL.value` returns the SQL of a value of the type."""
    parts: list[str] = field(default_factory=list)
    """The names of the table's partitions."""


class RandomSQL:
    """Runs random transactions. ``values`` has SQL expressions by type; ``run`` runs a statement in one of two sessions.

    With ``is_plain``, no schema changes, and no table is truncated. (If a prepared transaction is decoded at its PREPARE, server
    version 15 fails on both: "could not map filenode to relation OID".)
    """

    def __init__(
        self, seed: int, values: dict[str, list[str]], run: Sequence[Callable[[str], object]], *, is_plain: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.values = {**values, "text": [*values["text"], "repeat('toast', 800)", "repeat('toast', 900)"]}
        self.types = ["text", "text", *self.rng.sample(list(values), 10)]
        self.run = run
        self.is_plain = is_plain
        self.tables: tuple[list[Table], list[Table]] = ([], [])

    def prepare(self) -> None:
        """Create the tables."""
        for session in (0, 1):
            for number in range(4):
                self._create(session, number)

    def work(self, transactions: int) -> None:
        """Run this number of transactions, two at a time."""
        for _ in range(transactions // 2):
            bodies = [self._transaction(session) for session in (0, 1)]
            while bodies:
                body = self.rng.choice(bodies)
                if next(body, self) is self:
                    bodies.remove(body)

    def value(self, type_: str) -> str:
        return self.rng.choice([*self.values[type_], "null"])

    def _create(self, session: int, number: int) -> None:
        rng = self.rng
        table = Table(quote_identifier(f"{rng.choice(NAMES)[:50]}{session}{number}"), rng.choice(IDENTITIES))
        table.columns = {
            quote_identifier(f"{rng.choice(NAMES)[:50]}{column}"): rng.choice(self.types) for column in range(rng.randint(0, 6))
        }
        columns = ["id int", *(f"{name} {type_}" for name, type_ in table.columns.items()), "other int not null default 7"]
        rng.shuffle(columns)
        by = " partition by list (other)" if number == 3 else ""
        key = ", primary key (id, other)" if rng.random() < 0.8 else ""
        self.run[session](f"create table {table.name} ({', '.join(columns)}{key}){by}")
        for value in (1, 7) if by else ():
            table.parts.append(quote_identifier(f"part{session}{number}{value}"))
            self.run[session](f"create table {table.parts[-1]} partition of {table.name} for values in ({value})")
        for name in [table.name, *table.parts]:
            self._identity(session, name, table.identity, key)
        for column, type_ in table.columns.items():
            if type_ == "text":
                # Without compression, long values are stored out of line. An update of another column does not log them.
                self.run[session](f"alter table {table.name} alter {column} set storage external")
        self.tables[session].append(table)

    def _identity(self, session: int, name: str, identity: str, key: str) -> None:
        run = self.run[session]
        if identity == "index" and key:
            index = quote_identifier(f"i{self.rng.randrange(1 << 40)}")
            run(f"create unique index {index} on {name} (other, id)")
            run(f"alter table {name} alter id set not null; alter table {name} replica identity using index {index}")
        elif identity == "full" or not key:
            # A table without a replica identity can't be updated while it is published.
            run(f"alter table {name} replica identity full")

    def _transaction(self, session: int) -> Iterator[None]:
        """Run one transaction, a step at a time."""
        rng, gids = self.rng, ["g", "it''s", "back\\slash"]
        yield from random_transaction.steps(
            rng,
            self.run[session],
            lambda: [self._statement(session)],
            lambda: f"'{rng.choice(gids)}{rng.randrange(1 << 30)}'",
            count=rng.randint(1, 8),
            chances=random_transaction.Chances(make=0.25, leave=0.2, prepare=0.1, commit=0.8),
        )

    def _statement(self, session: int) -> str:
        rng = self.rng
        table = rng.choice(self.tables[session])
        key = rng.randint(1, 12)
        column, type_ = rng.choice(list(table.columns.items())) if table.columns else ("other", "integer")
        action = rng.random()
        if action < 0.4:
            names = ["id", *table.columns]
            rows = [
                [str(key + more), *(self.value(type_) for type_ in table.columns.values())] for more in range(rng.randint(1, 3))
            ]
            listed = ", ".join(f"({', '.join(row)})" for row in rows)
            return f"insert into {table.name} ({', '.join(names)}) values {listed} on conflict do nothing"
        if action < 0.65 and table.columns:
            return f"update {table.name} set {column} = {self.value(type_)} where id between {key} and {key + 3}"
        if action < 0.75:
            return f"update {table.name} set {rng.choice(['id = id + 1000', 'other = 8 - other'])} where id = {key}"
        if action < 0.83:
            return f"delete from {table.name} where id between {key} and {key + 2}"
        if action < 0.87 and not self.is_plain:
            # Name the partitions, because pgoutput does not say that a partitioned table was truncated by its own name.
            tables = [rng.choice(each.parts or [each.name]) for each in (table, rng.choice(self.tables[session]))]
            return f"truncate {', '.join(tables)}{rng.choice(['', ' restart identity', ' cascade', ' restart identity cascade'])}"
        if action < 0.93 or self.is_plain:
            content = rng.choice(["'x'", "'say \"hi\"'", "''", "'\\x00ff0a'::bytea", "'\\x610062'::bytea"])
            kind = rng.choice(["true", "false"])
            message = f"select pg_logical_emit_message({kind}, {rng.choice(['p', 'q', ''])!r}, {content})"
            if self.is_plain and kind == "true":
                # The server sorts a transactional message by the end of its record, which is where the next record begins, unless a
                # page ends there (decode.c, logicalmsg_decode). If that is a change of another subtransaction, either may come
                # first. Another record in between makes the order certain.
                message += ", pg_logical_emit_message(false, '', '')"
            return message
        return self._ddl(table, column)

    def _ddl(self, table: Table, column: str) -> str:
        """Change a table. If the change fails or is rolled back, `tables` is wrong. Statements that then fail do no harm."""
        rng = self.rng
        choice = rng.randrange(5)
        if choice == 0 or not table.columns:
            name = quote_identifier(f"new{rng.randrange(1 << 30)}")
            table.columns[name] = rng.choice(self.types)
            return f"alter table {table.name} add column {name} {table.columns[name]} default {self.value(table.columns[name])}"
        if choice == 1:
            del table.columns[column]
            return f"alter table {table.name} drop column {column}"
        if choice == 2:
            name = quote_identifier(f"renamed{rng.randrange(1 << 30)}")
            table.columns[name] = table.columns.pop(column)
            return f"alter table {table.name} rename {column} to {name}"
        if choice == 3:
            table.columns[column] = "text"
            return f"alter table {table.name} alter {column} type text using {column}::text"
        return f"alter table {table.name} replica identity {rng.choice(['full', 'default'])}"


# Values of every built-in type that a column can have, with the special values of the type.
VALUES = {
    "smallint": ["-32768", "0"],
    "integer": ["2147483647"],
    "bigint": ["9007199254740993", "-9223372036854775808"],
    "oid": ["4294967295"],
    "real": ["1.5", "'NaN'", "'Infinity'", "'-Infinity'", "1e-10", "1e30", "-0.0"],
    "double precision": ["0.1", "'NaN'", "'-Infinity'", "1e300", "123456789.123456789"],
    "numeric": ["1.50", "12345678901234567890.123456789", "'NaN'", "'Infinity'", "'-Infinity'", "1e40", "0"],
    "numeric(12,2)": ["1.10", "-0.01"],
    "numeric(5,-2)": ["12300"],
    "numeric(3,5)": ["0.00123"],
    "money": ["'12.34'", "'-1234567.89'"],
    "boolean": ["true", "false"],
    "text": ["''", "'plain'", "E'a\"b\\\\c/d'", "'\u00e4\u00f6\u4e16\u754c\U0001f600'", "repeat('x', 300)"],
    "varchar": ["'v'"],
    "varchar(10)": ["'v'"],
    "char(5)": ["'c'"],
    "bpchar": ["'c  '"],
    '"char"': ["'c'", "'\"'"],
    "name": ["'n'"],
    "bytea": ["'\\x00ff5c22'", "''"],
    "date": ["'2026-11-21'", "'infinity'", "'0044-03-15 BC'"],
    "time": ["'12:34:56.789'", "'24:00'"],
    "time(3)": ["'12:34:56.789'"],
    "timetz": ["'12:34:56+05:30'"],
    "timetz(0)": ["'12:34:56+05:30'"],
    "timestamp": ["'2026-11-21 12:34:56.789'", "'-infinity'", "'0044-03-15 BC'"],
    "timestamp(6)": ["'2026-11-21'"],
    "timestamptz": ["'2026-11-21 12:34:56.789+02'", "'infinity'"],
    "timestamptz(0)": ["'2026-11-21'"],
    "interval": ["'1 year 2 mons -3 days 04:05:06.789'", "'-1 s'"],
    "interval day to second(3)": ["'1 04:05:06.789'"],
    "interval year to month": ["'1-2'"],
    "interval(2)": ["'1.234 s'"],
    "uuid": ["'00000000-0000-0000-0000-0123456789ab'"],
    "json": ['\'{"a": [1, "\\u00e4\\n"]}\''],
    "jsonb": ['\'{"a": [1, "x"]}\''],
    "jsonpath": ["'$.a[*] ? (@ > 1)'"],
    "xml": ["'<a b=\"c\"/>'"],
    "inet": ["'192.168.0.1/24'", "'::1'"],
    "cidr": ["'10.0.0.0/8'"],
    "macaddr": ["'08:00:2b:01:02:03'"],
    "macaddr8": ["'08:00:2b:01:02:03:04:05'"],
    "bit": ["B'1'"],
    "bit(5)": ["B'10101'"],
    "bit varying": ["B'101'"],
    "bit varying(7)": ["B'101'"],
    "point": ["'(1,2)'"],
    "line": ["'{1,2,3}'"],
    "lseg": ["'[(1,2),(3,4)]'"],
    "box": ["'(3,4),(1,2)'"],
    "path": ["'((1,2),(3,4))'"],
    "polygon": ["'((1,2),(3,4),(5,6))'"],
    "circle": ["'<(1,2),3>'"],
    "tsvector": ["$$'a\\b':1 'it''s':2$$"],
    "tsquery": ["$$'a' & !'b'$$"],
    "int4range": ["'[1,5)'", "'empty'"],
    "numrange": ["'(,3.5]'"],
    "tstzrange": ["'[2026-01-01,2026-02-01)'"],
    "int8multirange": ["'{[1,5),[7,9)}'"],
    "tsrange": ["'[2026-01-01,2026-02-01)'"],
    "daterange": ["'[2026-01-01,infinity)'"],
    "int8range": ["'(,5]'"],
    "int4multirange": ["'{[1,5)}'"],
    "nummultirange": ["'{}'"],
    "tsmultirange": ["'{[2026-01-01,2026-02-01)}'"],
    "tstzmultirange": ["'{[2026-01-01,2026-02-01)}'"],
    "datemultirange": ["'{[2026-01-01,2026-02-01)}'"],
    "pg_lsn": ["'16/B374D848'"],
    "txid_snapshot": ["'10:20:10,14,15'"],
    "pg_snapshot": ["'10:20:10,14,15'"],
    "xid": ["'123'"],
    "xid8": ["'12345678901'"],
    "cid": ["'1'"],
    "tid": ["'(1,2)'"],
    "int2vector": ["'1 2'"],
    "oidvector": ["'1 2'"],
    "regclass": ["'pg_class'"],
    "regtype": ["'integer'"],
    "regproc": ["'now'"],
    "regprocedure": ["'lower(text)'"],
    "regoper": ["'pg_catalog.||/'"],
    "regnamespace": ["'public'"],
    "regrole": ["'postgres'"],
    "regconfig": ["'english'"],
    "regdictionary": ["'simple'"],
    "regcollation": ["'\"C\"'"],
    "regoperator": ["'+(integer,integer)'"],
    "refcursor": ["'c'"],
    "aclitem": ["'postgres=r/postgres'"],
    "integer[]": ["'{1,NULL,3}'", "'{{1,2},{3,4}}'", "'[0:1]={1,2}'", "'{}'"],
    "text[]": ['$${a,"b""c","d\\\\e",NULL,"NULL"}$$'.replace('""', '\\"')],
    "varchar(10)[]": ["'{a}'"],
    "numeric(12,2)[]": ["'{1.5}'"],
    "boolean[]": ["'{t,f}'"],
    "bytea[]": ["'{\"\\\\x00\"}'"],
    "timestamptz(3)[]": ["'{2026-11-21}'"],
    "jsonb[]": ["array['{\"a\": 1}'::jsonb]"],
    "bit(3)[]": ["'{101}'"],
    "char(3)[]": ["'{a}'"],
}


def make_tables_of_types(run: Callable[[str], object], key: str = "id int primary key") -> list[str]:
    """Create a table for each type of `VALUES`, with a column ``v`` of this type. Returns the names of the tables."""
    tables = [f"t{number}" for number in range(len(VALUES))]
    for table, type_name in zip(tables, VALUES, strict=True):
        run(f"create table {table} ({key}, v {type_name})")
    return tables


def fill_tables_of_types(run: Callable[[str], object]) -> None:
    """Insert the values of each type, and a NULL, into the table that `make_tables_of_types` created for it."""
    for number, values in enumerate(VALUES.values()):
        rows = ", ".join(f"({row}, {value})" for row, value in enumerate([*values, "null"]))
        run(f"insert into t{number} values {rows}")
