"""Finds the columns that identify a table's rows, from the table's description."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_sink.schema.catalog_answers import is_key_told
from spark_sink.schema.table import Version, gone_columns
from spark_sink.schema.types import base_names, fields_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pyspark.sql.types import StructType

    from cdcpipe.pgoutput.messages import Relation
    from spark_sink.schema.table import Fill, Place

__all__ = ["identifying_columns", "keyed_until_dropped", "marked", "version_of"]


def identifying_columns(
    relation: Relation, primary_key: Callable[[], Iterable[str]], identity: Callable[[], Iterable[str]]
) -> tuple[str, ...]:
    """Return the names of the columns that identify a row, in PostgreSQL's spelling; empty if no columns do.

    Calls ``primary_key`` if the description does not name the key: with REPLICA IDENTITY FULL or NOTHING. Otherwise calls
    ``identity`` for all columns of the replica identity. The server does not describe those that are not published (generated
    columns, or others than those of a column list), and two rows may differ in these alone.
    """
    if is_key_told(relation):
        told = marked(relation)
        others = set(identity()) - set(told)
        # An identity of which a column is described without the mark is that of another time.
        return () if others and others.isdisjoint(column.name for column in relation.columns) else told
    key = tuple(primary_key())
    return key if set(key) <= {column.name for column in relation.columns} else ()


def marked(relation: Relation) -> tuple[str, ...]:
    """Return the names of the columns that a description marks as columns of the key."""
    return tuple(column.name for column in relation.columns if column.is_key)


def version_of(
    end_lsn: int, ordinal: int, relation: Relation, columns: StructType, key: Iterable[str], fills: tuple[Fill, ...] = ()
) -> Version:
    """Return the table's version that begins at a position, with this ``key``. ``columns`` are those of the changelog."""
    fields = fields_by_name(columns, relation)
    spark_names = dict(zip(fields, base_names(columns, relation), strict=True))
    key = tuple(key)
    return Version(
        end_lsn,
        ordinal,
        relation.relation_id,
        tuple(spark_names[name] for name in key),
        tuple(fields[name].name for name in key),
        fills,
    )


def keyed_until_dropped(versions: list[Version], relation_id: int, place: Place) -> list[Version]:
    """Return the versions with the table's last key again from ``place`` on, where it was dropped, if it had lost its key.

    DROP TABLE ends all rows, whatever their key is. But a replica takes no change that no key follows: it would keep the rows.
    """
    former = next((version for version in reversed(versions) if version.key and version.relation_id == relation_id), None)
    if former is None or versions[-1].key or versions[-1].relation_id != relation_id:
        return versions
    gone = gone_columns(versions, place[0])
    if not gone.isdisjoint(former.columns):
        return versions  # the replica does not have the key's columns any more
    return [*versions, Version(*place, relation_id, former.key, former.columns, gone=tuple(sorted(gone)))]
