"""--help: groups, whole sentences, nothing cut off, an example; and the pages agree with it."""

import re

import click
import pytest

from support.command_lines import COMMANDS, example, help_text, options
from support.paths import ROOT

README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
CLICKS_OWN = ("--version", "--help")
IN_NO_GROUP = {
    "--config",
    "--verbose",
    "--version",
    "--help",
    "--in-use",
    "--replace-lost",
    "--expect-system-id",
    "--parts",
    "--quiet",
}


def own_options(path: str) -> list[click.Option]:
    """A command's options without click's."""
    return [option for option in options(path) if option.opts[-1] not in CLICKS_OWN]


@pytest.mark.parametrize("path", COMMANDS)
def test_an_option_is_explained_in_one_sentence(path: str) -> None:
    shown = " ".join(help_text(path).split())
    for option in own_options(path):
        text = option.help or ""
        assert re.fullmatch(r"[A-Z].*[^.]\.", text), option.opts
        assert not re.search(r"[.!?] [A-Z]", text), option.opts
        assert text in shown, option.opts


@pytest.mark.parametrize("path", COMMANDS)
def test_no_name_is_broken_on_a_usual_terminal(path: str) -> None:
    """Such as ``cdcpipe-`` at the end of a line, and ``spark`` on the next one."""
    assert re.findall(r"\S*\w-$", help_text(path, 80), re.MULTILINE) == []


@pytest.mark.parametrize("path", COMMANDS)
def test_no_range_is_shown_as_click_does(path: str) -> None:
    """Such as ``[x>=0.1]``: the sentence says which values an option takes, or the error does."""
    assert not re.search(r"[<>]=?x|x[<>]", help_text(path))


@pytest.mark.parametrize("path", COMMANDS)
def test_only_descriptions_of_defaults_are_in_parentheses(path: str) -> None:
    shown = re.findall(r"\[default: \((.*?)\)\]", " ".join(help_text(path, 200).split()))
    assert [text for text in shown if " " not in text] == []


@pytest.mark.parametrize("path", COMMANDS)
def test_the_options_are_in_groups(path: str) -> None:
    grouped = {option.opts[-1] for section in getattr(COMMANDS[path], "option_groups", ()) for option in section}
    assert {option.opts[-1] for option in options(path)} - grouped <= IN_NO_GROUP


@pytest.mark.parametrize("path", [path for path, command in COMMANDS.items() if isinstance(command, click.Group)])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_summary_is_cut_off(path: str, width: int) -> None:
    _, heading, listed = help_text(path, width).partition("\nCommands:\n")
    listed = listed.partition("\nExample:\n")[0]
    assert heading
    assert "..." not in listed
    found = re.findall(r"^  ([a-z-]+) +([A-Z][^.]*\.)$", re.sub(r"\n {4,}", " ", listed), re.MULTILINE)
    assert [f"{path} {name}" for name, _ in found] == [other for other in COMMANDS if other.rpartition(" ")[0] == path]


# --- the pages ---


@pytest.mark.parametrize("path", COMMANDS)
def test_every_name_of_an_option_is_on_a_page(path: str) -> None:
    everything = "".join(PAGES.values())
    for name in (name for option in own_options(path) for name in option.opts):
        assert re.search(rf"`{re.escape(name)}[` =]", everything), f"{path}: {name} is on no page"


def section(path: str) -> str:
    """Return the part of a page to which the README's table of commands links; its options, if the link is to a whole page.

    A command of a group has a section of its own on the page to which the README links for the group.
    """
    link = None
    for named in (path, path.rpartition(" ")[0]):
        link = link or re.search(rf"^\| \[`{named}`\]\(([^)#]*)#?([^)]*)\)", README, re.MULTILINE)
    assert link, f"{path} is not among the commands of the README"
    anchor = link[2] or "options" if f"[`{path}`]" in README else path.replace(" ", "-")
    for part in re.split(r"^(?=## )", PAGES[ROOT / link[1]], flags=re.MULTILINE):
        if re.sub(r"[^\w\- ]", "", part.partition("\n")[0].lower()).strip().replace(" ", "-") == anchor:
            return part
    pytest.fail(f"{link[1]} has no section {anchor}")


def rows(path: str) -> list[tuple[list[str], str]]:
    """Return the rows of the section's tables of options: the options in each row, and the default in it."""
    found = re.findall(r"^\| (`-[^|]*) \| ([^|]*) ?\| [^|]*\|$", section(path).replace("\\|", "/"), re.MULTILINE)
    return [(re.findall(r"`(-[^` ]*)[^`]*`", names), default.strip().replace("`", "")) for names, default in found]


@pytest.mark.parametrize("path", [path for path in COMMANDS if path not in ("cdcpipe checksum", "cdcpipe-spark")])
def test_the_page_has_all_options(path: str) -> None:
    named = {name for names, _ in rows(path) for name in names}
    missing = [option.opts for option in own_options(path) if not named & {*option.opts}]
    assert missing == []


@pytest.mark.parametrize("path", [path for path in COMMANDS if path not in ("cdcpipe checksum", "cdcpipe-spark")])
def test_the_page_has_the_order_and_the_defaults_of_the_help(path: str) -> None:
    by_name = {name: option for option in options(path) for name in option.opts}
    own = [
        (by_name[names[0]], default)
        for names, default in rows(path)
        if names[0] in by_name and {*names} <= {*by_name[names[0]].opts}
    ]
    documented = [option for option, _ in own]
    assert documented == [option for option in options(path) if option in documented]
    for option, default in own:
        if option.required:
            assert default == "required", option.opts
        elif option.show_default is True:
            assert default == str(option.default), option.opts
        elif option.show_default:  # said in words
            assert default, option.opts
        else:
            assert not re.match(r"[0-9]|off|none", default), option.opts


def test_the_groups_of_the_pages_are_those_of_the_help() -> None:
    elsewhere = {"Connection", "Commands", "Example"}
    for path in ("cdcpipe", "cdcpipe-spark run"):
        shown = re.findall(r"^(\S.*):$", help_text(path), re.MULTILINE)
        titles = re.findall(r"^### (.*)$", section(path), re.MULTILINE)
        assert [title for title in titles if title not in elsewhere] == [title for title in shown if title not in elsewhere]


# --- examples ---

RUN = "\n".join(block for text in PAGES.values() for block in re.findall(r"^```sh run\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
IN_PAGES = ["", " doctor", " run", " status", " as-of", " purge", " snapshot", " verify"]


@pytest.mark.parametrize("name", IN_PAGES)
def test_an_example_that_needs_spark_is_one_of_the_pages(name: str) -> None:
    """The pages' examples run on the database of the environment. tests/system/test_readme.py runs the other examples."""
    command = example(f"cdcpipe-spark{name}").replace("\\\n", "").replace(" -d shop", "")
    assert " ".join(command.split()) in RUN
