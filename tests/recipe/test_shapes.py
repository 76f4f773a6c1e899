"""Stages with a sequence length and a batch of their own, against a model of the tokens served."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex import build_index
from megaindex.audit import audit, run_of_recipe
from megaindex.builders.recipe import OpenRecipe, open_recipe
from megaindex.errors import InvalidArgument
from megaindex.index.array_index import scan, served_tokens
from megaindex.index.orders.blocks import BlockedIndex, PassBlocks
from megaindex.index.skips import Skip
from megaindex.index.spans import sequence_lengths_at
from megaindex.lock import make_lock, open_run, run_of_lock, verify_lock
from megaindex.plan import RecipePlan, make_plan, recipe_plan
from megaindex.recipe import amend, check_past
from megaindex.run.subset import step_bounds_of
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.past import Past, PastRead
from megaindex.settings.recipe import (
    Recipe,
    RecipeEvaluation,
    RecipeSource,
    RecipeStage,
    Stream,
    default_block_tokens,
)
from megaindex.settings.recipe_file import recipe_of, to_mapping
from megaindex.settings.run_settings import Target

pytest.importorskip("torch")

from megaindex.loader import (
    BatchMaker,
    MappedTokens,
    MicroBatchSampler,
    SourceProgress,
    check_receipts,
    join_states,
    loader_of_recipe,
)

TOKENS = {"web": 1500, "code": 400}
BLOCKS = {"web": 70, "code": 40}
LENGTHS = (4, 8, 16, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    rng = np.random.default_rng(7)
    for name, tokens in TOKENS.items():
        lengths = rng.multinomial(tokens, rng.dirichlet([0.4] * 80))
        write_corpus(folder / name, lengths)
    return folder


def sources(folder: Path, **more: Any) -> tuple[RecipeSource, ...]:
    return tuple(
        RecipeSource(name=name, path=str(folder / name), block_tokens=BLOCKS[name], **more)
        for name in TOKENS
    )


def stage(name: str, steps: int, shares: dict[str, int], **shape: Any) -> RecipeStage:
    return RecipeStage(
        name=name,
        streams=tuple(Stream(source=s, proportion=Fraction(w)) for s, w in shares.items()),
        length=Target(kind="iterations", value=Fraction(steps)),
        **shape,
    )


def three_stages(folder: Path) -> Recipe:
    """Samples of 4, 16 and 32 tokens, like 4k, 32k and 128k."""
    mix = {"web": 3, "code": 1}
    return Recipe(
        sequence_length=4,
        batch=BatchSchedule.constant(12),
        micro_batch_size=3,
        data_parallel_size=2,
        sources=sources(folder),
        stages=(
            stage("short", 7, mix),
            stage("long", 5, mix, sequence_length=16, micro_batch_size=1,
                  batch=BatchSchedule(stages=((0, 2), (6, 4)))),
            stage("longest", 3, mix, sequence_length=32, micro_batch_size=1,
                  batch=BatchSchedule.constant(2)),
        ),
    )  # fmt: skip


def test_lengths_of_a_source_are_those_of_all_its_stages(folder: Path) -> None:
    recipe = three_stages(folder)
    last = replace(recipe.stages[2], streams=recipe.stages[2].streams[:1])  # of web alone
    recipe = replace(recipe, stages=(*recipe.stages[:2], last))
    assert recipe.lengths_of("web") == (4, 16, 32)
    assert recipe.lengths_of("code") == (4, 16)


def test_a_batch_has_samples_of_one_length(folder: Path) -> None:
    opened = open_recipe(three_stages(folder))
    maker = BatchMaker(opened.index, MappedTokens(opened.datasets))
    first, long = 0, 7 * 12  # of the first two stages
    short = maker.for_samples([first, long - 1, None])
    assert short.sequence_length == 4
    assert maker.for_samples([long, long]).sequence_length == 16
    with pytest.raises(InvalidArgument, match=r"must have one sequence length, got \[4, 16\]"):
        maker.for_samples([long - 1, long])
    buffers = short.allocate(1)
    short.fill(buffers, [first])
    with pytest.raises(InvalidArgument, match="the buffers have rows of 4 tokens and the samples"):
        short.fill(buffers, [long])


def test_progress_of_a_source_shorter_than_another_sources_samples(folder: Path) -> None:
    """Code holds 400 tokens, and the last stage reads web in samples of 512."""
    recipe = three_stages(folder)
    web, code = recipe.sources
    last = stage("longest", 2, {"web": 1}, sequence_length=512, batch=BatchSchedule.constant(6))
    opened = open_recipe(
        replace(
            recipe,
            sources=(replace(web, block_tokens=600), code),
            stages=(*recipe.stages[:2], last),
        )
    )
    layout = opened.layout
    row = SourceProgress.of_recipe(opened).totals(layout.end_sample)[1]
    short, long = (
        sum(piece.counts[1] for piece in layout.stages if piece.sequence_length == length)
        for length in (4, 16)
    )
    assert (row.source, row.tokens) == ("code", 4 * short + 16 * long)
    sizes = layout.size_at(1, 4).samples, layout.size_at(1, 16).samples
    assert row.epochs == float(Fraction(short, sizes[0]) + Fraction(long, sizes[1]))


def test_a_limit_within_an_epoch_of_blocks_is_rounded_down(folder: Path) -> None:
    recipe = three_stages(folder)
    blocks = open_recipe(recipe).layout.sizes[0].blocks
    assert blocks is not None
    epoch = blocks.samples_in_epochs(1)
    limited = replace(recipe.sources[0], max_fraction=Fraction(83, 4 * epoch))  # 20.75 samples
    first = stage("short", 99, {"web": 1}, micro_batch_size=1, data_parallel_size=1,
                  batch=BatchSchedule.constant(1))  # fmt: skip
    stopped = replace(
        recipe,
        sources=(limited, recipe.sources[1]),
        stages=(first, *recipe.stages[1:]),
        exhaustion="stop",
    )
    assert open_recipe(stopped).layout.drawn() == [20, 0]


def test_a_stage_in_which_a_source_ends_has_one_shape(folder: Path) -> None:
    """Code ends in the stage of samples of 16, whose micro batches begin with the stage."""
    recipe = three_stages(folder)
    web, code = recipe.sources
    ending = replace(
        recipe,
        exhaustion="continue",
        sources=(web, replace(code, max_fraction=Fraction(1, 4))),
    )
    opened = open_recipe(ending)
    pieces = [piece.name for piece in opened.layout.stages]
    assert pieces == ["short", "long", "long", "longest", "longest"]
    loader = loader_of_recipe(opened, data_parallel_rank=0)
    shapes = [tuple(batch["tokens"].shape) for batch in loader]
    assert shapes == [(3, 4)] * 14 + [(1, 16)] * 7 + [(1, 32)] * 3


@pytest.mark.parametrize(("block_tokens", "apart"), [(20_000, 64), (2000, 32), (500, 8)])
def test_blocks_end_a_power_of_two_of_documents_apart(
    tmp_path: Path, block_tokens: int, apart: int
) -> None:
    """At most 64: 40,000 documents of two tokens, of which a block holds 10,000, 1,000 and 250."""
    write_corpus(tmp_path / "web", [2] * 40_000)
    epochs: Any = build_index(tmp_path / "web", sequence_length=16, order="epoch")
    bounds = PassBlocks(epochs, block_tokens).starts(0)
    assert bounds[-1] == 80_000
    least = -(-block_tokens // (2 * apart)) * 2 * apart
    assert np.diff(bounds)[:-1].tolist() == [least] * (len(bounds) - 2)


def test_the_first_epoch_of_a_source_ends_where_it_is_restarted(folder: Path) -> None:
    recipe = three_stages(folder)
    last = recipe.stages[2]
    again = replace(last, streams=tuple(replace(s, restart=True) for s in last.streams))
    facts = [
        [source.blocks for source in make_plan(replace(recipe, stages=s)).sources]
        for s in (
            recipe.stages[:2],
            (*recipe.stages[:2], again, replace(last, name="more")),
            recipe.stages,
        )
    ]
    assert facts[0] == facts[1] != facts[2]


@for_each("seed", range(40))
def test_the_first_repeat_after_a_restart_is_that_of_the_audit(seed: int, tmp_path: Path) -> None:
    """At the same length or another, with blocks of which the stages before read a part."""
    rng = np.random.default_rng(seed)
    write_corpus(tmp_path / "web", rng.integers(1, 60, 60))
    stages = {}
    for name in "abcd":
        stream = {"proportion": 1, "restart": bool(name != "a" and rng.random() < 0.6)}
        stages[name] = {
            "steps": int(rng.integers(1, 9)), "sequence_length": int(rng.choice([4, 8, 16, 32])),
            "mix": {"web": stream},
        }  # fmt: skip
    web = {"path": "web", "order": "blocks", "block_tokens": int(rng.choice([70, 200]))}
    batch = {"micro_batch_size": 1, "data_parallel_size": 1, "global_batch_size": 2}
    mapping = {
        "sequence_length": 4,
        "batch": batch,
        "sources": {"web": web},
        "seed": seed,
        "stages": stages,
    }
    recipe = recipe_of(mapping, "r", tmp_path)
    repeats = [each.first_repeat for each in make_plan(recipe).draws]
    (counted,) = audit(run_of_recipe(recipe)).to_json()["sources"]
    expected = counted["first_repeated_step"]
    assert min((each for each in repeats if each is not None), default=None) == expected


def test_the_first_sample_that_was_read_at_another_length(folder: Path) -> None:
    """Of an epoch of several blocks, against the tokens of every sample."""
    epochs: Any = build_index(folder / "web", sequence_length=8, order="epoch")
    blocks = PassBlocks(epochs, 200)
    rng, answers = np.random.default_rng(5), set()
    for ours, theirs in ((8, 16), (16, 4), (8, 8)):
        one, other = (
            BlockedIndex(blocks=blocks, sequence_length=length, num_epochs=1)
            for length in (ours, theirs)
        )
        assert one.num_blocks > 3
        tokens, read = (
            [
                {(d, t) for d, o, n in zip(*columns, strict=True) for t in range(o, o + n)}
                for spans in map(index.locate, np.arange(index.num_samples)[:, None])
                for columns in [(spans.document, spans.offset, spans.input_lengths(length))]
            ]
            for index, length in ((one, ours), (other, theirs))
        )
        for _ in range(40):
            begin, end = sorted(rng.choice(one.num_samples + 1, 2, replace=False).tolist())
            first, last = sorted(rng.choice(other.num_samples + 1, 2, replace=False).tolist())
            served = set().union(*read[first:last])
            again = [sample for sample in range(begin, end) if tokens[sample] & served]
            expected = min(again, default=end)
            assert one.first_again(begin, end, other, first, last) == expected
            answers.add("none" if not again else "first" if expected == begin else "later")
    assert answers == {"none", "first", "later"}


@given(
    size=st.integers(1, 6),
    cuts=st.lists(st.integers(0, 20), max_size=6, unique=True).map(sorted),
)
@example(size=5, cuts=[0, 3, 5, 10])
@example(size=5, cuts=[0, 3, 5, 9])
def test_samples_of_an_epoch_that_no_range_serves(size: int, cuts: list[int]) -> None:
    served = list(zip(cuts[::2], cuts[1::2], strict=False))
    samples = {sample for begin, end in served for sample in range(begin, end)}
    epochs = [set(range(k * size, k * size + size)) for k in range(20 // size + 1)]
    unseen = 0 if any(each <= samples for each in epochs) else len(epochs[0] - samples)
    assert recipe_plan._unseen(size, served) == unseen


def test_epochs_read_are_counted_to_the_sample(folder: Path) -> None:
    blocks = open_recipe(three_stages(folder)).layout.sizes[0].blocks
    assert blocks is not None
    one, two = (blocks.samples_in_epochs(epochs) for epochs in (1, 2))
    assert blocks.samples_per_epoch == blocks.extend(3).samples_per_epoch == one
    for further in (1, (two - one) // 3, two - one):
        assert blocks.epochs_read(one + further) == 1 + further / (two - one)


@dataclass
class ModelSource:
    """Reads a source block by block, in plain loops."""

    index: BlockedIndex
    block_tokens: int
    epoch: int = 0
    block: int = 0
    sample: int = 0
    length: int | None = None
    deferred: int = 0
    served: list[tuple[int, int, int]] = field(default_factory=list)
    """(epoch, document, token) of every input token."""

    def __post_init__(self) -> None:
        self.bounds, self.tokens, self.order = (
            lru_cache(find) for find in (self._bounds, self._tokens, self._order)
        )

    def _bounds(self, epoch: int) -> list[tuple[int, int]]:
        """First and end token of each block of the epoch, bounded at every ``apart`` documents."""
        lengths = self.index.datasets[0].sequence_lengths
        order = self.index.blocks.epochs.permuted_documents(epoch)
        apart, total, bounds, begin, tokens = self.index.blocks.apart, int(lengths.sum()), [], 0, 0
        for number, document in enumerate(order.tolist()):
            is_bound = number % apart == 0
            if is_bound and tokens - begin >= self.block_tokens <= total - tokens:
                bounds.append((begin, tokens))
                begin = tokens
            tokens += int(lengths[document])
        return [*bounds, (begin, total)]

    def _tokens(self, epoch: int) -> list[tuple[int, int]]:
        lengths = self.index.datasets[0].sequence_lengths
        order = self.index.blocks.epochs.permuted_documents(epoch)
        return [(d, t) for d in order.tolist() for t in range(int(lengths[d]))]

    def _order(self, epoch: int, block: int, length: int) -> list[int]:
        """The samples of a block in the order of its bijection, by the number of the block."""
        index = self.index.at_length(length).extend(epoch + 1)
        return index.shuffled_samples(int(index._first_blocks[epoch]) + block).tolist()

    def next_samples(self, count: int, length: int) -> list[set[tuple[int, int]]]:
        """The samples of each block that is read, as sets: their order in it is a bijection's."""
        if self.length not in (None, length) and self.sample:
            begin, end = self.bounds(self.epoch)[self.block]
            whole = (end - begin - 1) // self.length
            self.deferred += (whole - self.sample) * self.length
            self.block, self.sample = self.block + 1, 0
        self.length = length
        found: list[set[tuple[int, int]]] = []
        while len(found) < count:
            if self.block == len(self.bounds(self.epoch)):
                self.epoch, self.block = self.epoch + 1, 0
            begin, end = self.bounds(self.epoch)[self.block]
            whole = (end - begin - 1) // length
            order = self.order(self.epoch, self.block, length)
            assert sorted(order) == list(range(whole))
            tokens = self.tokens(self.epoch)
            for cut in order[self.sample : self.sample + count - len(found)]:
                first = begin + cut * length
                found.append(set(tokens[first : first + length]))
                assert first + length < end
                self.served += [(self.epoch, *token) for token in tokens[first : first + length]]
                self.sample += 1
            if self.sample == whole:
                self.block, self.sample = self.block + 1, 0
        return found


