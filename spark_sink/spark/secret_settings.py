"""Which settings have a secret: neither `config show` nor Spark shows their values, and the command line of Spark's JVM has none.

A command line is no secret on its machine: ``ps`` shows it to every user. A setting may come from a file that only one user reads.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["HIDDEN_BY_SPARK", "NOT_SHOWN", "PATTERN", "for_command_line", "is_secret", "without_password"]

NOT_SHOWN: Final = "***"

_WORDS: Final = r"pass|secret|token|credential|key(?!tab)"
"""What is in the names of settings whose values are secret. A keytab's name is not."""
_SECRET: Final = re.compile(_WORDS, re.IGNORECASE)
PATTERN: Final = "spark.redaction.regex"
HIDDEN_BY_SPARK: Final = rf"(?i)secret|password|token|access[.]?key|credential|^[a-z]\w*\.[^\s/:]*(?:{_WORDS})|:/*[^\s:/?#]*:\S*@"
"""The value of `PATTERN`: which settings Spark hides in its user interface and its event log. Begins with Spark's default.

Spark looks for it in values, too, and in the properties of tables. So our words count in what looks like the name of a setting:
the path of a table named ``keys`` is no secret. Nor does Spark know that a URL may have a password. A value may have several URLs,
and a password may have any character, as for `without_password`.
"""
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
