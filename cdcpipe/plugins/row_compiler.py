r"""Compiles a function that turns raw messages into rendered records, for one kind of change of one relation.

Rendering a row happens millions of times, and most of a record is the same for all rows of a relation: names, types and
punctuation. A plugin gives these as a template, a list of bytes and `Field`s. The compiled function fills the template from the
message's bytes, without decoding the message. There are two functions for a template:

- The fast one is for rows in which every value is text of fewer than 256 bytes. It splits the message at ``t\0\0\0``. Text contains
  no NUL, so these four bytes are always a value's kind and the upper bytes of its length. Each part begins with the last byte of
  the length, followed by the text. Comparing the two for all values checks the message completely.
- The other one walks from value to value, for rows with NULLs and long values.

All other messages (with unsent or binary values, with an unusual key, or malformed) go to ``fallback``, which decodes the message,
and either renders it the slow way or raises ProtocolError. The compiled functions themselves never raise an error for a message.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Final, TypeAlias

from cdcpipe.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cdcpipe.pgoutput.messages import Row
    from cdcpipe.plugins.base import Handler

__all__ = [
    "BIT_LITERAL",
    "BOOLEAN",
    "EXACT_NUMBER",
    "HEX",
    "LITERAL",
    "LSN",
    "NUMBER",
    "QUOTED",
    "STRING",
    "VERBATIM",
    "Expression",
    "Field",
    "Part",
    "Same",
    "Style",
    "Template",
    "compile_row",
    "escape",
    "fill",
    "json_string",
]


def escape(text: bytes) -> bytes:
    """Return the inside of the JSON string for ``text`` as PostgreSQL's escape_json() writes it."""
    # Decoding as Latin-1 and encoding again keeps all bytes. Only ASCII characters are escaped.
    return encode_basestring(text.decode("latin-1"))[1:-1].encode("latin-1")


def json_string(text: str) -> bytes:
    """Return the JSON string for ``text``."""
    return b'"%b"' % escape(text.encode())


_SAFE: Final = bytes(ord("x") if c < 0x20 or c in b'"\\' else c for c in range(256))
"""For bytes.translate. If it returns the same object, nothing has changed, and so nothing needs escaping."""


class Style:
    """How a value is written. There are the constants below, and plugins can make others."""

    def __init__(
        self, name: str, before: bytes, code: str, after: bytes | None = None, *, names: Mapping[str, object] | None = None
    ) -> None:
        self.name = name
        self.before = before
        self.after = before if after is None else after
        """The quote around the value, if it is not NULL."""
        self.code = code
        """An expression for the bytes between the quotes. ``{v}`` is the variable with the text."""
        self.names = names or {}
        """The names that the code uses, besides those of all styles."""

    @classmethod
    def call(cls, function: Callable[[bytes], bytes], quote: bytes = b"") -> Style:
        """Return the style that writes the function's result. The function raises ValueError if a text is not of its type."""
        name = f"convert_{next(_numbers)}"
        return cls(name, quote, name + "({v})", names={name: function})

    @cached_property
    def render(self) -> Callable[[bytes], bytes]:
        """Return a function that renders one value of this style, as the compiled functions do."""
        source = f"lambda v: {_quoted(self, 'v')}"
        function: Callable[[bytes], bytes] = eval(source, {**_NAMESPACE, **self.names})  # noqa: S307 - made of a plugin's constants
        return function

    def __repr__(self) -> str:
        return f"Style.{self.name}"


_numbers = itertools.count()


VERBATIM: Final = Style("VERBATIM", b"", "{v}")
"""Integers."""
NUMBER: Final = Style("NUMBER", b"", "({v} if {v}[-1:] < b':' else null)")
"""Other numbers. NaN and the infinities, which JSON lacks, become null: they are the ones that end in a letter."""
EXACT_NUMBER: Final = Style("EXACT_NUMBER", b"", "({v} if {v}[-1:] < b':' else b'\"' + {v} + b'\"')")
"""Other numbers. NaN and the infinities become strings."""
BOOLEAN: Final = Style("BOOLEAN", b"", "(true if {v} == b't' else false)")
HEX: Final = Style("HEX", b'"', "{v}[2:]")
"""bytea in hex format, without its backslash and x."""
QUOTED: Final = Style("QUOTED", b'"', "{v}")
"""Types whose text never needs escaping."""
LITERAL: Final = Style("LITERAL", b"'", '{v}.replace(b"\'", b"\'\'")')
"""A string constant of SQL."""
BIT_LITERAL: Final = Style("BIT_LITERAL", b"B'", "{v}", b"'")
STRING: Final = Style("STRING", b'"', "({v} if {v}.translate(safe) is {v} else escape({v}))")
"""All other types."""