def inputs(opened: OpenRecipe, position: int) -> tuple[int, set[tuple[int, int]], int]:
    """Source, (document, token) of every input token, and length of a sample."""
    index: Any = opened.index
    spans = index.locate([position])
    length = getattr(index, "sequence_lengths_at", lambda _: [index.sequence_length])([position])[0]
    assert int(spans.length.sum()) == length + 1
    places = set()
    columns = (spans.document, spans.offset, spans.input_lengths(int(length)))
    for document, offset, count in zip(*(column.tolist() for column in columns), strict=True):
        places |= {(document, token) for token in range(offset, offset + count)}
    assert len(places) == length
    return int(spans.source[0]), places, int(length)


def check_against_model(opened: OpenRecipe, plan: RecipePlan) -> None:
    """Every sample is the next one of its source in the model, and the plan's numbers are its."""
    recipe = opened.layout.recipe
    models = [
        ModelSource(source.epoch, source.epoch.blocks.block_tokens)  # type: ignore[attr-defined,arg-type]
        for source in opened.sources
    ]
    position = tokens = step = begun = 0
    for each, ranges in itertools.zip_longest(
        recipe.stages, [list(g) for _, g in itertools.groupby(plan.steps, lambda r: r.stage)]
    ):
        length = recipe.length_of(each)
        for row in ranges:
            assert (row.first_step, row.first_sample, row.first_token) == (step, position, tokens)
            assert (row.stage, row.sequence_length) == (each.name, length)
            steps = row.end_step - row.first_step
            sizes = [row.batch_size] * steps if row.batch_sizes is None else row.batch_sizes
            assert len(sizes) == steps
            for size in sizes:
                assert position == opened.layout.batch.samples_after(step)
                for number in range(size):
                    source, places, width = inputs(opened, position)
                    assert width == length
                    begun = source if number == 0 else begun
                    assert begun == source or each.batching != "per_stream"
                    assert models[source].next_samples(1, length) == [places]
                    position, tokens = position + 1, tokens + length
                step += 1
    assert (plan.train_iters, plan.samples_consumed, plan.tokens_consumed) == (
        step,
        position,
        tokens,
    )
    for model, total in zip(models, plan.sources, strict=True):
        assert max(Counter(model.served).values(), default=1) == 1  # once an epoch
        facts = total.blocks
        assert facts is not None
        assert facts.served == sum(epoch == 0 for epoch, _, _ in model.served)
        whole = facts.served + facts.dropped + facts.deferred + facts.unread
        assert whole == total.tokens_per_epoch
        if model.epoch == 0 and model.length is not None:
            assert facts.deferred == model.deferred


