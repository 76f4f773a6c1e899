"""Cost models: constants of published shapes, rows counted by hand, bad input."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex import PackedOrder, build_index
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.balance import (
    PRESETS,
    CostModel,
    balanced_rows,
    check_sum,
    lost_time,
    rank_squares,
    squared_lengths,
)

GPT3 = {
    "hidden_size": 12_288, "num_layers": 96, "num_attention_heads": 96,
    "ffn_hidden_size": 4 * 12_288, "vocab_size": 50_257, "gated": False,
}  # fmt: skip
PALM = {
    "hidden_size": 18_432, "num_layers": 118, "num_attention_heads": 48, "kv_channels": 256,
    "num_query_groups": 1, "ffn_hidden_size": 4 * 18_432, "vocab_size": 256_000, "causal": False,
}  # fmt: skip
LLAMA3_405B = {
    "hidden_size": 16_384, "num_layers": 126, "num_attention_heads": 128, "num_query_groups": 8,
    "ffn_hidden_size": 53_248, "vocab_size": 128_256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "tokens", "published"),
    [
        # Brown et al. 2020 (GPT-3), table D.1: total train compute of 300 billion tokens
        (GPT3, 300e9, 3.14e23),
        # Chowdhery et al. 2022 (PaLM), section 8 and table 2: 780 billion tokens
        (PALM, 780e9, 2.5272e24),
        # Dubey et al. 2024 (Llama 3), sections 1 and 3.2: 15.6 trillion tokens
        (LLAMA3_405B, 15.6e12, 3.8e25),
    ],
)
def test_published_training_compute(shape: Any, tokens: float, published: float) -> None:
    """These counts are of the weights alone, without attention."""
    assert CostModel.from_shape(**shape).linear * tokens == pytest.approx(published, rel=0.006)


@pytest.mark.parametrize(
    ("name", "parameters", "embedding", "norms"),
    [
        # parameters of the published checkpoints, which have an embedding of its own and norms
        ("llama3-8b", 8_030_261_248, 128_256 * 4096, 65 * 4096),
        ("llama3-70b", 70_553_706_496, 128_256 * 8192, 161 * 8192),
    ],
)
def test_six_operations_for_each_published_weight(
    name: str, parameters: int, embedding: int, norms: int
) -> None:
    assert CostModel.preset(name).linear == 6 * (parameters - embedding - norms)


def test_active_weights_of_mixtral() -> None:
    """Jiang et al. 2024 (Mixtral), section 2: a token uses 12.9 of 46.7 billion parameters."""
    used = CostModel.preset("mixtral-8x7b").linear / 6 + 32_000 * 4096
    assert round(used / 1e9, 1) == 12.9
    all_experts = CostModel.from_shape(**{**PRESETS["mixtral-8x7b"], "moe_router_topk": 8})
    assert round((all_experts.linear / 6 + 32_000 * 4096) / 1e9, 1) == 46.7


@pytest.mark.parametrize("length", [1, 2048, 2**20])
def test_megatrons_formula(length: int) -> None:
    """Narayanan et al. 2021, section 5.1 and appendix, without recomputation: 72 B s l h²
    (1 + s / 6h + V / 12lh), with full attention."""
    h, layers, vocabulary = 12_288, 96, 51_200
    cost = CostModel.from_shape(**{**GPT3, "vocab_size": vocabulary, "causal": False})
    theirs = 72 * length * layers * h**2 * (
        1 + Fraction(length, 6 * h) + Fraction(vocabulary, 12 * layers * h)
    )  # fmt: skip
    assert cost.linear * length + cost.attention * length**2 == theirs


@for_each(
    ("name", "length", "counted"),
    [
        ("llama3-8b", 8192, 421_645_529_382_912),
        ("llama3-70b", 8192, 3_680_031_058_427_904),
        ("mixtral-8x7b", 8192, 679_343_567_142_912),
        ("llama3-8b", 131_072, 1.941270242210611e16),
        ("llama3-70b", 131_072, 1.2221236669474406e17),
        ("mixtral-8x7b", 131_072, 2.353587102626611e16),
    ],
)
def test_megatrons_own_count(name: str, length: int, counted: float) -> None:
    """num_floating_point_operations of Megatron-LM main (d98e8a64), called with the arguments of
    these shapes and a batch of one row of one document; it leaves out the router of experts."""
    cost, shape = CostModel.preset(name), PRESETS[name]
    router = 6 * shape["num_layers"] * shape["hidden_size"] * shape.get("num_experts", 0)
    assert float((cost.linear - router) * length + cost.attention * length**2) == counted


def test_palms_attention() -> None:
    """Chowdhery et al. 2022, appendix B: 6 N + 12 L H Q T operations a token."""
    assert CostModel.from_shape(**PALM).attention == 12 * 118 * 48 * 256
    assert CostModel.from_shape(**{**PALM, "causal": True}).attention == 6 * 118 * 48 * 256
    # the parameters of table 1, whose embedding is the output matrix too
    assert round(CostModel.from_shape(**PALM).linear / 6 / 1e9, 2) == 540.35


def test_constants_of_the_presets() -> None:
    """As docs/balance.md prints them."""
    assert {name: CostModel.preset(name).to_dict() for name in PRESETS} == {
        "llama3-8b": {"linear": 45_027_950_592, "attention": 786_432},
        "llama3-70b": {"linear": 417_010_286_592, "attention": 3_932_160},
        "mixtral-8x7b": {"linear": 76_491_522_048, "attention": 786_432},
    }
    assert CostModel.preset("llama3-8b").crossover == 57_256
    assert CostModel(linear=1, attention=0).crossover == math.inf


def test_squared_lengths_of_a_corpus(tmp_path: Path, backend: Any) -> None:
    """Documents of 3, 5, 1 and 9 tokens in samples of 6 tokens and one for the label."""
    assert backend
    prefix = write_corpus(tmp_path / "corpus", [3, 5, 1, 9])
    index = megaindex.build_index(prefix, sequence_length=6)
    spans = index.locate(np.arange(index.num_samples))
    expected = []
    for first, stop in zip(spans.row_splits[:-1], spans.row_splits[1:], strict=True):
        lengths = spans.length[first:stop].tolist()
        lengths[-1] -= 1  # the label
        expected.append(sum(n**2 for n in lengths))
    assert squared_lengths(index, np.arange(index.num_samples)).tolist() == expected
    assert squared_lengths(index, 1).tolist() == expected[1:2]


def test_work_of_rows() -> None:
    cost = CostModel(linear=10, attention=0.5)
    assert cost.row_work([0, 4, 64], 8).tolist() == [80, 82, 112]


def test_lost_time() -> None:
    assert lost_time(np.array([[3.0, 1.0], [2.0, 2.0]])) == pytest.approx(1 - 8 / 10)
    assert lost_time(np.array([[5.0, 5.0]])) == 0
    assert lost_time(np.empty((0, 4))) == 0


def test_a_round_in_part_served_by_other_ranks() -> None:
    """4 of 12 rows were served on two ranks; four ranks go on."""
    squares = np.arange(12)
    rows = balanced_rows(squares, rows=12, ranks=4, micro_batch_size=1, served=4, rows_served=4)
    assert sorted(rows.ravel().tolist()) == list(range(8))
    assert sorted(rows[0].ravel().tolist()) == [4, 5, 6, 7]


@for_each(
    "constants",
    [
        {"linear": -1, "attention": 1},
        {"linear": 1, "attention": -0.5},
        {"linear": math.nan, "attention": 1},
        {"linear": 1, "attention": math.inf},
        {"linear": 0, "attention": 0},
        {"linear": 0.0, "attention": 0.0},
        {"linear": math.nextafter(1e200, math.inf), "attention": 1},
        {"linear": 10**400, "attention": 1},
        {"linear": "1", "attention": 1},
        {"linear": None, "attention": 1},
    ],
)
def test_bad_constants(constants: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="linear|attention"):
        CostModel(**constants)


def test_the_largest_constants_and_stored_ones() -> None:
    largest = CostModel(linear=1e200, attention=1e200)
    assert CostModel.from_dict(largest.to_dict()) == largest
    assert CostModel.from_dict({"linear": 0, "attention": 1}).linear == 0
    for linear in (-1, math.nextafter(1e200, math.inf)):
        with pytest.raises(FormatError, match="linear must be a number from 0"):
            CostModel.from_dict({"linear": linear, "attention": 1})


@for_each(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be from 1"),
        ({"hidden_size": 4097}, "multiple of num_attention_heads"),
        ({"num_layers": 1.5}, "num_layers must be an integer"),
        ({"num_attention_heads": -2}, "num_attention_heads must be"),
        ({"num_query_groups": 5}, "multiple of num_query_groups"),
        ({"vocab_size": 2**31}, "vocab_size must be"),
        ({"ffn_hidden_size": "8"}, "ffn_hidden_size must be an integer"),
        ({"gated": 1}, "gated must be True or False"),
        ({"causal": None}, "causal must be True or False"),
        ({"num_experts": 8}, "must be given together"),
        ({"num_experts": 8, "moe_router_topk": 9}, "moe_router_topk must be from 1 to 8"),
        ({"kv_channels": 0}, "kv_channels must be"),
    ],
)
def test_bad_shapes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        CostModel.from_shape(**{**PRESETS["llama3-8b"], **change})


def test_text_forms() -> None:
    assert CostModel.parse("llama3-70b") == CostModel.preset("llama3-70b")
    assert CostModel.parse("45e9:786432") == CostModel(linear=45e9, attention=786_432)
    for text in ("llama", "", "1:", ":2", "1:x", "1:2:3", "-1:2", "nan:1"):
        with pytest.raises(InvalidArgument, match=r"llama3-8b|finite|>= 0"):
            CostModel.parse(text)
    with pytest.raises(InvalidArgument):
        CostModel.preset(["llama3-8b"])  # type: ignore[arg-type]


def test_stored_constants() -> None:
    for cost in (CostModel.preset("llama3-8b"), CostModel(linear=0.1, attention=1e-9)):
        assert CostModel.from_dict(cost.to_dict()) == cost
    with pytest.raises(FormatError):
        CostModel.from_dict({"linear": 1})


def test_sums_of_squares_that_do_not_fit() -> None:
    check_sum(2**22, 2**20)
    check_sum((2**63 - 1) // 49, 7)  # exactly 2**63 - 1
    with pytest.raises(InvalidArgument, match=r"less than 2\*\*63"):
        check_sum(2**23, 2**20)


def test_a_part_of_a_round_that_other_ranks_served_counts() -> None:
    """Four of eight ranks have the largest samples, and get the smallest of the next round."""
    squares = np.array([100, 90, 80, 70, 8, 7, 6, 5, 4, 3, 2, 1])
    rows = balanced_rows(squares, rows=12, ranks=8, micro_batch_size=1, served=4, rows_served=4)
    assert rows.tolist() == [[[11], [10], [9], [8], [4], [5], [6], [7]]]


def test_numbers_of_numpy_become_plain() -> None:
    cost = CostModel(linear=np.int64(3), attention=np.float32(0.5))
    assert type(cost.linear) is int
    assert type(cost.attention) is float


def test_rows_of_whole_documents(tmp_path: Path) -> None:
    """Order packed: documents fill a row in part, and one that goes on reads one more token."""
    lengths = np.random.default_rng(5).integers(1, 40, 60)
    dataset = write_corpus(tmp_path / "corpus", lengths)
    index = megaindex.build_index(dataset, sequence_length=16, order="packed")
    squares = squared_lengths(index, np.arange(index.num_samples))
    expected = []
    for sample in range(index.num_samples):
        inputs = np.minimum(index.locate([sample]).length, 16)  # of one document, or all shorter
        assert inputs.sum() <= 16
        expected.append(int((inputs**2).sum()))
    assert squares.tolist() == expected
    assert squares.max() == 16**2  # a row of one document
    assert any(index.locate([k]).length.sum() < 16 for k in range(index.num_samples))  # padding


def test_rows_that_other_ranks_served_count_as_a_round_of_these() -> None:
    """Of eight heavy samples served, three of five ranks would have had two."""
    squares = np.array([100] * 8 + [10] * 40)
    found = balanced_rows(squares, rows=48, ranks=5, micro_batch_size=8, served=8, rows_served=8)
    assert sorted(found.reshape(-1)) == list(range(8, 48))
    assert found[0, :, 0].argsort().tolist()[:2] == [3, 4]


def shared_rows(index: Any, ids: list[int], ranks: int) -> list[list[int]]:
    """Squared tokens of each rank, counted query by query: 2q + 1 of the q-th token."""
    width = index.sequence_length
    part = width // (2 * ranks)
    found = []
    for sample in ids:
        spans = index.locate([sample])
        begins, ends = spans.bounds_in_samples()
        work = [0] * ranks
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            for place in range(begin, min(end, width)):
                chunk = place // part
                work[min(chunk, 2 * ranks - 1 - chunk)] += 2 * (place - begin) + 1
        found.append(work)
    return found


@for_each("order", ["epoch", "packed", PackedOrder(align=8)])
@for_each("ranks", [1, 2, 4])
def test_ranks_that_share_a_row(tmp_path: Path, order: Any, ranks: int) -> None:
    write_corpus(tmp_path / "c", np.random.default_rng(5).integers(1, 90, 60).tolist())
    index = build_index(tmp_path / "c", sequence_length=64, order=order, epochs=1)
    ids = list(range(index.num_samples))
    by_row = CostModel(linear=0, attention=1, context_parallel_size=ranks, partition="row")
    whole = squared_lengths(index, ids)
    assert rank_squares(index, ids, whole, by_row).tolist() == shared_rows(index, ids, ranks)
    by_document = replace(by_row, partition="document")
    each = rank_squares(index, ids, whole, by_document)
    assert np.array_equal(each, np.repeat(whole[:, None] / ranks, ranks, axis=1))
    if order != "epoch":  # the last token of a row that is cut is input of two spans there
        assert np.array_equal(rank_squares(index, ids, whole, by_row).sum(1), whole)


def test_a_row_is_cut_into_equal_parts(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", [40] * 10)
    index = build_index(tmp_path / "c", sequence_length=24, order="epoch", epochs=1)
    cost = CostModel(linear=1, attention=1, context_parallel_size=6, partition="row")
    squares = squared_lengths(index, [0])
    assert rank_squares(index, [0], squares, cost).shape == (1, 6)
    with pytest.raises(InvalidArgument, match="context_parallel_size"):
        rank_squares(index, [0], squares, replace(cost, context_parallel_size=5))


def test_the_ranks_of_a_row_are_constants_of_the_model() -> None:
    cost = CostModel(linear=6, attention=2, context_parallel_size=2, partition="row")
    assert CostModel.from_dict(json.loads(json.dumps(cost.to_dict()))) == cost
    assert CostModel(linear=6, attention=2).to_dict() == {"linear": 6, "attention": 2}
    assert cost.row_work([[3.0, 5.0]], 10).tolist() == [[36.0, 40.0]]
    for wrong in ({"context_parallel_size": 0}, {"partition": "rows"}):
        with pytest.raises(InvalidArgument):
            CostModel(linear=1, attention=1, **wrong)  # type: ignore[arg-type]
    for key, value in (("context_parallel_size", 1), ("partition", "rows")):
        with pytest.raises(FormatError, match=key):
            CostModel.from_dict({**cost.to_dict(), key: value})
