"""Runs of many sources and stages, laid out: exact counts, cursors that go on, limits kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bounds import check_bounds
from support.examples import one_in
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.index import mixing as mixing_module
from megaindex.index.skips import Skip
from megaindex.index.spans import Spans, check_sample_ids
from megaindex.index.staged_index import StagedIndex
from megaindex.recipe.layout import RecipeLayout, resolve_recipe
from megaindex.recipe.mixture import SourceSize
from megaindex.settings.batch_schedule import BatchSchedule, steps_of
from megaindex.settings.mix_changes import MixChanges
from megaindex.settings.past import Past, PastRead
from megaindex.settings.recipe import Recipe, RecipeSource, RecipeStage, Stream, Weighting
from megaindex.settings.run_settings import Target


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing_module, "BLOCK", 32)
    monkeypatch.setattr(mixing_module, "SHUFFLED", 16)


@dataclass(frozen=True)
class Numbered:
    """A source whose sample k is one token: token k of document 0."""

    num_samples: int
    num_epochs: int = 1
    tokens_per_epoch: int = 1
    sequence_length: int = 8
    add_extra_token: int = 1

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        ids = check_sample_ids(sample_ids, self.num_samples)
        zeros, splits = np.zeros_like(ids), np.arange(ids.size + 1)
        return Spans.of_one_source(zeros, ids, zeros + 1, splits)


def corpora(count: int, **settings: object) -> tuple[RecipeSource, ...]:
    return tuple(RecipeSource(name=name, tokens=1000, **settings) for name in "abcdef"[:count])  # type: ignore[arg-type]


def sizes_of(samples: Sequence[int]) -> tuple[SourceSize, ...]:
    return tuple(SourceSize(tokens=n * 8 + 1, documents=n, samples=n) for n in samples)


def steps(number: int) -> Target:
    return Target(kind="iterations", value=Fraction(number))


def stage_of(
    name: str, shares: dict[str, int], length: Target | None, **more: object
) -> RecipeStage:
    streams = tuple(
        Stream(source=source, proportion=Fraction(share)) for source, share in shares.items()
    )
    return RecipeStage(name=name, streams=streams, length=length, **more)  # type: ignore[arg-type]


def recipe_of(
    stages: Sequence[RecipeStage], sources: Sequence[RecipeSource], **more: object
) -> Recipe:
    settings = {"sequence_length": 8, "batch": BatchSchedule.constant(4), **more}
    return Recipe(stages=tuple(stages), sources=tuple(sources), **settings)  # type: ignore[arg-type]


def served(layout: RecipeLayout) -> list[tuple[int, int]]:
    """(source, sample of it) of every sample of the run, through the index."""
    index = StagedIndex(
        sources=tuple(Numbered(max(1, end)) for end in layout.samples_needed()),
        stages=tuple(stage.mixed for stage in layout.stages),
    )
    assert index.num_samples == layout.num_samples
    spans = index.locate(np.arange(index.num_samples))
    return list(zip(spans.source.tolist(), spans.offset.tolist(), strict=True))


def resolved(recipe: Recipe, sizes: tuple[SourceSize, ...]) -> RecipeLayout | None:
    """None where a stage is too short for a batch, or runs out of all its sources."""
    try:
        return resolve_recipe(recipe, sizes)
    except InvalidArgument as error:
        if re.search(
            r"cannot fill a batch|than one batch|stages follow|no whole batch", str(error)
        ):
            return None
        raise


@st.composite
def recipes(draw: st.DrawFn) -> tuple[Recipe, tuple[SourceSize, ...]]:
    count = draw(st.integers(1, 4))
    sizes = sizes_of([draw(st.integers(4, 40)) for _ in range(count)])
    sources = corpora(count)
    stages = []
    for number in range(draw(st.integers(1, 3))):
        names = draw(st.lists(st.sampled_from([s.name for s in sources]), min_size=1, unique=True))
        batching = draw(st.sampled_from(["stratified", "random", "per_stream"]))
        length = draw(st.sampled_from([steps(5), steps(9), None,
                                       Target(kind="samples", value=Fraction(30))]))  # fmt: skip
        kind = draw(st.sampled_from(["proportion", "repeat", "choose"]))
        value = {
            "proportion": st.integers(1, 5).map(Fraction),
            "repeat": st.sampled_from([Fraction(1, 2), Fraction(1), Fraction(5, 2)]),
            "choose": st.integers(4, 20),
        }[kind]
        streams = tuple(Stream(source=name, **{kind: draw(value)}) for name in names)
        stages.append(
            RecipeStage(name=f"s{number}", streams=streams, length=length, batching=batching)
        )
    policy = draw(st.sampled_from(["repeat", "stop", "continue"]))
    tail = draw(st.sampled_from(["drop", "pad", "wrap"]))
    return recipe_of(stages, sources, exhaustion=policy, tail=tail), sizes


@given(given_recipe=recipes())
def test_sources_are_read_on_without_gap_or_repeat(
    given_recipe: tuple[Recipe, tuple[SourceSize, ...]],
) -> None:
    """Whatever the stages: the draws of each source are its samples 0, 1, 2, ... in order."""
    recipe, sizes = given_recipe
    layout = resolved(recipe, sizes)
    if layout is None:
        return
    rows = served(layout)
    for source, count in enumerate(layout.drawn()):
        samples = [sample for which, sample in rows if which == source]
        assert samples == list(range(count))
        if recipe.exhaustion != "repeat":
            assert count <= sizes[source].samples
    assert layout.num_samples + layout.samples_masked == recipe.batch.samples_after(
        layout.num_steps
    )
    assert layout.samples_masked < 4
    ends = layout.ends  # of every stage that is begun
    assert [end.stage for end in ends] == [stage.name for stage in recipe.stages][: len(ends)]
    assert sum(end.samples for end in ends) == layout.num_samples
    assert layout.stopped_by or len(ends) == len(recipe.stages)
    if layout.stopped_by:
        assert layout.samples_masked == 0
        left = sizes[recipe.number(layout.stopped_by)].samples
        left -= layout.drawn()[recipe.number(layout.stopped_by)]
        assert left < 8  # less than the batch that stopped it, and one that was not full


@given(given_recipe=recipes(), changed=st.data())
def test_a_changed_end_keeps_what_came_before(
    given_recipe: tuple[Recipe, tuple[SourceSize, ...]], changed: st.DataObject
) -> None:
    """Another last stage, or one more: the samples before it stay, and cursors go on from there."""
    recipe, sizes = given_recipe
    added = stage_of("new", {"a": 1}, steps(3), batching="random")
    for stages in ((*recipe.stages, added), (*recipe.stages[:-1], added)):
        other = replace(recipe, stages=stages, tail="drop")
        before, after = resolved(replace(recipe, tail="drop"), sizes), resolved(other, sizes)
        if before is None or after is None:
            continue
        kept = min([s.first_sample for s in after.stages if s.name == "new"] + [before.num_samples])
        if len(stages) == len(recipe.stages):
            ends = [s.first_sample for s in before.stages if s.name == recipe.stages[-1].name]
            kept = min([kept, *ends])
        assert served(after)[:kept] == served(before)[:kept]


def test_a_reweighting_starts_its_deficits_anew() -> None:
    """After 90/10 a 50/50 stage draws evenly at once; it owes the small source nothing."""
    stages = [stage_of("one", {"a": 9, "b": 1}, steps(200)),
              stage_of("two", {"a": 1, "b": 1}, steps(200))]  # fmt: skip
    layout = resolve_recipe(recipe_of(stages, corpora(2)), sizes_of([10_000, 10_000]))
    rows = served(layout)
    assert [which for which, _ in rows[800:840]].count(1) == 20
    first = [sample for which, sample in rows[:800] if which == 1]
    assert next(sample for which, sample in rows[800:] if which == 1) == len(first) == 80


def test_a_restarted_source_begins_again() -> None:
    again = RecipeStage(name="two", streams=(Stream(source="a", restart=True),), length=steps(2))
    recipe = recipe_of([stage_of("one", {"a": 1}, steps(3)), again], corpora(1))
    rows = served(resolve_recipe(recipe, sizes_of([100])))
    assert [sample for _, sample in rows] == [*range(12), *range(8)]


@pytest.mark.parametrize("policy", ["stop", "continue", "error", "repeat"])
def test_exhaustion_is_a_policy_known_before_the_run(policy: str) -> None:
    """a and b draw evenly, b holds 10 samples: b's 11th draw would come with sample 21."""
    stages = [stage_of("one", {"a": 1, "b": 1}, steps(10))]
    recipe = recipe_of(stages, corpora(2), exhaustion=policy)
    sizes = sizes_of([100, 10])
    if policy == "error":
        with pytest.raises(InvalidArgument, match=r"source b is exhausted in step 5"):
            resolve_recipe(recipe, sizes)
        return
    layout = resolve_recipe(recipe, sizes)
    if policy == "stop":
        assert (layout.num_steps, layout.stopped_by) == (5, "b")
        assert layout.drawn() == [10, 10]
    elif policy == "continue":
        assert [stage.without for stage in layout.stages] == [(), ("b",)]
        assert layout.drawn() == [30, 10]
    else:
        assert layout.drawn() == [20, 20]


