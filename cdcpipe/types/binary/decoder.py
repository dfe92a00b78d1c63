"""Turns a value of any type in binary form into text, by the type's OID.

`to_text` knows the built-in types, from the table of types. A `ValueDecoder` with a ``find`` function also knows the types that
this function describes: enums, domains, arrays, ranges and composites of users' types (`Shape`), and types whose text is not in
their bytes (money, regclass and the like). A decoder keeps the functions that it has found, and no other state. Nesting is limited.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, TypeAlias

from cdcpipe.errors import CdcpipeError
from cdcpipe.types.binary.containers import array_of, multirange_of, range_of, record_field, vector_of
from cdcpipe.types.binary.reading import I4, U4, Parts, ToText, check_end, malformed, take_nullable
from cdcpipe.types.binary.strings import plain_text
from cdcpipe.types.shape import Kind, Shape
from cdcpipe.types.table import TYPES, NoText

__all__ = ["BUILT_IN", "Find", "UnknownTypeError", "ValueDecoder", "name_column", "to_text"]

Find: TypeAlias = Callable[[int], Shape | ToText | None]
"""Describes a type that is not built in, or whose text is not in its bytes; None if it does not know the type."""

_FUNCTIONS: Final[dict[int, ToText]] = {
    type_id: row.to_text for type_id, row in TYPES.items() if not isinstance(row.to_text, Shape | NoText)
}
_SHAPES: Final = {type_id: row.to_text for type_id, row in TYPES.items() if isinstance(row.to_text, Shape)}
_MAX_DEPTH: Final = 16


class UnknownTypeError(CdcpipeError):
    """The text of a type's values is not known."""

    def __init__(self, type_id: int, problem: str) -> None:
        super().__init__(problem, hint="leave the option 'binary' out: then the server sends text")
        self.type_id = type_id


class ValueDecoder:
    """Turns values into text. ``find`` describes the types that are not built in."""

    def __init__(self, find: Find | None = None) -> None:
        self._find = find
        self._functions = dict(_FUNCTIONS)
        self._depth = 0

    def forget(self) -> None:
        """Forget the types that were found, so that ``find`` is asked again."""
        self._functions = dict(_FUNCTIONS)

    def to_text(self, type_id: int, data: bytes) -> bytes:
        """Return a value's text. Raises ProtocolError for malformed bytes, UnknownTypeError for an unknown type."""
        function = self._functions.get(type_id) or self._function(type_id)
        try:
            return function(data)
        except (struct.error, IndexError):
            # Only reads past the end, and wrong sizes of fixed layouts, raise these errors.
            raise malformed(f"{len(data)} bytes are too few or too many") from None
        finally:
            self._depth = 0

    def _function(self, type_id: int) -> ToText:
        function = self._functions.get(type_id)
        if function is None:
            found: Shape | ToText | None = _SHAPES.get(type_id)
            if found is None and self._find is not None:
                found = self._find(type_id)
            if found is None:
                raise UnknownTypeError(type_id, _why_unknown(type_id))
            function = self._functions[type_id] = self._made_of(found) if isinstance(found, Shape) else found
        return function

    def _made_of(self, shape: Shape) -> ToText:
        match shape.kind:
            case Kind.ENUM:
                return plain_text
            case Kind.COMPOSITE:
                return self._record
            case Kind.DOMAIN:
                return self._function(shape.of)
            case Kind.RANGE:
                return range_of(self._function(shape.of))
            case Kind.MULTIRANGE:
                return multirange_of(self._function(shape.of))
            case Kind.VECTOR:
                return vector_of(shape.of, self._function(shape.of))
            case Kind.ARRAY:
                return array_of(shape.of, self._function(shape.of), shape.delimiter)

    def _record(self, data: bytes) -> bytes:
        """record_send: the number of fields; for each its type, length (-1: NULL) and bytes."""
        # Only here the bytes themselves name the types of their parts. So only here nesting could be endless. (Real types don't
        # nest deep, because each level doubles the quotes inside.)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise malformed(f"composite types nest more than {_MAX_DEPTH} deep")
        (count,) = I4.unpack_from(data)
        if not 0 <= count * 8 <= len(data) - 4:
            raise malformed(f"{count} fields do not fit")
        pos = 4
        fields = Parts()
        for _ in range(count):
            (type_id,) = U4.unpack_from(data, pos)
            value, pos = take_nullable(data, pos + 4)
            fields.add(b"" if value is None else record_field(self._function(type_id)(value)))
        check_end(data, pos)
        self._depth -= 1
        return b"(%b)" % b",".join(fields.parts)


def to_text(type_id: int, data: bytes) -> bytes:
    """Return the text of a built-in type's value. Raises ProtocolError for malformed bytes, UnknownTypeError for other types."""
    return BUILT_IN.to_text(type_id, data)


BUILT_IN: Final = ValueDecoder()
"""A decoder that knows only the built-in types."""


def name_column(ex: CdcpipeError, table: str, column: str) -> None:
    """Add the column's name to an error of a value's conversion."""
    ex.message = f"column {column!r} of table {table!r} came in binary form: {ex.message}"
    ex.args = (ex.message,)


def _why_unknown(type_id: int) -> str:
    row = TYPES.get(type_id)
    if row is not None and isinstance(row.to_text, NoText):
        return row.to_text.reason
    return f"the type with OID {type_id} is not built in"
