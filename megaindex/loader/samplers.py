"""Samplers of the micro batches of each data-parallel rank.

The rows of a step are divided into micro batches, numbered over all D ranks: micro batch n belongs
to rank n % D, and the D micro batches that the ranks read at the same time are a round. Samples
keep their order over the micro batches and are spread over them evenly; the remaining rows are
padding, None. So 5 samples in 8 rows, for 2 ranks with micro batches of 2, are

    rank 0:  [0, 1]     [3, None]
    rank 1:  [2, None]  [4, None]

A step without padding is assigned as by Megatron's ``single`` sampler and GPT-NeoX. The rounds
served are always the first samples of the step, and assigning the others alone gives the same micro
batches, so a run can continue with other ranks between any two rounds.

With ``balance``, the samples of a step are assigned in the order of their modelled work, the
largest first, and each micro batch of a round takes those that even out the work of the ranks.
Every step has the same samples as without.

With ``skip``, samples keep their positions: skipped steps are left out, and ``consumed_samples``
counts them when the step after them is served. Moved samples follow the end of the run.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np

from megaindex.arithmetic import ceil_div
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.index.balance import (
    CostModel,
    balanced_rows,
    check_balance,
    check_sum,
    squared_lengths,
)
from megaindex.index.skips import (
    Skip,
    Skips,
    StoredSkips,
    given_skips,
    resolve_skips,
    skip_difference,
    skips_of,
    with_skips,
)
from megaindex.index.spans import Index
from megaindex.index.stretches import Stretch, StretchedIndex
from megaindex.loader.sampler_state import (
    WITH_SKIPS,
    LoaderPosition,
    RankLayout,
    Resumable,
    Step,
    decided_samples,
)
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.validation import (
    CheckpointReader,
    check_between,
    check_choice,
    check_integer,
    setting_or_none,
    shown,
)

TAILS = ("drop", "pad", "wrap")


def assign_rows(step: Step, ranks: RankLayout) -> Iterator[list[int | None]]:
    """Yield the positions in each micro batch of one rank, None for padding."""
    size = ranks.micro_batch_size
    for number in range(ranks.data_parallel_rank, step.rows_left // size, ranks.data_parallel_size):
        begin, end = step.begin(number, size), step.begin(number + 1, size)
        yield [*range(begin, end), *[None] * (size - (end - begin))]


def assign_by_work(
    step: Step, ranks: RankLayout, index: Index, num_samples: int
) -> Iterator[list[int | None]]:
    """Yield the positions in each micro batch of one rank, None for padding, with balanced work.

    Position p is sample ``p % num_samples`` of the index.
    """
    positions = np.arange(step.first, step.end)
    numbers = balanced_rows(
        squared_lengths(index, positions % max(1, num_samples)),
        rows=step.rows,
        ranks=ranks.data_parallel_size,
        micro_batch_size=ranks.micro_batch_size,
        served=step.served,
        rows_served=step.rows_served,
    )
    for batch in numbers[:, ranks.data_parallel_rank].tolist():
        yield [None if number < 0 else step.first + number for number in batch]


def _micro_batches(given: int | Sequence[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    """Return (first sample, rows) of the micro batches, from sample 0 on."""
    if not isinstance(given, Sequence):
        return [(0, given)]  # which is checked with the ranks
    try:
        pairs = [(first, size) for first, size in given]
    except (TypeError, ValueError):
        raise InvalidArgument(
            "micro_batch_size must be a number of rows, or a list of (first sample, rows), got "
            f"{shown(given)}"
        ) from None
    sizes = [(check_integer("micro_batch_size", first), size) for first, size in pairs]
    firsts = [first for first, _ in sizes]
    if not sizes or firsts[0] != 0 or firsts != sorted({*firsts}):
        raise InvalidArgument(
            "micro_batch_size: a list of (first sample, rows) must begin with sample 0 and rise, "
            f"got {shown(sizes)}"
        )
    if all(size is None for _, size in sizes):
        raise InvalidArgument(
            f"micro_batch_size: {shown(sizes)} has no rows for any step; give those of the steps "
            "that are served"
        )
    return sizes


class MicroBatchSampler(Resumable):
    """Micro batches of one rank, as lists of sample ids; a ``batch_sampler`` for DataLoader.

    Samples are served in order: the samples of a step depend on the global batch size alone, so a
    run can continue with other ranks, micro batches and global batches at any position. Rows are
    assigned as by Megatron-LM's MegatronPretrainingSampler (``single``) and by GPT-NeoX's
    DistributedBatchSampler (without ``interleave``, which its training never sets). With 2 ranks
    and micro batches of 2, rank 0 reads 0 1, 4 5, … and rank 1 reads 2 3, 6 7, …

    Between steps, ``consumed_samples`` alone continues a run exactly; `state_dict` adds the
    position within a step, and the values on which the order depends.

    Args:
        num_samples: samples of the order, with ids 0 ... num_samples - 1.
        micro_batch_size: rows of one micro batch of a rank; where it changes during the run, a
            list of (first sample, rows) in order, from sample 0 on, each the start of a step;
            rows are None where another number of ranks is to serve the steps.
        data_parallel_rank: rank of this process, from 0.
        data_parallel_size: number of ranks.
        consumed_samples: samples served before the start, over all ranks.
        global_batch_size: rows of a step over all ranks, or a schedule of them by samples consumed.
            Default: one micro batch on every rank.
        train_samples: samples to serve in all, ``consumed_samples`` included. Default:
            ``num_samples``.
        tail: treatment of samples that do not fill a last step, as in a plan. ``drop`` does not
            serve them; ``pad`` fills up with None, rows without loss (a micro batch is all padding
            if the step has fewer samples than micro batches); ``wrap`` fills up with the samples
            that follow in the order, after its last those from 0 on.
        fingerprint: fingerprint of the order; a state with another one is refused.
        balance: cost model by which each step's samples are assigned to the ranks, so that they
            have equal work. A run can start or stop balancing between steps. Within a step, the
            ``consumed_samples`` of a state are those with the most work, not the first.
        index: the index of the samples, whose lengths ``balance`` needs. `Loader` gives its own to
            a sampler without one.
        skip: steps that are not served, and documents whose loss is masked, as one `megaindex.Skip`
            or several. Steps are those of ``global_batch_size`` from sample 0 on. `Loader` applies
            it to its index; other datasets need the result of `skipped`.

    Raises:
        InvalidArgument: a size is out of range, or a global batch size is not a multiple of
            micro_batch_size × data_parallel_size; the index has fewer samples; a skip lies beyond
            the end.
    """

    kind = "single"

    def __init__(
        self,
        *,
        num_samples: int,
        micro_batch_size: int | Sequence[tuple[int, int | None]],
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int = 0,
        global_batch_size: int | BatchSchedule | None = None,
        train_samples: int | None = None,
        tail: Literal["drop", "pad", "wrap"] = "drop",
        fingerprint: str | None = None,
        balance: CostModel | None = None,
        index: Index | None = None,
        skip: Skip | Sequence[Skip] | None = None,
    ) -> None:
        sizes = _micro_batches(micro_batch_size)
        ranks = {"data_parallel_rank": data_parallel_rank, "data_parallel_size": data_parallel_size}
        self._ranks_from = [
            None if size is None else RankLayout(micro_batch_size=size, **ranks)
            for _, size in sizes
        ]
        self._changes = [first for first, _ in sizes]
        self._ranks = next(ranks for ranks in self._ranks_from if ranks is not None)
        size = self._ranks.rows_per_round if global_batch_size is None else global_batch_size
        self._schedule = size if isinstance(size, BatchSchedule) else BatchSchedule.constant(size)
        self._check_rounds()
        self._largest_step = self._most_rows
        num_samples = check_integer("num_samples", num_samples)
        self._skips = skips_of(index)
        if self._skips is not None:
            num_samples = self._checked_samples(num_samples, self._skips, skip)
        self._num_samples = num_samples
        asked = setting_or_none("train_samples", train_samples)
        self._train_samples = num_samples if asked is None else asked
        check_between("train_samples", self._train_samples, 0, num_samples, most_is="num_samples")
        check_choice("tail", tail, TAILS)
        self._tail = tail
        self._fingerprint = fingerprint
        self._skips = self._skips or resolve_skips(
            given_skips(skip),
            self._schedule,
            num_samples=num_samples,
            train_samples=self._train_samples,
            drops_tail=tail == "drop",
        )
        self._end = self._train_samples if self._skips is None else self._skips.run_end
        # a wrapped last step extends past the last sample
        end = self._end + (self._most_rows - 1 if tail == "wrap" else 0)
        consumed_samples = check_between(
            "consumed_samples", consumed_samples, 0, end, most_is="the end of this run"
        )
        self._start = self._position = LoaderPosition(consumed_samples)
        self._check_steps(self._start)
        self._balance = check_balance(balance)
        self._index: Index | None = None
        self._view: tuple[Index, Index] | None = None
        if index is not None:
            self.balance_by(self.skipped(index))

    def _check_rounds(self) -> None:
        """Check that steps are whole rounds, and that micro batches change between steps."""
        for k, ranks in enumerate(self._ranks_from):
            begin, end = self._changes[k], [*self._changes[1:], None][k]
            if self._whole_steps(0, begin) != begin:
                raise InvalidArgument(
                    f"micro_batch_size: it changes at sample {begin}, inside a step of the global "
                    "batch; let it change at the start of a step"
                )
            if ranks is not None:
                self._schedule.check_multiple_of(ranks.rows_per_round, begin, end)

    def _ranks_at(self, position: int) -> RankLayout:
        """Return micro batch size and ranks of the step at a position.

        Raises:
            InvalidArgument: another number of ranks is to serve the step.
        """
        ranks = self._ranks_from[bisect_right(self._changes, position) - 1]
        if ranks is None:
            raise InvalidArgument(
                f"data_parallel_size: the step at sample {position} is not for "
                f"{self._ranks.data_parallel_size} ranks; save the state here and go on with the "
                "number of ranks of its stage"
            )
        return ranks

    @staticmethod
    def _checked_samples(given: int, skips: Skips, skip: object) -> int:
        """Return the samples of the order, for an index with skips."""
        if skip is not None:
            raise InvalidArgument("skip: the index has skips already; give them once")
        if given not in (skips.num_samples, skips.num_positions):
            raise InvalidArgument(
                f"num_samples must be those of the index, {skips.num_positions}, got {given}"
            )
        return skips.num_samples

    @property
    def _stored_skips(self) -> StoredSkips | None:
        return None if self._skips is None else self._skips.stored

    @property
    def schedule(self) -> BatchSchedule:
        """The sizes of the steps by samples consumed."""
        return self._schedule

    @property
    def skips(self) -> Skips | None:
        """The skips of the run in positions; None without any."""
        return self._skips

    def skipped(self, index: Index) -> Index:
        """Return the index with the skips of this sampler, whose ids are positions.

        Raises:
            InvalidArgument: the index has other skips, or the source of a skip is unknown.
        """
        theirs = skips_of(index)
        if theirs is None:
            if self._skips is not None and index.num_samples < self._num_samples:
                raise InvalidArgument(
                    f"skip: the index must have the {self._num_samples} samples of the sampler, "
                    f"got {index.num_samples}; give the index that is loaded"
                )
            if self._view is None or self._view[0] is not index:
                self._view = index, with_skips(index, self._skips)
            return self._view[1]
        if theirs is not self._skips:
            raise InvalidArgument(
                "skip: the index has skips of its own; give the sampler this index, as in "
                "MicroBatchSampler(…, index=index)"
            )
        return index

    def served(self, index: Index) -> Index:
        """Return the index of the positions that this sampler serves, a wrapped last step too."""
        if self._tail != "wrap":
            return index
        end = self._num_positions
        again = [self._wrapped(end + k) for k in range(self._most_rows - 1)]
        return StretchedIndex(
            stretches=(
                Stretch(index=index, samples=range(end)),
                Stretch(index=index, samples=np.array(again, np.int64)),
            )
        )

    @property
    def balance(self) -> CostModel | None:
        """Cost model by which rows are assigned; None if they are assigned in order."""
        return self._balance

    def balance_by(self, index: Index) -> None:
        """Use the lengths of the samples of ``index``; without ``balance``, do nothing.

        Raises:
            InvalidArgument: the sampler has another index, or this one has fewer samples.
        """
        if self._balance is None:
            return
        if self._index is not None and self._index is not index:
            raise InvalidArgument(
                "balance: the sampler has another index than the loader; give it the same, or none"
            )
        if index.num_samples < self._num_samples:
            raise InvalidArgument(
                f"balance: the index must have the {self._num_samples} samples of the sampler, "
                f"got {index.num_samples}; give the index that is loaded"
            )
        check_sum(self._most_rows, index.sequence_length)
        self._index = index

    def __len__(self) -> int:
        first = self._start.consumed_samples
        rounds = 0
        if self._start.rows_left:
            rounds = self._start.rows_left // self._ranks_at(first).rows_per_round
            step = self._step(self._start)
            if step is None:
                return 0
            first = step.end
        for begin, end in self._segments(first):
            whole = self._whole_steps(begin, end)
            rows = whole - begin
            if whole < end and self._tail != "drop":
                rows += self._size_at(whole)
            rounds += rows // self._ranks_at(begin).rows_per_round
        return rounds

    def _segments(self, first: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of positions that are served from ``first`` on, of one micro batch."""
        if self._skips is not None:
            served: Iterable[tuple[int, int]] = self._skips.segments(first)
        else:
            served = [(first, self._end)] if first < self._end else []
        for begin, end in served:
            inside = [change for change in self._changes if begin < change < end]
            for low, high in itertools.pairwise([begin, *inside, end]):
                if self._ranks_from[bisect_right(self._changes, low) - 1] is None:
                    return
                yield low, high

    def _check_steps(self, position: LoaderPosition) -> None:
        """Raise InvalidArgument if steps from ``position`` on reach into skipped samples."""
        if self._skips is None:
            return
        for begin, end in self._skips.segments(self._end_of_step(position)):
            whole = self._whole_steps(begin, end)
            if whole < end < self._end:
                self._skips.check_step(whole, whole + self._size_at(whole))

    def _end_of_step(self, position: LoaderPosition) -> int:
        """Return the end of the step of which rows are left; between steps the position."""
        step = self._step(position) if position.rows_left else None
        return position.consumed_samples if step is None else step.end

    def _whole_steps(self, begin: int, end: int) -> int:
        """Return the end of the whole steps from ``begin`` to ``end``."""
        return self._schedule.samples_after(self._schedule.iterations_within(end, begin), begin)

    def _micro_batches(self) -> Iterator[list[int | None]]:
        position, count = self._start, self._num_positions
        while (step := self._step(position)) is not None:
            for number, positions in enumerate(self._assign(step), 1):
                position = self._position = self._position_in(step, number)
                if step.end > count:  # wrapped
                    yield [None if p is None else self._wrapped(p) for p in positions]
                else:
                    yield positions

    @property
    def _num_positions(self) -> int:
        return self._num_samples if self._skips is None else self._skips.num_positions

    def _wrapped(self, position: int) -> int:
        """Return a position of the order; past the last, served samples follow from the first."""
        if position < self._num_positions or self._skips is None:
            return position % self._num_positions
        return int(self._skips.positions_of(position - self._num_positions))

    def _assign(self, step: Step) -> Iterator[list[int | None]]:
        if self._balance is None or self._balance.attention == 0:  # rows are equal work
            return assign_rows(step, self._ranks_at(step.first))
        if self._index is None:
            raise InvalidArgument(
                "balance needs the lengths of the samples: give the sampler their index, as in "
                "MicroBatchSampler(…, balance=…, index=index), or use it in a Loader"
            )
        ranks = self._ranks_at(step.first)
        return assign_by_work(step, ranks, self._index, self._num_positions)

    def _step(self, position: LoaderPosition) -> Step | None:
        """Return the rows that are assigned next at ``position``; None at the end of the run."""
        if position.step is not None:
            return position.step
        first, rows = position.consumed_samples, position.rows_left
        if rows == 0 and self._skips is not None:
            first = self._skips.after(first)
        left = max(0, self._end - first)
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

    def _position_in(self, step: Step, rounds: int) -> LoaderPosition:
        """Return the position after the first ``rounds`` of a step."""
        ranks = self._ranks_at(step.first)
        end = step.begin(rounds * ranks.data_parallel_size, ranks.micro_batch_size)
        left = step.rows_left - rounds * ranks.rows_per_round
        if self._balance is None or left == 0:
            return LoaderPosition(end, left)
        begun = replace(step, served=end - step.first, rows_served=step.rows - left)
        return LoaderPosition(end, left, begun)

    def _position_after(self, micro_batches: int) -> LoaderPosition:
        position, rounds = self._start, micro_batches
        step = self._step(position)
        if position.rows_left and step is not None:
            inside = min(rounds, step.rows_left // self._ranks_at(step.first).rows_per_round)
            position, rounds = self._position_in(step, inside), rounds - inside
        if rounds == 0:
            return position
        first, target = self._rows_after(position.consumed_samples, rounds)
        # counts rows as samples, which differs only in a padded last step
        begin = self._whole_steps(first, target)
        if begin < target:
            step = self._step(LoaderPosition(begin))
            assert step is not None, "inside the iteration, as state_after checked"
            return self._position_in(step, (target - begin) // self._ranks_at(begin).rows_per_round)
        return LoaderPosition(min(begin, self._end) if self._tail == "pad" else begin)

    def batches_left_of_step(self, micro_batches: int) -> int:
        """Return the micro batches left of a step from ``micro_batches`` on; 0 at the end."""
        step = self._step(self._position_after(micro_batches))
        return 0 if step is None else step.rows_left // self._ranks_at(step.first).rows_per_round

    def _rows_after(self, first: int, rounds: int) -> tuple[int, int]:
        """Return the first position of a range without holes, and that after the ``rounds``
        counted from ``first``, which end in the range."""
        rows = self._ranks.rows_per_round
        for begin, end in self._segments(first):
            first, rows = begin, self._ranks_at(begin).rows_per_round
            if rounds * rows <= end - begin:
                break
            if end < self._end:
                rounds -= (end - begin) // rows
        return first, first + rounds * rows

    def _micro_batch(self, number: int) -> list[int | None]:
        """Return a micro batch by its number from the start, with tails that do not wrap."""
        step = self._step(self._position_after(number))
        assert step is not None, "the number is below the length"
        return next(self._assign(step))

    @property
    def _order(self) -> dict[str, Any]:
        return {
            "fingerprint": self._fingerprint,
            "num_samples": self._num_samples,
            "train_samples": self._train_samples,
        }

    @property
    def _most_rows(self) -> int:
        return max(self._schedule.sizes())

    def _state(self, position: LoaderPosition) -> dict[str, Any]:
        # the rows of the largest step, also before the run was resumed, bound those left of a step
        # and the samples that a last step wraps
        state = {**super()._state(position), "largest_step": self._largest_step}
        if self._balance is not None:
            state["balance"] = self._balance.to_dict()
        if self._skips is not None:
            state |= {"version": WITH_SKIPS, "skip": self._skips.to_dict()}
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        super().load_state_dict(state, allow=allow)
        self._largest_step = max(self._most_rows, self._largest_of(state))

    def _parse(self, state: Mapping[str, Any]) -> LoaderPosition:
        position = super()._parse(state)
        StoredSkips.read(state)
        if state["kind"] != self.kind:
            return position
        theirs = state.get("balance")
        theirs = None if theirs is None else CostModel.from_dict(theirs)
        if theirs is None and position.step is not None:
            raise CheckpointReader("the state of a sampler", state).error(
                "it must have the balance of its step", theirs
            )
        if position.rows_left and theirs != self._balance:
            raise InvalidArgument(
                f"balance must be {theirs}, as in the checkpoint, whose step has "
                f"{position.rows_left} rows left, got {self._balance}; use that of the checkpoint, "
                "or change it at the end of a step"
            )
        return position

    def check_skips(self, state: Mapping[str, Any]) -> None:
        """Raise InvalidArgument if a run of these skips cannot continue from a sampler's state."""
        skips, end = StoredSkips.read(state), decided_samples(state)
        difference = skip_difference(skips, self._stored_skips, state["consumed_samples"], end)
        if difference:
            raise InvalidArgument(difference)

    def _largest_of(self, stored: Mapping[str, Any]) -> int:
        """Return the largest step of a state."""
        return int(stored["largest_step"]) if stored["kind"] == self.kind else self._most_rows

    def _check_fields(self, stored: CheckpointReader) -> None:
        stored.integer("train_samples", most=stored.integer("num_samples"))
        stored.integer("largest_step", least=1)
        stored.integer("rows_left", most=self._largest_of(stored.values) - 1)

    def _check_position(self, position: LoaderPosition) -> None:
        self._check_steps(position)
        self._check_changes(position)
        if not position.rows_left:
            return
        ranks = self._ranks_at(position.consumed_samples)
        if position.rows_left % ranks.rows_per_round:
            raise InvalidArgument(
                f"micro batches of {ranks.micro_batch_size} on "
                f"{ranks.data_parallel_size} ranks must divide the {position.rows_left} rows "
                "left of the current step; change them, or continue from the end of a step"
            )

    def _check_changes(self, position: LoaderPosition) -> None:
        """Raise InvalidArgument unless steps from ``position`` end where micro batches change."""
        if len(self._changes) == 1:
            return
        first = self._end_of_step(position)
        change = next((change for change in self._changes if change > first), self._end)
        if change < self._end and self._whole_steps(first, change) != change:
            raise InvalidArgument(
                f"the steps from sample {first} on do not end at sample {change}, where the shape "
                "of the batches changes; continue from the end of a step of this batch schedule"
            )

    def _refusals(
        self, position: LoaderPosition, stored: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        consumed = position.consumed_samples
        end = consumed if position.step is None else position.step.end
        skips = StoredSkips.read(stored)
        if difference := skip_difference(skips, self._stored_skips, consumed, end):
            yield "skip", difference
        theirs, ours = stored["num_samples"], self._num_samples
        moved = 0 if skips is None else sum(stop - begin for begin, stop in skips.moved)
        if theirs != ours and end > min(theirs, ours) + moved:
            yield (
                "num_samples",
                f"the order must have {theirs} samples, as in the checkpoint, of which {consumed} "
                f"were consumed, got {ours}",
            )
        theirs, ours = stored["train_samples"], self._end
        if position.step is None and self._tail == "drop":
            end = consumed + position.rows_left
        if self._tail == "wrap" and theirs == self._train_samples:
            ours += self._largest_of(stored) - 1  # a run may have ended past its last sample
        if end > ours:
            yield (
                "train_samples",
                f"the checkpoint is at {consumed} samples with {position.rows_left} rows left of "
                f"its step, past the end of this run, {ours}",
            )


class RandomAccessSampler(Sequence[list[int | None]]):
    """Sequence of the micro batches of one host, equal to those that `MicroBatchSampler` yields.

    Every host has the same number. Samples that do not fill a step are not served (``drop``), or
    the step is filled up with None, rows without loss (``pad``).

    Args:
        num_samples: samples of the order, with ids 0 ... num_samples - 1.
        micro_batch_size: rows of one micro batch of a host.
        data_parallel_rank: number of this host, from 0.
        data_parallel_size: number of hosts.
        consumed_samples: samples served before batch 0, over all hosts, up to the end of a step.
        global_batch_size: as for `MicroBatchSampler`.
        tail: ``drop`` or ``pad``.

    Raises:
        InvalidArgument: as for `MicroBatchSampler`.
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
        """Return the sample ids of a micro batch, or a list of them; None for rows of padding.

        Raises:
            OutOfRange: the number is negative or beyond the last batch.
        """
        if isinstance(number, slice):
            return [self[k] for k in range(len(self))[number]]
        number = check_integer("the number of a batch", number)
        if not 0 <= number < len(self):
            raise OutOfRange(
                f"the number of a batch must be from 0 to {len(self) - 1}, got {number}"
            )
        return self._sampler._micro_batch(number)

    def __repr__(self) -> str:
        """Return text that is equal for equal batches: checkpoints of grain compare it."""
        sampler = self._sampler
        ranks = sampler.ranks
        return (  # with the class name of the first checkpoints of grain
            f"HostBatches({sampler._num_samples} samples from {sampler._start.consumed_samples} "
            f"on, {self._length} x {ranks.micro_batch_size} for {ranks.data_parallel_rank} of "
            f"{ranks.data_parallel_size}, {sampler._schedule.stages})"
        )


class EvaluationSampler:
    """Micro batches of one rank in a pass over an evaluation set; a ``batch_sampler``.

    Each of the ids 0 ... num_samples - 1 is served once, to one rank; every iteration is a new
    pass. All ranks have the same number of micro batches, filled up with None, rows without loss.
    Samples are spread evenly: with micro batches of two rows or more, and at least as many samples
    as ranks, no micro batch is all padding. The sum of losses over the sum of loss masks, each
    over all ranks, is the exact mean.

    Megatron's ``--full-validation`` differs. Megatron-LM with core 0.16.1 uses its training
    sampler, which drops the samples of a last partial micro batch. At commit d98e8a64 each rank
    reads one sample at a time, and a rank with one sample less than the others restarts, so that
    its first sample is scored twice. In both, an evaluation iteration reads as many micro batches
    as a training step, while micro batches are counted as iterations: with gradient accumulation
    the set is read several times.

    Args:
        num_samples: samples of the set; 0 gives no micro batches.
        micro_batch_size: rows of one micro batch of a rank.
        data_parallel_rank: rank of this process, from 0.
        data_parallel_size: number of ranks.

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

    def __repr__(self) -> str:
        return f"EvaluationSampler({self._ranks}, {self._num_samples:,} samples)"

    def __len__(self) -> int:
        """Return the number of micro batches, equal on every rank."""
        return ceil_div(self._num_samples, self._ranks.rows_per_round)

    def __iter__(self) -> Iterator[list[int | None]]:
        rows = len(self) * self._ranks.rows_per_round
        return assign_rows(Step(first=0, samples=self._num_samples, rows=rows), self._ranks)
