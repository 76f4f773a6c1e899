"""Exposures of samples: the pass of the source's order that has their first input token."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

import megaindex
from megaindex import EpochOrder, IndexedDataset, InvalidArgument
from megaindex.builders.described import build_described
from megaindex.index.description import describe_index
from megaindex.index.exposures import (
    MOST_PASSES,
    PassRuns,
    join_runs,
    runs_of_samples,
    runs_of_size,
)
from megaindex.index.spans import Index, exposures_of, locate_range, pass_runs
from megaindex.index.stretches import Stretch, StretchedIndex

S = 16


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("exposures")
    generator = np.random.default_rng(3)
    for name in ("web", "code"):
        write_corpus(folder / name, generator.integers(3, 60, 40))
    return [str(folder / name) for name in ("web", "code")]


def exposures(index: Index) -> np.ndarray:
    return exposures_of(index, np.arange(index.num_samples))


def most_times(index: Index, found: np.ndarray) -> int:
    """How often a pass of a source has the same token as input, at most."""
    spans = locate_range(index, 0, index.num_samples)
    lengths = spans.input_lengths(index.sequence_length)
    row = np.repeat(np.arange(index.num_samples), np.diff(spans.row_splits))
    tokens = [
        (int(spans.source[k]), int(found[row[k]]), int(spans.document[k]), int(offset))
        for k in range(len(spans))
        for offset in range(spans.offset[k], spans.offset[k] + lengths[k])
    ]
    return int(np.unique(tokens, axis=0, return_counts=True)[1].max())


@pytest.mark.parametrize("order", ["epoch", "window", "packed"])
def test_a_pass_of_a_computed_order_has_no_token_twice(corpora: list[str], order: str) -> None:
    index = megaindex.build_index(corpora[0], sequence_length=S, epochs=3, order=order)
    found = exposures(index)
    assert np.bincount(found).tolist() == [index.num_samples // 3] * 3
    assert most_times(index, found) == 1
    blend = megaindex.build_blend(
        corpora, weights=[2, 1], num_samples=400, sequence_length=S, order=order
    )
    found = exposures(blend)
    assert most_times(blend, found) == 1
    assert found.max() > 1


def test_a_sample_that_begins_with_carried_tokens_belongs_to_the_pass_before(
    corpora: list[str],
) -> None:
    order = EpochOrder(left_over="carry")
    index: Any = megaindex.build_index(corpora[0], sequence_length=S, epochs=4, order=order)
    spans = locate_range(index, 0, index.num_samples)
    firsts = spans.row_splits[:-1]
    found = exposures(index)
    for epoch in range(4):
        documents = index.permuted_documents(epoch).tolist()
        ends = np.cumsum(index.sequence_lengths[documents])
        for sample in np.flatnonzero(found == epoch).tolist():
            at = firsts[sample]
            place = documents.index(int(spans.document[at]))
            begin = ends[place] - index.sequence_lengths[documents[place]] + spans.offset[at]
            block = int(index._block_of(np.array([sample]))[0])
            # in the order of its pass the sample begins where its tokens are cut
            assert (begin + index.carried(epoch)) % S == 0
            assert block == epoch or (block == epoch + 1 and begin + S >= ends[-1])
    later = index._block_of(np.arange(index.num_samples)) - found
    assert later.min() == 0
    assert later.max() == 1


def test_epochs_mixed_together_are_divided_by_volume(corpora: list[str]) -> None:
    order = EpochOrder(epochs_mixed=2)
    index = megaindex.build_index(corpora[0], sequence_length=S, epochs=4, order=order)
    block = index.num_samples // 2
    expected = np.arange(index.num_samples) * 2 // block
    assert exposures(index).tolist() == expected.tolist()


@pytest.mark.parametrize("order", ["megatron", "neox", "paddlenlp", "megatron-legacy"])
def test_orders_of_frameworks_are_divided_by_volume(corpora: list[str], order: str) -> None:
    index = megaindex.build_index(corpora[0], sequence_length=S, epochs=3, order=order)
    expected = np.arange(index.num_samples) * S // index.tokens_per_epoch
    assert exposures(index).tolist() == expected.tolist()
    assert expected.max() == 2
    blend = megaindex.build_blend(
        corpora, weights=[1, 3], num_samples=200, sequence_length=S, order=order
    )
    assert blend.num_epochs > 1
    sizes = np.array([source.tokens_per_epoch for source in blend.indices])
    expected = blend.dataset_sample_index * S // sizes[blend.dataset_index]
    assert exposures(blend).tolist() == expected[: blend.num_samples].tolist()


def test_further_epochs_follow_those_of_the_run(corpora: list[str]) -> None:
    run = megaindex.extend_run(corpora[0], sequence_length=S, epochs=2, order="neox", more_epochs=3)
    found = exposures(run.index)
    old = run.old.num_samples
    assert found[:old].tolist() == exposures(run.old).tolist()
    further = [each.num_samples for each in run.index.stretches[1:]]  # type: ignore[union-attr]
    assert found[old:].tolist() == np.repeat(np.arange(2, 2 + len(further)), further).tolist()
    described = build_described(describe_index(run.index), [IndexedDataset(corpora[0])])
    assert exposures(described).tolist() == found.tolist()
    assert described.num_epochs == run.index.num_epochs == 2 + len(further)


def test_samples_served_least_keep_their_passes(corpora: list[str]) -> None:
    run = megaindex.extend_run(
        corpora[0], sequence_length=S, epochs=2, order="neox", consumed_samples=30, more_samples=60
    )
    index: Any = run.index
    begun = index.stretches[0].index
    order = np.concatenate([np.array(each.samples) for each in begun.stretches])
    found = exposures(index)[: order.size]
    assert found.tolist() == exposures(run.old)[order].tolist()
    assert (np.diff(found) < 0).any()
    assert pass_runs(index).at(np.arange(order.size)).tolist() == found.tolist()


def test_an_extended_blend_counts_the_passes_of_each_source(corpora: list[str]) -> None:
    run = megaindex.extend_run(
        corpora, weights=[1, 1], sequence_length=S, num_samples=100, more_samples=300
    )
    index: Any = run.index
    found = exposures(index)
    for number, source in enumerate(index.indices):
        mine = index.dataset_index == number
        expected = exposures_of(source, index.dataset_sample_index[mine])
        assert found[mine].tolist() == expected.tolist()
    assert found.max() == index.num_epochs - 1


def test_samples_that_are_served_again_keep_their_exposure(corpora: list[str]) -> None:
    for index in (
        megaindex.build_index(corpora[0], sequence_length=S, epochs=2),
        megaindex.build_blend(corpora, weights=[1, 1], num_samples=90, sequence_length=S),
    ):
        once = exposures(index)
        again = StretchedIndex(
            stretches=(
                Stretch(index=index, samples=range(20, 50), times=3),
                Stretch(index=index, samples=np.arange(60, 10, -1)),
            )
        )
        expected = [*np.tile(once[20:50], 3), *once[60:10:-1]]
        assert exposures(again).tolist() == expected


def test_stages_of_several_lengths_share_the_passes_of_order_blocks(tmp_path: Path) -> None:
    write_corpus(tmp_path / "web", np.random.default_rng(5).integers(3, 60, 40))
    order = megaindex.build_index(str(tmp_path / "web"), sequence_length=S, order="epoch")
    from megaindex.index.orders.blocks import BlockedIndex, PassBlocks  # not public

    blocks = PassBlocks(order, 200)  # type: ignore[arg-type]
    for length in (S, 2 * S):
        index = BlockedIndex(blocks=blocks, sequence_length=length, num_epochs=3)
        found = exposures(index)
        assert most_times(index, found) == 1
        assert set(found.tolist()) == {0, 1, 2}


def test_an_index_of_ones_own_has_no_passes(corpora: list[str]) -> None:
    class Own:
        def __init__(self, index: Any) -> None:
            self.num_samples, self.num_epochs = index.num_samples, 2

    own: Any = Own(megaindex.build_index(corpora[0], sequence_length=S))
    with pytest.raises(InvalidArgument, match="keys: .* does not know the passes"):
        pass_runs(own)


def test_runs_are_found_on_both_sides_of_each_bound() -> None:
    runs = runs_of_size(Fraction(7, 2), 3, 10)
    numbers = np.arange(10)
    assert runs.at(numbers).tolist() == (numbers * 2 // 7).tolist()
    for begin in range(10):
        for end in range(begin + 1, 11):
            part = runs.between(begin, end)
            assert part.size == end - begin
            assert part.starts.max() < end - begin
            assert part.at(np.arange(part.size)).tolist() == runs.at(numbers[begin:end]).tolist()
    short = runs_of_size(Fraction(1, 2), 6, 3)  # passes shorter than a sample
    assert short.at(np.arange(3)).tolist() == [0, 2, 4]
    mixed = np.array([1, 1, 0, 2, 2, 2])
    assert runs_of_samples(mixed).at(np.arange(6)).tolist() == mixed.tolist()
    joined = join_runs([runs, runs_of_samples(mixed)])
    assert joined.at(np.arange(16)).tolist() == [*runs.at(numbers), *mixed]
    assert joined.size == 16


def test_a_source_has_at_most_so_many_passes() -> None:
    assert runs_of_size(Fraction(1), MOST_PASSES, MOST_PASSES).starts.size == MOST_PASSES
    with pytest.raises(InvalidArgument, match=f"keys: .* at most {MOST_PASSES} passes"):
        runs_of_size(Fraction(1), MOST_PASSES + 1, MOST_PASSES + 1)


def test_more_samples_than_an_integer_holds_are_refused() -> None:
    one = PassRuns(np.zeros(1, np.int64), np.zeros(1, np.int64), 2**63 - 1)
    assert join_runs([one, one]).starts.tolist() == [0, 2**63 - 1]
    with pytest.raises(OverflowError):
        join_runs([one, one, one])
