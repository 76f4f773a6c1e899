"""Samples by source, their cursors and epochs: of random indices as located one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus

import megaindex
from megaindex import EpochOrder, InvalidArgument, OutOfRange, PackedOrder
from megaindex.format import IndexedDataset
from megaindex.index import counts as module
from megaindex.index.blended_index import BlendedIndex, LazyIndex
from megaindex.index.counts import counts_by_length, cursors, drawn_counts, source_counts
from megaindex.index.extension import extend_index
from megaindex.index.mixing import Mixing, PerStream, Random, Stratified
from megaindex.index.orders.blocks import BlockedIndex, PassBlocks
from megaindex.index.orders.framework import Memory, PackingOrder, build_packing, index_of
from megaindex.index.skips import Skip, resolve_skips, skips_of, unskipped, with_skips
from megaindex.index.spans import Index, ShownIndex, Spans, epoch_sizes, sequence_lengths_at
from megaindex.index.staged_index import MixedStage, StagedIndex
from megaindex.index.stretches import Stretch, StretchedIndex, sequence
from megaindex.recipe import BatchSchedule
from megaindex.run.run import RunSource, run_of_index

SOURCES = 3
LENGTHS = (4, 8)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 7)


@dataclass(frozen=True, eq=False, repr=False)
class Leaf(ShownIndex):
    """One source, whose sample n is one token of sequence n."""

    sequence_length: int
    num_samples: int = 40
    num_epochs = 1
    tokens_per_epoch = 100
    add_extra_token = 0

    def locate(self, sample_ids: Any) -> Spans:
        ids = np.asarray(sample_ids, np.int64)
        zeros = np.zeros_like(ids)
        return Spans.of_one_source(ids, zeros, zeros + 1, np.arange(ids.size + 1))


class Foreign:
    """Index of three sources in turn, of another package: it has the members of `Index` only."""

    num_samples, num_epochs, tokens_per_epoch, sequence_length, add_extra_token = 30, 1, 30, 4, 0

    def locate(self, sample_ids: Any) -> Spans:
        ids = np.asarray(sample_ids, np.int64)
        return replace(Leaf(4).locate(ids), source=(ids % SOURCES).astype(np.int32))


def mixing_of(rng: np.random.Generator, streams: int) -> Mixing:
    shares = tuple(rng.integers(1, 9, streams).tolist())
    kind = rng.integers(3)
    if kind == 0:
        return Stratified(shares=shares)
    if kind == 1:
        sizes = rng.integers(1, 5, streams).tolist()
        return PerStream(shares=shares, batch_sizes=tuple(sizes))
    return Random(shares=shares, seed=1, name="s", period=int(rng.integers(1, 30)))


def staged(rng: np.random.Generator, length: int, begins: Sequence[int] = ()) -> StagedIndex:
    """Stages of some of the sources, which go on where they were or start over."""
    at = list(begins or [0] * SOURCES)
    stages = []
    for _ in range(rng.integers(1, 4)):
        sources = rng.permutation(SOURCES)[: rng.integers(1, SOURCES + 1)].tolist()
        if rng.random() < 0.2:
            at[sources[0]] = 0
        stage = MixedStage(
            mixing=mixing_of(rng, len(sources)),
            sources=tuple(sources),
            begins=tuple(at[source] for source in sources),
            num_samples=int(rng.integers(0, 25)),
        )
        for source, _, end in stage.reads():
            at[source] = end
        stages.append(stage)
    return StagedIndex(sources=(Leaf(length, 999),) * SOURCES, stages=tuple(stages))


def blended(rng: np.random.Generator, length: int) -> BlendedIndex:
    """Draws in no order, some of them again, as where a framework wraps."""
    which = rng.integers(0, SOURCES, rng.integers(1, 30))
    return BlendedIndex(
        indices=(Leaf(length),) * SOURCES,
        dataset_index=which.astype(rng.choice([np.int16, np.uint8])),
        dataset_sample_index=rng.integers(0, 40, which.size),
        end=int(which.size - rng.integers(0, 2)),
    )


def base(rng: np.random.Generator) -> Index:
    length = int(rng.choice(LENGTHS))
    kinds: list[Any] = [lambda: Leaf(length), Foreign, lambda: staged(rng, length)]
    return [*kinds, lambda: blended(rng, length)][rng.integers(4)]()


def stretched(rng: np.random.Generator, bases: Sequence[Index]) -> StretchedIndex:
    stretches = []
    for _ in range(rng.integers(1, 6)):
        index = bases[rng.integers(len(bases))]
        low, high = np.sort(rng.integers(0, index.num_samples + 1, 2)).tolist()
        samples: Any = range(low, high)
        served = [at for at in samples if located(index, at)]
        if served and rng.random() < 0.3:
            samples = rng.choice(served, rng.integers(1, 20))
        hole = "is a hole" if rng.random() < 0.2 else ""
        times = 1 if rng.random() < 0.6 else int(rng.integers(2, 5))
        stretches.append(Stretch(index=index, samples=samples, hole=hole, times=times))
    return StretchedIndex(stretches=tuple(stretches))


def skipped(rng: np.random.Generator, index: Index) -> Index:
    """The index with skipped and moved steps, if it has at least one step to train on."""
    size = int(rng.integers(1, 6))
    steps = rng.permutation(index.num_samples // size)
    chosen = np.array_split(steps[: steps.size // 2], 2)
    skip = [Skip(steps=each.tolist(), move=bool(k)) for k, each in enumerate(chosen) if each.size]
    drops = bool(rng.integers(2))
    try:
        skips = resolve_skips(
            skip, BatchSchedule.constant(size), num_samples=index.num_samples, drops_tail=drops
        )
    except InvalidArgument:
        return index
    return with_skips(index, skips)


def any_index(rng: np.random.Generator) -> Index:
    kind = rng.integers(4)
    if kind == 0:
        return base(rng)
    if kind == 1:
        return stretched(rng, [base(rng) for _ in range(rng.integers(1, 4))])
    if kind == 2:
        inner = stretched(rng, [base(rng) for _ in range(2)])
        return stretched(rng, [inner, base(rng)])
    parts = [staged(rng, length) for length in LENGTHS[: rng.integers(1, 3)]]
    joined = sequence(parts, first=int(rng.integers(0, 9)) if len(parts) > 1 else 0)
    return skipped(rng, joined if rng.random() < 0.7 else base(rng))


def located(index: Index, position: int) -> tuple[int, int] | None:
    """The source and the sequence length of a position; None of a hole."""
    try:
        spans = index.locate(np.array([position]))
    except OutOfRange:
        return None
    return int(spans.source[0]), int(np.ravel(sequence_lengths_at(index, np.array([position])))[0])


def edges(index: Any) -> list[int]:
    """Both sides of each stretch and stage, and the ends."""
    bounds = getattr(index, "_bounds", np.zeros(0, int)).tolist()
    every = [at + k for at in bounds for k in (-1, 0, 1)]
    return sorted({at for at in [0, *every, index.num_samples] if 0 <= at <= index.num_samples})


SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.slow
@given(seed=SEEDS)
def test_counts_are_those_of_the_samples_located(seed: int) -> None:
    rng = np.random.default_rng(seed)
    index = any_index(rng)
    found = [located(index, position) for position in range(index.num_samples)]
    bounds = edges(index)
    ranges = [*pairwise(bounds), *((0, at) for at in bounds), *((at, at) for at in bounds)]
    ranges += [tuple(np.sort(rng.integers(0, index.num_samples + 1, 2)).tolist()) for _ in range(9)]
    for begin, end in ranges:
        expected = Counter(each for each in found[begin:end] if each is not None)
        counts = counts_by_length(index, begin, end)
        for length in {*counts, *LENGTHS}:
            for source in range(SOURCES):
                own = counts.get(length, np.zeros(0))[source : source + 1].sum()
                assert own == expected[source, length], (begin, end, source, length)
        total = source_counts(index, begin, end, SOURCES)
        assert total.dtype == np.int64
        assert total.sum() == sum(expected.values())
        assert total.tolist() == [
            sum(n for (s, _), n in expected.items() if s == source) for source in range(SOURCES)
        ]


def test_samples_in_any_order_are_counted_at_their_lengths() -> None:
    joined = sequence([Leaf(4, 5), Leaf(8, 5)])
    chosen = Stretch(index=joined, samples=np.array([7, 1, 8, 0, 9]))
    counts = counts_by_length(StretchedIndex(stretches=(chosen,)), 1, 5)
    assert {length: each.tolist() for length, each in counts.items()} == {4: [2], 8: [2]}


def test_a_range_must_lie_in_the_index() -> None:
    index = blended(np.random.default_rng(1), 4)
    end = index.num_samples
    assert counts_by_length(index, end, end)[4].tolist() == [0] * SOURCES
    for begin, stop in ((-1, 2), (0, end + 1), (3, 2)):
        with pytest.raises(OutOfRange, match=f"samples {begin} to {stop} do not all exist"):
            counts_by_length(index, begin, stop)
        with pytest.raises(OutOfRange):
            source_counts(index, begin, stop)
    cursors(index, end)
    with pytest.raises(OutOfRange):
        cursors(index, end + 1)


@pytest.mark.parametrize(("wrong", "shown"), [(-1, -1), (SOURCES, SOURCES)])
def test_an_entry_that_is_no_source_is_named(wrong: int, shown: int) -> None:
    which = np.array([0, 1, 2] * 9, np.int16)
    assert drawn_counts(which, SOURCES).tolist() == [9, 9, 9]
    which[20] = wrong
    assert drawn_counts(which[:20], SOURCES).tolist() == [7, 7, 6]
    with pytest.raises(InvalidArgument, match=f"dataset_index: an entry is {shown}, the blend has"):
        drawn_counts(which[:21], SOURCES)


Draws = list[tuple[int, int, int, int]]


def draws_of(index: Any) -> Draws:
    """Position, source, length and sample of every position that this run serves."""
    ids = np.arange(getattr(index, "first_position", 0), index.num_samples)
    lengths = np.broadcast_to(sequence_lengths_at(index, ids), ids.shape)
    columns = (ids, index.origin(ids)[0], lengths, index.origin(ids)[1])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def expected_cursors(draws: Draws, position: int) -> dict[tuple[int, int], int]:
    """The sample after the last one drawn before a position; else the first one after it."""
    after = [draw for draw in draws if draw[0] >= position]
    found = {(source, length): sample for _, source, length, sample in reversed(after)}
    for _, source, length, sample in draws[: len(draws) - len(after)]:
        found[source, length] = sample + 1
    return found


@given(seed=SEEDS)
def test_cursors_of_stages_and_skips(seed: int) -> None:
    """A skipped sample is passed; those moved behind the end move nothing."""
    rng = np.random.default_rng(seed)
    parts = [staged(rng, length) for length in (4, 8, 4)[: rng.integers(1, 4)]]
    whole = sequence(parts, first=int(rng.integers(0, 9)))
    if whole.num_samples == 0:
        return
    index = skipped(rng, whole)
    skips, draws = skips_of(index), draws_of(whole)
    assert unskipped(index) is whole
    for position in edges(index):
        order = position
        if skips is not None and position > skips.end:
            order = max(skips.end, position - skips.num_moved)
        found = cursors(index, position)
        expected = expected_cursors(draws, order)
        assert {key: found[key] for key in expected} == expected
        # a source that is listed, but never drawn, stands where it would begin
        rest = {at for key, at in found.items() if key not in expected}
        assert rest <= {at for part in parts for s in part.stages for at in s.begins}


def test_cursors_of_frameworks_orders_are_ordinals() -> None:
    """The next draw of each source; an amended run goes on from there."""
    rng = np.random.default_rng(3)
    leaf, blend = Leaf(8), blended(rng, 8)
    assert [cursors(leaf, at) for at in (0, 40)] == [{(0, 8): 0}, {(0, 8): 40}]
    for at in range(blend.num_samples + 1):
        drawn = np.bincount(blend.dataset_index[:at], minlength=SOURCES)
        assert cursors(blend, at) == {(s, 8): n for s, n in enumerate(drawn.tolist())}
    first = blend.num_samples // 2
    served = source_counts(blend, 0, first).tolist()
    stage = MixedStage(
        mixing=Stratified(shares=(2, 1)), sources=(2, 0), begins=(served[2], served[0]),
        num_samples=9,
    )  # fmt: skip
    later = StagedIndex(sources=(Leaf(8, 99),) * SOURCES, stages=(stage,))
    amended = StretchedIndex(
        stretches=(
            Stretch(index=blend, samples=range(first)),
            Stretch(index=later, samples=range(9)),
        )
    )
    assert cursors(amended, first - 1) == cursors(blend, first - 1)
    for at in range(first, first + 10):
        drawn = source_counts(amended, 0, at)
        assert cursors(amended, at) == {(s, 8): n for s, n in enumerate(drawn.tolist())}


def test_cursors_of_a_loader_that_starts_over_are_those_of_its_pass() -> None:
    passes = StretchedIndex(stretches=(Stretch(index=Leaf(4), samples=range(5, 15), times=3),))
    found = [cursors(passes, at)[0, 4] for at in (0, 1, 10, 11, 20, 30)]
    assert found == [0, 6, 15, 6, 15, 15]
    assert counts_by_length(passes, 0, 30)[4].tolist() == [30]
    leaf = Leaf(4)
    last = Stretch(index=leaf, samples=range(7))  # a last, partial pass
    passes = StretchedIndex(stretches=(Stretch(index=leaf, samples=range(20), times=2), last))
    assert [cursors(passes, at)[0, 4] for at in (39, 40, 41, 47)] == [19, 20, 1, 7]


def test_samples_in_an_order_of_their_own_have_no_cursor() -> None:
    old = Leaf(4)
    index = StretchedIndex(
        stretches=(
            Stretch(index=old, samples=range(10)),
            Stretch(index=old, samples=np.array([30, 12])),
        )
    )
    assert cursors(index, 10) == {(0, 4): 10}
    with pytest.raises(InvalidArgument, match="position 11 has no next samples"):
        cursors(index, 11)


def test_a_run_counts_its_sources(corpus: IndexedDataset) -> None:
    """Also those of an index that does not know how many it has."""
    lengths = np.array([30], np.int32)
    sources = [RunSource(name=name, sequence_lengths=lengths) for name in "abcd"]
    run = run_of_index(Foreign(), sources, global_batch_size=3)
    assert run.counts(0, 4).tolist() == [2, 1, 1, 0]
    assert run.counts(1, 2).tolist() == [0, 1, 0, 0]
    assert run.cursors(4) == {(0, 4): 2, (1, 4): 1, (2, 4): 1}
    one = run_of_index(built(corpus, "epoch"), global_batch_size=2)
    assert one.counts(3, 9).tolist() == [6]
    assert one.cursors(9) == {(0, 16): 9}


# epochs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    lengths = np.random.default_rng(8).integers(1, 60, 50)
    return write_corpus(tmp_path_factory.mktemp("counts") / "c", lengths)


def built(corpus: Any, order: Any, epochs: int = 3, **other: Any) -> Any:
    return megaindex.build_index(corpus, sequence_length=16, order=order, epochs=epochs, **other)


def test_epochs_that_are_cut_apart_have_whole_samples(corpus: IndexedDataset) -> None:
    for order in ("epoch", "window", "packed"):
        index = built(corpus, order)
        assert epoch_sizes(index) == {(0, 16): Fraction(index.num_samples, 3)}
    mixed = built(corpus, EpochOrder(epochs_mixed=3), epochs=6)
    assert epoch_sizes(mixed) == {(0, 16): Fraction(mixed.num_samples, 6)}
    blocks = BlockedIndex(
        blocks=PassBlocks(built(corpus, "epoch"), 200), sequence_length=4, num_epochs=3
    )
    assert epoch_sizes(blocks) == {(0, 4): blocks.samples_in_epochs(1)}


def test_epochs_that_are_cut_together_are_counted_by_volume(corpus: IndexedDataset) -> None:
    volume = Fraction(corpus.num_tokens, 16)
    carried = EpochOrder(epochs_mixed=3, left_over="carry")
    for order in ("megatron", "neox", EpochOrder(left_over="carry"), carried):
        assert epoch_sizes(built(corpus, order)) == {(0, 16): volume}
    assert epoch_sizes(Foreign()) == {(0, 4): Fraction(30, 4)}


def test_epochs_of_whole_documents_are_those_of_their_tokens(corpus: IndexedDataset) -> None:
    """Unpacked samples are the documents that are served, in one epoch or in parts of two."""
    order = PackingOrder(
        pack_impl="unpacked",
        documents=np.arange(len(corpus)),
        lengths=corpus.sequence_lengths,
        takes_part=np.ones(len(corpus), bool),
        sequence_length=16,
        seed=1,
        num_samples=70,
    )
    memory = Memory()
    build_packing(order, memory)
    index = index_of(order, memory.arrays, dataset=corpus, next_token=False)
    size = epoch_sizes(index)[0, 16]
    total = int(corpus.sequence_lengths[index.document_index].sum())
    assert size == Fraction(index.num_samples * corpus.num_tokens, total)


def test_epochs_of_sources_are_those_of_their_first_index(corpus: IndexedDataset) -> None:
    old = built(corpus, "neox", epochs=1)
    longer = extend_index(
        old, consumed_samples=30, more_samples=old.num_samples * 2, seed=1,
        further=lambda seed: built(corpus, "epoch", seed=seed, epochs=1),
    )  # fmt: skip
    volume, whole = Fraction(corpus.num_tokens, 16), Fraction(built(corpus, "epoch", 1).num_samples)
    assert epoch_sizes(longer) == {(0, 16): volume}
    blend = BlendedIndex(
        indices=(built(corpus, "epoch"), longer),
        dataset_index=np.zeros(3, np.int16),
        dataset_sample_index=np.arange(3),
    )
    assert epoch_sizes(blend) == {(0, 16): whole, (1, 16): volume}
    parts = [staged(np.random.default_rng(1), length) for length in LENGTHS]
    sizes = {(s, length): Fraction(100, length) for s in range(SOURCES) for length in LENGTHS}
    assert epoch_sizes(sequence(parts, first=3)) == sizes


@pytest.mark.parametrize(("order", "opens"), [("megatron", False), (PackedOrder(), True)])
def test_an_index_is_opened_only_if_its_order_decides_the_epoch(
    corpus: IndexedDataset, tmp_path: Path, order: Any, opens: bool
) -> None:
    settings: dict[str, Any] = {
        "weights": [2, 1], "num_samples": 50, "sequence_length": 16, "cache_dir": tmp_path,
    }  # fmt: skip
    write_corpus(tmp_path / "d", [40] * 9)
    prefixes = [corpus.path_prefix, str(tmp_path / "d")]
    first = megaindex.build_blend(prefixes, order=order, **settings)
    again = megaindex.build_blend(prefixes, order=order, **settings)
    assert epoch_sizes(again) == epoch_sizes(first)
    lazy = again.indices[1]
    assert isinstance(lazy, LazyIndex)
    assert ("index" in vars(lazy)) == opens
