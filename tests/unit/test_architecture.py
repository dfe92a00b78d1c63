"""docs/architecture.md follows the code: the files and names in it exist. test_imports.py compares the floors."""

import re

import pytest

from support.paths import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
PLACES = sorted(set(re.findall(r"`(\w+(?:\.\w+)?)` in\s+`([\w/]+\.py)`", PAGE)))
FILES = sorted(set(re.findall(r"`((?:\w+/)+\w+\.py|(?:cdcpipe|spark_sink)/(?:\w+/)+)`", PAGE)))


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_there(name: str) -> None:
    assert any((ROOT / package / name).exists() for package in (".", "cdcpipe", "spark_sink")), name


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
