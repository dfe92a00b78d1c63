"""MkDocs hooks that prepare the site of docs/ (mkdocs.yml).

- The repository's README becomes the page start.md.
- A page may link to a file outside of docs/, for readers of the repository. The site does not have this file. So the site shows
  the text of the link only.
- The site does not show the tests' mark on a code block (```sh run).
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent.parent
_START = "start.md"
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")
_RUN = re.compile(r"^```(sh|python) run\b.*$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's README."""
    files.append(File.generated(config, _START, content=(ROOT / "README.md").read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page's text as the site shows it."""
    uri = page.file.src_uri
    directory = ROOT if uri == _START else (ROOT / "docs" / uri).parent

    def link(match: re.Match[str]) -> str:
        text, path, anchor = match.groups()
        target = (directory / path).resolve()
        if target == ROOT / "README.md":
            found = _START
        elif target.is_relative_to(ROOT / "docs"):
            found = target.relative_to(ROOT / "docs").as_posix()
        else:
            return text or ""
        return f"[{text}]({posixpath.relpath(found, posixpath.dirname(uri) or '.')}{anchor or ''})"

    return _RUN.sub(r"```\1", _LINK.sub(link, markdown))
