"""The first difference of two runs, against a comparison sample by sample."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

from megaindex import OutOfRange, Skip
from megaindex.audit import run_of_settings
from megaindex.index.receipts import fingerprint_keys, receipts_between
from megaindex.index.stretches import Stretch, StretchedIndex
from megaindex.run.run import Run
from megaindex.run.same_until import Compared, compare_receipts, same_until

STEPS, SIZE = 20, 4
SAMPLES = STEPS * SIZE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    for name in ("web", "code", "chat"):
        write_corpus(folder / name, rng.integers(1, 90, 120), np.uint16)
    return folder


def run(folder: Path, *sources: str, **settings: Any) -> Run:
    """A run of a blend."""
    words = [word for k, name in enumerate(sources, 1) for word in (str(k), str(folder / name))]
    given = {"sequence_length": 16, "train_iters": STEPS, "global_batch_size": SIZE}
    return run_of_settings(data_path=words, **{**given, **settings})


def swapped(index: Any, at: int) -> StretchedIndex:
    """The index with two neighbouring samples exchanged."""
    ids = np.arange(SAMPLES)
    ids[[at, at + 1]] = ids[[at + 1, at]]
    return StretchedIndex(stretches=(Stretch(index=index, samples=ids),))


def test_equal_runs_have_no_difference_in_what_was_compared(folder: Path) -> None:
    ours, theirs = (Compared.of(run(folder, "web", "code")) for _ in range(2))
    found = same_until(ours, theirs, 3, 50)
    assert (found.begin, found.end, found.where, found.causes) == (3, 50, None, ())


@pytest.mark.parametrize(("begin", "end", "differs"), [
    (0, 30, False), (0, 31, True), (30, 32, True), (31, 32, True), (32, 80, False),
])  # fmt: skip
def test_positions_outside_the_range_are_not_compared(
    folder: Path, begin: int, end: int, differs: bool
) -> None:
    ours = Compared.of(run(folder, "web", "code"))
    theirs = replace(ours, index=swapped(ours.index, 30))
    found = same_until(ours, theirs, begin, end, stride=8)
    assert found.where == ((24, 32) if differs else None)
    first = f"sample {max(begin, 30)}: "
    assert [text.startswith(first) for text in found.samples[:1]] == [True] * differs


@pytest.mark.parametrize(("settings", "cause"), [
    ({"seed": 7}, "order: common.seed: 1234 in the first, 7 in the second"),
    ({"sequence_length": 17}, "order: common.sequence_length: 16 in the first, 17 in the second"),
    ({"order": "neox"}, "order: "),
])  # fmt: skip
def test_the_cause_of_other_samples_is_named(folder: Path, settings: Any, cause: str) -> None:
    ours = Compared.of(run(folder, "web", "code", train_iters=400))
    theirs = Compared.of(run(folder, "web", "code", train_iters=400, **settings))
    found = same_until(ours, theirs, 0, 1600)
    assert found.where == (0, 1 << 20)
    assert (found.sources, found.steps) == ((), ())
    first, *others = found.samples
    at = int(first.removeprefix("sample ").partition(":")[0])
    spans = [[*map(list, each.index.locate([at]))] for each in (ours, theirs)]
    assert spans[0] != spans[1]
    assert any(text.startswith(cause) for text in others), found
    assert same_until(ours, theirs, 0, at).where is None


def test_another_source_is_named(folder: Path) -> None:
    ours, theirs = (Compared.of(run(folder, "web", name)) for name in ("code", "chat"))
    found = same_until(ours, theirs, 0, SAMPLES)
    names = [each.fingerprints[1] for each in (ours, theirs)]
    assert found.sources == (
        f"fingerprint of source 1: '{names[0]}' in the first, '{names[1]}' in the second",
    )
    assert found.where == (0, 1 << 20)
    alone = Compared.of(run(folder, "web", train_iters=2))
    assert "'nothing' in the first" in same_until(alone, ours, 0, 1).sources[0]


@pytest.mark.parametrize(("end", "text"), [
    (4, ()), (5, ("number of steps: 1 in the first, 0 in the second",)),
    (9, ("samples before step 1: 4 in the first, 8 in the second",)),
])  # fmt: skip
def test_the_first_other_step_is_named(folder: Path, end: int, text: tuple[str, ...]) -> None:
    ours = Compared.of(run(folder, "web", "code"))
    other = run(folder, "web", "code", train_iters=STEPS // 2, global_batch_size=2 * SIZE)
    found = same_until(ours, Compared.of(other), 0, end)
    assert (found.where, found.steps) == (None, text)
    unknown = replace(ours, step_bounds=None)
    assert not same_until(unknown, Compared.of(other), 0, SAMPLES).steps


def test_the_number_of_steps_is_compared_to_an_end_of_its_own(folder: Path) -> None:
    ours, theirs = (run(folder, "web", "code", train_iters=n) for n in (STEPS, STEPS + 1))
    compared = Compared.of(ours), Compared.of(theirs)
    assert not same_until(*compared, 0, SAMPLES).steps
    found = same_until(*compared, 0, SAMPLES, end_of_steps=2 * SAMPLES)
    assert found.steps == ("number of steps: 20 in the first, 21 in the second",)
    with pytest.raises(OutOfRange):
        same_until(*compared, 0, theirs.index.num_samples + 1)


def test_arrays_of_unknown_origin_are_described_as_nothing(folder: Path) -> None:
    ours = Compared.of(run(folder, "web", "code"))
    assert ours.description["order"] == "blend"
    index: Any = ours.index
    assert replace(ours, index=replace(index.indices[0], request=None)).description == {}


def test_skips_are_no_difference(folder: Path) -> None:
    ours = run(folder, "web", "code")
    theirs = run(folder, "web", "code", skip=[Skip(steps=(3, 4)), Skip(steps=(7,), move=True)])
    assert not same_until(Compared.of(ours), Compared.of(theirs), 0, SAMPLES).causes


@pytest.mark.parametrize("at", [0, 7, 8, 63, 78])
def test_the_first_other_receipt_is_that_of_its_block(folder: Path, at: int) -> None:
    ours = run(folder, "web", "code")
    compared = Compared.of(ours)
    bounds = ours.step_bounds[::2].tolist()
    receipts = [str(each) for each in receipts_between(ours.index, bounds, compared.keys)]
    subset = {"steps": [[0, SIZE, STEPS]], "samples": SAMPLES,
              "receipts": {"block_steps": 2, "blocks": receipts}}  # fmt: skip
    total, other = compare_receipts(subset, ours.index, compared.keys)
    assert (total.count, other) == (SAMPLES, None)
    total, other = compare_receipts(subset, swapped(ours.index, at), compared.keys)
    assert total.count == SAMPLES
    assert other is not None
    assert (other.first_step, other.last_step) == (at // SIZE // 2 * 2, at // SIZE // 2 * 2 + 1)
    assert (other.theirs, other.ours != other.theirs) == (receipts[other.first_step // 2], True)
    keys = fingerprint_keys(compared.fingerprints[::-1])
    assert compare_receipts(subset, ours.index, keys)[1] is not None
