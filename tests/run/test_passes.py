"""Ranges of a loader that starts over, of which skipped steps leave some out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from megaindex.run.passes import LoaderPasses, ServedRange, served_between


def listed(parts: Sequence[ServedRange]) -> Iterator[int]:
    for part in parts:
        for _ in range(part.times):
            yield from range(part.begin, part.end)


def test_ranges_of_a_run_serve_those_of_its_passes() -> None:
    rng = random.Random(5)
    for _ in range(300):
        limit, samples = rng.randrange(1, 12), rng.randrange(1, 40)
        before = rng.randrange(min(samples, 20))
        passes = LoaderPasses(
            samples=samples, limit=limit, before=before, resumed_at=before % limit
        )
        parts = passes.positions()
        every = list(listed(parts))
        bounds = sorted(rng.choices(range(-3, len(every) + 4), k=4))
        ranges = [(bounds[0], bounds[1]), (bounds[2], bounds[3])]
        expected = [each for a, b in ranges for each in every[max(0, a) : max(0, b)]]
        assert list(listed(served_between(parts, ranges))) == expected
