"""The output plugin debezium compared with the events that the real connector wrote (tests/data/debezium).

scripts/record-debezium records the events. Each directory is a workload. Each .properties file in it is a set of the connector's
options. These tests run the workloads again on every server and compare each event, field by field. Fields that depend on the run
(times, positions, transaction ids) are compared on the recorded stream. docs/output-plugins.md has a numbered list of deliberate
differences. `as_we_write_it` has them with the same numbers.
"""

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import postgres
import pytest

from cdcpipe.pgoutput.messages import Relation
from cdcpipe.plugins.debezium import Debezium
from support.debezium_events import DATA, UNAVAILABLE, Event, options_of, recorded, render, rendered
from support.logical_stream import Both


def statements(path: Path) -> list[str]:
    return [statement for statement in path.read_text().split(";\n") if statement.strip()]


class Workload(Both):
    """A workload that has run once on a server."""

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
    """Return the connector's event, changed by the deliberate differences."""
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
        vectors: dict[int, Event] = {1: {"i2v": [1, 2], "ov": [1, 2]}, 2: {"i2v": [], "ov": []}}
        after.update(vectors.get(after["id"], {}))
    if table == "arrays":
        fixed: dict[int, Event] = {4: {"bi": ["BQ=="]}, 6: {"i4": [[1, 2], [3, 4]]}, 7: {"t": [["a", "b"], ["c", "d"]]}}
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
    """Remove the fields that differ in each run. `test_sources` compares them."""
    times = ("ts_ms", "ts_us", "ts_ns")
    source = {name: value for name, value in event["source"].items() if name not in (*times, "db", "sequence", "txId", "lsn")}
    return {name: value for name, value in event.items() if name not in times} | {"source": source}


def exact(value: object) -> str:
    """Return a text that tells 1 from 1.0 and from true at any depth. The order of members does not matter."""
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
    """Also the rows of updates with FULL, which the compiled functions compare first."""

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
