"""The rows of changes as the data source reads them: typed, as envelopes, in slices; and damaged rows."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StringType

from cdcpipe.errors import CdcpipeError
from cdcpipe.masks import Masks
from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, Binary, Delete, Insert, LogicalMessage, Truncate, Update
from cdcpipe.pipe.framing import encode_header
from spark_sink.schema.table import SchemaError
from spark_sink.schema.types import merge_columns, typed_schema
from spark_sink.source import envelope, slices
from spark_sink.source.contents import find
from spark_sink.source.datasource import ENVELOPE_SCHEMA, quote_table, relations_in
from spark_sink.source.envelope import EnvelopeReader
from spark_sink.source.slices import Slice
from spark_sink.source.typed import TypedReader
from spark_sink.staging import index as segment_index
from spark_sink.staging.filler import Cut, SealPolicy, SegmentFiller, Write
from spark_sink.staging.log import Segment, StagingError, segment_name
from support.oids import INT4, TEXT
from support.pgoutput_build import build
from support.segments import Log, into, relation, transaction
from support.source_rows import A2, A, B, fill, only, read, typed


def test_a_schema_change_in_the_middle_of_a_segment(log: Log) -> None:
    renamed = relation(11, "z", ("id", INT4), ("u", TEXT))
    log.segment(
        [A, into(A, b"1", b"one"), A, into(A, b"2", b"two"), A2, into(A2, b"3", b"3", b"x"), A, into(A, b"4", b"four")],
        [renamed, into(renamed, b"5", b"five"), relation(99, "a", ("id", TEXT)), into(relation(99, "a"), b"six")],
    )
    rows = typed(log.root)
    assert {(r["id"], r["id__string"], r["t"], r["t__int"], r["u"]) for r in rows} == {
        (1, None, "one", None, None),
        (2, None, "two", None, None),
        (3, None, None, 3, "x"),
        (4, None, "four", None, None),
        (None, "six", None, None, None),
    }
    assert only(typed(log.root, "public.z"), "id", "u") == [(5, "five")]
    assert Counter((r.namespace, r.name) for r in relations_in(log.root)) == {("public", "a"): 3, ("public", "z"): 1}


def test_a_schema_that_the_user_gives(log: Log) -> None:
    log.segment([A, into(A, b"1", b"one"), A2, into(A2, b"2", b"3", b"x")])
    columns = merge_columns(None, [A, A2]).add("more", StringType())
    rows, _ = read(log.root, typed_schema(columns), table="public.a")
    assert only(rows, "id", "t", "t__int", "u", "more") == [(1, "one", None, None, None), (2, None, 3, "x", None)]
    with pytest.raises(SchemaError, match="has a column 't' of Spark type int"):
        read(log.root, typed_schema(merge_columns(None, [A])), table="public.a")
    bare, _ = read(log.root, merge_columns(None, [A, A2]), table="public.a")
    assert bare == [{"id": 1, "t": "one", "t__int": None, "u": None}, {"id": 2, "t": None, "t__int": 3, "u": "x"}]


def test_nothing_is_lost_for_want_of_a_metadata_column(log: Log) -> None:
    log.segment([A, Update(None, 11, None, None, (b"1", UNCHANGED_TOAST)), B, into(B, b"1", b"NaN", None)])
    with pytest.raises(StagingError, match="a TOAST value was not sent, and the schema has no _cdc_unchanged"):
        read(log.root, merge_columns(None, [A]), table="public.a")
    with pytest.raises(StagingError, match="a value does not fit its type, and the schema has no _cdc_exact"):
        read(log.root, merge_columns(None, [B]), table="public.b")


def test_odd_columns(log: Log) -> None:
    none = relation(1, "none")
    odd = relation(2, "odd.er", ("id", INT4), ("ID", INT4), ("", TEXT), ("_cdc_op", TEXT), ("a.b\n", TEXT))
    log.segment(
        [
            none,
            into(none),
            odd,
            into(odd, b"1", b"2", b"", b"op", b"ab"),
            Update(None, 2, None, None, (b"1", b"2", *[UNCHANGED_TOAST] * 3)),
        ]
    )
    assert only(typed(log.root, "public.none"), "_cdc_op", "_cdc_exact") == [("insert", {})]
    rows = typed(log.root, quote_table("public", "odd.er"))
    assert list(rows[0])[:6] == ["id", "_cdc_column_%49%44", "_cdc_column_", "_cdc_column__cdc_op", "a.b\n", "_cdc_op"]
    assert list(rows[0].values())[:6] == [1, 2, "", "op", "ab", "insert"]
    assert rows[1]["_cdc_unchanged"] == ["_cdc_column_", "_cdc_column__cdc_op", "a.b\n"]
    envelope, _ = read(log.root)
    assert envelope[1]["new"] == {"id": "1", "ID": "2", "": "", "_cdc_op": "op", "a.b\n": "ab"}
    assert envelope[2]["_cdc_unchanged"] == ["", "_cdc_op", "a.b\n"]


def test_unchanged_values_are_filled_in_from_the_old_row_or_key(log: Log) -> None:
    log.segment(
        [
            A,
            Update(None, 11, None, (b"1", b"big"), (b"2", UNCHANGED_TOAST)),
            Update(None, 11, (b"1", None), None, (b"2", UNCHANGED_TOAST)),
            # A key that is TOASTed: the server sends it as the old one with every update.
            Update(None, 11, (b"3", None), None, (UNCHANGED_TOAST, UNCHANGED_TOAST)),
        ]
    )
    assert only(typed(log.root), "id", "t", "_cdc_unchanged") == [(2, "big", []), (2, None, ["t"]), (3, None, ["t"])]
    envelope, _ = read(log.root)
    assert only(envelope, "new", "_cdc_unchanged") == [({"id": "2", "t": "big"}, []), ({"id": "2"}, ["t"]), ({"id": "3"}, ["t"])]


def test_an_old_key_has_what_the_server_sent(log: Log) -> None:
    """Published via its root, a partition with REPLICA IDENTITY FULL sends the whole row as its key. The flags are the root's."""
    log.segment(
        [A, Delete(None, 11, (b"1", b"big"), None), Delete(None, 11, (b"2", None), None), Delete(None, 11, (None, b"x"), None)]
    )
    assert only(read(log.root)[0], "old") == [({"id": "1", "t": "big"},), ({"id": "2"},), ({"t": "x"},)]
    assert only(typed(log.root), "id", "t") == [(1, "big"), (2, None), (None, "x")]


