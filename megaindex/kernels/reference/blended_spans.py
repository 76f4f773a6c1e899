"""Where samples of a blend lie, each in the three arrays of its own source."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.kernels.reference.spans import array_spans
from megaindex.kernels.types import I32, I64, IndexArrays


def span_table(indices: Sequence[IndexArrays]) -> list[IndexArrays]:
    """What `blended_spans` looks in: the arguments of `array_spans` but the ids, of each source.

    The table keeps the arrays alive; what else it is, is each backend's own matter.
    """
    return list(indices)


def blended_spans(
    table: list[IndexArrays], which: I64, samples: I64
) -> tuple[I32, I64, I64, I64, I64]:
    """Runs of ``samples[k]`` of source ``which[k]``, for every k.

    Returns:
        (source, document, offset, length, row_splits): as `array_spans`, and int32 sources.

    Raises:
        InvalidArgument: there is no such source or sample, or the arrays are damaged.
    """
    parts = []
    for source, sample in zip(which.tolist(), samples, strict=True):
        if not 0 <= source < len(table):
            raise InvalidArgument(f"which: source {source} of {len(table)} sources")
        shuffle, rows, documents, lengths, extra = table[source]
        one = np.array([sample], np.int64)
        parts.append(array_spans(shuffle, rows, documents, lengths, extra, one))
    nothing = np.zeros(0, np.int64)
    document, offset, length = (
        np.concatenate([nothing, *(part[field] for part in parts)]) for field in range(3)
    )
    counts = [part[0].size for part in parts]
    splits = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return np.repeat(which, counts).astype(np.int32), document, offset, length, splits
