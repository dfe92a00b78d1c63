"""Reads metrics as Prometheus does: over HTTP, with the parser of OpenMetrics."""

import urllib.request
from collections.abc import Sequence

from prometheus_client import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cdcpipe.measures import Metric

__all__ = ["names_of", "scrape", "value"]


def scrape(port: int, host: str = "127.0.0.1") -> dict[str, Family]:
    """Return the families by name. Raises ConnectionError if nobody listens, ValueError for what is not OpenMetrics."""
    request = urllib.request.Request(
        f"http://{host}:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
    except urllib.error.URLError as ex:
        raise ConnectionError(str(ex)) from ex
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Family], name: str, **labels: str) -> float | None:
    """Return the value of the sample with this name and these labels; None if there is none."""
    for family in families.values():
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return None


def names_of(metrics: Sequence[Metric]) -> dict[str, Metric]:
    """Return the metrics by the names that their samples have."""
    found = {}
    for metric in metrics:
        for end in ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",):
            found[metric.full_name + end] = metric
    return found
