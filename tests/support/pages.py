"""Lists the documentation pages, and which of their examples the tests run, in order."""

import re

from support.paths import ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "scripts/bench/README.md"]
}


CHAIN = [
    "README.md",
    "docs/spark/tables.md",
    "docs/spark/operate.md",
    "docs/spark/upkeep.md",
    "docs/spark/snapshot.md",
    "docs/spark/python.md",
    "docs/staging-format.md",
]


ALONE = ["docs/cdcpipe.md", "docs/operations/configuration.md", "docs/operations/ddl.md", "docs/operations/doctor.md"]
BLOCK = re.compile(
    r"^```(?P<language>sh|python) run\n(?P<code>.*?)^```\n(?:\n^```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
