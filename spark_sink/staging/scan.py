r"""Finds the records in a buffer from the pipe, with numpy: `scan_records` for all headers at once.

A Python loop over the headers would be the largest cost of landing. This module uses two facts. A newline after a digit ends a
header, unless it is inside a record by chance. And each header says where the next one begins. So `scan` takes every such newline
as the end of a header, reads the lengths of all of them, and drops the newlines that a length jumps over. From the first header
that does not fit, `scan_records` does the work, and reports the error. Neither of them checks the text of the LSN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cdcpipe.pipe.framing import MAX_HEADER_BYTES, scan_records

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["scan"]

_NEWLINE, _SPACE, _MARK, _ZERO = (np.uint8(byte) for byte in b"\n w0")

_SHORTEST_HEADER: Final = len(b"w 0/0 0\n")
_MAX_DIGITS: Final = 10

_LEAST_BYTES: Final = 16 << 10
"""In a smaller buffer, the loop of `scan_records` is faster."""


def scan(buffer: bytes, pos: int = 0) -> tuple[Array, Array, int]:
    """Find the whole records in ``buffer`` from ``pos`` on; return the same as `scan_records`, in int64 arrays.

    Raises ProtocolError where a header is expected and something else is found.
    """
    starts, ends = _scan_many(buffer, pos) if len(buffer) - pos >= _LEAST_BYTES else (_NONE, _NONE)
    more_starts, more_ends, next_pos = scan_records(buffer, int(ends[-1]) if len(ends) else pos)
    if more_starts:
        starts = np.concatenate([starts, np.array(more_starts, np.int64)])
        ends = np.concatenate([ends, np.array(more_ends, np.int64)])
    return starts, ends, next_pos


_NONE: Final = np.zeros(0, np.int64)


def _scan_many(buffer: bytes, pos: int) -> tuple[Array, Array]:
    """Return starts and ends of the records before the first header that may be wrong."""
    view = np.frombuffer(buffer, np.uint8)
    first = pos + _SHORTEST_HEADER - 1
    newline = np.flatnonzero(view[first:] == _NEWLINE) + first
    newline = newline[view[newline - 1] - _ZERO < 10]  # unsigned: for a byte below "0" the difference is large
    length, space = _lengths(view, newline)
    end = newline + 1 + length
    if (end[:-1] > newline[1:]).any():
        chain = _chain(newline, end)
        newline, space, end = newline[chain], space[chain], end[chain]
    begin = np.concatenate([np.array([pos]), end])[: len(end)]
    fits = (view[begin] == _MARK) & (view[np.minimum(begin + 1, newline)] == _SPACE) & (view[space] == _SPACE)
    fits &= (newline - begin < MAX_HEADER_BYTES) & (end <= len(buffer)) & _are_words(view, begin + 2, space)
    count = len(fits) if fits.all() else int(np.argmin(fits))
    return newline[:count] + 1, end[:count]


def _lengths(view: Array, newline: Array) -> tuple[Array, Array]:
    """Read the digits before each newline; return the numbers, and the places of the bytes before the digits."""
    length, space, is_digit = np.zeros(len(newline), np.int64), newline - 1, np.ones(len(newline), np.bool_)
    for back in range(1, _MAX_DIGITS + 1):
        digit = view[newline - back] - _ZERO
        is_digit &= digit < 10
        if not is_digit.any():
            break
        length += np.where(is_digit, digit, 0) * np.int64(10 ** (back - 1))
        space -= is_digit
    return length, space


_WORD_BYTES: Final = 16
_WORD: Final = f"V{_WORD_BYTES}"
_BEYOND: Final = np.array([b"\0" * length + b"\xff" * (_WORD_BYTES - length) for length in range(_WORD_BYTES + 1)]).view(_WORD)
"""For each length of a word: a mask for the bytes after the word."""
_JUST_BEYOND_SPACE, _HIGH_BITS = np.uint64(0x2121212121212121), np.uint64(0x8080808080808080)


def _are_words(view: Array, begin: Array, end: Array) -> Array:
    """Tell for each piece whether it is a word: not empty, and without spaces and control characters.

    The answer for a long word, or for one near the end of the buffer, may be a wrong False.
    """
    length, last = end - begin, len(view) - _WORD_BYTES
    if last < 0:
        return np.zeros(len(begin), np.bool_)
    words = np.ndarray(last + 1, _WORD, view.data, strides=(1,))[np.minimum(begin, last)].view("<u8")
    words |= _BEYOND[np.clip(length, 0, _WORD_BYTES)].view("<u8")
    # A byte below 0x21 sets its high bit. A borrow may set the high bit of the next byte, too: that is a wrong False.
    small = ((words - _JUST_BEYOND_SPACE) & ~words & _HIGH_BITS).reshape(-1, 2)
    fine: Array = ((small[:, 0] | small[:, 1]) == 0) & (length > 0) & (length <= _WORD_BYTES) & (begin <= last)
    return fine


def _chain(newline: Array, end: Array) -> list[int]:
    """Return the indexes of the newlines that end a header, given that the first one does: no record contains them."""
    following, chain, i = np.searchsorted(newline, end).tolist(), [], 0
    while i < len(following):
        chain.append(i)
        i = following[i]
    return chain
