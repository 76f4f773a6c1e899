"""The rows of dialect.py and the page made from them."""

from __future__ import annotations

import math
import runpy
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.arithmetic import samples_for_epochs, shuffle_dtype
from megaindex.errors import InvalidArgument
from megaindex.index.frameworks import (
    FRAMEWORK_RULES,
    as_range,
    check_total,
    framework_rules,
    parse_split,
    select_documents,
)

ROOT = Path(__file__).parents[2]


def test_the_most_tokens_of_all_epochs() -> None:
    check_total("c", 2**63 - 1)
    with pytest.raises(InvalidArgument, match="at most 2"):
        check_total("c", 2**63)


def test_the_compatibility_page_is_that_of_the_data() -> None:
    data = runpy.run_path(str(ROOT / "docs/compatibility.py"))
    assert (ROOT / "docs/compatibility.md").read_text() == data["compatibility_page"](), (
        "run: python docs/compatibility.py > docs/compatibility.md"
    )
    for deviation in data["DEVIATIONS"]:
        assert (ROOT / deviation.test).exists(), deviation.test


def test_megatron_requests_are_its_own_expression(megatron_datasets: Any) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        _get_size_per_split_per_dataset,
    )

    row = framework_rules("megatron")
    generator = np.random.default_rng(3)
    for _ in range(300):
        count = int(generator.integers(1, 9))
        weights = generator.dirichlet(np.ones(count)).tolist()
        size = int(generator.integers(1, 10**9))
        theirs = _get_size_per_split_per_dataset(weights, [size], surplus=0.005)
        buffer = row.default_buffer(weighted=True)
        ours = [row.samples_requested(size, w, buffer, count) for w in weights]
        assert ours == [sizes[0] for sizes in theirs]


def test_float_buffers_round_as_the_frameworks_do() -> None:
    # exactly 110, but 100 * 1.1 is 110.00000000000001 in doubles
    assert framework_rules("megatron").samples_requested(100, 1.0, 1.1, 1) == 111
    assert framework_rules("neox").samples_requested(100, 1.0, 1.1, 1) == 111
    assert (
        framework_rules("paddlenlp").samples_requested(10, 0.5, 1.005, 2)
        == math.ceil(5 * 1.005) + 20
    )
    assert framework_rules("paddlenlp").samples_requested(10, 1.0, 1.005, 1) == math.ceil(
        10 * 1.005
    )


@given(
    weights=st.lists(st.floats(0.001, 1000) | st.just(0.0), min_size=1, max_size=3).filter(any),
    num_sequences=st.integers(0, 2**31),
)
def test_megatron_splits_are_its_own(
    megatron_datasets: Any, weights: list[float], num_sequences: int
) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
    )
    from megatron.core.datasets.utils import normalize

    bounds = framework_rules("megatron").split_bounds(",".join(map(repr, weights)), num_sequences)
    vector = normalize(weights + [0.0] * (3 - len(weights)))
    for (begin, end), part in zip(
        bounds, convert_split_vector_to_split_matrix(vector), strict=True
    ):
        if part is None:
            assert begin == end
        else:
            expected = [round(bound * float(num_sequences)) for bound in part]
            assert [begin, end] == expected


def test_neox_splits_take_the_excess_off_every_boundary() -> None:
    # 0.5, 0.25 and 0.25 of 6 round to 3, 2 and 2: one too many, so every boundary moves down by one
    assert framework_rules("neox").split_bounds("2,1,1", 6) == [(0, 2), (2, 4), (4, 6)]
    assert framework_rules("megatron").split_bounds("2,1,1", 6) == [(0, 3), (3, 4), (4, 6)]
    assert framework_rules("neox").split_bounds("969/30/1", 1000) == [
        (0, 969),
        (969, 999),
        (999, 1000),
    ]
    # an empty first part leaves its end before the first sequence, which is refused when it is read
    assert framework_rules("neox").split_bounds("0,1,1", 3) == [(0, -1), (-1, 1), (1, 3)]
    with pytest.raises(InvalidArgument, match="documents must be from 0 to 2"):
        select_documents(3, "c", framework_rules("neox"), split="0,1,1", subset="valid")


@for_each("split", ["", "a,b", "1,2,3,4", "0,0", "-1,2", "nan,1", "inf"])
def test_splits_that_are_none_are_refused(split: str) -> None:
    with pytest.raises(InvalidArgument, match="split must be"):
        parse_split(split)


