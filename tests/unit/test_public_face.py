"""``import spark_sink``: what programs may use. docs/spark/python.md documents exactly that."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import spark_sink
from spark_sink import LauncherConfig, RunConfig, build_session

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/spark/python.md").read_text()


def first_column(heading: str) -> set[str]:
    """Return the names in the first column of the page's table with this heading."""
    _, found, rest = PAGE.partition(f"\n| {heading} | ")
    assert found
    rows = rest.partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


@pytest.mark.parametrize("name", spark_sink.__all__)
def test_a_public_name_is_there_and_explains_itself(name: str) -> None:
    assert (getattr(spark_sink, name).__doc__ or "").strip()


def test_the_page_has_what_is_public_and_nothing_else() -> None:
    assert first_column("name") == set(spark_sink.__all__) == set(dir(spark_sink))
    with pytest.raises(AttributeError, match="no attribute 'Warehouse'"):
        spark_sink.Warehouse  # noqa: B018
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    imported = re.findall(r"^from spark_sink import (.*)$", pages, re.MULTILINE)
    assert {name for names in imported for name in names.split(", ")} <= set(spark_sink.__all__)
    assert not re.findall(r"^(?:from|import) spark_sink\.", pages, re.MULTILINE)


def test_a_hint_names_only_what_programs_may_use() -> None:
    code = "".join(path.read_text() for path in (ROOT / "spark_sink").rglob("*.py"))
    named = set(re.findall(r"^ *f?\".*?\bspark_sink\.([\w.]+)\(", code, re.MULTILINE))
    assert named
    assert named <= set(spark_sink.__all__)


@pytest.mark.parametrize("config", [LauncherConfig, RunConfig])
def test_every_field_of_a_configuration_is_on_the_page(config: type) -> None:
    of_tests = {"command", "hook"}
    assert first_column(f"`{config.__name__}`") == {field.name for field in fields(config)} - of_tests


def test_a_session_is_made_with_the_arguments_of_the_page() -> None:
    """By their place, the page's arguments were others: `build_session("parquet")` made a session for Delta called "parquet"."""
    found = re.search(r"`build_session\((.+?)\)` makes the session", PAGE)
    assert found is not None
    inspect.signature(build_session).bind(**dict.fromkeys(re.findall(r"(\w+)=", found[1])))
    with pytest.raises(TypeError, match="positional"):
        inspect.signature(build_session).bind("parquet")
