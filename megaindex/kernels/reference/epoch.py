"""One complete pass over permuted documents, of which only every n-th start is kept."""

from __future__ import annotations

import numpy as np

from megaindex.kernels.reference.bijection import bijection_apply
from megaindex.kernels.types import I32, I64, U64


def epoch_starts(
    key: U64, lengths: I32, copies: int, stride: int, out: I64, num_threads: int = 1
) -> None:
    """Fill ``out``, int64 [ceil(positions / stride) + 1]: tokens before every stride-th position.

    The pass has ``copies * len(lengths)`` positions: position p holds document
    ``bijection(p) % len(lengths)``. The last entry is the tokens of the pass. With lengths 3 0 4 2
    in the order 2 0 3 1, a stride of 2 gives 0 7 9.
    """
    size = copies * lengths.size
    position = np.arange(size)
    document = bijection_apply(key, size, position) % lengths.size
    out[0] = 0
    for row, begin in enumerate(range(0, size, stride)):
        out[row + 1] = out[row] + int(lengths[document[begin : begin + stride]].sum())


def epoch_spans(
    key: U64, lengths: I32, copies: int, stride: int, starts: I64, begins: I64, ends: I64
) -> tuple[I64, I64, I64, I64]:
    """Where tokens begins[k] ... ends[k] - 1 of the pass lie: (document, offset, length, splits).

    All int64; the runs of request k are ``splits[k]:splits[k + 1]``, none is empty. ``starts`` is
    what `epoch_starts` filled; each request holds at least one token.
    """
    size = copies * lengths.size
    document = bijection_apply(key, size, np.arange(size)) % lengths.size
    runs, splits = [], [0]
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        row = int(np.searchsorted(starts, begin, side="right")) - 1
        start, position = int(starts[row]), row * stride
        while start < end:
            stop = start + int(lengths[document[position]])
            low, high = max(start, begin), min(stop, end)
            if low < high:
                runs.append((int(document[position]), low - start, high - low))
            start, position = stop, position + 1
        splits.append(len(runs))
    columns = np.array(runs, np.int64).reshape(-1, 3).T
    return columns[0].copy(), columns[1].copy(), columns[2].copy(), np.array(splits, np.int64)
