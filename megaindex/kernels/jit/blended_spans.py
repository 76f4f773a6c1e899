"""Spans of blends in Numba; see reference/blended_spans.py for what they are."""

from __future__ import annotations

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.kernels.jit.spans import array_spans
from megaindex.kernels.reference.blended_spans import span_table as span_table
from megaindex.kernels.types import I32, I64, IndexArrays

__all__ = ["blended_spans", "span_table"]


def blended_spans(
    table: list[IndexArrays], which: I64, samples: I64
) -> tuple[I32, I64, I64, I64, I64]:
    counts = np.zeros(which.size, np.int64)
    parts = []
    for source in np.unique(which).tolist():  # one call for all samples of a source
        if not 0 <= source < len(table):
            raise InvalidArgument(f"which: source {source} of {len(table)} sources")
        places = np.flatnonzero(which == source)
        shuffle, rows, documents, lengths, extra = table[source]
        part = array_spans(shuffle, rows, documents, lengths, extra, samples[places])
        counts[places] = np.diff(part[3])
        parts.append((places, part))
    splits = np.concatenate(([0], np.cumsum(counts)))
    columns = np.empty((3, splits[-1]), np.int64)
    for places, (*runs, part_splits) in parts:
        shift = splits[places] - part_splits[:-1]
        rows = np.arange(part_splits[-1]) + np.repeat(shift, counts[places])
        for column, values in zip(columns, runs, strict=True):
            column[rows] = values
    source = np.repeat(which, counts).astype(np.int32)
    return source, columns[0], columns[1], columns[2], splits
