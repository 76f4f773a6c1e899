"""Orders of the frameworks: documents of all epochs are shuffled and cut, samples are shuffled.

Orders `megatron`, `neox`, `megatron-legacy` and `paddlenlp` differ only in their row of
`megaindex.index.frameworks`.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megaindex._types import I32, U32, IntArray
from megaindex.arithmetic import FinalEpoch, final_epoch, samples_in, shuffle_dtype
from megaindex.index.frameworks import FrameworkRules
from megaindex.kernels import active, num_threads


class Sink(Protocol):
    """Destination of index arrays: memory or files."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> IntArray:
        """Return an uninitialised, C-contiguous array to fill."""

    def seal(self, name: str) -> None:
        """Mark the array as complete; it must not change any more."""


class Memory:
    """Sink that keeps the arrays in memory."""

    def __init__(self) -> None:
        self.arrays: dict[str, IntArray] = {}

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> IntArray:
        self.arrays[name] = np.empty(shape, dtype)
        return self.arrays[name]

    def seal(self, name: str) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class ShuffledOrder:
    """Request for the arrays of one dataset: all that decides them except sequence lengths."""

    rules: FrameworkRules
    """Rules of the framework with the settings of the order."""
    documents: range | I32
    """Sequence ids of one epoch, in file order."""
    sequence_length: int
    seed: int
    num_samples: int
    """Samples requested; the arrays have all samples of ``num_epochs`` epochs."""
    num_epochs: int
    tokens_per_epoch: int
    add_extra_token: int = 1
    drop_last_partial: bool = True

    @property
    def num_documents(self) -> int:
        """Number of entries of document_index."""
        return self.num_epochs * len(self.documents)

    @property
    def total_tokens(self) -> int:
        return self.num_epochs * self.tokens_per_epoch

    @functools.cached_property
    def samples_built(self) -> int:
        return samples_in(
            self.total_tokens,
            self.sequence_length,
            self.add_extra_token,
            drop_last_partial=self.drop_last_partial,
        )

    @property
    def sample_dtype(self) -> str:
        """Dtype of sample_index, int32 or int64, by the rule of the framework."""
        return self.rules.sample_index_dtype(
            self.num_documents, self.total_tokens, self.sequence_length
        )

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array of the index."""
        return {
            "document_index": ((self.num_documents,), "int32"),
            "sample_index": ((self.samples_built + 1, 2), self.sample_dtype),
            "shuffle_index": ((self.samples_built,), shuffle_dtype(self.samples_built)),
        }

    @functools.cached_property
    def final(self) -> FinalEpoch:
        return final_epoch(
            self.num_samples,
            self.num_epochs,
            self.tokens_per_epoch,
            self.sequence_length,
            self.add_extra_token,
            policy=self.rules.separate_final_epoch,
            threshold=self.rules.final_epoch_threshold,
        )


def build(order: ShuffledOrder, lengths: I32, sink: Sink, threads: int | None = None) -> None:
    """Fill document_index, sample_index and shuffle_index of ``order`` in ``sink``.

    One random stream shuffles the documents of all epochs (or of all but the last, then of the
    last), then the samples of the same ranges. ``threads`` defaults to `num_threads`.
    """
    threads = threads or num_threads()
    # Allocate all first: a sink may populate pages while the first kernel runs.
    document_index, sample_index, shuffle_index = (
        sink.allocate(name, shape, dtype) for name, (shape, dtype) in order.arrays.items()
    )
    state = active().seed_state(order.seed)
    apart = order.final.apart
    head = (order.num_epochs - 1) * len(order.documents) if apart else order.num_documents
    _shuffle_documents(order, state, document_index[:head], threads)
    if apart:
        _shuffle_documents(order, state, document_index[head:], threads)
    sink.seal("document_index")

    def cut(of_them: int) -> None:
        _cut_samples(order, lengths, document_index, sample_index, of_them)
        sink.seal("sample_index")

    def shuffle() -> None:
        _shuffle_samples(order, state, shuffle_index, threads)
        sink.seal("shuffle_index")

    # Cut and shuffle in parallel if there are enough threads: a shuffle takes two.
    others = threads - 2
    if others < 2:
        cut(threads)
        shuffle()
    else:
        with ThreadPoolExecutor(1, "megaindex-shuffle") as pool:
            shuffled = pool.submit(shuffle)
            cut(others)
            shuffled.result()


def _shuffle_documents(order: ShuffledOrder, state: U32, out: I32, threads: int) -> None:
    documents = order.documents
    epochs = out.size // len(documents)
    if isinstance(documents, range):
        active().shuffled_documents(state, None, documents.start, epochs, out, threads)
    else:
        active().shuffled_documents(state, documents, 0, epochs, out, threads)


def _shuffle_samples(order: ShuffledOrder, state: U32, out: IntArray, threads: int) -> None:
    head = order.final.samples_before if order.final.apart else out.size
    active().shuffled_range(state, 0, out[:head], threads)
    active().shuffled_range(state, head, out[head:], threads)


def _cut_samples(
    order: ShuffledOrder, lengths: I32, document_index: I32, out: IntArray, threads: int
) -> None:
    active().cut_samples(
        lengths,
        document_index,
        order.sequence_length,
        order.add_extra_token,
        order.samples_built,
        order.total_tokens,
        out,
        threads,
    )
