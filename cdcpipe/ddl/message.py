"""The messages of DDL capture, as their readers get them: logical messages with the prefix ``cdcpipe.ddl``.

``message.schema.json`` in this directory describes the content. In short:

- Each message has a ``version``, which is 1, and a ``kind``. ``tables`` has whole descriptions of tables, as they are at the
  message's place in the transaction.
- One message stands for a statement: that of the kind ``command``, or of the kind ``drop`` if the tag begins with DROP. Messages of
  the kind ``rewrite``, and ``drop`` with another tag, are parts of the statement whose ``command`` follows.
- ``failure`` says that the capture of a command failed. ``installed`` and ``removed`` say from where on there are messages.

Everybody who may run SQL may write a logical message with any prefix. So a reader must not trust a message more than the data of
the same database.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

__all__ = ["PREFIX", "DDLMessage", "is_statement", "parse", "serialize", "subtransaction"]

PREFIX: Final = "cdcpipe.ddl"

_VERSION: Final = 1

DDLMessage: TypeAlias = Mapping[str, Any]
"""The content of a message, as ``message.schema.json`` describes it."""


def parse(prefix: str, content: bytes, *, is_checked: bool = False) -> DDLMessage | None:
    """Return the content of a message of DDL capture. Return None for any other logical message.

    A message of a later, incompatible version is None, too. Only ``version`` and ``kind`` are checked.
    With ``is_checked`` this function has read the content before: it does not look for NaN and the like again.
    """
    if prefix != PREFIX:
        return None
    try:
        message = json.loads(content.decode(), parse_constant=_refuse)
        if not is_checked:
            serialize(message)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or message.get("version") != _VERSION or not isinstance(message.get("kind"), str):
        return None
    return message


def subtransaction(prefix: str, content: bytes) -> int | None:
    """Return the ID of the subtransaction that a message of DDL capture belongs to. Return None for any other message."""
    message = parse(prefix, content)
    xid = None if message is None else message.get("xid")
    return xid if isinstance(xid, int) else None


def serialize(message: object) -> bytes:
    """Return the message, or a part of it, as compact JSON in one line. Raises ValueError for NaN and infinities."""
    return json.dumps(message, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _refuse(constant: str) -> None:
    """Refuse what Python reads and JSON does not have."""
    raise ValueError(constant)


def is_statement(message: DDLMessage) -> bool:
    """Return whether the message is the one that stands for its statement. The others are parts of the statement."""
    kind, tag = message["kind"], str(message.get("tag"))
    return kind == "command" or (kind == "drop" and tag.startswith("DROP "))
