"""An index held as Megatron's three arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaindex.index.spans import Spans, check_sample_ids
from megaindex.index.walk import CHUNK, SCATTERED, Chunks, located, share
from megaindex.kernels import active
from megaindex.kernels.types import I32, I64, U64, IntArray

_SORTED = 1 << 24  # samples that a walk sorts at a time, 8 bytes each


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
        return self._spans(self.shuffle_index, check_sample_ids(sample_ids, self.num_samples))

    def walk(self, begin: int, end: int, part: int = 0, parts: int = 1) -> Chunks:
        """See `megaindex.index.walk.walk`: in the order in which samples are cut.

        Raises:
            InvalidArgument: as `locate`, or a sample is served twice.
        """
        first, stop = share(begin, end, part, parts)
        at_once = min(_SORTED, stop - first)
        sortable = self.shuffle_index.dtype == np.uint32
        if not sortable or at_once * SCATTERED < len(self.sample_index):
            yield from located(self, first, stop, 0, 1)
            return
        entries = np.empty(at_once, np.uint64)
        for low in range(first, stop, _SORTED):
            yield from self._in_cut_order(low, entries[: stop - low])

    def _in_cut_order(self, begin: int, entries: U64) -> Chunks:
        samples = len(self.sample_index) - 1
        active().sort_by_sample(self.shuffle_index, samples, begin, entries)
        for at in range(0, entries.size, CHUNK):
            chunk = entries[at : at + CHUNK]
            cut = (chunk >> np.uint64(32)).astype(np.uint32)
            positions = (chunk & np.uint64(2**32 - 1)).view(np.int64)
            positions += begin
            yield positions, self._spans(cut, np.arange(cut.size))

    def _spans(self, shuffle_index: IntArray, ids: I64) -> Spans:
        runs = active().array_spans(
            shuffle_index,
            self.sample_index,
            self.document_index,
            self.sequence_lengths,
            self.add_extra_token,
            ids,
        )
        return Spans.of_one_source(*runs)
