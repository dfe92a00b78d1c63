"""``cdcpipe decode``: renders a raw capture as a live stream would be rendered, or explains it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from typing import Any

import click
import cloup

from cdcpipe import logs
from cdcpipe.subcommands.decode import RenderConfig, explain, render
from cli.options import (
    CONTEXT_SETTINGS,
    connection_options,
    connection_parameters_of,
    output_options,
    output_plugin,
    parse_options,
    spill_threshold_of,
    whole_options,
)

__all__ = ["command"]


_EXAMPLE = """\b
Example:
  cdcpipe decode --output wal2json -o format-version=2 -N day.cdc
"""


@cloup.command(
    "decode",
    context_settings=CONTEXT_SETTINGS,
    short_help="Render or explain captured records, without a server.",
    epilog=_EXAMPLE,
)
@click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@connection_options
@cloup.option_group(
    "Output",
    *output_options,
    cloup.option(
        "--explain", "is_explaining", is_flag=True, help="Print each message with all its fields instead of rendering it."
    ),
)
@cloup.option_group("pgoutput", *whole_options)
def command(
    *,
    files: Sequence[str],
    output: str | None,
    plugin_options: Sequence[str],
    wal2json1: bool,
    wal2json2: bool,
    is_explaining: bool,
    write_header: bool,
    write_nl: bool,
    whole_transactions: bool,
    spill_threshold: int | None,
    **connection: Any,
) -> None:
    """Render what "cdcpipe -H" captured from a pgoutput slot: files, segments of a staging log, or stdin.

    Several files are one stream, in the given order; "-" is stdin. With connection options, the command asks the server for facts
    that the stream does not contain, such as the names of domains. Without them it asks no server.
    """
    logs.to_stderr(logging.WARNING, "cdcpipe: warning: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        # A filter that a signal stops has not finished its work. The default action shows this in its exit status.
        signal.signal(number, signal.SIG_DFL)
    files = files or ["-"]
    if is_explaining:
        rendering = (output, wal2json1, wal2json2, plugin_options, write_header, write_nl, whole_transactions)
        if any(rendering) or spill_threshold is not None:
            raise click.UsageError("--explain goes with no option of rendering")
        if any(connection.values()):
            raise click.UsageError("--explain asks no server: leave the options of the connection out")
        explain(files)
        return
    name, options = output_plugin(output, wal2json1=wal2json1, wal2json2=wal2json2)
    if name is None:
        raise click.UsageError("--output NAME, -j, -J or --explain has to be given")
    config = RenderConfig(
        output=name,
        options=options | parse_options(plugin_options),
        parameters=connection_parameters_of(**connection) or None,
        whole_transactions=whole_transactions,
        spill_threshold=spill_threshold_of(spill_threshold, whole_transactions=whole_transactions),
        write_header=write_header or wal2json2,
        write_newline=write_nl,
    )
    render(files, config)
