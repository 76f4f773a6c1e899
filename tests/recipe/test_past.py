"""Runs that go on from steps of another system, against a model of the tokens served."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex.builders.recipe import OpenRecipe, open_recipe
from megaindex.errors import InvalidArgument, MissingFile, OutOfRange
from megaindex.index.receipts import fingerprint_keys, planned_receipt
from megaindex.plan import make_plan
from megaindex.recipe.amend import amend, check_past
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.past import Past, PastRead
from megaindex.settings.recipe import Recipe, RecipeSource, RecipeStage, Stream
from megaindex.settings.recipe_file import read_recipe, recipe_of, to_mapping
from megaindex.settings.run_settings import Target

FEWER = settings(max_examples=settings().max_examples // 4)
LENGTH = 8
RECIPE = """
sequence_length: 8
batch: {micro_batch_size: 2, data_parallel_size: 2}
sources:
  a: a
  b: {path: b}
stages:
  all: {steps: 30, mix: {a: 0.75, b: 0.25}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(8)
    for name in "ab":
        write_corpus(folder / name, rng.integers(1, 90, 40))
    return folder


def recipe(folder: Path, past: str) -> Recipe:
    path = folder / "run.yaml"
    path.write_text(RECIPE + f"past: {past}\n")
    return read_recipe(path)


def drawn(opened: OpenRecipe) -> tuple[Any, Any]:
    first = opened.layout.recipe.first_sample
    return opened.unskipped.origin(np.arange(first, opened.index.num_samples))


def served_tokens(opened: OpenRecipe, source: int, begin: int, end: int) -> np.ndarray:
    """Return how often each token of a source is input of samples begin ... end - 1."""
    lengths = opened.datasets[source].sequence_lengths
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    served = np.zeros(int(lengths.sum()), np.int64)
    spans = opened.index.locate(np.arange(begin, end))
    inputs = spans.input_lengths(LENGTH)
    for number, document, offset, length in zip(
        spans.source, spans.document, spans.offset, inputs, strict=True
    ):
        if number == source:
            at = int(starts[document] + offset)
            served[at : at + length] += 1
    return served


@FEWER
@given(data=st.data())
def test_the_rest_of_an_epoch_follows_the_past(folder: Path, data: st.DataObject) -> None:
    """Sources go on from their cursors, in the order that a whole run has."""
    steps = data.draw(st.integers(1, 200_000))
    whole = open_recipe(read_recipe_without_past(folder))
    sizes = [source.size for source in whole.sources]
    read = data.draw(st.integers(0, sizes[0].samples))
    epochs = data.draw(st.fractions(0, 4, max_denominator=9))
    opened = open_recipe(
        recipe(
            folder, f"{{steps: {steps}, read: {{a: {{samples: {read}}}, b: {{epochs: {epochs}}}}}}}"
        )
    )
    layout = opened.layout
    assert layout.recipe.first_sample == 4 * steps == layout.stages[0].first_sample
    assert layout.num_steps == steps + 30
    begins = [read, -(-epochs.numerator * sizes[1].samples // epochs.denominator)]
    source, sample = drawn(opened)
    for number in range(2):
        mine = sample[source == number]
        np.testing.assert_array_equal(mine, begins[number] + np.arange(mine.size))
        theirs = whole.sources[number].index(int(mine[-1]) + 1).locate(mine)
        at = np.flatnonzero(source == number) + layout.recipe.first_sample
        ours = opened.index.locate(at)
        np.testing.assert_array_equal(ours.document, theirs.document)
        np.testing.assert_array_equal(ours.offset, theirs.offset)
    plan = make_plan(layout)
    assert plan.train_iters == steps + 30
    assert plan.samples_consumed == 120
    assert plan.past is not None
    assert [row.samples for row in plan.past.sources] == begins


def read_recipe_without_past(folder: Path) -> Recipe:
    (folder / "whole.yaml").write_text(RECIPE)
    return read_recipe(folder / "whole.yaml")


@FEWER
@given(
    epochs=st.integers(0, 2),
    read=st.sets(st.integers(0, 39), min_size=1),
    steps=st.integers(1, 50),
)
def test_documents_that_were_read_do_not_come_again(
    folder: Path, epochs: int, read: set[int], steps: int
) -> None:
    """Neither their tokens before the epoch ends, nor any other token twice."""
    (folder / "read.txt").write_text(" ".join(map(str, sorted(read))))
    opened = open_recipe(
        recipe(
            folder, f"{{steps: {steps}, read: {{a: {{documents: read.txt, epochs: {epochs}}}}}}}"
        )
    )
    first = opened.layout.recipe.first_sample
    source, sample = drawn(opened)
    per_epoch = opened.sources[0].size.samples
    mine = sample[source == 0]
    left = opened.sources[0].size.unread_samples
    assert left is not None
    assert mine[0] == (epochs + 1) * per_epoch - left
    lengths = opened.datasets[0].sequence_lengths
    tokens = int(sum(n for k, n in enumerate(lengths) if k not in read))
    assert left == max(0, (tokens - 1) // LENGTH)
    positions = np.flatnonzero(source == 0)
    if left:
        end = first + int(positions[min(left, positions.size) - 1]) + 1
        served = served_tokens(opened, 0, first, end)
        was_read = np.repeat([k in read for k in range(40)], lengths)
        assert not served[was_read].any()
        assert served.max() <= 1
        assert served.sum() == min(left, positions.size) * LENGTH


def test_tokens_are_taken_as_the_same_share_of_samples(folder: Path) -> None:
    opened = open_recipe(recipe(folder, "{steps: 160000, read: {a: {tokens: 900}}}"))
    size = opened.sources[0].size
    assert opened.layout.begins == [-(-900 * size.samples // size.tokens), 0]
    mixed = recipe(
        folder, "{steps: 20, global_batch_size: 5, sequence_length: 4, mix: {a: 3, b: 1}}"
    )
    assert [mixed.past_reads[name].tokens for name in "ab"] == [300, 100]
    assert recipe_of(to_mapping(mixed), "copy", folder) == mixed


def test_receipts_begin_at_the_first_step(folder: Path) -> None:
    opened = open_recipe(recipe(folder, "{steps: 160000, read: {a: {samples: 7}}}"))
    keys = fingerprint_keys(opened.fingerprints)
    first, end = 640_000, opened.index.num_samples
    assert end == first + 120
    assert planned_receipt(opened.index, 0, end, keys).count == 120
    assert planned_receipt(opened.index, 0, first, keys).count == 0
    with pytest.raises(OutOfRange, match="lies before sample 640000"):
        opened.index.locate([first - 1])


def test_plan_and_audit_begin_at_the_first_step(folder: Path) -> None:
    from megaindex.audit import audit, run_of_recipe, steps_of

    made = recipe(folder, "{steps: 160000, read: {a: {samples: 7}, b: {epochs: 1}}}")
    opened = open_recipe(made)
    plan = make_plan(opened.layout)
    assert plan.past is not None
    rows = {row.source: row for row in plan.past.sources}
    size = opened.sources[0].size.samples
    assert rows["a"].drawn == 90
    assert (rows["a"].may_repeat, rows["a"].expected_repeats) == (7, round(7 * 90 / size))
    assert (rows["b"].assumed, rows["b"].drawn) == ("", 0)
    assert plan.to_json()["past"]["first_sample"] == 640_000
    assert plan.draws[0].first_step == 160_000
    assert "past" not in make_plan(plan_without_past(folder)).to_json()
    stream = run_of_recipe(made)
    assert (stream.samples_served, stream.num_steps, stream.past_steps) == (120, 160_030, 160_000)
    told: list[tuple[int, int]] = []
    make_plan(stream, progress=lambda *counts: told.append(counts))
    assert told[-1] == (120, 120)
    assert "steps=160,030, past_steps=160,000, sources=" in repr(stream)
    assert "past_steps" not in repr(run_of_recipe(read_recipe_without_past(folder)))
    tokens = audit(stream).exposure.step_tokens
    assert not tokens[:160_000].any()
    assert (tokens[160_000:] == 4 * LENGTH).all()
    spans = opened.index.locate([640_000])
    servings = steps_of(stream, int(spans.document[0]), int(spans.source[0]))
    assert 160_000 in [serving.step for serving in servings]


def plan_without_past(folder: Path) -> Any:
    return open_recipe(read_recipe_without_past(folder)).layout


@pytest.mark.slow
def test_a_joined_run_stops_and_goes_on_with_other_ranks(folder: Path) -> None:
    pytest.importorskip("torch")
    from megaindex.loader import Loader, join_states, loader_of_recipe
    from megaindex.loader.receipts import check_receipts

    (folder / "read.txt").write_text("1 2 3 17")
    text = "{steps: 160000, read: {a: {documents: read.txt}, b: {epochs: 0.5}}}"
    opened = open_recipe(recipe(folder, text))

    def loaders(opened: OpenRecipe, ranks: int) -> list[Loader]:
        return [
            loader_of_recipe(
                opened, data_parallel_rank=rank, data_parallel_size=ranks, micro_batch_size=1
            )
            for rank in range(ranks)
        ]

    before = loaders(opened, 2)
    assert before[0].consumed_samples == 640_000
    assert before[0].ledger.totals(640_000)[0].samples == 0
    for loader in before:
        batches = iter(loader)
        for _ in range(14):
            next(batches)
    state = join_states([loader.state_dict() for loader in before])
    assert state["consumed_samples"] == 640_028
    stage = RecipeStage(
        name="end",
        streams=(Stream(source="b", proportion=Fraction(1)),),
        length=Target(kind="iterations", value=Fraction(5)),
    )
    changed = open_recipe(amend(opened.layout, consumed_samples=640_028, stages=[stage]))
    check_past(opened.layout, changed.layout, 640_028)
    for run, steps in ((opened, 30), (changed, 7 + 5)):
        after = loaders(run, 4)
        for loader in after:
            loader.load_state_dict(state)
            for _ in loader:
                pass
        check = check_receipts([loader.state_dict() for loader in after], run.index)
        assert check.equal
        assert check.served.total.count == 4 * steps
    other = open_recipe(recipe(folder, "{steps: 160000, read: {a: {samples: 9}}}"))
    with pytest.raises(InvalidArgument, match="serves other samples"):
        loaders(other, 2)[0].load_state_dict(before[0].state_dict())


@FEWER
@given(
    epochs=st.fractions(0, 3, max_denominator=7),
    first=st.integers(1, 12),
    steps=st.integers(1, 99),
)
def test_stages_of_several_lengths_go_on_from_a_past(
    folder: Path, epochs: Fraction, first: int, steps: int
) -> None:
    """The rest of the epoch is read at the first length; nothing of it comes twice."""
    path = folder / "lengths.yaml"
    path.write_text(
        "sequence_length: 8\nbatch: {global_batch_size: 4}\nsources: {a: a}\n"
        f"past: {{steps: {steps}, read: {{a: {{epochs: {epochs}}}}}}}\n"
        f"stages:\n  short: {{steps: {first}, mix: {{a: 1}}}}\n"
        "  long: {steps: 2, sequence_length: 16, batch: {global_batch_size: 2}, mix: {a: 1}}\n"
    )
    opened = open_recipe(read_recipe(path))
    layout, size = opened.layout, opened.sources[0].size
    begin = layout.stages[0].mixed.begins[0]
    assert begin == size.samples_in(epochs)
    assert size.epochs_at(begin) >= float(epochs) - 1e-9
    assert layout.stages[0].first_sample == 4 * steps
    assert layout.end_sample == 4 * steps + 4 * first + 4
    assert layout.num_steps == steps + first + 2
    whole = opened.sources[0].index(begin + 4 * first)
    end = layout.recipe.first_sample + 4 * first
    ours = opened.index.locate(np.arange(layout.recipe.first_sample, end))
    theirs = whole.locate(np.arange(begin, begin + 4 * first))
    np.testing.assert_array_equal(ours.document, theirs.document)
    assert opened.index.num_samples == layout.end_sample
    spans = opened.index.locate(np.arange(end, layout.end_sample))
    assert (spans.input_lengths(16).sum(), spans.document.size > 0) == (4 * 16, True)
    plan = make_plan(layout)
    assert plan.past is not None
    assert plan.past.sources[0].samples == begin
    facts = plan.sources[0].blocks
    assert facts is not None
    read = min(begin * 8, size.tokens) if begin < size.samples else size.tokens
    assert facts.unread == size.tokens - read - facts.served - facts.dropped - facts.deferred
    assert facts.unread >= 0


def test_a_joined_run_of_several_lengths_is_trained_and_audited(folder: Path) -> None:
    pytest.importorskip("torch")
    from megaindex.audit import audit, run_of_recipe
    from megaindex.loader import join_states, loader_of_recipe
    from megaindex.loader.receipts import check_receipts

    (folder / "lengths.yaml").write_text(
        "sequence_length: 8\nbatch: {micro_batch_size: 2, data_parallel_size: 2}\n"
        "sources: {a: a, b: b}\npast: {steps: 500, read: {a: {epochs: 1.3}}}\n"
        "stages:\n  short: {steps: 6, mix: {a: 1, b: 1}}\n"
        "  long: {steps: 4, sequence_length: 16, mix: {a: 1, b: 1}}\n"
    )
    made = read_recipe(folder / "lengths.yaml")
    opened = open_recipe(made)
    state = None
    for ranks, steps in ((2, 7), (1, 3)):
        loaders = [
            loader_of_recipe(opened, data_parallel_rank=rank, data_parallel_size=ranks)
            for rank in range(ranks)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            batches = iter(loader)
            for _ in range(steps * 2 // ranks):
                next(batches)
        states = [loader.state_dict() for loader in loaders]
        state = join_states(states)
    assert loaders[0].consumed_samples == 2000 + 40
    check = check_receipts(states, opened.index)
    assert check.equal
    assert check.served.total.count == 40
    tokens = audit(run_of_recipe(made)).exposure.step_tokens
    assert tokens.tolist() == [0] * 500 + [32] * 6 + [64] * 4


def test_documents_of_a_past_need_one_length(folder: Path) -> None:
    text = "{steps: 9, read: {a: {documents: read.txt}}}\n"
    (folder / "run.yaml").write_text(
        RECIPE + "  end: {steps: 2, sequence_length: 16, mix: {a: 1}}\npast: " + text
    )
    with pytest.raises(InvalidArgument, match="in a recipe of one sequence length"):
        read_recipe(folder / "run.yaml")


@for_each(
    ("past", "message"),
    [
        ("{steps: 0, read: {a: {samples: 1}}}", "steps must be .*1"),
        ("{steps: -3, read: {a: {samples: 1}}}", "steps"),
        ("{read: {a: {samples: 1}}}", "steps is missing"),
        ("{steps: 9}", "give either read"),
        ("{steps: 9, read: {a: {samples: 1}}, mix: {a: 1}}", "give either read"),
        ("{steps: 9, read: {c: {samples: 1}}}", "unknown source c"),
        ("{steps: 9, read: {a: {samples: -1}}}", "samples"),
        ("{steps: 9, read: {a: {}}}", "give one of tokens, samples, epochs and documents"),
        ("{steps: 9, read: {a: {samples: 1, tokens: 1}}}", "got tokens and samples"),
        ("{steps: 9, read: {a: {samples: 9000}}}", r"more than the \d+ of an epoch; .*epochs: "),
        ("{steps: 9, read: {a: {tokens: 9T}}}", r"more than the \d+ of an epoch"),
        ("{steps: 9000, mix: {a: 1}}", r"more than the \d+ of an epoch"),
        ("{steps: 9, mix: {a: 0}}", "must be positive"),
        ("{steps: 9, mix: {a: }}", "a share such as"),
        ("{steps: 9, read: {a: {samples: 1}}, sequence_length: 4}", "counts the tokens of a mix"),
        ("{steps: 9, read: {a: {documents: read.txt, epochs: 1.5}}}", "epochs must be whole"),
        ("{steps: 9, read: {a: {documents: high.txt}}}", "document 40 is not among the 40"),
        ("{steps: 9, reads: {}}", "did you mean read"),
    ],
)
def test_a_wrong_past_is_refused(folder: Path, past: str, message: str) -> None:
    (folder / "high.txt").write_text("40")
    with pytest.raises(InvalidArgument, match=message):
        open_recipe(recipe(folder, past))


@pytest.mark.parametrize("rule", [{"subset": Fraction(1, 2)}, {"held_out": Fraction(1, 9)}])
def test_documents_of_a_past_are_not_taken_of_a_subset(folder: Path, rule: dict[str, Any]) -> None:
    (folder / "few.txt").write_text("3 7")
    made = recipe(folder, "{steps: 9, read: {a: {documents: few.txt}}}")
    part = replace(made, sources=(replace(made.sources[0], **rule), made.sources[1]))
    with pytest.raises(InvalidArgument, match="past: source a: .*few.txt: a list .* of a subset"):
        open_recipe(part)
    other = replace(made, sources=(made.sources[0], replace(made.sources[1], **rule)))
    assert open_recipe(other).sources[0].size.unread_samples


def test_an_export_refuses_a_past(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megaindex.cli import main

    (folder / "one.yaml").write_text(
        "sequence_length: 8\nbatch: {global_batch_size: 4}\nsources: {a: a}\n"
        "past: {steps: 9, read: {a: {epochs: 0.5}}}\nstages: {all: {steps: 3, mix: {a: 1}}}\n"
    )
    out = ["--cache-dir", str(folder)]
    assert main(["export", "--recipe", str(folder / "one.yaml"), "--to", "maxtext", *out]) == 2
    assert "past: the arrays hold an order from its first sample on" in capsys.readouterr().err


def test_a_step_of_the_past_is_traced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megaindex.cli import main

    (folder / "traced.yaml").write_text(
        "sequence_length: 8\nbatch: {global_batch_size: 4}\nsources: {a: a}\n"
        "past: {steps: 9, read: {a: {epochs: 0.5}}}\nstages: {all: {steps: 3, mix: {a: 1}}}\n"
    )
    trace = ["trace", "--recipe", str(folder / "traced.yaml"), "--step"]
    assert main([*trace, "8"]) == 0
    printed = capsys.readouterr().out
    assert printed == "step 8 was made in another system, and its rows are unknown\n"
    assert main([*trace, "9"]) == 0
    assert "document" in capsys.readouterr().out


def test_a_past_beyond_the_limits_is_refused(folder: Path) -> None:
    made = Recipe(
        sequence_length=LENGTH,
        batch=BatchSchedule.constant(4),
        sources=(RecipeSource(name="a", path=str(folder / "a"), max_epochs=Fraction(2)),),
        stages=(RecipeStage(name="s", streams=(Stream(source="a"),)),),
        exhaustion="stop",
        past=Past(steps=3, read=(PastRead(source="a", epochs=Fraction(5, 2)),)),
    )
    with pytest.raises(InvalidArgument, match="raise its max_epochs or max_fraction"):
        open_recipe(made)
    with pytest.raises(MissingFile, match=r"nothing\.txt is not there"):
        open_recipe(recipe(folder, "{steps: 9, read: {a: {documents: nothing.txt}}}"))


def test_steps_behind_a_past_are_compared(folder: Path) -> None:
    """Records of runs whose batches differ only behind the samples that are served here alone."""
    pytest.importorskip("torch")
    from megaindex.loader import loader_of_recipe
    from megaindex.lock import compare_records

    records = []
    for batch in ("0:4", "0:4 1120:8"):
        text = RECIPE.replace("micro_batch_size: 2, data_parallel_size: 2", f"schedule: '{batch}'")
        (folder / "schedule.yaml").write_text(text + "past: {steps: 10, read: {a: {samples: 3}}}\n")
        opened = open_recipe(read_recipe(folder / "schedule.yaml"))
        loader = loader_of_recipe(opened, data_parallel_size=1, micro_batch_size=4)
        for _ in itertools.islice(loader, 30):
            pass
        records.append([loader.state_dict()])
    proof = compare_records(*records)
    assert proof.differences == ("samples before step 36: 144 in the first, 148 in the second",)


@pytest.mark.parametrize("left", [LENGTH - 1, LENGTH, LENGTH + 1])
def test_documents_left_that_fill_no_sample(tmp_path: Path, left: int) -> None:
    """A sample takes one more token for its last label."""
    for name in "ab":
        write_corpus(tmp_path / name, np.array([left, *[70] * 20]))
    (tmp_path / "read.txt").write_text(" ".join(map(str, range(1, 21))))
    opened = open_recipe(recipe(tmp_path, "{steps: 9, read: {a: {documents: read.txt}}}"))
    unread = opened.sources[0].unread
    assert (0 if unread is None else unread.num_samples) == int(left > LENGTH)
    layout = opened.layout
    assert layout.begins[0] == layout.sizes[0].samples - int(left > LENGTH)
    first = opened.layout.recipe.first_sample
    spans = opened.index.locate(np.arange(first, opened.index.num_samples))
    documents = spans.document[spans.source == 0]
    assert (documents[0] == 0) == (left > LENGTH)
