"""Evaluation that scores every sample exactly once, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megaindex.index.plain import check_between
from megaindex.kernels.sizes import ceil_div
from megaindex.loader.deal import Ranks, Step, deal


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
        self._ranks = Ranks(
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
