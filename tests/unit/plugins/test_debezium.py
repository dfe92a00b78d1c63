"""The output plugin debezium without a server: the connector's events of a recorded stream, values of any kind, options."""

import base64
import json
import re
from typing import Any

import pytest

from cdcpipe.errors import InvalidArgumentsError, ProtocolError
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, Begin, Column, Commit, Insert, LogicalMessage, Relation, Type, Update
from cdcpipe.pipe.framing import RecordReader
from cdcpipe.plugins import load
from cdcpipe.plugins.catalog import NoCatalogError
from cdcpipe.plugins.debezium import Debezium
from cdcpipe.plugins.renderer import Renderer
from support.debezium_events import DATA, UNAVAILABLE, Event, Raw, recorded, render, rendered
from support.pgoutput_build import build


def no_catalog(sql: str) -> list[tuple[str | None, ...]]:
    raise NoCatalogError


def recorded_stream(name: str) -> Raw:
    reader = RecordReader()
    reader.feed((DATA / name / "stream.cdc").read_bytes())
    return [(int(lsn), bytes(record)) for lsn, record in reader]


@pytest.mark.parametrize("name", ["types", "extensions"])
def test_sources(name: str) -> None:
    """Positions, transactions, times, and the event of each change, on the same stream that the connector read."""
    raw = recorded_stream(name)
    relations = {message.relation_id: message.name for _, data in raw if isinstance(message := decode(data), Relation)}
    keys = {"by_row": "id", "by_row_unique": "a"}

    def query(sql: str) -> list[tuple[str | None, ...]]:
        if "current_database" in sql:
            return [("db",)]
        if "pg_index" in sql:
            relation_id = int(re.findall(r"indrelid = (\d+)", sql)[0])
            return [(keys[relations[relation_id]],)] if relations[relation_id] in keys else []
        # A type that is gone.
        return []

    path = DATA / name / "default.properties"
    ours, theirs = rendered(path, raw, query), recorded(path)
    # The message that ended the recording.
    assert ours.pop()["message"]["prefix"] == "end"
    assert [(event["op"], event["source"]) for event in ours] == [(event["op"], event["source"]) for event in theirs]


TABLE = (
    Column(1, "id", 23, -1),
    Column(0, "n", 1700, (38 << 16 | 2) + 4),
    Column(0, "v", 1700, -1),
    Column(0, "t", 25, -1),
)


def transaction(*changes: Any, columns: tuple[Column, ...] = TABLE, identity: str = "d", types: tuple[Type, ...] = ()) -> Raw:
    messages = [
        Begin(0x200, 0, 7),
        *types,
        Relation(None, 1, "public", "t", identity, columns),
        *changes,
        Commit(0, 0x200, 0x208, 0),
    ]
    return [(0x100, build(message)) for message in messages]


def events(raw: Raw, query: Any = no_catalog, **options: str) -> list[Event]:
    given = {name.replace("_", "."): value for name, value in options.items()}
    return [json.loads(record) for record in render(Debezium({"database.dbname": "db", **given}, query), raw)]


def insert(*values: bytes | None) -> Insert:
    return Insert(None, 1, values)


def unscaled(text: str) -> int:
    return int.from_bytes(base64.b64decode(text), "big", signed=True)


