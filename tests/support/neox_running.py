"""Runs of GPT-NeoX's loaders, and its datasets, over corpora that are written on the way."""

from __future__ import annotations

import itertools
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from support import neox_stand_in
from support.neox_corpora import write_corpus_and_companions

from megaindex.index.frameworks import framework_rules

ADDED = 1000
SIZES = [[11, 30, 17, 25, 9], [40, 8, 22], [13] * 9]


def arguments(folder: Path, sizes: list[list[int]], **given: Any) -> SimpleNamespace:
    """Settings of a run over corpora of these lengths, which are written if they are missing."""
    folder.mkdir(exist_ok=True)
    prompts = given.pop("prompts", [[0] * len(row) for row in sizes])
    paths = [str(folder / f"c{k}") for k in range(len(sizes))]
    for path, row, masked in zip(paths, sizes, prompts, strict=True):
        if not os.path.exists(path + ".idx"):
            write_corpus_and_companions(Path(path), row, masked)
    labels = [path + "_label" for path in paths] if given.pop("labels", False) else None
    values = {
        "data_path": None, "data_impl": "mmap", "pack_impl": "packed", "allow_chopped": True,
        "split": "60,20,20", "seed": 1234, "seq_length": 16, "batch_size": 4,
        "train_batch_size": 4, "train_iters": 9, "train_epochs": None, "eval_interval": 5,
        "eval_iters": 1, "iteration": 0, "gradient_accumulation_steps": 1, "rank": 0,
        "world_size": 1, "weight_by_num_documents": False, "weights": [1.0] * len(paths),
        "paths": paths, "labels": labels,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **given})


def weights_by_num_docs(counts: list[int], alpha: float) -> list[float]:
    """Shares of the documents to the power of alpha, less of what is frequent."""
    if len(counts) == 1:
        return [1.0]
    total = sum(counts)
    powers = [(count / total) ** alpha for count in counts]
    rare = [power / sum(powers) * (1 - count / total)
            for power, count in zip(powers, counts, strict=True)]  # fmt: skip
    return [weight / sum(rare) for weight in rare]


def loaders_of(args: SimpleNamespace) -> dict[str, Any]:
    """Loaders of the three parts: of the split of one path, or of a blend of paths."""
    evaluations = 0 if args.train_epochs else args.train_iters // args.eval_interval + 1
    iterations = (args.train_iters, evaluations * args.eval_iters, args.eval_iters)
    samples = [None if args.train_epochs else n * args.train_batch_size for n in iterations]
    utils = neox_stand_in.data_utils()
    build = _split_datasets if args.data_path else _blended_datasets
    return {
        name: utils.make_data_loader(dataset, args)
        for name, dataset in zip(_PARTS, build(args, samples), strict=True)
    }


_PARTS = ("train", "valid", "test")


def _dataset(args: Any, name: str, path: str, documents: Any, samples: int | None, label: Any,
             **more: Any) -> Any:  # fmt: skip
    open_pair = neox_stand_in.data_utils().make_indexed_dataset
    return neox_stand_in.GPT2Dataset(
        name, path, documents, open_pair(path, args.data_impl, True), samples,
        1 if args.train_epochs else None, args.seq_length, args.seed, pack_impl=args.pack_impl,
        allow_chopped=args.allow_chopped,
        label_dataset=label and open_pair(label, args.data_impl, True), **more,
    )  # fmt: skip


def _split_datasets(args: Any, samples: list[int | None]) -> list[Any]:
    utils = neox_stand_in.data_utils()
    count = len(utils.make_indexed_dataset(args.data_path, args.data_impl, True))
    epochs = 1 if args.train_epochs else None
    made: list[Any] = utils.build_train_valid_test_datasets(
        args.data_path, args.data_impl, framework_rules("neox").split_bounds(args.split, count),
        samples, [epochs] * 3, seq_length=args.seq_length, seed=args.seed,
        pack_impl=args.pack_impl, allow_chopped=args.allow_chopped,
    )  # fmt: skip
    return made


