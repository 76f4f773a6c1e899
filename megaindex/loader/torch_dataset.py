"""A map-style PyTorch dataset over an index, with the fields of Megatron's GPTDataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, overload

import torch

from megaindex.format import IndexedDataset
from megaindex.index.spans import Index
from megaindex.loader.batches import BatchSource
from megaindex.loader.choice import reader_of
from megaindex.loader.fields import BatchMaker, SampleIds
from megaindex.loader.options import SampleOptions
from megaindex.loader.tokens import TokenReader

Sample = dict[str, torch.Tensor]


class Samples(Sequence[Sample]):
    """The samples of one batch, and the ``batch`` itself: the same fields, stacked."""

    def __init__(self, batch: Sample) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["tokens"])

    @overload
    def __getitem__(self, at: int) -> Sample: ...
    @overload
    def __getitem__(self, at: slice) -> list[Sample]: ...
    def __getitem__(self, at: int | slice) -> Sample | list[Sample]:
        return self._rows[at]

    @cached_property
    def _rows(self) -> list[Sample]:
        rows = zip(*(tensor.unbind() for tensor in self.batch.values()), strict=True)
        return [dict(zip(self.batch, row, strict=True)) for row in rows]


def collate(samples: Sequence[Sample]) -> Sample:
    """A ``collate_fn`` for DataLoader: hands over the batch as it was read, without a copy."""
    if isinstance(samples, Samples):
        return samples.batch
    stacked: Sample = torch.utils.data.default_collate(list(samples))
    return stacked


class GPTDataset(torch.utils.data.Dataset[Sample]):
    """Samples of ``index`` read from ``dataset``, each a dict of tensors.

    ``tokens`` and ``labels`` are int64[S], the labels one token ahead; ``loss_mask`` is
    float32[S]; ``position_ids`` int64[S]; ``attention_mask`` bool[1, S, S] if asked for. Equal to
    megatron-core's GPTDataset for the same index and options; `BatchMaker` says what else there is.
    Sample id None, which Megatron's samplers give to fill up a batch, is a sample without loss.

    With the ``fingerprints`` of its sources each sample has a ``receipt`` too, int64[3], which
    `megaindex.loader.receipted` takes off and adds up: what was read for it, and where.

    Fetches whole batches at once under a DataLoader (``__getitems__``); with `collate` as its
    ``collate_fn`` they are not even copied.

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

    def __len__(self) -> int:
        return self._maker.index.num_samples

    def __getitem__(self, sample_id: int | None) -> Sample:
        return self.__getitems__([sample_id])[0]

    def __getitems__(self, sample_ids: SampleIds) -> Samples:
        """The samples of one batch, read together. They are views of it: its memory is used again
        when the last of them is gone."""
        return Samples(self._source.hand_over(self._source.prepare(list(sample_ids))))

    def _batches(self) -> BatchSource:
        return BatchSource(self._maker, keep=2, pin=False, restore=True, copies=None)

    def __getstate__(self) -> dict[str, Any]:
        return {"maker": self._maker}  # every process has buffers of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._maker = state["maker"]
        self._source = self._batches()
