"""The SQLSTATEs that cdcpipe handles in different ways. The names are those of the manual ("PostgreSQL Error Codes").

While the server reads rows, the message of an error may have a value of a row: `withheld` says which.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "CANNOT_CONNECT_NOW",
    "CHARACTER_NOT_IN_REPERTOIRE",
    "CONFIGURATION_LIMIT_EXCEEDED",
    "DISK_FULL",
    "DUPLICATE_OBJECT",
    "FEATURE_NOT_SUPPORTED",
    "INSUFFICIENT_PRIVILEGE",
    "INSUFFICIENT_RESOURCES",
    "INTERNAL_ERROR",
    "INVALID_AUTHORIZATION",
    "INVALID_CATALOG_NAME",
    "INVALID_PARAMETER_VALUE",
    "INVALID_PASSWORD",
    "IO_ERROR",
    "LOCK_NOT_AVAILABLE",
    "NOT_IN_PREREQUISITE_STATE",
    "OBJECT_IN_USE",
    "OUT_OF_MEMORY",
    "PROGRAM_LIMIT_EXCEEDED",
    "QUERY_CANCELED",
    "READ_ONLY_SQL_TRANSACTION",
    "SERIALIZATION_FAILURE",
    "SESSION_ENDED",
    "SHORTAGES",
    "TERMINATED_BY_ADMINISTRATOR",
    "TOO_MANY_CONNECTIONS",
    "UNDEFINED_COLUMN",
    "UNDEFINED_FILE",
    "UNDEFINED_FUNCTION",
    "UNDEFINED_OBJECT",
    "UNDEFINED_TABLE",
    "UNTRANSLATABLE_CHARACTER",
    "WITHHELD",
    "withheld",
]

CANNOT_CONNECT_NOW: Final = "57P03"
CHARACTER_NOT_IN_REPERTOIRE: Final = "22021"
CONFIGURATION_LIMIT_EXCEEDED: Final = "53400"
DISK_FULL: Final = "53100"
DUPLICATE_OBJECT: Final = "42710"
FEATURE_NOT_SUPPORTED: Final = "0A000"
INSUFFICIENT_PRIVILEGE: Final = "42501"
INSUFFICIENT_RESOURCES: Final = "53000"
INTERNAL_ERROR: Final = "XX000"
INVALID_AUTHORIZATION: Final = "28000"
INVALID_CATALOG_NAME: Final = "3D000"
INVALID_PARAMETER_VALUE: Final = "22023"
INVALID_PASSWORD: Final = "28P01"  # noqa: S105 - a code
IO_ERROR: Final = "58030"
LOCK_NOT_AVAILABLE: Final = "55P03"
NOT_IN_PREREQUISITE_STATE: Final = "55000"
OBJECT_IN_USE: Final = "55006"
OUT_OF_MEMORY: Final = "53200"
PROGRAM_LIMIT_EXCEEDED: Final = "54000"
QUERY_CANCELED: Final = "57014"
READ_ONLY_SQL_TRANSACTION: Final = "25006"
SERIALIZATION_FAILURE: Final = "40001"
TERMINATED_BY_ADMINISTRATOR: Final = "57P01"
TOO_MANY_CONNECTIONS: Final = "53300"
UNDEFINED_COLUMN: Final = "42703"
UNDEFINED_FILE: Final = "58P01"
UNDEFINED_FUNCTION: Final = "42883"
UNDEFINED_OBJECT: Final = "42704"
UNDEFINED_TABLE: Final = "42P01"
UNTRANSLATABLE_CHARACTER: Final = "22P05"

SESSION_ENDED: Final = "57P"
"""The beginning of the SQLSTATEs with which a server ends a session: an administrator's order, a shutdown, a crash, a time-out."""

SHORTAGES: Final = frozenset((INSUFFICIENT_RESOURCES, DISK_FULL, OUT_OF_MEMORY, IO_ERROR))
"""What the server lacks, whatever it has to do. This may pass without a change of the data: the same command may work later."""

_OF_NAMES: Final = frozenset(("08", "0A", "25", "26", "28", "34", "3D", "3F", "40", "42", "53", "54", "55", "57", "58", "72", "XX"))
"""The classes of errors whose messages name objects, options and limits, and no values."""

_OF_VALUES: Final = {
    "22001": "string_data_right_truncation",
    "22003": "numeric_value_out_of_range",
    "22007": "invalid_datetime_format",
    "22008": "datetime_field_overflow",
    "22012": "division_by_zero",
    CHARACTER_NOT_IN_REPERTOIRE: "character_not_in_repertoire",
    INVALID_PARAMETER_VALUE: "invalid_parameter_value",
    "22P02": "invalid_text_representation",
    "22P03": "invalid_binary_representation",
    UNTRANSLATABLE_CHARACTER: "untranslatable_character",
    "P0001": "raise_exception",
}
"""Those errors about values that are most likely."""


WITHHELD: Final = "the server's log has the message, which may have values of rows"


def withheld(state: str) -> str | None:
    """Return what to say in place of the server's message about an error while it reads rows; None if the message has no values.

    ``withheld("22P02")`` is ``invalid_text_representation: the server's log has the message, which may have values of rows``. Only
    classes that are known to have no values pass: an expression or a function may raise an error with a code of its own.
    """
    if state[:2] in _OF_NAMES:
        return None
    name = _OF_VALUES.get(state) or ("data_exception" if state.startswith("22") else "an error of another kind")
    return f"{name}: {WITHHELD}"
