"""Every option of every command of `cdcpipe-spark` can be set on the command line, by a variable, and in a file."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.core import ParameterSource

from cdcpipe import logs
from spark_sink.commands.all_commands import COMMANDS, load
from spark_sink.commands.configured import APART, ConfiguredCommand, long_name, variables
from support.forked_commands import ForkedCommands
from support.paths import ROOT

CONFIGURED = {name: command for name in COMMANDS if isinstance(command := load(name), ConfiguredCommand)}
OPTIONS = [
    pytest.param(name, option, is_own, id=f"{name}-{long_name(option)}-{'own' if is_own else 'all'}")
    for name, command in CONFIGURED.items()
    for option in command.configurable()
    for is_own in (True, False)
    if is_own or long_name(option) not in APART
]
"""Each option, set for its command alone and for all commands."""
SAMPLES = ("4", "3d", "off", "public.a", "6", "5d", "22:00-06:00", "public.b", "k=v", "k=w", "1,2", "/", "/tmp")
"""Texts, two of which each option that takes a text accepts."""


@pytest.fixture(autouse=True)
def text_logs() -> Iterator[None]:
    """The format of the logs belongs to the process: ``--log-format`` sets it when it is parsed."""
    yield
    logs.use("text")


def test_every_command_with_options_can_be_configured() -> None:
    assert {*COMMANDS} - {*CONFIGURED} == {"config"}


def taken(name: str, option: click.Option, arguments: Sequence[str]) -> tuple[Any, ParameterSource | None]:
    """Return the value that the command gets for an option, and its source. Other options may be missing."""
    command = CONFIGURED[name]
    assert option.name is not None
    with command.make_context(name, list(arguments), resilient_parsing=True) as ctx:
        return ctx.params[option.name], ctx.get_parameter_source(option.name)


def samples(name: str, option: click.Option) -> list[str]:
    """Return two texts that the option accepts and that do not mean its default."""
    default, _ = taken(name, option, [])
    texts = list(option.type.choices) if isinstance(option.type, click.Choice) else SAMPLES
    found = [text for text in texts if taken(name, option, [option.opts[-1], str(text)])[0] not in (default, None, ())]
    assert found, f"no sample is a value of {option.opts}"
    return [found[0], found[-1]]


def in_toml(option: click.Option, text: str) -> str:
    return f"[{json.dumps(text)}]" if option.multiple else json.dumps(text)


@pytest.mark.parametrize(("name", "option", "is_own"), OPTIONS)
def test_every_option_can_be_set_each_way(
    name: str, option: click.Option, is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = long_name(option)
    monkeypatch.setattr(option, "expose_value", True)  # else click does not keep the value of --log-format
    if option.is_flag:
        arguments, texts, in_file = [f"--{key}"], ["true", "true"], "true"
    else:
        texts = samples(name, option)
        arguments, in_file = [f"--{key}", texts[0]], in_toml(option, texts[0])
    file, variable = tmp_path / "shop.toml", variables(name, option)[0 if is_own else -1]
    config = ["--config", str(file)]
    file.write_text(f"[{name}]\n{key} = {in_file}\n" if is_own else f"{key} = {in_file}\n")

    expected = taken(name, option, arguments)
    assert expected[1] is ParameterSource.COMMANDLINE
    assert taken(name, option, config) == (expected[0], ParameterSource.DEFAULT_MAP)
    monkeypatch.setenv(variable, texts[0])
    assert taken(name, option, []) == (expected[0], ParameterSource.ENVIRONMENT)

    # Each over the next one.
    monkeypatch.setenv(variable, texts[1])
    other = taken(name, option, [] if option.is_flag else [f"--{key}", texts[1]])[0]
    assert taken(name, option, config) == (other, ParameterSource.ENVIRONMENT)
    assert taken(name, option, [*config, *arguments]) == expected


def test_an_option_that_is_set_for_all_commands_means_the_same_in_each() -> None:
    kinds = defaultdict(set)
    for command in CONFIGURED.values():
        for option in command.configurable():
            kinds[long_name(option)].add((type(option.type), option.is_flag, option.multiple))
    assert {key for key, found in kinds.items() if len(found) > 1} <= APART


def test_no_variable_has_two_meanings() -> None:
    meanings = defaultdict(set)
    for name, command in CONFIGURED.items():
        for option in command.configurable():
            for variable in variables(name, option):
                meanings[variable].add(long_name(option))
    assert {variable: keys for variable, keys in meanings.items() if len(keys) > 1} == {}
    scripts = [path for folder in ("scripts", ".ci") for path in (ROOT / folder).rglob("*") if path.is_file()]
    used = {found for path in scripts for found in re.findall(r"CDCPIPE_[A-Z_]+\b", path.read_text(errors="replace"))}
    assert "CDCPIPE_VENV" in used
    assert not used & {*meanings}


# --- what counts more ---


def test_a_commands_own_table_and_variable_count_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    option = next(option for option in CONFIGURED["land"].configurable() if long_name(option) == "slot")
    file = tmp_path / "shop.toml"
    file.write_text('slot = "all"\n[land]\nslot = "land"\n[run]\nslot = "run"\n')
    assert taken("land", option, ["--config", str(file)])[0] == "land"
    monkeypatch.setenv("CDCPIPE_CONFIG", str(file))
    assert taken("land", option, [])[0] == "land"
    monkeypatch.setenv("CDCPIPE_SLOT", "all")
    assert taken("land", option, [])[0] == "all"
    monkeypatch.setenv("CDCPIPE_LAND_SLOT", "own")
    assert taken("land", option, [])[0] == "own"
    monkeypatch.setenv("CDCPIPE_LAND_SLOT", "")  # is not set
    assert taken("land", option, [])[0] == "all"


def test_tables_arrays_and_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {long_name(option): option for option in CONFIGURED["run"].configurable()}
    file = tmp_path / "shop.toml"
    file.write_text(
        'publication = ["a b", "c"]\n[conf]\nspark.ui.enabled = false\nspark.sql.shuffle.partitions = 4\n"k.s" = "v"\n'
        '[run]\nparam = ["sslmode=require"]\n'
    )
    config = ["--config", str(file)]
    assert taken("run", options["publication"], config)[0] == ("a b", "c")
    assert taken("run", options["conf"], config)[0] == ("spark.ui.enabled=false", "spark.sql.shuffle.partitions=4", "k.s=v")
    assert taken("run", options["param"], config)[0] == ("sslmode=require",)
    monkeypatch.setenv("CDCPIPE_PUBLICATION", "'a b' c")
    assert taken("run", options["publication"], [])[0] == ("a b", "c")


def test_the_pause_of_watch_may_be_left_out(tmp_path: Path) -> None:
    option = next(option for option in CONFIGURED["status"].configurable() if long_name(option) == "watch")
    file = tmp_path / "shop.toml"
    file.write_text("[status]\nwatch = true\n")
    assert taken("status", option, ["--config", str(file)])[0] == 2.0


# --- mistakes ---

MISTAKES = [
    ("slto = 's'", "slto: there is no such option; did you mean slot?"),
    ("seal_interval = 1", "seal_interval: there is no such option; did you mean seal-interval?"),
    ("[lnad]\nslot = 's'", "lnad: there is no such option; did you mean land?"),
    ("[land]\nslto = 's'", "land.slto: there is no such option; did you mean slot?"),
    ("[land]\nwarehouse = 'w'", "land.warehouse: there is no such option"),
    ("table = ['a.b']", "table: this option means something else in each command; write it under [land]"),
    ("slot = true", "slot: it takes a text or a number, not true or false"),
    ("slot = ['s']", "slot: it takes a text or a number, not an array"),
    ("slot = 2026-03-01", "slot: it takes a text or a number, not a date or time (write it in quotes)"),
    ("publication = 'p'", "publication: it takes an array, not a text"),
    ("publication = {a = 'p'}", "publication: it takes an array, not a table"),
    ("param = 'a=b'", "param: it takes an array or a table, not a text"),
    ("create-slot = 'yes'", "create-slot: it takes true or false, not a text"),
    ("[land]\nseal-interval = 'soon'", "land.seal-interval: 'soon' is not a number of seconds"),
    ("failover = 'maybe'", "failover: 'maybe' is not one of 'yes', 'no'"),
    ("slot = ", "not TOML: "),
    ("slot = '\udcff'", "not TOML: "),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
@pytest.mark.parametrize("command", [("land",), ("config", "show", "land")], ids=" ".join)
def test_a_mistake_in_a_file_is_reported_with_its_place(
    text: str, message: str, command: tuple[str, ...], tmp_path: Path, commands: ForkedCommands
) -> None:
    file = tmp_path / "shop.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    required = ["--staging", str(tmp_path), *(["-S", "s"] if "failover" in text or "soon" in text else [])]
    required += ["--publication", "p"] if "publication" not in text else []
    ended = commands.cdcpipe_spark(*command, "--config", str(file), *required)
    assert (ended.code, ended.stdout) == (1, "")
    assert f"cdcpipe-spark: error: {file}: {message}" in ended.stderr


def test_a_mistake_in_a_variable_is_reported_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text, message in [
        ("CDCPIPE_SEAL_INTERVAL", "soon", "'soon' is not a number of seconds"),
        ("CDCPIPE_LAND_AVAILABLE_NOW", "perhaps", "'perhaps' is not a valid boolean"),
        ("CDCPIPE_PUBLICATION", "'p", "the words cannot be told apart"),
    ]:
        with monkeypatch.context() as patch:
            patch.setenv(variable, text)
            publication = [] if variable == "CDCPIPE_PUBLICATION" else ["--publication", "p"]
            with pytest.raises(click.UsageError, match=f"^{variable}: {message}"):
                CONFIGURED["land"].make_context("land", ["-S", "s", "--staging", "/tmp", *publication])


def test_a_file_that_is_not_there(tmp_path: Path, commands: ForkedCommands) -> None:
    ended = commands.cdcpipe_spark("land", "--config", str(tmp_path / "no.toml"))
    assert ended.code == 1
    assert "no.toml' does not exist" in ended.stderr


# --- config show ---


def test_config_show_says_where_each_value_is_from(tmp_path: Path, commands: ForkedCommands) -> None:
    file = tmp_path / "shop.toml"
    file.write_text("slot = 'shop_cdc'\npublication = ['shop']\n[land]\nseal-interval = 0.5\n")
    ended = commands.cdcpipe_spark("config", "show", "land", "--config", str(file), "--segment-size", "1MiB")
    assert ended.code == 0, ended.stderr
    lines = [re.sub(r"  +", "  ", line) for line in ended.stdout.splitlines()]
    assert lines[0] == "# cdcpipe-spark land"
    assert f'slot = "shop_cdc"  # {file}: slot' in lines
    assert f'seal-interval = "0.5"  # {file}: land.seal-interval' in lines
    assert 'segment-size = "1MiB"  # the command line' in lines
    assert 'on-gap = "stop"  # default' in lines
    assert "# staging  # required, and not set" in lines


def test_what_config_show_prints_is_a_configuration(
    tmp_path: Path, commands: ForkedCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shop.toml"
    arguments = ["--config", str(file), "-m", "sslmode=require", "--conf", "a=b", "--available-now", "--reconnect", "5", "-S", "s"]
    file.write_text("")
    monkeypatch.setenv("CDCPIPE_CREATE_SLOT", "no")
    shown = commands.cdcpipe_spark("config", "show", "run", *arguments).stdout
    monkeypatch.delenv("CDCPIPE_CREATE_SLOT")
    file.write_text(shown)
    again = commands.cdcpipe_spark("config", "show", "run", "--config", str(file)).stdout

    def values(text: str) -> list[str]:
        return [line.partition("  #")[0].strip() for line in text.splitlines() if not line.startswith(("#", "["))]

    assert 'param = ["sslmode=require"]' in values(shown)
    assert {"available-now = true", "create-slot = false"} <= {*values(shown)}
    # A number comes back as the text that the option parses.
    assert [line.replace('"', "") for line in values(again)] == [line.replace('"', "") for line in values(shown)]


@pytest.mark.parametrize(
    "text",
    [
        'dbname = "postgresql://r:CANARY@h/db"',
        'dbname = "postgresql://r:p/CANARY@h/db"',
        'dbname = "postgresql://h/db?user=r&password=CANARY"',
        'dbname = "host=h password=CANARY user=r"',
        "dbname = \"host=h password = 'CAN CANARY' user=r\"",
        'warehouse = "s3a://id:CANARY@bucket/w"',
        'param = ["sslpassword=CANARY"]',
        '[conf]\nspark.hadoop.fs.s3a.secret.key = "CANARY"',
        '[conf]\nspark.hadoop.fs.s3a.access.key = "CANARY"',
    ],
)
def test_config_show_shows_no_password(text: str, tmp_path: Path, commands: ForkedCommands) -> None:
    file = tmp_path / "shop.toml"
    file.write_text(text)
    ended = commands.cdcpipe_spark("config", "show", "--config", str(file))
    assert "CANARY" not in ended.stdout + ended.stderr
    assert "***" in ended.stdout or ended.code == 1, ended.stdout


@pytest.mark.parametrize("arguments", [["nonsense"], ["config"], ["land", "extra"], ["land", "--nonsense"]])
def test_config_show_refuses_what_is_no_command(arguments: list[str], commands: ForkedCommands) -> None:
    ended = commands.cdcpipe_spark("config", "show", *arguments)
    assert (ended.code, ended.stdout) == (1, "")


def test_config_show_names_a_variable_that_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from spark_sink.commands.config import command

    monkeypatch.setenv("CDCPIPE_SOLT", "s")
    monkeypatch.setenv("CDCPIPE_SEED", "7")  # of the scripts
    shown = CliRunner().invoke(command, ["show", "land"]).stdout
    assert shown.splitlines()[-1] == "# CDCPIPE_SOLT sets no option of land: did you mean CDCPIPE_SLOT?"


def test_config_show_takes_no_variable_for_misspelt_that_another_program_of_cdcpipe_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from spark_sink.commands.config import command

    for name in ("CDCPIPE_MASK_KEY", "CDCPIPE_ERROR_TEXTS", "CDCPIPE_LAND_SEAL_INTERVAL", "CDCPIPE_RUN_SEAL_INTERVAL"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CDCPIPE_SNAPSHOT", "never")
    for name in ("run", "land", "snapshot"):
        shown = CliRunner().invoke(command, ["show", name]).stdout
        assert "sets no option" not in shown
    monkeypatch.setenv("CDCPIPE_RUN_SEAL_INTERVALL", "1")
    monkeypatch.setenv("CDCPIPE_RUN_NONSENSE", "1")
    remarks = [line for line in CliRunner().invoke(command, ["show", "run"]).stdout.splitlines() if "sets no option" in line]
    assert remarks == [
        "# CDCPIPE_RUN_NONSENSE sets no option of run",
        "# CDCPIPE_RUN_SEAL_INTERVALL sets no option of run: did you mean CDCPIPE_RUN_SEAL_INTERVAL?",
    ]
