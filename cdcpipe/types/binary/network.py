"""Network addresses: turns their binary form into text."""

from __future__ import annotations

import struct
from typing import Final

from cdcpipe.types.binary.reading import ToText, malformed

__all__ = ["inet_text", "macaddr8_text", "macaddr_text"]


def _pairs_of_hex(size: int) -> ToText:
    def text(data: bytes) -> bytes:
        if len(data) != size:
            raise malformed(f"an address has {size} bytes, not {len(data)}")
        return data.hex(":").encode()

    return text


macaddr_text, macaddr8_text = _pairs_of_hex(6), _pairs_of_hex(8)


_INET = struct.Struct("4B")  # address family, bits of the netmask, whether it is a cidr, bytes of the address
_FAMILIES: Final = {2: 4, 3: 16}


def inet_text(data: bytes) -> bytes:
    """inet_send, cidr_send: family, bits of the netmask, whether it is a cidr, number of bytes; the address."""
    family, bits, is_cidr, size = _INET.unpack_from(data)
    if _FAMILIES.get(family) != size or len(data) != 4 + size or bits > 8 * size or is_cidr > 1:
        raise malformed("no network address has such a family or size")
    address = data[4:]
    text = ".".join(map(str, address)) if size == 4 else _ipv6(address)
    return f"{text}/{bits}".encode() if is_cidr or bits != 8 * size else text.encode()


def _ipv6(address: bytes) -> str:
    """Write :: for the first of the longest runs of zero words, and the last words as an IPv4 address where one is embedded."""
    words = struct.unpack(">8H", address)
    best, length = 0, 1
    for begin in range(8):
        run = 0
        while begin + run < 8 and not words[begin + run]:
            run += 1
        if run > length:
            best, length = begin, run
    if length < 2:
        return ":".join(f"{word:x}" for word in words)
    if best == 0 and (length == 6 or (length == 5 and words[5] == 0xFFFF)):
        return f"::{'ffff:' if length == 5 else ''}{'.'.join(map(str, address[12:]))}"
    before, after = words[:best], words[best + length :]
    return ":".join(f"{word:x}" for word in before) + "::" + ":".join(f"{word:x}" for word in after)
