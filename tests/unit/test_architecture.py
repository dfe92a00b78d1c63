"""docs/architecture.md follows the code: the files and names in it exist. test_imports.py compares the floors."""

import ast
import re

import pytest

from support.paths import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
PLACES = sorted(set(re.findall(r"`(\w+(?:\.\w+)?)` in\s+`([\w/]+\.py)`", PAGE)))
FILES = sorted(set(re.findall(r"`((?:\w+/)+\w+\.py|(?:cdcpipe|spark_sink)/(?:\w+/)+)`", PAGE)))


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_there(name: str) -> None:
    assert any((ROOT / package / name).exists() for package in (".", "cdcpipe", "spark_sink")), name


def test_the_map_has_every_part() -> None:
    """Every module at the top of the core, and every folder."""
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE.partition("## The map")[2]))
    modules = {path.name for path in (ROOT / "cdcpipe").glob("[!_]*.py")}
    folders = {f"{path.parent.name}/" for package in ("cdcpipe", "spark_sink") for path in (ROOT / package).glob("*/__init__.py")}
    assert min(len(modules), len(folders)) > 10
    assert (modules | folders) - named == set()


@pytest.mark.parametrize(("name", "file"), PLACES)
def test_a_name_is_in_the_file(name: str, file: str) -> None:
    source = next(
        ROOT / package / file for package in (".", "cdcpipe", "spark_sink") if (ROOT / package / file).exists()
    ).read_text()
    owner, _, own = name.rpartition(".")
    assert re.search(rf"^ *(?:def|class) {own}\b|^{own}\b", source, re.MULTILINE), f"{file} has no {own}"
    if owner[:1].isupper():
        assert re.search(rf"^class {owner}\b", source, re.MULTILINE), f"{file} has no {owner}"


def test_the_named_places_exist() -> None:
    assert len(PLACES) > 15
    assert ("Follower.catch_up", "spark_sink/pipeline/follower.py") in PLACES


MOST_LINES, MOST_FUNCTION_LINES, MOST_METHODS = 500, 80, 25
CODE = sorted(path for package in ("cdcpipe", "cli", "spark_sink", "scripts") for path in (ROOT / package).rglob("*.py"))


def is_output_plugin(node: ast.ClassDef) -> bool:
    """The API of output plugins says which callbacks a plugin has."""
    return any("Plugin" in ast.unparse(base) for base in node.bases)


def test_nothing_is_too_long() -> None:
    """A long function, class or module has more than one task. A generated module is a table."""
    found = []
    for path in CODE:
        text = path.read_text()
        place = path.relative_to(ROOT)
        if text.count("\n") > MOST_LINES and "generate-pg-type" not in text[:500]:
            found.append(f"{place}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.FunctionDef)
                and node.end_lineno is not None
                and node.end_lineno - node.lineno >= MOST_FUNCTION_LINES
            ):
                found.append(f"{place}: {node.name} has {node.end_lineno - node.lineno + 1} lines")
            if isinstance(node, ast.ClassDef) and not is_output_plugin(node):
                methods = sum(isinstance(each, ast.FunctionDef) for each in node.body)
                if methods > MOST_METHODS:
                    found.append(f"{place}: {node.name} has {methods} methods")
    assert len(CODE) > 300
    assert found == []


def test_an_error_of_a_directory_says_what_to_do() -> None:
    """Damaged, unknown or missing files need a person, who gets a hint."""
    errors = {"DamagedFileError", "StagingError", "WarehouseError"}
    raised = [
        (path.relative_to(ROOT), node.lineno, node.exc)
        for path in CODE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) in errors
    ]
    assert len(raised) > 50
    assert [f"{path}:{line}" for path, line, call in raised if not any(keyword.arg == "hint" for keyword in call.keywords)] == []