@st.composite
def recipes(draw: st.DrawFn, folder: Path) -> Recipe:
    lengths = draw(st.lists(st.sampled_from(LENGTHS), min_size=2, max_size=4))
    stages = []
    for number, length in enumerate(lengths):
        names = draw(st.lists(st.sampled_from(sorted(TOKENS)), min_size=1, unique=True))
        rounds = draw(st.sampled_from([((0, 4),), ((0, 8),), ((0, 12), (13, 4))]))
        batching = draw(st.sampled_from(["stratified", "random", "per_stream"]))
        each = stage(
            f"s{number}",
            draw(st.integers(1, 6)),
            {name: draw(st.integers(1, 4)) for name in names},
            sequence_length=length,
            batch=BatchSchedule(stages=rounds),
            micro_batch_size=draw(st.sampled_from([None, 1, 2])),
        )
        streams = each.streams
        if batching == "per_stream":
            streams = tuple(replace(s, batch_size=draw(st.sampled_from([4, 8, 12])))
                            for s in streams)  # fmt: skip
        stages.append(replace(each, batching=batching, streams=streams))
    return Recipe(
        sequence_length=8, batch=BatchSchedule.constant(4), data_parallel_size=2,
        sources=sources(folder, order="blocks"), stages=tuple(stages),
    )  # fmt: skip


