"""The three arrays of one block of order ``epoch``, for tools that want arrays."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from megaindex.index.arithmetic import INT32_MAX, shuffle_dtype
from megaindex.kernels import active, num_threads
from megaindex.kernels.types import I32, I64, IntArray


class EpochArrays(NamedTuple):
    """One block as Megatron keeps an index: see `megaindex.index.arrays.ArrayIndex`."""

    document_index: I32
    """Sequence ids in the order of the pass; where tokens are carried, the documents that hold
    them come first."""
    sample_index: IntArray
    """int32 or int64 [samples + 1, 2]: position in document_index, offset in the sequence."""
    shuffle_index: IntArray
    """uint32 or int64 [samples]."""


class Pass(Protocol):
    """What of an EpochIndex is needed."""

    @property
    def sequence_lengths(self) -> I32: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def add_extra_token(self) -> int: ...
    def samples_before(self, block: int) -> int: ...
    def carried(self, block: int) -> int: ...
    def permuted_documents(self, block: int) -> I32: ...
    def shuffled_samples(self, block: int) -> I64: ...


def materialise(index: Pass, block: int) -> EpochArrays:
    document_index, skipped = _documents(index, block)
    # A document that is entered in its middle is cut as if it began there.
    lengths = index.sequence_lengths[document_index]
    lengths[0] -= skipped
    num_samples = index.samples_before(block + 1) - index.samples_before(block)
    wide = document_index.size > INT32_MAX
    sample_index = np.empty((num_samples + 1, 2), np.int64 if wide else np.int32)
    active().cut_samples(
        lengths,
        np.arange(document_index.size, dtype=np.int32),
        index.sequence_length,
        index.add_extra_token,
        num_samples,
        int(lengths.sum(dtype=np.int64)),
        sample_index,
        num_threads(),
    )
    sample_index[sample_index[:, 0] == 0, 1] += skipped
    shuffle_index = index.shuffled_samples(block).astype(shuffle_dtype(num_samples))
    return EpochArrays(document_index, sample_index, shuffle_index)


def _documents(index: Pass, block: int) -> tuple[I32, int]:
    """document_index of a block, and the tokens of its first document that come before it.

    With 5 tokens carried and a block before that ends in documents of 7, 3 and 4 tokens, those of
    3 and 4 come first, and 2 tokens of the former are skipped.
    """
    documents, carried = index.permuted_documents(block), index.carried(block)
    if carried == 0:
        return documents, 0
    before = index.permuted_documents(block - 1)
    tail = np.cumsum(index.sequence_lengths[before[::-1]], dtype=np.int64)
    count = int(np.searchsorted(tail, carried)) + 1
    return np.concatenate((before[-count:], documents)), int(tail[count - 1]) - carried
