"""What a task does for its process."""

import subprocess
import sys


def test_the_collector_leaves_out_what_a_worker_has_after_its_first_task() -> None:
    program = (
        "import gc; from spark_sink.spark.worker import settle; assert gc.get_freeze_count() == 0; settle();"
        " first = gc.get_freeze_count(); more = [[] for _ in range(1000)]; settle(); print(first, gc.get_freeze_count())"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    first, second = map(int, found.split())
    assert first == second > 1000
