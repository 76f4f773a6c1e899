"""A tree of modules with the names of GPT-NeoX's megatron.data, as little as its loaders need.

What the adapter replaces fails here if it is called. Golden vectors say what the real code serves.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
from types import ModuleType
from typing import Any

import numpy as np
import torch


def _replaced(*_: Any, **__: Any) -> Any:
    raise AssertionError("the adapter replaces this")


class GPT2Dataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    __init__ = __len__ = __getitem__ = _replaced


class PairwiseDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The tokens from the beginning of each sequence on, as many as a sample has."""

    def __init__(
        self, name: str, pos_data_prefix: str, documents: Any, pos: Any, neg: Any,
        num_samples: int, seq_length: int, seed: int,
    ) -> None:  # fmt: skip
        self.name, self.num_samples, self.width = name, num_samples, seq_length + 1
        self.pos_indexed_dataset, self.neg_indexed_dataset = pos, neg

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, k: int) -> Any:
        sides = {"pos": self.pos_indexed_dataset, "neg": self.neg_indexed_dataset}
        return {side: each.get(k, 0, self.width).copy() for side, each in sides.items()}


class BlendableDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    __init__ = __getitem__ = _replaced

    def __len__(self) -> int:
        return self.size  # type: ignore[attr-defined, no-any-return]


class MMapIndexedDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    _do_init = __getitem__ = get = _replaced

    def __init__(self, path: str, skip_warmup: bool = False) -> None:
        self._do_init(path, skip_warmup)

    def __del__(self) -> None:
        self._bin_buffer_mmap._mmap.close()  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self._index)  # type: ignore[attr-defined]

    def __getstate__(self) -> Any:
        return self._path  # type: ignore[attr-defined]

    def __setstate__(self, state: Any) -> None:
        self._do_init(state)

    @property
    def sizes(self) -> Any:
        return self._index.sizes  # type: ignore[attr-defined]

    @property
    def doc_idx(self) -> Any:
        return self._index.doc_idx  # type: ignore[attr-defined]

    def set_doc_idx(self, doc_idx_: Any) -> None:
        self._index._doc_idx = doc_idx_  # type: ignore[attr-defined]


class IndexedDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    read_index = __getitem__ = _replaced

    def __init__(self, path: str) -> None:
        self.path = path
        self.data_file = None
        self.read_index(path)

    def __len__(self) -> int:
        return self._len  # type: ignore[attr-defined, no-any-return]

    @staticmethod
    def exists(path: str) -> bool:
        return os.path.exists(path + ".idx") and os.path.exists(path + ".bin")


class IndexedCachedDataset(IndexedDataset):
    __getitem__ = _replaced


def infer_dataset_impl(path: str) -> str | None:
    with open(path + ".idx", "rb") as file:
        magic = file.read(8)
    return {b"TNTIDX\0\0": "cached", b"MMIDIDX\0": "mmap"}.get(magic)


def make_dataset(path: str, impl: str, skip_warmup: bool = False) -> Any:
    if not IndexedDataset.exists(path):
        return None
    if impl == "cached":
        return IndexedCachedDataset(path)
    return MMapIndexedDataset(path, skip_warmup) if impl == "mmap" else None


class DistributedBatchSampler(torch.utils.data.BatchSampler):
    def __init__(
        self,
        sampler: Any,
        batch_size: int,
        drop_last: bool,
        rank: int = -1,
        world_size: int = 2,
        wrap_last: bool = False,
        interleave: bool = False,
    ) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.rank, self.world_size, self.interleave = rank, world_size, interleave
        self.wrap_last, self.wrap_around, self.start_iter = wrap_last, 0, 0

    def __iter__(self) -> Any:
        """Counts through everything before ``start_iter``, and serves the last batch if asked."""
        ids, number = iter(self.sampler), 0
        while batch := list(itertools.islice(ids, self.batch_size)):
            if len(batch) < self.batch_size and self.drop_last:
                return
            if number >= self.start_iter:
                yield self._batch(batch)
                self.start_iter = 0
            number += 1

    def _batch(self, batch: Any) -> Any:
        if self.interleave:
            return batch[self.rank : self.batch_size : self.world_size]
        part = self.batch_size // self.world_size
        return batch[self.rank * part : (self.rank + 1) * part]


def print_rank_0(*message: Any) -> None:
    print(*message, flush=True)


def compile_helper() -> None:
    _replaced()


def get_normalized_weights_and_num_samples(weights: Any, num_samples: int | None) -> Any:
    total = sum(weights)
    shares = [weight / total for weight in weights]
    if num_samples is None:
        return shares, [None] * len(shares)
    return shares, [math.ceil(num_samples * share * 1.005) for share in shares]


