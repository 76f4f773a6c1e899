"""Where samples of Megatron's three arrays lie, as runs of tokens."""

from __future__ import annotations

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.kernels.types import I32, I64, IntArray


def array_spans(
    shuffle_index: IntArray,
    sample_index: IntArray,
    document_index: I32,
    lengths: I32,
    extra: int,
    sample_ids: I64,
) -> tuple[I64, I64, I64, I64]:
    """Runs of the samples with these ids: (document, offset, length, row_splits), all int64.

    Sample i of training is sample ``s = shuffle_index[i]`` of the concatenated documents: it reads
    from row s of ``sample_index`` to row s + 1, and ``extra`` tokens more. The runs of the k-th id
    are ``row_splits[k]:row_splits[k + 1]``, none is empty. With lengths 3 0 4, documents 0 1 2 and
    rows (0, 2) and (2, 1), a sample and its extra token are the runs (0, 2, 1) and (2, 0, 2).

    Raises:
        InvalidArgument: an id, an entry or a row names what is not there: the arrays are damaged.
    """
    runs: list[tuple[int, int, int]] = []
    splits = [0]
    for sample in sample_ids.tolist():
        if not 0 <= sample < shuffle_index.size:
            raise InvalidArgument(f"sample_ids: sample {sample} of {shuffle_index.size} samples")
        row = int(shuffle_index[sample])
        if not 0 <= row < len(sample_index) - 1:
            raise InvalidArgument(
                f"shuffle_index: entry {sample} is {row}, sample_index holds "
                f"{len(sample_index) - 1} samples; build the index again"
            )
        (first, begin), (last, end) = sample_index[row : row + 2].tolist()
        runs += _sample(document_index, lengths, first, begin, last, end + extra)
        splits.append(len(runs))
    columns = np.array(runs, np.int64).reshape(-1, 3).T
    return columns[0].copy(), columns[1].copy(), columns[2].copy(), np.array(splits, np.int64)


def _sample(
    document_index: I32, lengths: I32, first: int, begin: int, last: int, end: int
) -> list[tuple[int, int, int]]:
    """From offset ``begin`` at position ``first`` to offset ``end`` at position ``last``."""
    fine = 0 <= first <= last < document_index.size
    runs = []
    for position in range(first, last + 1) if fine else ():
        document = int(document_index[position])
        fine = fine and 0 <= document < lengths.size
        length = int(lengths[document]) if fine else 0
        low = begin if position == first else 0
        high = end if position == last else length
        fine = fine and 0 <= low <= high <= length
        if low < high:
            runs.append((document, low, high - low))
    if not fine:
        raise InvalidArgument(
            f"sample_index: a sample from offset {begin} at position {first} to offset {end} at "
            f"position {last} of document_index leaves its documents; build the index again"
        )
    return runs
