"""The metrics of ``cdcpipe-spark``: names and meanings. docs/operations/metrics.md shows them; a test compares the two."""

from __future__ import annotations

from typing import Final

from cdcpipe.measures import PIPELINE, POSITION, SPILL, STREAM_BYTES, STREAM_RECORDS, STREAM_TRANSACTIONS, Metric

__all__ = ["LAND", "RUN"]

LAG_BYTES: Final = Metric("cdcpipe_lag_bytes", "gauge", "WAL of the server that each stage lacks.", ("stage",))
LAG_SECONDS: Final = Metric(
    "cdcpipe_lag_seconds", "gauge", "Time since the server wrote the oldest WAL that each stage lacks.", ("stage",)
)
SERVER_UP: Final = Metric("cdcpipe_server_up", "gauge", "1 if the server tells the position of its WAL and of the slot, else 0.")
SLOT_ACTIVE: Final = Metric("cdcpipe_slot_active", "gauge", "1 if the slot is in use, else 0.")
SLOT_STATUS: Final = Metric(
    "cdcpipe_slot_wal_status",
    "gauge",
    "1 for the slot's wal_status: reserved, extended, unreserved or lost; else 0.",
    ("status",),
)
SLOT_RETAINED: Final = Metric("cdcpipe_slot_retained_wal_bytes", "gauge", "WAL that the server keeps for the slot.")
SLOT_SAFE: Final = Metric(
    "cdcpipe_slot_safe_wal_bytes",
    "gauge",
    "WAL that the server can write before the slot may be lost; not there without a limit.",
)
SEGMENTS: Final = Metric("cdcpipe_segments", "counter", "Segments that were sealed since the start.")
SEALS: Final = Metric("cdcpipe_seal_duration_seconds", "histogram", "How long it took to make a segment durable.")
OPEN_SEGMENT: Final = Metric("cdcpipe_open_segment_bytes", "gauge", "Bytes received that are not sealed yet.")
STAGING: Final = Metric("cdcpipe_staging_bytes", "gauge", "Size of the segments in the staging directory.")
STAGING_SEGMENTS: Final = Metric("cdcpipe_staging_segments", "gauge", "Number of the segments in the staging directory.")
RESTARTS: Final = Metric("cdcpipe_restarts", "counter", "How often the streamer was started again since the start.")
GAPS: Final = Metric("cdcpipe_gaps", "counter", "Gaps in the stream that were found and passed since the start.")
GAP_OPEN: Final = Metric(
    "cdcpipe_gap_open", "gauge", "1 if the tables lack changes because of a gap, and were not copied since, else 0."
)
LAST_ERROR: Final = Metric(
    "cdcpipe_last_error_timestamp_seconds",
    "gauge",
    "When the last error came: part streamer, or command for the last run or land; code is its exit code, kind lost_slot or other.",
    ("part", "code", "kind"),
)
CHANGES: Final = Metric("cdcpipe_table_changes", "counter", "Changes that each changelog got since the start.", ("table",))
MESSAGES: Final = Metric("cdcpipe_messages", "counter", "Logical messages that their changelog got since the start.")
BATCHES: Final = Metric("cdcpipe_batch_duration_seconds", "histogram", "How long a micro-batch took.")
MERGES: Final = Metric("cdcpipe_merge_duration_seconds", "histogram", "How long it took to merge changes into a replica.")
TABLE_LAG_BYTES: Final = Metric("cdcpipe_table_lag_bytes", "gauge", "WAL of the server that each replica lacks.", ("table",))
TABLE_LAG_SECONDS: Final = Metric(
    "cdcpipe_table_lag_seconds", "gauge", "Time since the server wrote the oldest WAL that each replica lacks.", ("table",)
)
WAITING: Final = Metric("cdcpipe_tables_waiting", "gauge", "Tables that wait for a copy of their rows.")
SNAPSHOT_TABLES: Final = Metric(
    "cdcpipe_snapshot_tables", "gauge", "Tables of the initial snapshot: state all, and state done.", ("state",)
)
SNAPSHOT_ROWS: Final = Metric(
    "cdcpipe_snapshot_rows", "gauge", "Rows that the initial snapshot has read in this run, also for a copy that was lost."
)

LAND: Final = (
    PIPELINE,
    POSITION,
    LAG_BYTES,
    LAG_SECONDS,
    SERVER_UP,
    SLOT_ACTIVE,
    SLOT_STATUS,
    SLOT_RETAINED,
    SLOT_SAFE,
    STREAM_RECORDS,
    STREAM_TRANSACTIONS,
    STREAM_BYTES,
    SEGMENTS,
    SEALS,
    OPEN_SEGMENT,
    STAGING,
    STAGING_SEGMENTS,
    SPILL,
    RESTARTS,
    GAPS,
    LAST_ERROR,
)
"""What ``land`` shows."""

RUN: Final = (
    *LAND,
    CHANGES,
    MESSAGES,
    BATCHES,
    MERGES,
    TABLE_LAG_BYTES,
    TABLE_LAG_SECONDS,
    WAITING,
    GAP_OPEN,
    SNAPSHOT_TABLES,
    SNAPSHOT_ROWS,
)
"""What ``run`` shows."""
