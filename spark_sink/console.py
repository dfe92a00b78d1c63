"""The entry point of ``cdcpipe-spark``.

^C ends the command without a traceback also while it imports its modules. `commands/signals.py` handles all later signals.
"""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Import the command line, and run it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as in a shell's background job
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from spark_sink.__main__ import main as run

    run()
