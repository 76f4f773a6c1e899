"""Requests, sizes and draws of each framework's blend, by the framework's own expressions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.index.blend import (
    Blend,
    divisor_weights,
    draws_by,
    exact_values,
    normalized,
    request_weights,
)
from megaindex.index.draws import BlendDraws, ExhaustiveDraws, SingleDraws
from megaindex.index.frameworks import OWN_PYTHON_SUM, framework_rules

BUFFERS = (1, 1.0, 1.005, 1 + 0.005, 1.3)


def blends(count: int) -> Iterator[tuple[list[float], int, float]]:
    """Weights of very different sizes, samples, and a buffer."""
    rng = np.random.default_rng(41)
    for k in range(count):
        sources = int(rng.integers(2, 9))
        weights: list[float] = (rng.random(sources) * 10.0 ** rng.integers(-9, 9, sources)).tolist()
        if k % 3 == 0:
            weights = rng.integers(1, 10, sources).tolist()
        elif k % 3 == 1:
            weights = rng.random(sources).round(2).clip(0.01).tolist()
        yield weights, int(10.0 ** rng.uniform(0, 12)), BUFFERS[k % len(BUFFERS)]


def assert_draws(ours: BlendDraws, weights: Any, helpers: Any, size: int = 200) -> None:
    """Compare draws with those of Megatron's function, by weights normalised by the framework."""
    which, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(which, samples, weights, len(weights), size, False)
    arrays = ours.arrays(size)
    np.testing.assert_array_equal(arrays.dataset_index, which)
    np.testing.assert_array_equal(arrays.dataset_sample_index, samples)
    np.testing.assert_array_equal(ours.counts(size), np.bincount(which, minlength=len(weights)))


@pytest.mark.slow
def test_megatrons_expressions(megatron_datasets: Any, megatron_helpers: Any) -> None:
    from megatron.core.datasets import blended_megatron_dataset_builder as builder
    from megatron.core.datasets.utils import normalize

    row = framework_rules("megatron")
    for weights, samples, buffer in blends(3000):
        once, twice = normalize(weights), normalize(normalize(weights))
        blend = Blend(row=row, weights=weights, buffer=buffer)
        asked = builder._get_size_per_split_per_dataset(once, [samples], buffer - 1)
        plain = builder._get_size_per_split_per_dataset(once, [samples], 0.0)
        assert blend.shares == once
        assert blend.draws.values.tolist() == twice
        # as the builder is given 0.005 and adds 1
        exact = replace(blend, buffer=1 + (buffer - 1))
        assert exact.requests(samples) == [split for (split,) in asked]
        assert blend.size(samples) == sum(split for (split,) in plain)
        under_megatron = Blend(row=row, weights=once, buffer=buffer, explicit=False)
        assert under_megatron.shares == once
        assert under_megatron.draws.values.tolist() == twice
        assert under_megatron.requests(samples) == blend.requests(samples)
    assert_draws(blend.draws, twice, megatron_helpers)


def add(weights: Sequence[float]) -> float:
    total: float = 0
    for weight in weights:
        total = total + weight
    return total


@pytest.mark.parametrize(("rule", "add_all"), [("plain", add), (OWN_PYTHON_SUM, sum)])
def test_neox_expressions(rule: Any, add_all: Any, megatron_helpers: Any) -> None:
    """`get_normalized_weights_and_num_samples` and ``BlendableDataset``."""
    row = replace(framework_rules("neox"), python_sum=rule)
    for weights, samples, buffer in blends(3000):
        total = add_all(weights)
        divided = [weight / total for weight in weights]
        once = np.array(divided, dtype=np.float64)
        once /= np.sum(once)
        blend = Blend(row=row, weights=weights, buffer=buffer)
        assert blend.shares == divided
        assert blend.draws.values.tobytes() == once.tobytes()
        asked = [math.ceil(samples * weight * buffer) for weight in divided]
        assert blend.requests(samples) == asked
        assert blend.size(samples) == samples
    assert_draws(blend.draws, once, megatron_helpers)


@pytest.mark.parametrize("order", ["megatron-legacy", "paddlenlp"])
def test_expressions_of_loops(order: str) -> None:
    """`get_datasets_weights_and_num_samples` of Megatron-DeepSpeed and of PaddleNLP."""
    row, surplus = framework_rules(order), 20 if order == "paddlenlp" else 0
    for weights, samples, buffer in blends(3000):
        divided = [weight / add(weights) for weight in weights]
        blend = Blend(row=row, weights=weights, buffer=buffer)
        assert blend.shares == divided
        assert blend.requests(samples) == [
            math.ceil(samples * weight * buffer) + surplus for weight in divided
        ]


@pytest.mark.parametrize("order", ["megatron", "neox", "megatron-legacy", "paddlenlp", "epoch"])
def test_exact_requests_are_the_draws(order: str) -> None:
    """A dataset of none has the length -1 in GPT-NeoX, which asks for one sample."""
    least = int(order == "neox")
    blend = Blend(row=framework_rules(order), weights=[1.0, 0.1, 2.0], buffer="exact")
    counts = blend.draws.counts(2)
    assert counts is not None
    assert counts.tolist() == [1, 0, 1]
    assert blend.requests(2) == [1, least, 1]
    assert blend.size(2) == 2
    assert blend.longest([1, 0, 1]) == blend.draws.longest([1, 0, 1])


