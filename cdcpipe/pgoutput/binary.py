"""Turns the binary values of a row into text, so that the row is as pgoutput sends it without the option ``binary``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdcpipe.errors import InvalidArgumentsError, ProtocolError
from cdcpipe.pgoutput.messages import Binary
from cdcpipe.types.binary.decoder import BUILT_IN, UnknownTypeError, ValueDecoder, name_column

if TYPE_CHECKING:
    from cdcpipe.pgoutput.messages import Relation, Row, Value

__all__ = ["row_to_text"]


def row_to_text(relation: Relation, row: Row, decoder: ValueDecoder = BUILT_IN) -> Row:
    """Return the row with text in place of binary values. Errors name table and column.

    Without a ``decoder`` only values of built-in types become text.
    """
    if Binary not in map(type, row):
        return row
    values: list[Value] = []
    for column, value in zip(relation.columns, row, strict=True):
        if isinstance(value, Binary):
            try:
                # Pass plain bytes. A function that returns its argument would otherwise return a Binary.
                value = decoder.to_text(column.type_id, bytes(value))
            except (ProtocolError, UnknownTypeError, InvalidArgumentsError) as ex:
                name_column(ex, f"{relation.namespace}.{relation.name}", column.name)
                raise
        values.append(value)
    return tuple(values)
