"""Batches of order packed: labels, masks and document bounds of whole documents."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.corpora import write_corpus

import megaindex
from megaindex import PackedOrder, extend_run
from megaindex.builders.recipe import open_recipe
from megaindex.index.orders import packed
from megaindex.index.spans import locate_range
from megaindex.loader import GPTDataset, Loader, MicroBatchSampler, SampleOptions
from megaindex.loader.batch import BatchMaker
from megaindex.loader.targets import SourceTargets, Targets
from megaindex.loader.token_readers import MappedTokens
from megaindex.recipe import read_recipe

EOD = 7
LENGTHS = np.random.default_rng(2).integers(1, 40, 300)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("packed") / "web"
    write_corpus(path, LENGTHS, eod=EOD)
    return megaindex.build_index(str(path), sequence_length=24, order="packed", epochs=2)


def expected_row(index: Any, sample: int) -> dict[str, np.ndarray]:
    """Return the row of a sample, made token by token from its spans."""
    length, dataset = index.sequence_length, index.datasets[0]
    row = {
        "tokens": np.zeros(length, np.int64), "labels": np.zeros(length, np.int64),
        "loss_mask": np.zeros(length, np.float32), "position_ids": np.zeros(length, np.int64),
    }  # fmt: skip
    at, starts = 0, []
    _, documents, offsets, lengths = index.locate([sample])
    for d, o, n in zip(documents.tolist(), offsets.tolist(), lengths.tolist(), strict=True):
        text = dataset.get(d, offset=o, length=n)
        starts.append(at)
        for i in range(min(n, length - at)):
            row["tokens"][at + i] = text[i]
            row["position_ids"][at + i] = i
            if i + 1 < n:  # the last token of a document has no label
                row["labels"][at + i] = text[i + 1]
                row["loss_mask"][at + i] = 1
        at = min(length, at + n)
    for i in range(at, length):  # padding goes on with the last document, as in Megatron-LM
        row["position_ids"][i] = i - starts[-1]
    row["cu_seqlens"] = np.array(starts + [length] * (length + 1 - len(starts)), np.int32)
    row["max_seqlen"] = np.diff(row["cu_seqlens"]).max()
    return row


OPTIONS = SampleOptions(cu_seqlens=True, boundaries="documents")


@pytest.mark.slow
def test_every_row_is_made_of_whole_documents(index: Any) -> None:
    dataset = GPTDataset(index, options=OPTIONS)
    for sample in range(index.num_samples):
        found = dataset[sample]
        for name, expected in expected_row(index, sample).items():
            np.testing.assert_array_equal(found[name], expected, err_msg=f"{sample} {name}")


def test_every_token_but_the_first_is_a_target_once(index: Any) -> None:
    sampler = MicroBatchSampler(
        num_samples=index.num_samples // 2,
        micro_batch_size=4,
        data_parallel_rank=0,
        data_parallel_size=1,
    )
    loader = Loader(index, sampler, options=OPTIONS)
    targets = sum(int(batch["loss_mask"].sum()) for batch in loader)
    read = (index.num_samples // 2) // 4 * 4
    spans = index.locate(np.arange(read))
    assert targets == int((spans.length - 1).sum())
    epoch = index.locate(np.arange(index.num_samples // 2))
    assert (epoch.length - 1).sum() == (LENGTHS - 1).sum()


def test_masks_are_those_of_megatron(index: Any) -> None:
    """Attention masks and positions of megatron-core 0.16.1, which finds documents by their end."""
    utils = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    options = SampleOptions(
        eod_id=EOD, reset_position_ids=True, reset_attention_mask=True, create_attention_mask=True,
        boundaries="documents",
    )  # fmt: skip
    ours, starts = GPTDataset(index, options=options), GPTDataset(index, options=OPTIONS)
    compared = 0
    for sample in range(0, index.num_samples, 3):
        spans = index.locate([sample])
        held = int(spans.input_lengths(24).sum())
        row = ours[sample]
        mask, _, positions = utils._get_ltor_masks_and_position_ids(
            row["tokens"], EOD, True, True, False, True
        )
        assert torch.equal(row["attention_mask"][0, :held, :held], mask[0, :held, :held])
        assert torch.equal(row["position_ids"][:held], positions[:held])
        bounds = np.unique(starts[sample]["cu_seqlens"])
        for first, stop in itertools.pairwise(bounds):
            block = row["attention_mask"][0, first:stop]
            assert not block[:, first:stop].tril().any(), "attention within a document"
            assert block[:, :first].all(), "no attention to the documents before"
        compared += 1
    assert compared > 50


@pytest.mark.slow
def test_a_blend_masks_the_sources_of_order_packed(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        write_corpus(Path(path), LENGTHS, eod=EOD)
    settings: dict[str, Any] = {"order": PackedOrder(max_documents=4), "sequence_length": 24,
                                "cache_dir": tmp_path / "cache"}  # fmt: skip
    for _ in range(2):  # the second opens its sources from the snapshot
        blend = megaindex.build_blend(paths, num_samples=200, weights=[1, 3], **settings)
        dataset = GPTDataset(blend, options=OPTIONS)
        spans = blend.locate(np.arange(200))
        targets = sum(float(dataset[i]["loss_mask"].sum()) for i in range(200))
        assert targets == (spans.length - 1).sum()


def test_an_extension_by_epochs_counts_samples(index: Any) -> None:
    run = extend_run(index.datasets[0], sequence_length=24, order="packed", epochs=2, more_epochs=1)
    assert run.num_samples == index.num_samples // 2 * 3


@pytest.mark.parametrize("order", [PackedOrder(max_documents=3), "epoch", "window"])
def test_further_epochs_are_those_of_another_seed(
    index: Any, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lengths are sorted once, since what is stored does not depend on the seed."""
    built = Mock(wraps=packed.build)
    monkeypatch.setattr(packed, "build", built)
    common: dict[str, Any] = {"sequence_length": 24, "order": order, "split": "8,1,1"}
    run = extend_run(index.datasets[0], epochs=2, more_epochs=3, **common)
    assert built.call_count == isinstance(order, PackedOrder)
    (_, *epochs), seeds = run.index.stretches, run.index.further_seeds
    assert len(epochs) == len(set(seeds)) >= 3
    for epoch, seed in zip(epochs, seeds, strict=True):
        expected = megaindex.build_index(index.datasets[0], seed=seed, epochs=1, **common)
        assert epoch.index.num_samples == expected.num_samples
        for ours, theirs in zip(
            locate_range(epoch.index, 0, len(expected)), locate_range(expected, 0, len(expected)),
            strict=True,
        ):  # fmt: skip
            np.testing.assert_array_equal(ours, theirs)


