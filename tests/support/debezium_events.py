"""Reads events of Debezium's connector, recorded with scripts/record-debezium, and renders the same with our output plugin."""

import json
from pathlib import Path
from typing import Any

from cdcpipe.plugins.debezium import Debezium
from cdcpipe.plugins.renderer import Renderer
from support.paths import ROOT

DATA = ROOT / "tests" / "data" / "debezium"
UNAVAILABLE = "__debezium_unavailable_value"
Event = dict[str, Any]
Raw = list[tuple[int, bytes]]


def options_of(path: Path) -> dict[str, str | None]:
    """Return the options of a recorded set, including those that scripts/record-debezium adds."""
    given: dict[str, str | None] = {"topic.prefix": path.stem, "skipped.operations": "none"}
    for line in path.read_text().splitlines():
        name, _, given[name] = line.partition("=")
    return given


def recorded(path: Path) -> list[Event]:
    # splitlines() would also split at U+2028, which JSON does not escape.
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().rstrip("\n").split("\n")]


def render(plugin: Debezium, raw: Raw) -> list[bytes]:
    written: list[bytes] = []
    renderer = Renderer(plugin, lambda lsn, record: written.append(record))
    for wal_start, data in raw:
        renderer.feed(wal_start, data)
    renderer.close()
    return written


def rendered(path: Path, raw: Raw, query: Any) -> list[Event]:
    return [json.loads(record) for record in render(Debezium(options_of(path), query), raw)]
