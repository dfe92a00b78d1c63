"""The output plugin API and the compiled rows: a handler writes what decoder and template give, or refuses."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError, OutputError, ProtocolError
from cdcpipe.pgoutput.messages import (
    UNCHANGED_TOAST,
    Begin,
    BeginPrepare,
    Column,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)
from cdcpipe.plugins import failure_of_others, held, load, names, text
from cdcpipe.plugins.base import OutputPlugin
from cdcpipe.plugins.json_lines import JsonLines
from cdcpipe.plugins.renderer import Renderer
from cdcpipe.plugins.wal2json.version1 import Wal2Json1
from cdcpipe.plugins.wal2json.version2 import Wal2Json2
from support import pgoutput_build
from support.recorder import Recorder, nothing

build = pgoutput_build.build
T = Relation(None, 16385, "public", "t", "d", (Column(1, "id", 23, -1), Column(0, "v", 25, -1)))
BEGIN = Begin(100, 5, 7)
COMMIT = Commit(0, 100, 200, 5)
ROW = Insert(None, 16385, (b"1", b"x"))


def feed(plugin, *messages, **kwargs):
    records = []
    renderer = Renderer(plugin, lambda lsn, record: records.append((lsn, record)), **kwargs)
    for lsn, message in enumerate(messages, 1):
        renderer.feed(lsn, message if isinstance(message, bytes) else build(message))
    renderer.close()
    return records


def calls(*messages, **kwargs):
    plugin = Recorder()
    feed(plugin, *messages, **kwargs)
    return [call[0] for call in plugin.calls]


class TestOrderOfCalls:
    def test_transaction(self):
        message = LogicalMessage(None, 1, 5, "p", b"x")
        assert calls(BEGIN, T, ROW, message, Truncate(None, 0, (16385,)), COMMIT) == [
            "begin",
            "change",
            "message",
            "truncate",
            "commit",
            "shutdown",
        ]

    def test_message_outside_transactions(self):
        plugin = Recorder()
        feed(plugin, LogicalMessage(None, 0, 5, "p", b"x"), BEGIN, COMMIT)
        assert plugin.calls[0][:2] == ("message", None)
        assert [call[0] for call in plugin.calls[1:]] == ["begin", "commit", "shutdown"]

    def test_the_facts_about_a_transaction(self):
        plugin = Recorder()
        feed(plugin, BEGIN, Origin(9, "o"), T, ROW, COMMIT)
        _, begin, change, commit, _ = plugin.calls
        txn = begin[1]
        assert (txn.xid, txn.first_lsn, txn.final_lsn, txn.end_lsn, txn.commit_time_us) == (7, 1, 100, 200, 5)
        assert txn.origin == Origin(9, "o")
        assert change[1] is commit[1] is txn
        assert change[2:] == (T, ROW, 4)
        assert commit[2:] == (100, 5)

    def test_the_position_of_begin_with_an_origin_is_the_origins(self):
        plugin = Recorder()
        renderer = Renderer(plugin, nothing)
        for lsn, message in ((0, BEGIN), (77, Origin(9, "o")), (200, COMMIT)):
            renderer.feed(lsn, build(message))
        assert plugin.calls[1][1].first_lsn == 77

    def test_filtered_origin(self):
        assert calls(
            BEGIN, Origin(9, "unwanted"), T, ROW, Truncate(None, 0, (16385,)), COMMIT, BEGIN, Origin(9, "o"), ROW, COMMIT
        ) == ["filter_by_origin", "filter_by_origin", "begin", "change", "commit", "shutdown"]

    def test_two_phase(self):
        assert calls(
            BeginPrepare(1, 2, 3, 7, "g"),
            T,
            ROW,
            Prepare(0, 1, 2, 3, 7, "g"),
            CommitPrepared(0, 1, 2, 3, 7, "g"),
            RollbackPrepared(0, 1, 2, 3, 4, 7, "g"),
        ) == ["begin_prepare", "change", "prepare", "commit_prepared", "rollback_prepared", "shutdown"]

    def test_streaming(self):
        xid = 7
        assert calls(
            StreamStart(xid, True),
            Relation(xid, 16385, "public", "t", "d", T.columns),
            Insert(xid, 16385, (b"1", b"x")),
            Truncate(xid, 0, (16385,)),
            LogicalMessage(xid, 1, 5, "p", b"x"),
            StreamStop(),
            BEGIN,
            ROW,
            COMMIT,
            StreamAbort(xid, 8, None, None),
            StreamCommit(xid, 0, 1, 2, 3),
            StreamPrepare(0, 1, 2, 3, xid, "g"),
        ) == [
            "stream_start",
            "stream_change",
            "stream_truncate",
            "stream_message",
            "stream_stop",
            "begin",
            "change",
            "commit",
            "stream_abort",
            "stream_commit",
            "stream_prepare",
            "shutdown",
        ]

    def test_filtered_origin_of_transactions_in_progress(self):
        """Only the first block tells their origin. Their end does not."""
        change = Insert(8, 16385, (b"1", b"x"))
        assert calls(
            *(BEGIN, T, COMMIT, StreamStart(7, True), Origin(9, "unwanted"), change, StreamStop()),
            *(
                StreamStart(6, True),
                Origin(9, "o"),
                change,
                StreamStop(),
                StreamAbort(7, 8, None, None),
                StreamAbort(6, 8, None, None),
            ),
            *(StreamStart(7, False), change, Truncate(7, 0, (16385,)), LogicalMessage(7, 1, 5, "p", b"x"), StreamStop()),
            *(StreamCommit(7, 0, 1, 2, 3), StreamCommit(6, 0, 1, 2, 3)),
            *(StreamStart(7, True), Origin(9, "unwanted"), StreamStop(), StreamAbort(7, 7, None, None)),
            *(StreamStart(7, True), StreamStop(), StreamAbort(7, 7, None, None)),
            *(StreamStart(7, True), Origin(9, "unwanted"), StreamStop(), StreamPrepare(0, 1, 2, 3, 7, "g")),
            CommitPrepared(0, 1, 2, 3, 7, "g"),
        ) == [
            *("begin", "commit", "filter_by_origin", "filter_by_origin", "stream_start", "stream_change", "stream_stop"),
            *("stream_abort", "stream_commit", "filter_by_origin", "stream_start", "stream_stop", "stream_abort"),
            *("filter_by_origin", "shutdown"),
        ]

    def test_filtered_origin_of_prepared_transactions(self):
        prepared = (BeginPrepare(1, 2, 3, 7, "g"), Origin(9, "unwanted"), T, ROW, Prepare(0, 1, 2, 3, 7, "g"))
        assert calls(*prepared, CommitPrepared(0, 1, 2, 3, 7, "g"), *prepared, RollbackPrepared(0, 1, 2, 3, 4, 7, "g")) == [
            "filter_by_origin",
            "filter_by_origin",
            "shutdown",
        ]

    def test_the_origin_of_a_transaction_in_progress(self):
        plugin = Recorder()
        renderer = Renderer(plugin, nothing)
        messages = [(0, StreamStart(7, True)), (70, Origin(9, "o")), (80, StreamStop()), (90, StreamStart(7, False))]
        for lsn, message in [*messages, (95, StreamStop()), (200, StreamCommit(7, 0, 100, 200, 3))]:
            renderer.feed(lsn, build(message))
        starts = [call for call in plugin.calls if call[0] == "stream_start"]
        assert [(txn.origin, lsn) for _, txn, lsn in starts] == [(Origin(9, "o"), 70), (Origin(9, "o"), 90)]
        assert plugin.calls[-1][1].origin == Origin(9, "o")

    @pytest.mark.parametrize(
        ("messages", "what"),
        [
            ([ROW], "relation 16385 was never described"),
            ([T, ROW], "Insert message outside a transaction"),
            ([COMMIT], "Commit message outside a transaction"),
            ([BEGIN, BEGIN], "Begin message inside a transaction"),
            ([BEGIN, T, ROW, COMMIT, ROW], "Insert message outside a transaction"),
            ([Origin(1, "o")], "Origin message not after Begin"),
            ([BEGIN, T, ROW, Origin(1, "o")], "Origin message not after Begin"),
            ([LogicalMessage(None, 1, 1, "p", b"")], "LogicalMessage message outside a transaction"),
            ([BEGIN, StreamStart(7, True)], "StreamStart message inside a transaction"),
            ([StreamStop()], "StreamStop message outside a stream block"),
            ([StreamStart(7, True), BEGIN], "Begin message inside a stream block"),
            ([StreamStart(7, True), T, Origin(1, "o")], "Origin message not after StreamStart"),
            ([BEGIN, T, Insert(None, 16385, (b"1",))], r"public\.t\) has 1 values, the relation 2 columns"),
            ([BEGIN, Truncate(None, 0, (4711,))], "relation 4711 was never described"),
        ],
    )
    def test_out_of_place(self, messages, what):
        with pytest.raises(ProtocolError, match=what):
            calls(*messages)


def test_a_plugin_without_stream_callbacks_says_so():
    with pytest.raises(InvalidArgumentsError, match="wal2json can't render transactions in progress"):
        feed(load("wal2json", {}, nothing), StreamStart(7, True), StreamStop())
    with pytest.raises(InvalidArgumentsError, match="wal2json can't render prepared transactions"):
        feed(load("wal2json", {}, nothing), BeginPrepare(1, 2, 3, 7, "g"), T, ROW)


def test_names():
    assert "wal2json" in names()
    with pytest.raises(InvalidArgumentsError, match="no output plugin 'nonsense'") as caught:
        load("nonsense", {}, nothing)
    assert "wal2json" in (caught.value.hint or "")


@pytest.fixture
def register(monkeypatch):
    """Return a function that registers ``MODULE:NAME`` as the output plugin ``theirs``, as an installed package does."""

    def register(value):
        point = importlib.metadata.EntryPoint("theirs", value, "cdcpipe.output_plugins")
        monkeypatch.setattr(
            "cdcpipe.plugins.entry_points",
            lambda *, group, name="theirs": [point] if (group, name) == ("cdcpipe.output_plugins", "theirs") else [],
        )

    return register


def test_plugins_of_others_are_found(register):
    register("support.recorder:Recorder")
    plugin = load("theirs", {"a": "b"}, nothing)
    assert plugin.options == {"a": "b"}
    assert "theirs" in names()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("nonsense_of_theirs:Plugin", "'theirs' cannot be loaded: ModuleNotFoundError: No module named 'nonsense_of_theirs'"),
        ("support.recorder:Nonsense", "'theirs' cannot be loaded: AttributeError"),
        ("support.recorder:nothing", "'theirs' cannot be loaded: TypeError"),
        ("collections:ChainMap", "'theirs' cannot be loaded: collections:ChainMap is no subclass of .*OutputPlugin"),
    ],
)
def test_a_plugin_of_others_that_cannot_be_loaded(register, value, says):
    register(value)
    with pytest.raises(InvalidArgumentsError, match=says):
        load("theirs", {}, nothing)


class Broken(OutputPlugin):
    name = "broken"

    def change(self, txn, relation, change, lsn):
        int(change.new[1])


def test_the_error_of_a_plugin_of_others_is_not_a_defect_of_cdcpipe():
    with pytest.raises(ValueError, match="secret") as caught:
        feed(Broken({}, nothing), BEGIN, T, Insert(None, 16385, (b"1", b"secret")))
    says = failure_of_others(caught.value)
    assert says is not None
    assert "the output plugin 'broken' failed: ValueError in line " in says
    assert says.endswith(__file__)
    assert "secret" not in says


def test_the_error_of_a_plugin_of_cdcpipe_is_one():
    with pytest.raises(CdcpipeError) as caught:
        feed(load("wal2json", {}, nothing), StreamStart(7, True), StreamStop())
    assert failure_of_others(caught.value) is None
    assert failure_of_others(ValueError()) is None


TYPES = [23, 25, 1700, 16, 17, 1184, 701, 1043, 20, 114]
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=300).map(str.encode)
VALUES = {
    16: st.sampled_from([b"t", b"f"]),
    17: st.binary(max_size=200).map(lambda value: b"\\x" + value.hex().encode()),
    20: st.integers(-(1 << 63), (1 << 63) - 1).map(lambda value: b"%d" % value),
    23: st.integers(-(1 << 31), (1 << 31) - 1).map(lambda value: b"%d" % value),
    701: st.floats().map(lambda value: repr(value).replace("inf", "Infinity").replace("nan", "NaN").encode()),
    1700: st.decimals(allow_nan=False, allow_infinity=False).map(lambda value: str(value).encode()) | st.just(b"NaN"),
    1184: st.datetimes(datetime(2000, 1, 1)).map(lambda time: f"{time}+00".encode()),
}
OPTIONS = st.fixed_dictionaries(
    {"format-version": st.sampled_from(["1", "2"])},
    optional={
        "include-xids": st.just("1"),
        "include-lsn": st.just("1"),
        "include-transaction": st.just("0"),
        "pretty-print": st.just("1"),
        "write-in-chunks": st.just("1"),
        "include-types": st.just("0"),
        "include-pk": st.just("1"),
        "include-type-oids": st.just("1"),
        "numeric-data-types-as-string": st.just("1"),
    },
)


@st.composite
def workloads(draw):
    """A relation and changes to it, mostly as a server sends them, sometimes with values missing."""
    types = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=6))
    identity = draw(st.sampled_from("df"))
    flags = [1, *(draw(st.integers(0, 1)) for _ in types[1:])] if identity == "d" else [1] * len(types)
    columns = [Column(flag, f"c{i}", type_, -1) for i, (type_, flag) in enumerate(zip(types, flags, strict=True))]
    relation_id = draw(st.sampled_from([16385, 0x74000000, 0x00747400]))
    relation = Relation(None, relation_id, "public", "t", identity, tuple(columns))

    def row(*, key=False, may_lack=True):
        return tuple(
            None
            if key and not column.is_key
            else draw(
                VALUES.get(column.type_id, TEXT)
                if column.is_key and identity == "d"
                else VALUES.get(column.type_id, TEXT) | st.none() | (st.just(UNCHANGED_TOAST) if may_lack else st.nothing())
            )
            for column in columns
        )

    # The key of a partition may have other columns than that of the root.
    is_partition = draw(st.booleans())

    def partition_key():
        return tuple(draw(VALUES.get(column.type_id, TEXT) | st.none()) for column in columns)

    changes = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from("IUKD"))
        key, full = (None, row(may_lack=False)) if identity == "f" else (partition_key() if is_partition else row(key=True), None)
        if kind == "I":
            changes.append(Insert(None, relation_id, row(may_lack=False)))
        elif kind == "U" and identity == "d":
            changes.append(Update(None, relation_id, None, None, row()))
        elif kind == "D":
            changes.append(Delete(None, relation_id, key, full))
        else:
            changes.append(Update(None, relation_id, key, full, row()))
    return relation, changes


def one_key(sql):
    """Return the catalog's facts about the columns."""
    return [("c0", "1", "t", None, "t")]


