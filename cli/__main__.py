"""The entry point of ``cdcpipe``, also of ``python -m cli``.

^C ends the command without a traceback also while it imports its modules. `cli.invoke` handles all later signals,
also those that were ignored at the start.
"""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Import the command line, and run it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell ignores it for a background job
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cli.invoke import main as run

    run()


if __name__ == "__main__":
    main()
