"""The path of the changes of a database whose DDL is captured. The pipeline can't ask the catalog."""

from pathlib import Path
from typing import Any

from cdcpipe.ddl import script
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.warehouse import wanted_copies
from spark_sink.warehouse.warehouse import Warehouse
from support.road import Road


class CapturedRoad(Road):
    """A database with captured DDL."""

    def install(self) -> None:
        self.execute(
            script.install(
                "cdcpipe",
                script.Settings(),
                "select c.oid from pg_class c join pg_publication_tables t on c.relname = t.tablename"
                " and c.relnamespace = t.schemaname::regnamespace where t.pubname = 'everything'",
                [self.publication],
            )
        )

    def remove(self) -> None:
        self.execute(f"{script.announce('cdcpipe', 'removed')}; {script.disarm()}", script.remove("cdcpipe"))

    def pipeline(self, warehouse: Path | None = None, **options: Any) -> Pipeline:
        return Pipeline(self.spark, self.staging, warehouse or self.warehouse, describe=None, **options)

    @property
    def house(self) -> Warehouse:
        return Warehouse.existing(self.warehouse)

    def waiting(self) -> dict[str, str]:
        return {str(each.table): each.why for each in wanted_copies.waiting(self.house)}
