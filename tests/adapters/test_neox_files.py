"""GPT-NeoX's sampler and indexed datasets, over megaindex's reading."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import neox_stand_in
from support.neox_running import SIZES, arguments, batches, loaders_of, texts

import megaindex.adapters.neox as adapter
from megaindex.adapters.neox.framework import LegacyDataset
from megaindex.errors import FormatError, OutOfRange


def test_the_sampler_serves_what_it_served_before(neox: Any) -> None:
    rng = np.random.default_rng(1)
    for _ in range(25):
        world = int(rng.integers(1, 4))
        settings = {
            "batch_size": world * int(rng.integers(1, 5)), "rank": int(rng.integers(0, world)),
            "drop_last": bool(rng.random() < 0.7), "world_size": world,
            "interleave": bool(rng.random() < 0.3),
        }  # fmt: skip
        source, start = range(int(rng.integers(1, 50))), int(rng.integers(0, 6))
        passes = []
        for install in (adapter.uninstall, adapter.install):
            install()
            sampler = neox_stand_in.DistributedBatchSampler(
                torch.utils.data.SequentialSampler(source), **settings
            )
            sampler.start_iter = start
            passes.append([list(sampler), list(sampler)])
        assert passes[0] == passes[1]


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_sampler_that_keeps_its_last_batch_is_left_to_gpt_neox(
    neox: Any, caplog: pytest.LogCaptureFixture, drop_last: bool
) -> None:
    caplog.set_level(logging.INFO, "megaindex")
    adapter.install()
    sequence = torch.utils.data.SequentialSampler(range(9))
    sampler = neox_stand_in.DistributedBatchSampler(sequence, 4, drop_last, rank=0, world_size=1)
    assert list(sampler)[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ("or it wraps or keeps its last batch" in caplog.text) != drop_last


def test_ranks_share_the_batches(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    alone = texts(arguments(tmp_path, SIZES, batch_size=6), 5)
    ranks = [
        batches(arguments(tmp_path, SIZES, batch_size=2, world_size=3, rank=rank), 5)
        for rank in range(3)
    ]
    together = [
        row for step in zip(*ranks, strict=True) for b in step for row in b["text"].tolist()
    ]
    assert together == alone


def test_a_resumed_run_repeats_its_tail_as_the_framework_does(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    args = arguments(tmp_path, SIZES[:1], train_iters=2, iteration=1)
    loader = loaders_of(args)["train"]
    first = len(loader) - 1
    args.iteration = first
    rows = batches(args, 3)
    for batch in rows[1:]:
        np.testing.assert_array_equal(batch["text"], rows[0]["text"])


def test_sequences_are_read_and_set_as_before(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    prefix = arguments(tmp_path, [[3, 0, 4]]).paths[0]
    dataset = neox_stand_in.data_utils().make_indexed_dataset(prefix, "mmap", True)
    assert isinstance(dataset, neox_stand_in.MMapIndexedDataset)
    assert dataset.sizes.tolist() == [3, 0, 4]
    assert dataset.sizes.dtype == np.int32
    assert [row.tolist() for row in dataset[0:3]] == [[0, 1, 2], [], [3, 4, 5, 6]]
    assert dataset[2].tolist() == dataset.get(2).tolist() == [3, 4, 5, 6]
    assert dataset.get(2, offset=1, length=2).tolist() == [4, 5]
    with pytest.raises(OutOfRange):  # GPT-NeoX reads what follows in the file
        dataset.get(0, length=5)
    assert dataset.doc_idx.tolist() == [0, 1, 2, 3]
    dataset.set_doc_idx(np.array([0, 3]))
    assert dataset.doc_idx.tolist() == [0, 3]
    assert pickle.loads(pickle.dumps(dataset))[2].tolist() == [3, 4, 5, 6]
    tokens = dataset[2]
    del dataset
    assert tokens.tolist() == [3, 4, 5, 6]


def write_old_format(prefix: str, rows: list[list[int]]) -> None:
    sizes = [len(row) for row in rows]
    bounds = np.arange(len(rows) + 1)
    header = np.array([1, 4, 4, len(rows), len(rows), bounds.size], "<i8")
    ends = np.cumsum([0, *sizes])
    with open(prefix + ".idx", "wb") as file:
        file.write(b"TNTIDX\0\0" + header.tobytes())
        for numbers in (bounds, ends, sizes, bounds):
            file.write(np.array(numbers, "<i8").tobytes())
    np.concatenate([np.array(row, np.int32) for row in rows]).tofile(prefix + ".bin")


def test_the_longest_sequence_of_the_old_format(tmp_path: Path) -> None:
    write_old_format(str(tmp_path / "c"), [[7], [7]])
    idx = (tmp_path / "c.idx").read_bytes()
    for tokens in (2**31 - 1, 2**31):
        end, size = (np.array([count], "<i8").tobytes() for count in (1 + tokens, tokens))
        (tmp_path / "c.idx").write_bytes(idx[:96] + end + idx[104:112] + size + idx[120:])
        os.truncate(tmp_path / "c.bin", 4 * (1 + tokens))  # sparse
        if tokens < 2**31:
            assert LegacyDataset(str(tmp_path / "c")).sequence_lengths.tolist() == [1, tokens]
    with pytest.raises(FormatError, match="sequence 1 has 2147483648 tokens, at most 2147483647"):
        LegacyDataset(str(tmp_path / "c"))


@pytest.mark.parametrize("impl", ["lazy", "cached", "infer"])
@pytest.mark.parametrize("pack_impl", ["packed", "unpacked", "pack_until_overflow"])
def test_files_of_the_old_format(impl: str, pack_impl: str, neox: Any, tmp_path: Path) -> None:
    adapter.install()
    plain = arguments(tmp_path, [[5, 9, 4, 12]], pack_impl=pack_impl, seq_length=8)
    (tmp_path / "old").mkdir()
    old = SimpleNamespace(**{**vars(plain), "paths": [str(tmp_path / "old/c0")], "data_impl": impl})
    ends = np.cumsum([0, 5, 9, 4, 12])
    rows = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
    write_old_format(old.paths[0], rows)
    dataset = neox_stand_in.data_utils().make_indexed_dataset(old.paths[0], impl)
    assert [row.tolist() for row in dataset[0:4]] == rows
    assert dataset.get(1, 2, 3).tolist() == rows[1][2:5]
    assert dataset.sizes.tolist() == [5, 9, 4, 12]
    assert dataset.data_offsets.tolist() == ends.tolist()
    assert texts(old, 6) == texts(plain, 6)
    copy = pickle.loads(pickle.dumps(LegacyDataset(old.paths[0])))
    assert type(copy) is LegacyDataset
    assert [row.tolist() for row in copy[0:4]] == rows


def test_datasets_of_other_kinds_are_left_to_the_framework(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    other = SimpleNamespace(sizes=np.array([4, 5], np.int32))
    with pytest.raises(AssertionError, match="the adapter replaces this"):
        neox_stand_in.GPT2Dataset(
            "train", str(tmp_path / "c"), np.arange(2), other, 3, None, 4, 1, pack_impl="packed"
        )


def test_batches_are_what_pytorch_would_stack(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    args = arguments(tmp_path, SIZES, pack_impl="unpacked", labels=True)
    loader = loaders_of(args)["train"]
    whole = list(loader)
    loader.collate_fn = torch.utils.data.default_collate
    for batch, stacked in zip(whole, loader, strict=True):
        assert batch.keys() == stacked.keys()
        for name in batch:
            assert batch[name].dtype == stacked[name].dtype
            assert torch.equal(batch[name], stacked[name])
