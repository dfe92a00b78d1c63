"""The contents of a publication that cdcpipe creates: patterns of tables, and tables without a key. No I/O.

    NewPublication.of(tables=["public.*"], exclude_tables=["public.log_*"])

A pattern is ``SCHEMA.TABLE``. Names are taken exactly as they are: upper and lower case differ, and the schema ends at the first
dot. ``*`` stands for any characters. Inside double quotes every character stands for itself, and ``""`` is one double quote:
``"my.schema".t``, ``public."a*b"``. replication/selection.py finds the tables on a server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

from cdcpipe.errors import ExcludedColumnError, InvalidArgumentsError
from cdcpipe.sql import LONGEST_NAME, quote_identifier
from cdcpipe.units import few

__all__ = [
    "FULL",
    "INSERT_ONLY",
    "KEYLESS",
    "REFUSE",
    "ColumnPattern",
    "NewPublication",
    "TablePattern",
    "companion",
    "companion_name",
    "exactly",
    "own",
    "with_companions",
]

REFUSE, INSERT_ONLY, FULL = "refuse", "insert-only", "full"
KEYLESS: Final = (REFUSE, INSERT_ONLY, FULL)
"""How to publish tables that have no key: see `NewPublication`."""

_QUOTE, _ANY, _DOT = '"', "*", "."


@dataclass(frozen=True, slots=True)
class NamePattern:
    """One name, or with ``*`` many. ``pieces`` are the texts between the stars; a name without a star is one piece."""

    pieces: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether it can match one name only."""
        return len(self.pieces) == 1

    def matches(self, name: str) -> bool:
        """Tell whether the whole name matches."""
        return re.fullmatch(".*".join(map(re.escape, self.pieces)), name, re.DOTALL) is not None


@dataclass(frozen=True, slots=True)
class TablePattern:
    """One table, or with ``*`` many. ``text`` is what the user gave."""

    text: str
    schema: NamePattern
    name: NamePattern

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """Read a pattern; raise InvalidArgumentsError, with the name of the option, for a text that is none."""
        return cls(text, *_names(text, "SCHEMA.NAME", "public.orders, or public.*", option))

    @property
    def is_exact(self) -> bool:
        """Whether it names one table."""
        return self.schema.is_exact and self.name.is_exact

    def matches(self, schema: str, name: str) -> bool:
        """Tell whether it is a pattern of this table."""
        return self.schema.matches(schema) and self.name.matches(name)


@dataclass(frozen=True, slots=True)
class ColumnPattern:
    """One column, or with ``*`` many: ``SCHEMA.TABLE.COLUMN``. ``text`` is what the user gave."""

    text: str
    table: TablePattern
    column: NamePattern

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """Read a pattern; raise InvalidArgumentsError, with the name of the option, for a text that is none."""
        schema, table, column = _names(text, "SCHEMA.TABLE.COLUMN", "public.person.birthday, or *.*.password", option)
        return cls(text, TablePattern(text, schema, table), column)

    def matches(self, schema: str, table: str, column: str) -> bool:
        """Tell whether it is a pattern of this column."""
        return self.table.matches(schema, table) and self.column.matches(column)


