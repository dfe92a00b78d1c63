"""Serves metrics to Prometheus and everything that scrapes OpenMetrics. The only module that uses prometheus-client.

    with serving(parse_address("9187"), collect):       # http://127.0.0.1:9187/metrics
        ...

A thread of its own answers each scrape. It calls ``collect``, which reads what the program counts anyway: between scrapes, metrics
cost nothing. Whoever can reach the address can read the names of tables, and no values of rows. A client that stays silent is left
after a while. What goes wrong in a scrape is in the log, and nowhere else on stderr.
"""

from __future__ import annotations

import io
import logging
import sys
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdcpipe.error_texts import shown, unexpected
from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.logs import Told
from cdcpipe.measures import PIPELINE, Histogram, Metric, Reading
from cdcpipe.version import own_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["Address", "parse_address", "pipeline", "serving"]

_logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"

_SILENCE_S: Final = 10.0
"""How long a client may send and take nothing, before its connection is closed."""


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return the address that ``[HOST:]PORT`` means. Without a host it is of this machine alone. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16 or (colon and not host):
        msg = f"{text!r} is not a port, or a host and a port: 9187, 0.0.0.0:9187, [::1]:9187"
        raise ValueError(msg)
    return Address(host or _LOOPBACK, int(port))


def pipeline(command: str, slot: str) -> Reading:
    """Return the reading that says what runs."""
    return PIPELINE.reading(1.0, own_version(), command, slot)


def serving(address: Address | None, collect: Callable[[], Iterable[Reading]]) -> AbstractContextManager[None]:
    """Return a context in which the metrics are served; with None as the address one that does nothing.

    Raises CdcpipeError if nothing can listen at the address. The address may come later, so this is no InvalidArgumentsError.
    """
    return nullcontext() if address is None else _serving(address, collect)


@contextmanager
def _serving(address: Address, collect: Callable[[], Iterable[Reading]]) -> Iterator[None]:
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
    except ImportError as ex:
        raise InvalidArgumentsError("--metrics needs prometheus-client", hint="pip install 'cdcpipe[metrics]'") from ex
    registry = CollectorRegistry()
    registry.register(_Collector(collect))
    ProcessCollector(registry=registry)
    server: Any
    try:
        server, thread = start_http_server(address.port, address.host, registry)
    except OSError as ex:
        hint = "another program listens there, or the host is not one of this machine; give another [HOST:]PORT"
        raise CdcpipeError(f"--metrics {address}: {ex.strerror or ex}", hint=hint) from ex
    # wsgiref has no deadline, and prints stacks with the texts of exceptions. What its handler would print is in the log already.
    ours = {"timeout": _SILENCE_S, "get_stderr": lambda _handler: io.StringIO()}
    server.RequestHandlerClass = type("_Handler", (server.RequestHandlerClass,), ours)
    server.handle_error = _tell_of_request
    _logger.info("metrics are at http://%s/metrics", address)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _tell_of_request(_request: object, _client: object) -> None:
    """Log why a request got no answer. A client that goes away or stays silent is nothing to warn of."""
    ex = sys.exception()
    if isinstance(ex, OSError):
        _logger.info("a scrape got no answer: %s", shown(ex))
    elif ex is not None:
        _logger.warning("a scrape got no answer: %s", unexpected(ex))


class _Collector:
    """What prometheus-client asks at each scrape."""

    def __init__(self, collect: Callable[[], Iterable[Reading]]) -> None:
        self._collect = collect
        self._told = Told()

    def describe(self) -> list[Any]:
        """Return nothing, so that registering asks for no values."""
        return []

    def collect(self) -> Iterable[Any]:
        """Return the families of metrics, as prometheus-client has them. Logs an error, and raises it: the answer is then 500."""
        try:
            return self._families()
        except Exception as ex:
            if self._told.is_news(words := unexpected(ex), time.monotonic()):
                _logger.error("the metrics can't be read: %s", words)
                _logger.info("the metrics", exc_info=True)
            raise

    def _families(self) -> Iterable[Any]:
        families: dict[Metric, Any] = {}
        for metric, labels, value in self._collect():
            if metric not in families:
                families[metric] = _family(metric)
            family = families[metric]
            if metric.kind == "info":
                family.add_metric([], dict(zip(metric.labels, labels, strict=True)))
            elif isinstance(value, Histogram):
                buckets, sum_s = value.buckets()
                shown = [("+Inf" if bound == float("inf") else str(bound), count) for bound, count in buckets]
                family.add_metric(labels, shown, sum_s)
            else:
                family.add_metric(labels, value)
        return families.values()


def _family(metric: Metric) -> Any:
    from prometheus_client import core

    kinds = {
        "gauge": core.GaugeMetricFamily,
        "counter": core.CounterMetricFamily,
        "histogram": core.HistogramMetricFamily,
        "info": core.InfoMetricFamily,
    }
    unit = next((unit for unit in ("seconds", "bytes") if metric.name.endswith(f"_{unit}")), "")
    labels = () if metric.kind == "info" else metric.labels
    return kinds[metric.kind](metric.name, metric.help, labels=labels, **({"unit": unit} if unit else {}))
