"""Samplers with random access, and evaluation of every sample exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, overload

from megaindex.arithmetic import ceil_div
from megaindex.configs.batch_schedule import BatchSchedule
from megaindex.errors import OutOfRange
from megaindex.loader.rank_rows import RankLayout, Step, deal
from megaindex.loader.samplers import MicroBatchSampler
from megaindex.validation import check_between, check_choice, check_integer


class RandomAccessSampler(Sequence[list[int | None]]):
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
        self._ranks = RankLayout(
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )
        check_choice("tail", tail, ("drop", "pad"))
        size = self._ranks.rows_per_round if global_batch_size is None else global_batch_size
        self._schedule = size if isinstance(size, BatchSchedule) else BatchSchedule.constant(size)
        self._num_samples = num_samples = check_integer("num_samples", num_samples)
        self._start = consumed_samples = check_integer("consumed_samples", consumed_samples)
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
        number = check_integer("the number of a batch", number)
        if not 0 <= number < len(self):
            raise OutOfRange(f"batch {number} was asked for, every host has {len(self)}")
        rows = self._ranks.rows_per_round
        position = self._start + number * rows  # all rows before the last step hold a sample
        steps = self._schedule.iterations_within(position, self._start)
        begin = self._schedule.samples_after(steps, self._start)
        size = self._schedule.samples_after(1, begin) - begin
        step = Step(first=begin, samples=min(size, self._num_samples - begin), rows=size)
        dealt = deal(step, self._ranks)
        return next(itertools.islice(dealt, (position - begin) // rows, None))

    def __repr__(self) -> str:
        """Equal for equal batches, as checkpoints of grain compare it."""
        ranks = self._ranks
        return (
            f"HostBatches({self._num_samples} samples from {self._start} on, {self._length} x "
            f"{ranks.micro_batch_size} for {ranks.data_parallel_rank} of "
            f"{ranks.data_parallel_size}, {self._schedule.stages})"
        )


class EvaluationSampler:
    """The micro batches of one rank in a pass over a whole set; a ``batch_sampler``.

    Each of the ids 0 ... num_samples - 1 is served once, to one rank. All ranks have the same
    number of micro batches, and the rows they are short of are None, which a dataset turns into
    rows without loss. Samples are spread evenly, so with micro batches of two rows or more and at
    least as many samples as ranks, no micro batch is all padding. A sum of losses and a sum of
    loss masks, each over all ranks, give the exact mean.

    Every iteration is a new pass.

    Megatron's ``--full-validation`` is not that. In core 0.16.1 it uses its training sampler, which
    drops the samples of a last partial micro batch. Later (d98e8a64) each rank reads one sample at
    a time, and a rank that has one less than the others starts over: its first sample is scored
    twice. In both, an evaluation iteration reads as many micro batches as a training step, while
    their number is counted as iterations, so with accumulation the set is read several times over.

    Args:
        num_samples: samples of the set; 0 makes no micro batch.
        micro_batch_size: rows a rank reads at once.
        data_parallel_rank: which rank this is.
        data_parallel_size: how many there are.

    Raises:
        InvalidArgument: a number is out of range.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        self._ranks = RankLayout(
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )
        num_samples = check_between("num_samples", num_samples, 0)
        self._num_samples = num_samples

    def __len__(self) -> int:
        """Micro batches, the same number on every rank."""
        return ceil_div(self._num_samples, self._ranks.rows_per_round)

    def __iter__(self) -> Iterator[list[int | None]]:
        rows = len(self) * self._ranks.rows_per_round
        return deal(Step(first=0, samples=self._num_samples, rows=rows), self._ranks)
