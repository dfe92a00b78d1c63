"""Geometric types: turns their binary form into text."""

from __future__ import annotations

import struct

from cdcpipe.types.binary.numbers import float_text
from cdcpipe.types.binary.reading import I4, malformed

__all__ = ["box_text", "circle_text", "line_text", "lseg_text", "path_text", "point_text", "polygon_text"]


def _floats(data: bytes, count: int, pos: int = 0) -> list[bytes]:
    if count < 0 or len(data) != pos + 8 * count:
        raise malformed(f"{count} coordinates are not {len(data) - pos} bytes")
    return [float_text(number) for number in struct.unpack_from(f">{count}d", data, pos)]


def _points(data: bytes, count: int, pos: int = 0) -> bytes:
    numbers = _floats(data, 2 * count, pos)
    return b",".join([b"(%b,%b)" % pair for pair in zip(numbers[::2], numbers[1::2], strict=True)])


def point_text(data: bytes) -> bytes:
    """point_send: two coordinates."""
    return _points(data, 1)


def box_text(data: bytes) -> bytes:
    """box_send: two points."""
    return _points(data, 2)


def lseg_text(data: bytes) -> bytes:
    """lseg_send: two points."""
    return b"[%b]" % _points(data, 2)


def line_text(data: bytes) -> bytes:
    """line_send: three coefficients."""
    return b"{%b}" % b",".join(_floats(data, 3))


def circle_text(data: bytes) -> bytes:
    """circle_send: centre and radius."""
    return b"<(%b,%b),%b>" % tuple(_floats(data, 3))


def polygon_text(data: bytes) -> bytes:
    """poly_send: the number of points; the points."""
    return b"(%b)" % _points(data, I4.unpack_from(data)[0], 4)


def path_text(data: bytes) -> bytes:
    """path_send: whether it is closed, the number of points; the points."""
    (count,) = I4.unpack_from(data, 1)
    return (b"(%b)" if data[0] else b"[%b]") % _points(data, count, 5)
