"""Length, text, HTML and datasets of every kind of index."""

from __future__ import annotations

import copy
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex.index.orders.epoch import EpochIndex
from megaindex.recipe import open_recipe, read_recipe

LENGTHS = np.random.default_rng(3).integers(1, 300, 500)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("index_text")
    for name in ("web", "<b>code"):
        write_corpus(root / name, LENGTHS)
    (root / "lengths.yaml").write_text(
        "{sequence_length: 16, batch: {global_batch_size: 8}, sources: {web: {path: web}, code:"
        " {path: '<b>code'}}, stages: {short: {steps: 60, mix: {web: 1, code: 1}},"
        " long: {steps: 9, sequence_length: 32, mix: {code: 1}}}}"
    )
    (root / "run.yaml").write_text(
        "{sequence_length: 16, batch: {global_batch_size: 8}, sources: {web: {path: web},"
        " code: {path: '<b>code'}, chat: {path: web, kind: finetuning}},"
        " stages: {main: {steps: 60, mix: {web: 1, code: 1, chat: 1}}}}"
    )
    return root


def one(**settings: Any) -> Callable[[Path], Any]:
    return lambda root: megaindex.build_index(root / "web", sequence_length=16, **settings)


def both(root: Path, **settings: Any) -> Any:
    corpora = [root / "web", root / "<b>code"]
    return megaindex.build_blend(corpora, num_samples=900, sequence_length=16, **settings)


def cached_blend(root: Path) -> Any:
    both(root, weights=[1, 2], cache_dir=root / "cache")
    return both(root, weights=[1, 2], cache_dir=root / "cache")


KINDS: dict[str, Callable[[Path], Any]] = {
    "megatron": one(),
    "cached": lambda root: one(cache_dir=root / "cache")(root),
    "epoch": one(order="epoch"),
    "window": one(order="window"),
    "packing": one(order=megaindex.NeoxDocumentsOrder(pack_impl="unpacked"), num_samples=50),
    "blend": lambda root: both(root, weights=[1, 2]),
    "cached blend": cached_blend,
    "blend of epochs": lambda root: both(root, order="epoch"),
    "source of a cached blend": lambda root: cached_blend(root).indices[1],
    "extended": lambda root: megaindex.extend_run(
        root / "web", sequence_length=16, epochs=1, more_samples=9
    ).index,
    "extended blend": lambda root: megaindex.extend_run(
        [root / "web", root / "<b>code"], sequence_length=16, num_samples=300, weights=[1, 1],
        more_samples=9,
    ).index,
    "recipe": lambda root: open_recipe(read_recipe(root / "run.yaml")).index,
    "bins": lambda root: open_recipe(read_recipe(root / "run.yaml")).index.sources[2],
}  # fmt: skip


@for_each("kind", KINDS)
def test_an_index_is_one_line_and_holds_its_datasets(kind: str, root: Path) -> None:
    index = KINDS[kind](root)
    assert len(index) == index.num_samples > 0
    text = repr(index)
    assert "\n" not in text
    assert len(text) < 200 + 3 * len(str(root))
    assert f"{index.num_samples:,} samples of 16 tokens" in text
    names = [Path(dataset.path_prefix).name for dataset in index.datasets]
    assert names
    assert all(name in text for name in names)
    again = pickle.loads(pickle.dumps(index))
    assert [dataset.path_prefix for dataset in again.datasets] == [
        dataset.path_prefix for dataset in index.datasets
    ]
    assert repr(again) == text
    spans = zip(index.locate([0, len(index) - 1]), again.locate([0, len(index) - 1]), strict=True)
    assert all(np.array_equal(a, b) for a, b in spans)


def test_the_text_of_a_cached_blend_opens_none_of_its_sources(root: Path) -> None:
    index = cached_blend(root)
    assert all("code" in text for text in (repr(index), repr(index.indices[1])))
    assert "code" in index._repr_html_()
    assert not any(dataset.is_open for dataset in index.datasets)


@pytest.mark.parametrize("kind", ["blend", "recipe"])
def test_a_notebook_shows_the_sources_as_a_table(kind: str, root: Path) -> None:
    index = KINDS[kind](root)
    page = index._repr_html_()
    assert page.count("<tr>") == 1 + len(index.datasets)
    assert "<b>" not in page
    assert "&lt;b&gt;code</td>" in page


def test_stages_of_two_lengths_are_a_row_each(root: Path) -> None:
    index = open_recipe(read_recipe(root / "lengths.yaml")).index
    assert index.tokens_per_epoch == 2 * LENGTHS.sum()
    assert f"{480 + 72:,} samples of 32 tokens, 1 epoch of {2 * LENGTHS.sum():,}" in repr(index)
    page = index._repr_html_()
    rows = [re.findall("<td[^>]*>([^<]*)</td>", row) for row in page.split("<tr>")[2:]]
    assert rows == [
        [f"samples of {length} tokens", f"{count}", "1", f"{2 * LENGTHS.sum():,}"]
        for length, count in ((16, 480), (32, 72))
    ]


def test_indices_without_files_have_no_datasets() -> None:
    lengths = np.array([40, 40], np.int32)
    index = EpochIndex(
        sequence_lengths=lengths, documents=range(2), tokens_per_epoch=80, sequence_length=8,
        seed=1, source_name="a",
    )  # fmt: skip
    assert index.datasets == ()
    assert repr(index) == "EpochIndex(order epoch, 9 samples of 8 tokens, 1 epoch of 80 tokens)"


@pytest.mark.parametrize("kind", ["epoch", "window", "bins"])
def test_hasattr_answers_for_arrays_that_an_order_lacks(kind: str, root: Path) -> None:
    index = KINDS[kind](root)
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert not hasattr(index, name)
        with pytest.raises(megaindex.InvalidArgument, match=f"no {name}"):
            getattr(index, name)
    assert hasattr(KINDS["megatron"](root), "document_index")


@pytest.mark.parametrize("order", ["megatron", "neox", "epoch"])
def test_a_copy_of_an_index_needs_no_file(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "c", [30, 40, 50])
    monkeypatch.chdir(tmp_path)
    index = megaindex.build_index("c", sequence_length=8, epochs=2, order=order)
    expected = index.locate([0, 3, 5])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    copies = [pickle.loads(pickle.dumps(index)), copy.deepcopy(index)]
    assert [c.datasets[0].sequence_lengths.tolist() for c in copies] == [[30, 40, 50]] * 2
    os.utime(tmp_path / "c.bin")
    copies += [pickle.loads(pickle.dumps(index)), copy.deepcopy(index)]
    (tmp_path / "c.bin").unlink()
    copies += [pickle.loads(pickle.dumps(index)), copy.deepcopy(index)]
    for one in copies:
        for ours, theirs in zip(one.locate([0, 3, 5]), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(megaindex.StorageError):
        copies[2].datasets[0].sequence_lengths  # noqa: B018
