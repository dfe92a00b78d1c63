"""Which settings have a secret: `config show` does not show their values, and the command line of Spark's JVM has none of them.

A command line is no secret on its machine: ``ps`` shows it to every user. A setting may come from a file that only one user reads.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NOT_SHOWN", "for_command_line", "is_secret", "without_password"]

NOT_SHOWN: Final = "***"

_SECRET: Final = re.compile(r"pass|secret|token|credential|key(?!tab)", re.IGNORECASE)
"""What is in the names of settings whose values are secret. A keytab's name is not."""
_PASSWORD: Final = re.compile(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'?|[^\s&]+)", re.IGNORECASE)
_USER: Final = re.compile(r"(?P<user>\w*:/*[^:/?#]*):.*@", re.DOTALL)

_FETCHED: Final = ("spark.jars", "spark.files", "spark.archives", "spark.submit.pyFiles")
_BEFORE_THE_SESSION: Final = ("spark.driver.", "spark.submit.", *_FETCHED)
"""Settings, and beginnings of their names, that count when the JVM starts. Afterwards they would have no effect."""
_REMOTE: Final = re.compile(r"(?:^|,)\s*(?!file:|local:)\w[\w+.-]*://")


def is_secret(key: str) -> bool:
    """Tell whether a setting with this name has a secret."""
    return _SECRET.search(key) is not None


def without_password(text: str) -> str:
    """Return a text, such as a URL or a DSN, without the passwords in it."""
    return _PASSWORD.sub(rf"\1{NOT_SHOWN}", _USER.sub(rf"\g<user>:{NOT_SHOWN}@", text))


def for_command_line(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings without those that have a secret. The session takes these when the JVM runs, through its socket.

    The JVM needs some before it knows a socket: its own options, and Hadoop's settings if it fetches jars from an object store.
    """
    fetches = any(_REMOTE.search(settings.get(key, "")) for key in _FETCHED)
    early = (*_BEFORE_THE_SESSION, "spark.hadoop.") if fetches else _BEFORE_THE_SESSION
    return {
        key: value
        for key, value in settings.items()
        if key.startswith(early) or not (is_secret(key) or without_password(value) != value)
    }
