"""Sets the comments of a Delta table and of its columns, without Spark. Files stay as they are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from spark_sink.delta import file_table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["set_comments"]

_COMMENT = "comment"


def set_comments(path: Path, table: str | None, columns: Mapping[str, str]) -> bool:
    """Give the table, and its ``columns`` by name, these comments; remove all others. Does nothing if the table has them already.

    Returns whether a commit was made. Raises DeltaError if the table has a feature that this client does not support.
    """
    return file_table.redefine(path, "CHANGE COLUMN", lambda log: _commented(log.metadata, table, columns))


def _commented(metadata: Mapping[str, Any], table: str | None, columns: Mapping[str, str]) -> dict[str, Any]:
    schema = json.loads(metadata["schemaString"])
    before = [field["metadata"].get(_COMMENT) for field in schema["fields"]]
    for field in schema["fields"]:
        others = {name: value for name, value in field["metadata"].items() if name != _COMMENT}
        text = columns.get(field["name"])
        field["metadata"] = others if text is None else others | {_COMMENT: text}
    found = {name: value for name, value in metadata.items() if name != "description"}
    if table is not None:
        found["description"] = table
    if before != [field["metadata"].get(_COMMENT) for field in schema["fields"]]:
        found["schemaString"] = json.dumps(schema)
    return found
