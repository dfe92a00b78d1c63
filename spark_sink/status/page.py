"""``cdcpipe-spark status --html``: one page with everything that `status` knows, and the last day as charts. No I/O.

The page is one file without scripts, and loads nothing from elsewhere. It may be sent by mail or served by any web server.
"""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdcpipe.units import counted, format_duration, format_size
from spark_sink.staging.lock import owner_text
from spark_sink.status.check import Limits, State, judge
from spark_sink.status.text import name_of, number, written_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from spark_sink.staging.samples import Sample

__all__ = ["render"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 160, 8, 22
_DAY_S: Final = 86_400.0
_AHEAD_S: Final = 60.0
"""How far the clock of the machine that writes the samples may be ahead."""
_BREAK: Final = 3.0
"""A line has a gap where two samples are further apart than this many times the usual."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --dim: #667788; --line: #d9e0e7; --back: #ffffff; --chart: #2563a8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --dim: #93a1b0; --line: #33404d; --back: #161c22; --chart: #7ab2ef; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); }
body { max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.state { padding: .6rem 1rem; border-radius: .4rem; color: #fff; } .state p { margin: 0; }
.OK { background: #1f7a43; } .WARNING { background: #a86500; } .CRITICAL { background: #b3261e; } .UNKNOWN { background: #5b6770; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; } th { color: var(--dim); font-weight: 500; }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid var(--line); }
th, td { white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, .places td { text-align: left; }
.places td:last-child { white-space: normal; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1.5rem; }
figure { margin: 0; } figcaption { color: var(--dim); }
svg { width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 12px; }
.grid { stroke: var(--line); } .data { fill: none; stroke: var(--chart); stroke-width: 1.5; stroke-linejoin: round; }
.bar { background: var(--line); width: 8rem; height: .5rem; display: inline-block; border-radius: .25rem; }
.bar i { background: var(--chart); height: 100%; display: block; border-radius: .25rem; }
footer { color: var(--dim); margin-top: 2rem; }
"""


class _Chart(NamedTuple):
    """One chart: a value of each sample, None where it is unknown."""

    title: str
    value: Callable[[Sample], float | None]
    show: Callable[[float], str]


def _per_second(count: int | None, seconds: float) -> float | None:
    return None if count is None else count / max(seconds, 1e-3)


def _rate(value: float) -> str:
    return f"{value:,.1f}"


_CHARTS: Final = (
    _Chart("lag behind the server", lambda sample: sample.lag_s, format_duration),
    _Chart("lag in bytes of WAL", lambda sample: sample.lag_bytes, format_size),
    _Chart("changes per second in the tables", lambda sample: _per_second(sample.changes, sample.seconds), _rate),
    _Chart("records per second in the log", lambda sample: _per_second(sample.records, sample.seconds), _rate),
)


def render(found: Mapping[str, Any], samples: Sequence[Sample], *, refresh_s: float | None = None) -> str:
    """Return the page for a result of `describe`. With ``refresh_s`` a browser loads it again after this time."""
    source = found["source"]
    title = "cdcpipe" if source is None else f"{source['slot']} of {source['database']}"
    refresh = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{max(1, round(refresh_s))}">'
    body = [
        f"<h1>{escape(title)}</h1>",
        _state(found),
        _section("Stages", _ladder(found["ladder"])),
        _section("The last day", _charts(samples, datetime.fromisoformat(found["time"]).timestamp())),
        _section("Tables", _tables(found["tables"])),
        _section("Where", _places(found)),
        f"<footer>cdcpipe-spark status at {escape(found['time'])}</footer>",
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{refresh}<style>{_STYLE}</style></head>\n'
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>\n{content}</section>" if content else ""


def _state(found: Mapping[str, Any]) -> str:
    """Return what `status --check` finds without limits, the worst first."""
    alert = judge(found, Limits())
    findings = [words for state, words in alert.worst_first if state is not State.OK] or [words for _, words in alert.found]
    return f'<div class="state {alert.state.name}">{"".join(f"<p>{escape(words)}</p>" for words in findings)}</div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. The cells are HTML."""
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>\n{cells}</tbody></table></div>'


def _ladder(rungs: Sequence[Mapping[str, Any]]) -> str:
    if not rungs:
        return ""
    most = max((rung["behind_bytes"] or 0 for rung in rungs), default=0)
    rows = []
    for rung in rungs:
        if rung["position"] is None:
            rows.append((escape(rung["rung"]), "-", "", "", "", ""))
            continue
        seconds = "" if rung["behind_seconds"] is None else format_duration(rung["behind_seconds"])
        part = 100 * (rung["behind_bytes"] or 0) / most if most else 0
        bar = f'<span class="bar"><i style="width: {part:.0f}%"></i></span>'
        behind = "" if rung["behind_bytes"] is None else format_size(rung["behind_bytes"])
        at_most = "≤ " if rung["at_most"] else ""
        rows.append((escape(rung["rung"]), rung["position"], behind, bar, at_most + seconds, rung["commit_time"] or ""))
    return _table(("stage", "position", "behind", "", "time", "newest commit"), rows)


def _charts(samples: Sequence[Sample], now: float) -> str:
    # A sample from later was written while the machine's clock was wrong. It would count as the end of the last day.
    samples = [sample for sample in samples if sample.time <= now + _AHEAD_S]
    if not samples:
        return ""
    samples = [sample for sample in samples if sample.time > samples[-1].time - _DAY_S]
    drawn = "".join(_chart(chart, samples) for chart in _CHARTS if any(chart.value(sample) is not None for sample in samples))
    return f'<div class="charts">{drawn}</div>'


def _chart(chart: _Chart, samples: Sequence[Sample]) -> str:
    """Draw a value over time as SVG. The axis begins at 0."""
    begin, end = samples[0].time, samples[-1].time
    most = max(value for sample in samples if (value := chart.value(sample)) is not None)
    across, down = _WIDTH - 2 * _LEFT, _HEIGHT - _BOTTOM - 20

    def point(sample: Sample, value: float) -> str:
        x = _LEFT + across * (sample.time - begin) / max(end - begin, 1e-3)
        return f"{x:.1f},{20 + down * (1 - value / (most or 1)):.1f}"

    lines: list[list[str]] = [[]]
    before = samples[0]
    for sample in samples:
        value = chart.value(sample)
        if value is None or sample.time - before.time > _BREAK * max(before.seconds, sample.seconds, 60.0):
            lines.append([])
        if value is not None:
            lines[-1].append(point(sample, value))
        before = sample
    # A line of one point has no length: a round end makes it visible.
    drawn = (" ".join([*line, line[-1]]) for line in lines if line)
    paths = "".join(f'<polyline class="data" stroke-linecap="round" points="{points}"/>' for points in drawn)
    base = 20 + down
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart.title)}">'
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _LEFT}" y1="{base}" y2="{base}"/>'
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _LEFT}" y1="20" y2="20"/>'
        f'<text x="{_LEFT}" y="14">{escape(chart.show(most))}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{_clock(begin)}</text>'
        f'<text x="{_WIDTH - _LEFT}" y="{_HEIGHT - 6}" text-anchor="end">{_clock(end)} UTC</text>{paths}</svg>'
        f"<figcaption>{escape(chart.title)}</figcaption></figure>\n"
    )


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _tables(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    cells = []
    for row in rows:
        changelog, replica = row["changelog"] or {}, row["replica"] or {}
        size = format_size(changelog.get("size", 0) or 0), format_size(replica.get("size", 0) or 0)
        cells.append(
            (
                escape(name_of(row)),
                number(changelog.get("rows")),
                size[0],
                number(replica.get("rows")),
                size[1] if replica else "-",
                replica.get("position", "-"),
                written_of(row),
            )
        )
    return _table(("table", "changes", "size", "rows", "size", "replica", "written"), cells)


def _places(found: Mapping[str, Any]) -> str:
    source, launcher, error, server = found["source"], found["launcher"], found["last_error"], found["server"]
    rows = [("staging", f"{found['staging']}, {counted(found['segments'], 'segment')}, {format_size(found['size'])}")]
    if found["warehouse"] is not None:
        rows.append(("warehouse", found["warehouse"]))
    if source is not None:
        rows.append(("server", f"system {source['system_id']}, timeline {source['timeline']}"))
        rows.append(("publications", ", ".join(source["publications"])))
    if server is not None:
        rows.append(("slot", f"WAL {server['wal_status']}, kept from {server['restart_lsn']}"))
    if launcher is not None:
        rows.append(("launcher", owner_text(launcher)))
    if error is not None:
        rows.append(("last error", f"{error['time']}, {error['command']}, exit code {error['exit_code']}: {error['message']}"))
    rows += [("waiting", f"{each['table']}: {'; '.join(why['reason'] for why in each['reasons'])}") for each in found["waiting"]]
    rows += [("gap", f"from {gap['after']} to {gap['start']}: {gap['cause']}") for gap in found["gaps"]]
    return f'<div class="places">{_table(("", ""), [(escape(name), escape(text)) for name, text in rows])}</div>'
