"""Decides which process of pytest-xdist runs which test file.

The tests of a file run in one process, because they share servers and a warehouse. Only two processes run the files whose tests use
the fixture `spark`, so there are two Spark sessions: a session takes a while to become fast, and then takes most of a core. At the
same time the other processes run the other files. Most of these tests wait, for servers or for other programs.
"""

import re

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from support.paths import ROOT

_SPARK_PROCESSES = 2
_OF_SYSTEM = {
    f"tests/system/{path.name}"
    for path in (ROOT / "tests/system").glob("test_*.py")
    if re.search(r"def \w+\([^)]*\bspark\b[:,)]", path.read_text())
}
"""The files of tests/system with a function that takes the fixture `spark`."""


class TwoWithSpark(LoadFileScheduling):
    """Gives the Spark files to two processes. These help with the other files when they have no Spark file left."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        super().__init__(config, log)
        self._with_spark: set[WorkerController] = set()

    def add_node(self, node: WorkerController) -> None:
        super().add_node(node)
        if len(self._with_spark) < _SPARK_PROCESSES:
            self._with_spark.add(node)

    def remove_node(self, node: WorkerController) -> str | None:
        self._with_spark.discard(node)  # xdist starts another process for one that has crashed
        return super().remove_node(node)

    def schedule(self) -> None:
        if all(_is_for_spark(test) for test in next(iter(self.registered_collections.values()))):
            self._with_spark.update(self.nodes)
        super().schedule()

    def _assign_work_unit(self, node: WorkerController) -> None:
        files = sorted(self.workqueue, key=lambda file: file not in _OF_SYSTEM)  # among them is the longest test: not at the end
        own = [file for file in files if _is_for_spark(file) == (node in self._with_spark)]
        if not own and node not in self._with_spark:
            node.shutdown()
        elif files:
            self.workqueue.move_to_end((own or files)[0], last=False)
            super()._assign_work_unit(node)


def _is_for_spark(file: str) -> bool:
    return file.startswith("tests/spark/") or file in _OF_SYSTEM


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> TwoWithSpark | None:
    return TwoWithSpark(config, log) if config.getvalue("dist") == "loadfile" else None
