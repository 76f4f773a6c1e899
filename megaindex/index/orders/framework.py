"""The frameworks' orders: documents of all epochs shuffled, cut into samples, samples shuffled.

One implementation serves `megatron`, `neox`, `megatron-legacy` and `paddlenlp`: they differ in
their row of `megaindex.index.frameworks`.
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
    """A destination of index arrays: memory, or files that are being written."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> IntArray:
        """Return an uninitialised, C-contiguous array to fill."""
        ...

    def seal(self, name: str) -> None:
        """Accept that the array of that name is filled and will not change again."""
        ...


class Memory:
    """A sink that only keeps the arrays."""

    def __init__(self) -> None:
        self.arrays: dict[str, IntArray] = {}

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> IntArray:
        self.arrays[name] = np.empty(shape, dtype)
        return self.arrays[name]

    def seal(self, name: str) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class ShuffledOrder:
    """Everything that decides the three arrays, apart from the lengths themselves."""

    dialect: FrameworkRules
    """The framework's rules, with the order's own settings."""
    documents: range | I32
    """Sequence ids of one epoch, in file order."""
    sequence_length: int
    seed: int
    num_samples: int
    """Samples asked for; the arrays hold all samples of ``num_epochs`` epochs."""
    num_epochs: int
    tokens_per_epoch: int
    add_extra_token: int = 1
    drop_last_partial: bool = True

    @property
    def num_documents(self) -> int:
        """Entries of document_index."""
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
        """Of sample_index: int32 or int64, by the framework's own rule."""
        return self.dialect.sample_index_dtype(
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
            policy=self.dialect.separate_final_epoch,
            threshold=self.dialect.final_epoch_threshold,
        )


def build(order: ShuffledOrder, lengths: I32, sink: Sink, threads: int | None = None) -> None:
    """Fill document_index, sample_index and shuffle_index of ``order`` in ``sink``.

    ``threads`` bounds the threads it takes; default: `num_threads`.

    All three come from one random stream: first the documents of all epochs (or of all but the
    last, then of the last), then the samples in the same ranges.
    """
    threads = threads or num_threads()
    # All at once: a sink may bring their pages in while the first kernel runs.
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

    # The number of samples is known before they are cut, so both arrays can be made side by side;
    # but a shuffle keeps two threads busy, so only where there are enough of them.
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
