"""GPT-NeoX's packings of whole documents: one a sample, or as many as fit.

Its third, ``packed``, cuts the concatenated documents and is `NeoxOrder`. Here no document is cut:
a sample is the documents of rows ``sample_index[s]`` to ``sample_index[s + 1]``, padded by its
reader, and only a document longer than a sample loses its end ("chopped").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64, U32, IntArray
from megaindex.arithmetic import ceil_div
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.labels import documents_with_labels
from megaindex.index.order_settings import PackImpl
from megaindex.index.orders.framework import Sink
from megaindex.index.spans import Spans, check_sample_ids
from megaindex.kernels import active, num_threads


@dataclass(frozen=True, kw_only=True, eq=False)
class PackingOrder:
    """Everything that decides the three arrays."""

    pack_impl: PackImpl
    documents: I64
    """int64[n]: sequence ids, in file order."""
    lengths: I32
    """int32[n]: tokens of each of them."""
    takes_part: npt.NDArray[np.bool_]
    """bool[n]: whether it is served at all; see `documents_with_labels`."""
    sequence_length: int
    seed: int
    num_samples: int
    shuffled_ids: int | None = None
    """Pairwise data, unpacked: so many samples are shuffled, again and again up to num_samples."""

    @property
    def arrays(self) -> dict[str, tuple[tuple[int | None, ...], str]]:
        """Shape and dtype of each array; how many documents are packed shows only then."""
        return {
            "shuffle_index": ((self.num_samples,), "int64"),
            "sample_index": ((self.num_samples + 1, 2), "int64"),
            "document_index": ((None,), "int64"),
        }


def build(order: PackingOrder, sink: Sink) -> None:
    """Fill document_index, sample_index and shuffle_index of ``order`` in ``sink``, all int64.

    The random stream first shuffles the samples, then, for pack_until_overflow, the documents of
    one pass after the other. Unpacked documents keep their order: only samples are shuffled.
    """
    state = active().seed_state(order.seed)
    shuffle_index = sink.allocate("shuffle_index", (order.num_samples,), "int64")
    shuffle_index[:] = np.arange(order.num_samples) % (order.shuffled_ids or order.num_samples)
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
    """Positions among the documents, one more than there are samples, and where samples begin."""
    kept = np.flatnonzero(order.takes_part)
    return np.resize(kept, order.num_samples + 1), np.arange(order.num_samples + 1)


def _until_overflow(order: PackingOrder, state: U32) -> tuple[I64, I64]:
    """Passes over the documents, shuffled anew for each, until the last sample has begun.

    It gets no more than the document it began with: there the framework stops.
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
    """bool[n]: the documents that fit, where they must, and have a label, where there are labels.

    unpacked asks for a label among the first S tokens, pack_until_overflow among the first S + 1.
    An empty document never is a sample of its own.
    """
    unpacked = pack_impl == "unpacked"
    keep: npt.NDArray[np.bool_] = lengths > 0 if unpacked else np.ones(documents.size, bool)
    if not allow_chopped:
        keep &= lengths <= sequence_length + 1
    if labels is not None:
        keep &= documents_with_labels(labels, documents, sequence_length + (not unpacked))
    return keep


def check_some_take_part(name: str, order: PackingOrder) -> None:
    """Refuse documents of which none takes part.

    Raises:
        InvalidArgument: no document takes part.
    """
    if not order.lengths[order.takes_part].any():
        raise InvalidArgument(
            f"{name}: none of the {order.documents.size} documents can be served: they are empty, "
            f"longer than {order.sequence_length + 1} tokens with allow_chopped=False, or without "
            "a label; use others, a larger sequence_length, or allow_chopped=True"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class PackingIndex:
    """Samples of whole documents, with the arrays that GPT-NeoX keeps for them."""

    order: str
    pack_impl: PackImpl
    document_index: I64
    """int64[n]: sequence ids in reading order."""
    sample_index: I64
    """int64[num_samples + 1, 2]: position in document_index, and 0."""
    shuffle_index: I64
    """int64[num_samples]."""
    sequence_lengths: IntArray
    """int32[sequences]: of the dataset, shared with it."""
    sequence_length: int
    num_epochs: int
    """Passes begun over the documents that take part."""
    tokens_per_epoch: int
    """Tokens of the documents that take part, once each."""
    next_token: bool
    """GPT-NeoX's own reading: where a sample has room left, the first token of the document that
    begins the next sample follows its own. False: a sample holds its documents alone."""
    add_extra_token: int = 1

    @property
    def num_samples(self) -> int:
        return int(self.shuffle_index.size)

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        """Runs of at most ``sequence_length + 1`` tokens together: a sample may be shorter."""
        rows = self.shuffle_index[check_sample_ids(sample_ids, self.num_samples)]
        first, last = self.sample_index[rows, 0], self.sample_index[rows + 1, 0]
        # of the documents there are; the last sample of pack_until_overflow has no next
        follows = self.next_token & (last < self.document_index.size)
        counts = last - first + follows
        splits = np.concatenate(([0], np.cumsum(counts)))
        position = np.repeat(first - splits[:-1], counts) + np.arange(splits[-1])
        document = self.document_index[position].astype(np.int64)
        length = self.sequence_lengths[document].astype(np.int64)
        next_ones = splits[1:][follows] - 1
        length[next_ones] = np.minimum(length[next_ones], 1)
        # what does not fit is cut off: tokens of the sample before each run, then what is left
        before = np.concatenate(([0], np.cumsum(length)))
        before = before[:-1] - np.repeat(before[splits[:-1]], counts)
        length = np.clip(self.sequence_length + 1 - before, 0, length)
        return _nonempty_runs(document, length, splits)


def index_of(
    order: PackingOrder,
    arrays: Mapping[str, IntArray],
    *,
    sequence_lengths: I32,
    next_token: bool,
) -> PackingIndex:
    """Return the index that the arrays of ``order`` make, read with the lengths of a dataset."""
    return PackingIndex(
        order="neox",
        pack_impl=order.pack_impl,
        document_index=arrays["document_index"],
        sample_index=arrays["sample_index"],
        shuffle_index=arrays["shuffle_index"],
        sequence_lengths=sequence_lengths,
        sequence_length=order.sequence_length,
        num_epochs=ceil_div(arrays["document_index"].size, int(order.takes_part.sum())),
        tokens_per_epoch=int(order.lengths[order.takes_part].sum(dtype=np.int64)),
        next_token=next_token,
    )


def _nonempty_runs(document: I64, length: I64, splits: I64) -> Spans:
    """Spans of whole heads of documents, without those of empty ones."""
    keep = length > 0
    kept_before = np.concatenate(([0], np.cumsum(keep)))
    zeros = np.zeros(int(kept_before[-1]), np.int64)
    return Spans(
        source=zeros.astype(np.int32),
        document=document[keep],
        offset=zeros,
        length=length[keep],
        row_splits=kept_before[splits],
    )