@pytest.mark.parametrize(("kind", "expected"), [("null", [[]]), ("redact", [["t"]]), ("off", [["t"]])])
def test_a_column_that_is_null_for_everybody_is_not_marked(log: Log, kind: str, expected: list[list[str]]) -> None:
    """With this mask the value is NULL whether it is sent or not."""
    path = log.segment([A, Update(None, 11, None, None, (b"1", UNCHANGED_TOAST))]).path
    reader = TypedReader(
        Slice(str(path), 1, 0, log.end_lsn),
        {("public", "a"): None},
        typed_schema(merge_columns(None, [A])),
        masks=Masks.of({"public.a.t": kind}),
    )
    [batch] = reader.read()
    assert batch.column("t").to_pylist() == [None]
    assert batch.column("_cdc_unchanged").to_pylist() == expected


def test_messages_and_other_tables_do_not_count(log: Log) -> None:
    log.segment([A, LogicalMessage(None, 1, 5, "p", b"x"), B, into(A, b"1", None), Truncate(None, 0, (12,))])
    assert only(typed(log.root), "_cdc_op", "_cdc_ordinal") == [("insert", 0)]
    assert only(typed(log.root, "public.b"), "_cdc_op", "_cdc_ordinal") == [("truncate", 1)]


@pytest.mark.parametrize("identity", ["f", "d"])
def test_a_description_that_the_server_sends_again(log: Log, identity: str) -> None:
    """It is a new use, because the table may have changed. The launcher's repetition, one in each segment, is none."""
    described, row = relation(11, "a", ("id", INT4), identity=identity), Insert(None, 11, (b"1",))
    groups = [[described, row, row], [described, row, row], [row], [described, row]]
    ends = [log.end_lsn + 0x100 * (number + 1) for number in range(len(groups))]
    stream = b"".join(
        encode_header(0 if message is described else 0x1000, len(record)) + record
        for end, group in zip(ends, groups, strict=True)
        for message in transaction(end, group)
        for record in [build(message)]
    )
    filler, segments, data = SegmentFiller(log.end_lsn, SealPolicy(1, 1e9)), [], b""
    for at in range(0, len(stream), 50):
        for operation in filler.feed(stream[at : at + 50], 0):
            if isinstance(operation, Write):
                data += operation.data
            elif isinstance(operation, Cut):
                path = log.root / "000001" / segment_name(operation.start_lsn, operation.end_lsn)
                path.write_bytes(data)
                segments.append(Segment(1, operation.start_lsn, operation.end_lsn, path))
                data = b""
    assert len(segments) == len(groups)
    (found,) = find(segments).by_table().values()
    rows = [(end, ordinal) for end, group in zip(ends, groups, strict=True) for ordinal in range(len(group) - (described in group))]
    assert [(rows.index((use.end_lsn, use.ordinal)), use.is_repeated) for use in found.uses] == [(0, False), (2, False), (5, False)]
    (alone,) = find(segments[2:3]).by_table().values()
    assert alone.uses[0].is_repeated


