r"""Where records begin and end in many bytes of the pipe: `scan_records` for all headers at once, with numpy.

Looking at each header in Python is most of what landing costs. But a newline with a digit before it ends a header, or is in a
record by chance; and each header says where the next one begins. So all such newlines are taken as ends of headers, all lengths
are read, and what a length jumps over is dropped. What does not fit then is left to `scan_records`, which knows why. What is
written for an LSN is not looked at, here as little as there.
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
"""With less at hand the loop over records is faster than the set-up of this one."""


def scan(buffer: bytes, pos: int = 0) -> tuple[Array, Array, int]:
    """Find the whole records in ``buffer`` from ``pos`` on, as `scan_records` does, and return int64 arrays.

    Raise ProtocolError where a header should be and is not.
    """
    starts, ends = _scan_many(buffer, pos) if len(buffer) - pos >= _LEAST_BYTES else (_NONE, _NONE)
    more_starts, more_ends, next_pos = scan_records(buffer, int(ends[-1]) if len(ends) else pos)
    if more_starts:
        starts = np.concatenate([starts, np.array(more_starts, np.int64)])
        ends = np.concatenate([ends, np.array(more_ends, np.int64)])
    return starts, ends, next_pos


_NONE: Final = np.zeros(0, np.int64)


def _scan_many(buffer: bytes, pos: int) -> tuple[Array, Array]:
    """Return starts and ends of records as far as their headers are beyond doubt."""
    view = np.frombuffer(buffer, np.uint8)
    first = pos + _SHORTEST_HEADER - 1
    newline = np.flatnonzero(view[first:] == _NEWLINE) + first
    newline = newline[view[newline - 1] - _ZERO < 10]  # unsigned: less than "0" is much more than 9
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
    """Read the digits before each newline; return the number, and where the byte before its digits is."""
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
"""For each length of a word a mask over the bytes that follow it."""
_JUST_BEYOND_SPACE, _HIGH_BITS = np.uint64(0x2121212121212121), np.uint64(0x8080808080808080)


def _are_words(view: Array, begin: Array, end: Array) -> Array:
    """Say for each piece whether it has bytes, all of them beyond the space. A no may be wrong: if it is long, or near the end."""
    length, last = end - begin, len(view) - _WORD_BYTES
    if last < 0:
        return np.zeros(len(begin), np.bool_)
    words = np.ndarray(last + 1, _WORD, view.data, strides=(1,))[np.minimum(begin, last)].view("<u8")
    words |= _BEYOND[np.clip(length, 0, _WORD_BYTES)].view("<u8")
    # A byte less than 0x21 leaves its high bit set; by a borrow that of the next one may be, too.
    small = ((words - _JUST_BEYOND_SPACE) & ~words & _HIGH_BITS).reshape(-1, 2)
    fine: Array = ((small[:, 0] | small[:, 1]) == 0) & (length > 0) & (length <= _WORD_BYTES) & (begin <= last)
    return fine


def _chain(newline: Array, end: Array) -> list[int]:
    """Return the numbers of the newlines that end a header, if the first does: those that no record jumps over."""
    following, chain, i = np.searchsorted(newline, end).tolist(), [], 0
    while i < len(following):
        chain.append(i)
        i = following[i]
    return chain
