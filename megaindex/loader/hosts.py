"""What each host reads, by number of the batch: random access to the micro batches of a rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, overload

from megaindex.errors import OutOfRange
from megaindex.index.plain import check_choice, check_integer
from megaindex.loader.deal import Ranks, Step, deal
from megaindex.loader.sampler import MicroBatchSampler
from megaindex.recipe.schedule import BatchSchedule


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
