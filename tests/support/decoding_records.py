"""Makes records of our test_decoding and of the server's comparable: removes intended differences (docs/output-plugins.md)."""

from __future__ import annotations

from cdcpipe.pgoutput import options as pgoutput_options
from cdcpipe.plugins import load
from cdcpipe.plugins.renderer import Renderer


def render(both, options, extra):
    plugin = load("test_decoding", options, both.query)
    records = []
    renderer = Renderer(plugin, lambda lsn, record: records.append((lsn, record)))
    for wal_start, data in both.raw(
        pgoutput_options.complete({**plugin.pgoutput_options, **extra}, both.database.cluster.version_num)
    ):
        renderer.feed(wal_start, data)
    renderer.close()
    return records


def without_empty(records):
    """Remove transactions without a change, because pgoutput does not send them."""
    kept: list[tuple[int, bytes]] = []
    for record in records:
        if record[1].startswith(b"COMMIT") and not record[1].startswith(b"COMMIT P") and kept[-1][1].startswith(b"BEGIN"):
            kept.pop()
        else:
            kept.append(record)
    return kept
