"""The output plugin ``debezium``: plugin.py writes the events, values.py chooses the form of each type's values."""

from cdcpipe.plugins.debezium.plugin import Debezium

__all__ = ["Debezium"]
