"""Options from a file and from the environment: the class of all commands of ``cdcpipe-spark``.

What counts, from the strongest: the command line, a ``CDCPIPE_`` variable, the file that ``--config`` names, the default.

    slot = "shop_cdc"        # a key at the top is for each command that has the option, as CDCPIPE_SLOT is
    [run]                    # a table is for one command, as CDCPIPE_RUN_SEAL_INTERVAL is, and counts more
    seal-interval = 0.5

The names are those of the long options. docs/operations/configuration.md has the rules. click itself looks values up in this order.
Here the variables get their names, the file becomes click's ``default_map``, and a wrong value is reported with its place.
"""

from __future__ import annotations

import difflib
import os
import shlex
import tomllib
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import cloup
from click.core import ParameterSource

from spark_sink.commands.all_commands import COMMANDS, load

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = [
    "APART",
    "CONFIG_NAMES",
    "CONFIG_SETTINGS",
    "ConfiguredCommand",
    "InForce",
    "all_options",
    "in_force",
    "long_name",
    "variables",
]

APART: Final = frozenset({"json", "table"})
"""Options that mean something else in each command. Only a command's own table, or its own variable, can set them."""

_FILE: Final = "spark_sink.config"
"""The key of ``Context.meta`` with the `_File`."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file that was read: its path, and the key of each option that it sets, by the name of click's parameter."""

    path: Path
    keys: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class InForce:
    """The value of an option as it was written (None: not set), and where it is from."""

    option: click.Option
    value: Any
    origin: str


class _Words(click.types.StringParamType):
    """The text of an option that may be repeated. A variable has several words, separated and quoted as in a shell."""

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        try:
            return shlex.split(rv)
        except ValueError as ex:
            raise click.BadParameter(f"the words cannot be told apart: {ex}") from ex


def _take_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    """Make the file the source of all options that the command line and the environment do not set."""
    if path is not None:
        command = ctx.command
        assert isinstance(command, ConfiguredCommand)
        ctx.default_map, keys, mistake = _read(path, command)
        ctx.meta[_FILE] = _File(path, keys)
        if mistake is not None:  # only now: `status` asks for one of the other options then
            raise mistake


CONFIG_NAMES: Final = ("--config",)
CONFIG_SETTINGS: Final[dict[str, Any]] = {
    "type": click.Path(exists=True, dir_okay=False, path_type=Path),
    "envvar": "CDCPIPE_CONFIG",
    "metavar": "FILE",
    "help": "Take options from this TOML file; the command line and CDCPIPE_ variables count more.",
}


class ConfiguredCommand(cloup.Command):
    """A command whose options can also be set by a file and by variables."""

    name: str

    def __init__(self, *args: Any, params: list[click.Parameter], **kwargs: Any) -> None:
        config = cloup.Option(CONFIG_NAMES, is_eager=True, expose_value=False, callback=_take_file, **CONFIG_SETTINGS)
        super().__init__(*args, params=[config, *params], **kwargs)  # first: it is read before the other eager options
        for option in self.configurable():
            option.envvar = variables(self.name, option)
            if option.multiple and isinstance(option.type, click.types.StringParamType):
                option.type = _Words()

    def configurable(self) -> Iterator[click.Option]:
        """Yield the options that a file can set, all but ``--config`` and ``--help``."""
        for param in self.params:
            if isinstance(param, click.Option) and param.opts[-1] != CONFIG_NAMES[-1]:
                yield param

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line. The message of a wrong value in a file or a variable begins with its place."""
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as ex:
            raise _located(ctx, ex) from ex


def long_name(option: click.Option) -> str:
    """Return an option's name in a file: its long name, without the dashes."""
    return option.opts[-1].removeprefix("--")


def variables(command: str, option: click.Option) -> list[str]:
    """Return the names of the variables that set the option, the strongest first."""
    name = long_name(option)
    both = [f"{command}_{name}"] if name in APART else [f"{command}_{name}", name]
    return [f"CDCPIPE_{text.replace('-', '_').upper()}" for text in both]


def in_force(command: ConfiguredCommand, arguments: Sequence[str]) -> list[InForce]:
    """Return the value of each option, in the order of --help, if the command got these arguments. A missing option is no error."""
    ctx = command.context_class(command, info_name=command.name, **command.context_settings)
    values, rest, _ = command.make_parser(ctx).parse_args(list(arguments))
    if rest:
        raise click.UsageError(f"unexpected argument: {rest[0]}")
    config = next(param for param in command.params if param.opts[-1] == CONFIG_NAMES[-1])
    config.handle_parse_result(ctx, values, [])
    found = []
    for option in command.configurable():
        assert option.name is not None
        value, source = option.consume_value(ctx, values)
        ctx.set_parameter_source(option.name, source)
        try:
            option.process_value(ctx, value)
        except click.MissingParameter:
            pass
        except click.BadParameter as ex:
            ex.param = option
            raise _located(ctx, ex) from ex
        is_set = isinstance(value, str | bool | int | float | Path | tuple | list)
        found.append(InForce(option, value if is_set else None, _origin(ctx, option) or source.name.lower()))
    return found


