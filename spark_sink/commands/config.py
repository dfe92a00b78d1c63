"""``cdcpipe-spark config show``: prints which options a command would have, and where each one is from."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

import click
import cloup

from cdcpipe import error_texts, masks
from spark_sink.commands.all_commands import COMMANDS, load
from spark_sink.commands.configured import (
    CONFIG_NAMES,
    CONFIG_SETTINGS,
    ConfiguredCommand,
    InForce,
    all_options,
    in_force,
    long_name,
    variables,
)
from spark_sink.commands.options import CONTEXT_SETTINGS
from spark_sink.spark import secret_settings

__all__ = ["command"]

_EXAMPLE = """\b
Example:
  cdcpipe-spark config show --config shop.toml run
"""


@cloup.group("config", context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
def command() -> None:
    """Show which options are in force."""


@command.command(
    "show",
    context_settings=CONTEXT_SETTINGS | {"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Print the options that a command would have now.",
    epilog=_EXAMPLE,
)
@cloup.argument("name", metavar="[COMMAND]", default="run", help="Show the options of this command; run by default.")
@cloup.argument("arguments", metavar="[OPTION]...", nargs=-1, type=click.UNPROCESSED, help="Add these options to the command.")
@cloup.option(*CONFIG_NAMES, **CONFIG_SETTINGS)
def show(*, name: str, arguments: tuple[str, ...], config: Path | None) -> None:
    """Print the options that a command would have now, as TOML, with the place where each value is from. Runs nothing.

    Passwords and keys are not shown. A wrong option is an error, as it would be for the command.
    """
    found = load(name) if name in COMMANDS else None
    if not isinstance(found, ConfiguredCommand):
        raise click.UsageError(f"config show takes a command with options, not {name}")
    options = in_force(found, [*([] if config is None else [CONFIG_NAMES[-1], str(config)]), *arguments])
    click.echo("\n".join(_lines(found, options)))


def _lines(found: ConfiguredCommand, options: list[InForce]) -> list[str]:
    shown = [_line(each) for each in options]
    width = min(max(len(text) for text, _ in shown), 60)
    lines = [f"# cdcpipe-spark {found.name}", f"[{found.name}]", *(f"{text:{width}}  # {remark}" for text, remark in shown)]
    known = {name for option in found.configurable() for name in variables(found.name, option)}
    own = f"CDCPIPE_{found.name.replace('-', '_').upper()}_"
    unknown = {name for name in os.environ if name.startswith("CDCPIPE_")} - known
    for name in sorted(unknown - _right_elsewhere() if unknown else ()):
        close = difflib.get_close_matches(name, sorted(known), 1, 0.85)
        if close or name.startswith(own):
            lines.append(f"# {name} sets no option of {found.name}{f': did you mean {close[0]}?' if close else ''}")
    return lines


def _right_elsewhere() -> set[str]:
    """Return the variables that are no mistake although the command shown may not have them: those of any command."""
    options = {name for command, option in all_options() for name in variables(command, option)}
    return {*options, str(CONFIG_SETTINGS["envvar"]), masks.KEY_VARIABLE, error_texts.SETTING}


def _line(each: InForce) -> tuple[str, str]:
    """Return a line of TOML, and the remark beside it."""
    name, option = long_name(each.option), each.option
    if each.value is None or each.value == ():
        default = f", by default {option.show_default}" if isinstance(option.show_default, str) else ""
        return f"# {name}", "required, and not set" if option.required else f"not set{default}"
    return f"{name} = {_toml(option, each.value)}", each.origin.replace("commandline", "the command line")


def _toml(option: click.Option, value: Any) -> str:
    """Return an option's value as TOML, without passwords. A variable sets a switch by a word such as no."""
    if option.is_flag:
        value = click.BOOL.convert(value, option, None)
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(json.dumps(_without_password(option, str(text)), ensure_ascii=False) for text in value)}]"
    return json.dumps(_without_password(option, str(value)), ensure_ascii=False)


def _without_password(option: click.Option, text: str) -> str:
    if option.multiple and "=" in str(option.metavar):
        key, equals, _ = text.partition("=")
        if equals and secret_settings.is_secret(key):
            return f"{key}={secret_settings.NOT_SHOWN}"
    return secret_settings.without_password(text)
