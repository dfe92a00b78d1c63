"""The captured DDL: every message of ``cdcpipe ddl install``'s event triggers once, with its position.

It is a changelog in the same format as the others: ``changelog/_cdc_ddl`` (changelog/tables.py). The descriptions in it are kept in
memory, but for those of tables that are gone. They say which columns and keys a table has at a place in the stream (schema/ddl.py).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, StringType, StructField, StructType

from cdcpipe.lsn import format_lsn
from spark_sink.changelog.tables import changelogs_of
from spark_sink.schema.ddl import Descriptions
from spark_sink.schema.ddl_message import Families, parse
from spark_sink.schema.table import DDL
from spark_sink.schema.types import MESSAGE_SCHEMA, METADATA_PREFIX
from spark_sink.source.ddl import name_unused
from spark_sink.staging.log import Position, epoch_of
from spark_sink.warehouse import gaps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

    from spark_sink.schema.ddl_message import DdlMessage
    from spark_sink.schema.servers import Servers
    from spark_sink.source.ddl import Ddl
    from spark_sink.staging.log import Segment
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["DDL_SCHEMA", "DdlLog"]

_logger = logging.getLogger(__name__)

DDL_SCHEMA: Final = StructType(
    [
        StructField("kind", StringType()),
        StructField("tag", StringType()),
        StructField("statement", StringType()),
        StructField("tables", ArrayType(StringType())),
        StructField("content", StringType()),
        *(field for field in MESSAGE_SCHEMA if field.name.startswith(METADATA_PREFIX)),
    ]
)
"""``tables``: those described, dropped or rewritten, as "schema.name". ``content`` is the whole message, as JSON."""


class DdlLog:
    """Reads and writes the captured DDL of one warehouse."""

    def __init__(self, spark: SparkSession, warehouse: Warehouse) -> None:
        self._warehouse = warehouse
        self._changelogs = changelogs_of(spark, warehouse)
        self._lsn = 0
        self._descriptions: Descriptions | None = None
        self._is_told = False
        self._epochs: set[int] = set()
        """The epochs whose publications are noted."""

    @property
    def exists(self) -> bool:
        """Whether the warehouse has captured DDL."""
        return self._changelogs.state(DDL) is not None

    @property
    def descriptions(self) -> Descriptions:
        """What the messages up to now say about tables."""
        if self._descriptions is None:
            found, state = Descriptions(), self._changelogs.state(DDL)
            found.end_at(*self._gaps())
            if state is not None:
                self._lsn, position = state.lsn, self._warehouse.source().position
                done_lsn = 0 if position is None else position.lsn  # all tables have the changes up to there
                rows = self._changelogs.read(DDL).select("_cdc_end_lsn", "_cdc_ordinal", "_cdc_lsn", "content")
                families = Families()
                # Not all at a time: the messages of years may be gigabytes.
                for row in rows.orderBy("_cdc_end_lsn", "_cdc_ordinal", "_cdc_lsn").toLocalIterator():
                    try:
                        said = parse(row["content"].encode(), is_checked=True, read=families.read)
                    except ValueError as ex:  # recorded by an older version, which took it
                        name_unused(row["_cdc_lsn"], ex)
                        continue
                    families.forget(said.dropped.values())
                    found.add((row["_cdc_end_lsn"], row["_cdc_ordinal"]), said)
                    found.forget_dropped(done_lsn)
            self._descriptions = found
        return self._descriptions

    def messages(self, tag: str, after_lsn: int, until_lsn: int) -> Iterator[DdlMessage]:
        """Yield the messages of one command, of the transactions that end in (after_lsn, until_lsn]."""
        if not self.exists:
            return
        is_asked = (F.col("tag") == tag) & F.col("_cdc_end_lsn").between(after_lsn + 1, until_lsn)
        for row in self._changelogs.read(DDL).where(is_asked).select("content").toLocalIterator():
            with suppress(ValueError):  # as in `descriptions`, which names it
                yield parse(row["content"].encode(), is_checked=True)

    def read_gaps(self) -> None:
        """Read the gaps of the log again. Call this when there may be another one, before `record_new` gets what follows it."""
        if self._descriptions is not None:
            self._descriptions.end_at(*self._gaps())

    def _gaps(self) -> tuple[list[int], Servers]:
        found = gaps.read(self._warehouse)
        return [each.start.lsn for each in found], gaps.servers(found)

    def record_new(self, found: Sequence[Ddl], segments: Sequence[Segment]) -> None:
        """Record the messages of the segments that are new."""
        descriptions = self.descriptions
        descriptions.forget_dropped(segments[0].start_lsn)
        self._read_epochs(segments)
        new = [each for each in found if each.end_lsn > self._lsn]
        if not new:
            return
        rows = pa.Table.from_pylist(list(map(_row, new)), to_arrow_schema(DDL_SCHEMA, timezone="UTC"))
        start, end = Position(segments[0].epoch, max(segments[0].start_lsn, self._lsn)), segments[-1].end
        self._changelogs.append(DDL, rows, DDL_SCHEMA, start, end)
        self._lsn = end.lsn
        for each in new:
            for table in dict.fromkeys(descriptions.add(each.place, each.message)):
                _logger.warning(
                    "captured DDL at %s describes %s without a column that it has, or with one that was dropped, and is not used:"
                    " its transaction began before another command ended, or event triggers were off for a while. If they were off,"
                    " run cdcpipe ddl install: until then no captured DDL of this table is used",
                    format_lsn(each.lsn),
                    table,
                )
        if descriptions.is_off and not self._is_told:
            self._is_told = True
            _logger.warning(
                "captured DDL has come after the capture was removed, and is not used. If the capture was installed again, the log"
                " does not have the message that says so: run cdcpipe ddl install, which writes it"
            )

    def _read_epochs(self, segments: Sequence[Segment]) -> None:
        """Note the publications of the segments' epochs: the launcher may have others by now."""
        roots = {segment.epoch: segment.path.parent.parent for segment in segments if segment.epoch not in self._epochs}
        for number, root in roots.items():
            if (epoch := epoch_of(root, number)) is not None:
                self.descriptions.stream(epoch.start_lsn, epoch.publications)
                self._epochs.add(number)


def _row(ddl: Ddl) -> dict[str, object]:
    message = ddl.message
    tables = [*(description.table for description in message.tables), *message.dropped]
    if message.rewritten is not None:
        tables.append(message.rewritten[1])
    return {
        "kind": message.kind,
        "tag": message.tag or None,
        "statement": message.statement,
        "tables": list(dict.fromkeys(map(str, tables))),
        "content": ddl.content,
        "_cdc_epoch": ddl.epoch,
        "_cdc_end_lsn": ddl.end_lsn,
        "_cdc_ordinal": ddl.ordinal,
        "_cdc_lsn": ddl.lsn,
        "_cdc_xid": ddl.xid,
        "_cdc_commit_time": datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=ddl.commit_time_us),
    }