def test_requests_are_unknown_where_draws_are_not_counted() -> None:
    row = framework_rules("megatron")
    uncounted = Blend(row=row, weights=[1, 2], buffer="exact", counting="bounds")
    assert uncounted.requests(9) is None
    assert Blend(row=row, weights=[1, 2], counting="bounds").requests(9) == [3, 6]


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    st.sampled_from(BUFFERS),
    st.sampled_from(["megatron", "neox", "megatron-legacy", "paddlenlp"]),
    st.data(),
)
def test_longest_is_the_last_within_all_limits(
    weights: list[float], buffer: float, order: str, data: st.DataObject
) -> None:
    limits = data.draw(st.lists(st.integers(0, 90), min_size=len(weights), max_size=len(weights)))
    blend = Blend(row=framework_rules(order), weights=weights, buffer=buffer)
    longest, exact = blend.longest(limits)
    assert exact

    def fits(samples: int) -> bool:
        asked = blend.requests(samples)
        assert asked is not None
        return all(count <= limit for count, limit in zip(asked, limits, strict=True))

    assert fits(longest) or longest == 0
    assert not fits(longest + 1)


@for_each(
    ("order", "weights", "expected", "explicit"),
    [
        ("megatron", None, [3, 5], False),
        ("megatron", [1, 2], [1, 2], True),
        ("neox", None, [1.0, 1.0], True),
        ("paddlenlp", None, [1.0, 1.0], True),
        ("epoch", None, [3, 5], True),
        ("window", [1, 2], [1, 2], True),
    ],
)
def test_weights_of_sources_without_any(
    order: str, weights: Any, expected: Sequence[float], explicit: bool
) -> None:
    blend = Blend.of_sources(weights, lambda: [3, 5], 2, framework_rules(order))
    assert blend.weights == expected
    assert blend.explicit == explicit


def test_sizes_are_normalised_once() -> None:
    blend = Blend.of_sources(None, lambda: [3, 5], 2, framework_rules("megatron"))
    assert blend.draws.values.tolist() == [0.375, 0.625]


def test_a_reshuffled_blend_has_each_sample_once() -> None:
    row = replace(framework_rules("neox"), train_epochs="reshuffled")
    blend = Blend.of_sources(None, lambda: [3, 5], 2, row)
    assert isinstance(blend.draws, ExhaustiveDraws)
    counts = blend.draws.counts(8)
    assert counts is not None
    assert counts.tolist() == [3, 5]


@pytest.mark.parametrize("weights", [[7], [0.1], [0]])
def test_one_source_is_all_of_the_blend(weights: list[float]) -> None:
    blend = Blend(row=framework_rules("neox"), weights=weights, buffer=1.005)
    assert blend.shares == [1.0]
    assert blend.draws.values.tolist() == [1.0]
    assert isinstance(blend.counted, SingleDraws)
    assert blend.requests(100) == [101]


@for_each("weights", [[0, 0], [1, -1], [1, math.nan], [1, math.inf], [-1, -2]])
@for_each("order", ["megatron", "neox", "paddlenlp"])
def test_weights_without_a_sum_are_refused(order: str, weights: list[float]) -> None:
    with pytest.raises(InvalidArgument, match="weights must be finite"):
        Blend(row=framework_rules(order), weights=weights).requests(10)
    with pytest.raises(InvalidArgument, match="weights must be finite"):
        normalized(weights)


def test_loops_and_sums_differ_in_the_last_bit() -> None:
    """Ten tenths: a plain loop gives 0.9999999999999999, a compensated sum 1.0."""
    tenths = [0.1] * 10
    for order in ("megatron-legacy", "paddlenlp"):
        assert request_weights(tenths, framework_rules(order)) == [0.1 / 0.9999999999999999] * 10
    neox = framework_rules("neox")
    assert request_weights(tenths, neox) == [0.1 / sum(tenths)] * 10
    assert request_weights(tenths, replace(neox, python_sum="compensated")) == tenths


def test_divisor_weights_are_exact_where_they_can_be() -> None:
    assert divisor_weights([0.5, 0.25, 0.25]) == [2, 1, 1]
    assert divisor_weights([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert divisor_weights([1032175, 3]) == [1032175, 3]
    assert divisor_weights([2**52 - 1, 1]) == [2**52 - 1, 1]
    assert divisor_weights([2**52, 1]) == [2**52 - 1, 1]  # rounded
    assert divisor_weights([Fraction(1, 3), Fraction(1, 2)]) == [2, 3]
    wild = divisor_weights([0.123456789012345678, 1e-9, 7.7e12])
    assert max(wild) < 2**53
    assert min(wild) >= 1


@pytest.mark.parametrize(
    "blend",
    [
        Blend(row=framework_rules("megatron"), weights=[0.1, 0.7, 1 / 3]),
        Blend(row=framework_rules("epoch"), weights=[0.1, 0.7, 1 / 3]),
    ],
)
def test_draws_are_those_of_their_values_in_json(blend: Blend) -> None:
    for draws in (blend.draws, ExhaustiveDraws(np.array([30, 50, 20]))):
        again = draws_by(draws.rule, exact_values(draws.values))
        assert again.values.dtype == draws.values.dtype
        assert again.values.tobytes() == draws.values.tobytes()
        for ours, theirs in zip(again.arrays(100), draws.arrays(100), strict=True):
            np.testing.assert_array_equal(ours, theirs)
