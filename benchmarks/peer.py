"""The peer: megatron-core's GPTDataset with a cache directory."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets import helpers, helpers_cpp
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
    from megatron.core.datasets.utils import Split

logging.getLogger("megatron").setLevel(logging.ERROR)

__all__ = [
    "GPTDataset",
    "IndexedDatasetBuilder",
    "helpers",
    "helpers_cpp",
    "megatron_blend",
    "megatron_index",
    "open_megatron",
]


class Tokenizer:
    vocab_size = 50_257
    eod = 50_256
    pad = -1
    unique_identifiers: OrderedDict[str, str] = OrderedDict(name="benchmark")


def open_megatron(prefix: Path) -> IndexedDataset:
    return IndexedDataset(str(prefix))


def megatron_index(
    dataset: IndexedDataset, num_samples: int, sequence_length: int, seed: int, cache: Path
) -> Any:
    """Build and save GPTDataset's arrays into an empty cache directory."""
    shutil.rmtree(cache, ignore_errors=True)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend=([dataset.path_prefix], None),
        split="1",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        path_to_cache=str(cache),
    )
    documents = np.arange(len(dataset), dtype=np.int32)
    return GPTDataset(dataset, dataset.path_prefix, documents, num_samples, Split.train, config)


def megatron_blend(
    prefixes: list[str],
    weights: list[float] | None,
    num_samples: int,
    sequence_length: int,
    seed: int,
    cache: Path,
    *,
    with_mask: bool = False,
) -> Any:
    """Return the train split of one or several corpora, from the cache if it is built."""
    if not torch.distributed.is_initialized():  # a blend queries its rank
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend=(prefixes, weights),
        split="1",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=with_mask,
        path_to_cache=str(cache),
        mid_level_dataset_surplus=0.005,
    )
    sizes = [num_samples, 0, 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
