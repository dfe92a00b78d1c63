"""Which columns of a copy are masked, and how. No values here: spark_sink/schema/masking.py masks them.

    masks = Masks.of({"public.person.ssn": "hash", "*.*.password": "null"})
    masks.kinds("public", "person", ["id", "ssn"])      # {"ssn": "hash"}

A masked column is a text in the copy, whatever its type is on the server.

- ``null``: each value is NULL. ``redact``: each value but NULL is ``***``. ``hash``: each value but NULL is the HMAC-SHA256 of its
  text, in hexadecimal digits, with the key in the environment variable CDCPIPE_MASK_KEY.
- Names are patterns, as those of ``--exclude-column``. A pattern without ``*`` must find its column in each description of the
  table. Otherwise somebody has renamed or dropped the column, and the values may be in another one: the pipeline stops.
- A mask goes by the column's name. The pipeline knows a column by its number: if a masked column gets a name without a mask, the
  pipeline stops, too. Another column may have taken the old name.
- If several patterns match, the one counts that shows the least.
"""

from __future__ import annotations

import hmac
import os
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.publishing import ColumnPattern, exactly

__all__ = ["HASH", "KEY_VARIABLE", "NO_MASKS", "NULL", "OFF", "REDACT", "Masks", "mask_options", "parse_masks"]

NULL, REDACT, HASH, OFF = "null", "redact", "hash", "off"
_KINDS: Final = (NULL, REDACT, HASH)
"""The one that shows least comes first."""

KEY_VARIABLE: Final = "CDCPIPE_MASK_KEY"
_LEAST_KEY_BYTES: Final = 16
_CHECKED: Final = b"cdcpipe: which key is it?"


def parse_masks(texts: Iterable[str]) -> dict[str, str]:
    """Return the masks of ``--mask SCHEMA.TABLE.COLUMN=KIND``, by the pattern. Raises InvalidArgumentsError."""
    found = {}
    for text in texts:
        pattern, _, kind = text.rpartition("=")
        if kind not in (*_KINDS, OFF):
            msg = f"--mask takes SCHEMA.TABLE.COLUMN={'|'.join((*_KINDS, OFF))}, not {text!r}"
            raise InvalidArgumentsError(msg, hint="for example public.person.ssn=hash")
        ColumnPattern.parse(pattern, "--mask")
        found[pattern] = kind
    return found


