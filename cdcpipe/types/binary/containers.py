"""Arrays, vectors, ranges and multiranges: turns their binary form into text, from the texts of their parts."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from cdcpipe.types.binary.reading import I4, Parts, ToText, check_end, malformed, take, take_nullable

__all__ = ["array_of", "multirange_of", "range_of", "record_field", "vector_of"]


_SPACE: Final = b" \t\n\v\f\r"
_NO_QUOTES: Final = bytes(range(256))


def _finder(special: bytes) -> Callable[[bytes], bool]:
    """Return a function that tells whether a text has any of these characters. It uses translate(), which runs in C."""

    def has_special(text: bytes) -> bool:
        return len(text.translate(_NO_QUOTES, special)) != len(text)

    return has_special


_record_needs_quotes: Final = _finder(b'"\\(),' + _SPACE)
_range_needs_quotes: Final = _finder(b'"\\()[],' + _SPACE)


def _doubled(text: bytes) -> bytes:
    return b'"%b"' % text.replace(b"\\", b"\\\\").replace(b'"', b'""')


def record_field(text: bytes) -> bytes:
    """Return a field's text, quoted for the text of its composite."""
    return _doubled(text) if not text or _record_needs_quotes(text) else text


def _range_bound(text: bytes) -> bytes:
    return _doubled(text) if not text or _range_needs_quotes(text) else text


_ARRAY = struct.Struct(">iiI")  # number of dimensions, whether there are NULLs, type of the elements
_DIMENSION = struct.Struct(">ii")  # length, lower bound
_MAX_DIMENSIONS: Final = 6


def _array_elements(data: bytes, element_id: int, function: ToText) -> tuple[list[tuple[int, int]], list[bytes | None]]:
    """array_send: the dimensions; for each element its length (-1: NULL) and bytes."""
    dimensions, _, type_id = _ARRAY.unpack_from(data)
    if not 0 <= dimensions <= _MAX_DIMENSIONS or type_id != element_id:
        raise malformed("no such array has so many dimensions or such elements")
    shape = [_DIMENSION.unpack_from(data, _ARRAY.size + 8 * dimension) for dimension in range(dimensions)]
    pos = _ARRAY.size + 8 * dimensions
    count = 1 if dimensions else 0
    for length, lower in shape:
        count *= length
        if length < 0 or 4 * count > len(data) - pos or lower + length >= 2**31:
            raise malformed(f"an array's elements do not fit into {len(data)} bytes")
    room = Parts()
    elements: list[bytes | None] = []
    for _ in range(count):
        value, pos = take_nullable(data, pos)
        text = None if value is None else function(value)
        room.add(text or b"")
        elements.append(text)
    check_end(data, pos)
    return shape, elements


def array_of(element_id: int, function: ToText, delimiter: bytes) -> ToText:
    """Return the function for arrays whose elements have this type and function."""
    needs_quotes = _finder(b'"\\{}' + delimiter + _SPACE)

    def element_text(element: bytes | None) -> bytes:
        if element is None:
            return b"NULL"
        if element and not needs_quotes(element) and element.upper() != b"NULL":
            return element
        return b'"%b"' % element.replace(b"\\", b"\\\\").replace(b'"', b'\\"')

    def text(data: bytes) -> bytes:
        shape, elements = _array_elements(data, element_id, function)
        if not elements:
            return b"{}"
        texts = [element_text(element) for element in elements]
        for length, _ in reversed(shape):
            texts = [b"{%b}" % delimiter.join(texts[begin : begin + length]) for begin in range(0, len(texts), length)]
        if all(lower == 1 for _, lower in shape):
            return texts[0]
        return b"".join(b"[%d:%d]" % (lower, lower + length - 1) for length, lower in shape) + b"=" + texts[0]

    return text


def vector_of(element_id: int, function: ToText) -> ToText:
    """Return the function for vectors whose elements have this type and function."""

    def text(data: bytes) -> bytes:
        shape, elements = _array_elements(data, element_id, function)
        if len(shape) > 1 or None in elements:
            raise malformed("a vector has one dimension and no NULL")
        return b" ".join([element or b"" for element in elements])

    return text


_EMPTY, _LOWER_INCLUSIVE, _UPPER_INCLUSIVE, _LOWER_INFINITE, _UPPER_INFINITE = 1, 2, 4, 8, 16


def range_of(function: ToText) -> ToText:
    """Return the function for ranges whose bounds have this function."""

    def text(data: bytes) -> bytes:
        """range_send: flags; the bounds that there are, each with its length."""
        flags = data[0]
        if flags > 31:
            raise malformed("no range has such flags")
        pos = 1
        bounds = []
        for infinite in (_LOWER_INFINITE, _UPPER_INFINITE):
            bound = b""
            if not flags & (infinite | _EMPTY):
                value, pos = take(data, pos + 4, *I4.unpack_from(data, pos))
                bound = _range_bound(function(value))
            bounds.append(bound)
        check_end(data, pos)
        if flags & _EMPTY:
            return b"empty"
        opening = b"[" if flags & _LOWER_INCLUSIVE else b"("
        return opening + b",".join(bounds) + (b"]" if flags & _UPPER_INCLUSIVE else b")")

    return text


def multirange_of(range_text: ToText) -> ToText:
    """Return the function for multiranges whose ranges have this function."""

    def text(data: bytes) -> bytes:
        """multirange_send: the number of ranges; each with its length."""
        (count,) = I4.unpack_from(data)
        if not 0 <= count * 5 <= len(data) - 4:
            raise malformed(f"{count} ranges do not fit")
        pos = 4
        ranges = Parts()
        for _ in range(count):
            value, pos = take(data, pos + 4, *I4.unpack_from(data, pos))
            ranges.add(range_text(value))
        check_end(data, pos)
        return b"{%b}" % b",".join(ranges.parts)

    return text
