"""``cdcpipe doctor``: finds problems of a stream before they occur."""

from __future__ import annotations

import sys
from typing import Any

import click
import cloup

from cdcpipe.doctor.facts import Asked
from cdcpipe.doctor.findings import has_errors, printed
from cdcpipe.options import PUBLICATION, take_new_publication
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.publishing import with_companions
from cdcpipe.subcommands.doctor import doctor
from cli.options import (
    CONTEXT_SETTINGS,
    connection_options,
    connection_parameters_of,
    new_publication_options,
    slot_option,
)

__all__ = ["command"]

_EXAMPLE = """\b
Example:
  cdcpipe doctor -d shop -S shop_cdc --publication shop -c
"""


@cloup.command(
    "doctor",
    context_settings=CONTEXT_SETTINGS,
    short_help="Find what would go wrong with a stream, and say how to mend it.",
    epilog=_EXAMPLE,
)
@connection_options
@cloup.option_group(
    "Stream",
    slot_option,
    cloup.option(*PUBLICATION.names, **PUBLICATION.settings),
    cloup.option(
        "-c", "--create-slot", is_flag=True, help="Judge a start with -c, which makes publications and slot that are not there."
    ),
    *new_publication_options,
    cloup.option("-P", "--plugin", metavar="NAME", default="pgoutput", show_default=True, help="Judge a slot with this plugin."),
    cloup.option("--copy", is_flag=True, help="Judge a start that copies the tables first, and so has to read them."),
)
@cloup.option_group(
    "Output",
    cloup.option("--quick", is_flag=True, help="Leave out the publications and their tables, and how fast the server writes WAL."),
    cloup.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs."),
)
def command(
    *,
    slot: str,
    publications: tuple[str, ...],
    create_slot: bool,
    plugin: str,
    copy: bool,
    quick: bool,
    as_json: bool,
    **options: Any,
) -> ExitCode:
    """Find what would go wrong with a stream from a slot, now or later. Each finding is a line, with the way to mend it.

    Give the same options as for the stream, as far as they are listed below. The command changes nothing, and opens or locks no
    table. If the connection names several hosts, it also checks the settings that a failover from the primary to a standby needs.
    The exit code is 1 if an error is found.
    """
    new = take_new_publication(options)
    asked = Asked(slot, plugin, with_companions(publications, new), new, create_slot, copy)
    found = doctor(connection_parameters_of(**options), asked, quick=quick)
    click.echo(printed(found.findings, as_json=as_json, server=found.server))
    sys.stdout.flush()
    return ExitCode.INVALID_ARGS if has_errors(found.findings) else ExitCode.SUCCESS
