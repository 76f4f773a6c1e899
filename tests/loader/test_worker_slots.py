"""Batches of DataLoader workers in shared memory that is used again."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.corpora import write_corpus
from torch.utils.data import DataLoader

import megaindex
from megaindex.loader import GPTDataset, torch_dataset
from megaindex.loader.batch import SampleOptions

ROWS = 4


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> GPTDataset:
    lengths = np.random.default_rng(2).integers(1, 60, 400)
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "c", lengths, np.uint16)
    index = megaindex.build_index(corpus, sequence_length=16, seed=4)
    return GPTDataset(index, corpus, options=SampleOptions(create_attention_mask=True))


def batches_of(dataset: GPTDataset, count: int) -> list[list[int]]:
    return np.arange(count * ROWS).reshape(-1, ROWS).tolist()


def expected(dataset: GPTDataset, batches: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    return [
        {
            name: torch.stack([sample[name] for sample in samples])
            for name in ("tokens", "labels", "attention_mask", "loss_mask", "position_ids")
        }
        for samples in (list(dataset.__getitems__(ids)) for ids in batches)
    ]


def load(dataset: GPTDataset, batches: list[list[int]], **settings: Any) -> Iterator[Any]:
    return iter(
        DataLoader(dataset, batch_sampler=batches, num_workers=2, timeout=60, **settings)  # type: ignore[arg-type]
    )


def assert_equal(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert type(ours) is dict
    assert list(ours) == list(plain)
    for name, value in plain.items():
        assert ours[name].dtype == value.dtype
        assert torch.equal(ours[name], value), name


def test_few_slots_serve_many_batches_and_changes_in_place_stay_in_their_batch(
    dataset: GPTDataset,
) -> None:
    batches = batches_of(dataset, 60)
    for plain, ours in zip(expected(dataset, batches), load(dataset, batches), strict=True):
        assert_equal(ours, plain)
        for tensor in ours.values():  # this batch is the trainer's
            tensor.zero_()
    assert 0 < len(torch_dataset._slots) < 20


@pytest.mark.slow
def test_referenced_batches_are_not_overwritten(dataset: GPTDataset) -> None:
    """Whatever is kept of each: all of it, a field, a view of one, or an array over one."""
    batches = batches_of(dataset, 80)  # more than there are slots
    held: list[Any] = []
    for number, batch in enumerate(load(dataset, batches)):
        tokens = batch["tokens"]
        held.append((batch, tokens, tokens[1:], tokens.numpy())[number % 4])
        del batch, tokens
    gc.collect()
    for number, plain in enumerate(expected(dataset, batches)):
        if number % 4 == 0:
            assert_equal(held[number], plain)
        else:
            first = 1 if number % 4 == 2 else 0
            np.testing.assert_array_equal(held[number], plain["tokens"][first:].numpy())


def test_what_is_sent_in_no_slot_is_not_overwritten(dataset: GPTDataset) -> None:
    """The receiver keeps 16 batches, as many as there are slots, and all after them."""
    pool = torch_dataset.SlotPool(dataset._maker, ROWS)
    kept: list[Any] = []
    for number in range(20):
        buffers = pool.take()
        assert all(buffers is not other for other in kept)
        assert isinstance(buffers, torch_dataset.SharedBuffers)
        assert buffers.is_slot == (number < 16)
        if buffers.is_slot:
            buffers.send("tokens")
        pool.watch(buffers)
        kept.append(buffers)


def test_a_batch_is_copied_to_a_slot_of_its_shapes_that_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_dataset, "_fields", {})
    sender = torch_dataset.SlotSender()
    batch = {"is_first": np.eye(2, 3) > 0, "text": np.arange(6).reshape(2, 3)}
    kept: list[Any] = [sender.tensors({**batch, "text": batch["text"] + k}) for k in range(20)]
    for k, tensors in enumerate(kept):
        assert tensors["is_first"].tolist() == batch["is_first"].tolist()
        assert tensors["text"].tolist() == (batch["text"] + k).tolist()
    assert len(sender._slots) == 16
    memory = kept[5]["text"].data_ptr()
    kept[5] = tensors = None
    torch_dataset._fields.clear()
    other = sender.tensors({"text": np.full((3, 1), 9)})
    assert other["text"].tolist() == [[9], [9], [9]]
    assert sender.tensors(batch)["text"].data_ptr() == memory


def test_a_forked_child_does_not_free_slots(dataset: GPTDataset) -> None:
    batches = batches_of(dataset, 60)
    plain = expected(dataset, batches)
    loader = load(dataset, batches)
    first = next(loader)
    child = multiprocessing.get_context("fork").Process(target=first.clear)
    child.start()
    child.join()
    assert child.exitcode == 0
    rest = [{name: tensor.clone() for name, tensor in batch.items()} for batch in loader]
    for ours, theirs in zip([first, *rest], plain, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.slow
def test_slots_of_workers_that_ended_are_unmapped(dataset: GPTDataset) -> None:
    batches = batches_of(dataset, 8)
    for _ in range(3):
        for _ in load(dataset, batches):
            pass
    processes = {key[0] for key, _ in torch_dataset._slots}
    assert len(processes) <= 4  # those of the last loader, and who ended while it began


def replace_field(samples: Any) -> Any:
    batch = torch.utils.data.default_collate(samples)
    batch["tokens"] = batch["tokens"] + 1
    batch["more"] = batch["labels"][:, :2]
    return batch


def test_a_collate_function_may_change_the_batch(dataset: GPTDataset) -> None:
    batches = batches_of(dataset, 20)
    for plain, ours in zip(
        expected(dataset, batches), load(dataset, batches, collate_fn=replace_field), strict=True
    ):
        changed = {**plain, "tokens": plain["tokens"] + 1, "more": plain["labels"][:, :2]}
        assert_equal(ours, changed)


def first_of(samples: Any) -> Any:
    return samples


def test_samples_may_be_sent_one_by_one(dataset: GPTDataset, tmp_path: Path) -> None:
    batches = batches_of(dataset, 20)
    for plain, ours in zip(
        expected(dataset, batches), load(dataset, batches, collate_fn=first_of), strict=True
    ):
        for k, sample in enumerate(ours):
            assert_equal(sample, {name: field[k] for name, field in plain.items()})


def test_loaders_without_workers_and_persistent_ones_agree(dataset: GPTDataset) -> None:
    batches = batches_of(dataset, 12)
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=2,
        persistent_workers=True,
        timeout=60,  # type: ignore[arg-type]
    )
    for _ in range(3):  # the same workers, the same slots
        for plain, ours in zip(expected(dataset, batches), loader, strict=True):
            assert_equal(ours, plain)
    iterator = iter(loader)
    next(iterator)  # given up with batches on their way
    for plain, ours in zip(expected(dataset, batches), loader, strict=True):
        assert_equal(ours, plain)
