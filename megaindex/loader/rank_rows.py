"""How the rows of a step are dealt to the data-parallel ranks: functions of numbers alone.

A step's rows make micro batches, numbered through all ranks: micro batch n is rank n % D's, and the
D micro batches that the ranks read at the same time are a round. Samples keep their order through
the micro batches, and are spread over them as evenly as they go; the rows left are padding, None.
So 5 samples in 8 rows, for 2 ranks with micro batches of 2, are

    rank 0:  [0, 1]     [3, None]
    rank 1:  [2, None]  [4, None]

and a step without padding is what Megatron's ``single`` sampler and GPT-NeoX deal. However many
rounds have been dealt, the samples in them are the first of the step, and dealing the rest alone
gives the same micro batches: a run can stop, and go on with other ranks, between any two rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megaindex.validation import check_between, make_plain


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The data-parallel ranks, and which of them this is."""

    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        make_plain(self, "micro_batch_size", "data_parallel_rank", "data_parallel_size")
        check_between("data_parallel_rank", self.data_parallel_rank, 0, self.data_parallel_size - 1)

    @property
    def rows_per_round(self) -> int:
        """Rows of one micro batch on every rank."""
        return self.micro_batch_size * self.data_parallel_size


@dataclass(frozen=True, kw_only=True)
class Step:
    """Rows that are dealt together: those of a global batch, or what is left of one."""

    first: int
    """Position of the first sample in the order of training."""
    samples: int
    """Rows that hold a sample, at positions first ... first + samples - 1."""
    rows: int
    """A multiple of the rows of a round, at least ``samples``."""

    def begin(self, micro_batch: int, micro_batch_size: int) -> int:
        """Position of the first sample in a micro batch; where the step ends for the one past its
        last."""
        each, longer = divmod(self.samples, self.rows // micro_batch_size)
        return self.first + micro_batch * each + min(micro_batch, longer)


def deal(step: Step, ranks: RankLayout) -> Iterator[list[int | None]]:
    """The positions in each micro batch of one rank, None for padding."""
    size = ranks.micro_batch_size
    for number in range(ranks.data_parallel_rank, step.rows // size, ranks.data_parallel_size):
        begin, end = step.begin(number, size), step.begin(number + 1, size)
        yield [*range(begin, end), *[None] * (size - (end - begin))]
