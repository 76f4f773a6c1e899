"""Compare the speed-ups of ``python -m benchmarks --quick`` with those of an earlier version.

    python -m benchmarks.baseline benchmarks/results/quick.json

prints every speed-up that is more than 20 % below that of benchmarks/baseline.json, and exits with
1 if there is one. A speed-up is the ratio of the shortest runs of both sides in processor time, so
that other programs on the machine hardly change it. ``--write`` makes the report, or the medians of
several, the new baseline.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BASELINE = Path(__file__).with_name("baseline.json")
TOLERANCE = 0.2


def main() -> int:
    """Return 1 if a speed-up fell or was not measured, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.baseline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "reports",
        nargs="+",
        type=Path,
        help="JSON that python -m benchmarks --quick wrote; medians of several",
    )
    parser.add_argument("--write", action="store_true", help="make the reports the new baseline")
    options = parser.parse_args()
    ratios = medians([json.loads(path.read_text()) for path in options.reports])
    if options.write:
        BASELINE.write_text(json.dumps(ratios, indent=1) + "\n")
        print(f"written to {BASELINE}")
        return 0
    lines = fallen(ratios, json.loads(BASELINE.read_text()))
    print("\n".join(lines) or f"no speed-up fell by more than {TOLERANCE:.0%}")
    return 1 if lines else 0


def medians(reports: Sequence[Any]) -> dict[str, float]:
    """Return the speed-up of each row that all reports have."""
    found: dict[str, list[float]] = {}
    for report in reports:
        for row in report["rows"]:
            found.setdefault(row["what"], []).append(row["ratio_of_least"])
    complete = {what: each for what, each in found.items() if len(each) == len(reports)}
    return {what: round(statistics.median(each), 2) for what, each in complete.items()}


def fallen(ratios: Mapping[str, float], baseline: Mapping[str, float]) -> list[str]:
    """Return a line for each ratio that is missing or more than `TOLERANCE` below the baseline."""
    lines = []
    for what, before in baseline.items():
        now = ratios.get(what)
        if now is None:
            lines.append(f"{what}: not measured, {before:.2f} in the baseline")
        elif now < (1 - TOLERANCE) * before:
            lines.append(
                f"{what}: {now:.2f}, {before:.2f} in the baseline ({now / before - 1:+.0%})"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
