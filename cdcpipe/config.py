"""What a stream or a poller is asked to do: plain frozen data, made by the command line or by a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cdcpipe.pgoutput.transactions import SPILL_THRESHOLD
from cdcpipe.streamer import StreamOptions

__all__ = ["PollConfig", "SlotConfig", "StreamConfig"]


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """Which slot of which server, and how it is made when ``create`` is set and it does not exist.

    ``parameters`` are libpq's (see ``connection_parameters``). ``tables`` are (schema, name): what a publication that
    does not exist is created for, all tables if empty. ``create_timeout_s`` bounds the wait for running transactions.
    """

    parameters: Mapping[str, str]
    slot: str
    create: bool = False
    plugin: str = "pgoutput"
    publications: tuple[str, ...] = ()
    tables: tuple[tuple[str, str], ...] = ()
    create_timeout_s: float | None = 60.0


@dataclass(frozen=True, slots=True)
class PollConfig:
    """How a slot is waited for: ``duration_s`` None is without limit, 0 a single look."""

    duration_s: float | None = None
    interval_s: float = 1.0


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """A stream: ``options`` are as given with ``-o``; ``output`` is the output plugin whose records are wanted.

    On a pgoutput slot that plugin runs here, and gets ``output_options`` and those of ``options`` that are not pgoutput's; on a
    slot that has it already the server's gets them all. None: the records of the server, as they are.

    ``whole_transactions``: streamed and prepared transactions of a pgoutput slot are put together; ``spill_threshold`` is how many
    bytes of them are held in memory.

    ``expected_system`` is ``SYSTEM_ID/TIMELINE``. ``standby``: wait for the slot, then stream.
    """

    slot: SlotConfig
    options: Mapping[str, str | None] = field(default_factory=dict)
    output: str | None = None
    output_options: Mapping[str, str | None] = field(default_factory=dict)
    whole_transactions: bool = False
    spill_threshold: int = SPILL_THRESHOLD
    start_lsn: int = 0
    end_lsn: int | None = None
    expected_system: str | None = None
    feedback_interval_s: float = 0.0
    status_interval_s: float = 1.0
    silence_limit_s: float = 300.0
    standby: PollConfig | None = None
    stream: StreamOptions = field(default_factory=StreamOptions)