def test_limits_are_shared_out_where_asked() -> None:
    """b may give 2.5 epochs of half its 20 samples: 25; a and c take what b cannot, as 2 to 1."""
    stages = [stage_of("one", {"a": 2, "b": 7, "c": 1}, steps(40), batching="random")]
    a, b, c = corpora(3, max_epochs=Fraction(100))
    limited = replace(b, max_epochs=Fraction(5, 2), max_fraction=Fraction(1, 2))
    recipe = recipe_of(stages, [a, limited, c], exhaustion="redistribute")
    layout = resolve_recipe(recipe, sizes_of([100, 20, 100]))
    assert layout.drawn() == [90, 25, 45]
    assert [which for which, _ in served(layout)].count(1) == 25
    short = replace(
        recipe, sources=(replace(a, max_epochs=None), limited, replace(c, max_epochs=None))
    )
    with pytest.raises(InvalidArgument, match=r"needs 160 samples, the limits .* leave 125"):
        resolve_recipe(short, sizes_of([50, 20, 50]))


def test_counts_of_streams_are_exact_after_an_epoch_of_the_mixture() -> None:
    streams = (Stream(source="a", repeat=Fraction(5, 2)), Stream(source="b", choose=7),
               Stream(source="c"))  # fmt: skip
    stage = RecipeStage(name="one", streams=streams, batching="random",
                        length=Target(kind="epochs", value=Fraction(2)))  # fmt: skip
    recipe = recipe_of([stage], corpora(3), batch=BatchSchedule.constant(1))
    layout = resolve_recipe(recipe, sizes_of([9, 30, 5]))
    assert layout.drawn() == [2 * 22, 2 * 7, 2 * 5]