@dataclass(frozen=True, slots=True)
class NewPublication:
    """The contents of a publication that cdcpipe creates.

    - ``tables`` (empty: all) less ``exclude``. With both empty it is FOR ALL TABLES, so that later tables belong to it, too.
    - ``keyless``: what to do about tables on which the server would refuse published updates and deletes, because they have no key:
      refuse to create the publication; publish only inserts and truncates of them, in a second publication (`companion`); or set
      REPLICA IDENTITY FULL.
    - ``via_root``: a partitioned table is published as itself, not as its partitions.
    - ``exclude_columns``: columns that never leave the server.
    """

    tables: tuple[TablePattern, ...] = ()
    exclude: tuple[TablePattern, ...] = ()
    keyless: str = REFUSE
    via_root: bool = False
    exclude_columns: tuple[ColumnPattern, ...] = ()

    @property
    def is_all(self) -> bool:
        """Whether it is FOR ALL TABLES, as far as the options tell."""
        return not (self.tables or self.exclude or self.exclude_columns)

    @classmethod
    def of(
        cls,
        *,
        tables: Iterable[str] = (),
        exclude_tables: Iterable[str] = (),
        keyless: str = REFUSE,
        via_root: bool = False,
        exclude_columns: Iterable[str] = (),
    ) -> Self:
        """Read the values of the options of the same names. Raises InvalidArgumentsError."""
        if keyless not in KEYLESS:
            raise InvalidArgumentsError(f"--keyless {keyless!r} is none of {', '.join(KEYLESS)}")
        return cls(
            tuple(TablePattern.parse(text, "--table") for text in tables),
            tuple(TablePattern.parse(text, "--exclude-table") for text in exclude_tables),
            keyless,
            via_root,
            tuple(ColumnPattern.parse(text, "--exclude-column") for text in exclude_columns),
        )

    def __str__(self) -> str:
        return " ".join(self.arguments) or "all tables"

    @property
    def arguments(self) -> list[str]:
        """The same as options on a command line."""
        return [
            *(word for each in self.tables for word in ("--table", each.text)),
            *(word for each in self.exclude for word in ("--exclude-table", each.text)),
            *(["--keyless", self.keyless] if self.keyless != REFUSE else []),
            *(["--via-root"] if self.via_root else []),
            *(word for each in self.exclude_columns for word in ("--exclude-column", each.text)),
        ]

    def check_left_out(self, published: Iterable[tuple[str, str, Iterable[str]]]) -> None:
        """Raise ExcludedColumnError if one of the published columns is to stay on the server.

        Each of ``published`` is a table: its schema, its name, and the names of its published columns.
        """
        found = [
            f"{schema}.{name}.{column}"
            for schema, name, columns in published
            for column in columns
            if any(each.matches(schema, name, column) for each in self.exclude_columns)
        ]
        if found:
            raise ExcludedColumnError(
                f"--exclude-column does not hold: an existing publication has {few(found)}",
                hint="give the table a column list: ALTER PUBLICATION … DROP TABLE, then ADD TABLE with its other columns; or drop"
                " the publication, and let -c create it with a new slot",
            )


def companion_name(publication: str) -> str:
    """Return the name of the publication that has the tables without a key, with ``--keyless insert-only``."""
    return f"{publication}_keyless"


def companion(publication: str) -> str:
    """Return the name of the publication that has the tables without a key. Raises InvalidArgumentsError if it is too long."""
    name = companion_name(publication)
    if len(name.encode()) > LONGEST_NAME:
        msg = f"--keyless insert-only needs a publication {name!r}, and a name has at most {LONGEST_NAME} bytes"
        raise InvalidArgumentsError(msg, hint="give the publication a shorter name")
    return name


def with_companions(publications: Sequence[str], new: NewPublication) -> tuple[str, ...]:
    """Return all publications that a stream of these has to name. A name that is there already is not added again."""
    if new.keyless != INSERT_ONLY:
        return tuple(publications)
    return tuple(dict.fromkeys((*publications, *(companion(each) for each in own(publications)))))


def own(publications: Sequence[str]) -> list[str]:
    """Return the publications without those that are companions of others among them."""
    return [each for each in publications if not any(each == companion_name(other) for other in publications)]


def exactly(*names: str) -> str:
    """Return the pattern that matches these names alone: ``public."crm.person".ssn``."""
    return _DOT.join(quote_identifier(name) if {_QUOTE, _ANY, _DOT}.intersection(name) else name for name in names)


def _names(text: str, form: str, example: str, option: str) -> list[NamePattern]:
    """Read a pattern of this form, none of whose names is empty."""
    count = form.count(_DOT) + 1
    names = _split(text, count, option)
    if len(names) != count or not all(any(each.pieces) or not each.is_exact for each in names):
        raise InvalidArgumentsError(f"{option} takes {form}, not {text!r}", hint=f"for example {example}")
    return names


def _split(text: str, count: int, option: str) -> list[NamePattern]:
    """Cut a pattern at its first dots outside of double quotes, into at most ``count`` names."""
    names: list[NamePattern] = []
    pieces = [""]
    for character, is_quoted in _characters(text, option):
        if is_quoted or character not in (_ANY, _DOT):
            pieces[-1] += character
        elif character == _ANY:
            pieces.append("")
        elif len(names) < count - 1:
            names.append(NamePattern(tuple(pieces)))
            pieces = [""]
        else:
            pieces[-1] += character
    return [*names, NamePattern(tuple(pieces))]


def _characters(text: str, option: str) -> Iterator[tuple[str, bool]]:
    """Yield the characters of a pattern without its quotes, each with whether it was in quotes."""
    is_quoted, place = False, 0
    while place < len(text):
        if text[place] != _QUOTE:
            yield text[place], is_quoted
        elif is_quoted and text[place + 1 : place + 2] == _QUOTE:
            yield _QUOTE, True
            place += 1
        else:
            is_quoted = not is_quoted
        place += 1
    if is_quoted:
        raise InvalidArgumentsError(f"{option} {text}: a double quote has no end", hint='a name with a double quote: "a""b"')