@pytest.mark.parametrize("slice_bytes", [30, 1000])
def test_slices_together_are_the_segment(log: Log, slice_bytes: int) -> None:
    fill(log)
    log.segment(*([into(A, b"%d" % n, b"x"), A2, into(A2, b"%d" % n, b"1", None), A] for n in range(10)), before=[A])
    for options in ({}, {"table": "public.a"}, {"view": "messages"}):
        whole, parts = read(log.root, **options)
        sliced, more = read(log.root, max_partition_bytes=str(slice_bytes), **options)
        assert len(more) > len(parts) == 1  # four small segments, one task

        def key(row: dict[str, Any]) -> tuple[int, int, int]:
            return row["_cdc_end_lsn"], row["_cdc_ordinal"], row.get("_cdc_lsn", 0)

        assert sorted(sliced, key=key) == sorted(whole, key=key)


SHAPES = {
    11: [
        relation(11, "a", ("id", TEXT), ("t", TEXT)),
        relation(11, "a", ("t", TEXT)),
        relation(11, "b", ("id", TEXT), ("u", TEXT)),
    ],
    12: [relation(12, "b", ("id", TEXT)), relation(12, "a", ("u", TEXT), ("t", TEXT))],
}


@st.composite
def logs(draw: st.DrawFn) -> list[list[list[Any]]]:
    """A strategy for segments with changes of two relations whose names and columns change."""
    segments: list[list[list[Any]]] = []
    for _ in range(draw(st.integers(1, 3))):
        in_force: dict[int, Any] = {}
        transactions: list[list[Any]] = []
        for _ in range(draw(st.integers(1, 4))):
            messages: list[Any] = []
            for _ in range(draw(st.integers(0, 5))):
                relation_id = draw(st.sampled_from([11, 12]))
                if relation_id not in in_force or draw(st.integers(0, 3)) == 0:
                    in_force[relation_id] = draw(st.sampled_from(SHAPES[relation_id]))
                    messages.append(in_force[relation_id])
                columns = in_force[relation_id].columns
                value = st.sampled_from([None, b"", b"x", UNCHANGED_TOAST])
                row = st.tuples(*[value] * len(columns))
                key = st.tuples(*[st.sampled_from([b"1", b"2"]), *[st.none()] * (len(columns) - 1)])
                messages.append(
                    draw(
                        st.one_of(
                            st.builds(Insert, st.none(), st.just(relation_id), row),
                            st.builds(Update, st.none(), st.just(relation_id), st.none() | key, st.none(), row),
                            st.builds(Update, st.none(), st.just(relation_id), st.none(), row, row),
                            st.builds(Delete, st.none(), st.just(relation_id), key, st.none()),
                            st.just(Truncate(None, 0, tuple(in_force))),
                        )
                    )
                )
            transactions.append(messages)
        segments.append(transactions)
    return segments