@dataclass(frozen=True, slots=True)
class Field:
    """A value's place in a template: column ``column`` of the message's first or second tuple."""

    column: int
    style: Style
    row: int = 0


@dataclass(frozen=True, slots=True)
class Same:
    """A condition, not a place. A row in which one of these columns differs between the two tuples goes to the fallback.

    The template must have the column of both tuples as fields.
    """

    columns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expression:
    """A place for the result of the expression ``code``, which may use the namespace, ``wal_start`` and ``data``."""

    code: str


class _Highs(dict[int, bytes]):
    """The upper halves of LSNs as text, with the slash. They are kept, because there are few, and formatting takes time."""

    def __missing__(self, high: int) -> bytes:
        text = self[high] = b"%X/" % high
        return text


LSN: Final = (Expression("highs[wal_start >> 32]"), Expression("b'%X' % (wal_start & 0xFFFFFFFF)"))
"""The message's WAL position, as two parts of a template."""

Part: TypeAlias = "bytes | Field | Expression | Same"
Template: TypeAlias = "Sequence[Part]"

_UNREADABLE: Final = (ValueError, IndexError, struct.error)
"""The errors of a style's code for a text that is not of its type."""

_NAMESPACE: Final[Mapping[str, object]] = {
    "__builtins__": {"len": len, "IndexError": IndexError},
    "escape": escape,
    "false": b"false",
    "highs": _Highs(),
    "join": b"".join,
    "length_at": struct.Struct(">I").unpack_from,
    "null": b"null",
    "safe": _SAFE,
    "true": b"true",
    "unreadable": _UNREADABLE,
}


def _quoted(style: Style, variable: str) -> str:
    code = style.code.format(v=variable)
    return f"{style.before!r} + {code} + {style.after!r}" if style.before else code


def fill(template: Template, rows: Sequence[Row], names: Mapping[str, object], wal_start: int) -> bytes:
    """Return the record for one decoded change: the slow way to do the same as the compiled functions.

    ``rows`` are the message's tuples in order. The template has no field for an unsent value.
    """
    space = {**_NAMESPACE, **names, "wal_start": wal_start}
    parts = []
    for part in template:
        if isinstance(part, bytes):
            parts.append(part)
        elif isinstance(part, Expression):
            parts.append(eval(part.code, space))  # noqa: S307 - an expression of the plugin's
        elif isinstance(part, Field):
            value = rows[part.row][part.column]
            assert value is None or isinstance(value, bytes)
            parts.append(b"null" if value is None else _render(part, value))
    return b"".join(parts)


def _render(field: Field, value: bytes) -> bytes:
    try:
        return field.style.render(value)
    except _UNREADABLE:
        msg = f"the value of column {field.column + 1}, of {len(value)} bytes, is not text of its type"
        # No cause, because it would show the value.
        raise ProtocolError(msg) from None


def compile_row(
    head: bytes,
    template: Template,
    emit: str,
    names: Mapping[str, object],
    fallback: Handler,
    *,
    emit_long: str | None = None,
    second_row: bytes = b"",
    sent: frozenset[int] | None = None,
) -> Handler:
    """Return the function ``(wal_start, data)`` that fills the template and passes on the record.

    ``head`` are the first eight bytes of the messages. ``second_row`` is the kind of the second tuple, if there is one. ``emit`` is
    the statement that passes on ``{record}``, and ``emit_long`` the one of the walking function, whose values may be of any length;
    None for the same. ``names`` are the names that the statements and the template's expressions use. ``sent`` are the columns that
    have a value in the first tuple: a row in which another one has a value, or one of them is NULL, goes to the fallback. Without
    ``sent`` each column may have a value or NULL.
    """
    values = _values(template)
    columns = int.from_bytes(head[6:8], "big")
    rows = [b"", second_row + head[6:8]] if second_row else [b""]
    styles = {name: value for field in values.values() for name, value in field.style.names.items()}
    space = {**_NAMESPACE, **styles, **names, "fallback": fallback}
    walk_emit = emit if emit_long is None else emit_long
    if not columns or (sent is not None and len(sent) < columns):
        # The fast function takes only rows in which every column has a value.
        return _function(_walk_source(template, values, rows, columns, walk_emit, sent), space)

    def walk(wal_start: int, data: bytes) -> object:
        # Compile the walking function at the first row that needs it. Later rows call it directly.
        source = _walk_source(template, values, rows, columns, walk_emit, sent)
        space["walk"] = walk = _function(source, space)
        return walk(wal_start, data)

    space["walk"] = walk
    return _function(_fast_source(template, values, rows, columns, emit), space)


def _function(source: str, space: dict[str, object]) -> Handler:
    made: dict[str, Handler] = {}
    exec(compile(source, "<compiled row>", "exec"), space, made)  # noqa: S102 - literals in it are repr() of bytes
    return made["render"]


