"""GPT-NeoX's BlendableDataset, with any number of datasets and whole batches read at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from megaindex.adapters.neox import batches
from megaindex.adapters.neox.framework import framework
from megaindex.adapters.reports import NEOX
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.kernels import active
from megaindex.kernels.types import F64, I64, DatasetIndex

logger = logging.getLogger("megaindex")

_MOST_IN_UINT8 = 254  # what GPT-NeoX asserts; a uint8 holds no more


def init_blend(self: Any, datasets: Sequence[Any], weights: Sequence[float]) -> None:
    """``BlendableDataset.__init__``.

    As in GPT-NeoX the blend is as long as its datasets together, so towards its end it asks for
    samples that a dataset does not have. Exactly, it ends before that; and where datasets are asked
    for epochs instead of samples, each is served once in every epoch.
    """
    if len(datasets) != len(weights) or not datasets:
        raise InvalidArgument(
            f"a blend has one weight for each dataset, got {len(weights)} for {len(datasets)}"
        )
    started = time.perf_counter()
    self.datasets = list(datasets)
    self._exact = framework().exact
    sizes = np.array([len(dataset) for dataset in datasets], np.int64)
    total = int(sizes.sum())
    dtype = np.uint8 if len(datasets) <= _MOST_IN_UINT8 else np.int16
    source: Any = np.empty(total, dtype)
    sample = np.empty(total, np.int64)
    counts = np.zeros(len(datasets), np.int64)
    if self._exact and all(_is_asked_for_epochs(dataset) for dataset in datasets):
        active().blend_exhaustive(sizes, 0, total, counts, source, sample)
    else:
        active().blend_greedy(normalized(weights), 0, total, counts, source, sample)
    end = _end(source, sample, sizes) if self._exact else total
    self.dataset_index, self.dataset_sample_index = source[:end], sample[:end]
    self.size = end
    _report(self, weights, counts, total, time.perf_counter() - started)


def _report(self: Any, weights: Sequence[float], counts: I64, total: int, seconds: float) -> None:
    """Record the blend, and print the lines of GPT-NeoX that logs are searched for."""
    show = framework().print_line
    show(f"> elapsed time for building blendable dataset indices: {seconds:.2f} (sec)")
    shares = normalized(weights).tolist()
    ratios = [
        f"   dataset {number}, input: {share:g}, achieved: {count / max(1, total):g}"
        for number, (share, count) in enumerate(zip(shares, counts.tolist(), strict=True))
    ]
    show("\n".join([" > sample ratios:", *ratios]))
    kind = type(self).__name__
    first = getattr(self.datasets[0], "name", "")
    NEOX.serve(
        kind, f"{first} and {len(self.datasets) - 1} more", "built", samples=self.size,
        seconds=seconds,
    )  # fmt: skip
    if type(self).__getitem__ is not get_item:
        NEOX.leave("reading", kind, f"{kind} has a __getitem__ of its own")


def normalized(weights: Sequence[float]) -> F64:
    """The weights that the blend compares, summed as GPT-NeoX does here.

    Raises:
        InvalidArgument: no positive sum, or a weight that is negative or not finite.
    """
    values = np.array(weights, np.float64)
    total = np.sum(values)
    if not np.isfinite(values).all() or (values < 0).any() or not total > 0:
        raise InvalidArgument(
            f"weights must be finite, not negative, and not all 0, got {values.tolist()}"
        )
    divided: F64 = values / total
    return divided


def reshuffles(self: Any) -> bool:
    """Whether all datasets go on in another order after their last sample."""
    return all(
        getattr(getattr(dataset, "megaindex", None), "reshuffles", False)
        for dataset in self.datasets
    )


def get_item(self: Any, idx: int) -> Any:
    """``__getitem__``."""
    return _read(self, [idx])[0]


def get_items(self: Any, ids: Sequence[int]) -> list[Any]:
    """``__getitems__``: the samples of a batch, those of each dataset read together.

    One by one where a subclass has a ``__getitem__`` of its own.
    """
    if type(self).__getitem__ is not get_item:
        return [self[idx] for idx in ids]
    return _read(self, ids)


def _read(self: Any, ids: Sequence[int]) -> list[Any]:
    wanted: I64 = np.asarray(ids, np.int64)
    within, epochs = wanted, np.zeros_like(wanted)
    if self._exact and reshuffles(self):
        epochs, within = np.divmod(wanted, self.size)
    elif not self._exact and self.size:
        within = np.where(wanted >= self.size, wanted % self.size, wanted)
    beyond = (within < 0) | (within >= self.size)
    if beyond.any():
        raise OutOfRange(
            f"sample {int(wanted[beyond][0])} was asked for, the blend holds samples 0 to "
            f"{self.size - 1}; nothing is served in its place"
        )
    source, sample = self.dataset_index[within], self.dataset_sample_index[within]
    parts = []
    for number in np.unique(source).tolist():
        dataset = self.datasets[number]
        at = np.flatnonzero(source == number)
        asked = (sample[at] + epochs[at] * len(dataset)).tolist()
        parts.append((at, _read_from(dataset, asked)))
    return batches.joined(parts, wanted.size)


def _is_asked_for_epochs(dataset: Any) -> bool:
    samples = getattr(dataset, "megaindex", None)
    return samples is not None and samples.requested is None


def _read_from(dataset: Any, ids: list[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__"):
        read: list[Any] = dataset.__getitems__(ids)
        return read
    return [dataset[idx] for idx in ids]


def _end(source: DatasetIndex, sample: I64, sizes: I64) -> int:
    """The blend's length before it asks for a sample that a dataset does not have."""
    spent = sample >= sizes[source]
    if not spent.any():
        return int(sample.size)
    end = int(spent.argmax())
    logger.info("the blend ends after %d samples, where dataset %d is spent", end, int(source[end]))
    return end
