r"""Escapes what a name or a message may not do to a terminal or a log: begin a new line, move the cursor, change colors.

    printable('public.a\nb')    # public.a\nb, in one line

A name of PostgreSQL may have any character but NUL. Whatever prints lines for people passes each line through `printable`. JSON has
escapes of its own, but leaves characters that terminals obey, as U+009B: `json_text` writes it without them.
"""

from __future__ import annotations

import json
import re
from typing import Final

__all__ = ["json_text", "printable", "printable_character", "printable_json", "printable_lines"]

_ESCAPES: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_SPACES: Final = frozenset("\u00a0\u2002\u2003\u2009\u202f\u3000")
"""Spaces that Python does not call printable. They do no harm."""
_PARTS: Final = re.compile(r"([\n\t])")
_UTF16_UNIT: Final = re.compile(r"....")


def printable(line: str) -> str:
    """Return the line with escapes in the place of characters that are not printable. Spaces of all kinds stay as they are."""
    return line if line.isprintable() else "".join(c if c.isprintable() or c in _SPACES else printable_character(c) for c in line)


def printable_lines(text: str) -> str:
    """Return a text of several lines, with `printable` applied to each of them. Tabs stay."""
    return text if text.isprintable() else "".join(part if part in "\n\t" else printable(part) for part in _PARTS.split(text))


def json_text(value: object, indent: int | None = None) -> str:
    """Return a value as JSON with only printable characters, and newlines if ``indent`` is not None."""
    return printable_json(json.dumps(value, indent=indent, ensure_ascii=False))


def printable_json(text: str) -> str:
    """Return JSON that means the same and has only printable characters, and newlines between its parts."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _json_escape(c) for c in text)


def _json_escape(character: str) -> str:
    """Return the escape that JSON has for a character: one beyond U+FFFF is two units of UTF-16."""
    return _UTF16_UNIT.sub(r"\\u\g<0>", character.encode("utf-16-be", "surrogatepass").hex())


def printable_character(character: str) -> str:
    r"""Return the escape of a character. ``\x`` is also a byte that Python decoded with surrogateescape."""
    if character in _ESCAPES:
        return _ESCAPES[character]
    code = ord(character)
    if code < 0x80:
        return f"\\x{code:02x}"
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
