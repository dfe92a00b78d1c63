"""The output plugin debezium against the real connector: what that wrote (tests/data/debezium) beside what we write.

The events are recorded with scripts/record-debezium; each directory is a workload, each .properties file a set of the connector's
options. Here the workloads run again, on every server, and each event is compared, field by field; what depends on the run (times,
positions, transaction ids) is compared on the recorded stream. What differs on purpose is on the numbered list in
docs/output-plugins.md, and here, with the same numbers, in `as_we_write_it`.
"""

import base64
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import postgres
import pytest

from cdcpipe.errors import InvalidArgumentsError, ProtocolError
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, Begin, Column, Commit, Insert, LogicalMessage, Relation, Type, Update
from cdcpipe.pipe.framing import RecordReader
from cdcpipe.plugins import load
from cdcpipe.plugins.catalog import NoCatalogError
from cdcpipe.plugins.debezium import Debezium
from cdcpipe.plugins.renderer import Renderer
from support.cli_process import CLI
from support.logical_stream import Both
from support.paths import ROOT
from support.pgoutput_build import build

DATA = ROOT / "tests" / "data" / "debezium"
SETS = sorted(DATA.glob("*/*.properties"))
UNAVAILABLE = "__debezium_unavailable_value"
Event = dict[str, Any]
Raw = list[tuple[int, bytes]]


def statements(path: Path) -> list[str]:
    return [statement for statement in path.read_text().split(";\n") if statement.strip()]


def options_of(path: Path) -> dict[str, str | None]:
    """Return a set's options; with what scripts/record-debezium adds to them."""
    given: dict[str, str | None] = {"topic.prefix": path.stem, "skipped.operations": "none"}
    for line in path.read_text().splitlines():
        name, _, given[name] = line.partition("=")
    return given


def recorded(path: Path) -> list[Event]:
    # Not splitlines(): JSON has U+2028 as it is.
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().rstrip("\n").split("\n")]


def render(plugin: Debezium, raw: Raw) -> list[bytes]:
    written: list[bytes] = []
    renderer = Renderer(plugin, lambda lsn, record: written.append(record))
    for wal_start, data in raw:
        renderer.feed(wal_start, data)
    renderer.close()
    return written


def no_catalog(sql: str) -> list[tuple[str | None, ...]]:
    raise NoCatalogError


def rendered(path: Path, raw: Raw, query: Any) -> list[Event]:
    return [json.loads(record) for record in render(Debezium(options_of(path), query), raw)]


class Workload(Both):
    """A workload, run on a server once."""

    def __init__(self, database: postgres.Database, name: str) -> None:
        super().__init__(database, "pgoutput")
        # The wheel's servers have no libxml; a text is written as an XML document is.
        has_xml = database.cluster.version == "15"
        self.run("set timezone = 'UTC'")
        for statement in statements(DATA / name / "schema.sql"):
            self.run(statement if has_xml else statement.replace("xml", "text"))
        self.begin()
        for statement in statements(DATA / name / "changes.sql"):
            self.run(statement if has_xml else statement.replace("xml", "text"))


@pytest.fixture(
    scope="module", params=[*((version, "types") for version in postgres.REGULAR_VERSIONS), ("15", "extensions")], ids="-".join
)
def workload(request: pytest.FixtureRequest) -> Iterator[tuple[str, Workload]]:
    """Return a workload's name, and the workload."""
    version, name = request.param
    cluster: postgres.Cluster = request.getfixturevalue(f"pg{version}")
    with cluster.database() as database:
        made = Workload(database, name)
        yield name, made
        # Origins are the cluster's, not the database's.
        made.run("select pg_replication_origin_drop(roname) from pg_replication_origin where roname = 'elsewhere'")
        made.connection.close()


