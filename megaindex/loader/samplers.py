"""Samplers: which samples each data-parallel rank reads, micro batch by micro batch.

A step's rows make micro batches, numbered through all ranks: micro batch n is rank n % D's, and the
D micro batches that the ranks read at the same time are a round. Samples keep their order through
the micro batches, and are spread over them as evenly as they go; the rows left are padding, None.
So 5 samples in 8 rows, for 2 ranks with micro batches of 2, are

    rank 0:  [0, 1]     [3, None]
    rank 1:  [2, None]  [4, None]

and a step without padding is as Megatron's ``single`` sampler and GPT-NeoX assign it. The samples
of the rounds so far are the first of the step, and assigning the rest alone gives the same micro
batches: a run can stop, and go on with other ranks, between any two rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from megaindex.arithmetic import ceil_div
from megaindex.configs.batch_schedule import BatchSchedule
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.loader.sampler_state import LoaderPosition, RankLayout, Resumable
from megaindex.validation import (
    CheckpointReader,
    check_between,
    check_choice,
    check_integer,
    setting_or_none,
)

TAILS = ("drop", "pad", "wrap")


@dataclass(frozen=True, kw_only=True)
class Step:
    """Rows that are assigned together: those of a global batch, or what is left of one."""

    first: int
    """Position of the first sample in the order of training."""
    samples: int
    """Rows that hold a sample, at positions first ... first + samples - 1."""
    rows: int
    """A multiple of the rows of a round, at least ``samples``."""

    def begin(self, micro_batch: int, micro_batch_size: int) -> int:
        """Return the position of a micro batch's first sample; the step's end for the one past its
        last."""
        each, longer = divmod(self.samples, self.rows // micro_batch_size)
        return self.first + micro_batch * each + min(micro_batch, longer)


def assign_rows(step: Step, ranks: RankLayout) -> Iterator[list[int | None]]:
    """Yield the positions in each micro batch of one rank, None for padding."""
    size = ranks.micro_batch_size
    for number in range(ranks.data_parallel_rank, step.rows // size, ranks.data_parallel_size):
        begin, end = step.begin(number, size), step.begin(number + 1, size)
        yield [*range(begin, end), *[None] * (size - (end - begin))]


class MicroBatchSampler(Resumable):
    """The micro batches of one rank, as lists of sample ids; a ``batch_sampler`` for DataLoader.

    Samples are served in order, so which of them make up a step depends on the global batch size
    alone, and a run can go on with other ranks, micro batches and global batches at any place. The
    rows of a step are assigned as by Megatron's ``single`` sampler and by GPT-NeoX (without
    ``interleave``, which its training never sets). With 2 ranks and micro batches of 2, rank 0
    reads 0 1, 4 5, … and rank 1 reads 2 3, 6 7, …

    ``consumed_samples`` is all a run has to keep to go on exactly, which it can do between steps;
    `state_dict` adds the step under way and what the order depends on, to be checked.

    Args:
        num_samples: samples of the order, ids 0 ... num_samples - 1.
        micro_batch_size: rows a rank reads at once.
        data_parallel_rank: which rank this is.
        data_parallel_size: how many there are.
        consumed_samples: samples that were served, over all ranks, before this sampler starts.
        global_batch_size: rows of a step, over all ranks, or how they change with the samples
            consumed. Default: one micro batch on every rank.
        train_samples: samples to serve in all, ``consumed_samples`` included. Default: the order's.
        tail: what becomes of samples that do not fill a last step, as in a plan. ``drop`` does not
            serve them; ``pad`` fills up with rows None, which a dataset turns into rows without
            loss (a micro batch can be all padding where a step has fewer samples than micro
            batches); ``wrap`` fills up with the samples that follow in the order, or its first.
        fingerprint: of the order, kept in the state, where it must be equal to go on.

    Raises:
        InvalidArgument: a size is out of range, or a global batch is not a multiple of
            micro_batch_size x data_parallel_size.
    """

    kind = "single"

    def __init__(
        self,
        *,
        num_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int = 0,
        global_batch_size: int | BatchSchedule | None = None,
        train_samples: int | None = None,
        tail: Literal["drop", "pad", "wrap"] = "drop",
        fingerprint: str | None = None,
    ) -> None:
        self._ranks = RankLayout(
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )
        rows = self._ranks.rows_per_round
        size = rows if global_batch_size is None else global_batch_size
        self._schedule = size if isinstance(size, BatchSchedule) else BatchSchedule.constant(size)
        self._schedule.check_multiple_of(rows)
        self._largest_step = self._most_rows
        self._num_samples = num_samples = check_integer("num_samples", num_samples)
        asked = setting_or_none("train_samples", train_samples)
        self._train_samples = num_samples if asked is None else asked
        check_between("train_samples", self._train_samples, 0, num_samples, most_is="num_samples")
        check_choice("tail", tail, TAILS)
        self._tail = tail
        self._fingerprint = fingerprint
        # a wrapped last step goes past the last sample
        end = self._train_samples + (self._most_rows - 1 if tail == "wrap" else 0)
        consumed_samples = check_between(
            "consumed_samples", consumed_samples, 0, end, most_is="where this run ends"
        )
        self._start = self._place = LoaderPosition(consumed_samples)

    def __len__(self) -> int:
        first = self._start.consumed_samples
        rows = self._start.rows_left
        if rows:
            step = self._step(self._start)
            if step is None:
                return 0
            first += step.samples
        whole = self._schedule.iterations_within(self._train_samples, first)
        end = self._schedule.samples_after(whole, first)
        rows += end - first
        if end < self._train_samples and self._tail != "drop":
            rows += self._size_at(end)
        return rows // self._ranks.rows_per_round

    def _micro_batches(self) -> Iterator[list[int | None]]:
        place, count = self._start, self._num_samples
        while (step := self._step(place)) is not None:
            for number, positions in enumerate(assign_rows(step, self._ranks), 1):
                place = self._place = self._place_in(step, number)
                if place.consumed_samples > count:  # wrapped
                    yield [None if p is None else p % count for p in positions]
                else:
                    yield positions

    def _step(self, place: LoaderPosition) -> Step | None:
        """Return what is assigned next at ``place``; None where the run is over."""
        first, rows = place.consumed_samples, place.rows_left
        left = max(0, self._train_samples - first)
        if rows == 0:
            if left == 0:
                return None
            rows = self._size_at(first)
        if self._tail == "drop" and left < rows:
            return None
        samples = rows if self._tail == "wrap" else min(left, rows)
        return Step(first=first, samples=samples, rows=rows)

    def _size_at(self, consumed: int) -> int:
        return self._schedule.samples_after(1, consumed) - consumed

    def _place_in(self, step: Step, rounds: int) -> LoaderPosition:
        """Return the place after the first rounds of a step."""
        end = step.begin(rounds * self._ranks.data_parallel_size, self._ranks.micro_batch_size)
        return LoaderPosition(end, step.rows - rounds * self._ranks.rows_per_round)

    def _place_after(self, micro_batches: int) -> LoaderPosition:
        place, rounds = self._start, micro_batches
        step = self._step(place)
        if place.rows_left and step is not None:
            inside = min(rounds, step.rows // self._ranks.rows_per_round)
            place, rounds = self._place_in(step, inside), rounds - inside
        if rounds == 0:
            return place
        first = place.consumed_samples
        target = first + rounds * self._ranks.rows_per_round
        # of rows, which all hold a sample but in a padded last step
        begin = self._schedule.samples_after(self._schedule.iterations_within(target, first), first)
        if begin < target:
            step = self._step(LoaderPosition(begin))
            assert step is not None, "inside the iteration, as state_after checked"
            return self._place_in(step, (target - begin) // self._ranks.rows_per_round)
        return LoaderPosition(min(begin, self._train_samples) if self._tail == "pad" else begin)

    def _micro_batch(self, number: int) -> list[int | None]:
        """The micro batch of a number counted from the start, where no step wraps."""
        step = self._step(self._place_after(number))
        assert step is not None, "the number is below the length"
        return next(assign_rows(step, self._ranks))

    @property
    def _order(self) -> dict[str, Any]:
        return {
            "fingerprint": self._fingerprint,
            "num_samples": self._num_samples,
            "train_samples": self._train_samples,
        }

    @property
    def _most_rows(self) -> int:
        """Rows of the largest step of the schedule."""
        return max(size for _, size in self._schedule.stages)

    def _state(self, place: LoaderPosition) -> dict[str, Any]:
        """With the rows of the largest step that this run had or may have, before it was resumed
        too: they bound what can be left of a step, and how far one can wrap."""
        return {**super()._state(place), "largest_step": self._largest_step}

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """As `Resumable.load_state_dict`."""
        super().load_state_dict(state, allow=allow)
        self._largest_step = max(self._most_rows, self._largest_of(state))

    def _largest_of(self, stored: Mapping[str, Any]) -> int:
        """Of a state; those of before ``largest_step`` was kept are not bounded as closely."""
        if stored["kind"] != self.kind:
            return self._most_rows
        unknown = max(self._most_rows, int(stored["num_samples"]))
        return int(stored.get("largest_step", unknown))

    def _check_fields(self, stored: CheckpointReader) -> None:
        stored.integer("train_samples", most=stored.integer("num_samples"))
        if "largest_step" in stored.values:
            stored.integer("largest_step", least=1)
        stored.integer("rows_left", most=self._largest_of(stored.values) - 1)

    def _check_place(self, place: LoaderPosition) -> None:
        if place.rows_left % self._ranks.rows_per_round:
            raise InvalidArgument(
                f"{place.rows_left} rows of the step under way are left, which micro batches of "
                f"{self._ranks.micro_batch_size} on {self._ranks.data_parallel_size} ranks do not "
                f"divide; change them, or go on from the end of a step"
            )

    def _refusals(
        self, place: LoaderPosition, stored: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        consumed = place.consumed_samples
        theirs, ours = stored["num_samples"], self._num_samples
        if theirs != ours and consumed > min(theirs, ours):
            yield (
                "num_samples",
                f"{consumed} samples were consumed of an order of {theirs}, which is not this "
                f"one's beginning: it has {ours}",
            )
        theirs, ours = stored["train_samples"], self._train_samples
        end = consumed + (place.rows_left if self._tail == "drop" else 0)
        if self._tail == "wrap" and theirs == ours:  # a run that is over
            ours += self._largest_of(stored) - 1
        if end > ours:
            yield (
                "train_samples",
                f"the checkpoint stands at {consumed} samples with {place.rows_left} rows of its "
                f"step to come, past {ours}, where this run ends",
            )


class RandomAccessSampler(Sequence[list[int | None]]):
    """The micro batches of one host by number: those that `MicroBatchSampler` yields in turn.

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
        check_choice("tail", tail, ("drop", "pad"))
        self._sampler = MicroBatchSampler(
            num_samples=num_samples,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            consumed_samples=consumed_samples,
            global_batch_size=global_batch_size,
            tail=tail,
        )
        self._length = len(self._sampler)

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
        return self._sampler._micro_batch(number)

    def __repr__(self) -> str:
        """Equal for equal batches, as checkpoints of grain compare it."""
        sampler = self._sampler
        ranks = sampler.ranks
        return (  # by the name that the class had when grain's first checkpoints were written
            f"HostBatches({sampler._num_samples} samples from {sampler._start.consumed_samples} "
            f"on, {self._length} x {ranks.micro_batch_size} for {ranks.data_parallel_rank} of "
            f"{ranks.data_parallel_size}, {sampler._schedule.stages})"
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
        self._num_samples = check_between("num_samples", num_samples, 0)

    def __len__(self) -> int:
        """Micro batches, the same number on every rank."""
        return ceil_div(self._num_samples, self._ranks.rows_per_round)

    def __iter__(self) -> Iterator[list[int | None]]:
        rows = len(self) * self._ranks.rows_per_round
        return assign_rows(Step(first=0, samples=self._num_samples, rows=rows), self._ranks)