def test_weights_by_size_flatten_with_alpha() -> None:
    streams = tuple(Stream(source=name) for name in "ab")
    stage = RecipeStage(name="one", streams=streams, length=steps(100),
                        weighting=Weighting(by="samples", alpha=0.5))  # fmt: skip
    recipe = recipe_of([stage], corpora(2))
    assert resolve_recipe(recipe, sizes_of([900, 100])).drawn() == [300, 100]


def test_batches_of_one_stream() -> None:
    stage = stage_of("one", {"a": 3, "b": 1}, steps(8), batching="per_stream")
    rows = served(resolve_recipe(recipe_of([stage], corpora(2)), sizes_of([50, 50])))
    batches = np.array([which for which, _ in rows]).reshape(-1, 4)
    assert (batches == batches[:, :1]).all()
    assert sorted(batches[:, 0].tolist()) == [0] * 6 + [1] * 2


@for_each(
    ("change", "says"),
    [
        ({"stages": [stage_of("x", {"z": 1}, steps(1))]}, "unknown source z"),
        ({"stages": [stage_of("x", {"a": 1}, steps(1))] * 2}, "two stages are called x"),
        ({"stages": [stage_of("x", {"a": 1}, steps(1), first_step=3)]}, "is to begin with step 3"),
        ({"stages": [stage_of("x", {"a": 1}, Target(kind="samples", value=Fraction(3)))]},
         "3 samples cannot fill a batch of 4"),
        ({"stages": []}, "at least one source and one stage"),
        ({"exhaustion": "pad"}, "exhaustion must be one of"),
        ({"micro_batch_size": 3}, "global batch size 4 must be a multiple of"),
        ({"sources": corpora(1, max_epochs=Fraction(2))}, "which exhaustion repeat ignores"),
        ({"tail": "zero"}, "tail must be one of"),
        ({"mix_bounds": [("a", 0, 1), ("a", 0, 1)]}, "mix_bounds: a source is named twice; the so"),
        ({"mix_changes": MixChanges.empty(("a", "a"))}, "mix_changes: a source is named twice"),
        ({"past": Past(steps=1, mix=(("a", Fraction(1)),)), "skip": [Skip(steps=3)]},
         "past and skip exclude each other"),
        ({"stages": [stage_of("one", {"a": 1}, steps(2)),
                     stage_of("two", {"a": 1}, steps(2), sequence_length=16)],
          "skip": [Skip(steps=1, move=True)]}, "moved samples follow the end of the run, and the"),
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_be_is_refused(change: dict[str, object], says: str) -> None:
    settings: dict[str, object] = {
        "stages": [stage_of("one", {"a": 1}, steps(1))], "sources": corpora(1), **change
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match=says):
        resolve_recipe(recipe_of(**settings), sizes_of([50]))  # type: ignore[arg-type]


@for_each(
    "bounds",
    [(-1, 1), (Fraction(1, 2), Fraction(1, 4)), (0, Fraction(5, 4)), (0, 0), (-1, 0)],
)
def test_bounds_of_a_mix_are_two_shares(bounds: tuple[Any, Any]) -> None:
    stages = [stage_of("one", {"a": 1, "b": 1}, steps(1))]
    with pytest.raises(InvalidArgument, match="mix_bounds: b: must be two shares from 0 to 1, the"):
        recipe_of(stages, corpora(2), mix_bounds=[("a", 0, 1), ("b", *bounds)])


@pytest.mark.parametrize("bounds", [(0, 1), (0, Fraction(1, 9)), (1, 1), (0.5, 0.5)])
def test_bounds_of_a_mix_may_be_equal(bounds: tuple[Any, Any]) -> None:
    stages = [stage_of("one", {"a": 1, "b": 1}, steps(1))]
    assert recipe_of(stages, corpora(2), mix_bounds=[("a", 0, 1), ("b", *bounds)]).mix_bounds


def layout_of(stage: RecipeStage, samples: int = 50, **more: Any) -> RecipeLayout:
    sources = corpora(2, **({"max_epochs": 1} if "exhaustion" in more else {}))
    return resolve_recipe(recipe_of([stage], sources, **more), sizes_of([samples, samples]))


@for_each(
    ("make", "inside", "outside", "says"),
    [
        (
            lambda samples: layout_of(stage_of("one", {"a": 1}, steps(1)), samples),
            (1,),
            (0,),
            "source a holds 1 tokens, not one sample of 8; leave it out, or lower sequence_length",
        ),
        (
            lambda samples: layout_of(
                stage_of("one", {"a": 1}, steps(1)), samples, exhaustion="stop"
            ),
            (4,),
            (1, 3),
            "source a allows less than one batch, so the run makes no step; ",
        ),
        (
            lambda count: layout_of(
                RecipeStage(
                    name="one", streams=(Stream(source="a", choose=count),), batching="per_stream"
                )
            ),
            (4, 5),
            (3,),
            "stream a gives 3 samples to an epoch of the mixture, less than one batch of 4; raise",
        ),
        (
            lambda size: layout_of(
                stage_of("one", {"a": 3, "b": 1}, Target(kind="epochs", value=Fraction(4)),
                         epoch_size=size)
            ),
            (4,),
            (1,),
            "stream b gives no sample to an epoch of the mixture; raise its share or epoch_size",
        ),
        (
            lambda repeat: layout_of(
                RecipeStage(
                    name="one", streams=(Stream(source="a", repeat=repeat),), length=steps(1)
                )
            ),
            (Fraction(1, 50),),
            (Fraction(1, 51),),
            "stream a gives no sample to an epoch of the mixture; raise its share or epoch_size",
        ),
    ],
)  # fmt: skip
def test_a_stage_serves_samples_of_each_source(
    make: Callable[[Any], object], inside: tuple[Any, ...], outside: tuple[Any, ...], says: str
) -> None:
    check_bounds(make, inside, outside, says)


def changed_at(sample: int, weights: tuple[int, int] = (1, 1)) -> MixChanges:
    rows = np.array([[sample, *(2**31 * weight // sum(weights) for weight in weights)]])
    return MixChanges.from_array(("a", "b"), rows, "")


@for_each("batch", [BatchSchedule.constant(4), BatchSchedule(stages=((0, 4), (8, 4), (12, 12)))])
def test_a_mix_changes_between_two_steps(batch: BatchSchedule) -> None:
    def resolve(sample: int) -> object:
        stage = stage_of("one", {"a": 1, "b": 3}, steps(5))
        return layout_of(stage, batch=batch, mix_changes=changed_at(sample))

    check_bounds(resolve, [4, 8, 12], [5, 7, 11], "stage one: the mix changes at sample [57]|sample"
                 " 11, which is not the first of a step; change it between two steps")  # fmt: skip


def test_a_mix_of_several_lengths_changes_to_sources_of_the_stage() -> None:
    stages = (
        stage_of("one", {"a": 1}, steps(3)),
        stage_of("two", {"b": 1}, steps(3), sequence_length=16),
    )
    sources = tuple(RecipeSource(name=name, path=name) for name in "ab")

    def resolve(weights: tuple[int, int]) -> object:
        recipe = recipe_of(stages, sources, mix_changes=changed_at(8, weights))
        return resolve_recipe(recipe, sizes_of([50, 50]))

    later = np.array([[8, 2**31, 0], [16, 0, 2**31]])
    both = recipe_of(stages, sources, mix_changes=MixChanges.from_array(("a", "b"), later, ""))
    assert resolve_recipe(both, sizes_of([50, 50])).num_steps == 6
    check_bounds(resolve, [(1, 0)], [(0, 1), (1, 1)], "stage one: the mix changes at sample 8 to "
                 "weights of b, which the stage does not name, in a run of several")  # fmt: skip


def test_a_recipe_and_its_layout_are_lines() -> None:
    stages = [stage_of(f"s{n}", {"a": 1}, steps(1)) for n in range(9)]
    layout = resolve_recipe(recipe_of(stages[:2], corpora(1)), sizes_of([50]))
    recipe = "Recipe(stages s0, s1; sources a; 8 tokens a sample)"
    assert repr(layout) == f"RecipeLayout(2 steps, 8 samples, {recipe})"
    for count, more in ((8, ""), (9, " …")):
        names = ", ".join(f"s{n}" for n in range(8)) + more
        assert f"(stages {names}; " in repr(recipe_of(stages[:count], corpora(1)))
    longer = replace(stages[1], sequence_length=16)
    sources = (RecipeSource(name="a", path="a"),)
    assert "; 8 → 16 tokens a" in repr(recipe_of([stages[0], longer], sources))


def test_the_most_samples_of_a_run() -> None:
    def resolve(samples: int) -> object:
        length = Target(kind="samples", value=Fraction(samples))
        return resolve_recipe(
            recipe_of([stage_of("one", {"a": 1}, length)], corpora(1)), sizes_of([2**40])
        )

    check_bounds(resolve, [2**60], [2**60 + 4], "a run has at most")


@for_each(
    ("make", "says"),
    [
        (lambda: Stream(source="a", choose=0), "choose must be positive"),
        (lambda: Stream(source="a", choose=1, repeat=Fraction(1)), "repeat and choose exclude"),
        (lambda: stage_of("s", {}, None), "has no stream"),
        (lambda: RecipeStage(name="s", streams=(Stream(source="a"), Stream(source="a"))),
         "source a is listed twice"),
        (lambda: RecipeStage(name="s", streams=(Stream(source="a"),
                                                Stream(source="b", proportion=Fraction(1)))),
         "a has no proportion and b has one"),
        (lambda: RecipeStage(name="s", streams=(Stream(source="a"),), epoch_size=5),
         "is divided by proportions"),
        (lambda: stage_of("s", {"a": 1}, None, weighting=Weighting()), "take the place of"),
        (lambda: Weighting(alpha=1.5), "alpha must be from 0"),
        (lambda: RecipeSource(name="a"), "give either a path or, to plan without files, tokens"),
        (lambda: RecipeSource(name="a", path="p", labels="l"), "are for kind finetuning"),
        (
            lambda: RecipeSource(name="a", path="p", kind="finetuning", order="window"),
            "cuts documents",
        ),
        (
            lambda: RecipeSource(name="a", path="p", order="packed", packed=False),
            "packed: false puts one document",
        ),
        (lambda: RecipeSource(name="a", tokens=5, order="packed"), "depend on document lengths"),
        (lambda: RecipeSource(name="a", path="p", max_documents=3), "a setting of order packed"),
        (lambda: RecipeSource(name="a", path="p", kind="finetuning", block_tokens=9),
         "a setting of order blocks"),
        (
            lambda: RecipeSource(name="a", path="p", order="packed", max_documents=0),
            "max_documents must be at least 1",
        ),
        (
            lambda: RecipeSource(name="a", path="p", max_fraction=Fraction(2)),
            "must be at most 1",
        ),
    ],
)  # fmt: skip
def test_a_part_that_cannot_be_is_refused(make: object, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        make()  # type: ignore[operator]


@for_each(
    ("make", "inside", "outside", "says"),
    [
        (
            lambda number: RecipeSource(name="a", path="p", max_epochs=number),
            (Fraction(1, 2**60), 2**31),
            (0, 2**31 + 1),
            "max_epochs must be positive and at most",
        ),
        (
            lambda number: RecipeSource(name="a", path="p", max_fraction=number),
            (Fraction(1, 2**60), 1),
            (0, Fraction(2**60 + 1, 2**60)),
            "max_fraction must be",
        ),
        (
            lambda number: Stream(source="a", proportion=number),
            (Fraction(1, 2**53), 2**53 - 1),
            (0, Fraction(1, 2**53 + 1), 2**53),
            "proportion must be",
        ),
        (
            lambda number: Stream(source="a", batch_size=number),
            (1, 2**53),
            (0, 2**53 + 1),
            "batch_size",
        ),
        (
            lambda number: stage_of("s", {"a": 1}, None, epoch_size=number),
            (1, 2**53 - 1),
            (0, 2**53),
            "epoch_size, a number of samples from 1",
        ),
        (
            lambda number: stage_of("s", {"a": 1}, Target(kind="samples", value=Fraction(number))),
            (1, 2**62),
            (0, "1/2", 2**62 + 1),
            "its length must be",
        ),
        (
            lambda number: stage_of("s", {"a": 1}, Target(kind="epochs", value=Fraction(number))),
            ("1/2", 2**62),
            (2**62 + 1,),
            "its length must be",
        ),
        (
            lambda number: PastRead(source="a", epochs=number),
            (0, 10_000),
            (-1, Fraction(20_001, 2)),
            "epochs must be from 0",
        ),
        (
            lambda number: PastRead(source="a", tokens=number),
            (0, 2**62 - 1),
            (-1, 2**62),
            "tokens must be from 0",
        ),
        (
            lambda number: Target(kind="epochs", value=number),
            (Fraction(1, 2**60), 2**63 - 1),
            (0, 2**63),
            "epochs must be a positive number",
        ),
    ],
)
def test_numbers_on_both_sides_of_a_bound(
    make: Callable[[Any], object], inside: tuple[Any, ...], outside: tuple[Any, ...], says: str
) -> None:
    check_bounds(make, inside, outside, says)


@dataclass
class StepModel:
    """Steps of streams with batch sizes of their own, drawn one after another."""

    left: list[int]
    """Samples that each source may still give."""
    rows: list[tuple[int, int]]
    """(source, sample of it) of every sample."""
    bounds: list[int]
    streams: list[tuple[int, Fraction, int]]
    """Source, draws to share and batch size of the streams of the stage."""
    drawn: list[int]
    given: list[int]
    """Samples that each source gave."""

    def next(self) -> int:
        """The stream of the next step: the one of the least (2 draws + 1) / share."""
        order = range(len(self.streams))
        return min(order, key=lambda k: (2 * self.drawn[k] + 1) / self.streams[k][1])

    def take(self, stream: int, samples: int) -> None:
        source = self.streams[stream][0]
        self.rows += [(source, self.given[source] + k) for k in range(samples)]
        self.given[source] += samples
        self.left[source] -= samples
        self.drawn[stream] += 1
        self.bounds.append(len(self.rows))


def modelled(recipe: Recipe, sizes: Sequence[SourceSize]) -> StepModel:
    """The steps of a recipe whose stages are all per_stream, one by one."""
    most = 10**9 if recipe.exhaustion == "repeat" else 0
    model = StepModel([most or s.samples for s in sizes], [], [0], [], [], [0] * len(sizes))
    for stage in recipe.stages:
        own = [(recipe.number(s.source), s, s.batch_size or recipe.batch.final)
               for s in stage.streams]  # fmt: skip
        counts = [int(s.choose or (s.repeat or 1) * sizes[k].samples) // n for k, s, n in own]
        epoch = sum(n * count for count, (_, _, n) in zip(counts, own, strict=True))
        if stage.by_proportion:
            epoch = sum(sizes[k].samples for k, _, _ in own)
        model.streams = [(k, s.proportion / n if s.proportion else Fraction(count), n)
                         for count, (k, s, n) in zip(counts, own, strict=True)]  # fmt: skip
        model.drawn = [0] * len(own)
        length, begun, made = stage.length, len(model.rows), 0
        wanted = epoch if length is None else int(length.value)
        is_last, by_steps = stage is recipe.stages[-1], length is not None
        by_steps = by_steps and length.kind == "iterations"  # type: ignore[union-attr]
        while True:
            missing = wanted - (made if by_steps else len(model.rows) - begun)
            if missing <= 0:
                break
            stream = model.next()
            source, _, size = model.streams[stream]
            if not by_steps and missing < size:
                if not is_last or recipe.tail == "drop":
                    break
                size = missing if recipe.tail == "pad" else size
            if model.left[source] >= size:
                model.take(stream, size)
                made += 1
                continue
            del model.streams[stream]
            model.drawn = [0] * len(model.streams)
            if recipe.exhaustion == "stop" or not model.streams:
                return model
    return model


@st.composite
def sized_recipes(draw: st.DrawFn) -> tuple[Recipe, tuple[SourceSize, ...]]:
    recipe, sizes = draw(recipes())
    batch = st.sampled_from([None, 2, 4, 6])
    stages = [
        replace(stage, batching="per_stream", streams=tuple(
            replace(stream, batch_size=draw(batch)) for stream in stage.streams))
        for stage in recipe.stages
    ]  # fmt: skip
    return replace(recipe, stages=tuple(stages), data_parallel_size=2), sizes


@one_in(2)
@given(given_recipe=sized_recipes())
def test_batch_sizes_of_streams(given_recipe: tuple[Recipe, tuple[SourceSize, ...]]) -> None:
    recipe, sizes = given_recipe
    layout = resolved(recipe, sizes)
    if layout is None:
        return
    model = modelled(recipe, sizes)
    steps, _ = steps_of(layout.batch, 0, layout.num_samples)
    assert steps.bounds.tolist() == model.bounds
    assert layout.num_steps == len(model.bounds) - 1
    assert served(layout) == model.rows
    for k, bound in enumerate(model.bounds[:-1]):
        assert layout.batch.samples_after(k) == bound
        assert layout.batch.iterations_within(bound) == k
        assert layout.batch.samples_after(1, bound) >= model.bounds[k + 1]
