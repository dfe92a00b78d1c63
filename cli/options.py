"""The options that several commands share, as decorators, and the functions that turn their values into a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import click
import cloup

from cdcpipe.config import CREATE_TIMEOUT_S, SlotConfig
from cdcpipe.libpq.parameters import connection_parameters
from cdcpipe.options import (
    CONNECTION,
    CONTEXT_SETTINGS,
    CREATE_SLOT,
    FAILOVER,
    NEW_PUBLICATION,
    PUBLICATION,
    SLOT,
    take_new_publication,
)
from cdcpipe.pgoutput.transactions import SPILL_THRESHOLD
from cdcpipe.publishing import with_companions
from cdcpipe.units import parse_seconds, parse_size

__all__ = [
    "CONTEXT_SETTINGS",
    "CommandGroup",
    "DefaultedOption",
    "connection_options",
    "connection_parameters_of",
    "new_publication_options",
    "output_options",
    "output_plugin",
    "parse_options",
    "slot_config",
    "slot_option",
    "slot_options",
    "spill_threshold_of",
    "whole_options",
]

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


class CommandGroup(cloup.Group):
    """A group of commands. A command that does not exist is an error that lists those that do."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name, as click does."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            raise click.UsageError(f"no such command: {args[0]}; the commands are {', '.join(sorted(self.commands))}", ctx)
        return super().resolve_command(ctx, args)


class DefaultedOption(cloup.Option):
    """An option that is None if it is not given, with the default value ``show_default``.

    --help shows this value as every other default. (click puts a text in parentheses, because it takes it for a description.)
    """

    def get_help_extra(self, ctx: click.Context) -> click.types.OptionHelpExtra:
        """Return what --help shows behind the sentence."""
        return super().get_help_extra(ctx) | {"default": str(self.show_default)}


connection_options = cloup.option_group(
    CONNECTION.title, CONNECTION.help, *(cloup.option(*option.names, **option.settings) for option in CONNECTION.options)
)

new_publication_options = tuple(cloup.option(*option.names, **option.settings) for option in NEW_PUBLICATION)

slot_option = cloup.option(*SLOT.names, required=True, **SLOT.settings)


def slot_options(*, is_required: bool) -> Decorator:
    """Return the options that name the slot and say what is created with it.

    ``is_required`` is False for the stream: it is a command group, and a group can't have required options.
    """
    return cloup.option_group(
        "Slot",
        cloup.option(*SLOT.names, required=is_required, **SLOT.settings),
        cloup.option(*PUBLICATION.names, **PUBLICATION.settings),
        cloup.option(*CREATE_SLOT.names, **CREATE_SLOT.settings),
        *new_publication_options,
        cloup.option(
            "-P",
            "--plugin",
            cls=DefaultedOption if is_required else cloup.Option,
            metavar="NAME",
            show_default="pgoutput" if is_required else "pgoutput; wal2json with -j or -J and no --publication",
            help="Make a new slot with this output plugin of the server.",
        ),
        cloup.option(
            "--create-timeout",
            cls=DefaultedOption,
            type=parse_seconds,
            metavar="SECS",
            show_default=f"{CREATE_TIMEOUT_S:g}",
            help="With -c, wait at most this long until the transactions that are running now have ended; 0: no limit.",
        ),
        cloup.option(*FAILOVER.names, type=click.Choice(["yes", "no"]), **FAILOVER.settings),
    )


output_options = (
    cloup.option(
        "--output",
        metavar="NAME",
        help="Render a pgoutput slot's records here, with this output plugin: wal2json, test_decoding, debezium, json, or an"
        " installed one.",
    ),
    cloup.option(
        "-o",
        "--option",
        "plugin_options",
        multiple=True,
        metavar="KEY[=VALUE]",
        help="Pass this option to the output plugin, exactly as it is; repeatable.",
    ),
    cloup.option("-j", "--wal2json1", is_flag=True, help="Write wal2json's format version 1: a JSON object for each transaction."),
    cloup.option(
        "-J", "--wal2json2", is_flag=True, help="Write wal2json's format version 2, with headers: a JSON object for each change."
    ),
    cloup.option("-H", "--write-header", is_flag=True, help="Write a header line, w LSN LENGTH, before each record."),
    cloup.option("-N", "--write-nl", is_flag=True, help="Write a newline after each record."),
)
"""The options for how records are written. A stream and a capture share them."""

