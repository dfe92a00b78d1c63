"""The options of scripts/demo. This module imports the standard library only, so that --help needs no environment."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import postgres

__all__ = ["description_of", "make_parser"]


def description_of(program: str) -> str | None:
    """Return the first lines of a program in this folder, without importing it. They are the text of its help."""
    return ast.get_docstring(ast.parse(Path(__file__).with_name(f"{program}.py").read_text(encoding="utf-8")))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=description_of("demo"))
    parser.add_argument("--changes", type=int, default=200_000, help="row changes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the workload (default: %(default)s)")
    parser.add_argument("--format", choices=["delta", "parquet"], default="delta", help="default: %(default)s")
    parser.add_argument(
        "--jars",
        type=Path,
        help="a directory with Delta Lake's jars, where Maven Central is out of reach; relative to the checkout",
    )
    parser.add_argument("--postgres", choices=postgres.VERSIONS, default="18", help="default: %(default)s")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("demo-data"),
        help="made anew each time; relative to the checkout (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    make_parser().parse_args()