@pytest.mark.parametrize("digits", [1, 255, 4001, 20_000, 131_072])
def test_numbers_of_any_length(digits: int) -> None:
    for sign in ("", "-"):
        number = f"{sign}{'7' * digits}"
        (event,) = events(transaction(insert(b"1", b"0.00", number.encode() + b".50", None)))
        value = event["after"]["v"]
        read = unscaled(value["value"])
        # Python's own int() and str() refuse long ones.
        expected = (10 * (10**digits - 1) // 9 * 7 + 5) * (-1 if sign else 1)
        assert (value["scale"], read) == (1, expected)


@pytest.mark.parametrize("value", [b"", b"1.2.3", b"x", b"1e5", b"\xff"])
@pytest.mark.parametrize("column", [1, 2])
def test_texts_that_are_invalid_for_their_type(value: bytes, column: int) -> None:
    row = [b"1", b"0.00", b"0", None]
    row[column] = value
    with pytest.raises(ProtocolError, match="not text of its type"):
        events(transaction(insert(*row)))


@pytest.mark.parametrize(
    ("type_id", "value"),
    [
        (1082, b"x"),
        (1083, b"24"),
        (1114, b"2026-01-01"),
        (1184, b"2026-01-01 00:00:00"),
        (1266, b"1"),
        (1186, b"1 day x"),
        (17, b"abc"),
        (600, b"1,2"),
        (1007, b"{1"),
        (1560, b"2"),
    ],
)
def test_malformed_text(type_id: int, value: bytes) -> None:
    raw = transaction(insert(value), columns=(Column(1, "v", type_id, -1 if type_id != 1560 else 1),))
    with pytest.raises(ProtocolError):
        events(raw)


@pytest.mark.parametrize(
    ("type_id", "value", "elements"),
    [
        (1009, b"{a;b,c}", ["a;b", "c"]),
        (1009, b"{;}", [";"]),
        (1009, b'{"a,b",NULL,"NULL",""}', ["a,b", None, "NULL", ""]),
        (1009, b"[0:1][1:1]={{a;},{b}}", [["a;"], ["b"]]),
        (1007, b"{1,NULL}", [1, None]),
        (1020, b"{(1,1),(0,0);(2,2),(1,1)}", ["(1,1),(0,0)", "(2,2),(1,1)"]),
    ],
)
def test_arrays(type_id: int, value: bytes, elements: list[Any]) -> None:
    """An array is cut at the delimiter of its elements' type: a semicolon for box, a comma for all others."""
    raw = transaction(insert(value), columns=(Column(1, "v", type_id, -1),))
    (event,) = events(raw, include_unknown_datatypes="true")
    found = event["after"]["v"]
    assert elements == ([base64.b64decode(each).decode() for each in found] if type_id == 1020 else found)


def test_an_update_of_the_key() -> None:
    """A delete and a create at the update's position. Unchanged values are unavailable, or in the old row with FULL."""
    raw = transaction(Update(None, 1, (b"1", None, None, None), None, (b"2", b"1.00", None, UNCHANGED_TOAST)))
    delete, create = events(raw)
    assert [(delete["op"], delete["before"]["id"], delete["after"]), (create["op"], create["before"])] == [
        ("d", 1, None),
        ("c", None),
    ]
    assert (create["after"]["id"], create["after"]["t"]) == (2, UNAVAILABLE)
    assert delete["source"] == create["source"]
    # An old key comes with the same key when a part of it is stored out of line.
    (update,) = events(transaction(Update(None, 1, (b"1", None, None, None), None, (b"1", b"1.00", None, None))))
    assert (update["op"], update["before"]["id"], update["after"]["id"]) == ("u", 1, 1)
    # The key of a partition, without the column that is the key of its root.
    (update,) = events(transaction(Update(None, 1, (None, b"1.00", None, None), None, (b"1", b"2.00", None, None))))
    assert (update["op"], update["before"]["id"], update["after"]["id"]) == ("u", None, 1)

    old = (b"1", b"1.00", b"2", b"large")
    raw = transaction(Update(None, 1, None, old, (b"2", b"1.00", b"2", UNCHANGED_TOAST)), identity="f")
    delete, create = events(raw, lambda sql: [("id",)])
    assert (delete["before"]["t"], create["after"]["t"]) == ("large", "large")
    (update,) = events(raw, lambda sql: [])
    assert (update["op"], update["before"]["id"], update["after"]["id"], update["after"]["t"]) == ("u", 1, 2, "large")
    with pytest.raises(NoCatalogError, match=r"the key of public\.t"):
        events(raw)


def test_skipped_operations() -> None:
    raw = transaction(insert(b"1", None, None, None), Update(None, 1, None, None, (b"1", None, None, None)))
    assert [event["op"] for event in events(raw)] == ["c", "u"]
    assert [event["op"] for event in events(raw, skipped_operations="c, t")] == ["u"]
    assert [event["op"] for event in events(raw, skipped_operations="u")] == ["c"]


@pytest.mark.parametrize(("skipped", "ops"), [("t", "udc"), ("u", "dc"), ("d", "uc"), ("c", "ud")])
@pytest.mark.parametrize("identity", ["d", "f"])
def test_an_update_of_the_key_is_no_update_that_is_skipped(identity: str, skipped: str, ops: str) -> None:
    old = None if identity == "d" else (b"1", None, None, b"x")
    key = (b"1", None, None, None) if identity == "d" else None
    updates = [Update(None, 1, key, old, (id_, None, None, None)) for id_ in (b"1", b"2")]
    assert (
        "".join(
            event["op"]
            for event in events(transaction(*updates, identity=identity), lambda sql: [("id",)], skipped_operations=skipped)
        )
        == ops
    )


def test_types_without_a_server() -> None:
    """The stream gives a domain the name of its base type, and hstore its own name."""
    columns = (Column(1, "id", 23, -1), Column(0, "d", 20000, -1), Column(0, "h", 20001, -1))
    types = (Type(None, 20000, "pg_catalog", "int8"), Type(None, 20001, "public", "hstore"))
    (event,) = events(transaction(insert(b"1", b"5", b'"a"=>NULL'), columns=columns, types=types))
    assert event["after"] == {"id": 1, "d": 5, "h": '{"a":null}'}
    types = (Type(None, 20000, "public", "mood"), types[1])
    with pytest.raises(NoCatalogError, match=r"what kind of type public\.mood is"):
        events(transaction(insert(b"1", b"5", b""), columns=columns, types=types))
    with pytest.raises(NoCatalogError, match=r"database\.dbname"):
        render(Debezium({}, no_catalog), transaction(insert(b"1", None, None, None)))


@pytest.mark.parametrize(
    ("kind", "tag", "ops"),
    [
        ("command", "CREATE TABLE", [None]),
        ("rewrite", "ALTER TABLE", []),
        ("drop", "ALTER TABLE", []),
        ("failure", "ALTER TABLE", ["m"]),
        ("installed", None, ["m"]),
        ("removed", None, ["m"]),
        ("a later kind", "ALTER TABLE", ["m"]),
    ],
)
def test_only_parts_of_a_statement_have_no_event(kind: str, tag: str | None, ops: list[str | None]) -> None:
    """A failure must not vanish: there is no other message for its statement."""
    content = json.dumps({"version": 1, "kind": kind, "tag": tag, "statement": None, "objects": [], "tables": []}).encode()
    raw = transaction(LogicalMessage(None, 1, 0x150, "cdcpipe.ddl", content))
    assert [event.get("op") for event in events(raw, include_schema_changes="true")] == ops
    assert [event.get("op") for event in events(raw)] == ["m"]


@pytest.mark.parametrize("name", ["interval", "date", "point", "money", "int4", "hstore", "int2vector", "uuid", "box"])
def test_user_types_that_are_called_as_others(name: str) -> None:
    """A composite or range is of no known type, and an enum is its label, whatever they are called."""
    facts = {20000: (name, "c", "0"), 20001: (f"_{name}", "b", "20000"), 20002: (name, "e", "0"), 20003: (f"_{name}", "b", "20002")}
    facts |= {20004: (name, "r", "0")}
    columns = (Column(1, "id", 23, -1), *(Column(0, f"c{type_id}", type_id, -1) for type_id in facts))
    types = tuple(Type(None, type_id, "app", row[0]) for type_id, row in facts.items())
    texts = (b"(1,2)", b'{"(1,2)","(3,4)"}', b"ok", b"{ok,no}", b"[1,2)")

    def query(sql: str) -> list[tuple[str | None, ...]]:
        (type_id,) = re.findall(r"oid = (\d+)", sql)
        return [(*facts[int(type_id)], "0", "-1")]

    raw = transaction(insert(b"1", *texts), columns=columns, types=types)
    (event,) = events(raw, query)
    assert event["after"] == {"id": 1, "c20002": "ok", "c20003": ["ok", "no"]}
    (event,) = events(raw, query, include_unknown_datatypes="true")
    unknown = [base64.b64encode(text).decode() for text in (b"(1,2)", b"(3,4)", b"[1,2)")]
    expected = {"c20000": unknown[0], "c20001": unknown[:2], "c20004": unknown[2], "c20002": "ok", "c20003": ["ok", "no"]}
    assert event["after"] == {"id": 1, **expected}


def test_a_message_alone() -> None:
    """It has the time of the previous transaction, and counts as the last end of one."""
    message = (0x300, build(LogicalMessage(None, 0, 0x300, "p", b"x")))
    (alone,) = events([message])
    assert alone["source"]["sequence"] == '["768","768"]'
    assert (alone["source"]["txId"], alone["source"]["schema"]) == (None, "")
    assert alone["source"]["ts_ms"] <= alone["ts_ms"]
    _, after, again = events([*transaction(insert(b"1", None, None, None)), message, *transaction(insert(b"2", None, None, None))])
    assert after["source"]["ts_ms"] == 946684800000
    assert again["source"]["sequence"] == '["768","256"]'


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("tombstones.on.delete", "true", "no keys"),
        ("provide.transaction.metadata", "true", "can only be false"),
        ("snapshot.mode", "initial", "only changes"),
        ("slot.name", "s", "-S"),
        ("table.include.list", "public.t", "publication"),
        ("schemas.enable", None, "no schemas"),
        ("decimal.handling.mode", "exact", "precise, string, double"),
        ("decimal.handling.mode", None, "needs a value"),
        ("skipped.operations", "x", "skipped.operations"),
        ("money.fraction.digits", "two", "money.fraction.digits"),
        ("include.unknown.datatypes", "perhaps", "include.unknown.datatypes"),
        ("unavailable.value.placeholder", "hex:0", "unavailable.value.placeholder"),
        ("topic.prefix", "a b", "topic.prefix"),
        ("nonsense", "1", "no option 'nonsense'"),
    ],
)
def test_options_that_can_not_be_honoured(option: str, value: str | None, why: str) -> None:
    with pytest.raises(InvalidArgumentsError) as raised:
        load("debezium", {option: value}, no_catalog)
    assert why in f"{raised.value} {raised.value.hint}"


def test_options_that_say_what_is_so() -> None:
    load("debezium", {"tombstones.on.delete": "false", "snapshot.mode": "no_data", "schemas.enable": "false"}, no_catalog)


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_the_last_record_ends_the_transaction(rows: int) -> None:
    written: list[tuple[int, bytes]] = []
    renderer = Renderer(Debezium({"database.dbname": "db"}, no_catalog), lambda lsn, record: written.append((lsn, record)))
    for wal_start, data in transaction(*(insert(b"%d" % row, None, None, None) for row in range(rows)))[:-1]:
        renderer.feed(wal_start, data)
    assert len(written) == rows - 1
    renderer.feed(0x208, build(Commit(0, 0x200, 0x208, 0)))
    assert [json.loads(record)["after"]["id"] for _, record in written] == list(range(rows))
    assert [lsn for lsn, _ in written] == [0x100] * (rows - 1) + [0x208]
    # A stream that ends inside a transaction: what is there is written, at its own position.
    for wal_start, data in transaction(insert(b"1", None, None, None))[:-1]:
        renderer.feed(wal_start, data)
    renderer.close()
    assert written[-1][0] == 0x100
