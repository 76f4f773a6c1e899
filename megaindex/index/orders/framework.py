"""Orders of the frameworks: documents of all epochs are shuffled and cut, samples are shuffled.

Orders `megatron`, `neox`, `megatron-legacy` and `paddlenlp` differ only in their row of
`megaindex.index.frameworks`.

GPT-NeoX's ``pack_impl`` unpacked and pack_until_overflow: sample s consists of documents
``sample_index[s, 0]`` to ``sample_index[s + 1, 0] - 1`` and is padded by its reader; only a
document longer than a sample loses its end. ``pack_impl: packed`` is `NeoxOrder`. Source:
``GPT2Dataset`` and ``_build_index_mappings`` of GPT-NeoX (main, 2026-05).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64, U32, IntArray
from megaindex.arithmetic import FinalEpoch, ceil_div, final_epoch, samples_in, shuffle_dtype
from megaindex.errors import InvalidArgument
from megaindex.index.frameworks import FrameworkRules
from megaindex.index.order_settings import PackImpl
from megaindex.index.spans import (
    EpochSizes,
    ShownIndex,
    Spans,
    check_sample_ids,
    documents_with_labels,
)
from megaindex.kernels import active, num_threads

if TYPE_CHECKING:
    from megaindex.format import IndexedDataset


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
        active().cut_samples(
            lengths,
            document_index,
            order.sequence_length,
            order.add_extra_token,
            order.samples_built,
            order.total_tokens,
            sample_index,
            of_them,
        )
        sink.seal("sample_index")

    def shuffle(of_them: int) -> None:
        head = order.final.samples_before if apart else shuffle_index.size
        active().shuffled_range(state, 0, shuffle_index[:head], of_them)
        active().shuffled_range(state, head, shuffle_index[head:], of_them)
        sink.seal("shuffle_index")

    # Cut and shuffle in parallel if there are enough threads: cutting is several times longer.
    if threads < 4:
        cut(threads)
        shuffle(threads)
    else:
        few = max(2, threads // 4)
        with ThreadPoolExecutor(1, "megaindex-shuffle") as pool:
            shuffled = pool.submit(shuffle, few)
            cut(threads - few)
            shuffled.result()


def _shuffle_documents(order: ShuffledOrder, state: U32, out: I32, threads: int) -> None:
    documents = order.documents
    epochs = out.size // len(documents)
    ids, first = (None, documents.start) if isinstance(documents, range) else (documents, 0)
    active().shuffled_documents(state, ids, first, epochs, out, threads)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackingOrder:
    """Request for the arrays of one dataset."""

    pack_impl: PackImpl
    documents: I64
    """int64[n]: sequence ids, in file order."""
    lengths: I32
    """int32[n]: their token counts."""
    takes_part: npt.NDArray[np.bool_]
    """bool[n]: documents that are served, see `documents_taking_part`."""
    sequence_length: int
    seed: int
    num_samples: int

    @property
    def arrays(self) -> dict[str, tuple[tuple[int | None, ...], str]]:
        """Shape and dtype of each array; None for a size known only after packing."""
        return {
            "shuffle_index": ((self.num_samples,), "int64"),
            "sample_index": ((self.num_samples + 1, 2), "int64"),
            "document_index": ((None,), "int64"),
        }


def build_packing(order: PackingOrder, sink: Sink) -> None:
    """Fill document_index, sample_index and shuffle_index of ``order`` in ``sink``, all int64.

    The random stream shuffles the samples first, then, for pack_until_overflow, the documents of
    each pass. Unpacked documents keep their order.
    """
    state = active().seed_state(order.seed)
    shuffle_index = sink.allocate("shuffle_index", (order.num_samples,), "int64")
    shuffle_index[:] = np.arange(order.num_samples)
    active().shuffle(state, shuffle_index, num_threads())
    sink.seal("shuffle_index")
    if order.pack_impl == "unpacked":
        positions, begins = _one_each(order)
    else:
        positions, begins = _until_overflow(order, state)
    sample_index = sink.allocate("sample_index", (order.num_samples + 1, 2), "int64")
    sample_index[:, 0] = begins
    sample_index[:, 1] = 0
    sink.seal("sample_index")
    document_index = sink.allocate("document_index", positions.shape, "int64")
    np.take(order.documents, positions, out=document_index)
    sink.seal("document_index")


def _one_each(order: PackingOrder) -> tuple[I64, I64]:
    """Return positions in ``documents``, one more than samples, and the first of each sample."""
    kept = np.flatnonzero(order.takes_part)
    return np.resize(kept, order.num_samples + 1), np.arange(order.num_samples + 1)


def _until_overflow(order: PackingOrder, state: U32) -> tuple[I64, I64]:
    """Return the same as `_one_each` for packed samples of shuffled passes over the documents.

    The last sample has only its first document, as in GPT-NeoX.
    """
    shuffled = np.arange(order.documents.size)
    begins = np.empty(order.num_samples + 1, np.int64)
    passes: list[I64] = []
    samples = tokens = packed = 0
    while samples < order.num_samples:
        active().shuffle(state, shuffled, num_threads())
        kept = shuffled[order.takes_part[shuffled]]
        room = begins[samples : order.num_samples]
        begun, tokens = active().pack_documents(
            order.lengths[kept], order.sequence_length + 1, tokens, room
        )
        room[:begun] += packed
        samples += begun
        packed += kept.size
        passes.append(kept)
    packed = begins[order.num_samples] = int(begins[order.num_samples - 1]) + 1
    return np.concatenate(passes)[:packed], begins


def documents_taking_part(
    pack_impl: PackImpl,
    documents: I64,
    lengths: I32,
    *,
    sequence_length: int,
    allow_chopped: bool = True,
    labels: IndexedDataset | None = None,
) -> npt.NDArray[np.bool_]:
    """Return bool[n]: documents that are short enough, if required, and have a label, if any.

    The label must be in the first S tokens (unpacked) or S + 1 (pack_until_overflow). Empty
    documents are omitted in unpacked data.
    """
    unpacked = pack_impl == "unpacked"
    keep: npt.NDArray[np.bool_] = lengths > 0 if unpacked else np.ones(documents.size, bool)
    if not allow_chopped:
        keep &= lengths <= sequence_length + 1
    if labels is not None:
        keep &= documents_with_labels(labels, documents, sequence_length + (not unpacked))
    return keep


def check_some_take_part(name: str, order: PackingOrder) -> None:
    """Raise InvalidArgument if no document with tokens is served."""
    if not order.lengths[order.takes_part].any():
        raise InvalidArgument(
            f"{name}: none of the {order.documents.size} documents can be served: they are empty, "
            f"longer than {order.sequence_length + 1} tokens with allow_chopped=False, or without "
            "labels; use other documents, a larger sequence_length, or allow_chopped=True"
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StoredIndex(ShownIndex):
    """Base class of the indices of one dataset with the three arrays of the frameworks."""

    order: str
    document_index: IntArray
    """Sequence ids, shuffled or sample by sample."""
    sample_index: IntArray
    """Position in document_index and offset in the sequence of each cut sample, and of the end."""
    shuffle_index: IntArray
    """Cut sample of each sample."""
    sequence_lengths: I32
    """int32[sequences] of the dataset, a view."""
    sequence_length: int
    num_epochs: int
    tokens_per_epoch: int
    add_extra_token: int = 1
    datasets: tuple[IndexedDataset, ...] = ()
    """The dataset of the index; empty if it was built from lengths alone."""

    @property
    def num_samples(self) -> int:
        return int(self.shuffle_index.size)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PackingIndex(StoredIndex):
    """Index of samples of whole documents, with the arrays of GPT-NeoX, all int64.

    An epoch is a pass over the served documents, the last one perhaps incomplete; offsets are 0.
    """

    pack_impl: PackImpl
    next_token: bool
    """True: a sample with room left ends with the first token of the next one, as in GPT-NeoX."""

    def epoch_sizes(self) -> EpochSizes:
        """Return the samples of an epoch by the tokens of all documents that the index serves."""
        total = int(self.sequence_lengths[self.document_index].sum(dtype=np.int64))
        samples = Fraction(self.num_samples * self.tokens_per_epoch, total)
        return {(0, self.sequence_length): samples}

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        """Return the spans of samples, each of at most ``sequence_length + 1`` tokens."""
        rows = self.shuffle_index[check_sample_ids(sample_ids, self.num_samples)]
        first, last = self.sample_index[rows, 0], self.sample_index[rows + 1, 0]
        # the last sample of pack_until_overflow has no next document
        follows = self.next_token & (last < self.document_index.size)
        counts = last - first + follows
        splits = np.concatenate(([0], np.cumsum(counts)))
        position = np.repeat(first - splits[:-1], counts) + np.arange(splits[-1])
        document = self.document_index[position].astype(np.int64)
        length = self.sequence_lengths[document].astype(np.int64)
        next_ones = splits[1:][follows] - 1
        length[next_ones] = np.minimum(length[next_ones], 1)
        # tokens of the sample before each span, then the room left for the span
        before = np.concatenate(([0], np.cumsum(length)))
        before = before[:-1] - np.repeat(before[splits[:-1]], counts)
        length = np.clip(self.sequence_length + 1 - before, 0, length)
        kept = length > 0
        kept_before = np.concatenate(([0], np.cumsum(kept)))
        zeros = np.zeros(int(kept_before[-1]), np.int64)
        return Spans.of_one_source(document[kept], zeros, length[kept], kept_before[splits])


def index_of(
    order: PackingOrder,
    arrays: Mapping[str, IntArray],
    *,
    dataset: IndexedDataset,
    next_token: bool,
) -> PackingIndex:
    """Return the index of the arrays of ``order`` over a dataset."""
    return PackingIndex(
        order="neox",
        pack_impl=order.pack_impl,
        document_index=arrays["document_index"],
        sample_index=arrays["sample_index"],
        shuffle_index=arrays["shuffle_index"],
        sequence_lengths=dataset.sequence_lengths,
        sequence_length=order.sequence_length,
        num_epochs=ceil_div(arrays["document_index"].size, int(order.takes_part.sum())),
        tokens_per_epoch=int(order.lengths[order.takes_part].sum(dtype=np.int64)),
        next_token=next_token,
        datasets=(dataset,),
    )
