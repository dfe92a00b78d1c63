"""``cdcpipe``: the main command. Its flat options are those of pg_logical_cdc, so that it can replace that program.

Everything that the C program does not have is a subcommand or a long option. This file parses options, builds a configuration, and
calls the core. invoke.py makes the exit codes of the results.
"""

from __future__ import annotations

import fcntl
import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import click
import cloup
from click.core import ParameterSource

from cdcpipe import logs
from cdcpipe.config import PollConfig, StreamConfig, StreamOptions
from cdcpipe.descriptors import STDOUT, stdout_error
from cdcpipe.exposition import Address, serving
from cdcpipe.lsn import LSN, format_lsn
from cdcpipe.options import LOG_FORMAT, METRICS
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.streaming.metrics import StreamMetrics
from cdcpipe.subcommands.poll import poll_until_free
from cdcpipe.subcommands.stream import stream
from cdcpipe.system_ids import parse_system
from cdcpipe.units import parse_seconds
from cli.interrupt import Interrupted
from cli.options import (
    CONTEXT_SETTINGS,
    CommandGroup,
    DefaultedOption,
    connection_options,
    output_options,
    output_plugin,
    parse_options,
    slot_config,
    slot_options,
    spill_threshold_of,
    whole_options,
)

__all__ = ["cdcpipe", "run"]

log = logging.getLogger("cdcpipe")


STANDBY_INTERVAL_S = 0.1
"""How often a standby looks at the slot by default (``-i``). A standby should take over in well under a second."""

COMMANDS = ("checksum", "ddl", "decode", "doctor", "prepare", "slot")
"""The module of a subcommand in `cli` has its name, and a click command called ``command``."""


class _Group(CommandGroup):
    """The main command. A subcommand is imported only when it is called or listed, so that a stream starts sooner."""

    def load(self, names: Sequence[str] = COMMANDS) -> None:
        """Import subcommands, and add them to the group."""
        for name in names:
            if name not in self.commands:
                self.add_command(importlib.import_module(f"cli.{name}").command)

    def list_commands(self, ctx: click.Context) -> list[str]:
        self.load()
        return super().list_commands(ctx)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        self.load(args[:1] if args and args[0] in COMMANDS else COMMANDS)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.load()
        super().format_commands(ctx, formatter)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "--slot=NAME [OPTION]...", prefix="Usage:")
        formatter.write_usage(ctx.command_path, "COMMAND [OPTION]...", prefix="   or:")


_EXAMPLE = """\b
Example:
  now=$(psql -d shop -Atc "select pg_current_wal_lsn()")
  cdcpipe -d shop -S shop_cdc --publication shop -J -N -A --endpos "$now"
"""


