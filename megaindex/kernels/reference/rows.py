"""Rows of token ids, read by sample id."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaindex._types import I64, DatasetIndex, IndexArrays, TokenSource
from megaindex.errors import InvalidArgument
from megaindex.kernels.reference.gather import check_holds, gather
from megaindex.kernels.reference.spans import blended_spans


@dataclass(frozen=True, eq=False)
class RowTable:
    """Arrays and tokens of every source, and the draws of their blend."""

    indices: list[IndexArrays]
    sources: list[TokenSource]
    dataset_index: DatasetIndex | None
    dataset_sample_index: I64 | None

    def draws(self, ids: I64) -> tuple[I64, I64] | None:
        """Return source and sample of each id; None if one does not exist."""
        size = self.indices[0][0].size if self.dataset_index is None else self.dataset_index.size
        if ids.size and not 0 <= ids.min() <= ids.max() < size:
            return None
        if self.dataset_index is None or self.dataset_sample_index is None:
            return np.zeros_like(ids), ids
        return self.dataset_index[ids].astype(np.int64), self.dataset_sample_index[ids]


def row_table(
    indices: Sequence[IndexArrays],
    sources: Sequence[TokenSource],
    dataset_index: DatasetIndex | None,
    dataset_sample_index: I64 | None,
    descriptors: Sequence[int],
) -> RowTable:
    """Return a table for `read_rows`, in a form of the backend's own; it keeps the arrays alive.

    Args:
        indices, sources: the arguments of `span_table` and `token_table`, of the same sources.
        dataset_index, dataset_sample_index: source of each sample of the blend, uint8 or int16, and
            its number there; None for the samples of a single source.
        descriptors: files with the bytes of the tokens, one for each source, which a backend may
            read in place of the memory; -1 for a source without; empty without any. They stay open
            as long as the table is used.

    Raises:
        InvalidArgument: the lists differ in length, or int64 does not hold every token of a source.
    """
    if not indices or len(indices) != len(sources):
        raise InvalidArgument("indices, sources: must be as many, and at least one")
    if len(descriptors) not in (0, len(sources)):
        raise InvalidArgument("descriptors: must be one for each source, or none")
    if dataset_index is None and len(indices) > 1:
        raise InvalidArgument("dataset_index: must be given for several sources")
    check_holds(sources, np.zeros(0, np.int64))
    return RowTable(list(indices), list(sources), dataset_index, dataset_sample_index)


def read_rows(table: RowTable, sample_ids: list[Any], width: int, pad_id: int) -> I64 | None:
    """Return the tokens of samples as int64 [samples, width], with ``pad_id`` after them.

    None if an id is not the integer of a sample, or a sample is not in its source, the arrays or
    the tokens; `blended_spans` and `gather` then name the reason.
    """
    return assemble_rows(blended_spans, gather, table, sample_ids, width, pad_id)


def assemble_rows(
    find: Callable[..., Any],
    copy: Callable[..., int],
    table: RowTable,
    sample_ids: list[Any],
    width: int,
    pad_id: int,
) -> I64 | None:
    """Return the result of `read_rows` by the kernels `blended_spans` and `gather` of a backend."""
    if bool in set(map(type, sample_ids)):
        return None
    try:
        ids = np.array([operator.index(sample) for sample in sample_ids], np.int64)
        draws = table.draws(ids)
        if draws is None:
            return None
        spans = find(table.indices, *draws)
    except (TypeError, OverflowError, InvalidArgument):
        return None
    rows: I64 = np.empty((ids.size, width), np.int64)
    return rows if copy(table.sources, *spans, rows, None, pad_id) < 0 else None