def test_sample_index_widths() -> None:
    assert framework_rules("megatron").sample_index_dtype(2**31 - 1, 2**40, 8) == "int32"
    assert framework_rules("megatron").sample_index_dtype(2**31, 2**40, 8) == "int64"
    assert framework_rules("paddlenlp").sample_index_dtype(2**31, 2**40, 8) == "int64"
    assert framework_rules("megatron-legacy").sample_index_dtype(1, 10, 8) == "int64"
    samples = 2**30 - 2  # 2 * (samples + 1) is below 2**31 - 1 up to here
    assert framework_rules("neox").sample_index_dtype(10, samples * 8 + 1, 8) == "int32"
    assert framework_rules("neox").sample_index_dtype(10, (samples + 1) * 8 + 1, 8) == "int64"
    # of half a sample more, 2 * (samples + 1) is 2**31 - 1 itself
    assert framework_rules("neox").sample_index_dtype(10, 2 * samples + 2, 2) == "int64"
    assert framework_rules("neox").sample_index_dtype(10, 3 * samples + 2, 3) == "int32"


def test_shuffle_index_widths() -> None:
    assert shuffle_dtype(2**32 - 3) == "uint32"
    assert shuffle_dtype(2**32 - 2) == "int64"  # numpy.iinfo(numpy.uint32).max - 1 samples


def test_unknown_orders_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="order must be one of"):
        framework_rules("random")
    assert set(FRAMEWORK_RULES) == {
        "megatron", "neox", "megatron-legacy", "paddlenlp", "epoch", "window", "packed"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("split", "shares"),
    [
        ("'99,1,0'", [99, 1, 0]),
        ("98;1 1", [98, 1, 1]),
        ("-98,1,1", [98, 1, 1]),
        ("90%", [90, 0, 0]),
    ],
)
def test_megatron_takes_runs_of_digits_and_points(split: str, shares: list[float]) -> None:
    """As parse_and_normalize_split of megatron-core 0.16.1 does; the other orders refuse."""
    assert framework_rules("megatron").shares(split) == shares
    with pytest.raises(InvalidArgument, match="three non-negative numbers"):
        framework_rules("neox").shares(split)


def test_megatron_has_no_exponents() -> None:
    with pytest.raises(InvalidArgument, match="three non-negative numbers"):
        framework_rules("megatron").shares("1e2,1,0")
    assert framework_rules("epoch").shares("1e2,1,0") == [100, 1, 0]


@given(
    epochs=st.fractions(Fraction(1, 9), 4, max_denominator=9),
    tokens=st.integers(1, 200),
    length=st.integers(1, 40),
    extra=st.integers(0, 1),
)
def test_samples_of_epochs_fit_their_tokens(
    epochs: Fraction, tokens: int, length: int, extra: int
) -> None:
    """Of whole and of parts of epochs; none where these hold less than a sample."""

    def most(room: Fraction) -> int:
        return max(n for n in range(801) if n == 0 or n * length + extra <= room)

    assert samples_for_epochs(epochs, tokens, length, extra) == most(epochs * tokens)
    whole = samples_for_epochs(epochs, tokens, length, extra, carry_left_over=False)
    assert whole <= epochs * most(Fraction(tokens)) < whole + 1


@for_each(
    "wrong",
    [-1, 50, 2**31 - 1, 2**31, 2**32 + 1, -(2**32) + 1, 2**63 - 1, -(2**63), np.uint64(2**64 - 1)],
)
def test_documents_that_do_not_exist_are_refused(wrong: Any) -> None:
    """Also those that 32 bits would take for one that exists."""
    with pytest.raises(InvalidArgument, match="documents must be from 0"):
        select_documents(50, "web", framework_rules("megatron"), documents=np.array([wrong]))
    beside = np.array([wrong, 3], np.array(wrong).dtype)
    with pytest.raises(InvalidArgument, match="documents must be from 0"):
        select_documents(50, "web", framework_rules("megatron"), documents=beside)


def test_only_consecutive_ids_are_a_range() -> None:
    """Of any number, also where the first and the last are those of a range."""
    ids = np.arange(5, 100_005)
    assert as_range(ids) == range(5, 100_005)
    for damaged in (np.roll(ids[1:-1], 40_000), np.roll(ids[1:-1], 1), ids[1:-1][::-1]):
        moved = np.concatenate((ids[:1], damaged, ids[-1:]))
        assert as_range(moved) is moved
    blocks = np.concatenate([np.arange(32_768) + at for at in (0, 7, 65_536)])
    assert as_range(blocks) is blocks
