"""Finds the comments of a table and its columns in captured DDL. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_sink.schema.types import find_columns
from spark_sink.warehouse.comments import Comments

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql.types import StructType

    from cdcpipe.pgoutput.messages import Relation
    from spark_sink.schema.ddl import Descriptions
    from spark_sink.schema.table import Place

__all__ = ["captured_comments"]


def captured_comments(
    relation: Relation, place: Place, columns: StructType, captured: Descriptions, typed: Callable[[Relation], Relation]
) -> Comments | None:
    """Return the newest comments of a table that the stream describes with ``relation``; None if they are not captured.

    ``place`` tells on which server the relation is: on another one its OID is that of another table. ``columns`` are those of the
    table's changelog.
    """
    if (told := captured.of_stream(relation, captured.servers.last_place(place))) is None:
        return None
    description, known = told
    fields = zip(find_columns(columns, typed(relation)), known, strict=True)
    found = {field.name: column.comment for field, column in fields if field is not None and column.comment is not None}
    return Comments(description.comment, found)
