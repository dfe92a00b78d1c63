r"""Commands on stdin: ``F LSN\n`` (feedback), ``q\n`` (quit). Empty lines and lines with ``#…`` are ignored.

The launcher encodes commands, the streamer reads them. Lines may arrive in pieces of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cdcpipe.errors import CommandError
from cdcpipe.lsn import LSN, format_lsn

__all__ = ["QUIT", "Command", "CommandReader", "Feedback", "Quit", "encode_feedback"]

MAX_COMMAND_BYTES = 4096
"""The longest accepted line, as in pg_logical_cdc. A longer one raises CommandError, so that memory is bounded."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """``F LSN``: the consumer has everything up to ``lsn`` on durable storage."""

    lsn: LSN


@dataclass(frozen=True, slots=True)
class Quit:
    """``q``: the streamer sends the last feedback to the server, and ends."""


Command = Feedback | Quit

QUIT = b"q\n"


def encode_feedback(lsn: int) -> bytes:
    """Return the command that confirms everything up to ``lsn``."""
    return b"F %s\n" % format_lsn(lsn).encode("ascii")


def _parse_line(line: bytes) -> Command | None:
    """Read one line without its newline; None for a comment or an empty line."""
    if not line or line.startswith(b"#"):
        return None
    if line == b"q":
        return Quit()
    if line.startswith(b"F "):
        try:
            return Feedback(LSN.parse(line[2:].strip(b" ").decode("ascii")))
        except ValueError:
            pass
    msg = f"not a command (F LSN, q): {line[:40]!r}"
    raise CommandError(msg, hint="write 'F ' and an LSN like 16/B374D848, or 'q', each on a line of its own")


class CommandReader:
    """Splits the bytes from stdin into commands."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> Iterator[Command]:
        """Take the next bytes, and yield the commands that they complete. Raises CommandError for anything else."""
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            if len(line) > MAX_COMMAND_BYTES:
                self._too_long(line)
            command = _parse_line(line.removesuffix(b"\r"))
            if command is not None:
                yield command
        if len(self._held) > MAX_COMMAND_BYTES:
            self._too_long(self._held)

    @staticmethod
    def _too_long(line: bytes) -> None:
        msg = f"a command of more than {MAX_COMMAND_BYTES} bytes, beginning {line[:40]!r}"
        raise CommandError(msg)
