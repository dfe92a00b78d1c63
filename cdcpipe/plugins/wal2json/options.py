"""wal2json's options: their names and values, and the changes that they select."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.plugins.text import invalid_value, parse_bool

if TYPE_CHECKING:
    from cdcpipe.pgoutput.messages import Relation
    from cdcpipe.plugins.base import Options

__all__ = ["Settings", "parse_format_version", "parse_settings"]


@dataclass(frozen=True, slots=True)
class _TableName:
    """A table in a list. None stands for any name."""

    schema: str | None
    name: str | None

    def matches(self, relation: Relation) -> bool:
        return self.schema in (None, relation.namespace) and self.name in (None, relation.name)


@dataclass(slots=True)
class Settings:
    """The options, with underscores in their names, and with the server's defaults."""

    include_transaction: bool = True
    include_xids: bool = False
    include_timestamp: bool = False
    include_origin: bool = False
    include_schemas: bool = True
    include_types: bool = True
    include_type_oids: bool = False
    include_typmod: bool = True
    include_domain_data_type: bool = False
    include_column_positions: bool = False
    include_not_null: bool = False
    include_default: bool = False
    include_pk: bool = False
    include_lsn: bool = False
    pretty_print: bool = False
    write_in_chunks: bool = False
    numeric_data_types_as_string: bool = False
    actions: frozenset[str] = frozenset({"insert", "update", "delete", "truncate"})
    filter_origins: frozenset[int] = frozenset()
    filter_tables: Sequence[_TableName] = ()
    add_tables: Sequence[_TableName] = (_TableName(None, None),)
    filter_msg_prefixes: frozenset[str] = frozenset()
    add_msg_prefixes: frozenset[str] = frozenset()
    format_version: int = 1

    def selects(self, relation: Relation) -> bool:
        """Return whether the table's changes are wanted."""
        return any(table.matches(relation) for table in self.add_tables) and not any(
            table.matches(relation) for table in self.filter_tables
        )

    def selects_prefix(self, prefix: str) -> bool:
        """Return whether messages with this prefix are wanted."""
        return prefix not in self.filter_msg_prefixes and (not self.add_msg_prefixes or prefix in self.add_msg_prefixes)

    def needs_column_facts(self, relation: Relation) -> bool:
        """Tell whether the catalog must be asked. With REPLICA IDENTITY DEFAULT the stream has the key."""
        needs_key = self.include_pk and relation.replica_identity != "d" and self.format_version == 2
        return needs_key or self.include_not_null or self.include_default or self.include_column_positions


_REFUSED: Final = {
    "include-unchanged-toast": ("was removed from it", "leave it out: columns with an unchanged value are left out"),
    "partition-root": (
        "can't be honoured: which partition belongs to which table only the server knows",
        "leave it out, and ALTER PUBLICATION … SET (publish_via_partition_root = true)",
    ),
}
"""Options that wal2json had before 2.5, or has since 2.6: the error message and the hint for each."""


def parse_settings(options: Options) -> Settings:
    """Return the settings from the options. Raises InvalidArgumentsError if one is unknown or has a wrong value."""
    settings = Settings()
    for name, value in options.items():
        attribute = name.replace("-", "_")
        if name in _REFUSED:
            what, hint = _REFUSED[name]
            msg = f"wal2json's option {name!r} {what}"
            raise InvalidArgumentsError(msg, hint=hint)
        if attribute not in Settings.__slots__ or "_" in name:
            msg = f"wal2json has no option {name!r}"
            known = ", ".join(sorted(slot.replace("_", "-") for slot in Settings.__slots__))
            raise InvalidArgumentsError(msg, hint=f"its options are: {known}")
        setattr(settings, attribute, _parse_option(name, value, getattr(settings, attribute)))
    return settings


def _parse_option(name: str, value: str | None, default: object) -> object:
    if name == "format-version":
        return parse_format_version({name: value})
    if isinstance(default, bool):
        return value is None or parse_bool(name, value)
    if name in ("filter-tables", "add-tables"):
        return [] if value is None else _parse_tables(name, value)
    items = frozenset() if value is None else frozenset(_split(name, value))
    if name == "actions":
        unknown = items - {"insert", "update", "delete", "truncate"}
        if unknown:
            raise invalid_value(name, ",".join(sorted(unknown)))
        return default if value is None else items
    if name == "filter-origins":
        return frozenset(_parse_number(item) for item in items)
    return items


def parse_format_version(options: Options) -> int:
    """Return the format version that the options ask for."""
    if "format-version" not in options:
        return 1
    value = options["format-version"]
    if value is None:
        return 2
    if value.strip() not in ("1", "2"):
        raise invalid_value("format-version", value)
    return int(value)


def _parse_number(text: str) -> int:
    """Read the number at the beginning, 0 if there is none, like C's atoi()."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0


_SPACE: Final = " \t\n\v\f\r"


def _split(name: str, value: str) -> list[str]:
    """Split at commas and the white space around them. A backslash escapes the next character."""
    value = value.lstrip(_SPACE)
    if not value:
        return []
    items = []
    pos = 0
    while True:
        match = re.compile(r"(?:\\.|[^,\\ \t\n\v\f\r])+", re.DOTALL).match(value, pos)
        if match is None:
            raise invalid_value(name, value)
        items.append(match[0])
        rest = value[match.end() :].lstrip(_SPACE)
        if not rest:
            return items
        if rest[0] != ",":
            raise invalid_value(name, value)
        pos = len(value) - len(rest[1:].lstrip(_SPACE))


def _parse_tables(name: str, value: str) -> list[_TableName]:
    tables = []
    for item in _split(name, value):
        match = re.fullmatch(r"((?:\\.|[^.\\])*)\.(.*)", item, re.DOTALL)
        if match is None:
            raise InvalidArgumentsError(
                f"could not parse value {value!r} of the wal2json option {name!r}",
                hint="tables are named schema.table, with * for any; a backslash goes before , . * and space in a name",
            )
        schema, table = match.groups()
        tables.append(
            _TableName(
                None if schema == "*" else _unescape(schema),
                None if table == "*" else _unescape(table),
            )
        )
    return tables


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
