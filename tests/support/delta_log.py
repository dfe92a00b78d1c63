"""Writes the log of a Delta table by hand."""

import json
from pathlib import Path
from typing import Any


def commit(log: Path, version: int, *actions: dict[str, Any]) -> None:
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020d}.json").write_text("\n".join(map(json.dumps, actions)))


def added(path: str, rows: int | None, size: int = 10, vector: dict[str, Any] | None = None) -> dict[str, Any]:
    statistics = {} if rows is None else {"stats": json.dumps({"numRecords": rows})}
    return {"add": {"path": path, "size": size, "deletionVector": vector} | statistics}
