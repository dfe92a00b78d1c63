"""Puts the errors and hints of ``cdcpipe`` into the words of ``cdcpipe-spark``, whose commands have fewer options.

``cdcpipe`` advises its own user: ``--startpos``, ``-P``, ``--poll-mode``. Whoever runs `land` or `run` can give none of these. No
I/O. A test finds each text of ``cdcpipe`` with an option that `run` does not have.
"""

from __future__ import annotations

from typing import Final

from cdcpipe.errors import ServerError

__all__ = ["POISON_HINT", "in_own_words"]

POISON_HINT: Final = (
    "the server cannot send the next transaction; the message says why. Nothing is lost meanwhile: the slot keeps the transaction. "
    "To go on without it, change the row in the table, if a value is the cause; stop; move the slot behind the transaction's "
    "commit (pg_replication_slot_advance); and start run once with --on-gap resnapshot, which copies all tables anew. To read the "
    f"changes first, {ServerError.LOOK}"
)

_NO_PUBLICATION_HINT: Final = (
    "if a publication of another name held the tables then, nothing is lost: start with --publication THAT_NAME until this error "
    "comes again, then with this name (where there is none of that name now, make an empty one). Otherwise the server cannot send "
    "these changes. To go on without them: stop, drop the slot (pg_drop_replication_slot), and start run once with -c --on-gap "
    f"resnapshot, which copies all tables anew. To read them first, {ServerError.LOOK}"
)

_HINTS: Final = {ServerError.NO_PUBLICATION: _NO_PUBLICATION_HINT, ServerError.UNSENDABLE: POISON_HINT}
"""What is in a message, and the hint of `land` and `run` for it."""

_LEFT_OUT: Final = ("leave --expect-lsn out",)
"""What is in hints that are left out: the launcher compares slot and log anew, and its own error says what to do."""

_PARTS: Final = {
    " (--create-timeout, in poll mode also --poll-duration)": "",
    " (--expect-lsn)": "",
    ", or wait for it: --poll-mode, --standby": "",
    "or wait for the promotion (cdcpipe --poll-mode, cdcpipe --standby)": "or start again after the promotion",
    "set TMPDIR to a larger directory, or keep more in memory (--spill-threshold)": "or name a larger directory (--spill)",
    "-c -P pgoutput": "-c",
    "check the plugin's options (-o)": "the launcher has chosen the plugin's options, so please report this",
    ", with the new timeline for --expect": "",
}
"""Parts of messages and hints, and what they become."""


def in_own_words(message: str, hint: str | None) -> tuple[str, str | None]:
    """Return a message and a hint of ``cdcpipe`` without options that the commands of ``cdcpipe-spark`` do not have."""
    for part, own in _PARTS.items():
        message, hint = message.replace(part, own), hint and hint.replace(part, own)
    for part, own_hint in _HINTS.items():
        if part in message:
            hint = own_hint
    if hint and any(part in hint for part in _LEFT_OUT):
        hint = None
    return message, hint
