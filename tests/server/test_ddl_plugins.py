"""What the output plugins make of the messages of DDL capture, and that wal2json and test_decoding show them as the server's do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cdcpipe.ddl import script
from cdcpipe.plugins import load
from cdcpipe.plugins.renderer import Renderer
from cdcpipe.subcommands.explain import Explainer
from support.ddl_capture import validator
from support.decoding_records import render, without_empty
from support.logical_stream import Both, both_on
from support.wal2json_records import compare

STATEMENTS = """
    begin; insert into t values (1, 'one'); alter table t add price numeric(10,2) default 1, drop name;
    insert into t values (2, 3); commit;
    create table "Größe" (id int generated always as identity primary key, v varchar(7), n numeric(5,-2), a text[], e bit(3));
    comment on table "Größe" is 'ein "Text"'; drop table "Größe";
"""


@pytest.fixture
def captured(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Both]]:
    """Yield a function: a database with the capture and two slots, in which the statements have run."""
    opened = []

    def make(plugin: str) -> Both:
        context = both_on(request.getfixturevalue("pg15"), plugin)
        opened.append(context)
        both = context.__enter__()
        both.run("create table t (id int primary key, name text)")
        both.run(script.install("cdcpipe", script.Settings()))
        both.begin()
        for statement in STATEMENTS.strip().split(";"):
            both.run(statement)
        return both

    yield make
    for context in opened:
        context.__exit__(None, None, None)


def rendered(both: Both, plugin: str, options: dict[str, str | None]) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    renderer = Renderer(load(plugin, options, both.query), lambda _, record: written.append(json.loads(record)))
    for wal_start, data in both.raw():
        renderer.feed(wal_start, data)
    renderer.close()
    return written


def test_json_has_a_record_for_ddl(captured: Callable[[str], Both]) -> None:
    records = rendered(captured("test_decoding"), "json", {})
    assert [record["op"] for record in records[:6]] == ["insert", "ddl", "ddl", "insert", "commit", "ddl"]
    assert [record["ordinal"] for record in records[:5]] == [0, 1, 2, 3, 4]
    messages = [record["ddl"] for record in records if record["op"] == "ddl"]
    for message in messages:
        validator().validate(message)
    assert [(message["kind"], message["tag"]) for message in messages] == [
        ("drop", "ALTER TABLE"),
        ("command", "ALTER TABLE"),
        ("command", "CREATE TABLE"),
        ("command", "COMMENT"),
        ("drop", "DROP TABLE"),
    ]
    assert messages[-2]["tables"][0]["comment"] == 'ein "Text"'


def test_debezium_has_schema_change_events(captured: Callable[[str], Both]) -> None:
    both = captured("test_decoding")
    database = both.database.name
    records = rendered(both, "debezium", {"include.schema.changes": "true"})
    assert [record.get("op", "ddl") for record in records] == ["c", "ddl", "c", "ddl", "ddl", "ddl"]
    alter, create, comment, drop = [record for record in records if "op" not in record]
    assert list(alter) == ["source", "ts_ms", "databaseName", "schemaName", "ddl", "tableChanges"]
    assert (alter["databaseName"], alter["schemaName"]) == (database, "public")
    assert alter["ddl"].strip() == "alter table t add price numeric(10,2) default 1, drop name"
    assert {**records[0]["source"], "lsn": 0, "sequence": ""} == {**alter["source"], "lsn": 0, "sequence": ""}
    assert alter["tableChanges"] == [
        {
            "type": "ALTER",
            "id": f'"{database}"."public"."t"',
            "table": {
                "defaultCharsetName": None,
                "primaryKeyColumnNames": ["id"],
                "columns": [
                    {
                        "name": "id", "jdbcType": 4, "nativeType": 23, "typeName": "int4", "typeExpression": "integer",
                        "charsetName": None, "length": None, "scale": None, "position": 1, "optional": False,
                        "autoIncremented": False, "generated": False, "comment": None, "defaultValueExpression": None,
                        "enumValues": None,
                    },
                    {
                        "name": "price", "jdbcType": 2, "nativeType": 1700, "typeName": "numeric",
                        "typeExpression": "numeric(10,2)", "charsetName": None, "length": 10, "scale": 2, "position": 2,
                        "optional": True,
                        "autoIncremented": False, "generated": False, "comment": None, "defaultValueExpression": None,
                        "enumValues": None,
                    },
                ],
                "comment": None,
            },
        }
    ]  # fmt: skip
    (created,) = create["tableChanges"]
    assert (created["type"], created["id"]) == ("CREATE", f'"{database}"."public"."Größe"')
    assert [(each["jdbcType"], each["length"], each["scale"]) for each in created["table"]["columns"]] == [
        (4, None, None), (12, 7, None), (2, 5, -2), (2003, None, None), (-7, 3, None),
    ]  # fmt: skip
    assert created["table"]["columns"][0]["autoIncremented"]
    assert comment["tableChanges"][0]["table"]["comment"] == 'ein "Text"'
    assert drop["tableChanges"] == [{"type": "DROP", "id": f'"{database}"."public"."Größe"', "table": None}]


def test_without_the_option_debezium_has_messages(captured: Callable[[str], Both]) -> None:
    records = rendered(captured("test_decoding"), "debezium", {})
    assert [record["op"] for record in records] == ["c", "m", "m", "c", "m", "m", "m"]


@pytest.mark.parametrize(
    "content",
    ['{"version": 1, "kind": "command", "tables": [{}]}', '{"version": 1, "kind": "drop", "tag": "DROP TABLE", "dropped": 7}'],
)
def test_a_message_that_the_capture_has_not_written_ends_no_stream(captured: Callable[[str], Both], content: str) -> None:
    both = captured("test_decoding")
    both.run(f"select pg_logical_emit_message(true, 'cdcpipe.ddl', '{content}')")
    assert rendered(both, "debezium", {"include.schema.changes": "true"})[-1]["op"] == "m"
    assert rendered(both, "json", {})[-2]["ddl"] == json.loads(content)


def test_explain_shows_each_member(captured: Callable[[str], Both]) -> None:
    explainer = Explainer()
    lines = "".join(explainer.explain(0, wal_start, data) for wal_start, data in captured("test_decoding").raw()).splitlines()
    first = lines.index("    content: a message of DDL capture")
    assert lines[first + 1 : first + 3] == ["        version: 1", '        kind: "drop"']
    assert any(line.startswith('            {"oid":') and '"name":"Größe"' in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_wal2json_and_test_decoding_show_what_the_servers_do(captured: Callable[[str], Both]) -> None:
    compare(captured("wal2json"))
    both = captured("test_decoding")
    ours, theirs = (without_empty(records) for records in (render(both, {}, {}), both.theirs({})))
    assert [record for _, record in ours] == [record for _, record in theirs]
    assert sum(b"prefix: cdcpipe.ddl" in record for _, record in ours) == 5