CLUSTERS = ((1, None), (2, None), (2, 2), (4, 1), (1, 4))


@settings(max_examples=3)
@given(data=st.data())
def test_any_stages_serve_each_token_once(folder: Path, data: st.DataObject) -> None:
    check_stages(folder, data)


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data())
def test_many_stages_serve_each_token_once(folder: Path, data: st.DataObject) -> None:
    check_stages(folder, data)


def check_stages(folder: Path, data: st.DataObject) -> None:
    """Random shapes, killed and resumed on other ranks and micro batches: the tokens of the model,
    and receipts equal to the plan's."""
    opened = open_recipe(data.draw(recipes(folder)))
    # a stage that names a source ends its block of another length, even if it draws none of it
    assume(all(min(each.counts) > 0 for each in opened.layout.stages))
    check_against_model(opened, make_plan(opened.layout))
    states: list[dict[str, Any]] = []
    read: list[tuple[int, ...]] = []
    for _ in range(5):
        ranks, micro = data.draw(st.sampled_from(CLUSTERS))
        loaders = [
            loader_of_recipe(opened, data_parallel_rank=rank, data_parallel_size=ranks,
                         micro_batch_size=micro, read_ahead=0, content=None)
            for rank in range(ranks)
        ]  # fmt: skip
        if states:
            joined = join_states(states)
            if joined["sampler"]["rows_left"] % (ranks * (micro or 2)):
                continue  # within a step, micro batches must divide its rows left
            for loader in loaders:
                loader.load_state_dict(joined)
        rounds = data.draw(st.integers(0, 9))
        for batches in itertools.islice(zip(*loaders, strict=True), rounds):
            read += [tuple(row.tolist()) for batch in batches for row in batch["tokens"]]
        states = [loader.state_dict() for loader in loaders]
        last = loaders[0]
        assert last.samples_consumed == last.consumed_samples == len(read)
        assert last.tokens_consumed == sum(map(len, read))
        if last.consumed_samples == opened.index.num_samples:
            break
    assume(states)
    assert check_receipts(states, opened.index).equal
    expected = []
    for position in range(len(read)):
        spans = opened.index.locate([position])
        texts = [opened.datasets[s].get(d, o, n) for s, d, o, n in zip(*spans, strict=True)]
        expected.append(tuple(np.concatenate(texts).tolist()[:-1]))
    assert sorted(read) == sorted(expected)


@settings(max_examples=3)
@given(data=st.data())
def test_no_mix_repeats_a_source_before_its_bound(folder: Path, data: st.DataObject) -> None:
    check_mix_bounds(folder, data)


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data())
def test_no_mix_of_many_stages_repeats_before(folder: Path, data: st.DataObject) -> None:
    check_mix_bounds(folder, data)


@pytest.mark.parametrize(
    ("sizes", "steps", "first", "planned"),
    [((None, None), 60, 25, 50), ((4, 4), 60, 25, 50), ((4, 8), 60, 38, 38),
     ((None, None), 25, None, None), ((None, None), 26, 25, None), ((None, None), 50, 25, None),
     ((None, None), 51, 25, 50)],
)  # fmt: skip
def test_streams_with_batches_of_their_own_keep_their_mix(
    sizes: tuple[int | None, ...], steps: int, first: int | None, planned: int | None
) -> None:
    """Two sources of 100 samples: alone, one lasts 25 steps of 4, and half of the run 50."""
    streams = tuple(
        Stream(source=name, proportion=Fraction(1), batch_size=size)
        for name, size in zip("ab", sizes, strict=True)
    )
    length = Target(kind="iterations", value=Fraction(steps))
    recipe = Recipe(
        sources=tuple(RecipeSource(name=name, tokens=16 * 100 + 1) for name in "ab"),
        stages=(RecipeStage(name="s", streams=streams, batching="per_stream", length=length),),
        sequence_length=16, batch=BatchSchedule.constant(4), exhaustion="repeat",
    )  # fmt: skip
    plan = make_plan(recipe, mix_bounds=True)
    bound = plan.mix_bounds[0]
    assert (bound.first_step, bound.planned_step) == (first, planned)


def check_mix_bounds(folder: Path, data: st.DataObject) -> None:
    """The first repeat of plans with random changes, and with the source alone, at the bound."""
    recipe = data.draw(recipes(folder))
    recipe = replace(recipe, stages=tuple(
        replace(each, length=Target(kind="iterations", value=Fraction(data.draw(
            st.sampled_from([3, 9, 30])))))
        for each in recipe.stages
    ))  # fmt: skip
    plan = make_plan(open_recipe(recipe).layout, mix_bounds=True)
    assert plan.mix_bounds is not None
    for bound in plan.mix_bounds:
        for alone in (True, False):
            loader = loader_of_recipe(open_recipe(recipe), data_parallel_size=1, micro_batch_size=4)
            for begin, each in zip(stage_steps(plan), recipe.stages, strict=True):
                names = list(TOKENS)  # with one length, any source
                if recipe.has_lengths:
                    names = [stream.source for stream in each.streams]
                weights = {name: data.draw(st.integers(1, 4)) for name in names}
                if alone and bound.source in names:
                    weights = {bound.source: 1}
                with contextlib.suppress(InvalidArgument):  # steps of several sizes keep theirs
                    loader.set_mix(weights, at=begin)
            changed = make_plan(loader.layout, mix_bounds=True)
            repeats = [row.first_repeat for row in changed.draws
                       if row.source == bound.source and row.first_repeat is not None]  # fmt: skip
            found = min(repeats, default=None)
            assert changed.mix_bounds is not None
            (row,) = [row for row in changed.mix_bounds if row.source == bound.source]
            assert row.planned_step == found
            if alone:
                assert bound.first_step == found
            else:
                assert found is None or (bound.first_step or 0) <= found
                assert found is None or bound.first_step is not None


def stage_steps(plan: RecipePlan) -> list[int]:
    """The first step of each stage."""
    firsts: dict[str, int] = {}
    for row in plan.steps:
        firsts.setdefault(row.stage, row.first_step)
    return list(firsts.values())


