"""Writes the archive of classes with which the tests' JVMs start: `train_java.py ARCHIVE`. scripts/test runs this once.

A JVM that starts Spark loads some 20,000 classes, and the first Delta commit loads more. With an archive (Java's class data
sharing) the JVM maps the classes, and need not read, verify and link them. That saves a third of the CPU time up to a first commit.
Many tests start a JVM of their own.

https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html, "Dynamic Archiving".
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pyspark import SparkContext

from spark_sink.spark import session


def main() -> None:
    """Do once the work that most tests do, in a JVM that writes the archive when it ends."""
    archive = Path(sys.argv[1])
    options = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ArchiveClassesAtExit={archive}"
    interpreted = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
    spark = session.build(conf={"spark.driver.extraJavaOptions": options} | interpreted)
    with tempfile.TemporaryDirectory() as directory:
        place = f"delta.`{directory}/t`"
        spark.sql(f"create table {place} (id bigint, v string) using delta tblproperties ('delta.enableDeletionVectors' = 'true')")
        spark.range(9).selectExpr("id", "cast(id as string) v").write.format("delta").mode("append").save(f"{directory}/t")
        changes = "using (select 3l id, 'x' v) s on t.id = s.id"
        spark.sql(f"merge into {place} t {changes} when matched then update set * when not matched then insert *")
        spark.sql(f"delete from {place} where id = 4")
        spark.sql(f"optimize {place}").collect()
        spark.read.format("delta").load(f"{directory}/t").groupBy("v").count().collect()
        spark.table(place).orderBy("id").toArrow()
    gateway = SparkContext._gateway  # noqa: SLF001 - the JVM writes the archive when it ends, and it ends with its stdin
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    main()