def build_the_dataset(
    data_prefix: str | None,
    pos_data_prefix: str | None = None,
    neg_data_prefix: str | None = None,
    *,
    name: str,
    data_impl: str,
    dataset_impl: str = "gpt2",
    label_prefix: str | None = None,
    precompute_model_name: str | None = None,
    **settings: Any,
) -> Any:
    assert dataset_impl == "gpt2"
    open_pair = data_utils().make_indexed_dataset
    text = open_pair(data_prefix, data_impl, True)
    label = label_prefix and open_pair(label_prefix, data_impl, True)
    ref = precompute_model_name and open_pair(
        f"{data_prefix}_{precompute_model_name}", data_impl, True
    )
    documents = np.arange(text.sizes.shape[0], dtype=np.int32)
    return GPT2Dataset(
        name, data_prefix, documents, text, label_dataset=label, ref_dataset=ref, **settings
    )


def build_train_valid_test_datasets(
    data_prefix: str,
    data_impl: str,
    bounds: Any,
    train_valid_test_num_samples: Any,
    train_valid_test_epochs: Any,
    **settings: Any,
) -> Any:
    text = data_utils().make_indexed_dataset(data_prefix, data_impl, True)
    return [
        GPT2Dataset(name, data_prefix, np.arange(*part, dtype=np.int32), text, samples, epochs,
                    **settings)
        for name, part, samples, epochs in zip(
            ("train", "valid", "test"), bounds, train_valid_test_num_samples,
            train_valid_test_epochs, strict=True,
        )
    ]  # fmt: skip


def build_weighted_datasets(make: Any) -> list[Any]:
    """The datasets of all sources and parts, in GPT-NeoX out of their settings."""
    return [make_one() for make_one in make]


def make_data_loader(dataset: Any, args: Any) -> Any:
    sampler = data_utils().DistributedBatchSampler(
        sampler=torch.utils.data.SequentialSampler(dataset),
        batch_size=args.batch_size * args.world_size,
        drop_last=True,
        rank=args.rank,
        world_size=args.world_size,
    )
    workers = getattr(args, "num_workers", 0)
    return torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=workers)


def data_utils() -> Any:
    import megatron.data.data_utils as module

    return module


def shift_and_wrap_data_loaders(neox_args: Any, data_loaders: Any, loop: bool = True) -> Any:
    micro_batches = neox_args.iteration * neox_args.gradient_accumulation_steps
    starts = {
        "train": micro_batches,
        "valid": micro_batches // neox_args.eval_interval * neox_args.eval_iters,
        "test": 0,
    }
    iterators = []
    for name, loader in data_loaders.items():
        if loader is not None and starts[name]:
            loader.batch_sampler.start_iter = starts[name] % len(loader)
        wrap = data_utils().cycle if loop else iter
        iterators.append(None if loader is None else wrap(loader))
    return iterators


def modules() -> dict[str, ModuleType]:
    """What stands for GPT-NeoX in ``sys.modules``."""
    contents: dict[str, list[Any]] = {
        "megatron": [],
        "megatron.data": [],
        "megatron.data.gpt2_dataset": [GPT2Dataset],
        "megatron.data.pairwise_dataset": [PairwiseDataset],
        "megatron.data.blendable_dataset": [BlendableDataset],
        "megatron.data.indexed_dataset": [
            MMapIndexedDataset, IndexedDataset, IndexedCachedDataset, infer_dataset_impl,
            make_dataset,
        ],
        "megatron.data.samplers": [DistributedBatchSampler],
        "megatron.data.data_utils": [
            GPT2Dataset, PairwiseDataset, BlendableDataset, DistributedBatchSampler,
            build_the_dataset, build_train_valid_test_datasets, build_weighted_datasets,
            compile_helper, get_normalized_weights_and_num_samples, make_data_loader, print_rank_0,
            shift_and_wrap_data_loaders,
        ],
        "megatron.training": [shift_and_wrap_data_loaders],
    }  # fmt: skip
    tree = {}
    for name, members in contents.items():
        tree[name] = ModuleType(name)
        if name in ("megatron", "megatron.data"):
            tree[name].__path__ = []
        for member in members:
            setattr(tree[name], member.__name__, member)
            if inspect.isfunction(member) and member.__module__ == __name__:
                member.__module__ = name
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(tree[parent], child, tree[name])
    vars(tree["megatron.data.data_utils"]).update(
        make_indexed_dataset=make_dataset, cycle=itertools.cycle
    )
    vars(tree["megatron.data.indexed_dataset"]).update(
        index_file_path=lambda prefix: prefix + ".idx",
        data_file_path=lambda prefix: prefix + ".bin",
        _warmup_mmap_file=lambda path: None,
    )
    return tree
