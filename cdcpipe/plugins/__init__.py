"""Output plugins that run on the client: they render a pgoutput slot as wal2json and others render it on the server.

`load` finds a plugin by name: first those of cdcpipe, then those in the entry-point group ``cdcpipe.output_plugins``, in which
other packages register subclasses of `cdcpipe.plugins.base.OutputPlugin`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from cdcpipe.errors import InvalidArgumentsError

if TYPE_CHECKING:
    from cdcpipe.plugins.base import Options, OutputPlugin, Query

__all__ = ["ENTRY_POINT_GROUP", "load", "names"]

ENTRY_POINT_GROUP = "cdcpipe.output_plugins"

_BUILT_IN = {
    "debezium": "cdcpipe.plugins.debezium:Debezium",
    "json": "cdcpipe.plugins.json_lines:JsonLines",
    "test_decoding": "cdcpipe.plugins.test_decoding:TestDecoding",
    "wal2json": "cdcpipe.plugins.wal2json:load",
}


def names() -> list[str]:
    """Return the names that `load` knows."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def load(name: str, options: Options, query: Query) -> OutputPlugin:
    """Return the plugin ``name`` with its options. Raises InvalidArgumentsError for an unknown name or option.

    ``query`` runs SQL on an ordinary connection. The plugin calls it only after rendering has started.
    """
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        plugin: OutputPlugin = getattr(import_module(module), attribute)(options, query)
        return plugin
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        made: OutputPlugin = point.load()(options, query)
        return made
    raise InvalidArgumentsError(f"there is no output plugin {name!r}", hint=f"the output plugins are {', '.join(names())}")
