"""How far a pipeline is. No Spark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_sink.staging.log import Position

__all__ = ["PipelineProgress"]


@dataclass(frozen=True, slots=True)
class PipelineProgress:
    """How far a pipeline is. All counts are since its start."""

    position: Position | None = None
    batches: int = 0
    changes: int = 0
    tables: int = 0
    messages: int = 0
