"""Framework runs whose blend changes on the way, against a model of sets of samples."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex import AmendedBlend, BlendChange, amend_run
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.array_index import scan, served_tokens
from megaindex.index.receipts import fingerprint_keys, planned_receipt
from megaindex.index.stretches import StretchedIndex

FEWER = settings(max_examples=settings().max_examples // 4)
LENGTH = 16
KEYS = fingerprint_keys([f"{k}" * 32 for k in range(4)])


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[IndexedDataset]:
    folder = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(8)
    sizes = (60, 35, 9, 20)
    return [write_corpus(folder / f"c{k}", rng.integers(0, 90, n)) for k, n in enumerate(sizes)]


def names(corpora: list[IndexedDataset]) -> list[str]:
    return [corpus.path_prefix for corpus in corpora]


def expected_counts(weights: dict[int, int], samples: int) -> dict[int, float]:
    total = sum(weights.values())
    return {source: samples * weight / total for source, weight in weights.items()}


@FEWER
@given(data=st.data())
def test_changed_runs_against_a_model(corpora: list[IndexedDataset], data: st.DataObject) -> None:
    """The past is the framework's; each change has its shares; no token before its epoch ends."""
    order = data.draw(st.sampled_from(["megatron", "neox", "paddlenlp"]))
    planned = data.draw(st.integers(40, 400))
    weights = data.draw(st.sampled_from([(0.6, 0.4), (0.9, 0.1), (1, 1)]))
    bounds = data.draw(st.lists(st.integers(0, planned - 1), min_size=1, max_size=3, unique=True))
    mixes = [
        data.draw(st.dictionaries(st.integers(0, 3), st.integers(1, 9), min_size=1)) for _ in bounds
    ]
    changes = [
        BlendChange(
            consumed_samples=begin, weights={names(corpora)[k]: w for k, w in sorted(mix.items())}
        )
        for begin, mix in zip(sorted(bounds), mixes, strict=True)
    ]
    how: dict[str, Any] = {"sequence_length": LENGTH, "seed": 5, "order": order}
    run = amend_run(
        corpora[:2], weights=weights, num_samples=planned, changes=changes, **how,
        variance_buffer="exact",
    )  # fmt: skip
    first = changes[0].consumed_samples
    theirs = megaindex.build_blend(
        corpora[:2], weights=weights, num_samples=planned, variance_buffer="exact", **how
    )
    assert planned_receipt(run.index, 0, first, KEYS) == planned_receipt(theirs, 0, first, KEYS)
    _check_shares(run, changes, planned, names(corpora))
    _check_epochs(run)


def _check_shares(run: Any, changes: Any, end: int, paths: list[str]) -> None:
    """Compare the samples of each source after each change with its weights."""
    spans = run.index.locate(np.arange(run.num_samples))
    source = spans.source[spans.row_splits[:-1]]
    known = [dataset.path_prefix for dataset in run.datasets]
    stops = [change.consumed_samples for change in changes[1:]] + [end]
    for change, stop in zip(changes, stops, strict=True):
        drawn = Counter(source[change.consumed_samples : stop].tolist())
        samples = stop - change.consumed_samples
        wanted = expected_counts({known.index(p): w for p, w in change.weights.items()}, samples)
        assert set(drawn) <= set(wanted)
        for number, count in wanted.items():
            assert abs(drawn[number] - count) <= len(wanted)
    assert set(known) <= set(paths)


def _check_epochs(run: Any) -> None:
    """A token of a source is served again only once all others were served."""
    for number, dataset in enumerate(run.datasets):
        served = np.zeros(int(dataset.sequence_lengths.sum()), np.int64)
        starts = np.concatenate(([0], np.cumsum(dataset.sequence_lengths)[:-1]))
        spans = run.index.locate(np.arange(run.num_samples))
        inputs = spans.input_lengths(LENGTH)
        mine = spans.source == number
        for document, offset, length in zip(
            spans.document[mine], spans.offset[mine], inputs[mine], strict=True
        ):
            begin = int(starts[document] + offset)
            served[begin : begin + length] += 1
            if number >= len(run.old.indices) or run.old.indices[number].num_epochs == 1:
                # epoch by epoch, but for the tokens that each epoch leaves out
                left_out = min(LENGTH * int(served.max()), served.size - 1)
                assert served.max() - np.sort(served)[left_out] <= 1


def test_a_source_goes_on_where_it_was_left(corpora: list[IndexedDataset]) -> None:
    a, b = names(corpora)[:2]
    how: Any = {"sequence_length": LENGTH, "weights": (0.5, 0.5), "num_samples": 100}
    changes = [
        BlendChange(consumed_samples=40, weights={a: 1}),
        BlendChange(consumed_samples=60, weights={a: 1, b: 3}),
    ]
    run = amend_run(corpora[:2], changes=changes, **how)
    assert isinstance(run.index, StretchedIndex)
    theirs = run.old
    ours = run.index.locate(np.arange(40, 100))
    for number in range(2):
        drawn = ours.source[ours.row_splits[:-1]] == number
        count = int(drawn.sum())
        later = theirs.indices[number].locate(np.arange(20, 20 + count))  # type: ignore[attr-defined]
        documents = [ours.document[ours.row_splits[i]] for i in np.flatnonzero(drawn)]
        assert documents == later.document[later.row_splits[:-1]].tolist()
    longer = amend_run(corpora[:2], changes=changes, more_samples=500, **how)
    assert longer.num_samples == 560
    assert planned_receipt(longer.index, 0, 100, KEYS) == planned_receipt(run.index, 0, 100, KEYS)


