"""The types of text search: turns their binary form into text."""

from __future__ import annotations

import struct
from collections import deque
from typing import Final, NamedTuple

from cdcpipe.types.binary.reading import I4, U2, check_end, malformed, take_cstring

__all__ = ["tsquery_text", "tsvector_text"]


def _quoted_lexeme(lexeme: bytes) -> bytes:
    return b"'%b'" % lexeme.replace(b"\\", b"\\\\").replace(b"'", b"''")


_WEIGHTS: Final = (b"", b"C", b"B", b"A")


def tsvector_text(data: bytes) -> bytes:
    """tsvectorsend: the number of lexemes; for each its text and positions, the upper two bits of which are the weight."""
    (count,) = I4.unpack_from(data)
    if not 0 <= count * 3 <= len(data) - 4:
        raise malformed(f"{count} lexemes do not fit")
    pos = 4
    lexemes = []
    for _ in range(count):
        lexeme, pos = take_cstring(data, pos)
        (positions,) = U2.unpack_from(data, pos)
        places = struct.unpack_from(f">{positions}H", data, pos + 2)
        pos += 2 + 2 * positions
        text = b",".join([b"%d%b" % (place & 0x3FFF, _WEIGHTS[place >> 14]) for place in places])
        lexemes.append(_quoted_lexeme(lexeme) + (b":" + text if text else b""))
    check_end(data, pos)
    return b" ".join(lexemes)


_OPERAND, _OPERATOR = 1, 2
_NOT, _AND, _OR, _PHRASE = 1, 2, 3, 4
_PRIORITIES: Final = {_NOT: 4, _AND: 2, _OR: 1, _PHRASE: 3}


class _Query(NamedTuple):
    """A part of a tsquery; the operand's operator is 0."""

    text: deque[bytes]
    operator: int

    def as_part_of(self, operator: int, *, is_right: bool = False) -> deque[bytes]:
        """Return the text, in parentheses if the surrounding operator needs them."""
        if self.operator and (
            _PRIORITIES[self.operator] < _PRIORITIES[operator] or (is_right and operator == self.operator == _PHRASE)
        ):
            self.text.appendleft(b"( ")
            self.text.append(b" )")
        return self.text


def tsquery_text(data: bytes) -> bytes:
    """tsquerysend: the number of items; they come as operator, right operand, left operand."""
    (count,) = I4.unpack_from(data)
    if not 0 <= count * 2 <= len(data) - 4:
        raise malformed(f"{count} items do not fit")
    pos = 4
    items: list[tuple[int, bytes]] = []
    for _ in range(count):
        if data[pos] == _OPERAND:
            weight, is_prefix = data[pos + 1], data[pos + 2]
            lexeme, pos = take_cstring(data, pos + 3)
            flags = b"*" * bool(is_prefix) + bytes(b"DCBA"[bit] for bit in (3, 2, 1, 0) if weight >> bit & 1)
            items.append((0, _quoted_lexeme(lexeme) + (b":" + flags if weight or is_prefix else b"")))
        elif data[pos] == _OPERATOR and data[pos + 1] in _PRIORITIES:
            operator = data[pos + 1]
            pos += 2
            text = {_NOT: b"!", _AND: b" & ", _OR: b" | ", _PHRASE: b" <-> "}[operator]
            if operator == _PHRASE:
                (distance,) = U2.unpack_from(data, pos)
                pos += 2
                text = text if distance == 1 else b" <%d> " % distance
            items.append((operator, text))
        else:
            raise malformed(f"no tsquery has such an item as at byte {pos}")
    check_end(data, pos)
    # Read backwards, so that the operands come before their operator, the left one first. No recursion, because a query may be one
    # long chain.
    stack: list[_Query] = []
    for operator, text in reversed(items):
        if not operator:
            stack.append(_Query(deque([text]), 0))
            continue
        if len(stack) < (1 if operator == _NOT else 2):
            raise malformed("a tsquery's operator has no operand")
        right = stack.pop().as_part_of(operator, is_right=operator != _NOT)
        if operator == _NOT:
            right.appendleft(text)
            stack.append(_Query(right, operator))
            continue
        left = stack.pop().as_part_of(operator)
        # Move the shorter operand, so that a chain on either side is not moved again and again.
        if len(left) < len(right):
            right.appendleft(text)
            right.extendleft(reversed(left))
            stack.append(_Query(right, operator))
        else:
            left.append(text)
            left.extend(right)
            stack.append(_Query(left, operator))
    if len(stack) > 1:
        raise malformed("a tsquery has more than one root")
    return b"".join(stack[0].text) if stack else b""
