"""How far a pipeline is. No Spark."""

from __future__ import annotations

from dataclasses import dataclass, replace
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

    def after_batch(self, position: Position, changes: int, messages: int, tables: int) -> PipelineProgress:
        """Return the progress after one more micro-batch, which ends at ``position``. ``tables`` counts those of all of them."""
        return replace(
            self,
            position=position,
            batches=self.batches + 1,
            changes=self.changes + changes,
            tables=tables,
            messages=self.messages + messages,
        )

    def has(self, end: Position | None) -> bool:
        """Tell whether the changelogs have all changes up to ``end``, the end of a log (`log_end`)."""
        return end is None or (self.position is not None and self.position.lsn >= end.lsn)