whole_options = (
    cloup.option(
        "--whole-transactions",
        is_flag=True,
        help="Write only committed transactions, whole and in commit order, however the server sends them.",
    ),
    cloup.option(
        "--spill-threshold",
        cls=DefaultedOption,
        type=parse_size,
        metavar="SIZE",
        show_default=f"{SPILL_THRESHOLD >> 20}MiB",
        help="With --whole-transactions, hold up to this much in memory, and the rest in files in $TMPDIR.",
    ),
)
"""The options for assembling transactions. A stream and a capture share them."""


def parse_options(texts: Sequence[str]) -> dict[str, str | None]:
    """Return the options given with ``-o KEY[=VALUE]``. If a key is given twice, the last value counts."""
    return {key: value if equals else None for key, equals, value in (text.partition("=") for text in texts)}


def spill_threshold_of(given: int | None, *, whole_transactions: bool) -> int:
    """Return the value of ``--spill-threshold``, or its default. Without ``--whole-transactions`` nothing is held."""
    if given is not None and not whole_transactions:
        raise click.UsageError("--spill-threshold goes with --whole-transactions: otherwise nothing is held")
    return SPILL_THRESHOLD if given is None else given


def output_plugin(output: str | None, *, wal2json1: bool, wal2json2: bool) -> tuple[str | None, dict[str, str | None]]:
    """Return the output plugin that ``--output``, ``-j`` or ``-J`` names, and the options that this implies."""
    if wal2json1 and wal2json2:
        raise click.UsageError("-j and -J exclude each other")
    if (wal2json1 or wal2json2) and output not in (None, "wal2json"):
        raise click.UsageError(f"-j and -J are --output wal2json, not {output}")
    if wal2json1:
        return "wal2json", {"format-version": "1", "include-lsn": "true"}
    if wal2json2:
        return "wal2json", {"format-version": "2"}
    return output, {}


def connection_parameters_of(
    *, dbname: str | None, host: str | None, port: str | None, username: str | None, params: Sequence[str]
) -> dict[str, str]:
    """Return libpq's parameters from the options of ``connection_options``. The result is empty if none is given."""
    given = [("dbname", dbname), ("host", host), ("port", port), ("user", username), *map(_parse_parameter, params)]
    return connection_parameters((key, value) for key, value in given if value is not None)


def _parse_parameter(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        # The value may be a connection string with a password in it.
        raise click.UsageError("--param takes KEY=VALUE; what was given is something else (it is not shown)")
    return key, value


def slot_config(
    *,
    slot: str | None,
    create_slot: bool,
    plugin: str | None,
    default_plugin: str = "pgoutput",
    create_timeout: float | None,
    failover: str | None,
    publications: Sequence[str],
    **options: Any,
) -> SlotConfig:
    """Build the slot's configuration from ``slot_options`` and ``connection_options``."""
    if not slot:
        raise click.UsageError("--slot NAME has to be given")
    if create_timeout is not None and not create_slot:
        raise click.UsageError("--create-timeout goes with -c: otherwise no slot is made")
    new = take_new_publication(options)
    return SlotConfig(
        parameters=connection_parameters_of(**options),
        slot=slot,
        create=create_slot,
        plugin=plugin or default_plugin,
        is_plugin_asked=plugin is not None,
        publications=with_companions(publications, new),
        new_publication=new,
        create_timeout_s=CREATE_TIMEOUT_S if create_timeout is None else create_timeout or None,
        failover=None if failover is None else failover == "yes",
    )