def as_we_write_it(event: Event, options: dict[str, str | None]) -> Event:
    """Return the connector's event with the differences that are on purpose."""
    table, op = event["source"]["table"], event["op"]
    before, after = event.get("before") or {}, event.get("after") or {}
    text = options.get("unavailable.value.placeholder", UNAVAILABLE) or ""
    placeholder = bytes.fromhex(text[4:]) if text.startswith("hex:") else text.encode()
    text = placeholder.decode(errors="replace")
    unknown = options.get("include.unknown.datatypes") == "true"
    if table == "by_key":
        # 1: NULL is null, whatever the default; 2: what was not sent is null, whatever the constraint.
        before.update(dict.fromkeys(before.keys() & {"n", "s", "u"}))
        if after.get("u") == "unset":
            after["u"] = None
    if table == "by_other_index" and op == "d":
        before["id"] = None  # 2
    if table == "large" and op == "u":
        signed = list(struct.unpack(f"{len(placeholder)}b", placeholder))
        binary = "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==" if text == UNAVAILABLE else text if text == "not sent" else "AP8="
        others = {"l": signed, "sl": signed, "dl": [text] if "isostring" in str(options.get("time.precision.mode")) else signed}
        for name, value in after.items():
            if value is None and name not in ("il", "nul"):
                # 3: what was not sent is never null.
                is_list = name.endswith("l") or name == "e"
                after[name] = (
                    binary if name == "by" else [binary] if name == "byl" else others.get(name, [text] if is_list else text)
                )
    if table == "numbers" and options.get("decimal.handling.mode", "precise") == "precise":
        # 4: NaN and infinity are not null.
        after.update({17: {"n": "NaN", "n12_2": "NaN"}, 18: {"n": "Infinity"}, 19: {"n": "-Infinity"}}.get(after["id"], {}))
    if table == "times" and options.get("time.precision.mode") == "nanoseconds":
        after.update(BEYOND_64_BITS.get(after["id"], {}))  # 5
    if table == "numbers" and options.get("decimal.handling.mode") == "string" and after["n5_m2"]:
        after["n5_m2"] = after["n5_m2"].rstrip("0").rstrip(".")  # 6
        after["n5_m2"] += "00" if after["n5_m2"] == "6" else ""
    if table == "large" and options.get("decimal.handling.mode") == "double" and op == "c":
        after["num"] = float("inf")  # 6: read as a double
    # 7: what the connector fails to convert.
    if table == "texts" and not unknown:
        after["n"] = {1: "name", 2: "", 3: 'a"b', 4: "n" * 63, 5: None}[after["id"]]
    if table == "bits" and after["id"] == 2:
        after["vb1"] = ""
    if table == "others":
        after.update({1: {"i2v": [1, 2], "ov": [1, 2]}, 2: {"i2v": [], "ov": []}}.get(after["id"], {}))
    if table == "arrays":
        fixed = {4: {"bi": ["BQ=="]}, 6: {"i4": [[1, 2], [3, 4]]}, 7: {"t": [["a", "b"], ["c", "d"]]}}
        after.update(fixed.get(after["id"], {}))
        if unknown:  # 8
            kept = {"iv": ["MSBkYXk="], "p": ["KDEsMik="], "mo": ["JDEuNTA="], "na": ["YQ=="], "vb": ["MTAx"]}
            after.update(kept if after["id"] == 4 else dict.fromkeys(kept))
    if table == "kinds" and unknown:
        after["xl"] = ["PGEvPg=="] if after["id"] == 1 else None  # 8
    if table == "places" and unknown:
        after.update(GEOMETRY.get(after["id"], {}))  # 8
    return event


