"""Settings of Spark with which a session would skip data, write other texts, or write days and times in the Julian calendar.

They may come from ``--conf``, from a notebook's session, or from the spark-defaults.conf of a cluster, made for other programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdcpipe.errors import InitError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["RIGHT", "refuse", "refuse_to_read"]

_SKIPS: Final = "it would leave out what it cannot read of a file, and a merge would lose these changes without a word"
_CALENDAR: Final = "it would write early days and times in the Julian calendar; cdcpipe's files have the Gregorian one"
_ESCAPES: Final = "it would write a backslash too many into texts that stand in cdcpipe's SQL, like the default of a new column"
_ESCAPED: Final = "spark.sql.parser.escapedStringLiterals"
_REFUSED: Final = {
    "spark.sql.files.ignoreCorruptFiles": ("true", "false", _SKIPS),
    "spark.sql.files.ignoreMissingFiles": ("true", "false", _SKIPS),
    "spark.sql.parquet.datetimeRebaseModeInWrite": ("legacy", "CORRECTED", _CALENDAR),
    "spark.sql.parquet.int96RebaseModeInWrite": ("legacy", "CORRECTED", _CALENDAR),
    _ESCAPED: ("true", "false", _ESCAPES),
}
"""By setting: the value that is refused, the value to give, and why."""

RIGHT: Final = {key: right for key, (_, right, _) in _REFUSED.items() if key != _ESCAPED}
"""What a session gets that cdcpipe makes. Spark warns whenever the one that is left out is set; its default is right."""


def refuse(get: Callable[[str], str | None]) -> None:
    """Raise InitError if a setting would change or skip values. ``get`` returns a setting: `spark.conf.get`, or a dict's."""
    _refuse(get, _REFUSED)


def refuse_to_read(get: Callable[[str], str | None]) -> None:
    """Do the same for a session that only reads what cdcpipe makes of a changelog: how it would write files does not matter."""
    _refuse(get, {key: known for key, known in _REFUSED.items() if known[2] is not _CALENDAR})


def _refuse(get: Callable[[str], str | None], settings: Mapping[str, tuple[str, str, str]]) -> None:
    for key, (refused, right, reason) in settings.items():
        value = str(get(key))
        if value.lower() == refused:
            raise InitError(
                f"Spark has the setting {key}={value}: {reason}",
                hint=f"make it {right} where it comes from: --conf, the program that made the session, or spark-defaults.conf",
            )
