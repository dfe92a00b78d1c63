"""Columnar decoding gives the same values as row-wise decoding, for what a server sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from cdcpipe.pgoutput.columnar import decode_changes
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import Insert, Relation
from support.binary_values import VALUES, Server, is_built_in, texts, values_of
from support.columns import NATURAL, assert_same, lay_out
from support.logical_stream import peek

if TYPE_CHECKING:
    from collections.abc import Sequence

    import postgres


def test_every_type_as_columns(pg: postgres.Cluster) -> None:
    """The server sends the same rows in text and in binary form."""
    with pg.database() as database:
        server = Server(database)
        tables: dict[str, list[str]] = {}
        for name, values in ((name, values_of(server, name)) for name in VALUES):
            if name != "xml" or server.has_xml:
                tables['"char"' if name == "char" else '"bit"' if name == "bit" else name] = values
        tables |= {"numeric(38,0)": ["9" * 38, "-1", "0"], "numeric(38,38)": ["0." + "9" * 38], "numeric(3,0)[]": ["{1,NULL}"]}
        tables |= {
            "numeric(12,2)": ["1.10", "-0.01", "NaN", "9999999999.99", "0"],
            "numeric(7,5)": ["-12.34567", "0.00010", "99.99999"],
        }
        tables |= {"text[]": ['{"a b",NULL}'], "int4[]": ["{{1,2},{3,4}}"], "varchar(3)": ["abc"], "char(5)": ["c"]}
        for number, sql_name in enumerate(tables):
            columns = f"id int, c {sql_name}, plain text, many {sql_name.removesuffix('[]')}[]"
            server.connection.execute(f"create table t{number} ({columns})")
        server.connection.execute('create table "Odd table" (); create publication p for all tables')
        slot = f"columns_{pg.version_num}"
        server.connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        for number, (sql_name, values) in enumerate(tables.items()):
            rows = f"unnest({texts(values)}) with ordinality u(t, n)"
            many, all_of_them = (f"null::{sql_name}",) * 2
            if not sql_name.endswith("[]"):
                many, all_of_them = f"array[t, null]::{sql_name}[]", f"array_agg(t)::{sql_name}[]"
            server.connection.execute(
                f"insert into t{number} select n, t::{sql_name}, t, {many} from {rows}"
                f" union all select 99, null, null, {all_of_them} from {rows}"
            )
        server.connection.execute("create temp table flush ()")
        (until,) = server.query("select pg_current_wal_flush_lsn() - '0/0'")[0]
        options: dict[str, str | None] = {"proto_version": "1", "publication_names": "p"}
        streams = [
            [data for _, data in peek(database.dsn, slot, options | more, int(until or 0))] for more in ({}, {"binary": "true"})
        ]
        server.connection.close()
    text_rows, binary_rows = (rows_by_relation(stream) for stream in streams)
    assert len(text_rows) == len(binary_rows) == len(tables)
    some_binary = 0
    for relation_id, (described, records) in binary_rows.items():
        _, text_records = text_rows[relation_id]
        for mine, theirs, column in zip(
            decode_changes(*lay_out(records), described).columns,
            decode_changes(*lay_out(text_records), described).columns,
            described.columns,
            strict=True,
        ):
            if not is_built_in(column.type_id):
                continue
            some_binary += ord("b") in mine.kind
            assert ord("b") not in theirs.kind
            arrow_types = {pa.string(), NATURAL.get(column.type_id, pa.string())}
            if column.type_id in (1700, 1231) and column.type_modifier >= 4:
                modifier = column.type_modifier - 4
                exact = pa.decimal128(modifier >> 16, modifier & 0x7FF)
                arrow_types.add(exact if column.type_id == 1700 else pa.list_(exact))
            for arrow_type in arrow_types:
                assert_same(mine, theirs, arrow_type)
    assert some_binary > 2 * len(tables)


def rows_by_relation(stream: Sequence[bytes]) -> dict[int, tuple[Relation, list[bytes]]]:
    found: dict[int, tuple[Relation, list[bytes]]] = {}
    for data in stream:
        message = decode(data)
        if isinstance(message, Relation):
            found[message.relation_id] = message, []
        elif isinstance(message, Insert):
            found[message.relation_id][1].append(data)
    return found
