"""Arguments in the forms that callers have: paths, NumPy numbers, one in place of a list, and
relative paths in a process that changes its directory."""

from __future__ import annotations

import os
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

from megaindex import IndexedDataset, build_blend, build_index, open_run
from megaindex.audit import run_of_index, runs_of
from megaindex.corpus import cut_evenly, merge, open_numpy, open_tntidx, split, tokenize
from megaindex.errors import InvalidArgument, MissingFile, OutOfRange
from megaindex.lock import make_lock, verify_lock
from megaindex.recipe import (
    BatchSchedule,
    Recipe,
    RecipeSource,
    RecipeStage,
    Stream,
    Target,
    open_recipe,
)

RUN: dict[str, Any] = {"sequence_length": 16, "global_batch_size": 4, "train_samples": 40}


@pytest.fixture(autouse=True)
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(2)
    for name in ("web", "code"):
        write_corpus(tmp_path / name, rng.integers(1, 40, 60))


@pytest.mark.parametrize(
    "weights",
    [(0.75, 0.25), tuple(np.array([0.75, 0.25])), (np.float32(0.75), np.float64(0.25)),
     (3, 1), (np.int64(3), np.int32(1)), (Fraction(3, 4), Fraction(1, 4))],
)  # fmt: skip
def test_weights_of_a_run_are_numbers_of_any_kind(weights: Any) -> None:
    run = open_run(weights[0], "web", weights[1], Path("code"), **RUN).run
    assert run.counts(0, 40).tolist() == [30, 10]


@pytest.mark.parametrize("word", [None, ["web", "code"], b"web", 1j])
def test_what_names_no_run_is_refused(word: Any) -> None:
    with pytest.raises(InvalidArgument, match="open_run takes files, prefixes and weights, got"):
        open_run(word, **RUN)


@pytest.mark.parametrize("corpora", [{"web": 0.9, "code": 0.1}, iter(["web"]), "web", []])
def test_corpora_of_a_blend_are_a_list(corpora: Any) -> None:
    with pytest.raises(InvalidArgument, match="corpora must be a list"):
        build_blend(corpora, num_samples=9, sequence_length=16)


def test_pairs_are_named_by_paths(tmp_path: Path) -> None:
    merge(tmp_path / "both", [tmp_path / "web", "code"])
    merge("one", tmp_path / "web")
    assert len(IndexedDataset("both")) == 120
    assert len(IndexedDataset("one")) == 60
    split(tmp_path / "both", tmp_path / "part{}", lambda pair: cut_evenly(pair, 2, "documents"))
    assert len(IndexedDataset("part0")) == 60
    Path("text.txt").write_text("a\nb\n")
    assert tokenize(tmp_path / "t", tmp_path / "text.txt", tokenizer="bytes").documents == 2
    with pytest.raises(MissingFile):
        open_tntidx(tmp_path / "none", "megatron")
    np.zeros(4, np.uint16).tofile("raw")
    assert open_numpy(tmp_path / "raw", stored_dtype="uint16", separator=0).tokens.size == 4
    recipe = Recipe(
        sequence_length=16,
        batch=BatchSchedule.constant(4),
        sources=(RecipeSource(name="web", path=tmp_path / "web"),),  # type: ignore[arg-type]
        stages=(RecipeStage(name="all", streams=(Stream(source="web"),)),),
    )
    assert open_recipe(recipe).layout.num_samples


def test_a_target_is_of_a_known_kind() -> None:
    with pytest.raises(InvalidArgument, match="kind must be one of"):
        Target(kind="steps", value=Fraction(9))  # type: ignore[arg-type]


@pytest.mark.parametrize("consumed", [0, 4, 6, 7])
def test_steps_go_on_from_any_sample(consumed: int) -> None:
    index = build_index("web", sequence_length=16, epochs=2)
    begun = -(-consumed // 4)
    run = run_of_index(index, global_batch_size=4, consumed_samples=consumed)
    assert run.past_steps == begun
    assert run.num_steps == begun + (index.num_samples - consumed) // 4
    assert set(np.diff(run.step_bounds[begun:]).tolist()) == {4}
    run = run_of_index(index, global_batch_size=4, consumed_samples=consumed, num_steps=5)
    assert (run.num_steps, run.num_samples) == (5, consumed + 4 * (5 - begun))


def test_numbers_of_documents_are_integers() -> None:
    run = open_run("web", **RUN).run
    assert len(runs_of(run, [3]).sample) == len(runs_of(run, np.array([3, 3])).sample)
    for documents in ([1.9], "1", [-1]):
        with pytest.raises(InvalidArgument, match="documents must be|documents\\[0\\]"):
            runs_of(run, documents)  # type: ignore[arg-type]


def test_a_check_of_steps_has_steps() -> None:
    make_lock(data_path=["web"], **RUN).write("run.lock")
    for steps in (range(3, 3), range(0, 4, 2)):
        with pytest.raises(OutOfRange, match="step must be steps one after another"):
            verify_lock("run.lock", step=steps)
    assert verify_lock("run.lock", step=range(3, 4)).is_clean


def test_relative_paths_survive_another_directory(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from megaindex.loader import Loader, MicroBatchSampler, NumpyDataset

    index = build_index("web", sequence_length=16)
    pair, rows = IndexedDataset("web"), NumpyDataset(index)
    expected, texts = pair[5].tolist(), rows[3]["tokens"].tolist()
    stored = pickle.dumps((pair, rows))
    (tmp_path / "away").mkdir()
    os.chdir(tmp_path / "away")
    other, others = pickle.loads(stored)
    assert other[5].tolist() == expected
    assert others[3]["tokens"].tolist() == texts
    for reader in ("mapped", "positional", "auto"):
        sampler = MicroBatchSampler(
            num_samples=index.num_samples, micro_batch_size=4, data_parallel_rank=0,
            data_parallel_size=1,
        )  # fmt: skip
        batch = next(iter(Loader(index, sampler, reader=reader)))
        assert batch["tokens"][3].tolist() == texts
    with pytest.raises(OutOfRange, match="sample must be from 0 to"):
        rows[-1]
    with pytest.raises(InvalidArgument, match="device='nonsense': [^;]+; use a device of this"):
        Loader(index, sampler, device="nonsense")
