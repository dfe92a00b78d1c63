"""A launcher that is killed at each of its failpoints, with a fake streamer."""

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_sink.staging.writer import Failpoint
from support.fake_streamer import WORK, make_fake
from support.paths import ROOT

RUN_AND_DIE = """
    import json, os, signal, sys
    from functools import partial
    sys.path[:0] = sys.argv[1:]
    from pathlib import Path
    from support.fake_streamer import Fake
    from cdcpipe.retry import RetryPolicy
    from spark_sink.launcher import launcher as module
    from spark_sink.launcher.launcher import Launcher
    from spark_sink.launcher.restart import RestartPolicy

    module.RestartPolicy = partial(RestartPolicy, pauses=RetryPolicy(first_pause_s=0.01, longest_pause_s=10))

    def run(directory, failpoint, left):
        def hook(passed):
            nonlocal left
            if passed.name == failpoint:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        launcher = Launcher(Fake(Path(directory)).config(hook=hook))
        launcher.start()
        launcher.wait()

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            run(*json.loads(line))
            break
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def run_and_die() -> Iterator[Callable[..., int]]:
    """Yield a function that runs a launcher and returns its exit code. The launcher is a fork: to import it would take longest."""
    argv = [sys.executable, "-c", textwrap.dedent(RUN_AND_DIE), str(ROOT), str(ROOT / "tests")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def run(*arguments: Any) -> int:
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield run


@pytest.mark.parametrize("failpoint", Failpoint)
def test_a_launcher_killed_at_any_point_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_and_die: Callable[..., int], failpoint: Failpoint
) -> None:
    made = make_fake(tmp_path, monkeypatch)
    for turn in (1, 2, 2):
        code = run_and_die(str(made.directory), failpoint.name, turn)
        assert code in (-signal.SIGKILL, 0)
        if turn == 1:
            assert code == -signal.SIGKILL
        landed = made.landed()
        assert landed == WORK[: len(landed)]
        assert made.confirmed_lsn <= max([0x100, *(t.end_lsn for t in landed)])
    made.run()
    made.check(WORK)
    assert not list(made.staging.glob("*/*.open"))
