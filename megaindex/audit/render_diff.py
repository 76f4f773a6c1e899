"""The comparison of two orders on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from megaindex.audit.diff import Difference, Run
from megaindex.audit.words import percent
from megaindex.plan.printing import print_lines

_MOST_RUNS = 6


def print_difference(difference: Difference, file: TextIO | None = None) -> None:
    """Prints the verdict, the first difference and the causes."""
    print_lines(lines(difference), file)


def lines(difference: Difference) -> list[str]:
    """The text, line by line."""
    a, b = difference.names
    text = [f"A  {a}", f"B  {b}", "", _verdict(difference)]
    if difference.samples is not None:
        text += ["", f"first difference: sample {difference.first_difference:,}"]
        for side, runs in zip("AB", difference.samples, strict=True):
            text += [f"  {side}  {line}" for line in _runs(runs)]
    if difference.causes:
        text += ["", "settings that differ, without effect here:" if difference.equal else "cause:"]
    for cause in difference.causes:
        values = f"{cause.setting}: {cause.a} and {cause.b}: " if cause.setting else ""
        text.append(f"  {values}{cause.words}")
    return text


def _verdict(difference: Difference) -> str:
    count_a, count_b = difference.num_samples
    compared = min(count_a, count_b)
    if difference.equal:
        return f"equal: {count_a:,} samples, the same in every position"
    if difference.relation == "prefix":
        longer = "A" if count_a > count_b else "B"
        return (
            f"{longer} continues the other: the first {compared:,} samples are the same, "
            f"{longer} has {abs(count_a - count_b):,} more"
        )
    share = percent(difference.positions_differing / compared)
    where = f"{difference.positions_differing:,} of {compared:,} positions differ ({share})"
    if difference.relation == "reordered":
        return f"the same {count_a:,} samples in another order: {where}"
    common = difference.samples_in_common
    if common == compared:
        shorter, longer = ("A", "B") if count_a < count_b else ("B", "A")
        return f"all {compared:,} samples of {shorter} are in {longer}, at other places: {where}"
    return (
        f"other samples: {where}; {common:,} samples are in both (A has {count_a:,}, B {count_b:,})"
    )


def _runs(runs: Sequence[Run]) -> list[str]:
    found = []
    for run in runs[:_MOST_RUNS]:
        end = "its end" if run.length is None else f"{run.offset + run.length - 1}"
        found.append(f"document {run.document}, tokens {run.offset} … {end}")
    rest = len(runs) - _MOST_RUNS
    return [*found, f"and {rest} documents more"] if rest > 0 else found
