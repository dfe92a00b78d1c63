"""Starts the Python process of each streaming query as a fork of one process that has imported what it needs.

For each streaming query, Spark starts ``PYTHON -m pyspark.sql.streaming.python_streaming_source_runner``. To import the runner and
our source takes 0.4 s of CPU time, and the tests run hundreds of queries. So their session has a script in PYTHON's place, which
asks the process with the imports for a fork. A fork has the environment and the pipes of the process that Spark started.

Other Python workers of the session, and the sessions that the commands start, have the real start.
"""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What else one of the functions needs, it imports itself: `ask` runs for each query, and must start quickly.

RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"

SCRIPT = f"""#!/bin/sh
[ "$2" != {RUNNER} ] || exec "{sys.executable}" -I -S "{__file__}" ADDRESS
exec "{sys.executable}" "$@"
"""


@contextmanager
def forked_sources(directory: Path) -> Iterator[Path]:
    """Yield the script, which this function writes into ``directory``. Leaving the context ends the process with the imports."""
    import subprocess

    address = f"cdcpipe-tests-{os.getpid()}"
    script = directory / "python"
    script.write_text(SCRIPT.replace("ADDRESS", address))
    script.chmod(0o755)
    # A process that forks must have no other threads, such as numpy's.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    with new_socket() as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        argv = [sys.executable, "-c", "from support.forked_sources import serve; serve()", str(listener.fileno())]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environment)
    with process:  # closes its stdin at the end
        yield script


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def serve() -> None:
    """Fork for each connection, until stdin is closed."""
    import gc
    import importlib
    import runpy
    import select
    import signal

    importlib.import_module(RUNNER)
    importlib.import_module("spark_sink.source.datasource")
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the forks
    listener = socket.socket(fileno=int(sys.argv[1]))
    while select.select([listener, sys.stdin], [], [])[0] == [listener]:
        with listener.accept()[0] as connection:
            if os.fork():
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            environment, fds, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
            os.environ.clear()
            os.environb.update(pair.split(b"=", 1) for pair in environment.split(b"\0"))
            runpy.run_module(RUNNER, run_name="__main__")
            os._exit(0)


def ask() -> None:
    """Hand the fork what this process has, and wait for its end. A fork ends when Spark closes the connection to it."""
    with new_socket() as server:
        server.connect(f"\0{sys.argv[1]}")
        environment = b"\0".join(b"=".join(pair) for pair in os.environb.items())
        socket.send_fds(server, [environment], [0, 1, 2])
        server.recv(1)


if __name__ == "__main__":
    ask()