def without_handlers(options):
    plugin = load("wal2json", options, one_key)
    describe = plugin.relation

    def relation(relation):
        describe(relation)
        return {}

    plugin.relation = relation
    return plugin


@given(OPTIONS, workloads())
@settings(max_examples=150)
def test_compiled_rows_write_what_the_decoder_gives(options, workload):
    relation, changes = workload
    # Twice: a handler is compiled at the first row, and the one for unusual rows later still.
    messages = [BEGIN, relation, *changes, *changes, COMMIT, BEGIN, *changes, COMMIT]
    ours = feed(load("wal2json", options, one_key), *messages)
    assert ours == feed(without_handlers(options), *messages)
    if "write-in-chunks" not in options:
        for _, record in ours:
            json.loads(record)


@given(
    workloads(),
    st.sampled_from(["1", "2"]),
    st.lists(st.tuples(st.integers(0, 10000), st.integers(0, 255)), max_size=3),
    st.integers(0, 3),
    st.binary(max_size=5),
)
@settings(max_examples=200)
def test_damaged_rows_end_as_protocol_errors_or_as_the_decoder_reads_them(workload, version, damage, cut, tail):
    relation, changes = workload
    data = bytearray(build(changes[0]))
    for pos, value in damage:
        data[pos % len(data)] = value
    data = bytes(data[: len(data) - cut]) + tail
    outcomes = []
    options = {"format-version": version}
    for plugin in (load("wal2json", options, nothing), without_handlers(options)):
        try:
            outcomes.append(feed(plugin, BEGIN, relation, data, COMMIT))
        except CdcpipeError as ex:
            outcomes.append((type(ex), str(ex)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("data", [b"I\0\0\x40\1N\0\2" + rest for rest in (b"", b"t", b"t\0\0\0", b"t\0\0\0\1", b"nn\0")])
def test_rows_cut_short(data):
    with pytest.raises(ProtocolError):
        feed(load("wal2json", {"format-version": "2"}, nothing), BEGIN, T, ROW, data)


TWO = b"t\0\0\0\1a" * 2


@pytest.mark.parametrize(
    "data",
    [
        # Values beside those that were announced, before and after them, and second tuples that are none.
        b"I\0\0\x40\1N\0\2" + b"n" + TWO,
        b"I\0\0\x40\1N\0\2" + b"\0" + TWO,
        b"I\0\0\x40\1N\0\2" + TWO + b"n",
        b"U\0\0\x40\1O\0\2" + TWO + b"K\0\2" + TWO,
        b"U\0\0\x40\1O\0\2" + TWO + b"N\0\1" + TWO,
        b"U\0\0\x40\1O\0\2" + TWO + b"N\0" + TWO,
        b"U\0\0\x40\1O\0\2" + TWO,
    ],
)
@pytest.mark.parametrize("version", ["1", "2"])
def test_rows_of_another_shape(data, version):
    full = Relation(None, 16385, "public", "t", "f", T.columns)
    with pytest.raises(ProtocolError):
        feed(load("wal2json", {"format-version": version}, nothing), BEGIN, full, data)


def test_a_relation_that_changes_within_a_transaction():
    wider = Relation(None, 16385, "public", "renamed", "d", (*T.columns, Column(0, "w", 16, -1)))
    records = feed(
        load("wal2json", {"format-version": "2", "include-types": "0"}, nothing),
        *(BEGIN, T, ROW, ROW, wider, Insert(None, 16385, (b"1", b"x", b"t")), COMMIT),
    )
    assert [json.loads(record).get("table") for _, record in records] == [None, "t", "t", "renamed", None]
    with pytest.raises(ProtocolError, match="has 2 values, the relation 3 columns"):
        feed(load("wal2json", {}, nothing), BEGIN, T, ROW, wider, ROW)


@pytest.mark.parametrize("flags", [(1, 0), (0, 0)])
@pytest.mark.parametrize(
    ("name", "options", "whole", "key"),
    [
        ("json", {}, '"old":{"id":1,"v":"x"}', '"old":{"v":"x"}'),
        ("test_decoding", {}, "DELETE: id[integer]:1 v[text]:'x'", "DELETE: v[text]:'x'"),
        ("debezium", {"database.dbname": "db"}, '"before":{"id":1,"v":"x"}', '"before":{"id":null,"v":"x"}'),
    ],
)
def test_an_old_key_has_what_the_server_sent(name, options, whole, key, flags):
    """With publish_via_partition_root the relation has the flags of the root, and the key is that of the partition."""
    root = replace(T, columns=tuple(replace(column, flags=flag) for column, flag in zip(T.columns, flags, strict=True)))
    deletes = [Delete(None, 16385, row, None) for row in ((b"1", b"x"), (None, b"x"))]
    # Twice: the first row compiles the function that renders the second one.
    records = feed(load(name, options, lambda sql: []), BEGIN, root, *deletes, *deletes, COMMIT)
    found = [record.decode() for _, record in records if b"DELETE" in record or b'"delete"' in record or b'"op":"d"' in record]
    assert [whole in found[0], key in found[1]] == [whole in found[2], key in found[3]] == [True, True]


def test_tables_that_are_not_asked_for_ask_nothing_of_the_catalog():
    options = {"format-version": "2", "filter-tables": "public.t", "include-default": "1"}
    assert len(feed(load("wal2json", options, nothing), BEGIN, T, ROW, ROW, COMMIT)) == 2


def test_held_records_spill(monkeypatch):
    """In version 2 with LSNs the begin waits for the commit. The records after it are kept on disk beyond a limit."""
    options = {"format-version": "2", "include-lsn": "1"}
    rows = [Insert(None, 16385, (b"%d" % number, b"x" * (number % 300))) for number in range(500)]
    expected = feed(load("wal2json", options, nothing), BEGIN, T, *rows, COMMIT)
    assert len(expected) == 502
    monkeypatch.setattr(held, "_HELD_BYTES", 1000)
    plugin = load("wal2json", options, nothing)
    assert isinstance(plugin, Wal2Json2)
    records = []
    renderer = Renderer(plugin, lambda lsn, record: records.append((lsn, record)))
    for lsn, message in enumerate([BEGIN, T, *rows], 1):
        renderer.feed(lsn, build(message))
        assert len(plugin._held._records) <= 17
    assert records == []
    assert plugin._held._spill is not None
    renderer.feed(503, build(COMMIT))
    assert records == expected
    assert plugin._held._spill is None


@pytest.mark.parametrize("options", [{}, {"pretty-print": "1"}])
def test_the_records_of_a_transaction_that_is_one_record_are_joined_on_the_way(monkeypatch, options):
    """In version 1. Thousands of short records alone take several times their size."""
    rows = [Insert(None, 16385, (b"%d" % number, b"x" * (number % 300))) for number in range(500)]
    expected = feed(load("wal2json", options, nothing), BEGIN, T, *rows, COMMIT)
    monkeypatch.setattr(held, "_HELD_BYTES", 1000)
    plugin = load("wal2json", options, nothing)
    assert isinstance(plugin, Wal2Json1)
    records = []
    renderer = Renderer(plugin, lambda lsn, record: records.append((lsn, record)))
    for lsn, message in enumerate([BEGIN, T, *rows], 1):
        renderer.feed(lsn, build(message))
        assert len(plugin._held._records) <= 17
    renderer.feed(503, build(COMMIT))
    assert records == expected
    assert len(json.loads(records[0][1])["change"]) == 500
    assert (plugin._held._records, plugin._held._joined) == ([], [])
    for lsn, message in enumerate([BEGIN, rows[0], COMMIT], 504):
        renderer.feed(lsn, build(message))
    assert len(json.loads(records[1][1])["change"]) == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("json", {}),
        ("wal2json", {"format-version": "2", "include-lsn": "1"}),
        ("wal2json", {"format-version": "1", "write-in-chunks": "1"}),
    ],
)
def test_long_values_take_no_more_memory_than_short_ones(name, options, monkeypatch):
    """A limit for the number of rows alone would let a transaction of large values take gigabytes."""
    monkeypatch.setattr(held, "_HELD_BYTES", 100_000)
    long = [Insert(None, 16385, (b"%d" % number, b"x" * 20_000)) for number in range(50)]
    messages = [message for row in long for message in (row, ROW, ROW)]
    plugin = load(name, options, nothing)
    records = []
    renderer = Renderer(plugin, lambda lsn, record: records.append(record))
    most = 0
    for lsn, message in enumerate([BEGIN, T, *messages], 1):
        renderer.feed(lsn, build(message))
        assert isinstance(plugin, JsonLines | Wal2Json1 | Wal2Json2)
        assert plugin._held is not None
        most = max(most, sum(len(record) for _, record in plugin._held._records))
    assert 20_000 < most < 150_000
    assert records == []
    renderer.feed(999, build(COMMIT))
    assert sum(b"xxxx" in record for record in records) == 50
    assert len(records) > 150