@cloup.group(cls=_Group, invoke_without_command=True, context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@connection_options
@slot_options(is_required=False)
@cloup.option_group(
    "Output",
    *output_options,
    cloup.option(
        "-D", "--fd", type=int, metavar="N", default=1, show_default=True, help="Write the records to this file descriptor."
    ),
)
@cloup.option_group(
    "pgoutput",
    *whole_options,
    cloup.option(
        "--proto-version",
        type=int,
        metavar="N",
        show_default="the lowest that serves",
        help="Speak this version of pgoutput's protocol.",
    ),
    cloup.option("--binary", is_flag=True, help="Ask for values in binary form."),
    cloup.option("--messages", is_flag=True, help="Ask for logical messages (pg_logical_emit_message), too."),
    cloup.option(
        "--streaming",
        cls=DefaultedOption,
        type=click.Choice(["off", "on", "parallel"]),
        show_default="off",
        help="Let the server send large transactions before they commit.",
    ),
    cloup.option(
        "--two-phase",
        is_flag=True,
        help="Let the server send prepared transactions when they are prepared; from then on the slot always does so.",
    ),
    cloup.option(
        "--origin",
        cls=DefaultedOption,
        type=click.Choice(["any", "none"]),
        show_default="any",
        help="Ask for changes of any origin, or only for those made on this server.",
    ),
)
@cloup.option_group(
    "Start and end",
    cloup.option("--startpos", type=LSN.parse, metavar="LSN", help="Leave out what committed before this position, in this run."),
    cloup.option(
        "--endpos",
        type=LSN.parse,
        metavar="LSN",
        help="Exit with 0 when everything is written that committed before this position.",
    ),
    cloup.option(
        "--endpos-wait",
        is_flag=True,
        help="With --endpos, close the output then, and take feedback until q or the end of stdin.",
    ),
    cloup.option(
        "--expect",
        type=parse_system,
        metavar="SYSTEM_ID/TIMELINE",
        help="Refuse a server that is not this one, and end when a standby leaves this timeline.",
    ),
    cloup.option(
        "--expect-lsn",
        type=LSN.parse,
        metavar="LSN",
        help="Refuse a slot that is beyond this position, up to which you have the changes, and a server whose WAL ends before it.",
    ),
)
@cloup.option_group(
    "Feedback and timing",
    cloup.option("-A", "--auto-feedback", is_flag=True, help="Confirm whatever has been written."),
    cloup.option(
        "-F",
        "--feedback-interval",
        type=parse_seconds,
        metavar="SECS",
        default="0",
        show_default=True,
        help="Send confirmed feedback to the server after this time at the latest.",
    ),
    cloup.option(
        "-s",
        "--status-interval",
        type=parse_seconds,
        metavar="SECS",
        default="1",
        show_default=True,
        help="Send a status update to the server this often; 0: only when it asks.",
    ),
    cloup.option(
        "--idle-positions",
        is_flag=True,
        help="With -H, write an empty record for the position of an idle server, and confirm it only after its F.",
    ),
    cloup.option(
        "--receive-timeout",
        type=parse_seconds,
        metavar="SECS",
        default="300",
        show_default=True,
        help="End after this silence of the server, which is asked for a sign of life at half of it; 0: never.",
    ),
)
@cloup.option_group(
    "Waiting for the slot",
    cloup.option("-L", "--poll-mode", is_flag=True, help="Exit with 0 as soon as the slot is free, and write no records."),
    cloup.option("--standby", is_flag=True, help="Wait until the slot is free, then stream, in one process."),
    cloup.option(
        "-u",
        "--poll-duration",
        type=parse_seconds,
        metavar="SECS",
        show_default="no limit",
        help="With -L or --standby, give up with 9 after this time (0: look once), or with 2 if -L -c has made no slot by then.",
    ),
    cloup.option(
        "-i",
        "--poll-interval",
        type=parse_seconds,
        metavar="SECS",
        show_default="1; 0.1 with --standby",
        help="With -L or --standby, look this often.",
    ),
)
@cloup.option_group(
    "Monitoring",
    cloup.option(*METRICS.names, **METRICS.settings),
    cloup.option(*LOG_FORMAT.names, type=click.Choice(logs.FORMATS), **LOG_FORMAT.settings),
)
@cloup.option(
    "-v", "--verbose", count=True, help="Say on stderr what is configured and what happens; -vv: each status update, too."
)
@click.version_option(None, "--version", package_name="cdcpipe", message="cdcpipe %(version)s")
@click.pass_context
def cdcpipe(ctx: click.Context, /, **options: Any) -> ExitCode | None:
    """Write the changes of a PostgreSQL database, from a logical replication slot, to stdout.

    On stdin, the command "F LSN" confirms what lies before LSN, and "q" ends the stream.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options_before(ctx, ctx.invoked_subcommand)
        _check_fd(STDOUT)  # before a slot is created, of which nobody would hear
        return None
    return run(**options)


def run(
    *,
    verbose: int,
    plugin_options: Sequence[str],
    poll_mode: bool,
    poll_duration: float | None,
    poll_interval: float | None,
    standby: bool,
    fd: int,
    feedback_interval: float,
    status_interval: float,
    auto_feedback: bool,
    write_header: bool,
    write_nl: bool,
    wal2json1: bool,
    wal2json2: bool,
    output: str | None,
    proto_version: int | None,
    binary: bool,
    messages: bool,
    streaming: str | None,
    two_phase: bool,
    origin: str | None,
    whole_transactions: bool,
    spill_threshold: int | None,
    startpos: LSN | None,
    endpos: LSN | None,
    endpos_wait: bool,
    expect: str | None,
    expect_lsn: LSN | None,
    idle_positions: bool,
    receive_timeout: float,
    metrics: Address | None,
    **slot_options: Any,
) -> ExitCode:
    """Run one stream or one poll. The arguments are the options of the command line."""
    _log_to_stderr(verbose)
    output, output_options = output_plugin(output, wal2json1=wal2json1, wal2json2=wal2json2)
    write_header = write_header or wal2json2
    _refuse_unless(not (poll_mode and standby), "--poll-mode and --standby exclude each other")
    _refuse_unless(not (poll_mode and metrics), "--metrics goes with a stream or --standby, not with -L")
    _refuse_unless(endpos is not None or not endpos_wait, "--endpos-wait goes with --endpos")
    _refuse_unless(write_header or not idle_positions, "--idle-positions goes with -H: without headers nobody sees an empty record")
    if not poll_mode:
        _check_fd(fd)
    if (wal2json1 or wal2json2) and not slot_options["publications"]:
        slot_options["default_plugin"] = "wal2json"  # pg_logical_cdc does this, too
    slot = slot_config(**slot_options)
    pgoutput_options = _pgoutput_options(
        proto_version=proto_version, binary=binary, messages=messages, streaming=streaming, two_phase=two_phase, origin=origin
    )
    poll = _poll_config(poll_duration, poll_interval, poll_mode=poll_mode, standby=standby)
    config = StreamConfig(
        slot=slot,
        options=pgoutput_options | parse_options(plugin_options),
        output=output,
        output_options=output_options,
        whole_transactions=whole_transactions,
        spill_threshold=spill_threshold_of(spill_threshold, whole_transactions=whole_transactions),
        start_lsn=startpos or LSN(0),
        end_lsn=endpos,
        expected_system=expect,
        expected_lsn=expect_lsn,
        feedback_interval_s=feedback_interval,
        status_interval_s=status_interval,
        silence_limit_s=receive_timeout,
        idle_positions=idle_positions,
        standby=poll if standby else None,
        stream=StreamOptions(
            out_fd=fd,
            write_header=write_header,
            write_newline=write_nl,
            auto_feedback=auto_feedback,
            wait_after_end=endpos_wait,
            needs_commands=endpos is None or endpos_wait or not auto_feedback,
        ),
    )
    _log_configuration(config, poll if poll_mode or standby else None)
    return poll_until_free(config, poll) if poll_mode else _stream(config, metrics)


def _refuse_options_before(ctx: click.Context, command: str) -> None:
    """Refuse options before the name of a command. They are the stream's, and the command would ignore them, even ``-d``."""
    given = [
        option.opts[0]
        for option in ctx.command.params
        if option.expose_value and ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    ]
    _refuse_unless(
        not given, f"what stands before {command} has no effect on it: {', '.join(given)}; a command's options follow its name"
    )


def _poll_config(duration: float | None, interval: float | None, *, poll_mode: bool, standby: bool) -> PollConfig:
    if not (poll_mode or standby) and (duration is not None or interval is not None):
        log.warning("-u and -i have no effect: they go with -L or --standby")  # no error: pg_logical_cdc takes them
    return PollConfig(duration, interval if interval is not None else STANDBY_INTERVAL_S if standby else 1.0)


def _stream(config: StreamConfig, metrics: Address | None) -> ExitCode:
    """Run the stream, and serve its metrics."""
    measured = StreamMetrics(config.slot.slot)
    try:
        with serving(metrics, measured.collect):
            return stream(config, measured)
    except Interrupted:  # before the stream has begun; the exit code is the same as during the stream
        return ExitCode.SUCCESS


def _refuse_unless(condition: bool, message: str) -> None:
    if not condition:
        raise click.UsageError(message)


def _pgoutput_options(**given: str | int | None) -> dict[str, str | None]:
    """Return pgoutput's options in the server's form. Options that were not given are left out."""
    return {
        name: "true" if value is True else str(value) for name, value in given.items() if value is not None and value is not False
    }


def _check_fd(fd: int) -> None:
    """Refuse a descriptor that can't be written to, now, because the reason would be unclear later."""
    if fd <= 0:
        msg = f"--fd takes a descriptor to write to, not {fd}"
        raise click.UsageError(msg)
    try:
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError as ex:
        msg = f"--fd {fd}: {ex.strerror}; the shell opens it like this: {fd}>FILE"
        raise click.UsageError(msg) from ex
    if mode == os.O_RDONLY and fd == STDOUT:
        raise stdout_error()
    if mode == os.O_RDONLY:
        raise click.UsageError(f"--fd {fd}: it is open for reading only")


def _log_to_stderr(verbose: int) -> None:
    level = logging.WARNING if not verbose else logging.INFO if verbose == 1 else logging.DEBUG
    logs.to_stderr(level, "cdcpipe: %(message)s")


def _log_configuration(config: StreamConfig, poll: PollConfig | None) -> None:
    """Log the whole configuration. It can't contain a password."""
    slot = config.slot
    log.info("slot %s, create %s, plugin for a new slot %s", slot.slot, slot.create, slot.plugin)
    log.info("publications %s, a new one has %s", ", ".join(slot.publications) or "none", slot.new_publication)
    log.info(
        "plugin options %s",
        " ".join(key if value is None else f"{key}={value}" for key, value in config.options.items()) or "none",
    )
    log.info("connection %s", " ".join(f"{key}={value}" for key, value in slot.parameters.items()) or "libpq's defaults")
    if poll is not None:
        log.info(
            "poll duration %s, interval %g s",
            "no limit" if poll.duration_s is None else f"{poll.duration_s:g} s",
            poll.interval_s,
        )
    log.info(
        "descriptor %d, header %s, newline %s, auto feedback %s, feedback interval %g s, status interval %g s, start %s, end %s",
        config.stream.out_fd,
        config.stream.write_header,
        config.stream.write_newline,
        config.stream.auto_feedback,
        config.feedback_interval_s,
        config.status_interval_s,
        format_lsn(config.start_lsn),
        "none" if config.end_lsn is None else format_lsn(config.end_lsn),
    )
