"""Compares records of our wal2json with those of the server's plugin. Ignores intended differences (docs/output-plugins.md)."""

from __future__ import annotations

import itertools
import json
import re

from cdcpipe.plugins import load
from cdcpipe.plugins.renderer import Renderer
from support.logical_stream import Both

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
    """Group records by transaction. A message outside of transactions is its own group."""
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
    """Remove transactions without a change (difference 1)."""
    groups = transactions(records, options)
    return [group for group in groups if not re.search(rb'"change": ?\[\s*\]', group[0][1]) and not is_empty(group)]


def without_stray_commas(records) -> list[tuple[int, bytes]]:
    """Remove the comma with which version 1 may begin a non-transactional message (difference 3)."""
    return [(lsn, re.sub(rb'^(\{\s*"change": ?\[\s*),\{', rb"\1{", record)) for lsn, record in records]


def is_empty(group) -> bool:
    return len(group) == 2 and (b'"action":"B"' in group[0][1] or re.search(rb'"change": ?\[$', group[0][1]) is not None)


EVERYTHING = {
    "include-xids": "1",
    "include-timestamp": "1",
    "include-lsn": "1",
    "include-origin": "1",
    "include-pk": "1",
    "include-type-oids": "1",
    "include-not-null": "1",
    "include-default": "1",
    "include-column-positions": "1",
}


OPTION_SETS = [
    V1,
    V2,
    V1 | EVERYTHING,
    V2 | EVERYTHING,
    V1 | EVERYTHING | {"pretty-print": "1"},
    V1 | EVERYTHING | {"write-in-chunks": "1", "pretty-print": "on"},
    V1 | {"write-in-chunks": "true"},
    V1 | {"include-typmod": "0", "include-schemas": "0"},
    V1 | {"include-types": "0", "include-not-null": "1", "include-pk": "yes"},
    V1 | {"include-domain-data-type": "1", "include-type-oids": "1", "include-pk": "1"},
    V1 | {"include-domain-data-type": "1", "include-typmod": "0"},
    V2 | {"include-types": "0", "include-schemas": "f", "include-pk": "1"},
    V2 | {"include-typmod": "0", "include-type-oids": None},
    V2 | {"include-domain-data-type": "1", "include-lsn": "1", "include-transaction": "0"},
    V2 | {"include-xids": "1", "actions": "insert,delete"},
    V2 | {"actions": "update, truncate"},
    V1 | {"actions": "update"},
]


def compare(both: Both, option_sets=OPTION_SETS, *, may_be_invalid: bool = False) -> None:
    raw = both.raw()
    for options in option_sets:
        theirs = without_empty(without_stray_commas(both.theirs(options)), options)
        ours = without_empty(render(options, raw, both.query), options)
        assert theirs or "actions" in options, f"the scenario shows nothing with {options}"
        for their_group, our_group in itertools.zip_longest(theirs, ours, fillvalue=[]):
            their_records, our_records = [r for _, r in their_group], [r for _, r in our_group]
            for ours_is, theirs_is in itertools.zip_longest(our_records, their_records, fillvalue=b""):
                same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours_is, theirs_is, strict=False)))
                assert ours_is[max(0, same - 60) : same + 100] == theirs_is[max(0, same - 60) : same + 100], options
            assert our_records == their_records, options
            # Difference 2 affects only the first record.
            assert [lsn for lsn, _ in our_group[1:]] == [lsn for lsn, _ in their_group[1:]], options
            assert our_group[0][0] >= their_group[0][0]
            if not may_be_invalid and "write-in-chunks" not in options:
                for record in our_records:
                    json.loads(record)
