"""A map-style PyTorch dataset over an index, with the fields of Megatron's GPTDataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from megaindex.format import IndexedDataset
from megaindex.index.spans import Index
from megaindex.loader.batches import BatchSource
from megaindex.loader.choice import reader_of
from megaindex.loader.fields import BatchMaker, SampleIds
from megaindex.loader.options import SampleOptions
from megaindex.loader.pool import BufferPool
from megaindex.loader.sample_list import Samples
from megaindex.loader.tokens import TokenReader
from megaindex.loader.worker_slots import SlotPool

Sample = dict[str, torch.Tensor]


def collate(samples: Sequence[Sample]) -> Sample:
    """A ``collate_fn`` for DataLoader: hands over the batch as it was read, without a copy, as the
    default one does too."""
    batch: Sample = torch.utils.data.default_collate(samples)  # type: ignore[arg-type]
    return batch


class GPTDataset(torch.utils.data.Dataset[Sample]):
    """Samples of ``index`` read from ``dataset``, each a dict of tensors.

    ``tokens`` and ``labels`` are int64[S], the labels one token ahead; ``loss_mask`` is
    float32[S]; ``position_ids`` int64[S]; ``attention_mask`` bool[1, S, S] if asked for. Equal to
    megatron-core's GPTDataset for the same index and options; `BatchMaker` says what else there is.
    Sample id None, which Megatron's samplers give to fill up a batch, is a sample without loss.

    With the ``fingerprints`` of its sources each sample has a ``receipt`` too, int64[3], which
    `megaindex.loader.receipted` takes off and adds up: what was read for it, and where.

    Fetches whole batches at once under a DataLoader (``__getitems__``), and its default
    ``collate_fn`` does not copy them. Workers send them in shared memory that is used again.

    Args:
        index: which tokens each sample reads.
        dataset: what the index was built from: a dataset, one for each source of a blend, or
            another reader of them.
        pad_id: short for that of ``options``.

    Raises:
        OutOfRange: a sample id the index does not hold; no other sample is served in its place.
    """

    def __init__(
        self,
        index: Index,
        dataset: IndexedDataset | Sequence[IndexedDataset] | TokenReader,
        *,
        pad_id: int | None = None,
        options: SampleOptions | None = None,
        fingerprints: Sequence[str] | None = None,
    ) -> None:
        options = options or SampleOptions()
        if pad_id is not None:
            options = replace(options, pad_id=pad_id)
        self._maker = BatchMaker(index, reader_of(dataset), options, fingerprints=fingerprints)
        self._source = self._batches()
        self._of_worker: BatchSource | None = None

    def __len__(self) -> int:
        return self._maker.index.num_samples

    def __getitem__(self, sample_id: int | None) -> Sample:
        sample: Sample = self.__getitems__([sample_id])[0]
        return sample

    def __getitems__(self, sample_ids: SampleIds) -> Samples:
        """The samples of one batch, read together. They are views of it: its memory is used again
        when the last of them is gone."""
        ids = sample_ids.tolist() if isinstance(sample_ids, np.ndarray) else list(sample_ids)
        source = self._source
        if get_worker_info() is not None:
            if self._of_worker is None:
                self._of_worker = BatchSource(self._maker, make_pool=SlotPool)
            source = self._of_worker
        return Samples(source.hand_over(source.prepare(ids)))

    def _batches(self) -> BatchSource:
        return BatchSource(self._maker, make_pool=partial(BufferPool, keep=2))

    def __getstate__(self) -> dict[str, Any]:
        return {"maker": self._maker}  # every process has buffers of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._maker = state["maker"]
        self._source = self._batches()
        self._of_worker = None
