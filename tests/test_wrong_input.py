"""Wrong input of kinds that once got through."""

from __future__ import annotations

import importlib
import pickle
from collections import UserList, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex import (
    IndexedDataset,
    IndexedDatasetWriter,
    Skip,
    corpus,
    helpers,
    keys,
    loader,
    lock,
    recipe,
)
from megaindex.cli import main
from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.kernels import backend, load


@for_each("name", ["native", "numba", "reference"])
@for_each(
    "outputs",
    [
        (np.zeros((5, 2), np.int16), np.zeros(10, np.int64)),
        (np.zeros(10, np.int16), np.zeros((10, 1), np.int64)),
        (np.frombuffer(bytes(20), np.int16), np.zeros(10, np.int64)),
    ],
)
def test_no_backend_writes_where_it_must_not(
    name: str, outputs: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "active", lambda: load(name))
    with pytest.raises(InvalidArgument, match="one-dimensional and writeable"):
        helpers.build_blending_indices(*outputs, [0.5, 0.5], 2, 10, False)
    with pytest.raises(InvalidArgument, match="must have one dimension"):
        helpers.build_blending_indices(
            np.zeros(4, np.int16), np.zeros(4, np.int64), [[0.5, 0.5]], 2, 4, False
        )
    with pytest.raises(InvalidArgument, match="sizes must be integers"):
        helpers.build_sample_idx(np.ones((2, 2), np.int32), [0], 1, 1, 1)


def test_the_binding_takes_arrays_only() -> None:
    native = load("native")
    with pytest.raises(InvalidArgument, match="expected a numpy array or None"):
        native.blend_greedy(np.ones(2), 0, 2, np.zeros(2, np.int64), [0, 0], None)  # type: ignore[arg-type]


@for_each(
    ("arguments", "message"),
    [
        ({"sequence_length": 1.5, "order": "epoch"}, "sequence_length must be an integer"),
        ({"sequence_length": "16"}, "sequence_length must be an integer"),
        ({"seed": 1.0}, "seed must be an integer"),
        ({"num_samples": 1.5}, "num_samples must be an integer"),
        ({"subset": "dev"}, "subset must be one of"),
        ({"num_samples": 10**19}, r"num_samples must be at least 1 and below 2\*\*63"),
        ({"num_samples": 9 * 10**18}, r"at most 2\*\*63 - 1"),
        ({"epochs": "1e99999999"}, "epochs must be a positive number"),
        ({"cache_dir": ""}, "cache_dir must be a directory"),
        ({"order": ["megatron"]}, r"order must be one of"),
    ],
)
def test_arguments_of_wrong_kinds_are_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    corpus = write_corpus(tmp_path / "c", [90, 40])
    with pytest.raises(InvalidArgument, match=message):
        megaindex.build_index(corpus, **{"sequence_length": 16, "seed": 1, **arguments})


def test_a_path_is_read_with_the_frameworks_dtype_codes(tmp_path: Path) -> None:
    with megaindex.IndexedDatasetWriter(str(tmp_path / "c"), np.float32, dialect="neox") as writer:
        writer.add_document(np.arange(100, dtype=np.float32))
    index = megaindex.build_index(str(tmp_path / "c"), sequence_length=16, seed=1, order="neox")
    assert index.num_samples == 6


