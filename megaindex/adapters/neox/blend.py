"""GPT-NeoX's BlendableDataset, with any number of datasets and whole batches read at once."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaindex.adapters.neox import batches
from megaindex.adapters.neox.batches import BatchRows
from megaindex.adapters.neox.datasets import is_plain_text
from megaindex.adapters.neox.framework import framework
from megaindex.adapters.neox.samples import Texts
from megaindex.adapters.reports import NEOX
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.index.blended import BlendedIndex
from megaindex.kernels import active
from megaindex.kernels.types import F64, I64, DatasetIndex
from megaindex.loader.choice import plain_reader
from megaindex.loader.tokens import TokenReader

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
    if self._exact and all(_is_asked_for_epochs(dataset) for dataset in datasets):
        source, sample = _empty(len(datasets), total)
        counts = np.zeros(len(datasets), np.int64)
        active().blend_exhaustive(sizes, 0, total, counts, source, sample)
    else:
        source, sample, counts = _drawn(normalized(weights), total)
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


_drawn_last: tuple[bytes, weakref.ref[DatasetIndex], weakref.ref[I64]] | None = None


def _drawn(weights: F64, total: int) -> tuple[DatasetIndex, I64, I64]:
    """The first draws of a blend, and how many each dataset has.

    Weights alone decide them, and those of training, validation and test are often the same: then
    the shorter blends are views of the longest, if that comes first. All are read-only.
    """
    global _drawn_last  # noqa: PLW0603
    known = _drawn_last
    if known is not None and known[0] == weights.tobytes():
        source, sample = known[1](), known[2]()
        if source is not None and sample is not None and source.size >= total:
            counts = np.bincount(source[:total], minlength=weights.size)
            return source[:total], sample[:total], counts
    source, sample = _empty(weights.size, total)
    counts = np.zeros(weights.size, np.int64)
    active().blend_greedy(weights, 0, total, counts, source, sample)
    source.flags.writeable = sample.flags.writeable = False
    _drawn_last = weights.tobytes(), weakref.ref(source), weakref.ref(sample)
    return source, sample, counts


def _empty(datasets: int, size: int) -> tuple[Any, I64]:
    dtype = np.uint8 if datasets <= _MOST_IN_UINT8 else np.int16
    return np.empty(size, dtype), np.empty(size, np.int64)


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
    texts = _texts_of(self)
    rows = None if texts is None else texts.read([idx])
    return _read(self, [idx])[0] if rows is None else {"text": rows[0]}


def get_items(self: Any, ids: Sequence[int]) -> list[Any]:
    """``__getitems__``: the samples of a batch, those of each dataset read together.

    One by one where a subclass has a ``__getitem__`` of its own.
    """
    if type(self).__getitem__ is not get_item:
        return [self[idx] for idx in ids]
    texts = _texts_of(self)
    rows = None if texts is None else texts.read(ids)
    return _read(self, ids) if rows is None else BatchRows({"text": rows}, len(ids))


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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Texts:
    """All sources of a blend of text alone, read by one call."""

    index: BlendedIndex
    reader: TokenReader

    def read(self, ids: Sequence[int]) -> I64 | None:
        """The samples of a batch; None where the blend or a source does not hold one of them."""
        try:
            spans = self.index.locate(ids)
        except OutOfRange:
            return None
        rows = np.empty((len(ids), self.index.sequence_length + 1), np.int64)
        self.reader.read(spans, rows, pad_id=0)
        return rows


_TEXTS = "_megaindex_texts"


def _texts_of(self: Any) -> _Texts | None:
    """What reads a blend as a whole; None where each of its datasets reads for itself."""
    try:
        texts: _Texts | None = vars(self)[_TEXTS]
    except KeyError:
        texts = vars(self)[_TEXTS] = _make_texts(self)
    return texts


def _make_texts(self: Any) -> _Texts | None:
    if not all(map(is_plain_text, self.datasets)):
        return None
    samples: list[Texts] = [dataset.megaindex for dataset in self.datasets]
    if len({(one.seq_length, one.exact) for one in samples}) > 1:
        return None
    return _Texts(
        index=BlendedIndex(
            indices=tuple(one.later_index() for one in samples),
            dataset_index=self.dataset_index,
            dataset_sample_index=self.dataset_sample_index,
        ),
        reader=plain_reader([one.text for one in samples]),
    )


def get_state(self: Any) -> dict[str, Any]:
    """``__getstate__``: without what reads its datasets together."""
    return {name: value for name, value in vars(self).items() if name != _TEXTS}


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
