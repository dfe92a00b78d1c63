"""How a type is made of other types: arrays, ranges, composites and the like."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Kind", "Shape"]


class Kind(enum.Enum):
    """How a type is made of others."""

    ARRAY = "array"
    VECTOR = "vector"
    """int2vector, oidvector: arrays with a text of their own."""
    COMPOSITE = "composite"
    DOMAIN = "domain"
    ENUM = "enum"
    MULTIRANGE = "multirange"
    RANGE = "range"


class Shape(NamedTuple):
    """What a type is made of.

    ``of`` is the OID of an array's element, a domain's base, a multirange's range or a range's subtype; 0 for other kinds.
    ``delimiter`` stands between the elements of an array.
    """

    kind: Kind
    of: int = 0
    delimiter: bytes = b","
