"""The least-seen order of samples, by how often their tokens were served."""

from __future__ import annotations

import numpy as np

from megaindex._types import I64


def least_seen(
    begins: I64, ends: I64, row_splits: I64, widths: I64, counts: I64, num_samples: int
) -> I64:
    """Return ``num_samples`` samples, each the one with the least-served tokens at its turn.

    Tokens come as segments: run r covers segments ``begins[r]:ends[r]``, sample k has the runs
    ``row_splits[k]:row_splits[k + 1]``. The score of a sample is the sum over its tokens of how
    often they have been served; among equals the lower number comes first.

    Args:
        widths: int64[segments], tokens of each segment.
        counts: int64[segments], how often the tokens of each have been served; updated.

    Returns:
        int64[num_samples].
    """
    remaining = list(range(row_splits.size - 1))
    covers = [
        np.concatenate(
            [np.arange(begins[r], ends[r]) for r in range(row_splits[k], row_splits[k + 1])]
        )
        for k in remaining
    ]
    order = np.empty(num_samples, np.int64)
    for step in range(num_samples):
        scores = [int((counts[covers[k]] * widths[covers[k]]).sum()) for k in remaining]
        order[step] = remaining.pop(scores.index(min(scores)))
        np.add.at(counts, covers[order[step]], 1)  # a sample may hold a document twice
    return order