BEYOND_64_BITS = {
    4: {**dict.fromkeys(["ts", "ts0", "ts3"], -62135596800 * 10**9), "ts6": -62135596799999999000},
    5: {"ts": 253402300799999999000, **dict.fromkeys(["ts0", "ts3", "ts6"], 253402214400 * 10**9)},
    6: {"ts": -12219721200 * 10**9, **dict.fromkeys(["ts0", "ts3", "ts6"], -12219724800 * 10**9)},
    13: {"ts": 253402304523500000000, "ts3": 253402300800 * 10**9, "ts6": 327416976550111213000},
    14: {"ts": -63517788000 * 10**9, "ts3": -63517824000 * 10**9, "ts6": -62135683200 * 10**9},
}
# Base64 of PostgreSQL's text, not of Java's: (3,4),(1,2) for the connector's (3.0,4.0),(1.0,2.0).
GEOMETRY = {
    1: {
        "ln": "ezEsMiwzfQ==",
        "ls": "WygxLDIpLCgzLDQpXQ==",
        "b": "KDMsNCksKDEsMik=",
        "pa": "KCgxLDIpLCgzLDQpKQ==",
        "po": "KCgxLDIpLCgzLDQpLCg1LDYpKQ==",
        "c": "PCgxLDIpLDM+",
    },
    2: {
        "ln": "ey0xLjUsMiwxZS0xMH0=",
        "b": "KDEsMSksKDAsMCk=",
        "pa": "WygxLDIpLCgzLDQpLCg1LDYpXQ==",
        "po": "KCgwLDApLCgxLDApKQ==",
        "c": "PCgwLjEsMC4yKSwwPg==",
    },
}


def without_volatile(event: Event) -> Event:
    """Leave out what is another in each run; `test_sources` has it."""
    times = ("ts_ms", "ts_us", "ts_ns")
    source = {name: value for name, value in event["source"].items() if name not in (*times, "db", "sequence", "txId", "lsn")}
    return {name: value for name, value in event.items() if name not in times} | {"source": source}


def exact(value: object) -> str:
    """Tell 1 from 1.0 and from true, whatever is in it; members in any order."""
    return json.dumps(value, sort_keys=True)


def test_each_event_is_the_connectors(workload: tuple[str, Workload]) -> None:
    name, made = workload
    raw = made.raw()
    for path in sorted((DATA / name).glob("*.properties")):
        ours, theirs = rendered(path, raw, made.query), recorded(path)
        assert len(ours) == len(theirs) > 5
        for our, their in zip(ours, theirs, strict=True):
            assert list(our) == list(their)
            assert list(our["source"]) == list(their["source"])
            assert all(
                list(our.get(row) or {}) == list(their.get(row) or {}) or "xl" in our[row] or "iv" in our[row]
                for row in ("before", "after")
            )
            expected = without_volatile(as_we_write_it(their, options_of(path)))
            our = without_volatile(our)
            for row in ("before", "after"):
                for column, value in (our.get(row) or {}).items():
                    assert exact(value) == exact(expected[row].get(column, "nothing")), (
                        f"{path.stem} {row} {column} of {our['source']}"
                    )
            assert exact(our) == exact(expected)


def test_compiled_rows_are_the_others(workload: tuple[str, Workload]) -> None:
    """With the rows of FULL's updates, too, which the compiled functions compare first."""

    class Slow(Debezium):
        def relation(self, relation: Relation) -> Any:
            super().relation(relation)
            return {}

    def of(plugin: type[Debezium]) -> list[bytes]:
        # The time at which we began with a transaction.
        return [
            re.sub(rb'"ts_ms":\d+(,"ts_us":\d+,"ts_ns":\d+}$|,"source")', b"", record)
            for record in render(plugin(options, made.query), raw)
        ]

    name, made = workload
    raw = made.raw()
    for path in sorted((DATA / name).glob("*.properties")):
        options = options_of(path)
        assert of(Debezium) == of(Slow)


def recorded_stream(name: str) -> Raw:
    reader = RecordReader()
    reader.feed((DATA / name / "stream.cdc").read_bytes())
    return [(int(lsn), bytes(record)) for lsn, record in reader]


@pytest.mark.parametrize("name", ["types", "extensions"])
def test_sources(name: str) -> None:
    """Positions, transactions and times, and what becomes of each change: on the very stream that the connector had."""
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


