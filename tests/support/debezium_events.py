"""Events of Debezium's connector, recorded with scripts/record-debezium, and what our output plugin writes."""

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


def rendered(path: Path, raw: Raw, query: Any) -> list[Event]:
    return [json.loads(record) for record in render(Debezium(options_of(path), query), raw)]
