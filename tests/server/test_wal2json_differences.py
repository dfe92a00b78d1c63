"""Where our wal2json differs from the real plugin: a test for each number of the list in docs/output-plugins.md."""

from __future__ import annotations

import itertools
import json

import pytest

from cdcpipe.errors import CdcpipeError
from support.logical_stream import Both
from support.wal2json_records import V1, V2, render, transactions, without_empty


def test_difference_1_empty_transactions(both):
    both.run("create table t (id int primary key)")
    both.begin()
    both.run("create table u (id int)")
    assert {record for _, record in both.theirs(V2)} == {b'{"action":"B"}', b'{"action":"C"}'}
    assert render(V2, both.raw(), both.query) == []


def test_difference_2_header_of_the_first_record(both):
    both.run("create table t (id int primary key)")
    both.begin()
    both.run("begin; create table u (id int primary key); insert into u values (1); commit")
    (theirs,), (ours,) = without_empty(both.theirs(V2), V2), transactions(render(V2, both.raw(), both.query), V2)
    assert [record for _, record in theirs] == [record for _, record in ours]
    assert theirs[0][0] < ours[0][0] == ours[1][0]
    assert theirs[1:] == ours[1:]


def test_difference_3_our_json_is_valid(both):
    both.run(
        """
        create schema "My Schema"; create type "My Schema".mood as enum ('x'); create type "a""b" as enum ('x');
        create table t (id int primary key, m "My Schema".mood, d text default 'say "hi"' || E'\\\\', q "a""b");
        """
    )
    both.begin()
    both.run("insert into t values (1, 'x')")
    both.run("begin; insert into t values (2); insert into t values (3); commit")
    both.run("select pg_logical_emit_message(false, 'p', 'x')")
    for version in (V1, V2):
        options = version | {"include-default": "1"}
        raw = both.raw()
        their_groups = without_empty(both.theirs(options), options)
        our_groups = without_empty(render(options, raw, both.query), options)
        for (_, theirs), (_, ours) in zip(itertools.chain(*their_groups), itertools.chain(*our_groups), strict=True):
            parsed = json.loads(ours)
            if theirs != ours:
                with pytest.raises(json.JSONDecodeError):
                    json.loads(theirs)
            if version is V2 and parsed["action"] == "I":
                assert [column["type"] for column in parsed["columns"][1:]] == ['"My Schema".mood', "text", '"a""b"']
                assert parsed["columns"][2]["default"] == """('say "hi"'::text || '\\'::text)"""
    # Version 1: a comma that belongs to the transaction before.
    assert without_empty(both.theirs(V1), V1)[-1][0][1].startswith(b'{"change":[,{')
    assert json.loads(render(V1, both.raw(), both.query)[-1][1])["change"][0]["kind"] == "message"


def test_difference_4_the_catalog_is_of_today(both):
    both.run("create table t (id int primary key, v text default 'then', gone int not null)")
    both.begin()
    both.run("insert into t values (1, 'x', 1)")
    both.run("alter table t alter v set default 'now'; alter table t drop column gone")
    options = V2 | {"include-default": "1", "include-not-null": "1", "include-column-positions": "1"}
    _, change, _ = (json.loads(record) for _, record in render(options, both.raw(), both.query))
    assert change["columns"] == [
        {"name": "id", "type": "integer", "value": 1, "optional": False, "position": 1, "default": None},
        {"name": "v", "type": "text", "value": "x", "optional": True, "position": 2, "default": "'now'::text"},
        {"name": "gone", "type": "integer", "value": 1, "optional": True, "position": 3, "default": None},
    ]


def test_difference_4_types_that_are_gone(both):
    both.run("create schema w; create type w.mood as enum ('x'); create table t (id int primary key, m w.mood)")
    both.begin()
    both.run("insert into t values (1, 'x')")
    both.run("drop type w.mood cascade")
    assert json.loads(render(V2, both.raw(), both.query)[1][1])["columns"][1]["type"] == "w.mood"