def _origin(ctx: click.Context, option: click.Parameter) -> str | None:
    """Return the place in a file, or the variable, that sets an option; None if it is neither."""
    assert option.name is not None
    source = ctx.get_parameter_source(option.name)
    if source == ParameterSource.DEFAULT_MAP:
        file: _File = ctx.meta[_FILE]
        return f"{file.path}: {file.keys[option.name]}"
    if source in (ParameterSource.ENVIRONMENT, None) and option.envvar:  # None: the variable's text could not be split
        names = [option.envvar] if isinstance(option.envvar, str) else option.envvar
        return next((name for name in names if os.environ.get(name)), None)
    return None


def _located(ctx: click.Context, error: click.BadParameter) -> click.UsageError:
    """Return the error with the place of the wrong value, if that is not the command line."""
    origin = None if error.param is None or isinstance(error, click.MissingParameter) else _origin(ctx, error.param)
    return error if origin is None else click.UsageError(f"{origin}: {error.message}", ctx)


# --- the file ---


def _read(path: Path, command: ConfiguredCommand) -> tuple[dict[str, Any], dict[str, str], click.UsageError | None]:
    """Return what the file sets for a command: the values, and the keys that set them, by the names of click's parameters.

    If the file has a mistake, it is returned, too, with all other values. Raises UsageError if the file is not TOML.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as ex:  # also UnicodeDecodeError
        raise click.UsageError(f"{path}: not TOML: {ex}") from ex
    except OSError as ex:
        raise click.UsageError(f"{path}: {ex.strerror}") from ex
    options = {long_name(option): option for option in command.configurable()}
    tables = {key: value for key, value in data.items() if isinstance(value, dict) and key in COMMANDS}
    own = tables.pop(command.name, {})
    top = {key: value for key, value in data.items() if key not in COMMANDS or not isinstance(value, dict)}
    values, keys, wrong = {}, {}, []
    for table, prefix in ((top, ""), (own, f"{command.name}.")):
        for key, value in table.items():
            if key in options and not (key in APART and table is top):
                option = options[key]
                assert option.name is not None
                keys[option.name] = f"{prefix}{key}"
                try:
                    values[option.name] = _value(option, value)
                except ValueError as ex:
                    wrong.append(_error(path, keys[option.name], str(ex)))
    return values, keys, next(chain(_misplaced(path, command.name, options, top, own), wrong), None)


def _misplaced(
    path: Path, command: str, options: Mapping[str, click.Option], top: Mapping[str, Any], own: Mapping[str, Any]
) -> Iterator[click.UsageError]:
    """Yield an error for each key that may not be where it is, or that no command has."""
    for key in top:
        if key in APART:
            yield _error(path, key, f"this option means something else in each command; write it under [{command}]")
        elif key not in options and key not in (others := {long_name(option) for _, option in all_options()}):
            yield _unknown(path, key, key, {*options, *others, *COMMANDS} - APART)
    for key in own:
        if key not in options:
            yield _unknown(path, f"{command}.{key}", key, options)


def all_options() -> Iterator[tuple[str, click.Option]]:
    """Yield each option of each command with the command's name. One that needs Spark is left out where Spark is not installed."""
    for name in COMMANDS:
        try:
            command = load(name)
        except ModuleNotFoundError:
            continue
        if isinstance(command, ConfiguredCommand):
            yield from ((name, option) for option in command.configurable())


def _unknown(path: Path, place: str, key: str, known: Iterable[str]) -> click.UsageError:
    close = difflib.get_close_matches(key.replace("_", "-"), sorted(set(known) - {key}), 1)
    return _error(path, place, f"there is no such option{f'; did you mean {close[0]}?' if close else ''}")


def _error(path: Path, place: str, text: str) -> click.UsageError:
    return click.UsageError(f"{path}: {place}: {text}")


def _value(option: click.Option, value: Any) -> Any:
    """Return a value of the file as click takes it. Raises ValueError for a value of the wrong kind."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise ValueError(f"it takes true or false, not {_kind(value)}")
        return value
    if option.multiple:
        if isinstance(value, dict) and "=" in str(option.metavar):
            return [f"{key}={text}" for key, text in _pairs(value, "")]
        if isinstance(value, list):
            return [_text(each) for each in value]
        table = " or a table" if "=" in str(option.metavar) else ""
        raise ValueError(f"it takes an array{table}, not {_kind(value)}")
    if value is True and isinstance(option.flag_value, int | float):  # an option that goes without its value, too
        return option.flag_value
    return _text(value)


def _pairs(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the keys, with dots, and values of a table. TOML makes tables in tables of ``conf.spark.ui.port = 1``."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _pairs(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value).lower() if isinstance(value, bool) else _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"it takes a text or a number, not {_kind(value)}")
    return str(value)


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", str: "a text", int: "a number", float: "a number", list: "an array", dict: "a table"}
    return kinds.get(type(value), "a date or time (write it in quotes)")
