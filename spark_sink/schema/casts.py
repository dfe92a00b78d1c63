"""What ALTER TABLE … TYPE does to the old values of a column: whether their texts stay, and so what the tables have of them."""

from __future__ import annotations

from typing import Final

from cdcpipe.types.names import numeric_modifier
from cdcpipe.types.pg_type import type_ids_of
from cdcpipe.types.table import NUMERIC_IDS
from spark_sink.schema.types import MAX_PRECISION

__all__ = ["is_printed_otherwise", "keeps_values"]

_PRINTED_OTHERWISE: Final = frozenset(
    (old, new)
    for before, after in (
        ("cidr", ("inet",)),  # 10.0.0.1/32 is 10.0.0.1 then
        ("xml", ("text", "varchar", "bpchar")),  # with the encoding in the XML declaration
        ("int4", ("oid",)),  # -1 is 4294967295
        ("oid", ("int4",)),  # 4294967295 is -1: PostgreSQL does not look whether values fit
        ("regproc", ("regprocedure",)),
        ("regprocedure", ("regproc",)),
        ("regoper", ("regoperator",)),
        ("regoperator", ("regoper",)),
    )
    for old in type_ids_of(before)
    for new in type_ids_of(*after)
)

_NAMES_OF_OBJECTS: Final = type_ids_of(
    *("regclass", "regcollation", "regconfig", "regdictionary", "regnamespace", "regoper"),
    *("regoperator", "regproc", "regprocedure", "regrole", "regtype"),
)
_TIMES: Final = type_ids_of("timestamp", "timestamptz")
_KINDS_OF_TEXT: Final = {
    **dict.fromkeys(type_ids_of("int4", "oid"), "number"),
    **dict.fromkeys(_NAMES_OF_OBJECTS, "name"),
    **{type_id: str(type_id) for type_id in _TIMES},
}
"""Between types of two kinds, ALTER TABLE rewrites no rows either: between those of times if the session's time zone is UTC."""


def is_printed_otherwise(old_type_id: int, new_type_id: int, *, is_text: bool = False) -> bool:
    """Tell whether ALTER TABLE to the new type gives old values another text, although it rewrites no rows.

    It rewrites none where pg_cast says that the types are binary-coercible (castmethod ``b``):
    https://www.postgresql.org/docs/current/catalog-pg-cast.html. Types of users and extensions are taken to have the same texts.
    With ``is_text`` the tables have something made of the texts. Otherwise Spark's types show some of the changes: `holds`.
    """
    kinds = _KINDS_OF_TEXT.get(old_type_id), _KINDS_OF_TEXT.get(new_type_id)
    if is_text and None not in kinds and kinds[0] != kinds[1]:
        return True
    return (old_type_id, new_type_id) in _PRINTED_OTHERWISE


_INTEGER_IDS: Final = type_ids_of("int2", "int4", "int8")
[_FLOAT4_ID, _FLOAT8_ID] = type_ids_of("float4", "float8")
_TEXT_IDS: Final = type_ids_of("text", "varchar")


def keeps_values(old: tuple[int, int], new: tuple[int, int], *, is_text: bool = False) -> bool:
    """Tell whether a cast to the new type and modifier is known to leave what the tables have of the old values.

    It is if each text stays, or if only numbers change their texts, and the tables have them as numbers: with ``is_text`` they have
    not. (A conversion that Spark's types show is `holds`.)
    """
    (old_id, old_modifier), (new_id, new_modifier) = old, new
    if old == new:
        return True
    if old_id in _TEXT_IDS and new_id in _TEXT_IDS:  # a smaller limit cuts spaces off
        return new_modifier < 0 or 0 <= old_modifier <= new_modifier
    if old_id in _INTEGER_IDS:
        new_scale = numeric_modifier(new_modifier)[1] if new_modifier >= 0 else 0
        is_whole = new_id in NUMERIC_IDS and (new_scale == 0 if is_text else new_scale >= 0)
        return is_whole or new_id in _INTEGER_IDS or (new_id == _FLOAT8_ID and not is_text)
    if old_id not in NUMERIC_IDS or new_id not in NUMERIC_IDS:
        return (old_id, new_id) == (_FLOAT4_ID, _FLOAT8_ID) and not is_text
    if old_modifier < 0 or new_modifier < 0:
        return new_modifier < 0
    (digits, scale), (new_digits, new_scale) = numeric_modifier(old_modifier), numeric_modifier(new_modifier)
    # Zeros that come behind the point are part of a text.
    is_same = scale == new_scale or (not is_text and 0 <= scale <= digits and new_digits <= MAX_PRECISION)
    return is_same and new_scale >= scale and new_digits - new_scale >= digits - scale
