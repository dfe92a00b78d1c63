"""The pages: every example has its output, all links lead somewhere, the site can be built."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spark_sink.spark import session, settings
from spark_sink.warehouse import warehouse
from support.pages import ALONE, BLOCK, CHAIN, PAGES
from support.paths import ROOT

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def test_no_example_is_missed() -> None:
    marked = {page for page, text in PAGES.items() if re.search(r"^```\w+ run", text, re.MULTILINE)}
    assert marked == {*CHAIN, *ALONE}
    for page in marked:
        assert len(list(BLOCK.finditer(PAGES[page]))) == len(re.findall(r"^```\w+ run", PAGES[page], re.MULTILINE)), page


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub and the site give the headings."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for path, anchor in LINK.findall(FENCED.sub("", PAGES[page])):
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page}: {path}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page}: {path}#{anchor}"


def test_every_page_is_linked() -> None:
    linked = {
        ((ROOT / page).parent / path).resolve() if path else ROOT / page
        for page, text in PAGES.items()
        for path, _ in LINK.findall(text)
    }
    assert [page for page in PAGES if (ROOT / page) not in linked and page not in ("README.md", "docs/README.md")] == []


def test_the_overview_lists_every_page() -> None:
    listed = {(ROOT / "docs" / path).resolve() for path, _ in LINK.findall(PAGES["docs/README.md"])}
    pages = {ROOT / page for page in PAGES if page.startswith("docs/") and not page.startswith("docs/decisions/0")}
    assert pages - listed == {ROOT / "docs/README.md"}


def files_of_a_warehouse(text: str) -> set[str]:
    found = re.findall(r"(?<![\w/])(?:_cdcpipe|changelog|replica|history)/[\w.*/]*", text)
    return {path for path in found if not path.endswith((".py", "."))}


def test_the_architecture_lists_the_files_of_a_warehouse() -> None:
    section = PAGES["docs/architecture.md"].partition("\n### Files of a warehouse\n")[2].partition("\n## ")[0]
    table = "\n".join(row.split(" | ")[0] for row in section.splitlines() if row.startswith("| `"))
    assert files_of_a_warehouse(table) == files_of_a_warehouse(warehouse.__doc__ or "")


def test_the_settings_of_a_session_with_delta_are_those_of_the_code() -> None:
    page = PAGES["docs/spark/tables.md"].partition("\n## A session of your own\n")[2]
    for setting in (session.DELTA_PACKAGES, settings.DELTA_EXTENSION, settings.DELTA_CATALOG):
        assert setting in page


def test_the_pages_name_the_packages_and_jars_of_delta_of_the_code() -> None:
    assert session.DELTA_PACKAGES in PAGES["docs/spark/cluster.md"]
    for page in ("docs/spark/run.md", "docs/spark/object-stores.md"):
        for jar in session.DELTA_JARS:
            assert jar in PAGES[page], page


def test_every_decision_has_a_number_of_its_own() -> None:
    numbers = [path.name[:4] for path in (ROOT / "docs/decisions").glob("0*.md")]
    assert len(numbers) > 50
    assert len(set(numbers)) == len(numbers)


def test_the_site_is_built(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "Five minutes of cdcpipe-spark" in (tmp_path / "site/start/index.html").read_text()
