"""Exposures: the pass of its source's order that a sample belongs to.

That is the sample's number in the order of its source, divided by the samples of a pass: on average
where a framework cuts and shuffles passes together. It does not count how often a text was seen: a
sample that is served again has the same exposure.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from megaindex._types import I64
from megaindex.arithmetic import ceil_div
from megaindex.errors import InvalidArgument

MOST_PASSES = 2**20
"""Most passes of a source whose exposures are known."""


class PassRuns(NamedTuple):
    """Samples in runs of one pass."""

    starts: I64
    """int64[runs]: first sample of each run, from 0 on, in increasing order."""
    passes: I64
    """int64[runs]: pass of each run."""
    size: int
    """Number of samples."""

    def at(self, numbers: I64) -> I64:
        """Return the exposure of each sample, int64[n]."""
        return self.passes[np.searchsorted(self.starts, numbers, "right") - 1]

    def later(self, passes: I64) -> PassRuns:
        """Return the runs after more passes: one number, or int64[runs], those of each run."""
        return self._replace(passes=self.passes + passes)

    def between(self, begin: int, end: int) -> PassRuns:
        """Return the runs of samples ``begin`` to ``end - 1``, counted from 0."""
        first = max(0, int(np.searchsorted(self.starts, begin, "right")) - 1)
        stop = max(first + 1, int(np.searchsorted(self.starts, end)))
        starts = np.maximum(self.starts[first:stop] - begin, 0)
        return PassRuns(starts, self.passes[first:stop], end - begin)


ONE_PASS = PassRuns(np.zeros(1, np.int64), np.zeros(1, np.int64), 0)
"""Runs of any samples that all belong to the first pass."""


def runs_of_size(samples: Fraction, passes: int, size: int) -> PassRuns:
    """Return the runs of passes of so many samples, a mean.

    Raises:
        InvalidArgument: there are more than `MOST_PASSES`.
    """
    if passes > MOST_PASSES:
        raise InvalidArgument(
            f"keys: a source must have at most {MOST_PASSES} passes, got {passes}; read fewer "
            "epochs, or batches without keys"
        )
    top, bottom = samples.numerator, samples.denominator
    starts = [ceil_div(number * top, bottom) for number in range(passes)]
    return PassRuns(np.array(starts, np.int64), np.arange(passes), size)


def runs_of_samples(exposures: I64) -> PassRuns:
    """Return the runs of samples with these exposures."""
    starts = np.flatnonzero(np.diff(exposures, prepend=-1))
    return PassRuns(starts, exposures[starts], exposures.size)


def join_runs(parts: Iterable[PassRuns]) -> PassRuns:
    """Return the runs of parts in a row.

    Raises:
        OverflowError: they have 2**63 samples or more.
    """
    size, starts, passes = 0, [], []
    for each in parts:
        starts.append(each.starts + np.array(size, np.int64))
        passes.append(each.passes)
        size += each.size
    return PassRuns(np.concatenate(starts), np.concatenate(passes), size)