def test_extended_and_staged_runs_mask_the_ends_of_documents(index: Any, tmp_path: Path) -> None:
    path = index.datasets[0].path_prefix
    extended = extend_run(
        path, sequence_length=24, order="packed", num_samples=index.num_samples,
        consumed_samples=index.num_samples // 4, more_samples=60,
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(
        f"sequence_length: 24\nbatch: {{global_batch_size: 4}}\nsources:\n  web: {{path: {path}, "
        "order: packed}\nstages:\n  one: {epochs: 1, mix: {web: 1}}\n"
    )
    staged = open_recipe(read_recipe(tmp_path / "run.yaml")).index
    for whole in (getattr(extended, "index", extended), staged):
        dataset = GPTDataset(whole, options=OPTIONS)
        for sample in range(0, whole.num_samples, 7):
            spans = whole.locate([sample])
            assert dataset[sample]["loss_mask"].sum() == (spans.length - 1).sum()


def test_padding_and_masked_ends_keep_no_loss(index: Any) -> None:
    """The end token as padding id, as many tokenizers have it, and eod_mask_loss."""
    for change in ({"pad_id": EOD}, {"eod_id": EOD, "eod_mask_loss": True}):
        dataset = GPTDataset(index, options=SampleOptions(**change))
        for sample in range(0, index.num_samples, 5):
            row, expected = dataset[sample], expected_row(index, sample)
            wrong = expected["labels"] if "pad_id" in change else expected["tokens"]
            loss = expected["loss_mask"] * (wrong != EOD)
            np.testing.assert_array_equal(row["loss_mask"], loss)


def test_targets_of_some_sources_leave_the_ends_masked(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        write_corpus(Path(path), LENGTHS, eod=EOD)
    blend = megaindex.build_blend(
        paths, num_samples=100, weights=[1, 1], order="packed", sequence_length=24
    )
    targets = Targets([None, SourceTargets(kind="all")])
    maker = BatchMaker(blend, MappedTokens(blend.datasets), targets=targets)
    buffers = maker.allocate(100)
    spans = maker.fill(buffers, list(range(100)))
    assert buffers.arrays["loss_mask"].sum() == (spans.length - 1).sum()


@pytest.mark.slow
def test_an_extension_serves_the_least_seen_tokens_first(index: Any) -> None:
    served = index.num_samples // 2 + 20
    run = extend_run(
        index.datasets[0], sequence_length=24, order="packed", epochs=2,
        consumed_samples=served, more_samples=30,
    )  # fmt: skip
    seen = np.zeros((LENGTHS.size, LENGTHS.max()), np.int64)

    def cells(sample: int) -> list[tuple[int, slice]]:
        spans = index.locate([sample])
        rows = zip(spans.document, spans.offset, spans.input_lengths(24), strict=True)
        return [(int(d), slice(int(o), int(o + n))) for d, o, n in rows]

    def add(sample: int) -> None:
        for document, part in cells(sample):
            seen[document, part] += 1

    for sample in range(served):
        add(sample)
    left = list(range(served, index.num_samples))
    following = run.index.stretches[0].index.stretches[1].samples[:30].tolist()
    for sample in following:
        best = min(left, key=lambda k: (sum(int(seen[d, p].sum()) for d, p in cells(k)), k))
        assert sample == best
        left.remove(sample)
        add(sample)
