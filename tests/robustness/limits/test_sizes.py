"""Sizes far above 2**31: counts that are exact, and samples that are where they should be."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megaindex.arithmetic import (
    epochs_for,
    final_epoch,
    samples_for_epochs,
    samples_in,
    shuffle_dtype,
    tokens_for,
)
from megaindex.index.frameworks import LeftOver, framework_rules
from megaindex.index.orders.epoch import EpochIndex

# Tokens of an epoch, tokens of a sample, samples: around every power of two that a type ends at.
POWERS = st.sampled_from([2**31, 2**32, 2**33, 2**48, 2**53])
LIMITS = st.one_of(
    st.builds(int.__add__, POWERS, st.integers(-3, 3)),
    st.integers(2**31, 2**55),
)
LENGTHS = st.one_of(st.integers(1, 10), st.integers(2000, 5000), st.just(2**31 - 1))


@given(tokens=LIMITS, length=LENGTHS, wanted=LIMITS, extra=st.sampled_from([0, 1]))
def test_epochs_are_as_many_as_are_needed(
    tokens: int, length: int, wanted: int, extra: int
) -> None:
    """Against the definition: the least number whose tokens hold the samples."""
    epochs = epochs_for(wanted, tokens, length, extra)
    held = samples_in(epochs * tokens, length, extra)
    assert held >= wanted
    assert epochs == 1 or samples_in((epochs - 1) * tokens, length, extra) < wanted
    assert tokens_for(held, length, extra) <= epochs * tokens < tokens_for(held + 1, length, extra)


@given(
    tokens=LIMITS,
    length=LENGTHS,
    epochs=st.fractions(Fraction(1, 100), 100, max_denominator=1000),
)
def test_fractions_of_epochs_are_exact(tokens: int, length: int, epochs: Fraction) -> None:
    assume(epochs * tokens > length)
    samples = samples_for_epochs(epochs, tokens, length)
    assert tokens_for(samples, length) <= epochs * tokens < tokens_for(samples + 1, length)


@given(tokens=LIMITS, length=LENGTHS, epochs=st.integers(2, 1000), data=st.data())
def test_the_last_epoch_of_many_tokens(
    tokens: int, length: int, epochs: int, data: st.DataObject
) -> None:
    before = samples_in((epochs - 1) * tokens, length)
    most = samples_in(epochs * tokens, length)
    assume(most > before)
    wanted = data.draw(st.integers(before + 1, most))
    final = final_epoch(wanted, epochs, tokens, length)
    assert final.samples_before + final.samples_from == wanted
    # Megatron's own expression; doubles hold these counts exactly below 2**53
    per_epoch = samples_in(tokens, length)
    assume(per_epoch < 2**53)
    assert final.apart == (wanted - before < int(0.80 * per_epoch))


def test_types_of_arrays_change_where_the_frameworks_change_them() -> None:
    assert [shuffle_dtype(2**32 - k) for k in (3, 2, 1)] == ["uint32", "int64", "int64"]
    megatron = framework_rules("megatron").sample_index_dtype
    assert megatron(2**31 - 1, 2**40, 2048) == "int32"
    assert megatron(2**31, 2**40, 2048) == "int64"


def lengths_of(tokens: int) -> np.ndarray:
    """Documents from none to the longest there is; nothing but lengths is ever read."""
    longest = 2**31 - 1
    full, rest = divmod(tokens, longest)
    return np.array([0, longest, 0] * full + [rest, 1, 0, 1], np.int32)


def virtual(length: int, left_over: LeftOver) -> EpochIndex:
    """5 trillion tokens, 16,384 epochs."""
    lengths = lengths_of(5 * 2**40)
    return EpochIndex(
        sequence_lengths=lengths, documents=range(len(lengths)), sequence_length=length, seed=7,
        tokens_per_epoch=int(lengths.astype(np.int64).sum()), source_name="virtual",
        num_epochs=2**14, left_over=left_over,
    )  # fmt: skip


@pytest.mark.parametrize("left_over", ["drop", "carry"])
def test_samples_of_trillions_of_tokens_cover_them_once(left_over: LeftOver) -> None:
    """All samples of a far epoch: no token twice, but for labels that are inputs as well."""
    length = 2**27 + 1
    index = virtual(length, left_over)
    block = 2**14 - 2
    first, stop = index.samples_before(block), index.samples_before(block + 1)
    spans = index.locate(np.arange(first, stop))
    assert (np.add.reduceat(spans.length, spans.row_splits[:-1]) == length + 1).all()
    assert (spans.offset + spans.length <= index.sequence_lengths[spans.document]).all()
    row = np.repeat(np.arange(stop - first), np.diff(spans.row_splits))
    order = np.lexsort((spans.offset, spans.document))
    document, begin = spans.document[order], spans.offset[order]
    end = begin + spans.length[order]
    overlap = (document[1:] == document[:-1]) & (begin[1:] < end[:-1] - 1)
    rows = [set(row[order[k : k + 2]].tolist()) for k in np.flatnonzero(overlap)]
    if left_over == "drop":
        assert not rows
    elif rows:  # with the one sample that begins in the epoch before
        assert len(set.intersection(*rows)) >= 1


@pytest.mark.parametrize("left_over", ["drop", "carry"])
def test_samples_with_numbers_above_two_to_the_36(left_over: LeftOver) -> None:
    length = 2**20
    index = virtual(length, left_over)
    assert index.num_samples > 2**36
    picks = np.random.default_rng(1).integers(2**36, index.num_samples, 200)
    for sample in picks[:20].tolist():
        spans = index.locate([sample, sample])  # of a row alone, and of one in company
        together = index.locate(np.sort(picks[picks >= sample][:5]))
        assert together.row_splits.size > 1
        assert spans.length.sum() == 2 * (length + 1)
        assert (spans.offset + spans.length <= index.sequence_lengths[spans.document]).all()
        assert (spans.offset >= 0).all()


def test_sample_numbers_above_two_to_the_31_repeat_nothing() -> None:
    """10 tokens an epoch, 2**31 epochs, 3 samples each: the last epochs against the definition."""
    lengths = np.array([3, 0, 6, 1], np.int32)
    index = EpochIndex(
        sequence_lengths=lengths, documents=range(4), tokens_per_epoch=10, sequence_length=3,
        seed=1, source_name="small", num_epochs=2**31 + 2,
    )  # fmt: skip
    assert index.num_samples == 3 * (2**31 + 2)
    for block in (2**31 - 1, 2**31, 2**31 + 1):
        spans = index.locate(np.arange(3 * block, 3 * block + 3))
        tokens = [
            (document, offset + k)
            for document, offset, length in zip(*list(spans)[1:], strict=True)
            for k in range(length)
        ]
        assert len(tokens) == 12  # of 10, two of which are labels of one and inputs of the next
        assert len(set(tokens)) == 10


def test_totals_that_64_bits_cannot_hold_are_refused(tmp_path: Path) -> None:
    lengths = np.full(4, 2**31 - 1, np.int32)
    settings = {
        "sequence_lengths": lengths, "documents": range(4), "tokens_per_epoch": 4 * (2**31 - 1),
        "sequence_length": 3, "seed": 1, "source_name": "x",
    }  # fmt: skip
    EpochIndex(num_epochs=2**29, **settings)
    with pytest.raises(ValueError, match="cannot be counted in 64 bits"):
        EpochIndex(num_epochs=2**31, **settings)
