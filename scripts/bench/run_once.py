"""Run one command and print what it took, as one JSON object.

A small process of its own, because a child's peak memory on Linux includes what its parent had when it was started.
The command's stdout goes to /dev/null ("null"), through a pipe that is drained and counted here ("pipe"), or into the
file of that path.
"""

import json
import os
import subprocess
import sys
import time


def drain(fd: int) -> int:
    total = 0
    while chunk := os.read(fd, 1 << 20):
        total += len(chunk)
    return total


def main() -> int:
    order = json.loads(sys.argv[1])
    sink = order["sink"]
    path = os.devnull if sink in ("null", "pipe") else sink
    with open(order["stderr"], "wb") as stderr, open(path, "wb") as file:
        started = time.perf_counter()
        child = subprocess.Popen(
            order["command"],
            # cdcpipe ends when its stdin does, so it gets one that stays open.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if sink == "pipe" else file,
            stderr=stderr,
        )
        drained = drain(child.stdout.fileno()) if child.stdout else None
        _, status, usage = os.wait4(child.pid, 0)
        wall_s = time.perf_counter() - started
    result = {
        "exit_code": os.waitstatus_to_exitcode(status),
        "wall_s": round(wall_s, 4),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 4),
        "cpu_user_s": round(usage.ru_utime, 4),
        "peak_rss_kib": usage.ru_maxrss,
        "drained_bytes": drained,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
