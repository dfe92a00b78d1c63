"""Records of wal2json, ours and those of the server's plugin, less what differs on purpose (docs/output-plugins.md)."""

from __future__ import annotations

import re

from cdcpipe.plugins import load
from cdcpipe.plugins.renderer import Renderer

V1 = {"format-version": "1"}

V2 = {"format-version": "2"}


def render(options, raw, query) -> list[tuple[int, bytes]]:
    records: list[tuple[int, bytes]] = []
    renderer = Renderer(load("wal2json", options, query), lambda lsn, record: records.append((lsn, record)))
    for wal_start, data in raw:
        renderer.feed(wal_start, data)
    renderer.close()
    return records


def transactions(records, options) -> list[list[tuple[int, bytes]]]:
    """Group records by transaction; a message on its own is a group."""
    if options["format-version"] == "1" and "write-in-chunks" not in options:
        return [[record] for record in records]
    if options.get("include-transaction") == "0":
        return [[record] for record in records]
    groups: list[list[tuple[int, bytes]]] = []
    is_open = False
    for record in records:
        is_first = re.match(rb'\{"action":"B"|\{\s*("(xid|nextlsn|timestamp|origin)":[^{]*?)?"change": ?\[$', record[1])
        is_last = re.match(rb'\{"action":"C"|\t?\]\n?\}$', record[1])
        if is_open:
            groups[-1].append(record)
        else:
            groups.append([record])
        is_open = not is_last if is_open else bool(is_first)
    return groups


def without_empty(records, options) -> list[list[tuple[int, bytes]]]:
    """Leave out transactions without a change (difference 1)."""
    groups = transactions(records, options)
    return [group for group in groups if not re.search(rb'"change": ?\[\s*\]', group[0][1]) and not is_empty(group)]


def without_stray_commas(records) -> list[tuple[int, bytes]]:
    """Leave out the comma that version 1 may begin a message with that is not transactional (difference 3)."""
    return [(lsn, re.sub(rb'^(\{\s*"change": ?\[\s*),\{', rb"\1{", record)) for lsn, record in records]


def is_empty(group) -> bool:
    return len(group) == 2 and (b'"action":"B"' in group[0][1] or re.search(rb'"change": ?\[$', group[0][1]) is not None)
