"""An output plugin that records the calls of its callbacks."""

from __future__ import annotations

from cdcpipe.plugins.base import OutputPlugin


def nothing(sql):
    """Stand in for the catalog of a plugin that must not query it."""
    raise AssertionError(sql)


class Recorder(OutputPlugin):
    """Records each callback with its arguments."""

    name = "recorder"

    def __init__(self, options=None, query=nothing):
        super().__init__(options or {}, query)
        self.calls = []

    def filter_by_origin(self, origin):
        self.calls.append(("filter_by_origin", origin.name))
        return origin.name == "unwanted"


def _recording(name):
    def callback(self, *args):
        self.calls.append((name, *args))

    return callback


CALLBACKS = [
    "shutdown",
    *("begin", "change", "truncate", "message", "commit"),
    *("begin_prepare", "prepare", "commit_prepared", "rollback_prepared"),
    *("stream_start", "stream_stop", "stream_change", "stream_truncate", "stream_message"),
    *("stream_abort", "stream_prepare", "stream_commit"),
]
for _name in CALLBACKS:
    setattr(Recorder, _name, _recording(_name))
