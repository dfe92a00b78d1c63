"""The doctor's quick part, which `run` does at its start: what this machine lacks, and risks in the server's settings.

    refuse_what_fails(planned, starts_spark=True)   # before there is a slot
    with ServerLook(planned):                       # beside the run
        ...

If something on this machine is certain to fail, `run` ends before it creates a slot. Findings about the server never end a run:
the server itself refuses what it can't do. `run` logs them: an error as a warning, and a warning only with ``-v``. Some warnings
are logged as such: nothing else tells of them, and rows become wrong.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final, Self

from cdcpipe.doctor.findings import Level
from cdcpipe.errors import CdcpipeError, InitError
from cdcpipe.threads import Worker
from spark_sink.client.process import COMMAND
from spark_sink.doctor.pipeline_doctor import examine_machine, examine_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from cdcpipe.doctor.findings import Finding
    from spark_sink.doctor.pipeline_doctor import PlannedRun

__all__ = ["ServerLook", "refuse_what_fails"]

_logger = logging.getLogger(__name__)

_REFUSED: Final = frozenset({"machine.jars", "staging.file_system", "warehouse.file_system", "warehouse.store"})
_TOLD: Final = frozenset({"server.ddl_capture"})


def refuse_what_fails(planned: PlannedRun, *, starts_spark: bool) -> None:
    """Raise InitError for what keeps the pipeline from working on this machine; say what else is found."""
    findings = examine_machine(planned, {}, starts_spark=starts_spark)
    for finding in findings:
        if finding.level is Level.ERROR and finding.check in _REFUSED:
            raise InitError(f"{finding.message}: {finding.why}", hint=finding.fix)
    _say(findings)


def _say(findings: Iterable[Finding]) -> None:
    for finding in findings:
        if finding.level is not Level.OK:
            is_told = finding.level is Level.ERROR or finding.check in _TOLD
            _logger.log(logging.WARNING if is_told else logging.INFO, "%s", finding.line)


class ServerLook:
    """Asks ``cdcpipe doctor --quick`` in a thread of its own, and says what it finds. Leaving the context gives up the answer.

    It asks ``delay_s`` after its start. A run that has ended by then has met what keeps a stream from working.
    """

    def __init__(
        self,
        planned: PlannedRun,
        *,
        command: Sequence[str] = COMMAND,
        delay_s: float = 0.0,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._planned = planned
        self._command = command
        self._delay_s = delay_s
        self._is_stopping = is_stopping
        self._leaving = threading.Event()
        self._thread = Worker(target=self._run, name="cdcpipe-doctor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None) -> None:
        self._leaving.set()
        self._thread.join()

    def _run(self) -> None:
        if self._leaving.wait(self._delay_s):
            return
        try:
            findings, _ = examine_server(self._planned, quick=True, command=self._command, is_stopping=self._must_end)
        except InterruptedError:
            return
        except (CdcpipeError, OSError) as ex:  # the stream says so itself, if it matters
            _logger.info("the doctor can't look at the server: %s", ex)
        else:
            _say(findings)

    def _must_end(self) -> bool:
        return self._leaving.is_set() or self._is_stopping()
