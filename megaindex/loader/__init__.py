"""Batches of tokens for training: gather, shard over ranks, and a PyTorch dataset."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaindex.loader.gather import gather
    from megaindex.loader.receipts import Recorder, receipted
    from megaindex.loader.sampler import MicroBatchSampler
    from megaindex.loader.torch_dataset import GPTDataset

_HOMES = {
    "GPTDataset": "megaindex.loader.torch_dataset",
    "MicroBatchSampler": "megaindex.loader.sampler",
    "Recorder": "megaindex.loader.receipts",
    "gather": "megaindex.loader.gather",
    "receipted": "megaindex.loader.receipts",
}

__all__ = ["GPTDataset", "MicroBatchSampler", "Recorder", "gather", "receipted"]


def __getattr__(name: str) -> Any:  # torch is loaded only for what needs it
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
