"""Output plugins that run on the client: they render a pgoutput slot as wal2json and others render it on the server.

`load` finds a plugin by name: first those of cdcpipe, then those in the entry-point group ``cdcpipe.output_plugins``, in which
other packages register subclasses of `cdcpipe.plugins.base.OutputPlugin`. `failure_of_others` tells an error of such a plugin
from a defect of cdcpipe.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from traceback import walk_tb
from typing import TYPE_CHECKING

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.plugins.base import OutputPlugin

if TYPE_CHECKING:
    from cdcpipe.plugins.base import Options, Query

__all__ = ["ENTRY_POINT_GROUP", "failure_of_others", "load", "names"]

_log = logging.getLogger(__name__)

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
        return _load_of_others(point, options, query)
    raise InvalidArgumentsError(f"there is no output plugin {name!r}", hint=f"the output plugins are {', '.join(names())}")


def _load_of_others(point: EntryPoint, options: Options, query: Query) -> OutputPlugin:
    said = f"the output plugin {point.name!r} cannot be loaded"
    try:
        made = point.load()(options, query)
    except CdcpipeError:
        raise
    except Exception as ex:
        _log.debug(said, exc_info=ex)
        hint = f"an installed package registers it as {point.value}; -vv shows where it fails"
        raise InvalidArgumentsError(f"{said}: {type(ex).__name__}: {ex}", hint=hint) from ex
    if not isinstance(made, OutputPlugin):
        msg = f"{said}: {point.value} is no subclass of cdcpipe.plugins.base.OutputPlugin"
        raise InvalidArgumentsError(msg)
    return made


def failure_of_others(error: BaseException) -> str | None:
    """Return which plugin of another package an error comes from, and from which line. None if no such plugin has raised it.

    The error's own text is left out, because it may have values of rows.
    """
    found = None
    for frame, line in walk_tb(error.__traceback__):
        plugin = frame.f_locals.get("self")
        if isinstance(plugin, OutputPlugin) and not frame.f_globals["__name__"].startswith("cdcpipe."):
            found = f"the output plugin {plugin.name!r} failed: {type(error).__name__} in line {line} of {frame.f_code.co_filename}"
    return found
