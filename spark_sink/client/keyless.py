"""What to say of published tables without a key.

    for text in warnings_of(prepared.tables):
        logger.warning("%s", text)

Each table is named once, with all that the missing key means and what the user can do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = ["has_key", "keyless_text", "table_name", "warnings_of"]


_PUBLISHED: Final = (
    "publish all columns of the key, or let REPLICA IDENTITY USING INDEX name a unique index on published columns"
    " (before PostgreSQL 18 no publication has a generated column)"
)


def table_name(table: Mapping[str, Any]) -> str:
    """Return the name, "schema.name", of a table that ``cdcpipe prepare`` describes."""
    return f"{table['schema']}.{table['name']}"


def has_key(table: Mapping[str, Any]) -> bool:
    """Tell whether the stream says what identifies the rows of a table that ``cdcpipe prepare`` or ``checksum`` describes."""
    # With REPLICA IDENTITY USING INDEX the index's columns do.
    return (bool(table["primary_key"]) or table["replica_identity"] == "i") and not table.get("unpublished_key")


def warnings_of(tables: Iterable[Mapping[str, Any]], *, keyed: Collection[str] = ()) -> list[str]:
    """Return what to say of tables that will have no replica, and of those on which the server refuses commands.

    ``tables`` are as in `Prepared`. Those in ``keyed``, "schema.name", have a key that the user gave.
    """
    groups: dict[tuple[bool, bool, bool, bool, tuple[str, ...]], list[str]] = {}
    for table in tables:
        name, refused = table_name(table), tuple(table["refused"])
        is_keyed = has_key(table) or name in keyed
        if refused or not is_keyed:
            is_partial, is_generated = bool(table.get("unpublished_key")), bool(table.get("unpublished_generated"))
            kind = is_keyed, bool(table["has_deferrable_key"]), is_partial, is_generated, refused
            groups.setdefault(kind, []).append(name)
    return [
        _refused_text(names, refused, is_generated=is_generated)
        if is_keyed
        else keyless_text(names, refused, is_deferrable=is_deferrable, is_partial=is_partial, is_generated=is_generated)
        for (is_keyed, is_deferrable, is_partial, is_generated, refused), names in sorted(groups.items())
    ]


def keyless_text(
    names: Iterable[str],
    refused: Collection[str] = (),
    *,
    is_deferrable: bool = False,
    is_partial: bool = False,
    is_generated: bool = False,
) -> str:
    """Return what to say of tables without a key, with a deferrable one, or with one that is published only in part.

    The server refuses the commands ``refused`` on them. ``is_generated``: their replica identity has, or with FULL would have,
    generated columns that are not published.
    """
    which, how = "without a primary key", "give each a primary key"
    if is_partial:
        which, how = "with a key of which a column is not published", _PUBLISHED
    elif is_deferrable:
        which = "with a deferrable primary key, which two rows may share amid a transaction,"
        how = "give each a key that is not deferrable"
    if refused and is_generated and not is_partial:
        how += " without generated columns, and ALTER TABLE … REPLICA IDENTITY DEFAULT"
    also = f", and the server refuses {_listed(refused)} on them" if refused else ""
    return (
        f"tables {which} get a changelog and no replica{also}: {', '.join(sorted(names))}; "
        f"for a replica {how}; run --heal then copies it, or cdcpipe-spark snapshot --table"
    )


def _refused_text(names: Iterable[str], refused: Collection[str], *, is_generated: bool) -> str:
    otherwise = "USING INDEX (generated columns that are not published keep it from being FULL)" if is_generated else "FULL"
    return (
        f"the server refuses {_listed(refused)} on tables without a usable replica identity: {', '.join(sorted(names))}; "
        f"ALTER TABLE … REPLICA IDENTITY DEFAULT where there is a primary key, otherwise {otherwise}"
    )


def _listed(commands: Collection[str]) -> str:
    return " and ".join(commands)
