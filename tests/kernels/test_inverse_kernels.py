"""The inverse look-ups of computed orders, on every backend: entries of a pass, pieces of bins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.kernels import active
from megaindex.kernels.reference.packing import SKIP, SPLIT, STRIDE, TRUNCATE

KEY = np.array([3, 2**63 + 9], np.uint64)
RNG = np.random.default_rng(4)


@for_each(
    ("count", "copies", "stride"),
    [
        *((*each, stride) for each in ((1, 1), (130, 1), (129, 3)) for stride in (1, 2, 7, 64)),
        *((5000, 1, stride) for stride in (1, 64)),
        *((2100, 2, stride) for stride in (2, 7)),
    ],
)
def test_an_entry_begins_where_the_spans_have_it(
    backend: Any, count: int, copies: int, stride: int
) -> None:
    lengths = RNG.integers(0, 9, count).astype(np.int32)
    size = count * copies
    starts = np.empty(-(-size // stride) + 1, np.int64)
    backend.epoch_starts(KEY, lengths, copies, stride, starts)
    entries = RNG.permutation(size)
    found = backend.epoch_begins(KEY, lengths, copies, stride, starts, entries, 2)
    position = active().bijection_invert(KEY, size, entries)
    document = np.empty(size, np.int64)
    document[position] = entries % count
    before = np.concatenate(([0], np.cumsum(lengths[document])))
    np.testing.assert_array_equal(found, before[position])
    assert found.dtype == np.int64


def test_entries_that_do_not_exist(backend: Any) -> None:
    if backend.__name__.endswith("_native"):
        lengths, starts = np.array([3], np.int32), np.array([0, 3])
        for wrong in (-1, 1):
            with pytest.raises(InvalidArgument, match="entries"):
                backend.epoch_begins(KEY, lengths, 1, 64, starts, np.array([wrong]))


@for_each("rule", [TRUNCATE, SPLIT, SKIP])
@for_each(("count", "most"), [(300, 0), (300, 3), (9600, 40)])
def test_a_piece_is_in_the_bin_that_has_its_span(
    backend: Any, count: int, most: int, rule: int
) -> None:
    capacity = 30
    lengths = RNG.choice([0, 1, 2, 3, 10, 29, 30, 31, 75], count).astype(np.int32)
    lengths[5000:] = 7  # from 4096 of a length on, its bijection is a network
    fast = active()
    counts = fast.count_pieces(lengths, capacity, rule)
    documents = np.empty(counts[:-1].sum(), np.int32)
    sample_starts = np.empty(-(-count // STRIDE) + 1, np.int64)
    fast.sort_pieces(lengths, capacity, rule, counts, documents, sample_starts)
    layers, runs = fast.pack_pieces(counts, most, 1, True)
    starts = np.concatenate(([0], np.cumsum(counts[:-1])))
    bins = np.arange(runs[-1, 2])
    arrays = (starts, documents, sample_starts, layers, runs)
    document, offset, length, splits = fast.packed_spans(KEY, lengths, rule, 0, *arrays, bins)
    # spans of a length, sorted by document and offset, are its pieces in document order
    order = np.lexsort((offset, document, length))
    places = np.empty(order.size, np.int64)
    places[order] = np.arange(order.size)
    first = np.searchsorted(length[order], np.arange(capacity + 1))
    places -= first[length]
    expected = np.repeat(bins, np.diff(splits))
    some = np.arange(length.size)[:: 1 if count < 1000 else 60]
    found = backend.packed_bins(KEY, starts, layers, runs, length[some], places[some], 2)
    np.testing.assert_array_equal(found, expected[some])
    assert found.dtype == np.int64


def test_pieces_and_arrays_that_do_not_fit(backend: Any) -> None:
    counts = np.array([0, 4, 1, 2])
    layers, runs = backend.pack_pieces(counts, 0, 1, True)
    starts = np.concatenate(([0], np.cumsum(counts[:-1])))
    for length, place in ((1, 4), (3, 2)):
        with pytest.raises(InvalidArgument, match="belong together"):
            backend.packed_bins(KEY, starts, layers, runs, np.array([length]), np.array([place]))
    if backend.__name__.endswith("_native"):
        for layer in (-1, len(layers)):
            other = runs.copy()
            other[-2, 0] = layer  # not that of the piece
            with pytest.raises(InvalidArgument, match="belong together"):
                backend.packed_bins(KEY, starts, layers, other, np.array([3]), np.array([0]))
