"""The output plugin ``debezium``: plugin.py has the events, values.py how each type's values are written in them."""

from cdcpipe.plugins.debezium.plugin import Debezium

__all__ = ["Debezium"]
