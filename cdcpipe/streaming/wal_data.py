r"""Finds the WALData messages in a buffer, and turns them into the pipe's bytes, all at once with numpy.

On the wire, a message is ``d``, Int32 length, ``w``, Int64 walStart, two more Int64, and the record. On the pipe it is
``w LSN LENGTH\n`` and the record. The pipe's header is never longer than what is before the record on the wire. So `Run.framed`
writes the header right before the record, and copies everything but the gaps.

To find the messages, `Run` takes every place that could begin one. Each length says where the next message begins. So a place at
which no message ends is dropped: it is inside a record. No I/O. Only a stream with many records imports this module.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cdcpipe.replication.copydata import WAL_DATA, WAL_DATA_HEADER_BYTES

__all__ = ["Run"]

Array = NDArray[Any]

_COPY_DATA: Final = ord("d")
_COPY_HEADER_BYTES: Final = 5
_GAP_BYTES: Final = _COPY_HEADER_BYTES + WAL_DATA_HEADER_BYTES
_LEAST_LENGTH: Final = 4 + WAL_DATA_HEADER_BYTES + 1
_XID_BYTES: Final = 4

_MAX_RECORD_BYTES: Final = 9999
"""A longer record ends a run. For records of this size, a call for each one costs little."""

_HEX: Final = np.frombuffer(b"".join(b"%02X" % i for i in range(256)), "<u2")
_DECIMAL: Final = np.frombuffer(b"".join(b"%04d" % i for i in range(_MAX_RECORD_BYTES + 1)), "<u4")
_POWERS_OF_16: Final = 16 ** np.arange(1, 8, dtype=np.uint32)
_POWERS_OF_10: Final = 10 ** np.arange(1, 4)


class Run:
    """Whole WALData messages in ``buffer[begin:end]``, one after the other from ``begin`` on.

    A run ends before the first message of another kind, without a record or with a long one, and where the upper half of walStart
    changes. ``kinds`` has the first byte of each record; ``ends[i]`` is where message ``i`` ends.
    """

    def __init__(self, buffer: bytearray, begin: int, end: int) -> None:
        self._buffer = buffer
        self.begin = begin
        view = np.frombuffer(buffer, np.uint8)[:end]
        place, following = _chain(view, begin, end)
        high = _integers(buffer, place + _COPY_HEADER_BYTES + 1)
        stops = following - place - _GAP_BYTES > _MAX_RECORD_BYTES
        if len(place):
            stops |= high != high[0]
            if stops.any():
                count = int(np.argmax(stops))
                place, following = place[:count], following[:count]
        self._place = place
        self.ends = following
        self._high = int(high[0]) if len(place) else 0
        self._low = _integers(buffer, place + _COPY_HEADER_BYTES + 5)
        self._view = view
        self.kinds: Array = view[place + _GAP_BYTES]

    def __len__(self) -> int:
        return len(self._place)

    def others(self, kinds: frozenset[int]) -> list[int]:
        """Return the indexes of the records whose kind is not one of ``kinds``."""
        is_other = np.ones(256, np.bool_)
        is_other[list(kinds)] = False
        found: list[int] = np.flatnonzero(is_other[self.kinds]).tolist()
        return found

    def record(self, i: int) -> tuple[int, bytes]:
        """Return the LSN of a record, and the record."""
        begin, end = int(self._place[i]) + _GAP_BYTES, int(self.ends[i])
        return self._high << 32 | int(self._low[i]), bytes(self._buffer[begin:end])

    def count_of_xid(self, xid: bytes, kinds: frozenset[int]) -> int:
        """Return how many of the first records are of ``kinds``, and are changes of ``xid`` in a stream block."""
        is_change = np.zeros(256, np.bool_)
        is_change[list(kinds)] = True
        fits = is_change[self.kinds] & (self.ends - self._place > _GAP_BYTES + 1 + _XID_BYTES)
        # A record that is too short for an xid may be the last one in the buffer.
        places = np.minimum(self._place + _GAP_BYTES + 1, len(self._buffer) - _XID_BYTES)
        fits &= _integers(self._buffer, places) == int.from_bytes(xid)
        return len(fits) if fits.all() else int(np.argmin(fits))

    def framed(self, count: int, *, without_xid: bool = False) -> memoryview:
        """Return the first ``count`` records in the pipe's form, and destroy the messages. ``without_xid``: cut their xids out."""
        if not count:
            return memoryview(b"")
        place, low, begin = self._place[:count], self._low[:count], self.begin
        end = int(self.ends[count - 1])
        cut = _XID_BYTES if without_xid else 0
        width = _GAP_BYTES + cut + (1 if without_xid else 0)
        length = self.ends[:count] - place - _GAP_BYTES - cut
        hexadecimal = _HEX[low.astype(">u4").view(np.uint8)].view(np.uint8).reshape(-1, 8)
        decimal = _DECIMAL[length].view(np.uint8).reshape(-1, 4)
        hex_digits = np.searchsorted(_POWERS_OF_16, low, "right") + 1
        digits = np.searchsorted(_POWERS_OF_10, length, "right") + 1
        layout = hex_digits * 8 + digits
        before = np.empty((count, width), np.uint8)
        if without_xid:
            before[:, -1] = self.kinds[:count]
        keeps = np.ones(end - begin, np.bool_)
        keeps_before = _words(keeps, width)
        for code in np.flatnonzero(np.bincount(layout)).tolist():
            rows = np.flatnonzero(layout == code)
            hex_count, count_of_digits = divmod(code, 8)
            header = b"w %X/%b %b\n" % (self._high, b"0" * hex_count, b"0" * count_of_digits)
            stop = _GAP_BYTES + cut
            start = stop - len(header)
            filled = np.empty((len(rows), len(header)), np.uint8)
            filled[:] = np.frombuffer(header, np.uint8)
            filled[:, -1 - count_of_digits : -1] = decimal[rows, 4 - count_of_digits :]
            filled[:, -2 - count_of_digits - hex_count : -2 - count_of_digits] = hexadecimal[rows, 8 - hex_count :]
            before[rows, start:stop] = filled
            kept = np.zeros(width, np.bool_)
            kept[start:] = True
            keeps_before[place[rows] - begin] = kept.view(f"V{width}")
        _words(self._view[begin:end], width)[place - begin] = before.view(f"V{width}")[:, 0]
        return self._view[begin:end][keeps].data


