"""Data sources with random access for grain, and so for MaxText.

    samples = NumpyDataset(opened.index, fields="maxtext")
    batches = RandomAccessSampler(num_samples=len(samples), micro_batch_size=8,
                                  data_parallel_rank=jax.process_index(),
                                  data_parallel_size=jax.process_count())
    dataset = grain.MapDataset.source(BatchSource(samples, batches)).to_iter_dataset()

The index determines the order: grain's `shuffle` and slices are not needed, and its `repeat` would
repeat one order. All hosts have the same number of batches, and rows that pad the last step have a
loss mask of zeros. grain itself is not imported: its sources are any objects with ``__len__`` and
``__getitem__``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

from megaindex.loader.numpy_dataset import Fields, NumpyDataset

__all__ = ["BatchSource", "SampleSource"]


class SampleSource:
    """A source for ``grain.MapDataset.source`` or ``grain.DataLoader``; items are samples.

    Args:
        samples: dataset that is read; workers open its files again.
        fingerprint: fingerprint of the order, such as a receipt or a content hash; grain refuses a
            checkpoint with another.
    """

    def __init__(self, samples: NumpyDataset, *, fingerprint: str = "") -> None:
        self._samples = samples
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, record_key: SupportsIndex) -> Fields:
        return self._samples[record_key.__index__()]

    def __repr__(self) -> str:
        """Return the text that grain compares when a checkpoint is loaded."""
        return f"SampleSource({len(self)} samples, {self._fingerprint!r})"


class BatchSource:
    """As `SampleSource`; items are the micro batches of one host, so nothing is left to batch.

    With workers grain batches what each worker reads; batches that are items stay as they are.

    Args:
        samples: dataset that is read.
        batches: the sample ids of each batch, such as
            `megaindex.loader.RandomAccessSampler`.
        fingerprint: as for `SampleSource`.
    """

    def __init__(
        self,
        samples: NumpyDataset,
        batches: Sequence[Sequence[int | None]],
        *,
        fingerprint: str = "",
    ) -> None:
        self._samples = samples
        self._batches = batches
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, record_key: SupportsIndex) -> Fields:
        return self._samples.__getitems__(self._batches[record_key.__index__()])

    def __repr__(self) -> str:
        return f"BatchSource({self._batches!r}, {self._fingerprint!r})"
