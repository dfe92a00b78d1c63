"""Runs the command line ``cdcpipe``, and turns every outcome into one of the ten exit codes and a line on stderr.

click's own exit codes (2 for usage, 1 for the rest) have other meanings among these ten.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from cdcpipe import descriptors, logs
from cdcpipe.error_texts import SETTING, shown, unexpected
from cdcpipe.errors import CdcpipeError, InvalidArgumentsError, OutputError
from cdcpipe.limits import limit_hint
from cdcpipe.options import text_mistake, usage_hint
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.plugins import failure_of_others
from cli.interrupt import Interrupted, interrupt
from cli.main import cdcpipe

__all__ = ["invoke", "main"]

log = logging.getLogger("cdcpipe")


def invoke(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Errors are written to stderr.

    An interrupted stream has ended in order, so its exit code is 0. Any other interrupted command has not finished its work, so its
    exit code is 128 plus the signal's number.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    given = sys.argv[1:] if arguments is None else arguments
    try:
        result = cdcpipe.main(args=arguments, prog_name="cdcpipe", standalone_mode=False)
    except Interrupted as ex:
        return 128 + ex.number
    except click.exceptions.Exit as ex:
        return ExitCode.SUCCESS if ex.exit_code == 0 else ExitCode.INVALID_ARGS
    except click.ClickException as ex:
        context = ex.ctx if isinstance(ex, click.UsageError) else None
        names = {name for param in context.command.params for name in param.opts} if context else ()
        return _complain(ex.format_message(), usage_hint(given, names), ExitCode.INVALID_ARGS)
    except InvalidArgumentsError as ex:  # -publication=shop is a port that libpq refuses
        names = {name for command in (cdcpipe, *cdcpipe.commands.values()) for param in command.params for name in param.opts}
        return _complain(ex.message, usage_hint(given, names, ex.hint), ex.exit_code)
    except CdcpipeError as ex:
        limit = limit_hint(ex)
        return _complain(ex.message, limit or ex.hint, ExitCode.SYSTEM_ERROR if limit else ex.exit_code)
    except (KeyboardInterrupt, click.Abort) as ex:
        if isinstance(ex.__cause__, EOFError):  # click makes an Abort of it, as if somebody had typed ^D
            return _unexpected(ex.__cause__)
        return 128 + signal.SIGINT
    except Exception as ex:  # noqa: BLE001 - every error has its line and its exit code
        if (mistake := text_mistake(ex, given)) is not None:
            return _complain(*mistake, ExitCode.INVALID_ARGS)
        return _unexpected(ex)
    except SystemExit:  # click raises this for a closed pipe
        return ExitCode.SYSTEM_ERROR
    return result if isinstance(result, ExitCode) else ExitCode.SUCCESS


def _unexpected(ex: Exception) -> ExitCode:
    """Print an error that no other part of cdcpipe explains, and return the exit code."""
    log.debug("unexpected", exc_info=ex)
    if (limit := limit_hint(ex)) is not None:
        return _complain(f"a limit of this machine is reached: {shown(ex)}", limit, ExitCode.SYSTEM_ERROR)
    if (failure := failure_of_others(ex)) is not None:
        hint = f"it is no part of cdcpipe; -vv shows how it came there, with {SETTING}=1 also the error's text"
        return _complain(failure, hint, ExitCode.SYSTEM_ERROR)
    hint = f"this is a defect of cdcpipe: -vv shows how it came there, with {SETTING}=1 also the error's text"
    return _complain(unexpected(ex), hint, ExitCode.SYSTEM_ERROR)


def _complain(message: str, hint: str | None, code: ExitCode) -> ExitCode:
    """Write an error and its hint to stderr, and return the exit code."""
    logs.complain("cdcpipe", message, hint, int(code))
    return code


def main() -> NoReturn:
    """Run the command line and exit. This is the entry point of the console script."""
    descriptors.set_up()
    logs.hook_exceptions("cdcpipe")
    code = invoke()
    try:
        sys.stdout.flush()
    except (OSError, OutputError):
        code = code or ExitCode.SYSTEM_ERROR
    # Python's own flush at exit would turn a closed pipe into exit code 120.
    os._exit(code)
