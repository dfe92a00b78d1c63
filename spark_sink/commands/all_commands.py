"""The subcommands of ``cdcpipe-spark``: their names and summaries, and their modules, imported only when they are asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import click

__all__ = ["COMMANDS", "load"]

COMMANDS: Final = {
    "as-of": "Show a table as it was at a time or an LSN.",
    "config": "Show which options are in force, and where each one is from.",
    "doctor": "Find what would go wrong with a pipeline, and say how to mend it.",
    "land": "Take a slot's changes to a staging directory; needs no Spark.",
    "purge": "Remove old changes from the changelogs.",
    "run": "Take a slot's changes to Spark tables, by way of a staging directory.",
    "snapshot": "Copy tables into an existing warehouse, anew or for the first time.",
    "status": "Show how far each stage is, and the last error; needs no Spark.",
    "verify": "Compare the replicas with PostgreSQL.",
}
"""The module of a command has its name, and a click command called ``command``."""


def load(name: str) -> click.Command:
    """Import a command. Raises ModuleNotFoundError if it needs Spark, which is not installed."""
    command: click.Command = importlib.import_module(f"spark_sink.commands.{name.replace('-', '_')}").command
    return command
