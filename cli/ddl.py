"""``cdcpipe ddl``: installs, removes and examines DDL capture."""

from __future__ import annotations

import sys
from typing import Any

import click
import cloup

from cdcpipe.ddl import script
from cdcpipe.doctor.findings import has_errors, printed
from cdcpipe.options import check_names
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.replication.session import connected, initialising
from cdcpipe.subcommands import ddl
from cli.options import CONTEXT_SETTINGS, CommandGroup, DefaultedOption, connection_options, connection_parameters_of

__all__ = ["command"]

_EXAMPLE = """\b
Example:
  cdcpipe ddl install -d shop --publication shop
  cdcpipe ddl status -d shop --publication shop
"""


def _example(line: str) -> str:
    return f"\b\nExample:\n  {line}\n"


_publications = cloup.option(
    "--publication",
    "publications",
    callback=check_names,
    multiple=True,
    metavar="NAME",
    help="Describe the tables of this publication; repeatable.",
)


@cloup.group(
    "ddl",
    cls=CommandGroup,
    no_args_is_help=False,
    context_settings=CONTEXT_SETTINGS,
    short_help="Have the server tell the stream what DDL does to the tables.",
    epilog=_EXAMPLE,
)
def command() -> None:
    """Have the server write a logical message into the stream for each DDL statement, with event triggers in the database."""


@command.command(
    "install",
    context_settings=CONTEXT_SETTINGS,
    short_help="Install DDL capture in a database, or bring it to this version.",
    epilog=_example("cdcpipe ddl install -d shop --publication shop"),
)
@connection_options
@cloup.option_group(
    "Capture",
    cloup.option(
        "--schema",
        callback=check_names,
        metavar="NAME",
        cls=DefaultedOption,
        show_default=ddl.DEFAULT_SCHEMA,
        help="Create the functions in this schema, and the schema if it does not exist.",
    ),
    _publications,
    cloup.option(
        "--statements/--no-statements",
        cls=DefaultedOption,
        default=None,
        show_default="--statements",
        help="Put the texts of the statements into the messages.",
    ),
    cloup.option(
        "--strict/--no-strict",
        cls=DefaultedOption,
        default=None,
        show_default="--no-strict",
        help="Let a DDL statement fail if it can't be captured.",
    ),
    cloup.option("--print", "is_print", is_flag=True, help="Print the SQL instead of running it, and connect to no server."),
)
def install(
    *,
    schema: str | None,
    publications: tuple[str, ...],
    statements: bool | None,
    strict: bool | None,
    is_print: bool,
    **connection: Any,
) -> None:
    """Install DDL capture in a database, in one transaction. Run it again to change the options or to get a later version.

    A further installation keeps --schema, --statements and --strict as they are unless you give them. An installation takes a
    superuser, or the role that a managed service has in its place. Everybody's DDL is captured then.
    """
    wanted = ddl.Wanted(schema, statements, strict)
    if is_print:
        if publications:
            raise click.UsageError("--publication and --print can't be used together: the tables of a publication are the server's")
        click.echo(script.install(schema or ddl.DEFAULT_SCHEMA, wanted.over(script.Settings())), nl=False)
        return
    with connected(connection_parameters_of(**connection)) as server, initialising():
        done = ddl.install(server, wanted, publications)
        settings = done.settings
        click.echo(
            f"DDL capture of version {settings.version} is installed in the database {server.database}, schema {done.schema},"
            f" {settings.description}"
        )
        if done.kept:
            click.echo(f"kept as it was installed before: {' '.join(done.kept)}")


@command.command(
    "remove",
    context_settings=CONTEXT_SETTINGS,
    short_help="Remove DDL capture from a database.",
    epilog=_example("cdcpipe ddl remove -d shop"),
)
@connection_options
def remove(**connection: Any) -> None:
    """Remove DDL capture from a database. The schema goes, too, if nothing else is in it."""
    with connected(connection_parameters_of(**connection)) as server, initialising():
        schema = ddl.remove(server)
        click.echo(
            f"there is no DDL capture in the database {server.database}"
            if schema is None
            else f"DDL capture is removed from the database {server.database}, schema {schema}"
        )


@command.command(
    "status",
    context_settings=CONTEXT_SETTINGS,
    short_help="Say whether DDL is captured in a database.",
    epilog=_example("cdcpipe ddl status -d shop --publication shop"),
)
@connection_options
@cloup.option_group(
    "Report",
    cloup.option(
        "--publication",
        "publications",
        callback=check_names,
        multiple=True,
        metavar="NAME",
        help="Look at this publication, too; repeatable.",
    ),
    cloup.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs."),
)
def status(*, publications: tuple[str, ...], as_json: bool, **connection: Any) -> ExitCode:
    """Say whether DDL is captured in a database: one line for each finding. The exit code is 1 if an error is found."""
    with connected(connection_parameters_of(**connection)) as server, initialising():
        found, findings = ddl.examine(server, publications)
    installed = None
    if found is not None:
        known = found.settings
        installed = {
            "schema": found.schema,
            "version": known and known.version,
            "statements": known and known.statements,
            "strict": known and known.strict,
            "triggers": found.triggers,
        }
    click.echo(printed(findings, as_json=as_json, installed=installed))
    sys.stdout.flush()
    return ExitCode.INVALID_ARGS if has_errors(findings) else ExitCode.SUCCESS
