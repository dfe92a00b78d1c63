"""``cdcpipe decode``: what was captured raw, rendered as a live stream would be, or explained."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

import click

from cdcpipe.offline import RenderConfig, explain, render
from cdcpipe.pgoutput.transactions import SPILL_THRESHOLD
from cdcpipe.replication.connection import connection_parameters
from cli.options import CONTEXT_SETTINGS, SIZE, connection_options, parse_pair

__all__ = ["command"]


@click.command("decode", context_settings=CONTEXT_SETTINGS, epilog="Example: cdcpipe decode --output wal2json -N day.cdc")
@click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--output", metavar="NAME", help="Output plugin that renders the records, as for a stream.")
@click.option(
    "-o", "--option", "plugin_options", multiple=True, metavar="KEY[=VALUE]", help="Option for the output plugin. Repeatable."
)
@click.option("-j", "--wal2json1", is_flag=True, help="As for a stream: wal2json, format version 1.")
@click.option("-J", "--wal2json2", is_flag=True, help="As for a stream: wal2json, format version 2, with headers.")
@click.option("--explain", "is_explaining", is_flag=True, help="Print each message with all its fields instead.")
@click.option("-H", "--write-header", is_flag=True, help="Write a header line, w LSN LENGTH, before each record.")
@click.option("-N", "--write-nl", is_flag=True, help="Write a newline after each record.")
@click.option(
    "--whole-transactions",
    is_flag=True,
    help="Put streamed and prepared transactions together: only committed ones are rendered, in commit order.",
)
@click.option(
    "--spill-threshold",
    type=SIZE,
    default=SPILL_THRESHOLD,
    metavar="SIZE",
    help="With --whole-transactions: hold so much in memory, the rest in files in $TMPDIR.  [default: 64MiB]",
)
@connection_options
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
    spill_threshold: int,
    dbname: str | None,
    host: str | None,
    port: str | None,
    username: str | None,
    params: Sequence[str],
) -> None:
    """Render what "cdcpipe -H" captured from a pgoutput slot: files, segments of a staging log, or stdin.

    Several files are one stream, in the order given; "-" is stdin. The server is asked for what the stream does not say
    (such as the names of domains) if one of the options -d, -h, -p, -U, -m names it, and never otherwise.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="cdcpipe: warning: %(message)s", force=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        # A filter that was stopped has not done its work: it must not look as if it had.
        signal.signal(number, signal.SIG_DFL)
    files = files or ["-"]
    if is_explaining:
        if output or wal2json1 or wal2json2 or plugin_options or write_header or write_nl or whole_transactions:
            raise click.UsageError("--explain goes with no option of rendering")
        explain(files)
        return
    if wal2json1 and wal2json2:
        raise click.UsageError("-j and -J exclude each other")
    if (wal2json1 or wal2json2) and output not in (None, "wal2json"):
        raise click.UsageError(f"-j and -J are --output wal2json, not {output}")
    name = "wal2json" if wal2json1 or wal2json2 else output
    if name is None:
        raise click.UsageError("--output NAME, -j, -J or --explain has to be given")
    options: dict[str, str | None] = {}
    if wal2json1:
        options = {"format-version": "1", "include-lsn": "true"}
    elif wal2json2:
        options = {"format-version": "2"}
    for option in plugin_options:
        key, equals, value = option.partition("=")
        options[key] = value if equals else None
    given = [("dbname", dbname), ("host", host), ("port", port), ("user", username), *(parse_pair(p, "--param") for p in params)]
    parameters = [(key, value) for key, value in given if value is not None]
    config = RenderConfig(
        output=name,
        options=options,
        parameters=connection_parameters(parameters) if parameters else None,
        whole_transactions=whole_transactions,
        spill_threshold=spill_threshold,
        write_header=write_header or wal2json2,
        write_newline=write_nl,
    )
    render(files, config)
