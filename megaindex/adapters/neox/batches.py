"""Batches that were read at once, kept whole on their way through PyTorch's DataLoader.

A DataLoader asks a dataset for a list of samples and stacks them again. The list here remembers the
arrays that its samples are rows of, so that nothing need be stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megaindex._types import I64
from megaindex.adapters.neox.framework import framework
from megaindex.adapters.reports import NEOX
from megaindex.loader.neox_dataset import Rows


class BatchRows(list[Rows]):
    """The samples of a batch: the rows of ``whole``, arrays [n, S + 1] by name."""

    def __init__(self, whole: Rows, count: int) -> None:
        super().__init__(
            [{name: values[k] for name, values in whole.items()} for k in range(count)]
        )
        self.whole = whole


def joined(parts: Sequence[tuple[I64, Sequence[Any]]], count: int) -> list[Any]:
    """The samples of a batch of which each part has those at its positions."""
    if len(parts) == 1:
        return list(parts[0][1]) if not isinstance(parts[0][1], BatchRows) else parts[0][1]
    wholes = [(at, part.whole) for at, part in parts if isinstance(part, BatchRows)]
    if len(wholes) == len(parts) and len({tuple(whole) for _, whole in wholes}) == 1:
        together = {
            name: np.empty((count, values.shape[1]), values.dtype)
            for name, values in wholes[0][1].items()
        }
        for at, whole in wholes:
            for name, values in whole.items():
                together[name][at] = values
        return BatchRows(together, count)
    rows: list[Any] = [None] * count
    for at, part in parts:
        for position, row in zip(at.tolist(), part, strict=True):
            rows[position] = row
    return rows


def collate(samples: Sequence[Any]) -> Any:
    """What PyTorch's default gives, without a copy where the samples were read at once."""
    import torch

    if isinstance(samples, BatchRows):
        return {name: torch.from_numpy(values) for name, values in samples.whole.items()}
    return torch.utils.data.default_collate(list(samples))


def make_data_loader(dataset: Any, neox_args: Any) -> Any:
    """``data_utils.make_data_loader``: GPT-NeoX's own, with that collation."""
    import torch

    if (
        dataset is not None
        and not hasattr(dataset, "megaindex")
        and not hasattr(dataset, "datasets")
    ):
        reason = "it is none of GPT2Dataset, PairwiseDataset and BlendableDataset"
        NEOX.leave("dataset", type(dataset).__name__, reason)
    loader = framework().original("data_utils", "make_data_loader")(dataset, neox_args)
    if getattr(loader, "collate_fn", None) is torch.utils.data.default_collate:
        loader.collate_fn = collate
    return loader
