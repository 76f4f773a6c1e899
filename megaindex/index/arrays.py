"""An index held as Megatron's three arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaindex.index.spans import Spans, check_sample_ids
from megaindex.kernels.types import I32, I64, IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class ArrayIndex:
    """document_index, sample_index and shuffle_index, with what they were built from.

    Sample ``i`` of training is sample ``shuffle_index[i]`` of the concatenated documents
    ``document_index``; it runs from row ``sample_index[s]`` to row ``sample_index[s + 1]``.
    """

    order: str
    document_index: I32
    """int32[num_epochs * documents]: sequence ids, shuffled."""
    sample_index: IntArray
    """int32 or int64 [num_samples + 1, 2]: position in document_index, offset in the sequence."""
    shuffle_index: IntArray
    """uint32 (int64 from 2**32 - 2 samples on) [num_samples]."""
    sequence_lengths: I32
    """int32[sequences]: of the dataset, shared with it."""
    sequence_length: int
    num_epochs: int
    tokens_per_epoch: int
    add_extra_token: int

    @property
    def num_samples(self) -> int:
        return int(self.shuffle_index.size)

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        ids = check_sample_ids(sample_ids, self.num_samples)
        rows = self.shuffle_index[ids].astype(np.int64)
        first, first_offset = self.sample_index[rows].astype(np.int64).T
        last, last_offset = self.sample_index[rows + 1].astype(np.int64).T

        counts = last - first + 1
        splits = np.concatenate(([0], np.cumsum(counts)))
        # positions in document_index: first[k], first[k]+1, ..., last[k] for every sample k
        position = np.repeat(first - splits[:-1], counts) + np.arange(splits[-1])
        document = self.document_index[position].astype(np.int64)
        begin = np.zeros(position.size, np.int64)
        end = self.sequence_lengths[document].astype(np.int64)
        begin[splits[:-1]] = first_offset
        end[splits[1:] - 1] = last_offset + self.add_extra_token
        return _without_empty(document, begin, end - begin, splits)


def _without_empty(document: I64, offset: I64, length: I64, splits: I64) -> Spans:
    keep = length > 0
    kept_before = np.concatenate(([0], np.cumsum(keep)))
    return Spans(
        source=np.zeros(int(keep.sum()), np.int32),
        document=document[keep],
        offset=offset[keep],
        length=length[keep],
        row_splits=kept_before[splits].astype(np.int64),
    )
