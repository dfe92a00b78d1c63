"""``cdcpipe prepare`` as a child process: functions that ask it, and `Prepared`, its answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from cdcpipe.lsn import LSN
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.client.failure import error_of
from spark_sink.client.process import Answer, ask, reading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cdcpipe.publishing import NewPublication


__all__ = [
    "Prepared",
    "SlotOptions",
    "ask_published",
    "creation_arguments",
    "later_arguments",
    "look_up",
    "prepare_arguments",
    "slot_exists",
]


class SlotOptions(Protocol):
    """A slot and its connection: the part of `LauncherConfig` that ``cdcpipe prepare`` needs."""

    @property
    def slot(self) -> str:
        """The slot's name."""

    @property
    def publications(self) -> tuple[str, ...]:
        """The publications that the slot streams."""

    @property
    def connection(self) -> tuple[str, ...]:
        """The options ``-d -h -p -U -m``, as on the command line of ``cdcpipe``."""

    @property
    def command(self) -> tuple[str, ...]:
        """The command line that starts ``cdcpipe``, without a subcommand."""

    @property
    def create_slot(self) -> bool:
        """Whether to create the slot if it does not exist."""

    @property
    def new_publication(self) -> NewPublication:
        """What a publication that has to be created publishes."""

    @property
    def failover(self) -> bool | None:
        """Whether standbys are to keep a copy of the slot; None for the default of ``cdcpipe``."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What ``cdcpipe prepare`` found: the server, the slot, and the published tables with their keys."""

    server_version: int
    system_id: str
    timeline: int
    database: str
    wal_lsn: LSN
    confirmed_flush_lsn: LSN
    tables: tuple[Mapping[str, Any], ...]
    slot_created: bool = False
    """Whether the slot did not exist, and was created by this call."""
    is_standby: bool = False
    """Whether the server is one. After a restart it replays WAL again, so its position goes back for a while."""
    timeline_history: tuple[tuple[int, int], ...] = ()
    """The earlier timelines of the server, in order: each with the LSN at which it was left."""
    connection: Mapping[str, str] = field(default_factory=dict)
    """libpq's parameters with which other processes connect to this one server. No password is among them."""

    @property
    def timeline_began_at(self) -> dict[int, int]:
        """Where each timeline of the server began, as far as its history says: where it left the one before."""
        numbers = [*(timeline for timeline, _ in self.timeline_history[1:]), self.timeline]
        return {timeline: lsn for (_, lsn), timeline in zip(self.timeline_history, numbers, strict=False)}

    def check_left_out(self, config: SlotOptions) -> None:
        """Raise ExcludedColumnError if a column is published that ``--exclude-column`` names.

        Call this before rows are copied. ``cdcpipe prepare`` says it by itself only if it gets the option.
        """
        if config.new_publication.exclude_columns:
            named = ((str(each["schema"]), str(each["name"]), [c["name"] for c in each["columns"]]) for each in self.tables)
            config.new_publication.check_left_out(named)

    @classmethod
    def parse(cls, text: bytes) -> Prepared:
        """Read the JSON object that the command prints."""
        with reading("prepare"):
            return cls.of(json.loads(text))

    @classmethod
    def of(cls, value: Any) -> Prepared:
        """Read the same object, already parsed."""
        with reading("prepare"):
            return cls(
                server_version=int(value["server_version"]),
                system_id=str(value["system_id"]),
                timeline=int(value["timeline"]),
                database=str(value["database"]),
                wal_lsn=LSN.parse(value["wal_lsn"]),
                confirmed_flush_lsn=LSN.parse(value["slot"]["confirmed_flush_lsn"]),
                tables=tuple(value["tables"]),
                slot_created=bool(value["slot"]["created"]),
                is_standby=bool(value.get("is_standby", False)),
                timeline_history=tuple(
                    (int(each["timeline"]), LSN.parse(each["end_lsn"])) for each in value.get("timeline_history", ())
                ),
                connection={str(name): str(setting) for name, setting in value.get("connection", {}).items()},
            )


def slot_exists(config: SlotOptions, is_stopping: Callable[[], bool] | None = None) -> bool:
    """Tell whether the slot exists. A lost one counts as none: no stream will ever come from it.

    Raises an error if the server can't be asked, InterruptedError once ``is_stopping`` is True.
    """
    answer = ask(prepare_arguments(config), command=config.command, is_stopping=is_stopping)
    if answer.code == ExitCode.SLOT_NOT_EXIST or answer.failure.is_lost_slot:
        return False
    if answer.code in (ExitCode.SUCCESS, ExitCode.SLOT_IN_USE):
        return True
    raise error_of(answer.failure)


def ask_published(config: SlotOptions, is_stopping: Callable[[], bool] | None = None, *, parts: bool = False) -> Answer:
    """Ask ``cdcpipe prepare`` which tables are published now, even while the slot is in use; with ``parts``, what has their rows.

    Raises InterruptedError once ``is_stopping`` is True.
    """
    arguments = [*prepare_arguments(config), "--in-use", *(["--parts"] if parts else [])]
    return ask(arguments, command=config.command, is_stopping=is_stopping)


def look_up(config: SlotOptions, is_stopping: Callable[[], bool]) -> Prepared:
    """Return which tables are published now. Raises an error if the server can't be asked."""
    answer = ask_published(config, is_stopping)
    if answer.code != ExitCode.SUCCESS:
        raise error_of(answer.failure)
    return Prepared.parse(answer.output)


def prepare_arguments(config: SlotOptions) -> list[str]:
    """Return the beginning of a command line of ``cdcpipe prepare``: connection, slot and publications."""
    arguments = ["prepare", *config.connection, "-S", config.slot]
    for name in config.publications:
        arguments += ["--publication", name]
    return arguments


def creation_arguments(config: SlotOptions) -> list[str]:
    """Return the options of ``cdcpipe prepare`` that create the slot and its publications."""
    return ["-c", *later_arguments(config)]


def later_arguments(config: SlotOptions) -> list[str]:
    """Return the options of ``cdcpipe prepare`` for a slot that exists. It says how the publications differ from the options.

    ``--failover yes`` also changes a slot that exists.
    """
    failover = [] if config.failover is None else ["--failover", "yes" if config.failover else "no"]
    return [*config.new_publication.arguments, *failover]