def test_on_the_command_line(pg18: postgres.Cluster) -> None:
    with pg18.database() as database:
        both = Both(database, "pgoutput")
        both.run("create table t (id int primary key, n numeric(8,2), at timestamptz)")
        both.begin()
        both.run("insert into t values (1, 12.5, '2026-11-21 01:02:03.4Z'), (2, null, null)")
        both.run("select pg_logical_emit_message(true, 'p', 'c')")
        end = str(both.query("select pg_current_wal_insert_lsn()")[0][0])
        options = ["--output", "debezium", "-o", "topic.prefix=shop", "-o", "decimal.handling.mode=string"]
        with CLI("-d", database.dsn, "-S", both.slots[1], "--publication", "p", *options, "--endpos", end, "--endpos-wait") as cli:
            (lsn, record), (last_lsn, _), (_, message) = cli.records()
            cli.say(f"F {last_lsn}\n")
            assert cli.quit() == 0, cli.stderr
        event = json.loads(record)
        assert event["after"] == {"id": 1, "n": "12.50", "at": "2026-11-21T01:02:03.400000Z"}
        assert (event["op"], event["source"]["name"], event["source"]["db"]) == ("c", "shop", database.name)
        assert event["source"]["lsn"] == int(lsn)
        # The header of a transaction's last record has the end of the transaction: it can be confirmed.
        confirmed = both.query(f"select confirmed_flush_lsn from pg_replication_slots where slot_name = '{both.slots[1]}'")
        assert confirmed == [(str(last_lsn),)]
        assert json.loads(message)["message"] == {"prefix": "p", "content": "Yw=="}
        both.connection.close()


# Without a server


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
def test_text_that_is_none_of_its_type(value: bytes, column: int) -> None:
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


def test_an_update_of_the_key() -> None:
    """A delete and a create, at the update's position; what the update did not touch is unavailable, or in the old row of FULL."""
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

    old = (b"1", b"1.00", b"2", b"large")
    raw = transaction(Update(None, 1, None, old, (b"2", b"1.00", b"2", UNCHANGED_TOAST)), identity="f")
    delete, create = events(raw, lambda sql: [("id",)])
    assert (delete["before"]["t"], create["after"]["t"]) == ("large", "large")
    (update,) = events(raw, lambda sql: [])
    assert (update["op"], update["before"]["id"], update["after"]["id"], update["after"]["t"]) == ("u", 1, 2, "large")
    with pytest.raises(NoCatalogError, match=r"the key of public\.t"):
        events(raw)


def test_what_is_skipped() -> None:
    raw = transaction(insert(b"1", None, None, None), Update(None, 1, None, None, (b"1", None, None, None)))
    assert [event["op"] for event in events(raw)] == ["c", "u"]
    assert [event["op"] for event in events(raw, skipped_operations="c, t")] == ["u"]
    assert [event["op"] for event in events(raw, skipped_operations="u")] == ["c"]


def test_types_without_a_server() -> None:
    """The stream has a domain under the name of its base type, and hstore under its own."""
    columns = (Column(1, "id", 23, -1), Column(0, "d", 20000, -1), Column(0, "h", 20001, -1))
    types = (Type(None, 20000, "pg_catalog", "int8"), Type(None, 20001, "public", "hstore"))
    (event,) = events(transaction(insert(b"1", b"5", b'"a"=>NULL'), columns=columns, types=types))
    assert event["after"] == {"id": 1, "d": 5, "h": '{"a":null}'}
    types = (Type(None, 20000, "public", "mood"), types[1])
    with pytest.raises(NoCatalogError, match=r"what kind of type public\.mood is"):
        events(transaction(insert(b"1", b"5", b""), columns=columns, types=types))
    with pytest.raises(NoCatalogError, match=r"database\.dbname"):
        render(Debezium({}, no_catalog), transaction(insert(b"1", None, None, None)))


def test_a_message_alone() -> None:
    """It has the time of the transaction before it, and counts as the last end of one."""
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
