"""The program of scripts/pg: a throwaway server in the foreground. Importing it needs the standard library only."""

import argparse
import shlex
import signal
import sys
from pathlib import Path

from postgres import VERSIONS, Cluster, PostgresError

__all__ = ["main", "shell_line"]


def shell_line(port: int, psql: Path, prefix: str = sys.prefix) -> str:
    """Return the line that lets a shell find this server and the programs: those of the environment, and psql if it is there.

    The programs come first, because another installation of cdcpipe would not be this checkout, and an older psql warns.
    """
    folders = [f"{prefix}/bin", *([str(psql.parent)] if psql.exists() else [])]
    path = shlex.quote(":".join(folders))
    return f'export PGHOST=127.0.0.1 PGPORT={port} PGUSER=postgres PGDATABASE=postgres PATH={path}:"$PATH"'


def main() -> int:
    """Run a server until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(prog="scripts/pg", description="A throwaway PostgreSQL; Ctrl-C removes it.")
    parser.add_argument("version", nargs="?", default="18", help=f"{', '.join(VERSIONS)} (default: 18)")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="a line for postgresql.conf")
    args = parser.parse_args()
    settings = dict(setting.split("=", 1) for setting in args.settings if "=" in setting)
    if len(settings) < len(args.settings):
        parser.error("a setting is NAME=VALUE")
    stops = {signal.SIGINT, signal.SIGTERM}
    try:
        with Cluster(args.version, settings=settings) as cluster:
            signal.pthread_sigmask(signal.SIG_BLOCK, stops)
            print(cluster.dsn)
            print(cluster.tcp_dsn)
            print(shell_line(cluster.port, cluster.bin("psql")), flush=True)
            signal.sigwait(stops)
    except KeyboardInterrupt:
        pass
    except PostgresError as ex:
        print(f"scripts/pg: {ex}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
