"""Blends of several corpora against megatron-core's BlendedMegatronDatasetBuilder."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import plan_json
from support.corpora import write_corpus
from support.inputs import for_each
from support.megatron_dataset import EOD, Tokenizer

import megaindex
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.format import IndexedDataset
from megaindex.index.blended_index import fill_uncounted
from megaindex.index.description import describe_index
from megaindex.loader import GPTDataset
from megaindex.settings.run_settings import BatchSchedule, Data, RunSettings, Target
from megaindex.settings.sources import Source

S, SEED = 24, 11
SPLIT = "70,20,10"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[IndexedDataset]:
    directory, rng = tmp_path_factory.mktemp("blend"), np.random.default_rng(5)
    return [
        write_corpus(directory / f"c{k}", rng.integers(1, 50, 40 + 30 * k), np.uint16, eod=EOD)
        for k in range(5)
    ]


def megatron_blend(
    core: Any, prefixes: list[str], weights: list[float] | None, sizes: list[int | None]
) -> Any:
    """The train split as Megatron's trainer builds it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.blended_megatron_dataset_builder import (
            BlendedMegatronDatasetBuilder,
        )
    config = core.GPTDatasetConfig(
        random_seed=SEED, sequence_length=S, blend=(prefixes, weights), split=SPLIT,
        tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, num_dataset_builder_threads=1,
        mid_level_dataset_surplus=0.05,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(core.GPTDataset, sizes, lambda: True, config).build()[0]


@for_each("weights", [None, [0.3, 0.1, 0.2, 0.25, 0.15], [1, 1, 1, 1, 1]])
@for_each("num_samples", [1, 60, 150, 2000])  # 2000: more than an epoch of all
def test_samples_are_megatrons(
    corpora: list[IndexedDataset],
    megatron_datasets: Any,
    weights: list[float] | None,
    num_samples: int,
) -> None:
    prefixes = [corpus.path_prefix for corpus in corpora]
    theirs = megatron_blend(megatron_datasets, prefixes, weights, [num_samples, 0, 0])
    index = megaindex.build_blend(
        corpora, weights=weights, num_samples=num_samples, sequence_length=S, seed=SEED,
        split=SPLIT, variance_buffer=1 + 0.05,
    )  # fmt: skip
    assert index.num_samples == len(theirs)
    assert index.dataset_index.dtype == theirs.dataset_index.dtype
    np.testing.assert_array_equal(index.dataset_index, theirs.dataset_index)
    np.testing.assert_array_equal(index.dataset_sample_index, theirs.dataset_sample_index)
    ours = GPTDataset(index, corpora)
    for k, sample in enumerate(ours.__getitems__(list(range(len(theirs))))):
        expected = theirs[k]
        np.testing.assert_array_equal(sample["tokens"], expected["tokens"])
        np.testing.assert_array_equal(sample["labels"], expected["labels"])


def test_all_there_is_without_weights_and_size(
    corpora: list[IndexedDataset], megatron_datasets: Any
) -> None:
    prefixes = [corpus.path_prefix for corpus in corpora]
    theirs = megatron_blend(megatron_datasets, prefixes, None, [None, None, None])
    index = megaindex.build_blend(
        corpora, num_samples=None, sequence_length=S, seed=SEED, split=SPLIT
    )
    np.testing.assert_array_equal(index.dataset_index, theirs.dataset_index)
    np.testing.assert_array_equal(index.dataset_sample_index, theirs.dataset_sample_index)


@pytest.mark.slow
@for_each("order", ["neox", "megatron-legacy", "paddlenlp", "epoch", "window"])
@for_each("weights", [None, [5, 1, 1, 2, 1]])
def test_every_order_blends(
    corpora: list[IndexedDataset], order: str, weights: list[float] | None
) -> None:
    index = megaindex.build_blend(
        corpora, weights=weights, num_samples=200, sequence_length=S, seed=SEED, order=order
    )
    ids = np.arange(200)
    together = index.locate(ids)
    for k in ids.tolist():
        which, sample = int(index.dataset_index[k]), int(index.dataset_sample_index[k])
        alone = index.indices[which].locate([sample])
        runs = slice(together.row_splits[k], together.row_splits[k + 1])
        assert set(together.source[runs].tolist()) == {which}
        for ours, theirs in zip(list(together)[1:], list(alone)[1:], strict=True):
            np.testing.assert_array_equal(ours[runs], theirs)


def test_the_cache_gives_the_same_blend(corpora: list[IndexedDataset], tmp_path: Path) -> None:
    def blend(**changes: Any) -> Any:
        settings = {"weights": [1, 2, 3, 4, 5], "num_samples": 90, "cache_dir": tmp_path}
        return megaindex.build_blend(
            corpora, sequence_length=S, seed=SEED, **{**settings, **changes}
        )

    first, entries = blend(), len(list(tmp_path.iterdir()))
    again = blend()
    assert len(list(tmp_path.iterdir())) == entries
    assert again.dataset_index.tobytes() == first.dataset_index.tobytes()
    assert blend(cache_dir=None).dataset_index.tobytes() == first.dataset_index.tobytes()
    for weights in ([5, 4, 3, 2, 1], [1, 2, 3, 5, 4]):  # the latter with the same first weights
        other = blend(weights=weights)
        assert other.dataset_index.tobytes() != first.dataset_index.tobytes()


def test_a_blend_travels_to_another_process(corpora: list[IndexedDataset]) -> None:
    index = megaindex.build_blend(corpora, num_samples=20, sequence_length=S, seed=SEED)
    before = index.locate(np.arange(20))  # what it keeps for itself stays behind
    after = pickle.loads(pickle.dumps(index)).locate(np.arange(20))
    for ours, theirs in zip(before, after, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_source_that_runs_short_is_named(corpora: list[IndexedDataset]) -> None:
    index = megaindex.build_blend(corpora, num_samples=20, sequence_length=S, seed=SEED)
    index.dataset_sample_index[7] = 10**9
    with pytest.raises(OutOfRange, match="sample 1000000000 does not exist"):
        index.locate([6, 7])


@for_each(
    ("change", "message"),
    [
        ({"weights": [1, 2]}, "weights must be 5 numbers, one for each source, got 2"),
        ({"weights": [1, 2, 3, 4, 0]}, r"weights\[4\] must be positive and finite, got 0"),
        ({"weights": [1, 2, 3, 4, float("nan")]}, r"weights\[4\] must be positive and finite"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"num_samples": None, "order": "epoch"}, "num_samples must be given"),
        ({"num_samples": None, "weights": [1] * 5}, "num_samples must be given"),
        ({"corpora": []}, "corpora must be a list"),
        ({"corpora": "prefix"}, "corpora must be a list"),
        ({"weights": [1] * 5, "variance_buffer": 0.99}, "variance_buffer must be a number >= 1 or"),
        ({"weights": [1] * 5, "variance_buffer": "some"}, "must be a number >= 1 or exact, got"),
    ],
)
def test_what_cannot_be_blended_is_refused(
    corpora: list[IndexedDataset], change: dict[str, Any], message: str
) -> None:
    call = {"corpora": corpora, "num_samples": 900, "sequence_length": S, "seed": SEED, **change}
    with pytest.raises(InvalidArgument, match=message):
        megaindex.build_blend(call.pop("corpora"), **call)


def test_a_buffer_too_small_for_the_blend_is_named(corpora: list[IndexedDataset]) -> None:
    weights = [0.22, 0.22, 0.26, 0.92, 0.44]
    call = {"weights": weights, "num_samples": 300, "sequence_length": S, "seed": SEED}
    with pytest.raises(InvalidArgument, match="source 3 of the blend must have 135 samples"):
        megaindex.build_blend(corpora, variance_buffer=1, **call)
    assert megaindex.build_blend(corpora, variance_buffer="exact", **call).num_samples == 300


@for_each("order", ["megatron", "neox", "megatron-legacy", "paddlenlp"])
@for_each("weights", [None, [5, 1, 1, 2, 1]])
def test_the_exact_buffer_asks_for_what_is_drawn(
    corpora: list[IndexedDataset], order: str, weights: list[float] | None
) -> None:
    """As in the planner: `--variance-buffer exact`."""
    index = megaindex.build_blend(
        corpora, weights=weights, num_samples=200, sequence_length=S, seed=SEED, order=order,
        variance_buffer="exact",
    )  # fmt: skip
    drawn = np.bincount(index.dataset_index[:200], minlength=5).tolist()
    tokens = [int(corpus.sequence_lengths.sum()) for corpus in corpora]
    each = [] if weights is None else ["--weights", *weights]
    plan = plan_json(
        "--tokens-per-epoch", *tokens, *each, "--seq-length", S, "--global-batch-size", 1,
        "--train-iters", 200, "--order", order, "--variance-buffer", "exact",
    )  # fmt: skip
    assert [row["requested"] for row in plan["datasets"]] == drawn
    assert [row["built"] for row in plan["datasets"]] == [i.num_samples for i in index.indices]


@for_each("buffer", [1, 1.005, "exact", 0.99, 0, -1, "1.5", "nan", float("inf")])
def test_the_planner_and_python_take_the_same_buffers(
    corpora: list[IndexedDataset], buffer: Any
) -> None:
    taken = isinstance(buffer, int | float) and 1 <= buffer < float("inf")
    call = {"weights": [1] * 5, "num_samples": 20, "sequence_length": S, "seed": SEED}
    data = Data(train=tuple(Source(path=c.path_prefix, weight=1) for c in corpora))
    for use in (
        lambda: megaindex.build_blend(corpora, variance_buffer=buffer, **call),
        lambda: RunSettings(
            order="megatron", sequence_length=S, data=data, batch=BatchSchedule.constant(1),
            target=Target(kind="iterations", value=20), variance_buffer=buffer,
        ),
    ):  # fmt: skip
        if taken or buffer == "exact":
            use()
        else:
            with pytest.raises(InvalidArgument, match="must be a number >= 1 or exact"):
                use()


@pytest.mark.parametrize("tokens", [16, 17, 24, 25, 33])
def test_a_weight_of_0_beside_a_corpus_of_few_samples(tmp_path: Path, tokens: int) -> None:
    """GPT-NeoX draws a source of weight 0 at most once; no bound divides by the weight."""
    large = write_corpus(tmp_path / "large", [40] * 30, np.uint16)
    small = write_corpus(tmp_path / "small", [tokens], np.uint16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index = megaindex.build_blend(
            [large, small], weights=[1.0, 0.0], num_samples=20, sequence_length=8, order="neox"
        )
        spans = index.locate(range(index.num_samples))
    assert (np.diff(spans.row_splits) > 0).sum() == index.num_samples >= 20


@pytest.mark.parametrize("weights", [None, [5, 1, 1, 2, 1]])
def test_all_samples_of_a_blend_in_the_order_of_gpt_neox_can_be_served(
    corpora: list[IndexedDataset], weights: list[float] | None
) -> None:
    """Its arrays are as long as GPT-NeoX makes them; its samples end where a source is spent."""
    index = megaindex.build_blend(
        corpora, weights=weights, num_samples=200, sequence_length=S, seed=SEED, order="neox"
    )
    sizes = np.array([each.num_samples for each in index.indices])
    end = index.num_samples
    assert 200 <= end < index.dataset_index.size == (sizes - 1).sum()
    beyond = index.dataset_sample_index >= sizes[index.dataset_index]
    assert not beyond[:end].any()
    assert beyond[end]
    assert len(index.locate(np.arange(end)).row_splits) == end + 1
    assert sum(ids.size for ids, _ in index.iterate_spans(0, end, 0, 1)) == end
    with pytest.raises(OutOfRange):
        index.locate([end])
    everything = [
        index.served_tokens(np.arange(corpus.sequence_lengths.size), source)
        for source, corpus in enumerate(corpora)
    ]
    assert max(int(each.sample.max()) for each in everything) == end - 1
    description = describe_index(index)
    assert description["samples"] == end


def test_draws_beyond_a_source_are_those_of_gpt_neox(tmp_path: Path) -> None:
    """Modulo the length that its datasets report, which is one less than they hold."""
    corpora = [write_corpus(tmp_path / f"s{k}", np.full(n, 25)) for k, n in enumerate((9, 60))]
    index = megaindex.build_blend(
        corpora, weights=[1, 1], num_samples=40, sequence_length=S, seed=SEED, order="neox"
    )
    sizes = [each.num_samples for each in index.indices]
    beyond = replace(index, dataset_sample_index=index.dataset_sample_index + sizes[0] - 3)
    found = fill_uncounted(beyond, 1).dataset_sample_index.tolist()
    drawn = zip(beyond.dataset_index.tolist(), beyond.dataset_sample_index.tolist(), strict=True)
    expected = [k if k < sizes[i] else k % (sizes[i] - 1) for i, k in drawn]
    assert found == expected != beyond.dataset_sample_index.tolist()


def test_requests_with_a_buffer_are_counted_in_64_bits(tmp_path: Path) -> None:
    corpora = [write_corpus(tmp_path / name, [200]) for name in "ab"]
    most = 2**61 - 2**8  # the next double is 2**61
    for num_samples, refused in ((most, "the epochs must have"), (2**61, "variance_buffer of 2.0")):
        with pytest.raises(InvalidArgument, match=refused):
            megaindex.build_blend(
                corpora, weights=[1, 1], num_samples=num_samples, sequence_length=16, seed=1,
                variance_buffer=2.0,
            )  # fmt: skip
