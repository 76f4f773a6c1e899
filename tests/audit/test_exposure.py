"""Counts equal brute-force counting, whatever the order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.auditing import as_plain, brute_force
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex import InvalidArgument, MegatronOrder, build_index
from megaindex.audit import audit
from megaindex.audit import exposure as exposure_module
from megaindex.audit.exposure import SHARES, count_exposure
from megaindex.format import IndexedDataset
from megaindex.index.blended_index import blend_index
from megaindex.index.frameworks import Split, framework_rules
from megaindex.index.spans import Spans, check_sample_ids
from megaindex.loader import Loader
from megaindex.run import run as run_module
from megaindex.run.from_settings import run_of_settings
from megaindex.run.run import Run, RunSource, run_of_index
from megaindex.run.sizing import Sizing
from megaindex.settings.batch_schedule import BatchSchedule, steps_of
from megaindex.settings.run_builder import resolve
from megaindex.settings.settings import Settings


class Windows:
    """An order without arrays: contiguous windows of one document, over and over, reversed."""

    def __init__(self, tokens: int, sequence_length: int, num_samples: int) -> None:
        self.num_samples, self.sequence_length = num_samples, sequence_length
        self.num_epochs, self.tokens_per_epoch, self.add_extra_token = 1, tokens, 1

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        ids = check_sample_ids(sample_ids, self.num_samples)
        windows = (self.tokens_per_epoch - 1) // self.sequence_length
        offset = (windows - 1 - ids % windows) * self.sequence_length
        return Spans(
            source=np.zeros(ids.size, np.int32),
            document=np.zeros(ids.size, np.int64),
            offset=offset,
            length=np.full(ids.size, self.sequence_length + 1),
            row_splits=np.arange(ids.size + 1),
        )


def check_against_brute_force(stream: Run, points: int = 400) -> None:
    found, expected = count_exposure(stream, points=points), brute_force(stream)
    assert found.step_tokens.tolist() == expected["tokens"].tolist()
    assert found.step_earlier.tolist() == expected["earlier"].tolist()
    assert found.distances.tolist() == expected["distances"].tolist()
    assert found.first_repeats.tolist() == expected["first_repeats"]
    by_source = np.add.reduceat(expected["by_source"], found.stretches[:-1])
    assert found.source_earlier.tolist() == by_source.tolist()
    assert as_plain(found.past) == expected["past"]
    assert as_plain(found.total) == expected["total"]
    by_stretch = np.add.reduceat(found.step_tokens, found.stretches[:-1])
    assert found.shares.sum(axis=1).tolist() == by_stretch.tolist()
    assert found.composition.sum(axis=1).tolist() == by_stretch.tolist()
    if found.total.tokens.shape[1] < SHARES:
        earlier = found.shares @ np.arange(SHARES)
        assert (
            earlier.tolist() == np.add.reduceat(found.step_earlier, found.stretches[:-1]).tolist()
        )


ORDERS = ["megatron", "neox", "megatron-legacy", "paddlenlp", "epoch", "window"]
EPOCHS = ["0.4", "1", "2.3", "3"]


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@for_each("order", ORDERS)
@for_each("epochs", EPOCHS)
def test_one_source(prefix: Path, order: str, epochs: str, every: int) -> None:
    if (ORDERS.index(order) + EPOCHS.index(epochs)) % every:
        return
    settings = Settings(
        order=order, data_path=(str(prefix),), seq_length=16, global_batch_size=7, epochs=epochs
    )
    check_against_brute_force(run_of_settings(resolve(settings)))


@for_each("order", ["megatron", "neox", "megatron-legacy", "paddlenlp", "epoch", "window"])
def test_a_blend(tmp_path: Path, order: str) -> None:
    rng = np.random.default_rng(3)
    words: list[str] = []
    for weight, size in ((0.5, 40), (0.3, 60), (0.2, 9)):
        write_corpus(tmp_path / f"{size}", rng.integers(1, 90, size))
        words += [str(weight), str(tmp_path / f"{size}")]
    settings = Settings(
        order=order,
        data_path=tuple(words),
        split="8,1,1",
        seq_length=16,
        global_batch_size=6,
        train_samples="300",
        consumed_samples="100",
        variance_buffer="1.2",
    )
    stream = run_of_settings(resolve(settings))
    assert stream.past_steps == 17  # 16 whole batches and one of 4
    assert [source.first_document for source in stream.sources] == [0, 0, 0]
    check_against_brute_force(stream, points=10)


@pytest.mark.parametrize("order", ["megatron", "epoch"])
def test_the_blend_draws_what_the_plan_counts(prefix: Path, order: str) -> None:
    """Both rules, the greedy one and the divisor rule, position by position."""
    indices = [build_index(str(prefix), sequence_length=16, seed=seed) for seed in (1, 2, 3)]
    sizing = Sizing(
        row=framework_rules(order),
        sequence_length=16,
        names=("a", "b", "c"),
        tokens=tuple(index.tokens_per_epoch for index in indices),
        weights=(5, 2, 1),
        buffer="exact",
        asks_one_epoch=False,
        pass_samples_vary=False,
    )
    index = blend_index(sizing.blend.draws, indices, 300, 0)
    seen = np.zeros(3, int)
    for sample in range(300):
        spans = index.locate([sample])
        (source,) = set(spans.source.tolist())
        own = indices[source].locate([seen[source]])
        assert [c.tolist() for c in list(spans)[1:]] == [c.tolist() for c in list(own)[1:]]
        seen[source] += 1
        assert seen.tolist() == sizing.drawn(sample + 1)
    shuffled = np.random.default_rng(0).permutation(300)
    spans = index.locate(shuffled)
    for row, sample in enumerate(shuffled.tolist()):
        part = slice(*spans.row_splits[row : row + 2])
        expected = [column.tolist() for column in index.locate([sample])]
        assert [column[part].tolist() for column in spans] == expected


def test_an_index_without_arrays() -> None:
    index = Windows(tokens=103, sequence_length=10, num_samples=37)
    source = RunSource(name="windows", sequence_lengths=np.array([103], np.int32))
    stream = run_of_index(index, [source], global_batch_size=4, consumed_samples=13)
    assert stream.num_samples == 37
    check_against_brute_force(stream)
    check_against_brute_force(stream, points=2)


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=25),
    sequence_length=st.integers(1, 12),
    epochs=st.integers(1, 4),
    batch=st.integers(1, 9),
    extra=st.integers(0, 1),
    final=st.sampled_from(["auto", "always", "never"]),
    data=st.data(),
)
def test_any_index_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    sequence_length: int,
    epochs: int,
    batch: int,
    extra: int,
    final: str,
    data: st.DataObject,
) -> None:
    if sum(lengths) < sequence_length + extra:
        lengths = [*lengths, sequence_length + extra]
    dataset = write_corpus(tmp_path_factory.mktemp("any") / "c", lengths)
    index = build_index(
        dataset,
        sequence_length=sequence_length,
        seed=7,
        epochs=epochs,
        add_extra_token=extra,
        order=MegatronOrder(separate_final_epoch=final),
    )
    batch = min(batch, index.num_samples)
    source = RunSource(name="c", sequence_lengths=dataset.sequence_lengths)
    steps = index.num_samples // batch
    consumed = data.draw(st.integers(0, steps * batch))
    stream = run_of_index(index, [source], global_batch_size=batch, consumed_samples=consumed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exposure_module, "_RUNS_AT_ONCE", data.draw(st.integers(1, 40)))
        patch.setattr(exposure_module, "_DOCUMENTS_AT_ONCE", data.draw(st.integers(1, 40)))
        patch.setattr(run_module, "_SAMPLES_AT_ONCE", data.draw(st.integers(1, 40)))
        check_against_brute_force(stream, points=data.draw(st.integers(1, 12)))


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    firsts=st.lists(st.integers(1, 60), min_size=3, max_size=3, unique=True),
    consumed=st.integers(0, 80),
    more=st.integers(0, 80),
)
def test_step_bounds_follow_the_schedule(
    sizes: list[int], firsts: list[int], consumed: int, more: int
) -> None:
    stages = tuple(zip([0, *sorted(firsts)], sizes, strict=False))
    schedule = BatchSchedule(stages=stages)
    steps, past = steps_of(schedule, consumed, consumed + more)
    expected = [0]
    for end in (consumed, consumed + more):
        while expected[-1] < end:
            size = [s for first, s in stages if first <= expected[-1]][-1]
            expected.append(min(end, expected[-1] + size))
        if end == consumed:
            assert past == len(expected) - 1
    assert steps.bounds.tolist() == expected


def test_what_cannot_be_audited_is_refused(prefix: Path) -> None:
    base = {"seq_length": 16, "global_batch_size": 4}
    with pytest.raises(InvalidArgument, match="no documents to audit"):
        run_of_settings(resolve(Settings(tokens_per_epoch=("1000",), epochs="1", **base)))
    plain = Settings(data_path=(str(prefix),), train_iters=9, **base)
    with pytest.raises(InvalidArgument, match="no valid data"):
        run_of_settings(resolve(plain), subset="valid")
    none = Settings(data_path=(str(prefix),), train_samples="3", **base)
    with pytest.raises(InvalidArgument, match="makes no step"):
        run_of_settings(resolve(none))


def test_each_phase_reads_datasets_of_its_own(prefix: Path) -> None:
    """Megatron builds each phase for its own iterations: 3 of one index, then 4 of another."""
    settings = Settings(
        order="megatron", data_path=(str(prefix),), seq_length=16, global_batch_size=4,
        train_iters=7, phase_transition_iterations=(3,),
    )  # fmt: skip
    stream = run_of_settings(resolve(settings))
    assert stream.step_bounds.tolist() == list(range(0, 29, 4))
    resumed = replace(settings, train_iters=None, train_samples="31", consumed_samples="16")
    later = run_of_settings(resolve(resumed))
    assert (later.past_steps, later.step_bounds.tolist()) == (4, stream.step_bounds.tolist())
    for first, samples in ((0, 12), (12, 16)):
        phase = build_index(prefix, sequence_length=16, seed=1234, num_samples=samples)
        ours, theirs = stream.index.locate(range(first, first + samples)), phase.locate(
            range(samples)
        )  # fmt: skip
        assert [part.tolist() for part in ours] == [part.tolist() for part in theirs]


@pytest.mark.parametrize(("subset", "samples"), [("valid", 2 * 3 * 4), ("test", 3 * 4)])
def test_evaluations_are_audited_too(prefix: Path, subset: Split, samples: int) -> None:
    """9 iterations, an evaluation every 5: at iteration 5 and at the end, 3 batches each."""
    settings = Settings(
        order="megatron", data_path=(str(prefix),), split="8,1,1", seq_length=16,
        global_batch_size=4, train_iters=9, eval_interval=5, eval_iters=3,
    )  # fmt: skip
    stream = run_of_settings(resolve(settings), subset=subset)
    assert (stream.num_samples, stream.num_steps) == (samples, samples // 4)
    index = build_index(
        prefix, sequence_length=16, seed=1234, num_samples=samples, split="8,1,1", subset=subset
    )
    ours, theirs = stream.index.locate(range(samples)), index.locate(range(samples))
    assert [part.tolist() for part in ours] == [part.tolist() for part in theirs]
    assert stream.sources[0].first_document == int(index.document_index.min())


def test_a_source_that_runs_short_is_named(tmp_path: Path) -> None:
    """Without weights Megatron builds one epoch of each path, whatever is asked."""
    rng = np.random.default_rng(1)
    paths = tuple(str(tmp_path / name) for name in "ab")
    for path in paths:
        write_corpus(Path(path), rng.integers(1, 50, 30))
    settings = Settings(
        order="megatron", data_path=paths, seq_length=8, global_batch_size=2, epochs="2"
    )
    with pytest.raises(InvalidArgument, match=r"samples of the blend draw \d+ of it, and \d+ were"):
        run_of_settings(resolve(settings))


def test_arguments_of_an_index_are_checked(prefix: Path) -> None:
    dataset = IndexedDataset(str(prefix))
    index = build_index(dataset, sequence_length=16, seed=1)
    sources = [RunSource(name="c", sequence_lengths=dataset.sequence_lengths)]
    with pytest.raises(InvalidArgument, match="at least 1, got 0"):
        run_of_index(index, sources, global_batch_size=0)
    with pytest.raises(InvalidArgument, match=r"consume \d+ samples, the index holds"):
        run_of_index(index, sources, global_batch_size=8, num_steps=10**6)
    with pytest.raises(InvalidArgument, match="consumed-samples must be from 0 to 80"):
        run_of_index(index, sources, global_batch_size=8, num_steps=10, consumed_samples=81)


def test_what_is_no_index_or_run_is_refused_by_name(tmp_path: Path) -> None:
    write_corpus(tmp_path / "<b>c", np.full(40, 20))
    index = megaindex.build_index(tmp_path / "<b>c", sequence_length=16, epochs=1)
    assert isinstance(index, megaindex.Index)
    no_index: Any = [1, 2]
    assert not isinstance(no_index, megaindex.Index)
    for take in (
        lambda: run_of_index(no_index, global_batch_size=4),
        lambda: Loader(no_index, [[0]]),
        lambda: Loader(no_index, index.datasets, [[0]]),
    ):
        with pytest.raises(InvalidArgument, match=r"members of megaindex\.Index.*a list has no"):
            take()
    wrong: Any = index
    with pytest.raises(InvalidArgument, match="^run must be a run"):
        audit(wrong)


def test_runs_and_locks_are_tables_in_notebooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "<b>c", np.full(40, 20))
    settings: Any = {"sequence_length": 16, "train_iters": 3, "global_batch_size": 4,
                     "eval_iters": 0}  # fmt: skip
    opened = megaindex.open_run(tmp_path / "<b>c", **settings)
    shown = opened._repr_html_()
    assert "run" not in vars(opened)  # nothing was built
    assert "<b>" not in shown
    run = opened.run
    assert repr(run).startswith("Run(order=")
    assert "samples=12, steps=3, sources=" in repr(run)
    assert run._repr_html_() in opened._repr_html_()
    assert "&lt;b&gt;c" in run._repr_html_()
    assert "<b>" not in opened._repr_html_()
    lock = opened.make_lock()
    assert ">12 samples<" in lock._repr_html_()
    assert ">3 steps<" in lock._repr_html_()
    assert "<b>" not in lock.write(tmp_path / "<b>.lock")._repr_html_()