def _blended_datasets(args: Any, samples: list[int | None]) -> list[Any]:
    paths, labels = args.paths, args.labels or [None] * len(args.paths)
    utils, weights = neox_stand_in.data_utils(), args.weights
    counts = [len(utils.make_indexed_dataset(path, args.data_impl, True)) for path in paths]
    if args.weight_by_num_documents:
        weights = weights_by_num_docs(counts, 0.3)
    asked = [utils.get_normalized_weights_and_num_samples(weights, n) for n in samples]
    made = utils.build_weighted_datasets(
        [
            partial(
                _dataset, args, f"{_PARTS[part]}_{k}", paths[k],
                np.arange(counts[k], dtype=np.int32), asked[part][1][k], labels[k],
            )
            for k in range(len(paths))  # in the order of GPT-NeoX: the parts of each source
            for part in range(3)
        ]
    )  # fmt: skip
    return [neox_stand_in.BlendableDataset(made[part::3], asked[part][0]) for part in range(3)]


def batches(args: SimpleNamespace, count: int, part: int = 0) -> list[dict[str, np.ndarray]]:
    """The first batches, as the training loop gets them."""
    utils = neox_stand_in.data_utils()
    iterator = utils.shift_and_wrap_data_loaders(args, loaders_of(args))[part]
    return [{n: v.numpy() for n, v in batch.items()} for batch in itertools.islice(iterator, count)]


def texts(args: SimpleNamespace, count: int) -> list[list[int]]:
    return [row for batch in batches(args, count) for row in batch["text"].tolist()]


def dataset_of(case: dict[str, Any], folder: Path, **changes: Any) -> Any:
    case = {**case, **changes}
    arguments(folder, [case["sizes"]], prompts=[case["prompts"] or [0] * len(case["sizes"])])
    open_pair = neox_stand_in.data_utils().make_indexed_dataset
    prefix = str(folder / "c0")
    companions = {"label": case["prompts"], "reward": case["reward"], "ref": case["ref"]}
    return neox_stand_in.GPT2Dataset(
        "train", prefix, np.arange(case["num_documents"], dtype=np.int32),
        open_pair(prefix, "mmap", True), case["num_samples"], case.get("num_epochs"),
        case["sequence_length"], case["seed"], pack_impl=case["pack_impl"],
        allow_chopped=case["allow_chopped"],
        **{f"{n}_dataset": open_pair(f"{prefix}_{n}", "mmap", True)
           for n, given in companions.items() if given},
    )  # fmt: skip


def pairs_of(folder: Path) -> tuple[Any, list[dict[str, list[int]]]]:
    """A dataset of pairs with an empty text, and its samples."""
    open_pair = neox_stand_in.data_utils().make_indexed_dataset
    lengths = {"pos": [3, 0, 9], "neg": [1, 9, 4]}
    begins = {side: np.cumsum([0, *sizes]).tolist() for side, sizes in lengths.items()}
    for side, sizes in lengths.items():
        write_corpus_and_companions(folder / side, sizes)
    pos, neg = (open_pair(str(folder / side), "mmap", True) for side in lengths)
    pairs = neox_stand_in.PairwiseDataset("train_0", str(folder / "pos"), None, pos, neg, 3, 3, 1)
    samples = [
        {side: list(range(at[k], at[k] + 4)) for side, at in begins.items()} for k in range(3)
    ]
    return pairs, samples


def adding(owner: type, method: str) -> Any:
    """A subclass whose method adds ADDED to every token."""

    def changed(self: Any, *given: Any, **named: Any) -> Any:
        value = getattr(owner, method)(self, *given, **named)
        if isinstance(value, dict):
            return {name: tokens + ADDED for name, tokens in value.items()}
        return value + ADDED

    return type(f"Adding{owner.__name__}", (owner,), {method: changed})