PASTS = (
    None,
    {"steps": 3, "read": [PastRead(source="web", epochs=Fraction(7, 3))]},
    {"steps": 9, "read": [PastRead(source="code", tokens=150), PastRead(source="web", samples=1)]},
)


@settings(max_examples=3)
@given(data=st.data())
def test_locks_of_any_stages(folder: Path, data: st.DataObject) -> None:
    check_lock(folder, data)


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data())
def test_locks_of_many_stages(folder: Path, data: st.DataObject) -> None:
    check_lock(folder, data)


def check_lock(folder: Path, data: st.DataObject) -> None:
    """Random shapes, pasts and changes of the mix: a lock has their samples and gives the run."""
    recipe, given_past = data.draw(recipes(folder)), data.draw(st.sampled_from(PASTS))
    past = given_past and Past(steps=given_past["steps"], read=tuple(given_past["read"]))
    recipe = replace(recipe, past=past)
    loader = loader_of_recipe(open_recipe(recipe), data_parallel_size=1, micro_batch_size=4)
    first = 0 if past is None else past.steps
    for at in sorted(data.draw(st.sets(st.integers(0, 20), max_size=4))):
        with contextlib.suppress(InvalidArgument):  # stages that keep their weights
            loader.set_mix({"web": data.draw(st.integers(0, 3)), "code": 1}, at=first + at)
    changes = loader.recipe.mix_changes
    if changes is not None and changes.size:
        recipe = replace(recipe, mix_changes=changes.write(folder / "mix.npy", overwrite=True))
    opened = open_recipe(recipe)
    lock = make_lock(recipe).write(folder / "run.lock", overwrite=True)
    assert verify_lock(lock.path, whole=True).findings == ()
    again = open_run(lock, data_parallel_size=2, micro_batch_size=None)
    assert again.index.num_samples == opened.index.num_samples
    positions = np.arange(opened.layout.recipe.first_sample, opened.index.num_samples)
    for index in (run_of_lock(lock).index, again.index):
        theirs, ours = index.locate(positions), opened.index.locate(positions)
        assert [a.tolist() for a in theirs] == [b.tolist() for b in ours]
        assert np.array_equal(
            sequence_lengths_at(index, positions), sequence_lengths_at(opened.index, positions)
        )


def test_three_lengths_end_to_end(folder: Path) -> None:
    recipe = three_stages(folder)
    opened = open_recipe(recipe)
    plan = make_plan(opened.layout)
    check_against_model(opened, plan)
    assert opened.layout.batch.stages == ((0, 12), (84, 2), (90, 4), (98, 2))
    rows = [(r.stage, r.first_step, r.end_step, r.batch_size) for r in plan.steps]
    assert rows == [
        ("short", 0, 7, 12),
        ("long", 7, 10, 2),
        ("long", 10, 12, 4),
        ("longest", 12, 15, 2),
    ]
    assert plan.to_json()["steps"][3]["first_token"] == 84 * 4 + 14 * 16
    assert "4 → 16 → 32 tokens a sample" in repr(plan)
    loaders = [loader_of_recipe(opened, data_parallel_rank=rank) for rank in range(2)]
    shapes = Counter(tuple(batch["tokens"].shape) for batch in loaders[0])
    assert shapes == {(3, 4): 14, (1, 16): 7, (1, 32): 3}
    counted = audit(run_of_recipe(recipe)).exposure.total.tokens.tolist()
    for row, total in zip(counted, plan.sources, strict=True):
        assert total.blocks is not None
        assert row == [total.tokens_per_epoch - total.blocks.served, total.blocks.served]


def test_a_stage_that_draws_none_of_a_source_is_counted(folder: Path) -> None:
    """It names the source, so it ends its block; what is read before and after is all counted."""
    recipe = replace(three_stages(folder), stages=(
        stage("a", 4, {"web": 1, "code": 1}),
        stage("b", 1, {"web": 1, "code": 13}, sequence_length=32,
              batch=BatchSchedule.constant(6)),
        stage("c", 3, {"web": 1}),
    ))  # fmt: skip
    opened = open_recipe(recipe)
    assert opened.layout.stages[1].counts[0] == 0
    web = make_plan(opened.layout).sources[0]
    seen = {
        place
        for position in range(opened.index.num_samples)
        for source, places, _ in [inputs(opened, position)]
        for place in places
        if source == 0
    }
    assert web.blocks is not None
    assert web.blocks.served == len(seen)


def test_documents_not_begun_stay_whole(folder: Path) -> None:
    """A later stage reads whole documents: all but those that a cut of its own divides."""
    opened = open_recipe(three_stages(folder))
    by_stage: list[set[tuple[int, int]]] = [set(), set(), set()]
    for position in range(opened.index.num_samples):
        source, places, length = inputs(opened, position)
        by_stage[(4, 16, 32).index(length)] |= {(source, document) for document, _ in places}
    for earlier, later in itertools.combinations(by_stage, 2):
        assert not earlier & later


def test_batches_of_stages_leave_the_order_as_it_is(folder: Path) -> None:
    mix = {"web": 3, "code": 1}
    plain = Recipe(
        sequence_length=8, batch=BatchSchedule.constant(6),
        sources=tuple(replace(s, block_tokens=None) for s in sources(folder)),
        stages=(stage("a", 5, mix), stage("b", 8, mix)),
    )  # fmt: skip
    own = BatchSchedule(stages=((0, 4), (10, 8)))
    changed = replace(plain, stages=(plain.stages[0], stage("b", 6, mix, batch=own)))
    one, other = open_recipe(plain), open_recipe(changed)
    assert other.layout.batch.stages == ((0, 6), (30, 4), (40, 8))
    assert other.index.num_samples == 30 + 3 * 4 + 3 * 8
    count = min(one.index.num_samples, other.index.num_samples)
    for a, b in zip(one.index.locate(range(count)), other.index.locate(range(count)), strict=True):
        assert np.array_equal(a, b)
    lock = make_lock(changed)
    assert lock.content["subsets"]["train"]["steps"] == [[0, 6, 5], [30, 4, 3], [42, 8, 3]]


