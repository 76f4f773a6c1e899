"""Samples as plain NumPy, for trainers without PyTorch: random access, and by host.

samples = Samples(index, [dataset], fields="maxtext")
batches = HostBatches(num_samples=len(samples), micro_batch_size=4, data_parallel_rank=host,
                      data_parallel_size=hosts)
for ids in batches:
    train(samples.__getitems__(ids))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.format import IndexedDataset
from megaindex.index.spans import Index
from megaindex.kernels.types import I64
from megaindex.loader.deal import Ranks, Step, deal
from megaindex.loader.fields import PADDING, BatchMaker, SampleIds
from megaindex.loader.options import SampleOptions
from megaindex.loader.sampler import MicroBatchSampler
from megaindex.loader.targets import Targets
from megaindex.loader.tokens import MappedTokens, TokenReader
from megaindex.recipe.schedule import BatchSchedule

Fields = dict[str, npt.NDArray[Any]]
FieldNames = Literal["megatron", "maxtext"]


class Samples:
    """The samples of ``index`` as dicts of arrays, alone or as batches; safe to pickle and share.

    Args:
        index: which tokens each sample reads.
        datasets: the sources of the index, in its order, or a reader of them.
        options: default: those of Megatron without resets or masks.
        targets: of the sources that are instruction data.
        fields: ``megatron``: what `BatchMaker` says. ``maxtext``: int32 ``inputs``, ``targets``,
            ``inputs_position``, ``inputs_segmentation`` (documents of a row counted from 1, where
            the options tell them apart, else 1; 0 where there is no token) and
            ``targets_segmentation``, which is 0 too where a token carries no loss.
    """

    def __init__(
        self,
        index: Index,
        datasets: Sequence[IndexedDataset] | TokenReader,
        options: SampleOptions | None = None,
        targets: Targets | None = None,
        *,
        fields: FieldNames = "megatron",
    ) -> None:
        if fields not in ("megatron", "maxtext"):
            raise InvalidArgument(f"fields must be megatron or maxtext, got {fields!r}")
        reader = MappedTokens(datasets) if isinstance(datasets, Sequence) else datasets
        self._maker = BatchMaker(index, reader, options, targets=targets)
        self._fields = fields

    @property
    def index(self) -> Index:
        return self._maker.index

    def __len__(self) -> int:
        return self.index.num_samples

    def __getitem__(self, sample_id: int | None) -> Fields:
        """The fields of one sample, arrays of S."""
        return {name: array[0] for name, array in self.__getitems__([sample_id]).items()}

    def __getitems__(self, sample_ids: SampleIds) -> Fields:
        """The fields of a batch, new arrays of [rows, S]; sample id None or -1 is padding.

        Raises:
            OutOfRange: a sample id the index does not hold.
            FormatError, StorageError: the tokens cannot be read.
        """
        buffers = self._maker.allocate(len(sample_ids))
        self._maker.fill(buffers, sample_ids)
        if self._fields == "megatron":
            return buffers.arrays
        return _as_maxtext(
            buffers.arrays,
            self._row_tokens(sample_ids),
            tells_documents_apart=self._maker.options.resets_positions,
        )

    def _row_tokens(self, sample_ids: SampleIds) -> I64:
        """Tokens that each row reads, the one beyond its length included."""
        ids = np.array([PADDING if i is None else i for i in sample_ids], np.int64)
        tokens = np.zeros(ids.size, np.int64)
        spans = self.index.locate(ids[ids != PADDING])
        tokens[ids != PADDING] = np.add.reduceat(spans.length, spans.row_splits[:-1])
        return tokens


def _as_maxtext(arrays: Fields, row_tokens: I64, *, tells_documents_apart: bool) -> Fields:
    positions = arrays["position_ids"].astype(np.int32)
    has_token = np.arange(positions.shape[1]) < row_tokens[:, None]
    if tells_documents_apart:
        segments = np.cumsum(positions == 0, axis=1, dtype=np.int32)
    else:
        segments = np.ones_like(positions)
    segments *= has_token
    return {
        "inputs": arrays["tokens"].astype(np.int32),
        "targets": arrays["labels"].astype(np.int32),
        "inputs_position": positions,
        "inputs_segmentation": segments,
        "targets_segmentation": segments * (arrays["loss_mask"] > 0),
    }


class HostBatches(Sequence[list[int | None]]):
    """The micro batches of one host by number: those that `MicroBatchSampler` deals in turn.

    Every host has the same number of them, whatever the samples: what does not fill a step is not
    served (``drop``), or served with rows None that carry no loss (``pad``).

    Args:
        As for `MicroBatchSampler`; batches are numbered from ``consumed_samples`` on.

    Raises:
        InvalidArgument: as there, or ``consumed_samples`` is not the end of a step.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int = 0,
        global_batch_size: int | BatchSchedule | None = None,
        tail: Literal["drop", "pad"] = "drop",
    ) -> None:
        self._ranks = Ranks(
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )
        if tail not in ("drop", "pad"):
            raise InvalidArgument(f"tail of hosts must be drop or pad, got {tail!r}")
        size = self._ranks.rows_per_round if global_batch_size is None else global_batch_size
        self._schedule = size if isinstance(size, BatchSchedule) else BatchSchedule.constant(size)
        self._num_samples = num_samples
        self._start = consumed_samples
        sampler = MicroBatchSampler(
            num_samples=num_samples,
            consumed_samples=consumed_samples,
            global_batch_size=self._schedule,
            tail=tail,
            **vars(self._ranks),
        )
        self._length = len(sampler)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, number: int) -> list[int | None]: ...
    @overload
    def __getitem__(self, number: slice) -> list[list[int | None]]: ...
    def __getitem__(self, number: int | slice) -> list[int | None] | list[list[int | None]]:
        """The sample ids of a micro batch, None for rows of padding."""
        if isinstance(number, slice):
            return [self[k] for k in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise _NoSuchBatch(f"batch {number} was asked for, every host has {len(self)}")
        rounds, rows = self._ranks.rows_per_round, number * self._ranks.rows_per_round
        position = self._start + rows  # all rows before the last step hold a sample
        steps = self._schedule.iterations_within(position, self._start)
        begin = self._schedule.samples_after(steps, self._start)
        size = self._schedule.samples_after(1, begin) - begin
        step = Step(first=begin, samples=min(size, self._num_samples - begin), rows=size)
        return list(deal(step, self._ranks))[(position - begin) // rounds]

    def __repr__(self) -> str:
        """Equal for equal batches, as checkpoints of grain compare it."""
        ranks = self._ranks
        return (
            f"HostBatches({self._num_samples} samples from {self._start} on, {self._length} x "
            f"{ranks.micro_batch_size} for {ranks.data_parallel_rank} of "
            f"{ranks.data_parallel_size}, {self._schedule.stages})"
        )


class _NoSuchBatch(OutOfRange, IndexError):
    """Ends the iteration of a sequence, as IndexError does."""


Loader = Callable[[SampleIds], Fields]
