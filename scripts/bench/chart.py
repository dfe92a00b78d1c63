"""Draws where the benchmarks spend their time: an SVG file with the stages of a run as bars, in seconds for a million changes."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write"]

WIDTH, LEFT, RIGHT, BAR, ROW, TOP = 900, 330, 150, 11, 40, 56
WALL, CPU, SERVER = "#4c78a8", "#f58518", "#bab0ac"


def _medians(path: Path) -> dict[str, dict[str, float]]:
    """Return, for each stage, the medians of its figures in seconds for a million changes. The order is that of the runs."""
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in map(json.loads, path.read_text().splitlines()):
        if line["benchmark"] == "stages":
            for name in ("wall_s", "cpu_s", "server_cpu_s"):
                if name in line:
                    figures[f"{line['variant']} ({line['transport']})"][name].append(line[name] / line["rows_wanted"] * 1e6)
    return {stage: {name: statistics.median(values) for name, values in of.items()} for stage, of in figures.items()}


def write(runs: Path, picture: Path) -> None:
    """Draw the stages in the lines of ``runs``."""
    stages = _medians(runs)
    longest = max((value for figures in stages.values() for value in figures.values()), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / longest
    height = TOP + ROW * len(stages) + 10
    parts: list[Any] = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="10" y="22" font-size="16">Seconds per million changes, each stage alone</text>',
    ]
    for x, color, label in ((10, WALL, "wall time"), (110, CPU, "its CPU"), (200, SERVER, "the server's CPU")):
        parts.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{color}"/><text x="{x + 17}" y="43">{label}</text>')
    for number, (stage, figures) in enumerate(stages.items()):
        y = TOP + number * ROW
        parts.append(f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">{escape(stage)}</text>')
        bars = [("wall_s", WALL), ("cpu_s", CPU), ("server_cpu_s", SERVER)]
        for place, (name, color) in enumerate((name, color) for name, color in bars if name in figures):
            width = figures[name] * scale
            parts.append(f'<rect x="{LEFT}" y="{y + place * BAR}" width="{width:.1f}" height="{BAR - 1}" fill="{color}"/>')
            if name == "wall_s":
                text = f"{figures[name]:.2f} s, {1e6 / figures[name]:,.0f}/s"
                parts.append(f'<text x="{LEFT + width + 6:.1f}" y="{y + 10}" font-size="11">{text}</text>')
            else:
                at = f'x="{LEFT + width + 6:.1f}" y="{y + place * BAR + 10}"'
                parts.append(f'<text {at} font-size="9" fill="#555">{figures[name]:.2f} s</text>')
    picture.write_text("\n".join([*parts, "</svg>"]) + "\n")