def test_documents_are_found_in_amended_runs(corpora: list[IndexedDataset]) -> None:
    change = BlendChange(consumed_samples=90, weights=dict.fromkeys(names(corpora)[1:3], 1))
    run = amend_run(
        corpora[:2], sequence_length=LENGTH, num_samples=200, weights=(2, 1), changes=[change]
    )
    for source in range(3):
        documents = np.arange(0, len(run.datasets[source]), 2)
        ours, theirs = (
            served_tokens(run.index, documents, source),
            scan(run.index, documents, source),
        )
        assert sorted(zip(*ours, strict=True)) == sorted(zip(*theirs, strict=True))


@for_each(
    ("changes", "message"),
    [
        ([], "changes is empty"),
        ([(50, {"a": 1}), (50, {"b": 1})], "give changes in the order of their samples"),
        ([(201, {"a": 1})], "beyond the 200 samples"),
        ([(200, {"a": 1})], "give more_samples"),
        ([(-1, {"a": 1})], "must be at least 0"),
        ([(10, {})], "must have a weight for each source"),
        ([(10, {"a": 0})], "leave out a source with weight 0"),
        ([(10, {"a": float("nan")})], "must be positive and finite"),
        ([(10, {"a": 1, "./a": 1})], "twice; list it once"),
    ],
)
def test_wrong_changes_are_refused(corpora: Any, changes: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        amend_run(
            corpora[:2], sequence_length=LENGTH, weights=(1, 1), num_samples=200,
            variance_buffer="exact",
            changes=[BlendChange(consumed_samples=n, weights=w) for n, w in changes],
        )  # fmt: skip


def test_numbers_of_numpy_are_those_of_python() -> None:
    change = BlendChange(consumed_samples=np.uint8(96), weights={"a": 1})  # type: ignore[arg-type]
    assert change == BlendChange(consumed_samples=96, weights={"a": 1})
    assert type(change.consumed_samples) is int
    blend = AmendedBlend(data_path="a", num_samples=np.uint8(100), changes=[change])  # type: ignore[arg-type]
    assert type(blend.num_samples) is int


def test_an_amended_run_is_trained_on_from_its_checkpoint(corpora: list[IndexedDataset]) -> None:
    """A new source joins; on other ranks, the receipts are those of the amended plan."""
    pytest.importorskip("torch")
    from support.checkpoint_runs import served_over_a_restart

    a, _, c = names(corpora)[:3]
    run = amend_run(
        corpora[:2], sequence_length=LENGTH, num_samples=150, weights=(2, 1), more_samples=104,
        changes=[BlendChange(consumed_samples=96, weights={c: 1, a: 2})],
    )  # fmt: skip

    check = served_over_a_restart(run.old, run.index, 96)
    assert check.equal
    assert check.served.total.count == run.num_samples == 200


@pytest.mark.parametrize("epochs", [1, 2])
def test_samples_left_of_several_epochs_come_by_how_often_their_tokens_were_served(
    corpora: list[IndexedDataset], epochs: int
) -> None:
    """Those of one epoch share no token, and keep their order."""
    how: Any = {"sequence_length": LENGTH, "seed": 5, "order": "neox"}
    corpus = corpora[0]
    planned = megaindex.build_index(corpus, epochs=epochs, **how).num_samples
    change = BlendChange(consumed_samples=planned // 2, weights={corpus.path_prefix: 1.0})
    run = amend_run(corpus, num_samples=planned, changes=[change], **how)
    alone = megaindex.extend_run(
        corpus, num_samples=planned, consumed_samples=planned // 2,
        more_samples=planned - planned // 2, **how,
    )  # fmt: skip
    expected = run.old if epochs == 1 else alone.index
    ids = np.arange(planned)
    for found, right in zip(run.index.locate(ids), expected.locate(ids), strict=True):
        np.testing.assert_array_equal(found, right)
    others = alone.index.locate(ids).document.tolist() != run.old.locate(ids).document.tolist()
    assert others == (epochs == 2)


def test_a_run_ends_with_the_samples_that_were_requested(corpora: list[IndexedDataset]) -> None:
    """Not with those of the epochs that were built for them."""
    corpus = corpora[0]
    change = BlendChange(consumed_samples=20, weights={corpus.path_prefix: 1.0})
    run = amend_run(corpus, sequence_length=LENGTH, num_samples=50, changes=[change])
    assert run.old.num_samples > 50
    assert run.num_samples == 50
