"""Lists the commands of both command lines: each with its path, its options, and its --help text."""

from collections.abc import Iterator

import click

from cli.main import cdcpipe
from spark_sink.__main__ import group

__all__ = ["COMMANDS", "example", "help_text", "options"]


def _walk(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _walk(found, f"{path} {name}")


COMMANDS = dict([*_walk(cdcpipe, "cdcpipe"), *_walk(group, "cdcpipe-spark")])


def options(path: str) -> list[click.Option]:
    """Return the options of a command, in the order of --help."""
    command = COMMANDS[path]
    grouped = [option for section in getattr(command, "option_groups", ()) for option in section]
    params = [param for param in command.get_params(click.Context(command)) if isinstance(param, click.Option)]
    return [*grouped, *(param for param in params if param not in grouped)]


def help_text(path: str, width: int = 80) -> str:
    command = COMMANDS[path]
    with command.make_context(path, [], resilient_parsing=True, terminal_width=width) as context:
        return command.get_help(context)


def example(path: str) -> str:
    """Return the shell commands of the example at the end of --help."""
    _, heading, commands = help_text(path, 200).rpartition("\nExample:\n")
    assert heading, path
    return "\n".join(line.removeprefix("  ") for line in commands.splitlines())