def _values(template: Template) -> dict[tuple[int, int], Field]:
    """Return the fields by their place in the message, in its order. A field that is used twice is rendered once."""
    fields: dict[tuple[int, int], Field] = {}
    for part in template:
        if isinstance(part, Field):
            known = fields.setdefault((part.row, part.column), part)
            if known.style is not part.style:
                msg = f"column {part.column} has two styles in one template"
                raise ValueError(msg)
    return dict(sorted(fields.items()))


def _join(template: Template, quote: bool) -> str:
    """Return the expression for the record. ``quote``: the variables have values without their quotes."""
    parts: list[bytes | str] = []
    for part in template:
        pieces: list[bytes | str]
        if isinstance(part, bytes):
            pieces = [part]
        elif isinstance(part, Expression):
            pieces = [part.code]
        elif isinstance(part, Same):
            continue
        else:
            name = f"v{part.row}_{part.column}"
            pieces = [part.style.before, name, part.style.after] if quote else [name]
        for piece in pieces:
            if not piece:
                continue
            last = parts[-1] if parts else None
            if isinstance(piece, bytes) and isinstance(last, bytes):
                parts[-1] = last + piece
            else:
                parts.append(piece)
    return f"join(({', '.join(part if isinstance(part, str) else repr(part) for part in parts)},))"


def _emit(template: Template, emit: str, quote: bool) -> list[str]:
    differ = [f"v0_{column} != v1_{column}" for part in template if isinstance(part, Same) for column in part.columns]
    check = [f"    if {' or '.join(differ)}:", "        return fallback(wal_start, data)"] if differ else []
    return check + [f"    {line}" for line in emit.replace("{record}", _join(template, quote)).splitlines()]


def _fast_source(
    template: Template, values: Mapping[tuple[int, int], Field], rows: Sequence[bytes], columns: int, emit: str
) -> str:
    names = [f"v{row}_{column}" for row in range(len(rows)) for column in range(columns)]
    lines = [
        "def render(wal_start, data):",
        "    parts = data.split(b't\\0\\0\\0')",
        f"    if len(parts) != {len(names) + 1}:",
        "        return walk(wal_start, data)",
        f"    head, {', '.join(names)} = parts",
    ]
    if len(rows) == 2:
        last = f"v0_{columns - 1}"
        lines += [
            f"    if {last}[-3:] != {rows[1]!r}:",
            "        return walk(wal_start, data)",
            f"    {last} = {last}[:-3]",
        ]
    checks = [f"{name}[0] + 1 != len({name})" for name in names]
    lines += [
        "    try:",
        f"        if len(head) != 8 or {' or '.join(checks)}:",
        "            return walk(wal_start, data)",
        "    except IndexError:",
        "        return walk(wal_start, data)",
    ]
    if values:
        lines.append("    try:")
        for (row, column), field in values.items():
            name = f"v{row}_{column}"
            lines.append(f"        {name} = {name}[1:]")
            code = field.style.code.format(v=name)
            if code != name:
                lines.append(f"        {name} = {code}")
        lines += ["    except unreadable:", "        return fallback(wal_start, data)"]
    return "\n".join([*lines, *_emit(template, emit, quote=True)])


def _walk_source(
    template: Template,
    values: Mapping[tuple[int, int], Field],
    rows: Sequence[bytes],
    columns: int,
    emit: str,
    sent: frozenset[int] | None,
) -> str:
    lines = ["def render(wal_start, data):", "    try:", "        pos = 8"]
    for row, row_head in enumerate(rows):
        if row_head:
            lines += [
                f"        if data[pos:pos + 3] != {row_head!r}:",
                "            return fallback(wal_start, data)",
                "        pos += 3",
            ]
        for column in range(columns):
            field = values.get((row, column))
            name = f"v{row}_{column}"
            if row == 0 and sent is not None and column not in sent:
                lines += [
                    "        if data[pos] != 110:",
                    "            return fallback(wal_start, data)",
                    "        pos += 1",
                ]
                continue
            lines += [
                "        kind = data[pos]",
                "        if kind == 116:",
                "            start = pos + 5",
                "            pos = start + length_at(data, pos + 1)[0]",
            ]
            if field:
                lines += ["            v = data[start:pos]", f"            {name} = {_quoted(field.style, 'v')}"]
            if row == 0 and sent is not None:
                lines += ["        else:", "            return fallback(wal_start, data)"]
                continue
            lines += ["        elif kind == 110:", "            pos += 1"]
            if field:
                lines.append(f"            {name} = null")
            lines += ["        else:", "            return fallback(wal_start, data)"]
    lines += [
        "        if pos != len(data):",
        "            return fallback(wal_start, data)",
        "    except unreadable:",
        "        return fallback(wal_start, data)",
    ]
    return "\n".join([*lines, *_emit(template, emit, quote=False)])
