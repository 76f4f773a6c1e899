"""megatron-core as a user runs it: GPTDataset with a cache directory."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets import helpers, helpers_cpp
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

logging.getLogger("megatron").setLevel(logging.ERROR)

__all__ = ["GPTDataset", "helpers", "helpers_cpp", "megatron_index", "open_megatron"]


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
