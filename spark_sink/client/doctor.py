"""``cdcpipe doctor`` as a child process: what it finds on the server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cdcpipe.doctor.findings import Finding, parse
from spark_sink.client.failure import error_of
from spark_sink.client.process import COMMAND, ask, reading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ask_doctor"]


def ask_doctor(
    arguments: Sequence[str], *, command: Sequence[str] = COMMAND, is_stopping: Callable[[], bool] | None = None
) -> tuple[list[Finding], Mapping[str, Any]]:
    """Run the command with these options. Return the findings, and the facts about the server, which are none if it can't be asked.

    Raises what the command ends with if it finds nothing, and InterruptedError once it is to stop.
    """
    answer = ask(["doctor", *arguments, "--json"], command=command, is_stopping=is_stopping)
    if not answer.output:
        raise error_of(answer.failure)
    with reading("doctor"):
        found = json.loads(answer.output)
        return parse(found), found["server"] or {}