def test_processes_that_share_a_damaged_entry_get_it_rebuilt(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", np.full(200, 37))
    expected = megaindex.build_index(corpus, sequence_length=16, seed=1).sample_index
    settings = {"sequence_length": 16, "seed": 1, "cache_dir": tmp_path / "cache"}
    megaindex.build_index(corpus, **settings)
    with ThreadPoolExecutor(6) as pool:
        for _ in range(10):
            (manifest,) = (tmp_path / "cache").glob("*/manifest.json")
            manifest.write_text("{}")
            futures = [pool.submit(megaindex.build_index, corpus, **settings) for _ in range(6)]
            for future in futures:
                np.testing.assert_array_equal(future.result().sample_index, expected)


def test_the_demo_refuses_a_folder_of_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/mine").write_text("keep")
    for arguments, reason in (
        (["--dir", str(tmp_path)], "must be new, empty or written by an earlier demo"),
        (["--dir", str(tmp_path / "cache/mine")], "cannot use it for the demo"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["--root", "/no/such/folder"], "must be a folder"),
    ):
        assert main(["demo", *arguments]) == 2
        captured = capsys.readouterr()
        assert reason in captured.err
        assert captured.err.count("\n") == 1
    assert (tmp_path / "cache/mine").read_text() == "keep"


def test_a_backend_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError("no compiled core")

    monkeypatch.setenv("MEGAINDEX_BACKEND", "native")
    monkeypatch.setattr("megaindex.kernels.load", missing)
    with pytest.raises(InvalidArgument, match="MEGAINDEX_BACKEND=native cannot be used"):
        backend.__wrapped__()


@pytest.mark.parametrize("weights", [{"a": 2.0, "b": 1.0}, {2.0, 1.0}, "21"])
def test_weights_without_an_order_are_refused(tmp_path: Path, weights: Any) -> None:
    corpora = [write_corpus(tmp_path / name, [90, 40]) for name in "ab"]
    with pytest.raises(InvalidArgument, match="weights must be a list"):
        megaindex.build_blend(corpora, weights=weights, num_samples=4, sequence_length=16, seed=1)


@for_each("name", ["native", "numba", "reference"])
@for_each("bits", ["", "_int32", "_int64"])
def test_documents_without_any_lengths(
    name: str, bits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "active", lambda: load(name))
    build = getattr(helpers, f"build_sample_idx{bits}")
    for sizes in ([], np.zeros(0, np.int32)):
        with pytest.raises(InvalidArgument, match="names a sequence that has no length"):
            build(sizes, np.zeros(1, np.int32), 4, 1, 0)


def test_long_messages_are_cut_in_the_middle() -> None:
    with pytest.raises(InvalidArgument) as info:
        helpers.build_blending_indices(
            np.zeros(1, np.int16), np.zeros(1, np.int64), [-1.0] * 50_000, 50_000, 1
        )
    assert len(str(info.value)) < 5000
    error = StorageError("begin " + "x" * 300_000 + " end")
    assert str(error).startswith("begin x")
    assert str(error).endswith("x end")
    assert "[296010 characters left out]" in str(error)
    begin, end = str(error).split(" … [296010 characters left out] … ")
    assert (len(begin), len(end)) == (3000, 1000)
    assert pickle.loads(pickle.dumps(error)).args == error.args


@pytest.mark.slow_cases("build-more0", "verify-more1")
@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("build", ["--seq-length", "8", "--cache-dir", "cache", "--workers", "1"]),
        ("verify", ["--workers", "1"]),
        ("inspect", []),
        ("merge", ["--overwrite"]),
    ],
)
def test_weights_are_refused_where_prefixes_are_taken(
    verb: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    flag = {"build": ["--data-path"], "merge": ["out"]}.get(verb, [])
    for name in ("a", "b"):
        write_corpus(tmp_path / name, [9, 9])
    assert main([verb, *flag, "0.5", "a", "0.5", "b", *more]) == 2
    told = capsys.readouterr().err
    assert f"0.5 a: megaindex {verb} takes prefixes without weights" in told
    assert told.endswith("give a b\n")
    for name in ("0.5", "1"):  # names of datasets
        write_corpus(tmp_path / name, [9, 9])
    assert main([verb, *flag, "0.5", "a", "1", "b", *more]) == 0


def test_directories_are_named_for_writes_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--seq-length", "8", "--cache-dir", str(tmp_path)]
    assert main(["build", "--data-paths-file", str(tmp_path / "no"), *words]) == 2
    assert capsys.readouterr().err.endswith("does not exist; check the path\n")
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(MissingFile) as missing:
        IndexedDataset(str(tmp_path / "a"))
    assert "not created" not in str(missing.value)
    with (
        pytest.raises(MissingFile, match="missing directories are not created"),
        IndexedDatasetWriter(str(tmp_path / "no/a"), "uint16"),
    ):
        pass


@for_each(
    "take",
    [
        lambda _: lock.read_lock(None),  # type: ignore[arg-type]
        lambda _: lock.verify_lock(lock),
        lambda _: lock.report_run(3),
        lambda _: recipe.read_recipe(None),  # type: ignore[arg-type]
        lambda _: IndexedDataset(None),  # type: ignore[arg-type]
        lambda _: IndexedDataset(b"c"),  # type: ignore[arg-type]
        lambda _: corpus.verify(3),
        lambda _: corpus.inspect([]),
        lambda _: megaindex.build_index(lock, sequence_length=16),
        lambda c: megaindex.build_index(c, sequence_length=16, split=(969, 30, 1)),
        lambda c: megaindex.build_blend([c], weights=1, num_samples=4, sequence_length=16),
        lambda _: corpus.corpus_fingerprint("c"),
        lambda _: corpus.content_fingerprint(Path("c")),
        lambda _: recipe.RecipeEvaluation(source="web"),
        lambda _: loader.MicroBatchSampler(num_samples=9, micro_batch_size="4",
                                           data_parallel_rank=0, data_parallel_size=1),
        lambda _: loader.MicroBatchSampler(num_samples=9, micro_batch_size=[4],
                                           data_parallel_rank=0, data_parallel_size=1),
        lambda c: megaindex.open_run(c, sequence_length=16, global_batch_size=1, train_iters=2)
        .loader(options={"eod_id": 0}),
        lambda _: Skip(documents=[1], from_step=True),
        lambda _: keys.content([1, 2, 3], [0, 1]),
        lambda _: keys.content([1, 2, 3], [0, 0, 0], [1, 2]),
        lambda _: keys.content(importlib.import_module("torch").tensor([1, 2]), [0, 1, 2]),
        lambda _: loader.MicroBatchSampler(num_samples=9, micro_batch_size=[("0", 1)],
                                           data_parallel_rank=0, data_parallel_size=1),
        lambda c: IndexedDataset(c)[1:3.0],
        lambda c: IndexedDataset(c)["a":],
        lambda c: IndexedDatasetWriter(f"{c}2", dtype=None),
    ],
)  # fmt: skip
def test_values_of_other_types_are_refused(take: Callable[[str], object], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    prefix = str(tmp_path / "c")
    write_corpus(tmp_path / "c", [90, 40])
    with pytest.raises(InvalidArgument, match="must|needs|no code"):
        take(prefix)


def test_lists_of_micro_batches_are_sequences_of_pairs() -> None:
    def batches(given: Any) -> list[Any]:
        return list(loader.MicroBatchSampler(num_samples=9, micro_batch_size=given,
                                             global_batch_size=2, data_parallel_rank=0,
                                             data_parallel_size=1))  # fmt: skip

    pytest.importorskip("torch")
    expected = batches([(0, 1), (4, 2)])
    for given in (UserList([(0, 1), (4, 2)]), deque([[0, 1], [4, 2]]),
                  ((0, 1), np.array([4, 2]))):  # fmt: skip
        assert batches(given) == expected
    for wrong in ([4], [(0, 1, 2)], [(0,)], "41", [None]):
        with pytest.raises(InvalidArgument, match="micro_batch_size must be"):
            batches(wrong)


@for_each(
    "take",
    [
        recipe.open_recipe,
        recipe.plan_recipe,
        lambda given: recipe.scale_recipe(given, "1/2"),
        lambda given: recipe.write_recipe(given, "out.yaml"),
    ],
)
def test_a_path_in_place_of_a_recipe_is_refused(take: Callable[[Any], object]) -> None:
    with pytest.raises(InvalidArgument, match=r"must be a Recipe.* read a file with read_recipe"):
        take("run.yaml")
