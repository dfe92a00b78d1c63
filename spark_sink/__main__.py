"""The entry point of ``cdcpipe-spark``, which brings a slot's changes to a staging directory and to Spark tables.

Each subcommand is a module of the same name with a ``command``. It is imported only when it is called, because `land` and `status`
need no Spark. An error is reported as one line on stderr, with a hint, and as one of the exit codes of ``cdcpipe``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

import click
import cloup

from cdcpipe import descriptors, logs
from cdcpipe.error_texts import SETTING, unexpected
from cdcpipe.errors import CdcpipeError, OutputError
from cdcpipe.options import text_mistake, usage_hint
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.threads import have_no_blas_threads
from spark_sink.commands import signals
from spark_sink.commands.all_commands import COMMANDS, load
from spark_sink.commands.options import CONTEXT_SETTINGS
from spark_sink.files.system_limits import described
from spark_sink.spark import without_pandas
from spark_sink.spark.environment import import_nothing_from_here

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_logger = logging.getLogger("cdcpipe-spark")

_EXAMPLE = """\b
Example:
  cdcpipe-spark status --warehouse warehouse
"""


class _Group(cloup.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        return load(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"no such command: {args[0]}; the commands are {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@cloup.group(cls=_Group, context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@click.version_option(None, "--version", package_name="cdcpipe", message="cdcpipe-spark %(version)s")
def group() -> None:
    """Take the changes of a PostgreSQL database to Spark tables."""


def invoke(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: one of those of ``cdcpipe``, or one that the subcommand defines."""
    if not sys.platform.startswith("linux"):
        return _complain("cdcpipe-spark needs Linux", "run it in a container: examples/Containerfile", ExitCode.INIT_FAILED)
    try:
        signals.listen()
        have_no_blas_threads()
        without_pandas.want()
        import_nothing_from_here()
        result = group.main(args=arguments, prog_name="cdcpipe-spark", standalone_mode=False)
    except (KeyboardInterrupt, click.Abort) as ex:  # from Spark's own handler, before `signals.kept` restores ours
        if isinstance(ex.__cause__, EOFError):  # click takes each of them for the end of stdin, which no command reads
            return _unexpected(ex.__cause__)
        return 128 + signal.SIGINT
    except click.exceptions.NoArgsIsHelpError as ex:
        logs.show(ex.format_message())
        return ExitCode.INVALID_ARGS
    except click.ClickException as ex:
        context = ex.ctx if isinstance(ex, click.UsageError) else None
        names = {name for param in context.command.params for name in param.opts} if context else ()
        hint = usage_hint(sys.argv[1:] if arguments is None else arguments, names)
        return _complain(ex.format_message(), hint, ExitCode.INVALID_ARGS)
    except CdcpipeError as ex:
        return _complain(ex.message, ex.hint, ex.exit_code)
    except ModuleNotFoundError as ex:
        return _complain(f"{ex.name} is not installed", "pip install 'cdcpipe[spark]'", ExitCode.INIT_FAILED)
    except SystemExit:  # click raises this if stdout is a closed pipe
        return ExitCode.SYSTEM_ERROR
    except Exception as ex:  # noqa: BLE001 - every error has its line and its exit code
        if (mistake := text_mistake(ex, sys.argv[1:] if arguments is None else arguments)) is not None:
            return _complain(*mistake, ExitCode.INVALID_ARGS)
        return _unexpected(ex)
    # The exit code that a command passes to Context.exit.
    return result if isinstance(result, int) else ExitCode.SUCCESS


def _unexpected(ex: Exception) -> ExitCode:
    """Print an error that no command explains, and return the exit code."""
    _logger.info("unexpected", exc_info=ex)
    if (limit := described(ex)) is not None:
        return _complain(*limit, ExitCode.SYSTEM_ERROR)
    from spark_sink.spark.failure import explained  # here, because few errors are of Spark

    if isinstance(error := explained(ex), CdcpipeError):
        return _complain(error.message, error.hint, error.exit_code)
    hint = f"this is a defect of cdcpipe: -v shows how it came there, with {SETTING}=1 also the error's text"
    return _complain(unexpected(ex), hint, ExitCode.SYSTEM_ERROR)


def _complain(message: str, hint: str | None, code: ExitCode) -> ExitCode:
    """Print the error and the hint on stderr, and return the exit code."""
    logs.complain("cdcpipe-spark", message, hint, int(code))
    return code


def main() -> NoReturn:
    """Run the command line and exit. The console script calls this."""
    descriptors.set_up()
    logs.hook_exceptions("cdcpipe-spark")
    code = invoke()
    # What is left in a buffer would fail again in Python's own flush at exit, with exit code 120.
    try:
        sys.stdout.flush()
    except (OSError, OutputError):
        code = code or ExitCode.SYSTEM_ERROR
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it lasts until the exit
    try:
        sys.stderr.flush()
    except OSError:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.exit(code)


if __name__ == "__main__":
    main()
