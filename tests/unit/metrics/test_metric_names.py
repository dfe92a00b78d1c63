"""The metrics have good names, the page has all of them, and the examples use no others."""

import json
import re
from typing import Any

import pytest
import yaml

from cdcpipe.measures import Metric
from cdcpipe.streaming.metrics import METRICS as STREAM
from spark_sink.metrics.table import LAND, RUN
from support.metrics import names_of
from support.paths import ROOT

ALL = list(dict.fromkeys([*RUN, *STREAM]))
NAMES = names_of(ALL)
PAGE = (ROOT / "docs/operations/metrics.md").read_text()
ALERTS = yaml.safe_load((ROOT / "examples/prometheus/alerts.yml").read_text())
DASHBOARD = json.loads((ROOT / "examples/grafana/cdcpipe.json").read_text())


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_a_metric_is_named_by_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"cdcpipe(_[a-z0-9]+)+", metric.name)
    assert not metric.name.endswith(("_total", "_info", "_count", "_sum", "_bucket", "_created", "_milliseconds", "_kb", "_mb"))
    assert re.fullmatch(r"[A-Z0-9].*\.", metric.help)
    assert not {"instance", "job", "le", "quantile"} & {*metric.labels}
    if metric.kind == "histogram":
        assert metric.name.endswith("_seconds")


def test_the_page_has_all_metrics() -> None:
    of = {"cdcpipe": STREAM, "land": LAND, "run": RUN}
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in PAGE.splitlines() if row.startswith("| `cdcpipe_")]
    assert rows == [
        [
            f"`{metric.full_name}`",
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels),
            ", ".join(name for name, metrics in of.items() if metric in metrics),
            metric.help.removesuffix("."),
        ]
        for metric in ALL
    ]


def check_expression(expression: str) -> None:
    """Check that the metrics in an expression of PromQL exist and have the labels by which it selects."""
    used = re.findall(r"\b(cdcpipe_\w+)(?:\{([^}]*)\})?", expression)
    assert used or "process_start_time_seconds{" in expression, expression
    for name, selected in used:
        assert name in NAMES, f"{expression}: there is no metric {name}"
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selected))
        assert labels <= {*NAMES[name].labels, "instance", "job"}, expression
        if NAMES[name].kind in ("counter", "histogram"):  # they begin at 0 again with each start
            assert re.search(rf"(rate|increase)\({name}", expression), expression
    assert expression.count("(") == expression.count(")")


RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_uses_metrics_that_exist(rule: dict[str, Any]) -> None:
    assert {*rule} <= {"alert", "expr", "for", "labels", "annotations"}
    check_expression(rule["expr"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    labels = {"instance", *(label for name in re.findall(r"cdcpipe_\w+", rule["expr"]) for label in NAMES[name].labels)}
    assert {*re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])} <= labels


def test_alerts_see_one_pipeline_of_two_that_ends_and_a_gap_at_the_start() -> None:
    expressions = {rule["alert"]: rule["expr"] for rule in RULES}
    scraped = yaml.safe_load((ROOT / "examples/compose/prometheus.yml").read_text())["scrape_configs"]
    assert f'up{{job="{scraped[0]["job_name"]}"}} == 0' in expressions["CdcpipeAbsent"]
    assert expressions["CdcpipeGap"].splitlines() == [  # `run` may copy all tables between two scrapes
        "max_over_time(cdcpipe_gap_open[15m]) == 1",
        "or increase(cdcpipe_gaps_total[1h]) > 0",
        "or (cdcpipe_gaps_total > 0 and time() - process_start_time_seconds < 3600)",
    ]


def test_alerts_hold_across_restarts_of_what_they_watch() -> None:
    """A pipeline that fails after each start answers for some seconds each time, so that ``for`` never ends."""
    for name in ("CdcpipeStartsAgainAndAgain", "CdcpipeEndedWithError", "CdcpipeSlotLost"):
        [rule] = [rule for rule in RULES if rule["alert"] == name]
        assert "for" not in rule
        assert re.search(r"(changes|max_over_time)\([^)]*\[\d+m\]\)", rule["expr"])


def test_a_transaction_that_is_open_for_long_is_no_lag() -> None:
    """Nothing is sealed meanwhile, so the lag in seconds grows."""
    of_log, of_tables = (rule["expr"] for rule in RULES if rule["alert"] in ("CdcpipeLogBehind", "CdcpipeTablesBehind"))
    assert 'unless ignoring (stage) (cdcpipe_lag_bytes{stage="sent"} <= 16777216 and' in of_log
    assert 'group_left () cdcpipe_lag_bytes{stage="sealed"}' in of_tables


def test_a_slow_reader_is_not_a_blocked_one() -> None:
    [rule] = [rule for rule in RULES if rule["alert"] == "CdcpipeReaderBlocked"]
    assert "and rate(cdcpipe_stream_bytes_total[5m]) == 0" in rule["expr"]


PANELS: list[dict[str, Any]] = DASHBOARD["panels"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_uses_metrics_that_exist(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        check_expression(target["expr"].replace('"$instance"', '".*"').replace("$__rate_interval", "1m"))
        labels = {"instance", *(label for name in re.findall(r"cdcpipe_\w+", target["expr"]) for label in NAMES[name].labels)}
        assert {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])} <= labels


def test_the_dashboard_is_whole() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    shown = "".join(target["expr"] for panel in PANELS for target in panel["targets"])
    missing = {metric.name for metric in RUN if metric.name not in shown}
    assert missing == {"cdcpipe_pipeline", "cdcpipe_table_lag_bytes"}
    places = [[panel["gridPos"][key] for key in "xywh"] for panel in PANELS]
    taken = [(column, line) for x, y, w, h in places for column in range(x, x + w) for line in range(y, y + h)]
    assert len(taken) == len({*taken})
    assert {column for column, _ in taken} <= {*range(24)}
    query = DASHBOARD["templating"]["list"][1]["query"]["query"]
    assert re.fullmatch(r"label_values\((\w+), instance\)", query)[1] in NAMES
