"""`PackedOrder(align=n)`: documents that begin at multiples of n tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import write_corpus

from megaindex import IndexedDataset, PackedOrder, build_index
from megaindex.errors import InvalidArgument
from megaindex.index.orders.packed import Cutting
from megaindex.index.receipts import Receipt, fingerprint_keys
from megaindex.index.spans import iterate_spans, locate_range

RULES = ("split", "truncate", "skip")


def rows_of(index: Any) -> list[list[tuple[int, int, int, int]]]:
    """Place, document, offset and length of the spans of each sample."""
    spans = index.locate(np.arange(index.num_samples))
    begins, _ = spans.bounds_in_samples()
    table = np.column_stack((begins, spans.document, spans.offset, spans.length)).tolist()
    bounds = spans.row_splits.tolist()
    return [list(map(tuple, table[a:b])) for a, b in itertools.pairwise(bounds)]


def expected_inputs(lengths: list[int], size: int, rule: str) -> list[int]:
    if rule == "truncate":
        return [min(length, size) for length in lengths]
    if rule == "skip":
        return [length if length <= size else 0 for length in lengths]
    return lengths


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=60),
    st.sampled_from([2, 3, 4, 8]),
    st.integers(1, 6),
    st.sampled_from(RULES),
    st.integers(0, 1),
)
def test_every_token_once_an_epoch_at_an_aligned_place(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    align: int,
    units: int,
    rule: str,
    extra: int,
) -> None:
    size = align * units
    inputs = expected_inputs(lengths, size, rule)
    prefix = tmp_path_factory.mktemp("aligned") / "c"
    write_corpus(prefix, lengths)
    order = PackedOrder(align=align, long_documents=rule, max_documents=50)  # type: ignore[arg-type]
    if not any(inputs):
        with pytest.raises(InvalidArgument, match="no document gives a sample"):
            build_index(prefix, sequence_length=size, order=order, epochs=1)
        return
    index = build_index(
        prefix, sequence_length=size, order=order, epochs=2, seed=3, add_extra_token=extra
    )
    seen = [np.zeros(length, int) for length in lengths]
    per_epoch = index.num_samples // 2
    for number, row in enumerate(rows_of(index)):
        end = 0
        for place, document, offset, length in row:
            assert place % align == 0
            assert place >= end
            end = place + length
            within = min(length, size - place)
            seen[document][offset : offset + within] += 1
            goes_on = offset + size < lengths[document]
            assert length - within == (extra if within == size and goes_on else 0)
        assert end - size <= extra
        if number == per_epoch - 1:
            assert [part.sum() for part in seen] == inputs
    assert [int(part.sum()) for part in seen] == [2 * n for n in inputs]
    packing = index.packing
    assert packing.input_tokens == sum(inputs) == index.count_inputs(0, per_epoch)
    assert packing.padding == per_epoch * size - sum(inputs)
    lengths_read = np.array(lengths, np.int32)
    known = Cutting(sequence_length=size, long_documents=rule, align=align)  # type: ignore[arg-type]
    planned = known.pack_lengths(lengths_read, 50)
    values, times = np.unique(lengths_read, return_counts=True)
    by_histogram = known.pack_histogram(values.astype(np.int64), times, 50)
    for other in (planned, by_histogram):
        assert (other.num_samples, other.padding) == (packing.num_samples, packing.padding)
        assert np.array_equal(other.counts, packing.counts)
    check_served_tokens(index, len(lengths))


def check_served_tokens(index: Any, documents: int) -> None:
    """The inverse of `locate`: where each document is input."""
    served = index.served_tokens(np.arange(documents))
    table = np.column_stack(served[:4]).tolist()
    size = index.sequence_length
    expected = [
        [number, document, offset, min(length, size - place)]
        for number, row in enumerate(rows_of(index))
        for place, document, offset, length in row
    ]
    assert sorted(map(tuple, table)) == sorted(map(tuple, expected))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("aligned") / "c"
    write_corpus(path, np.random.default_rng(1).integers(1, 70, 300).tolist())
    return path


def test_align_1_is_the_order_as_it_was(prefix: Path) -> None:
    plain = build_index(prefix, sequence_length=64, order="packed", epochs=2)
    one = build_index(prefix, sequence_length=64, order=PackedOrder(align=1), epochs=2)
    assert rows_of(plain) == rows_of(one)
    assert plain.locate([0, 1]).padding is None


def test_lengths_of_whole_units_are_packed_as_without(tmp_path: Path) -> None:
    """Padding is none, and the spans of each epoch are the same."""
    write_corpus(tmp_path / "c", (8 * np.random.default_rng(2).integers(1, 20, 200)).tolist())
    plain, aligned = (
        build_index(tmp_path / "c", sequence_length=64, order=PackedOrder(align=a), epochs=1)
        for a in (1, 8)
    )
    assert aligned.packing.padding == plain.packing.padding
    spans = aligned.locate(np.arange(aligned.num_samples))
    assert not spans.padding.any()


def test_locate_iterates_and_joins_alike(prefix: Path) -> None:
    index = build_index(prefix, sequence_length=64, order=PackedOrder(align=8), epochs=3)
    ids = np.arange(index.num_samples)
    whole = index.locate(ids)
    ranged = locate_range(index, 0, index.num_samples)
    for name in ("document", "offset", "length", "row_splits", "padding"):
        assert np.array_equal(getattr(whole, name), getattr(ranged, name))
    keys = fingerprint_keys(["0" * 32])
    total = Receipt()
    for positions, spans in iterate_spans(index, 0, index.num_samples):
        total += Receipt.of(positions, spans, keys)
    assert total == Receipt.of(ids, whole, keys)
    one = Receipt.of(ids[:1], index.locate([0]), keys)
    assert one == Receipt.of(ids[:1], index.locate([0]), keys)


def test_the_receipt_depends_on_the_places(tmp_path: Path) -> None:
    """Two documents of 3 tokens in one sample of 8, whose second begins at 3 or 4."""
    write_corpus(tmp_path / "c", [3, 3])
    keys, at = fingerprint_keys(["0" * 32]), np.zeros(1, np.int64)
    for align, second in ((2, 4), (4, 4)):
        index = build_index(
            tmp_path / "c", sequence_length=8, order=PackedOrder(align=align), epochs=1
        )
        spans = index.locate([0])
        assert spans.bounds_in_samples()[0].tolist() == [0, second]
        without = Receipt.of(at, replace(spans, padding=None), keys)
        assert Receipt.of(at, spans, keys) != without
        unmoved = replace(spans, padding=np.zeros(2, np.int64))
        assert Receipt.of(at, unmoved, keys) == without


@pytest.mark.parametrize(("align", "size"), [(0, 8), (3, 8), (16, 8), (-2, 8)])
def test_the_sequence_length_is_a_multiple(prefix: Path, align: int, size: int) -> None:
    with pytest.raises(InvalidArgument, match="align must be"):
        build_index(prefix, sequence_length=size, order=PackedOrder(align=align), epochs=1)


def test_the_largest_unit_is_the_sample(prefix: Path) -> None:
    """Every piece has a sample of its own."""
    index = build_index(prefix, sequence_length=64, order=PackedOrder(align=64), epochs=1)
    assert set(map(len, rows_of(index))) == {1}
    lengths = IndexedDataset(str(prefix)).sequence_lengths
    assert index.num_samples == int((-(-lengths.astype(int) // 64)).sum())


def test_cached_arrays_of_another_unit_are_not_taken(prefix: Path, tmp_path: Path) -> None:
    made = [
        build_index(
            prefix, sequence_length=64, order=PackedOrder(align=a), epochs=1, cache_dir=tmp_path
        )
        for a in (1, 4, 8, 4)
    ]
    fresh = build_index(prefix, sequence_length=64, order=PackedOrder(align=4), epochs=1)
    assert rows_of(made[1]) == rows_of(made[3]) == rows_of(fresh)
    assert rows_of(made[1]) != rows_of(made[2])
