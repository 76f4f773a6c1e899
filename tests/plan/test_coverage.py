"""Coverage against counting token by token."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import plan_json, shares_by_times
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex.builders import build_index
from megaindex.index.frameworks import framework_rules
from megaindex.index.order_settings import order_of_row
from megaindex.plan import coverage as counting
from megaindex.plan import coverage as coverage_module
from megaindex.run.parts import SplitPart
from megaindex.run.passes import ServedRange, samples_served
from megaindex.settings.sources import Source

NUMBERS = itertools.count()
LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=25).filter(lambda x: sum(x) > 20)


def count_by_token(index: Any, served: int, lengths: np.ndarray) -> tuple[list[int], list[int]]:
    """Tokens, and documents by their most served token, by times served."""
    times = [np.zeros(length, np.int64) for length in lengths]
    for sample in range(served):
        left = index.sequence_length
        _, documents, offsets, spans = index.locate([sample])
        for document, offset, length in zip(documents, offsets, spans, strict=True):
            taken = min(left, int(length))
            times[document][offset : offset + taken] += 1
            left -= taken
    tokens = np.bincount(np.concatenate(times))
    documents = np.bincount([t.max() for t in times if t.size])
    return tokens.tolist(), documents.tolist()


@given(
    draws=st.lists(st.tuples(*[st.integers(0, 40)] * 2, st.integers(1, 3)), max_size=3),
    built=st.integers(0, 12),
    order=st.sampled_from(["megatron", "neox"]),
)
def test_samples_that_draws_serve(
    draws: list[tuple[int, int, int]], built: int, order: str
) -> None:
    """GPT-NeoX serves draws beyond the samples modulo its length, which is one less."""
    times = [0] * built
    for begin, end, passes in draws:
        for draw in range(begin, end):
            if draw < built:
                times[draw] += passes
            elif order == "neox" and built:
                times[draw % max(1, built - 1)] += passes
    sizing: Any = SimpleNamespace(row=framework_rules(order))
    parts = [ServedRange(begin, end, passes) for begin, end, passes in draws if begin < end]
    served = samples_served(sizing, parts, built)
    assert all(one.end <= other.begin for one, other in itertools.pairwise(served))
    found = [0] * built
    for part in served:
        found[part.begin : part.end] = [part.times] * (part.end - part.begin)
    assert found == times


@given(
    lengths=LENGTHS,
    sequence_length=st.integers(1, 18),
    share=st.floats(0, 1),
    epochs=st.integers(1, 4),
    order=st.sampled_from(["megatron", "neox"]),
    at_once=st.sampled_from([1, 7, 1000]),
)
def test_counting_runs_equals_counting_tokens(
    tmp_path: Path,
    lengths: list[int],
    sequence_length: int,
    share: float,
    epochs: int,
    order: str,
    at_once: int,
) -> None:
    dataset = write_corpus(tmp_path / f"c{next(NUMBERS)}", lengths)
    index = build_index(
        dataset, sequence_length=sequence_length, seed=5, epochs=epochs, order=order
    )
    served = round(share * index.num_samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "_SAMPLES_AT_ONCE", at_once)
        patch.setattr(counting, "_DOCUMENTS_AT_ONCE", at_once)
        tokens, documents = counting.count_served(index, served, dataset.sequence_lengths, 0)
    expected_tokens, expected_documents = count_by_token(index, served, np.array(lengths))
    assert np.trim_zeros(tokens, "b").tolist() == expected_tokens
    assert np.trim_zeros(documents, "b").tolist() == expected_documents


def test_progress_of_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_SAMPLES_AT_ONCE", 7)
    dataset = write_corpus(tmp_path / "c", [30, 40, 50])
    index = build_index(dataset, sequence_length=5, seed=5)
    told: list[tuple[int, int]] = []
    counting.count_served(
        index, 20, dataset.sequence_lengths, 0, lambda *counts: told.append(counts)
    )
    assert told == [(7, 20), (14, 20), (20, 20)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("coverage") / "c"
    write_corpus(prefix, np.random.default_rng(2).integers(1, 60, 500))
    return prefix


def shares(row: dict[str, Any]) -> list[float]:
    return shares_by_times(row["coverage"])


def plan_of(corpus: Path, iterations: int, *words: object) -> dict[str, Any]:
    return plan_json(
        "--data-path", corpus, "--seq-length", 24, "--global-batch-size", 4,
        "--train-iters", iterations, *words,
    )  # fmt: skip


@given(iterations=st.integers(0, 260))
@pytest.mark.parametrize("order", ["megatron", "neox"])
def test_closed_form_equals_the_built_index(corpus: Path, order: str, iterations: int) -> None:
    """Up to one epoch, and under megatron up to the first of two kept apart."""
    auto = plan_of(corpus, iterations, "--order", order)["datasets"][0]
    exact = plan_of(corpus, iterations, "--order", order, "--coverage", "exact")["datasets"][0]
    np.testing.assert_allclose(shares(auto), shares(exact), atol=1e-12)
    if auto["epochs"] == 1:
        assert auto["coverage_method"] == "closed-form"
        assert exact["coverage_method"] == ("built" if iterations else "closed-form")


def test_a_whole_epoch_served_is_in_closed_form() -> None:
    """The last sample of the first epoch overlaps with none; the next one does with chance."""
    for settings in (
        {"order": "epoch"},
        {"order": "epoch", "left_over": "carry"},
        {"order": "megatron", "separate_final_epoch": "always"},
    ):
        whole, more = (draw_of(settings, 1000, 24, 50, served) for served in (41, 42))
        assert whole.per_epoch == 41
        assert coverage_module.closed_form(whole) == coverage_module.Coverage(
            method="closed-form", tokens=(1 - 41 * 24 / 1000, 41 * 24 / 1000)
        )
        assert coverage_module.closed_form(more) is None


@pytest.mark.slow
@for_each("order", ["megatron", "neox"])
@for_each("iterations", [100, 170, 240, 300, 440, 700])
def test_expectation_is_the_mean_over_seeds(corpus: Path, order: str, iterations: int) -> None:
    told = plan_of(corpus, iterations, "--order", order, "--coverage", "expected")["datasets"][0]
    counted = [
        shares(
            plan_of(corpus, iterations, "--order", order, "--coverage", "exact", "--seed", seed)[
                "datasets"
            ][0]
        )
        for seed in range(12)
    ]
    width = max(len(shares(told)), *map(len, counted))
    padded = [np.pad(row, (0, width - len(row))) for row in [shares(told), *counted]]
    np.testing.assert_allclose(padded[0], np.mean(padded[1:], axis=0), atol=0.02)


@for_each("iterations", [1, 50, 151, 152, 400, 607])
def test_windows_in_closed_form(corpus: Path, iterations: int) -> None:
    plan = plan_of(corpus, iterations, "--order", "window")
    tokens, per_epoch = plan["tokens_per_epoch"], plan["samples_per_epoch"]
    times = np.zeros(tokens, np.int64)
    for sample in range(plan["samples_consumed"]):
        begin = sample % per_epoch * 24
        times[begin : begin + 24] += 1
    expected = np.bincount(times) / tokens
    row = plan["datasets"][0]
    assert row["coverage_method"] == "closed-form"
    np.testing.assert_allclose(np.trim_zeros(shares(row), "b"), np.trim_zeros(expected, "b"))


def test_complete_passes_in_the_epoch_order(corpus: Path) -> None:
    """Two and a half passes: half of the tokens three times, the rest twice, left-overs aside."""
    plan = plan_of(corpus, 0, "--order", "epoch")
    per_epoch = plan["samples_per_epoch"]
    plan = plan_json(
        "--data-path", corpus, "--seq-length", 24, "--global-batch-size", 1, "--order", "epoch",
        "--epochs", "5/2",
    )  # fmt: skip
    assert plan["samples_consumed"] == per_epoch * 5 // 2
    assert plan["num_epochs_built"] == 3
    seen = shares(plan["datasets"][0])
    np.testing.assert_allclose(seen, [0, 0, 0.5, 0.5], atol=0.01)
    assert sum(seen) == pytest.approx(1)


ROWS = [
    {"order": "neox"},
    {"order": "megatron"},
    {"order": "megatron", "separate_final_epoch": "always"},
    {"order": "paddlenlp", "final_epoch_threshold": 0.1},
    {"order": "epoch"},
    {"order": "epoch", "epochs_mixed": 3},
    {"order": "epoch", "left_over": "carry"},
    {"order": "epoch", "left_over": "carry", "epochs_mixed": 2},
]


def draw_of(
    settings: dict[str, Any], tokens: int, length: int, asked: int, served: int
) -> coverage_module.SourceDraw:
    """``served`` of the samples of a source that is asked for ``asked``."""
    row = replace(framework_rules(settings["order"]), **settings)
    epochs = row.epochs_for(asked, tokens, length)
    return coverage_module.SourceDraw(
        row=row, part=SplitPart(source=Source(tokens=tokens), begin=0, end=0, tokens=tokens),
        sequence_length=length, seed=0, requested=asked, epochs=epochs,
        built=row.samples_in_epochs(epochs, tokens, length),
        per_epoch=row.samples_in_epochs(1, tokens, length), drawn=served, counted=True,
    )  # fmt: skip


@pytest.mark.parametrize("settings", ROWS, ids=str)
@given(
    asked=st.integers(1, 2000),
    share=st.floats(0, 1) | st.just(1.0),
    tokens=st.integers(2, 200) | st.integers(2, 10**9),
    length=st.integers(1, 64),
)
def test_expected_shares_sum_to_one_and_have_the_right_mean(
    settings: dict[str, Any], asked: int, share: float, tokens: int, length: int
) -> None:
    if settings["order"] == "epoch":  # needs a sample an epoch
        tokens += length
    draw = draw_of(settings, tokens, length, asked, round(share * asked))
    seen = coverage_module.expected(draw).tokens
    assert min(seen) >= 0
    assert sum(seen) == pytest.approx(1)
    mean = draw.served * length / tokens
    assert sum(k * p for k, p in enumerate(seen)) == pytest.approx(mean, rel=1e-6, abs=1e-9)


def test_what_is_left_over_is_expected_to_be_missed() -> None:
    """Three epochs of 10,000 tokens hold 14 samples of 2,048: 1,328 tokens are in none of them.

    GPT-NeoX's loader counts 13 of the 14, and serves the first again.
    """
    plan = plan_json(
        "--order", "neox", "--tokens-per-epoch", 10000, "--seq-length", 2048, "--epochs", 3,
        "--global-batch-size", 1,
    )  # fmt: skip
    row = plan["datasets"][0]
    assert (row["drawn"], row["built"], row["coverage_method"]) == (14, 14, "expected")
    assert sum(k * p for k, p in enumerate(shares(row))) == pytest.approx(2.8672)
    assert (row["distinct"], row["repeated"]) == (13, 10)
    drawn = replace(
        draw_of(ROWS[0], 10000, 2048, 14, 14), row=framework_rules("neox"), epochs=3, built=14
    )
    assert coverage_module.expected(drawn).tokens[3] == pytest.approx(0.873, abs=1e-3)


@pytest.mark.parametrize("epochs", [40, 41])
def test_samples_served_again_of_many_epochs_are_not_expected(epochs: int) -> None:
    """As many epochs as tables of copies are made for."""
    words = ["--order", "neox", "--tokens-per-epoch", 10000, "--seq-length", 2048,
             "--global-batch-size", 1, "--epochs", epochs]  # fmt: skip
    row = plan_json(*words)["datasets"][0]
    assert (row["epochs"], row["distinct"]) == (epochs, row["drawn"] - 1)
    assert row["coverage_method"] == ("expected" if epochs == 40 else "none")


@pytest.mark.slow
def test_samples_served_again_are_expected_as_their_mean_over_seeds(tmp_path: Path) -> None:
    """An epoch of 7.5 samples, of which three are built, and one sample more than GPT-NeoX counts
    is read."""
    sizes = np.random.default_rng(1).integers(1, 3, 100)
    dataset = write_corpus(tmp_path / "c", sizes)
    length = dataset.num_tokens * 2 // 15
    words = ["--data-path", tmp_path / "c", "--order", "neox", "--seq-length", length,
             "--global-batch-size", 11, "--micro-batch-size", 11, "--data-parallel-size", 1,
             "--train-iters", 2]  # fmt: skip
    told = shares(plan_json(*words, "--coverage", "expected")["datasets"][0])
    counted = np.zeros(len(told))
    for seed in range(80):
        row = plan_json(*words, "--seed", seed)["datasets"][0]
        assert (row["coverage_method"], row["built"], row["drawn"]) == ("built", 22, 22)
        found = shares(row)
        counted[: len(found)] += np.array(found) / 80
    assert told == pytest.approx(counted, abs=0.02)
    assert sum(k * p for k, p in enumerate(told)) == pytest.approx(22 * length / sum(sizes))


@pytest.mark.slow
@for_each("settings", ROWS)
@for_each("asked", [9, 22, 30])
def test_expectation_of_few_samples_is_the_mean_over_seeds(
    tmp_path: Path, settings: dict[str, Any], asked: int
) -> None:
    """Short documents and an epoch of seven samples and a half: the left-over is visible."""
    dataset = write_corpus(tmp_path / "c", np.random.default_rng(1).integers(1, 3, 100))
    tokens, length = dataset.num_tokens, dataset.num_tokens * 2 // 15
    draw = draw_of(settings, tokens, length, asked, asked - 2)
    told = coverage_module.expected(draw).tokens
    counted = np.zeros(draw.epochs + 1)
    seeds = 60
    for seed in range(seeds):
        index = build_index(
            dataset, sequence_length=length, seed=seed, num_samples=asked,
            order=order_of_row(draw.row),
        )  # fmt: skip
        times, _ = counting.count_served(index, asked - 2, dataset.sequence_lengths, 0)
        counted += np.pad(times, (0, counted.size - times.size)) / tokens / seeds
    np.testing.assert_allclose(np.pad(told, (0, counted.size - len(told))), counted, atol=0.02)


def test_none_computes_no_coverage(corpus: Path) -> None:
    row = plan_of(corpus, 400, "--coverage", "none")["datasets"][0]
    assert row["coverage_method"] == "none"
    assert row["coverage"] == {}


def test_a_quarter_of_the_tokens_unseen_after_one_sample_too_many(tmp_path: Path) -> None:
    """NeoX, 20,000 documents: one sample more than an epoch, and a quarter is never seen."""
    write_corpus(tmp_path / "c", np.random.default_rng(7).integers(20, 400, 20_000))
    words = ["--data-path", tmp_path / "c", "--seq-length", 128, "--global-batch-size", 1]
    whole = plan_json(*words, "--order", "neox", "--epochs", 1)
    plan = plan_json(*words, "--order", "neox", "--train-iters", whole["train_iters"] + 1)
    row = plan["datasets"][0]
    assert row["coverage_method"] == "built"
    np.testing.assert_allclose(shares(row), [0.25, 0.5, 0.25], atol=0.01)
    assert any("stay unseen" in text for text in plan["warnings"])


def test_samples_that_are_served_thousands_of_times_have_no_table() -> None:
    """A loader of a few samples that is read a million times."""
    draw = draw_of({"order": "neox"}, tokens=1000, length=9, asked=50, served=50)
    for times, method in ((10_000, "closed-form"), (10_001, "none")):
        served = [ServedRange(0, 5, times)]
        assert coverage_module.coverage_of(draw, served, "auto").method == method


@pytest.mark.parametrize(("epochs", "method"), [(10_000, "expected"), (10_001, "none")])
def test_more_epochs_than_a_table_has_times_have_none(epochs: int, method: str) -> None:
    samples = framework_rules("neox").samples_in_epochs(epochs, 1000, 10)
    draw = draw_of({"order": "neox"}, tokens=1000, length=10, asked=samples, served=samples)
    assert draw.epochs == epochs
    assert coverage_module.coverage_of(draw, None, "auto").method == method


@pytest.mark.parametrize(("short", "method"), [(0, "built"), (1, "expected")])
@pytest.mark.parametrize("again", [0, 1])
def test_what_is_counted_has_a_bound(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, short: int, method: str, again: int
) -> None:
    """Documents times epochs, and samples besides where one is served again."""
    row = plan_of(corpus, 170, "--order", "neox")["datasets"][0]
    work = 500 * row["epochs"] + again * row["drawn"]
    draw = replace(
        draw_of({"order": "neox"}, row["tokens_per_epoch"], 24, row["requested"], row["drawn"]),
        part=SplitPart(source=Source(path=str(corpus)), begin=0, end=500,
                       tokens=row["tokens_per_epoch"]),
    )  # fmt: skip
    served = [ServedRange(0, 1, 2), ServedRange(1, row["drawn"] - 1, 1)] if again else None
    monkeypatch.setattr(counting, "BUILD_LIMIT", work - short)
    assert coverage_module.coverage_of(draw, served, "auto").method == method


def test_draws_that_are_not_counted_have_no_counted_coverage(tmp_path: Path) -> None:
    """They are an estimate, whatever was asked for."""
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        write_corpus(path, np.full(60, 40))
    for counts, method in (("exact", "built"), ("bounds", "expected")):
        plan = plan_json(
            "--data-path", 0.7, paths[0], 0.3, paths[1], "--seq-length", 16,
            "--global-batch-size", 4, "--train-iters", 60, "--coverage", "exact",
            "--blend-counts", counts,
        )  # fmt: skip
        assert {row["coverage_method"] for row in plan["datasets"]} == {method}


@pytest.mark.parametrize(("mixed", "method"), [(1, "closed-form"), (3, "expected")])
def test_a_part_of_mixed_epochs_may_repeat_a_token(mixed: int, method: str) -> None:
    """Also the first samples, as many as an epoch holds."""
    draw = draw_of({"order": "epoch", "epochs_mixed": mixed}, 1000, 9, asked=50, served=50)
    assert coverage_module.coverage_of(draw, None, "auto").method == method
