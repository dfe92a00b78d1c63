"""Reads the lines of run.py, and prints medians and ratios. Fails if the variants did not do the same work.

A ratio is the median, over the runs, of cdcpipe's figure divided by the reference's figure of the same turn. Both figures of a
turn have the same noise.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]


def mismatches(groups: dict[tuple[str, str], dict[str, Lines]]) -> list[str]:
    """Return where rows or bytes are not the expected ones, or differ between variants."""
    found = []
    for key, variants in groups.items():
        lines = [line for of_variant in variants.values() for line in of_variant]
        found += [
            f"{' '.join(key)}: {line['variant']} run {line['run']} has {line['rows']} rows of {line['rows_wanted']}"
            for line in lines
            if line.get("rows", line["rows_wanted"]) != line["rows_wanted"]
        ]
        of_format: dict[str, dict[str, int]] = defaultdict(dict)
        for line in lines:
            if "bytes_with_newlines" in line:
                of_format[line.get("format", "")][line["variant"]] = line["bytes_with_newlines"]
        found += [
            f"{' '.join(key)}: the bytes of the records differ: {sizes}"
            for sizes in of_format.values()
            if len(set(sizes.values())) > 1
        ]
        for name, of_variant in variants.items():
            drained = {line["drained_bytes"] for line in of_variant if line.get("drained_bytes") is not None}
            if len(drained) > 1:
                found.append(f"{' '.join(key)}: {name} wrote now {drained} bytes")
    return found


def ratio(ours: Lines, reference: Lines, name: str) -> float:
    return float(statistics.median(a[name] / b[name] for a, b in zip(ours, reference, strict=True)))


def main() -> int:
    groups: dict[tuple[str, str], dict[str, Lines]] = defaultdict(lambda: defaultdict(list))
    for text in Path(sys.argv[1]).read_text().splitlines():
        line = json.loads(text)
        groups[line["benchmark"], line["transport"]][line["variant"]].append(line)
    for (benchmark, transport), variants in groups.items():
        reference = next((lines for lines in variants.values() if lines[0]["reference"]), None)
        first = next(iter(variants.values()))[0]
        print(f"\n{benchmark}, {transport}, {first['rows_wanted']:,} rows, {len(next(iter(variants.values())))} runs")
        columns = [
            name for name in ("wall_s", "changelog_s", "cpu_s", "server_cpu_s", "peak_rss_kib", "p50_ms", "p99_ms") if name in first
        ]
        for name, lines in variants.items():
            cells = []
            for column in columns:
                median = statistics.median(line[column] for line in lines)
                cell = f"{column} {median:,.0f}" if column.endswith("kib") else f"{column} {median:.2f}"
                if reference is not None and lines is not reference:
                    cell += f" (x {ratio(lines, reference, column):.2f})"
                cells.append(f"{cell:28}")
            if "wall_s" in first:
                cells.append(f"{first['rows_wanted'] / statistics.median(line['wall_s'] for line in lines):,.0f} rows/s")
            print(f"  {name:42} {' '.join(cells)}")
    wrong = mismatches(groups)
    for message in wrong:
        print(f"WRONG {message}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