def mask_options(kinds: Mapping[str, str]) -> str:
    """Return the options that name these masks, as one types them in a shell: ``--mask public.person.ssn=hash``."""
    return " ".join(f"--mask {shlex.quote(f'{pattern}={kind}')}" for pattern, kind in sorted(kinds.items()))


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of a warehouse. It may be pickled for executors; then `with_key` has put the key in."""

    rules: tuple[tuple[ColumnPattern, str], ...] = ()
    key: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, kinds: Mapping[str, str]) -> Self:
        """Return the masks of these patterns; ``off`` is none."""
        return cls(tuple((ColumnPattern.parse(text, "--mask"), kind) for text, kind in sorted(kinds.items()) if kind != OFF))

    @property
    def as_kinds(self) -> dict[str, str]:
        """The patterns with their kinds, as text."""
        return {pattern.text: kind for pattern, kind in self.rules}

    def check_there(self, schema: str, table: str, columns: Collection[str]) -> None:
        """Raise InvalidArgumentsError if a column that is named without ``*`` is not there."""
        for pattern, kind in self.rules:
            is_exact = pattern.table.is_exact and pattern.column.is_exact and pattern.table.matches(schema, table)
            if is_exact and not any(map(pattern.column.matches, columns)):
                name, other = pattern.column.pieces[0], exactly(schema, table, "NEW")
                back, loose = mask_options({pattern.text: OFF}), mask_options({_loosely(schema, table, name, columns): kind})
                raise InvalidArgumentsError(
                    f"table {schema}.{table} has no column {name!r}, which --mask names (it has {', '.join(columns)}): if it was"
                    " dropped or renamed, its values would be shown",
                    hint=f"if it was dropped, changes from before still have it: mask it with a * in its name, so that it need not"
                    f" be there: {back} {loose}. If it was renamed, mask the new name, too: {back} {loose}"
                    f" {mask_options({f'{other}*': kind})}. Only if no column ever had this name: {back}",
                )

    def check_renamed(self, before: tuple[str, str], now: tuple[str, str], columns: Collection[str]) -> None:
        """Raise InvalidArgumentsError if columns of a table are shown, but masked in the table ``before``, which has its rows.

        The table was called so, or shares rows with that one: as a partition, as the root of partitions, or by inheritance.
        """
        then = self.kinds(*before, columns)
        shown = then.keys() - self.kinds(*now, columns).keys()
        if shown:
            name, former = ".".join(now), ".".join(before)
            raise InvalidArgumentsError(
                f"table {name} has rows of {former}, and --mask names {', '.join(sorted(shown))} of {former}, but not of"
                f" {name}: the values would be shown",
                hint=f"mask them under this name, too: {mask_options({exactly(*now, each): then[each] for each in shown})}",
            )

    def check_columns(
        self, before: tuple[str, str], former: Mapping[int, str], now: tuple[str, str], columns: Mapping[int, str]
    ) -> None:
        """Raise InvalidArgumentsError if a column was masked under another name of its, and is not any more.

        ``former`` and ``columns`` are the names of a table's columns then and now, by their numbers in PostgreSQL.
        """
        then, kinds = self.kinds(*before, former.values()), self.kinds(*now, columns.values())
        for number, name in sorted(columns.items()):
            was = former.get(number)
            if was in then and name not in kinds:
                mask = mask_options({f"{exactly(*now, name)}*": then[was]})
                raise InvalidArgumentsError(
                    f"column {'.'.join((*now, name))} was {'.'.join((*before, was))}, and --mask names it under the former name"
                    " only: its values would be shown",
                    hint=f"mask it under the new name, too: {mask}; with the * it may match nothing, as before the rename",
                )

    def may_name(self, schema: str, table: str, columns: Collection[str]) -> bool:
        """Tell whether a mask of another table names a column that has no mask in this one."""
        shown = set(columns) - self.kinds(schema, table, columns).keys()
        return any(pattern.column.matches(name) for pattern, _ in self.rules for name in shown)

    def has_table(self, schema: str, table: str) -> bool:
        """Tell whether a mask may be for columns of this table."""
        return any(pattern.table.matches(schema, table) for pattern, _ in self.rules)

    def kinds(self, schema: str, table: str, columns: Collection[str]) -> dict[str, str]:
        """Return the masked ones of a table's columns, with their kinds."""
        found: dict[str, str] = {}
        for pattern, kind in self.rules:
            if not pattern.table.matches(schema, table):
                continue
            names = [name for name in columns if pattern.column.matches(name)]
            for name in names:
                found[name] = min(kind, found.get(name, kind), key=_KINDS.index)
        return found

    def check_key(self, schema: str, table: str, columns: Collection[str], key: Collection[str]) -> None:
        """Raise InvalidArgumentsError if the rows of a table could not be told apart any more."""
        kinds = self.kinds(schema, table, columns)
        lost = [name for name in key if kinds.get(name, HASH) != HASH]
        if lost:
            raise InvalidArgumentsError(
                f"table {schema}.{table}: {kinds[lost[0]]} masks the key's {', '.join(lost)}, which tells rows apart",
                hint="mask columns of a key with hash",
            )

    @property
    def needs_key(self) -> bool:
        """Whether a column is hashed."""
        return any(kind == HASH for _, kind in self.rules)

    def with_key(self) -> Masks:
        """Return the same with the key from the environment, if it is needed. Raises InvalidArgumentsError if it is not there."""
        if self.key or not self.needs_key:
            return self
        key = os.environb.get(KEY_VARIABLE.encode(), b"")
        if len(key) < _LEAST_KEY_BYTES:
            what = "is not set" if not key else f"has {len(key)} bytes; a key has at least {_LEAST_KEY_BYTES}"
            msg = f"the environment variable {KEY_VARIABLE}, with the key of hashed columns, {what}"
            raise InvalidArgumentsError(
                msg,
                hint="if the tables have hashes already, export the key that they were made with; otherwise make one, and store it"
                f" where it cannot be lost: export {KEY_VARIABLE}=$(openssl rand -hex 32)",
            )
        return replace(self, key=key)

    @property
    def fingerprint(self) -> str | None:
        """What tells one key from another; None if no column is hashed."""
        return hmac.digest(self.with_key().key, _CHECKED, "sha256").hex()[:16] if self.needs_key else None


def _loosely(schema: str, table: str, column: str, others: Collection[str]) -> str:
    """Return a pattern of this column that has a ``*``, so that it may match nothing. It does not match the others, if one can."""
    cuts = sorted(range(len(column) + 1), key=lambda cut: abs(2 * cut - len(column)))
    patterns = [f"{exactly(schema, table, column[:cut])}*{exactly(column[cut:])}" for cut in cuts]
    alone = (each for each in patterns if not any(map(ColumnPattern.parse(each, "--mask").column.matches, others)))
    return next(alone, patterns[0])


NO_MASKS: Final = Masks()