def test_amended_with_a_longer_stage(folder: Path) -> None:
    recipe = replace(three_stages(folder), sources=tuple(
        replace(source, order="blocks", block_tokens=None) for source in sources(folder)
    ), stages=three_stages(folder).stages[:1])  # fmt: skip
    old = open_recipe(recipe)
    loader = loader_of_recipe(old, data_parallel_size=1, micro_batch_size=12)
    for _ in itertools.islice(loader, 4):
        pass
    state = loader.state_dict()
    longer = stage("longer", 4, {"web": 1}, sequence_length=32, batch=BatchSchedule.constant(2))
    longer = replace(longer, micro_batch_size=1)
    new = open_recipe(amend(old.layout, consumed_samples=48, stages=[longer]))
    check_past(old.layout, new.layout, 48)
    blocks = [source.block_tokens for source in new.layout.recipe.sources]
    assert blocks == [size.blocks.blocks.block_tokens for size in old.layout.sizes if size.blocks]
    going_on = loader_of_recipe(new, data_parallel_size=1)
    going_on.load_state_dict(state)
    rest = [tuple(batch["tokens"].shape) for batch in going_on]
    assert rest == [(1, 32)] * 8
    assert check_receipts([going_on.state_dict()], new.index).equal


def test_a_past_in_order_epoch_cannot_change_its_length(folder: Path) -> None:
    plain = tuple(replace(s, block_tokens=None) for s in sources(folder))
    recipe = replace(three_stages(folder), sources=plain, stages=three_stages(folder).stages[:1])
    old = open_recipe(recipe)
    longer = stage("longer", 1, {"web": 1}, sequence_length=8)
    new = open_recipe(amend(old.layout, consumed_samples=48, stages=[longer]))
    with pytest.raises(InvalidArgument, match="begin such runs with order: blocks"):
        check_past(old.layout, new.layout, 48)
    loader = loader_of_recipe(old, data_parallel_size=1)
    _ = list(itertools.islice(loader, 16))
    with pytest.raises(InvalidArgument, match="read it in order epoch"):
        loader_of_recipe(new, data_parallel_size=1).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("length", [4, 16])
def test_documents_are_found_without_a_scan(folder: Path, length: int) -> None:
    opened = open_recipe(three_stages(folder))
    source = opened.sources[0]
    documents = np.arange(0, 80, 3)
    for index, number in ((source.index(600, length), 0), (opened.index, 0), (opened.index, 1)):
        found, expected = served_tokens(index, documents, number), scan(index, documents, number)
        rows = [sorted(zip(*each, strict=True)) for each in (found, expected)]
        assert rows[0] == rows[1]
        assert rows[0]


def test_blocks_of_epochs_to_come_do_not_change(folder: Path) -> None:
    source = open_recipe(three_stages(folder)).sources[0]
    few, many = source.epoch.extend(1), source.epoch.extend(3)
    for a, b in zip(few.locate(range(few.num_samples)), many.locate(range(few.num_samples)),
                    strict=True):  # fmt: skip
        assert np.array_equal(a, b)


def test_default_blocks_do_not_depend_on_shorter_stages() -> None:
    assert default_block_tokens(10**12, 131_072) == default_block_tokens(10**12, 4096) == 2**23
    assert default_block_tokens(10**6, 4096) == 16 * 4096


def test_stages_of_other_numbers_of_ranks(folder: Path) -> None:
    """The loader stops, in words, where a stage needs other ranks, which go on from its state."""
    recipe = three_stages(folder)
    alone = replace(recipe.stages[2], data_parallel_size=1, batch=BatchSchedule.constant(1))
    opened = open_recipe(replace(recipe, stages=(*recipe.stages[:2], alone)))
    with pytest.raises(InvalidArgument, match="data_parallel_size is missing"):
        loader_of_recipe(opened)
    loaders = [
        loader_of_recipe(opened, data_parallel_rank=r, data_parallel_size=2) for r in range(2)
    ]
    for loader in loaders:
        iterator = iter(loader)
        assert len([next(iterator) for _ in range(len(loader))]) == 14 + 7
        with pytest.raises(InvalidArgument, match="is not for 2 ranks"):
            next(iterator)
    last = loader_of_recipe(opened, data_parallel_size=1)
    last.load_state_dict(join_states([loader.state_dict() for loader in loaders]))
    assert [tuple(batch["tokens"].shape) for batch in last] == [(1, 32)] * 3
    assert check_receipts([last.state_dict()], opened.index).equal


def test_ranks_that_no_stage_is_for_are_refused(folder: Path) -> None:
    recipe = three_stages(folder)
    with pytest.raises(InvalidArgument, match="global batch size 12 must be a multiple"):
        loader_of_recipe(open_recipe(recipe), data_parallel_size=16)
    alone = replace(recipe.stages[2], data_parallel_size=1)
    opened = open_recipe(replace(recipe, stages=(*recipe.stages[:2], alone)))
    with pytest.raises(InvalidArgument, match="no stage is for 16 ranks"):
        loader_of_recipe(opened, data_parallel_size=16)


def test_large_blocks_are_warned_of(folder: Path) -> None:
    """A block of the whole epoch defers all that the first stage left of it."""
    whole = tuple(replace(source, block_tokens=10**6) for source in sources(folder))
    plan = make_plan(open_recipe(replace(three_stages(folder), sources=whole)).layout)
    assert [draw.first_repeat for draw in plan.draws[2:4]] == [7, 8]
    assert plan.warnings[0].startswith("web: ")
    assert "lower its block_tokens, 1,000,000" in plan.warnings[0]
    assert plan.draws[2].to_json()["deferred"] == plan.sources[0].blocks.deferred  # type: ignore[union-attr]


def test_positions_of_a_sampler_with_changing_micro_batches() -> None:
    schedule = BatchSchedule(stages=((0, 8), (24, 4)))
    sampler = MicroBatchSampler(
        num_samples=50, micro_batch_size=[(0, 2), (16, 4), (24, 1)], data_parallel_rank=1,
        data_parallel_size=2, global_batch_size=schedule, tail="pad",
    )  # fmt: skip
    batches = list(sampler)
    assert [len(batch) for batch in batches] == [2] * 4 + [4] + [1] * 14
    assert len(sampler) == len(batches)
    for number in range(len(batches) + 1):
        state = sampler.state_after(number)
        other = MicroBatchSampler(
            num_samples=50, micro_batch_size=[(0, 2), (16, 4), (24, 1)], data_parallel_rank=1,
            data_parallel_size=2, global_batch_size=schedule, tail="pad",
        )  # fmt: skip
        other.load_state_dict(state)
        assert list(other) == batches[number:]


