"""An index held as Megatron's three arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy.typing as npt

from megaindex.index.spans import Spans, check_sample_ids
from megaindex.kernels import active
from megaindex.kernels.types import I32, IntArray


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
    cache_entry: str = ""
    """Path of the cache entry that keeps the arrays; empty where they are in memory alone."""

    @property
    def num_samples(self) -> int:
        return int(self.shuffle_index.size)

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        """See `megaindex.index.spans.Index`.

        Raises:
            OutOfRange: an id below 0 or not below ``num_samples``.
            InvalidArgument: the arrays are damaged: they lead outside of each other.
        """
        ids = check_sample_ids(sample_ids, self.num_samples)
        runs = active().array_spans(
            self.shuffle_index,
            self.sample_index,
            self.document_index,
            self.sequence_lengths,
            self.add_extra_token,
            ids,
        )
        return Spans.of_one_source(*runs)
