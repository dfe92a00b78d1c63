"""How often a table changes, and how far behind its changelog was, from nothing but the changelog itself; a picture of both.

    python examples/change_rate.py WAREHOUSE public.orders change_rate.png

The second argument is the table's directory in WAREHOUSE/changelog. The cells (# %%) run one by one in an editor or a notebook. It
takes matplotlib, and a warehouse in Delta's format.
"""

# %%
import sys
from datetime import timedelta
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from cdcpipe.lsn import LSN
from spark_sink import build_session

# %% The changes: how many of which kind each transaction made, and when it committed.


def transactions(changes: DataFrame) -> pd.DataFrame:
    """Return a row per transaction and kind of change, in the order of commits."""
    counted = changes.where("_cdc_op != 'snapshot'").groupBy("_cdc_end_lsn", "_cdc_commit_time", "_cdc_op").count()
    return counted.withColumn("_cdc_commit_time", F.unix_micros("_cdc_commit_time")).toPandas().sort_values("_cdc_end_lsn")


# %% When they could be seen: each commit of the changelog says up to which position it goes.


def visible(spark: SparkSession, path: Path) -> pd.DataFrame:
    """Return the position that each version of the changelog reaches, and when it was committed."""
    history = spark.sql(f"DESCRIBE HISTORY delta.`{path.absolute()}`").where("userMetadata IS NOT NULL")
    found = history.select("userMetadata", F.unix_micros("timestamp").alias("visible")).toPandas()
    found["_cdc_end_lsn"] = [int(LSN.parse(position.partition(":")[2])) for position in found["userMetadata"]]
    return found.sort_values(["_cdc_end_lsn", "visible"]).drop_duplicates("_cdc_end_lsn")[["_cdc_end_lsn", "visible"]]


# %% The picture.


def plot(
    spark: SparkSession, warehouse: Path, name: str, picture: Path, bin_width: timedelta = timedelta(seconds=1)
) -> pd.DataFrame:
    """Draw changes per second and the lag into a file; return the transactions with ``lag_s``, in seconds."""
    changelog = warehouse / "changelog" / name
    changes = transactions(spark.read.format("delta").load(str(changelog)))
    # The first version that goes as far as the transaction is the one with which it was there.
    found = pd.merge_asof(changes, visible(spark, changelog), on="_cdc_end_lsn", direction="forward")
    found["lag_s"] = (found["visible"] - found["_cdc_commit_time"]) / 1e6
    found["time"] = pd.to_datetime(found["_cdc_commit_time"], unit="us", utc=True)

    mpl.use("agg")
    figure, (rate, lag) = plt.subplots(2, sharex=True, figsize=(9, 5), layout="constrained")
    seconds = bin_width.total_seconds()
    per_bin = found.pivot_table(index=found["time"].dt.floor(bin_width), columns="_cdc_op", values="count", aggfunc="sum").fillna(0)
    per_bin = per_bin.reindex(pd.date_range(per_bin.index.min(), per_bin.index.max(), freq=bin_width), fill_value=0)
    rate.stackplot(per_bin.index, *(per_bin[kind] / seconds for kind in per_bin), labels=list(per_bin), step="post")
    rate.set(title=f"{name}: {int(found['count'].sum()):,} changes", ylabel="changes per second")
    rate.legend(loc="upper left")
    lag.plot(found["time"], found["lag_s"], ".", markersize=3)
    lag.set(ylabel="seconds from commit\nto changelog", ylim=(0, None))
    lag.axhline(found["lag_s"].median(), linewidth=1, label=f"median {found['lag_s'].median():.1f} s")
    lag.legend(loc="upper left")
    figure.autofmt_xdate()
    figure.savefig(picture, dpi=100)
    plt.close(figure)
    return found


# %%
if __name__ == "__main__":
    plot(build_session(format="delta"), Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