def test_recipes_are_read_as_they_are_written(folder: Path) -> None:
    for recipe in (
        three_stages(folder),
        replace(three_stages(folder), evaluation=RecipeEvaluation(
            source=RecipeSource(name="validation", path=str(folder / "code")), sequence_length=16)),
    ):  # fmt: skip
        assert open_recipe(recipe_of(to_mapping(recipe), "again", Path("/"))).layout.ends == (
            open_recipe(recipe).layout.ends
        )
        again = to_mapping(recipe_of(to_mapping(recipe), "again", Path("/")))
        assert to_mapping(recipe_of(again, "again", Path("/"))) == again


def shape_of(batch: dict[str, Any], own: dict[str, Any]) -> RecipeStage:
    """The second stage of a recipe file with these batches."""
    top = {"sequence_length": 8, "batch": batch, "sources": {"web": {"tokens": 9000}}}
    one = {"steps": 1, "mix": {"web": 1}}
    mapping = {**top, "stages": {"a": one, "b": {**one, "batch": own}}}
    recipe = recipe_of(mapping, "run.yaml", Path("/"))
    assert recipe_of(to_mapping(recipe), "again", Path("/")).stages == recipe.stages
    return recipe.stages[1]


@pytest.mark.parametrize(
    ("own", "sizes", "micro", "accumulation"),
    [
        ({"micro_batch_size": 1}, ((0, 4),), 1, 2),
        ({"global_batch_size": 32}, ((0, 32),), None, 4),
        ({"gradient_accumulation_steps": 3}, ((0, 24),), None, 3),
        ({"schedule": "0:8 80:16"}, ((0, 8), (10, 16)), None, None),
    ],
)
def test_a_stage_inherits_the_batch_of_the_recipe(
    own: dict[str, Any], sizes: Any, micro: int | None, accumulation: int | None
) -> None:
    top = {"micro_batch_size": 4, "data_parallel_size": 2, "gradient_accumulation_steps": 2}
    found = shape_of(top, own)
    assert found.batch is not None
    assert found.batch.stages == sizes
    assert (found.micro_batch_size, found.gradient_accumulation_steps) == (micro, accumulation)


def test_a_stage_keeps_the_global_batch_of_the_recipe() -> None:
    found = shape_of({"global_batch_size": 16}, {"micro_batch_size": 2})
    assert (found.batch, found.micro_batch_size) == (None, 2)


