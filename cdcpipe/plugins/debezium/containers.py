"""Turns the text of arrays and hstore into JSON, as Debezium's connector writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from cdcpipe.plugins.row_compiler import escape

if TYPE_CHECKING:
    from cdcpipe.plugins.debezium.binary import ToJson

__all__ = ["array", "hstore_pairs", "json_object"]

# By delimiter: a brace or the delimiter; an element in quotes; any other element. The server does not quote an element because
# another type's delimiter is in it.
_ARRAY_TOKENS: Final[Mapping[bytes, re.Pattern[bytes]]] = {
    delimiter: re.compile(rb'([{}%b])|"((?:[^"\\]|\\.)*)"|([^{}%b"]+)' % (delimiter, delimiter), re.DOTALL)
    for delimiter in (b",", b";")
}


def array(element: ToJson, delimiter: bytes, value: bytes) -> bytes:
    """Return the JSON array. An array with several dimensions is nested. Lower bounds are left out.

    ``delimiter`` is that of the element's type: a semicolon for box, else a comma. Raises ValueError if the text is no array.
    """
    token_of = _ARRAY_TOKENS[delimiter]
    if value.startswith(b"["):
        value = value[value.index(b"=") + 1 :]
    parts = []
    pos = depth = 0
    while pos < len(value):
        token = token_of.match(value, pos)
        if token is None:
            raise ValueError
        pos = token.end()
        sign, in_quotes, plain = token.groups()
        if sign is not None:
            parts.append(_JSON_SIGNS[sign])
            depth += {b"{": 1, b"}": -1}.get(sign, 0)
        elif in_quotes is not None:
            parts.append(element(re.sub(rb"\\(.)", rb"\1", in_quotes, flags=re.DOTALL)))
        else:
            parts.append(b"null" if plain == b"NULL" else element(plain))
    if depth or not value.startswith(b"{"):
        raise ValueError
    return b"".join(parts)


_JSON_SIGNS: Final = {b"{": b"[", b"}": b"]", b",": b",", b";": b","}

_HSTORE_PAIR: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"=>(?:NULL|"((?:[^"\\]|\\.)*)")(?:, |$)', re.DOTALL)


def hstore_pairs(value: bytes) -> dict[bytes, bytes]:
    """Return the keys and values of an hstore as JSON."""
    pairs = {}
    pos = 0
    while pos < len(value):
        match = _HSTORE_PAIR.match(value, pos)
        if match is None:
            raise ValueError
        pos = match.end()
        key, text = (part and re.sub(rb"\\(.)", rb"\1", part, flags=re.DOTALL) for part in match.groups())
        pairs[b'"%b"' % escape(key)] = b"null" if text is None else b'"%b"' % escape(text)
    return pairs


def json_object(pairs: dict[bytes, bytes]) -> bytes:
    """Return the JSON object with these members."""
    return b"{%b}" % b",".join(b"%b:%b" % pair for pair in pairs.items())
