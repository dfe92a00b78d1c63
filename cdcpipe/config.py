"""The configurations of a stream and of poll mode: frozen data, made by the command line or by a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cdcpipe.pgoutput.transactions import SPILL_THRESHOLD
from cdcpipe.publishing import NewPublication

__all__ = ["CREATE_TIMEOUT_S", "PollConfig", "SlotConfig", "StreamConfig", "StreamOptions"]

CREATE_TIMEOUT_S = 60.0
"""How long the creation of a slot waits for running transactions by default."""


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """A slot of a server. With ``create`` the slot and its publications are created if they do not exist.

    - ``parameters`` are libpq's (see ``connection_parameters``).
    - ``new_publication`` says what a publication that has to be created publishes.
    - ``plugin`` is for a new slot. With ``is_plugin_asked`` a slot that exists with another one gets a warning.
    - ``create_timeout_s`` limits the wait for running transactions.
    - ``replace_lost``: with ``create``, a slot that is lost is dropped and created anew.
    - ``system_ids``: the server must have one of these system identifiers, if there are any.
    - ``failover``: whether a primary's standbys are to keep a copy of the slot. None: a new pgoutput slot gets this property where
      the server has it. True also turns it on for an existing slot.
    """

    parameters: Mapping[str, str]
    slot: str
    create: bool = False
    plugin: str = "pgoutput"
    is_plugin_asked: bool = False
    publications: tuple[str, ...] = ()
    new_publication: NewPublication = field(default_factory=NewPublication)
    create_timeout_s: float | None = CREATE_TIMEOUT_S
    failover: bool | None = None
    replace_lost: bool = False
    system_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PollConfig:
    """How to wait for a slot. A ``duration_s`` of None means without limit, 0 means to look once."""

    duration_s: float | None = None
    interval_s: float = 1.0


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How records and feedback travel."""

    out_fd: int = 1
    command_fd: int = 0
    write_header: bool = False
    write_newline: bool = False
    auto_feedback: bool = False
    wait_after_end: bool = False
    """At the end position: close the output, and read commands until ``q`` or the end of stdin."""
    needs_commands: bool = True
    """False: the stream goes on after the end of stdin, because it ends by itself and needs no feedback."""

    @property
    def is_plain(self) -> bool:
        """Whether the pipe's bytes are a header line and the record."""
        return self.write_header and not self.write_newline


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """The configuration of one stream.

    - ``options`` are those given with ``-o``.
    - ``output`` is the output plugin that writes the records; None passes on the server's records unchanged. For a pgoutput slot,
      the plugin runs in this process. It gets ``output_options``, and those of ``options`` that pgoutput does not have. For a slot
      with this plugin, the server runs the plugin, and gets all options.
    - ``whole_transactions``: assemble the streamed and prepared transactions of a pgoutput slot. At most ``spill_threshold`` bytes
      of them are kept in memory.
    - ``expected_system`` is ``SYSTEM_ID/TIMELINE``.
    - ``expected_lsn`` is the position up to which the consumer has the changes. A slot beyond it is refused (GapError).
    - ``idle_positions``: write an empty record for each idle position, and confirm it only when the consumer has.
    - ``standby``: wait until the slot is free, then stream.
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
    expected_lsn: int | None = None
    feedback_interval_s: float = 0.0
    status_interval_s: float = 1.0
    silence_limit_s: float = 300.0
    idle_positions: bool = False
    standby: PollConfig | None = None
    stream: StreamOptions = field(default_factory=StreamOptions)
