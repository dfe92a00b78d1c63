"""Runs one command, and prints its figures as one JSON object.

This is a small process of its own, because on Linux a child's peak memory includes its parent's memory at the start. Peak memory
is the sum over the command and its children at one time, each with its own peak so far. The command's stdout goes to /dev/null
("null"), or through a pipe that is read and counted here ("pipe"), or to the file of the given path.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

LOOK_S = 0.1


class Memory(threading.Thread):
    """Samples the peak memory of a process and its descendants, in KiB, until it is stopped (Linux)."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.peak = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(LOOK_S):
            self.peak = max(self.peak, self.look(self.pid))

    def look(self, pid: int) -> int:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
        except OSError:  # the process has ended
            return 0
        peak = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")), "0")
        return int(peak) + sum(self.look(int(child)) for child in children.split())


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
            # cdcpipe ends at the end of its stdin. So its stdin stays open.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if sink == "pipe" else file,
            stderr=stderr,
        )
        memory = Memory(child.pid)
        memory.start()
        drained = drain(child.stdout.fileno()) if child.stdout else None
        _, status, usage = os.wait4(child.pid, 0)
        wall_s = time.perf_counter() - started
        memory.stopped.set()
        memory.join()
    result = {
        "exit_code": os.waitstatus_to_exitcode(status),
        "wall_s": round(wall_s, 4),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 4),
        "cpu_user_s": round(usage.ru_utime, 4),
        "peak_rss_kib": max(usage.ru_maxrss, memory.peak),
        "drained_bytes": drained,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