def test_difference_5_what_is_not_published(pg15):
    with pg15.database() as database:
        both = Both(database, "wal2json", "for table t (id, v) where (id > 1), table p")
        both.run(
            """
            create table t (id int primary key, v int, w int); create table other (id int primary key);
            create table g (id int primary key, g int generated always as (id * 2) stored);
            create table p (id int primary key) partition by list (id); create table p1 partition of p for values in (1)
            """
        )
        both.begin()
        both.run("alter publication p add table g")
        both.run("insert into t values (1, 1, 1), (2, 2, 2); insert into other values (1); insert into g values (1)")
        both.run("truncate p")
        ours = [record for _, record in render(V2 | {"include-types": "0"}, both.raw(), both.query)]
        assert [record for record in ours if b'"action":"I"' in record] == [
            b'{"action":"I","schema":"public","table":"t","columns":[{"name":"id","value":2},{"name":"v","value":2}]}',
            b'{"action":"I","schema":"public","table":"g","columns":[{"name":"id","value":1}]}',
        ]
        assert [record for record in ours if b'"action":"T"' in record] == [b'{"action":"T","schema":"public","table":"p1"}']
        theirs = [record for _, record in both.theirs(V2 | {"include-types": "0"})]
        assert sum(b'"action":"I"' in record for record in theirs) == 4
        assert sum(b'"action":"T"' in record for record in theirs) == 2
        both.connection.close()


def test_difference_5_old_rows_of_a_partition_with_another_identity_than_its_root(pg15):
    with pg15.database() as database:
        both = Both(database, "wal2json", "for all tables with (publish_via_partition_root)")
        both.run(
            """
            create table p (id int, n int, v int) partition by list (n); alter table p replica identity full;
            create table p1 partition of p (primary key (id)) for values in (1);
            create table q (id int, n int, v int, primary key (id, n)) partition by list (n);
            create table q1 partition of q for values in (1); alter table q1 replica identity full
            """
        )
        both.begin()
        both.run("insert into p values (1, 1, 1); insert into q values (1, 1, null); delete from p; delete from q")
        theirs, ours = (
            [
                {each["name"]: each["value"] for each in json.loads(record)["identity"]}
                for _, record in records
                if b'"action":"D"' in record
            ]
            for records in (both.theirs(V2), render(V2, both.raw(), both.query))
        )
        assert theirs == [{"id": 1}, {"id": 1, "n": 1, "v": None}]
        assert ours == [{"id": 1, "n": None, "v": None}, {"id": 1, "n": 1}]
        both.connection.close()


def test_difference_4_an_origin_that_is_gone(both):
    both.run("create table t (id int primary key)")
    both.run("select pg_replication_origin_create('gone')")
    both.begin()
    both.run(
        """
        select pg_replication_origin_session_setup('gone'); begin; insert into t values (1); commit;
        select pg_replication_origin_session_reset();
        """
    )
    raw = both.raw()
    both.run("select pg_replication_origin_drop('gone')")
    with pytest.raises(CdcpipeError, match="origin 'gone' is no longer"):
        render(V2 | {"include-origin": "1"}, raw, both.query)
    assert len(render(V2, raw, both.query)) == 3


def test_difference_6_messages_outside_of_transactions_have_no_origin(both):
    both.run("create table t (id int primary key); select pg_replication_origin_create('there')")
    both.begin()
    both.run(
        """
        select pg_replication_origin_session_setup('there');
        begin; insert into t values (1); select pg_logical_emit_message(true, 'p', 'held back');
        select pg_logical_emit_message(false, 'p', 'not held back'); commit;
        select pg_replication_origin_session_reset()
        """
    )
    options = V2 | {"filter-origins": both.query("select roident from pg_replication_origin where roname = 'there'")[0][0]}
    assert not without_empty(both.theirs(options), options)
    (record,) = render(options, both.raw(), both.query)
    assert json.loads(record[1])["content"] == "not held back"
    both.run("select pg_replication_origin_drop('there')")
