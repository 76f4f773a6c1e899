"""Walks every rank of a cluster through an index and counts what it was served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.spans import Index, Spans
from megaindex.kernels.types import I64, U8
from megaindex.loader.sampler import MicroBatchSampler
from megaindex.loader.tokens import MappedTokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """What all ranks together were served."""

    times_sample: U8
    """uint8[num_samples]: how often each sample was served."""
    times_token: U8
    """uint8[tokens in the .bin]: how often each token was among the first S of a served sample."""
    token_counts: I64
    """int64[vocabulary]: how often each token id was among them, as read."""

    def matches(self, dataset: IndexedDataset) -> bool:
        """Whether the ids that were read are those of the tokens that were to be served."""
        expected = np.bincount(
            dataset.tokens[self.times_token > 0].astype(np.int64), minlength=self.token_counts.size
        )
        return bool(np.array_equal(expected, self.token_counts))


def walk_ranks(
    index: Index,
    dataset: IndexedDataset,
    *,
    num_samples: int,
    micro_batch_size: int,
    data_parallel_size: int,
    vocabulary: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Served:
    """Read the batches of every rank and count samples and tokens.

    Raises:
        InvalidArgument: the pointers of the dataset are not multiples of its token size.
    """
    itemsize = dataset.dtype.itemsize
    if (dataset.sequence_pointers % itemsize).any():
        raise InvalidArgument(f"{dataset.path_prefix}: pointers do not fall between tokens")
    times_sample = np.zeros(index.num_samples, np.uint8)
    times_token = np.zeros(dataset.tokens.size, np.uint8)
    token_counts = np.zeros(vocabulary, np.int64)
    reader = MappedTokens([dataset])
    tokens = np.empty((micro_batch_size, index.sequence_length), np.int64)
    for rank in range(data_parallel_size):
        batches = MicroBatchSampler(
            num_samples=num_samples,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=rank,
            data_parallel_size=data_parallel_size,
        )
        for rows in batches:
            ids = np.asarray(rows, np.int64)
            spans = index.locate(ids)
            reader.read(spans, tokens, pad_id=0)
            token_counts += np.bincount(tokens.ravel(), minlength=vocabulary)
            np.add.at(times_sample, ids, 1)
            _count_tokens(times_token, dataset, spans, index.sequence_length)
            progress(len(ids))
    return Served(times_sample=times_sample, times_token=times_token, token_counts=token_counts)


def _count_tokens(times: U8, dataset: IndexedDataset, spans: Spans, sequence_length: int) -> None:
    """Add one for every token that the samples feed as input."""
    length = spans.input_lengths(sequence_length)
    first = dataset.sequence_pointers[spans.document] // dataset.dtype.itemsize + spans.offset
    for begin, end in zip(first.tolist(), (first + length).tolist(), strict=True):
        times[begin:end] += 1