def _words(array: Array, width: int) -> Array:
    """Return a view in which item ``i`` has the ``width`` bytes from ``i`` on."""
    return np.ndarray(len(array) - width + 1, f"V{width}", array.data, strides=(1,))


def _integers(buffer: bytearray, places: Array) -> Array:
    """Return the unsigned integers of four bytes at these places."""
    found: Array = np.ndarray(len(buffer) - 3, ">u4", buffer, strides=(1,))[places].astype(np.uint32)
    return found


def _chain(view: Array, begin: int, end: int) -> tuple[Array, Array]:
    """Return where the messages of the run begin, and where they end."""
    last = end - _GAP_BYTES  # where a message with a record of one byte could begin, and is whole
    if last <= begin:
        return _NONE, _NONE
    place = np.flatnonzero(view[begin + _COPY_HEADER_BYTES : last + _COPY_HEADER_BYTES] == WAL_DATA) + begin
    # Longer messages than 16 MiB do not belong to a run.
    place = place[(view[place] == _COPY_DATA) & (view[place + 1] == 0)]
    length = np.ndarray(len(view) - 3, ">u4", view.data, strides=(1,))[place + 1].astype(np.int64)
    following = place + 1 + length
    fits = (length >= _LEAST_LENGTH) & (following <= end)
    place, following = place[fits], following[fits]
    if not len(place) or place[0] != begin:
        return _NONE, _NONE
    if (following[:-1] != place[1:]).any():
        chain = _linked(place, following)
        place, following = place[chain], following[chain]
    return place, following


_NONE: Final = np.zeros(0, np.int64)


def _linked(place: Array, following: Array) -> list[int]:
    """Return the indexes of the places that follow from the first one."""
    index = np.searchsorted(place, following)
    is_linked = (place[np.minimum(index, len(place) - 1)] == following).tolist()
    following_index, chain, i = index.tolist(), [0], 0
    while is_linked[i]:
        i = following_index[i]
        chain.append(i)
    return chain
