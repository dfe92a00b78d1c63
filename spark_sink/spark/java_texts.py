"""Leaves values of rows out of what Spark says of exceptions: in its errors, in its log, and on the stderr of its JVM.

    withheld("SparkDateTimeException: [CAST_INVALID_INPUT] The value 'secret' of the type …")    # SparkDateTimeException
    withheld("java.io.IOException: No space left on device")                                      # as it is

Java's exceptions about values are known by their names, and Spark's also by the SQLSTATE at the end of their texts. For exceptions
of Python, `cdcpipe/error_texts.py` has the rule. It also has the variable that shows all texts.
"""

from __future__ import annotations

import json
import re
from typing import Final

from cdcpipe.error_texts import are_all_shown, is_class_shown
from cdcpipe.sqlstate import withheld as withheld_state

__all__ = ["Lines", "condition_of", "is_of_java_shown", "is_shown", "withheld"]

_OF_VALUES: Final = re.compile(
    r"(?:NumberFormat|DateTime|DateTimeParse|Arithmetic|InvalidFormat|CharacterCoding|MalformedInput|SparkRuntime|SparkArithmetic"
    r"|SparkDateTime|SparkNumberFormat|SparkIllegalArgument|SparkArrayIndexOutOfBounds|SparkUpgrade|DeltaInvariantViolation|InvariantViolation)Exception|PySpark(?:Type|Value)Error"
)
"""The classes of Java, Spark and pyspark whose texts may have values."""
_OTHERS: Final = ("java.", "javax.", "jdk.", "scala.", "org.", "io.", "com.", "pyspark.", "py4j.")
"""The beginnings of their modules and packages."""
_RAISED: Final = re.compile(r"((?:[A-Za-z_$][\w$]*\.)*)([A-Z][\w$]*(?:Exception|Error|Invalid)): ")
_STATE: Final = re.compile(r"SQLSTATE: (\w{5})")
_CONDITION: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\]")
_ABOUT_FILES: Final = ("KD", "XXK")
"""The beginnings of Spark's own SQLSTATEs whose texts name files and sources of data."""
_ENDS_TEXT: Final = re.compile(
    r"\s+at |\t\.\.\. |Caused by: |Exception in thread |# A fatal error"
    r"|Traceback |  File |During handling of |The above exception |\d{4}-\d\d-\d\d |\{\"time\": "
)


def is_of_java_shown(name: str) -> bool:
    """Return whether the text may be shown of an exception of Java or Scala whose class has this name, in any package."""
    return are_all_shown() or _OF_VALUES.fullmatch(name) is None


def is_shown(module: str, name: str) -> bool:
    """Tell whether the text may be shown of an exception whose class has this name, in a package of Java or a module of Python."""
    if not is_of_java_shown(name):
        return False
    if name.endswith("Exception") or module.startswith(_OTHERS):
        return True
    return is_class_shown(module.rstrip("."), name)


def condition_of(text: str) -> str | None:
    """Return the name of Spark's error condition if the text may have values, else None. ``CAST_INVALID_INPUT`` is a condition."""
    if are_all_shown():
        return None
    about_values = [
        found for found in _STATE.finditer(text) if withheld_state(found[1]) is not None and not found[1].startswith(_ABOUT_FILES)
    ]
    if not about_values:
        return None
    before = _CONDITION.findall(text[: about_values[0].start()])
    return before[-1] if before else f"SQLSTATE {about_values[0][1]}"


def withheld(line: str) -> str:
    """Return a line without the text of an exception that may have values."""
    for found in _RAISED.finditer(line):
        if not is_shown(found[1], found[2]):
            return line[: found.end() - len(": ")]
    if (condition := condition_of(line)) is None:
        return line
    before, named, _ = line.partition(f"[{condition}]")
    return f"{before}{named}" if named else condition


class Lines:
    """Leaves such texts out of lines that come one after the other. A text may have several lines."""

    def __init__(self) -> None:
        self._is_in_text = False

    def take(self, line: str) -> str | None:
        """Return what may be shown of the next line; None if it is part of a text that is left out."""
        if self._is_in_text and not _ENDS_TEXT.match(line):
            return None
        if line.startswith('{"time": "'):  # an entry of Spark's log as an object
            self._is_in_text = False
            return _withheld_in_object(line)
        said = withheld(line)
        self._is_in_text = said != line
        return said


def _withheld_in_object(line: str) -> str:
    try:
        entry = json.loads(line)
        entry["message"] = withheld(entry["message"])
    except (ValueError, KeyError, TypeError):  # an unusual entry: as a line of text
        return withheld(line)
    return json.dumps(entry, ensure_ascii=False)
