"""Batches of tokens for training: gather, shard over ranks, and a PyTorch dataset."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaindex.loader.buffers import Buffers
    from megaindex.loader.cyclic import CyclicSampler
    from megaindex.loader.evaluation import EvaluationSampler
    from megaindex.loader.fields import BatchMaker
    from megaindex.loader.from_recipe import RecipeLoader
    from megaindex.loader.ledger import Ledger
    from megaindex.loader.loader import Loader
    from megaindex.loader.options import SampleOptions
    from megaindex.loader.positional import PositionalOptions, PositionalTokens
    from megaindex.loader.receipts import Recorder, check_receipts, join_states, receipted
    from megaindex.loader.sampler import MicroBatchSampler
    from megaindex.loader.tokens import MappedTokens
    from megaindex.loader.torch_dataset import GPTDataset, collate

_HOMES = {
    "BatchMaker": "megaindex.loader.fields",
    "Buffers": "megaindex.loader.buffers",
    "CyclicSampler": "megaindex.loader.cyclic",
    "EvaluationSampler": "megaindex.loader.evaluation",
    "GPTDataset": "megaindex.loader.torch_dataset",
    "Ledger": "megaindex.loader.ledger",
    "Loader": "megaindex.loader.loader",
    "MappedTokens": "megaindex.loader.tokens",
    "MicroBatchSampler": "megaindex.loader.sampler",
    "PositionalOptions": "megaindex.loader.positional",
    "PositionalTokens": "megaindex.loader.positional",
    "RecipeLoader": "megaindex.loader.from_recipe",
    "Recorder": "megaindex.loader.receipts",
    "SampleOptions": "megaindex.loader.options",
    "check_receipts": "megaindex.loader.receipts",
    "collate": "megaindex.loader.torch_dataset",
    "join_states": "megaindex.loader.receipts",
    "receipted": "megaindex.loader.receipts",
}

__all__ = [
    "BatchMaker",
    "Buffers",
    "CyclicSampler",
    "EvaluationSampler",
    "GPTDataset",
    "Ledger",
    "Loader",
    "MappedTokens",
    "MicroBatchSampler",
    "PositionalOptions",
    "PositionalTokens",
    "RecipeLoader",
    "Recorder",
    "SampleOptions",
    "check_receipts",
    "collate",
    "join_states",
    "receipted",
]


def __getattr__(name: str) -> Any:  # torch is loaded only for what needs it
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
