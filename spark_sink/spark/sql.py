"""Writes names, strings and paths as Spark reads them."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["literal", "only", "path_of", "quote"]

_SPECIAL: Final = re.compile(r"[][*?{}\\]")
"""Characters that Spark takes for a pattern in a path."""


def quote(name: str) -> str:
    """Quote an identifier for Spark's SQL."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """Write a string as a literal of Spark's SQL, for a session that `refused_settings.refuse` has let pass."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def only(path: str) -> str:
    """Return the pattern that this path alone matches: Spark's readers of files, but not Delta's, take paths for patterns."""
    return _SPECIAL.sub(r"\\\g<0>", path)


def path_of(pattern: str) -> str:
    """Return the path that a pattern of `only` matches."""
    return re.sub(r"\\(.)", r"\1", pattern)