def test_a_full_disk_is_an_error_that_says_where(monkeypatch):
    monkeypatch.setattr(held, "_HELD_BYTES", 10)

    def full(fd: int, data: bytes, pos: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OutputError, match=r"cannot keep .*: No space left on device"):
        feed(load("wal2json", {"format-version": "2", "include-lsn": "1"}, nothing), BEGIN, T, *[ROW] * 100)


def test_a_stream_that_ends_inside_a_transaction_leaves_no_file(monkeypatch):
    monkeypatch.setattr(held, "_HELD_BYTES", 10)
    plugin = load("wal2json", {"format-version": "2", "include-lsn": "1"}, nothing)
    assert isinstance(plugin, Wal2Json2)
    feed(plugin, BEGIN, T, *[ROW] * 100)
    assert plugin._held is not None
    assert plugin._held._spill is None


@given(pgoutput_build.times)
def test_timestamps(time_us):
    try:
        written = text.format_timestamp(time_us).decode()
    except ProtocolError:
        assert not -63082281600_000000 <= time_us < 252455616000_000000
        return
    shown = datetime.fromisoformat(written)
    assert shown - datetime(2000, 1, 1, tzinfo=UTC) == timedelta(microseconds=time_us)
    assert not written.removesuffix("+00").endswith(".")


def test_a_type_in_the_stream_is_asked_for_again():
    questions = []

    def query(sql):
        questions.append(sql)
        return [(f"mood{len(questions)}",)]

    column = Column(0, "m", 20000, -1)
    relation = Relation(None, 16385, "public", "t", "d", (Column(1, "id", 23, -1), column))
    mood = Type(None, 20000, "public", "mood")
    records = feed(
        load("wal2json", {"format-version": "2", "include-transaction": "0"}, query),
        *(BEGIN, mood, relation, ROW, relation, ROW, mood, relation, ROW, COMMIT),
    )
    types = [json.loads(record)["columns"][1]["type"] for _, record in records]
    assert types == ["mood1", "mood1", "mood2"]
