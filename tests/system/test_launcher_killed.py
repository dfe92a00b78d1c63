"""A launcher that is killed at each of its failpoints, with a fake streamer."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from spark_sink.staging.writer import Failpoint
from support.fake_streamer import WORK, make_fake
from support.paths import ROOT

RUN_AND_DIE = """
    import os, signal, sys
    from functools import partial
    sys.path[:0] = sys.argv[4:]
    from pathlib import Path
    from support.fake_streamer import Fake
    from cdcpipe.retry import RetryPolicy
    from spark_sink.launcher import launcher as module
    from spark_sink.launcher.launcher import Launcher
    from spark_sink.launcher.restart import RestartPolicy

    module.RestartPolicy = partial(RestartPolicy, pauses=RetryPolicy(first_pause_s=0.01, longest_pause_s=10))
    fake = Fake(Path(sys.argv[1]))
    left = int(sys.argv[3])

    def hook(failpoint):
        global left
        if failpoint.name == sys.argv[2]:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    launcher = Launcher(fake.config(hook=hook))
    launcher.start()
    launcher.wait()
"""


@pytest.mark.parametrize("failpoint", Failpoint)
def test_a_launcher_killed_at_any_point_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failpoint: Failpoint) -> None:
    made = make_fake(tmp_path, monkeypatch)
    program = textwrap.dedent(RUN_AND_DIE)
    for turn in (1, 2, 2):
        argv = [sys.executable, "-c", program, str(made.directory), failpoint.name, str(turn)]
        argv += [str(ROOT), str(ROOT / "tests")]
        ended = subprocess.run(argv, capture_output=True, timeout=60)
        assert ended.returncode in (-signal.SIGKILL, 0), ended.stderr.decode()
        if turn == 1:
            assert ended.returncode == -signal.SIGKILL
        landed = made.landed()
        assert landed == WORK[: len(landed)]
        assert made.confirmed_lsn <= max([0x100, *(t.end_lsn for t in landed)])
    made.run()
    made.check(WORK)
    assert not list(made.staging.glob("*/*.open"))
