"""Bins of whole documents, the samples of finetuning data, and their order.

A bin is one sample: one document, or several that fit together. Bins are computed once from the
document lengths and every epoch shuffles the same bins, so the number of samples per epoch does not
depend on the seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megaindex._types import I32, I64
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.documents import Documents, lengths_of, sequence_ids
from megaindex.index.frameworks import LONG_DOCUMENTS, LongDocuments
from megaindex.index.orders.keyed import Block, SeededOrder
from megaindex.index.spans import Spans
from megaindex.kernels import active
from megaindex.validation import check_choice

LEAST_TOKENS = 2  # an input token and its label


@dataclass(frozen=True, kw_only=True, eq=False)
class Bins:
    """Pieces of documents, sorted by bin; `make_bins` describes the settings."""

    documents: Documents
    capacity: int
    packed: bool
    long_documents: LongDocuments
    document: I64
    """int64[pieces]: sequence ids."""
    offset: I64
    """int64[pieces]: first token, from the start of the sequence."""
    length: I64
    """int64[pieces]: tokens, at least 2. A piece behind which its document goes on in another has
    the first token of that one too, as its last label."""
    starts: I64
    """int64[bins + 1]: bin b consists of pieces starts[b] to starts[b + 1] - 1."""

    @property
    def num_bins(self) -> int:
        return self.starts.size - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the documents that are in a sample."""
        return int(self.length.sum()) - int(np.count_nonzero(self.offset))


def make_bins(
    lengths: I32,
    documents: Documents,
    capacity: int,
    *,
    packed: bool,
    long_documents: LongDocuments = "truncate",
) -> Bins:
    """Return bins of at most ``capacity`` tokens.

    Args:
        lengths: int32[sequences] of the dataset.
        documents: sequence ids to use.
        packed: pack documents by `best_fit`; otherwise one document per bin.
        long_documents: truncate, split or skip documents longer than ``capacity``.

    Returns:
        The bins. With ``split`` a packed piece of ``capacity`` tokens has one more, for its last
        label, if its document goes on.

    Raises:
        InvalidArgument: no document gives a sample.
    """
    check_choice("long_documents", long_documents, LONG_DOCUMENTS)
    ids = sequence_ids(documents, np.arange(len(documents)))
    sizes = lengths_of(lengths, documents).astype(np.int64)
    inputs = capacity if packed else capacity - 1
    document, offset, length = _pieces(ids, sizes, capacity, inputs, long_documents)
    if document.size == 0:
        raise InvalidArgument(
            f"no document gives a sample: a document must have at least {LEAST_TOKENS} tokens"
            + (f" and at most {capacity}" if long_documents == "skip" else "")
        )
    if not packed:
        order: slice | I64 = slice(None)
        starts = np.arange(document.size + 1)
    else:
        bins = best_fit(np.minimum(length, capacity), capacity)
        order = np.argsort(bins, kind="stable")
        starts = np.concatenate(([0], np.cumsum(np.bincount(bins))))
    return Bins(
        documents=documents,
        capacity=capacity,
        packed=packed,
        long_documents=long_documents,
        document=document[order],
        offset=offset[order],
        length=length[order],
        starts=starts,
    )


def _pieces(
    ids: I64, sizes: I64, capacity: int, inputs: int, long_documents: LongDocuments
) -> tuple[I64, I64, I64]:
    """Return (document, offset, length) of pieces of at least 2 tokens.

    With a capacity of 4, of which all are inputs, documents of 3 and 9 tokens split into 3 | 4 4 1.
    Pieces of 4 read 5, the last of them for its label only; so the piece of 1 has nothing to learn.
    """
    if long_documents == "skip":
        ids, sizes = ids[sizes <= capacity], sizes[sizes <= capacity]
    offset = np.zeros(ids.size, np.int64)
    if long_documents == "split":
        parts = np.maximum(1, -(-sizes // inputs))
        first = np.cumsum(parts) - parts
        part = np.arange(int(parts.sum())) - np.repeat(first, parts)
        ids, sizes = np.repeat(ids, parts), np.repeat(sizes, parts)
        offset, capacity = part * inputs, inputs + 1
    length = np.minimum(sizes - offset, capacity)
    used = length >= LEAST_TOKENS
    return ids[used], offset[used], length[used]


def best_fit(lengths: I64, capacity: int) -> I64:
    """Return the bin of each piece, int64[pieces], by best fit decreasing.

    Pieces are placed by decreasing length, each into the bin with the least sufficient room. Pieces
    of one length are placed together, one in each bin of equal room, so the work depends on the
    number of distinct lengths. Placing them singly would put several into the first of these bins.
    """
    counts = np.bincount(lengths, minlength=capacity + 1)
    layers, _ = active().pack_pieces(counts, 0, LEAST_TOKENS, False)
    below, before, length, each, rank, bins = layers.T
    # bins are numbered in the order in which they are opened
    first = np.where(below < 0, np.cumsum(np.where(below < 0, bins, 0)) - bins, before)
    for layer in np.flatnonzero(below >= 0).tolist():
        first[layer] += first[below[layer]]
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(counts[::-1])[::-1]  # of each length in this order
    sizes = bins * each
    of = np.repeat(np.arange(len(layers)), sizes)
    place = np.arange(of.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    bin_of = np.empty(lengths.size, np.int64)
    at = (ends - counts)[length][of] + rank[of] + place
    bin_of[order[at]] = first[of] + place // each[of]
    return bin_of


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BinIndex(SeededOrder):
    """Index of bins, shuffled by a keyed bijection in every epoch.

    Samples may be shorter than ``sequence_length``; the rest is padding without loss.
    """

    bins: Bins
    tokens_per_epoch: int
    """Tokens of the documents, including truncated and skipped ones."""
    datasets: tuple[IndexedDataset, ...] = ()
    """The dataset of the index; empty if it was built from lengths alone."""
    order: Literal["epoch"] = field(default="epoch", init=False)

    @property
    def documents(self) -> Documents:
        """Sequence ids of one epoch."""
        return self.bins.documents

    @property
    def separates_documents(self) -> tuple[bool, ...]:
        return (True,)

    @property
    def samples_per_epoch(self) -> int:
        return self.bins.num_bins

    @property
    def cut_tokens(self) -> int:
        """Tokens of the documents that are in no sample."""
        return self.tokens_per_epoch - self.bins.num_tokens

    def _cut(self, _: Block, numbers: I64) -> Spans:
        bins = self.bins
        first, end = bins.starts[numbers], bins.starts[numbers + 1]
        counts = end - first
        splits = np.concatenate(([0], np.cumsum(counts)))
        piece = np.repeat(first - splits[:-1], counts) + np.arange(splits[-1])
        return Spans.of_one_source(
            bins.document[piece], bins.offset[piece], bins.length[piece], splits
        )

    def _no_array(self, name: str) -> str:
        return (
            f"samples of whole documents have no {name}: their order is computed; use "
            "locate(sample_ids)"
        )
