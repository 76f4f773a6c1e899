"""Index of Megatron's three arrays, and checks of arrays that other programs wrote."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64, U64, IntArray
from megaindex.arithmetic import shuffle_dtype
from megaindex.errors import FormatError
from megaindex.format import IndexedDataset
from megaindex.index.inverse import ServedTokens, places_of, served_in
from megaindex.index.orders.framework import ShuffledOrder
from megaindex.index.spans import (
    CHUNK,
    SCATTERED,
    Chunks,
    ShownIndex,
    Spans,
    check_sample_ids,
    iterate_in_order,
    part_bounds,
)
from megaindex.kernels import active

_SAMPLED_ROWS = 256


def check_arrays(
    order: ShuffledOrder,
    lengths: I32,
    document_index: IntArray,
    sample_index: IntArray,
    shuffle_index: IntArray,
) -> None:
    """Raise FormatError unless the arrays fit ``order`` and the sequence lengths.

    Checks shapes, dtypes, that both shuffles are complete, that rows increase within bounds, and
    the token count of up to 256 samples. The seed is not checked: framework file names include it.
    """
    samples = order.samples_built
    for name, array, dtype, shape in (
        ("document_index", document_index, "int32", (order.num_documents,)),
        ("sample_index", sample_index, order.sample_dtype, (samples + 1, 2)),
        ("shuffle_index", shuffle_index, shuffle_dtype(samples), (samples,)),
    ):
        if array.dtype != dtype or array.shape != shape:
            raise FormatError(
                f"{name} must be {dtype} of shape {shape}, got {array.dtype} of {array.shape}"
            )
    _check_documents(order, document_index)
    seen = np.zeros(samples, bool)
    if samples and int(shuffle_index.max()) < samples:
        seen[shuffle_index] = True
    if not seen.all():
        raise FormatError(f"shuffle_index must contain each of {samples} samples once")
    _check_rows(order, lengths, document_index, sample_index)


def _check_documents(order: ShuffledOrder, document_index: IntArray) -> None:
    documents = order.documents
    first, last = (
        (documents.start, documents.stop - 1)
        if isinstance(documents, range)
        else (int(documents.min()), int(documents.max()))
    )
    expected = np.bincount(np.asarray(documents) - first, minlength=last - first + 1)
    if document_index.min() >= first and document_index.max() <= last:
        times = np.bincount(document_index - first, minlength=last - first + 1)
        if np.array_equal(times, expected * order.num_epochs):
            return
    raise FormatError(
        f"document_index must contain each of {len(documents)} documents {order.num_epochs} times"
    )


def _check_ends(
    order: ShuffledOrder,
    lengths: I32,
    document_index: IntArray,
    position: IntArray,
    offset: IntArray,
) -> None:
    """Check that the last document of each complete sample has the tokens read from it."""
    if position.size == 0:
        return
    is_inside = int(position.max()) < document_index.size
    if not is_inside or np.any(offset > lengths[document_index[position]] - order.add_extra_token):
        raise FormatError(
            "sample_index has samples that end outside their last document: document lengths or "
            "add_extra_token differ from those it was built with"
        )


def _check_rows(
    order: ShuffledOrder, lengths: I32, document_index: IntArray, sample_index: IntArray
) -> None:
    position, offset = sample_index[:, 0], sample_index[:, 1]
    if position.min() < 0 or position.max() > document_index.size or offset.min() < 0:
        raise FormatError("sample_index has rows outside document_index")
    samples, size = order.samples_built, order.sequence_length
    whole = min(samples, (order.total_tokens - order.add_extra_token) // size)
    _check_ends(order, lengths, document_index, position[1 : whole + 1], offset[1 : whole + 1])
    if not rising_rows(sample_index[: whole + 1]).all():
        raise FormatError("sample_index must increase from row to row")
    rows = np.unique(np.linspace(0, max(whole - 1, 0), _SAMPLED_ROWS).astype(np.int64))
    for row in rows[rows < whole].tolist():
        (first, begin), (last, end) = sample_index[row : row + 2].tolist()
        between = int(lengths[document_index[first:last]].sum(dtype=np.int64))
        if first > last or between - begin + end != size:
            raise FormatError(
                f"sample {row} must have {size} tokens, got {between - begin + end}: document "
                "lengths differ from those it was built with"
            )


def rising_rows(sample_index: IntArray) -> npt.NDArray[np.bool_]:
    """Return bool[n - 1]: rows that point behind the previous row."""
    position, offset = sample_index[:, 0], sample_index[:, 1]
    farther = (position[1:] == position[:-1]) & (offset[1:] > offset[:-1])
    rising: npt.NDArray[np.bool_] = farther | (position[1:] > position[:-1])
    return rising


_SORTED = 1 << 24  # samples sorted at a time, 8 bytes each


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ArrayIndex(ShownIndex):
    """Index of the frameworks' orders: document_index, sample_index and shuffle_index.

    Sample ``i`` of training is cut sample ``s = shuffle_index[i]`` of the concatenated documents
    ``document_index``, from row ``sample_index[s]`` to row ``sample_index[s + 1]`` (`GPTDataset` of
    megatron-core 0.16.1, ``GPT2Dataset`` of GPT-NeoX).
    """

    order: str
    document_index: I32
    """int32[num_epochs * documents]: sequence ids, shuffled."""
    sample_index: IntArray
    """int32 or int64 [num_samples + 1, 2]: position in document_index, offset in the sequence."""
    shuffle_index: IntArray
    """uint32 (int64 from 2**32 - 2 samples on) [num_samples]."""
    sequence_lengths: I32
    """int32[sequences] of the dataset, a view."""
    sequence_length: int
    num_epochs: int
    tokens_per_epoch: int
    add_extra_token: int
    cache_entry: str = ""
    """Path of the cache entry of the arrays; empty if they are only in memory."""
    request: ShuffledOrder | None = None
    """Request that the arrays were built for; None if another program may have written them."""
    datasets: tuple[IndexedDataset, ...] = ()
    """The dataset of the index; empty if it was built from lengths alone."""

    @property
    def num_samples(self) -> int:
        return int(self.shuffle_index.size)

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        """Return the spans of samples, see `megaindex.Index`.

        Raises:
            OutOfRange: an id is not from 0 to ``num_samples - 1``.
            InvalidArgument: an entry of the arrays is out of bounds.
        """
        return self._spans(self.shuffle_index, check_sample_ids(sample_ids, self.num_samples))

    def served_tokens(self, documents: I64, source: int = 0) -> ServedTokens:
        """Return where documents are input, see `megaindex.index.inverse.served_tokens`."""
        del source
        places = places_of(self.document_index, documents, self.sequence_lengths.size)
        begins = np.ascontiguousarray(self.sample_index[:, 0])
        places = places.astype(begins.dtype)  # else the longer one is converted
        # rows up to the last one that begins at a place, from the one that reaches it
        first = np.maximum(np.searchsorted(begins, places) - 1, 0)
        stop = np.minimum(np.searchsorted(begins, places, "right"), begins.size - 1)
        count = np.maximum(stop - first, 0)
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        cut = np.repeat(first, count) + within
        samples = places_of(self.shuffle_index, cut, begins.size - 1)
        return served_in(self, samples, documents)

    def iterate_spans(self, begin: int, end: int, part: int = 0, parts: int = 1) -> Chunks:
        """Iterate in cutting order; InvalidArgument as `locate`, or if samples repeat."""
        first, stop = part_bounds(begin, end, part, parts)
        at_once = min(_SORTED, stop - first)
        sortable = self.shuffle_index.dtype == np.uint32
        if not sortable or at_once * SCATTERED < len(self.sample_index):
            yield from iterate_in_order(self, first, stop, 0, 1)
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
