"""Runs command lines in forks of one process that has imported the commands, for tests that would start Python many times.

A fork is a process with its own exit code, stdout and stderr, as after a real start. Tests of the start itself, of signals and of
stdin use `support.cli_process`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple, Self

from support.cli_process import COMMAND, SPARK_COMMAND
from support.paths import ROOT

_PROGRAM = """
import gc, json, os, sys
import cli.invoke, spark_sink.__main__
import spark_sink.commands.land, spark_sink.commands.run, spark_sink.commands.status  # else each fork imports them

cli.invoke.cdcpipe.load()

gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for fd, path in enumerate((os.devnull, *request["outputs"])):
            os.dup2(os.open(path, os.O_RDWR), fd)
        sys.argv = [request["module"], *request["arguments"]]
        try:
            {"cli": cli.invoke, "spark_sink": spark_sink.__main__}[request["module"]].main()
        except SystemExit as ex:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ex.code)  # not through the end of this loop
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


class ForkedCommands:
    """Runs ``cdcpipe`` and ``cdcpipe-spark`` without a server. Leaving the context ends the process with the imports."""

    def __enter__(self) -> Self:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            # A process that forks must have no other threads, such as numpy's.
            env=environment | {"PGHOST": "/nonexistent", "OPENBLAS_NUM_THREADS": "1"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def cdcpipe(self, *arguments: str) -> Ended:
        return self._run(COMMAND[-1], arguments)

    def cdcpipe_spark(self, *arguments: str) -> Ended:
        return self._run(SPARK_COMMAND[-1], arguments)

    def spark_cli(self, *arguments: str, code: int = 0) -> Ended:
        """Run ``cdcpipe-spark``, and assert this exit code."""
        ended = self.cdcpipe_spark(*arguments)
        assert ended.code == code, ended.stderr
        return ended

    def _run(self, module: str, arguments: tuple[str, ...]) -> Ended:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.NamedTemporaryFile() as stdout, tempfile.NamedTemporaryFile() as stderr:
            request = {"module": module, "arguments": arguments, "outputs": [stdout.name, stderr.name]}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            return Ended(code, Path(stdout.name).read_text(), Path(stderr.name).read_text())
