"""The output plugin json: its records give all of PostgreSQL's values, and conform to the schema."""

from __future__ import annotations

import base64
import json
import math
import re
from decimal import Decimal
from pathlib import Path

import cdcpipe.plugins
from cdcpipe.plugins import load
from cdcpipe.plugins.renderer import Renderer
from support.random_sql import VALUES, fill_tables_of_types, make_tables_of_types

SCHEMA = json.loads((Path(cdcpipe.plugins.__file__).parent / "json.schema.json").read_text())


def check(record):
    """Compare a record with the schema: names, required members, patterns of strings."""
    assert set(record) <= set(SCHEMA["properties"])
    (branch,) = [branch for branch in SCHEMA["oneOf"] if branch["properties"]["op"]["const"] == record["op"]]
    if record["op"] == "message" and not record["transactional"]:
        assert set(record) - {"content", "content_base64"} == {"lsn", "op", "transactional", "prefix"}
    assert set(branch["required"]) <= set(record)
    for name in ("end_lsn", "lsn"):
        if name in record:
            assert re.search(SCHEMA["$defs"]["lsn"]["pattern"], record[name])
    if "commit_time" in record:
        assert re.search(SCHEMA["properties"]["commit_time"]["pattern"], record["commit_time"])
    for row in ("new", "old"):
        for value in record.get(row, {}).values():
            assert value is None or isinstance(value, (str, int, float, bool))


def records(both, raw=None):
    written = []
    renderer = Renderer(load("json", {}, both.query), lambda lsn, record: written.append((lsn, record)))
    for wal_start, data in raw or both.raw():
        renderer.feed(wal_start, data)
    renderer.close()
    parsed = [(lsn, json.loads(record)) for lsn, record in written]
    for _, record in parsed:
        check(record)
    return parsed


def test_nothing_is_lost(both):
    """Every value of every type: as JSON read by Python, it is the value that PostgreSQL prints."""
    for table in make_tables_of_types(both.run):
        both.run(f"alter table {table} replica identity full")
    both.begin()
    fill_tables_of_types(both.run)
    both.run("set extra_float_digits = 3; set timezone = 'UTC'")
    expected = {}
    for number in range(len(VALUES)):
        # Not a cast, which would cut "char" or char(n): what the output function gives.
        for id_, text in both.query(f"select id, v from t{number}"):
            expected[f"t{number}", int(id_)] = text
    seen = {}
    for _, record in records(both):
        if record["op"] == "insert":
            value = record["new"]["v"]
            text = expected[record["table"], record["new"]["id"]]
            seen[record["table"], record["new"]["id"]] = text
            if isinstance(value, bool):
                assert "t" if value else text == "f"
            elif isinstance(value, (int, float)):
                assert Decimal(str(value)) == Decimal(text)
                assert float(text) == value or math.isnan(value)
            else:
                assert value == text
    assert seen == expected


def test_changes_and_positions(both):
    both.run(
        """
        create table t (id int primary key, a text, n bigint, "q""q" text); alter table t alter a set storage external;
        create table f (id int, a text); alter table f replica identity full; alter table f alter a set storage external
        """
    )
    both.begin()
    both.run(
        """
        begin; insert into t values (1, repeat('x', 5000), 9007199254740993, 'say "q"'); update t set n = 2; update t set id = 3;
        delete from t; insert into f values (1, repeat('y', 5000)); update f set id = null; delete from f;
        truncate t, f restart identity; select pg_logical_emit_message(true, 'p', 'text'); commit
        """
    )
    both.run("select pg_logical_emit_message(false, 'q', '\\x00ff'::bytea)")
    both.run("insert into t (id) values (9)")
    written = records(both)
    first = [record for _, record in written if record.get("end_lsn") == written[0][1]["end_lsn"]]
    assert [record["op"] for record in first] == [
        *("insert", "update", "update", "delete", "insert", "update", "delete"),
        *("truncate", "truncate", "message", "commit"),
    ]
    assert [record["ordinal"] for record in first] == list(range(11))
    insert, update, key_update, delete, _, full_update, full_delete, truncate, *_ = first
    assert insert["new"] == {"id": 1, "a": "x" * 5000, "n": "9007199254740993", 'q"q': 'say "q"'}
    assert (update["new"], update["unchanged"]) == ({"id": 1, "n": "2", 'q"q': 'say "q"'}, ["a"])
    assert "old" not in update
    assert (key_update["new"]["id"], key_update["old"], key_update["unchanged"]) == (3, {"id": 1}, ["a"])
    assert (delete["old"], "new" in delete) == ({"id": 3}, False)
    assert (full_update["new"], full_update["unchanged"]) == ({"id": None}, ["a"])
    assert full_update["old"] == {"id": 1, "a": "y" * 5000}
    assert full_delete["old"] == {"id": None, "a": "y" * 5000}
    assert (truncate["cascade"], truncate["restart_identity"]) == (False, True)
    message, second, commit = (record for _, record in written[-3:])
    assert base64.b64decode(message["content_base64"]) == b"\0\xff"
    assert (second["ordinal"], commit["ordinal"], commit["op"]) == (0, 1, "commit")
    high, low = commit["end_lsn"].split("/")
    assert written[-1][0] == int(high, 16) << 32 | int(low, 16)
