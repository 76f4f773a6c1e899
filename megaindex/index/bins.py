"""Bins of whole documents: the samples of instruction data, and their order.

A bin is a sample: one document, or several whose tokens fit together. Bins are made once, from the
lengths alone, and every epoch shuffles the same bins, so an epoch has the same number of samples
whatever the seed, and a plan knows it without building.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from megaindex._types import I32, I64
from megaindex.errors import InvalidArgument
from megaindex.index.orders.keyed import Block, BlockOrder
from megaindex.index.spans import Spans
from megaindex.validation import check_choice

LongDocuments = Literal["truncate", "split", "skip"]
LONG_DOCUMENTS = ("truncate", "split", "skip")
LEAST_TOKENS = 2  # a single token has no next one to predict


@dataclass(frozen=True, kw_only=True, eq=False)
class Bins:
    """Pieces of documents, bin by bin."""

    document: I64
    """int64[pieces]: sequence ids."""
    offset: I64
    """int64[pieces]: first token, from the start of the sequence."""
    length: I64
    """int64[pieces]: tokens, at least 2."""
    starts: I64
    """int64[bins + 1]: bin b is the pieces starts[b] ... starts[b + 1] - 1."""

    @property
    def num_bins(self) -> int:
        return self.starts.size - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all pieces."""
        return int(self.length.sum())


def make_bins(
    lengths: I32,
    documents: range | I32,
    capacity: int,
    *,
    packed: bool,
    long_documents: LongDocuments = "truncate",
) -> Bins:
    """Bins of at most ``capacity`` tokens.

    Args:
        lengths: int32[sequences] of the dataset.
        documents: sequence ids to use.
        packed: lay documents together, the longest first, each where it leaves the least room
            (best fit decreasing, with pieces of one length placed together); else one a bin.
        long_documents: what becomes of documents longer than ``capacity``.

    Raises:
        InvalidArgument: no document has two tokens to train on.
    """
    check_choice("long_documents", long_documents, LONG_DOCUMENTS)
    ids = np.arange(documents.start, documents.stop) if isinstance(documents, range) else documents
    ids = ids.astype(np.int64)
    document, offset, length = _pieces(ids, lengths[ids].astype(np.int64), capacity, long_documents)
    if document.size == 0:
        raise InvalidArgument(
            f"no document gives a sample: each needs at least {LEAST_TOKENS} tokens"
            + (f" and at most {capacity}" if long_documents == "skip" else "")
        )
    if not packed:
        starts = np.arange(document.size + 1)
        return Bins(document=document, offset=offset, length=length, starts=starts)
    bins = best_fit(length, capacity)
    order = np.argsort(bins, kind="stable")
    counts = np.bincount(bins)
    return Bins(
        document=document[order],
        offset=offset[order],
        length=length[order],
        starts=np.concatenate(([0], np.cumsum(counts))),
    )


def _pieces(
    ids: I64, sizes: I64, capacity: int, long_documents: LongDocuments
) -> tuple[I64, I64, I64]:
    """(document, offset, length) of what is used; pieces of fewer than 2 tokens are not.

    With a capacity of 4, documents of 3 and 9 tokens give pieces 3 | 4 4 1, the last one unused.
    """
    if long_documents == "skip":
        ids, sizes = ids[sizes <= capacity], sizes[sizes <= capacity]
    if long_documents == "split":
        parts = np.maximum(1, -(-sizes // capacity))
        first = np.cumsum(parts) - parts
        part = np.arange(int(parts.sum())) - np.repeat(first, parts)
        ids, sizes = np.repeat(ids, parts), np.repeat(sizes, parts)
        offset = part * capacity
    else:
        offset = np.zeros(ids.size, np.int64)
    length = np.minimum(sizes - offset, capacity)
    used = length >= LEAST_TOKENS
    return ids[used], offset[used], length[used]


def best_fit(lengths: I64, capacity: int) -> I64:
    """Bin of each piece, int64[pieces]: the longest first, each where it leaves the least room.

    Pieces of one length are laid into bins of one remaining room together, one in each, so the work
    depends on the number of different lengths, not on the number of pieces. Placed one by one, a
    second piece of the length would go into the first one's bin while it fits.
    """
    order = np.argsort(-lengths, kind="stable")
    bin_of = np.empty(lengths.size, np.int64)
    room: dict[int, I64] = {}  # remaining room -> bins that have it
    rooms: list[int] = []  # the keys, sorted
    num_bins = at = 0
    sizes, counts = np.unique(lengths, return_counts=True)
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = at + count
        while at < end:
            place = bisect_left(rooms, size)
            if place == len(rooms):
                # bins of their own, as many pieces in each as fit: the next ones would go there
                fit = capacity // size
                made = -(-(end - at) // fit)
                bins = num_bins + np.arange(made)
                bin_of[order[at:end]] = np.repeat(bins, fit)[: end - at]
                num_bins += made
                rest = (end - at) - (made - 1) * fit
                _put(room, rooms, capacity - fit * size, bins[: made - 1 + (rest == fit)])
                _put(room, rooms, capacity - rest * size, bins[made - 1 + (rest == fit) :])
                at = end
                continue
            found = room[rooms[place]]
            taken = min(end - at, found.size)
            left = rooms[place]
            bin_of[order[at : at + taken]] = found[:taken]
            if taken == found.size:
                del room[left], rooms[place]
            else:
                room[left] = found[taken:]
            _put(room, rooms, left - size, found[:taken])
            at += taken
    return bin_of


def _put(room: dict[int, I64], rooms: list[int], left: int, bins: I64) -> None:
    """These bins have so much room left."""
    if bins.size == 0 or left < LEAST_TOKENS:
        return
    if left in room:
        room[left] = np.concatenate((room[left], bins))
    else:
        room[left] = bins
        insort(rooms, left)


@dataclass(frozen=True, kw_only=True, eq=False)
class BinIndex(BlockOrder):
    """Samples of whole documents, none crossed; see `megaindex.index.bins`.

    A sample may be shorter than ``sequence_length``: what is missing is padding, without loss.

    Raises:
        InvalidArgument: the number of epochs is out of range.
    """

    bins: Bins
    tokens_per_epoch: int
    """Of the documents, those that are cut off or skipped included."""
    sequence_length: int
    seed: int
    source_name: str
    """What the order depends on besides the seed; by default a hash of the content."""
    num_epochs: int = 1
    add_extra_token: int = 1
    order: Literal["epoch"] = field(default="epoch", init=False)

    def __post_init__(self) -> None:
        self._check_epochs()

    @property
    def samples_per_epoch(self) -> int:
        return self.bins.num_bins

    @property
    def cut_tokens(self) -> int:
        """Tokens of the documents that are in no sample."""
        return self.tokens_per_epoch - self.bins.num_tokens

    def extend(self, epochs: int) -> BinIndex:
        """Return the same order for ``epochs`` epochs; the samples that both hold are the same."""
        return replace(self, num_epochs=epochs)

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
            f"samples of whole documents have no {name}: bins are shuffled, in an order that is "
            "computed; use locate(sample_ids)"
        )
