"""A tree of modules with the names of GPT-NeoX's megatron.data, as little as its loaders need.

What the adapter replaces fails here if it is called; what it leaves alone, which is the control
flow of data_utils, is written anew. Golden vectors say what the real code serves.
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

from megaindex.index.dialect import dialect


def _replaced(*_: Any, **__: Any) -> Any:
    raise AssertionError("the adapter replaces this")


class GPT2Dataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    __init__ = __len__ = __getitem__ = _replaced


class PairwiseDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    __init__ = __len__ = __getitem__ = _replaced


class BlendableDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    __init__ = __getitem__ = _replaced

    def __len__(self) -> int:
        return self.size  # type: ignore[attr-defined, no-any-return]


class MMapIndexedDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    _do_init = __del__ = __getitem__ = get = _replaced

    def __init__(self, path: str, skip_warmup: bool = False) -> None:
        self._do_init(path, skip_warmup)

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


def get_normalized_weights_and_num_samples(weights: Any, num_samples: int | None) -> Any:
    total = sum(weights)
    shares = [weight / total for weight in weights]
    if num_samples is None:
        return shares, [None] * len(shares)
    return shares, [int(math.ceil(num_samples * share * 1.005)) for share in shares]


def make_data_loader(dataset: Any, args: Any) -> Any:
    sampler = data_utils().DistributedBatchSampler(
        sampler=torch.utils.data.SequentialSampler(dataset),
        batch_size=args.batch_size * args.world_size,
        drop_last=True,
        rank=args.rank,
        world_size=args.world_size,
    )
    return torch.utils.data.DataLoader(dataset, batch_sampler=sampler)


def data_utils() -> Any:
    import megatron.data.data_utils as module

    return module


def weights_by_num_docs(counts: list[int], alpha: float) -> list[float]:
    """Shares of the documents to the power of alpha, less of what is frequent."""
    if len(counts) == 1:
        return [1.0]
    total = sum(counts)
    powers = [(count / total) ** alpha for count in counts]
    rare = [power / sum(powers) * (1 - count / total)
            for power, count in zip(powers, counts, strict=True)]  # fmt: skip
    return [weight / sum(rare) for weight in rare]


def build_train_valid_test_data_loaders(args: Any) -> dict[str, Any]:
    """Loaders of the three parts: of the split of one path, or of a blend of paths."""
    evaluations = 0 if args.train_epochs else args.train_iters // args.eval_interval + 1
    iterations = (args.train_iters, evaluations * args.eval_iters, args.eval_iters)
    loaders = {}
    for part, (name, count) in enumerate(zip(_PARTS, iterations, strict=True)):
        samples = None if args.train_epochs else count * args.train_batch_size
        build = _split_dataset if args.data_path else _blended_dataset
        loaders[name] = make_data_loader(build(args, part, samples), args)
    return loaders


_PARTS = ("train", "valid", "test")


def _dataset(args: Any, name: str, path: str, documents: Any, samples: int | None, label: Any,
             **more: Any) -> Any:  # fmt: skip
    open_pair = data_utils().make_indexed_dataset
    return GPT2Dataset(
        name, path, documents, open_pair(path, args.data_impl, True), samples,
        1 if args.train_epochs else None, args.seq_length, args.seed, pack_impl=args.pack_impl,
        allow_chopped=args.allow_chopped,
        label_dataset=label and open_pair(label, args.data_impl, True), **more,
    )  # fmt: skip


def _split_dataset(args: Any, part: int, samples: int | None) -> Any:
    count = len(data_utils().make_indexed_dataset(args.data_path, args.data_impl, True))
    begin, end = dialect("neox").split_bounds(args.split, count)[part]
    documents = np.arange(begin, end, dtype=np.int32)
    return _dataset(args, _PARTS[part], args.data_path, documents, samples, None)


def _blended_dataset(args: Any, part: int, samples: int | None) -> Any:
    paths, labels = args.paths, args.labels or [None] * len(args.paths)
    open_pair, weights = data_utils().make_indexed_dataset, args.weights
    counts = [len(open_pair(path, args.data_impl, True)) for path in paths]
    if args.weight_by_num_documents:
        weights = weights_by_num_docs(counts, 0.3)
    weights, asked = data_utils().get_normalized_weights_and_num_samples(weights, samples)
    datasets = [
        _dataset(args, f"{_PARTS[part]}_{k}", path, np.arange(count, dtype=np.int32), n, label)
        for k, (path, count, n, label) in enumerate(zip(paths, counts, asked, labels, strict=True))
    ]
    return BlendableDataset(datasets, weights)


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
            get_normalized_weights_and_num_samples, shift_and_wrap_data_loaders,
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