@settings(max_examples=40)
@given(logs(), st.data())
def test_typed_rows_say_what_the_envelope_says(segments: list[list[list[Any]]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        log = Log(Path(directory))
        for transactions in segments:
            log.segment(*transactions)
        places = st.integers(0, (log.end_lsn - 0x1000) // 0x100).map(lambda n: f"1:0/{0x1000 + n * 0x100:X}")
        options = {name: value for name in ("start", "end") if (value := data.draw(st.none() | places, label=name)) is not None} | {
            "max_partition_bytes": data.draw(st.sampled_from(["100", "100000"]))
        }
        found: list[tuple[Any, ...]] = []
        tables = relations_in(log.root)
        for table in {(relation.namespace, relation.name) for relation in tables}:
            versions = [relation for relation in tables if (relation.namespace, relation.name) == table]
            schema = typed_schema(merge_columns(None, versions))
            for row in read(log.root, schema, table=quote_table(*table), **options)[0]:
                place = row["_cdc_end_lsn"], row["_cdc_ordinal"]
                values = {name: row[name] for name in merge_columns(None, versions).names if row[name] is not None}
                old = {name: value for name, value in (row["_cdc_old"] or {}).items() if value is not None}
                found.append((*place, row["_cdc_op"], *table, values, old, row["_cdc_unchanged"]))
        expected = []
        for row in read(log.root, **options)[0]:
            new = row["old"] if row["_cdc_op"] == "delete" else row["new"]
            new, old = ({name: value for name, value in (some or {}).items() if value is not None} for some in (new, row["old"]))
            place = row["_cdc_end_lsn"], row["_cdc_ordinal"]
            expected.append((*place, row["_cdc_op"], row["table_schema"], row["table_name"], new, old, row["_cdc_unchanged"]))
        assert sorted(found, key=lambda r: r[:5]) == sorted(expected, key=lambda r: r[:5])


def test_batches_are_bounded(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:

    path = log.segment([A, *(into(A, b"%d" % n, b"x" * 50) for n in range(100))]).path
    piece = Slice(str(path), 1, 0, log.end_lsn)
    schema = typed_schema(merge_columns(None, [A]))

    def sizes() -> list[int]:
        batches = list(TypedReader(piece, {("public", "a"): None}, schema).read())
        assert [value for batch in batches for value in batch.column("id").to_pylist()] == list(range(100))
        return [batch.num_rows for batch in batches]

    assert sizes() == [100]
    monkeypatch.setattr(slices, "BATCH_ROWS", 33)
    assert sizes() == [33, 33, 33, 1]
    monkeypatch.setattr(slices, "BATCH_BYTES", 690)
    assert max(sizes()) == 10
    monkeypatch.setattr(slices, "BATCH_SPAN_BYTES", 200)
    assert max(sizes()) == 3
    monkeypatch.setattr(slices, "BATCH_BYTES", 1)
    assert sizes() == [1] * 100
    monkeypatch.setattr(envelope, "ENVELOPE_ROWS", 40)
    assert [batch.num_rows for batch in EnvelopeReader(piece, ENVELOPE_SCHEMA).read()] == [40, 40, 20]


def test_a_damaged_row_is_named(log: Log) -> None:
    damaged = build(into(A, b"1", b"one"))[:-1]
    path = log.segment([A, damaged]).path
    for options in ({}, {"table": "public.a"}):
        with pytest.raises(StagingError, match=f"{path} is corrupt.* at byte"):
            read(log.root, **options)
    path.unlink()
    log.end_lsn = 0x1000
    path = log.segment([A, into(A, b"1", b"\xe9")]).path
    for options in ({}, {"table": "public.a"}):
        with pytest.raises(
            StagingError,
            match=f"{path} is corrupt.*column 't'.* at byte .*not UTF-8|{path} is corrupt at byte .*column 't' is not UTF-8",
        ):
            read(log.root, **options)


def test_values_in_binary_form(log: Log) -> None:
    log.segment([A, into(A, Binary(b"\0\0\0\7"), Binary(b"one"))])
    (row,), _ = read(log.root, table="public.a")
    assert (row["id"], row["t"]) == (7, "one")
    (row,), _ = read(log.root)
    assert dict(row["new"]) == {"id": "7", "t": "one"}


def test_a_binary_value_of_a_users_type_is_refused_by_name(log: Log) -> None:
    users = relation(11, "a", ("id", INT4), ("t", 16400))
    log.segment([users, into(users, b"1", Binary(b"one"))])
    for options in ({}, {"table": "public.a"}):
        with pytest.raises(CdcpipeError, match=r"column 't' of table 'public\.a' came in binary form"):
            read(log.root, **options)


def test_an_index_of_other_content_does_no_harm(log: Log) -> None:
    """A user has moved files: the size is the same, the name is not."""
    one = log.segment([A, into(A, b"1", b"one"), into(A, b"22", b"two")]).path
    two = log.segment([A, into(A, b"11", b"one"), into(A, b"2", b"two")]).path
    assert one.stat().st_size == two.stat().st_size
    segment_index.build(one)
    one.with_suffix(".idx").replace(two.with_suffix(".idx"))
    assert only(typed(log.root, start="1:0/1100"), "id", "t") == [(11, "one"), (2, "two")]
