"""The options of a launcher."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.publishing import NewPublication, with_companions
from spark_sink.client.process import COMMAND
from spark_sink.files.local import check_there, local_directory, nameable_directory
from spark_sink.staging.filler import SealPolicy
from spark_sink.staging.readers import Retention
from spark_sink.staging.writer import Failpoint

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["LauncherConfig"]


@dataclass(frozen=True, slots=True)
class LauncherConfig:
    """What to land, and where. ``connection`` has options of ``cdcpipe``: ``-d -h -p -U -m``, as on its command line."""

    slot: str
    staging: Path
    """The staging directory. A text is taken, too, here and as ``spill``."""
    publications: tuple[str, ...] = ()
    """What is streamed. If ``new_publication`` is insert-only for tables without a key, their publications are added."""
    connection: tuple[str, ...] = ()
    create_slot: bool = False
    failover: bool | None = None
    """Whether standbys are to keep a copy of the slot (``--failover``). None: where the server can, for a slot that is created."""
    new_publication: NewPublication = field(default_factory=NewPublication)
    """With ``create_slot``: what a publication that has to be created publishes; all tables by default."""
    available_now: bool = False
    """Whether to end once the log has everything that was committed when the launcher started."""
    seal: SealPolicy = field(default_factory=SealPolicy)
    spill: Path | None = None
    """The directory for large transactions in progress; None for the staging directory."""
    retention: Retention = field(default_factory=Retention)
    """Which segments are kept although all readers have read them."""
    on_gap: Literal["stop", "resnapshot"] = "stop"
    """What to do if the slot lacks changes that the log does not have: end with GapError, or go on after the gap."""
    reconnect_s: float | None = None
    """How long to look for the server after a lost connection, and to wait for one that lacks room or memory; None for ever."""
    accept_system_id: str | None = None
    """The system id that the server may have now in place of the log's: after pg_upgrade."""
    verbose: bool = False
    command: tuple[str, ...] = COMMAND
    hook: Callable[[Failpoint], None] | None = None
    """A function that is called at each failpoint; for tests."""

    def __post_init__(self) -> None:
        """Raise InvalidArgumentsError for what the command line refuses, too, before a slot is created. Name all publications."""
        for name in ("publications", "connection"):
            if isinstance(getattr(self, name), str):  # its letters would be taken for names
                raise InvalidArgumentsError(f"{name} is a text; it is a tuple of texts")
        if self.on_gap not in ("stop", "resnapshot"):
            raise InvalidArgumentsError(f"on_gap is {self.on_gap!r}; it is 'stop' or 'resnapshot'")
        if self.failover not in (None, True, False):
            raise InvalidArgumentsError(f"failover is {self.failover!r}; it is True, False or None")
        if self.reconnect_s is not None and not self.reconnect_s >= 0:
            raise InvalidArgumentsError(f"reconnect_s is {self.reconnect_s!r}; it is at least 0, or None")
        if not (self.seal.segment_bytes >= 1 and self.seal.seal_interval_s >= 0):
            raise InvalidArgumentsError(f"the sizes and intervals of {self.seal} are not all more than 0")
        object.__setattr__(self, "publications", with_companions(self.publications, self.new_publication))
        nameable_directory(self.staging, "the staging directory")
        object.__setattr__(self, "staging", Path(self.staging))
        if self.spill is not None:
            local_directory(self.spill, "the spill directory")
            object.__setattr__(self, "spill", Path(self.spill))

    def check_spill(self) -> None:
        """Raise an error unless the directory for spills is there, and this user may write to it. Ask it at the start.

        The staging directory keeps the errors of a start. A service manager starts the command again and again after this one.
        """
        if self.spill is not None:
            check_there(self.spill, "the spill directory")
