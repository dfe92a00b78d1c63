"""Connects a walsender in a thread while the caller asks the catalog on another connection, which saves time on a slow network."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Self

from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.waiting import NO_LIMIT
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.replication.server import System, identify_system
from cdcpipe.replication.session import connect_walsender
from cdcpipe.threads import Worker

__all__ = ["OpeningWalsender"]

log = logging.getLogger(__name__)

_JOIN_S = 0.1
"""The length of one wait. Between two waits, Python calls signal handlers."""
_LEAVE_S = 3.0
"""How long the thread may take to end, which may have a command to cancel. A name that is being looked up takes longer."""


class OpeningWalsender:
    """A walsender's connection that is being made, and the server's answer to IDENTIFY_SYSTEM.

        with OpeningWalsender(parameters) as opening:
            ...                                         # ask the catalog
            walsender, system = opening.wait(connection)  # raises an error of the connection

    Leaving the context closes the connection, or stops making it. ``settings`` are set as those of `connect_walsender` are.
    ``answer_timeout_s`` limits each command, also later ones.
    """

    def __init__(
        self, parameters: Mapping[str, str], settings: Mapping[str, str] | None = None, answer_timeout_s: float = NO_LIMIT
    ) -> None:
        self._parameters = parameters
        self._settings = settings or {}
        self._answer_timeout_s = answer_timeout_s
        self._walsender: Walsender | None = None
        self._system: System | None = None
        self._error: BaseException | None = None
        self._is_left = False
        self._thread = Worker(target=self._open, name="cdcpipe-walsender", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        self._thread.join(_LEAVE_S)
        if not self._thread.is_alive() and self._walsender is not None:
            self._walsender.close()

    def wait(self, beside: Connection) -> tuple[Walsender, System]:
        """Wait until the connection is made, to the same server as the connection ``beside`` it. A signal may end this wait.

        If the user listed several hosts, libpq may have taken another one: then this connects again.
        """
        while self._thread.is_alive():
            self._thread.join(_JOIN_S)
        if self._walsender is not None and self._error is None and self._walsender.host != beside.host:
            log.info("the walsender was at %s: connecting to %s instead", self._walsender.host, beside.host)
            self._parameters = beside.parameters_here
            self.reopen()
        if self._error is not None:
            raise self._error
        assert self._walsender is not None
        assert self._system is not None
        return self._walsender, self._system

    def reopen(self) -> None:
        """Close the connection, and make another one to the same parameters. `wait` returns it, or raises an error of it."""
        assert self._walsender is not None
        self._walsender.close()
        self._open()

    def _open(self) -> None:
        try:
            self._walsender = connect_walsender(self._parameters, self._settings, while_waiting=self._end_if_left)
            self._walsender.answer_timeout_s = min(self._walsender.answer_timeout_s, self._answer_timeout_s)
            self._system = identify_system(self._walsender)
        except BaseException as ex:  # noqa: BLE001 - `wait` raises it in the caller's thread
            self._error = ex

    def _end_if_left(self) -> None:
        if self._is_left:
            raise InterruptedError
