"""Blends that change in mid-run under GPT-NeoX: the past is its own, the rest amend_run's."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.neox_corpora import write_corpus_and_companions
from support.neox_running import arguments, loaders_of, texts

import megaindex.adapters.neox as adapter
from megaindex import AmendedBlend, BlendChange, InvalidArgument, amend_run
from megaindex.adapters.neox.skips import samples_index

SIZES = [np.random.default_rng(k).integers(1, 40, n).tolist() for k, n in enumerate((90, 60, 30))]
PLANNED = 160


def run_of(folder: Path, weights: dict[int, float], **given: Any) -> SimpleNamespace:
    """Arguments of a run of some of the corpora."""
    args = arguments(folder, SIZES, **{"train_iters": PLANNED // 4, **given})
    args.paths = [args.paths[k] for k in weights]
    args.weights = list(weights.values())
    return args


def amended(folder: Path, *changes: tuple[int, dict[int, float]]) -> AmendedBlend:
    return AmendedBlend(
        data_path=["3", str(folder / "c0"), "1", str(folder / "c1")],
        num_samples=PLANNED,
        changes=[
            BlendChange(
                consumed_samples=n, weights={str(folder / f"c{k}"): w for k, w in mix.items()}
            )
            for n, mix in changes
        ],
    )


def rows(index: Any, begin: int, end: int) -> list[Any]:
    spans = index.locate(np.arange(begin, end))
    return [column.tolist() for column in (*spans, spans.row_splits)]


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("exact", [False, True])
def test_the_past_is_neoxs(neox: Any, tmp_path: Path, exact: bool) -> None:
    adapter.install(exact=exact)
    before = texts(run_of(tmp_path, {0: 3, 1: 1}), PLANNED // 4)
    changes = amended(tmp_path, (40, {1: 2, 0: 1}), (72, {2: 1.0, 0: 1.0}))
    adapter.install(exact=exact, amend=changes)
    today = run_of(tmp_path, {2: 0.5, 0: 0.5}, train_iters=100)
    train = loaders_of(today)["train"].dataset
    after = texts(today, 100)
    assert after[:40] == before[:40]
    assert after[40:72] != before[40:72]
    run = amend_run(
        [str(tmp_path / "c0"), str(tmp_path / "c1")], weights=[3, 1], num_samples=PLANNED,
        changes=changes.changes, more_samples=400 - 72, sequence_length=16, seed=1234,
        order="neox", variance_buffer="exact" if exact else None,
    )  # fmt: skip
    assert any(getattr(source, "further_seeds", ()) for source in run.sources)
    assert rows(samples_index(train), 0, 400) == rows(run.index, 0, 400)
    for k, row in enumerate(after):
        spans = run.index.locate([k])
        tokens = [
            run.datasets[s].get(int(d), int(o), int(n)) for s, d, o, n in zip(*spans, strict=True)
        ]
        assert row == np.concatenate(tokens).tolist()
    copied = pickle.loads(pickle.dumps(train))
    assert copied[399]["text"].tolist() == after[399]
    resumed = run_of(tmp_path, {2: 0.5, 0: 0.5}, train_iters=100, iteration=18)
    assert texts(resumed, 10) == after[72:112]
    assert "amended" in str(megaindex_status())


def test_a_run_goes_on_with_one_corpus(neox: Any, tmp_path: Path) -> None:
    changes = amended(tmp_path, (40, {1: 1.0}))
    adapter.install(amend=changes)
    train = loaders_of(run_of(tmp_path, {1: 1.0}))["train"].dataset
    run = amend_run(
        [str(tmp_path / "c0"), str(tmp_path / "c1")], weights=[3, 1], num_samples=PLANNED,
        changes=changes.changes, more_samples=PLANNED - 40, sequence_length=16, seed=1234,
        order="neox", variance_buffer=None,
    )  # fmt: skip
    assert rows(samples_index(train), 0, PLANNED) == rows(run.index, 0, PLANNED)
    assert {*run.index.locate(np.arange(40, PLANNED)).source.tolist()} == {1}


def test_a_corpus_that_is_written_again_is_not_read_with_arrays_of_before(
    neox: Any, tmp_path: Path
) -> None:
    def read(folder: Path) -> list[list[int]]:
        adapter.install(amend=amended(folder, (40, {2: 1.0, 0: 1.0})))
        return texts(run_of(folder, {2: 0.5, 0: 0.5}, train_iters=100), 100)

    before = read(tmp_path)
    (tmp_path / "fresh").mkdir()
    for path in list(tmp_path.glob("c2*")):
        path.unlink()
    # as many documents and tokens, so that arrays of the same shapes are needed
    write_corpus_and_companions(tmp_path / "c2", SIZES[2][::-1], [0] * len(SIZES[2]))
    for path in tmp_path.glob("c?.*"):
        shutil.copy(path, tmp_path / "fresh")
    after = read(tmp_path)
    assert before != after == read(tmp_path / "fresh")


def megaindex_status() -> Any:
    import megaindex.adapters

    return megaindex.adapters.status()


def test_what_is_refused(neox: Any, tmp_path: Path) -> None:
    changes = amended(tmp_path, (40, {0: 1, 1: 1}))
    adapter.install(amend=changes)
    for args, message in (
        (run_of(tmp_path, {0: 3, 1: 1}), "must be that of the last change"),
        (run_of(tmp_path, {0: 1, 2: 1}), "must be that of the last change"),
        (run_of(tmp_path, {0: 1, 1: 1}, train_epochs=1), "give train_iters"),
        (run_of(tmp_path, {0: 1, 1: 1}, data_path=str(tmp_path / "c0")), "with train_data_paths"),
        (run_of(tmp_path, {0: 1, 1: 1}, train_iters=5), "lies at or beyond the end"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            loaders_of(args)
    unpacked = run_of(tmp_path, {0: 1, 1: 1}, pack_impl="unpacked")
    with pytest.raises(
        InvalidArgument, match="must be GPT2Dataset .*, got GPT2Dataset with pack_im"
    ):
        loaders_of(unpacked)
    loaders_of(run_of(tmp_path, {0: 1, 1: 1}))
    bare = AmendedBlend(
        data_path=[str(tmp_path / f"c{k}") for k in (0, 1)], num_samples=PLANNED,
        changes=changes.changes,
    )  # fmt: skip
    adapter.install(amend=bare)
    with pytest.raises(InvalidArgument, match="write a weight before every path of data_path"):
        loaders_of(run_of(tmp_path, {0: 1, 1: 1}))
    one = AmendedBlend(
        data_path=[str(tmp_path / "c0")], num_samples=PLANNED, changes=changes.changes
    )
    adapter.install(amend=one)
    loaders_of(run_of(tmp_path, {0: 1, 1: 1}))
    with pytest.raises(InvalidArgument, match="lock and amend exclude each other"):
        adapter.install(amend=changes, lock="run.lock")