def refused(recipe: Recipe, **changes: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        open_recipe(replace(recipe, **changes))
    return str(caught.value)


def test_shapes_that_do_not_fit_are_refused(folder: Path) -> None:
    recipe = three_stages(folder)
    first, second, third = recipe.stages
    web, code = recipe.sources

    def stages(*each: RecipeStage) -> Sequence[RecipeStage]:
        return tuple(each)

    odd = replace(second, batch=BatchSchedule.constant(3))
    assert "stage long: global batch size 3 must be a multiple" in refused(
        recipe, stages=stages(first, odd)
    )
    huge = replace(third, sequence_length=4096)
    small = replace(web, block_tokens=None), replace(code, block_tokens=None)
    assert "source web: " in refused(recipe, stages=stages(first, huge), sources=small)
    assert "one sample needs 4096 + 1" in refused(recipe, stages=stages(first, huge), sources=small)
    assert "block_tokens must be more than sequence_length 32, got 32" in refused(
        recipe, sources=(replace(web, block_tokens=32), code)
    )
    ramp = BatchSchedule(stages=((0, 6), (12, 12)))
    assert "give each stage a batch of its own" in refused(recipe, batch=ramp)
    packed = replace(web, order="packed", block_tokens=None)
    message = refused(recipe, sources=(packed, code))
    assert "source web: samples of order packed are made for one sequence length" in message
    bare = RecipeSource(name="web", tokens=10_000)
    assert "give a path in place of tokens" in refused(recipe, sources=(bare, code))
    evaluation = RecipeEvaluation(source=RecipeSource(name="validation", path=code.path))
    message = refused(recipe, evaluation=evaluation)
    assert "sequence lengths 4, 16, 32; give evaluation a sequence_length" in message
    again = replace(third, streams=tuple(replace(s, restart=True) for s in third.streams))
    for policy, limit in (("stop", 9), ("continue", None)):
        limited = tuple(replace(source, max_epochs=limit) for source in recipe.sources)
        changes = {"sources": limited, "exhaustion": policy}
        message = refused(recipe, stages=stages(first, second, again), **changes)
        assert "stage longest: restart reads source web again, and in order blocks" in message
    assert open_recipe(replace(recipe, stages=stages(first, second, again))).layout.num_steps == 15
    assert open_recipe(replace(recipe, stages=stages(again), **changes)).layout.num_steps == 3
    few = replace(third, length=Target(kind="tokens", value=Fraction(33)))
    assert "stage longest: 1 sample cannot fill a batch of 2" in refused(
        recipe, stages=stages(first, second, few)
    )


def test_limits_are_places_in_the_source(folder: Path) -> None:
    """Two epochs are two epochs at any length; what a boundary defers counts as passed."""
    recipe = three_stages(folder)
    limited = tuple(replace(source, max_epochs=Fraction(1)) for source in recipe.sources)
    long = tuple(
        replace(each, length=Target(kind="iterations", value=Fraction(steps)))
        for each, steps in zip(recipe.stages, (9, 6, 40), strict=True)
    )
    recipe = replace(recipe, sources=limited, stages=long, exhaustion="continue")
    opened = open_recipe(recipe)
    plan = make_plan(opened.layout)
    check_against_model(opened, plan)
    assert plan.stopped_by
    assert all(draw.epochs_end <= 1 and draw.first_repeat is None for draw in plan.draws)
    assert min(source.blocks.unread for source in plan.sources if source.blocks) < 2 * 32


def test_evaluation_has_a_length_of_its_own(folder: Path) -> None:
    source = RecipeSource(name="validation", path=str(folder / "code"))
    evaluation = RecipeEvaluation(source=source, sequence_length=16, batch_size=4)
    opened = open_recipe(replace(three_stages(folder), evaluation=evaluation))
    rows = [row for batch in loader_of_recipe(opened).evaluation() for row in batch["tokens"]]
    assert {row.numel() for row in rows} == {16}


def sized(folder: Path, **more: Any) -> Recipe:
    """Two stages, of which the first has steps of 8 and of 4 samples."""
    first = stage("sized", 9, {"web": 1, "code": 1}, batching="per_stream")
    code = replace(first.streams[1], batch_size=4)
    first = replace(first, streams=(first.streams[0], code))
    return Recipe(
        sequence_length=8, batch=BatchSchedule.constant(8), micro_batch_size=2,
        data_parallel_size=2,
        sources=tuple(replace(s, block_tokens=None) for s in sources(folder)),
        stages=(first, stage("plain", 2, {"web": 1})), **more,
    )  # fmt: skip


def test_batch_sizes_of_streams_end_to_end(folder: Path) -> None:
    """Steps in the plan, the sampler and the audit; resumed inside a step, on other ranks."""
    recipe = sized(folder)
    assert recipe_of(to_mapping(recipe), "again", Path("/")).stages == recipe.stages
    opened = open_recipe(recipe)
    plan = make_plan(opened.layout)
    assert [(d.source, d.batch_size, d.samples) for d in plan.draws[:2]] == [
        ("web", 8, 24), ("code", 4, 24),
    ]  # fmt: skip
    sizes = [4, 8, 4] * 3
    plain = plan.to_json()
    assert plain["batch_schedule"] == [[0, {"web": 8, "code": 4}], [48, 8]]
    row = plain["steps"][0]
    assert (row["batch_size"], row["batch_sizes"], row["end_step"]) == (None, sizes, 9)
    assert (plain["steps"][1]["first_sample"], plain["steps"][1]["first_token"]) == (48, 384)
    assert plan == make_plan(open_recipe(recipe).layout)
    assert "4 or 8 → 8 samples an iteration" in repr(plan)
    bounds = [0, *itertools.accumulate([*sizes, 8, 8])]
    assert run_of_recipe(recipe).step_bounds.tolist() == bounds
    lock = make_lock(recipe)
    assert step_bounds_of(lock.content["subsets"]["train"]).tolist() == bounds
    assert lock.content["subsets"]["train"]["index"]["stages"][0]["batch"] == [8, 4]
    lock.write(folder / "sized.lock")
    assert not verify_lock(folder / "sized.lock").findings
    read: list[list[int]] = []
    states: list[dict[str, Any]] = []
    for ranks, micro, rounds in ((2, 2, 4), (4, 1, 3), (1, 4, 99)):
        loaders = [
            loader_of_recipe(opened, data_parallel_rank=rank, data_parallel_size=ranks,
                         micro_batch_size=micro)
            for rank in range(ranks)
        ]  # fmt: skip
        for loader in loaders if states else ():
            loader.load_state_dict(join_states(states))
        for batches in itertools.islice(zip(*loaders, strict=True), rounds):
            read += [row.tolist() for batch in batches for row in batch["tokens"]]
        states = [loader.state_dict() for loader in loaders]
    assert len(read) == opened.index.num_samples == bounds[-1]
    assert check_receipts(states, opened.index).equal
    whole = loader_of_recipe(opened, data_parallel_size=1, micro_batch_size=4)
    assert sorted(read) == sorted(row.tolist() for batch in whole for row in batch["tokens"])


def test_batch_sizes_that_cannot_be_are_refused(folder: Path) -> None:
    recipe = sized(folder)
    first, plain = recipe.stages
    web, code = first.streams
    with pytest.raises(InvalidArgument, match="use batching per_stream, or remove it"):
        replace(first, batching="random")
    with pytest.raises(InvalidArgument, match="batch_size must be at least 1"):
        replace(code, batch_size=0)
    odd = replace(first, streams=(web, replace(code, batch_size=6)))
    message = "stream code: batch_size 6 must be a multiple of micro batch x data-parallel size = 4"
    assert message in refused(recipe, stages=(odd, plain))
    ramp = BatchSchedule(stages=((0, 4), (8, 8)))
    assert "give every stream a batch_size" in refused(recipe, batch=ramp)
    evaluation = RecipeEvaluation(source=RecipeSource(name="validation", path=str(folder / "code")))
    message = refused(recipe, stages=(first,), evaluation=evaluation)
    assert "give evaluation a batch_size" in message
    assert "leave move out" in refused(recipe, skip=Skip(steps="2", move=True))
    with pytest.raises(InvalidArgument, match="must be a multiple of micro batch"):
        loader_of_recipe(open_recipe(recipe), data_parallel_size=8)
    opened = open_recipe(recipe)
    loader = loader_of_recipe(opened)
    with pytest.raises(InvalidArgument, match="batches of several sizes.*recipe.amend"):
        loader.set_mix({"web": 1, "code": 2}, at=3)
    assert loader.set_mix({"web": 1, "code": 2}, at=9) == 9
    with pytest.raises(InvalidArgument, match="sample 6 is not the first of a step"):
        next(iter(MicroBatchSampler(
            num_samples=64, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=2,
            consumed_samples=6, global_batch_size=opened.layout.batch)))  # fmt: skip
    with pytest.raises(InvalidArgument, match="6 is not the end of a step"):
        amend(opened.layout, consumed_samples=6, stages=[plain])
    going_on = open_recipe(amend(opened.layout, consumed_samples=12, stages=[plain]))
    check_past(opened.layout, going_on.layout, 12)
    assert going_on.layout.batch.samples_after(3) == 20


@pytest.mark.parametrize(
    ("documents", "bounds"),
    [(7, [0, 70]), (8, [0, 40, 80]), (11, [0, 40, 110]), (12, [0, 40, 80, 120])],
)
def test_a_block_ends_at_the_document_that_fills_it(
    tmp_path: Path, documents: int, bounds: list[int]
) -> None:
    """Of 40 tokens, four documents; the last has what is left."""
    write_corpus(tmp_path / "web", [10] * documents)
    epochs: Any = build_index(tmp_path / "web", sequence_length=8, order="epoch")
    assert PassBlocks(epochs, 40).starts(0).tolist() == bounds
