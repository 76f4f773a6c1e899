"""Which samples each data-parallel rank reads, micro batch by micro batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megaindex.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class MicroBatchSampler:
    """The micro batches of one rank, as lists of sample ids; a ``batch_sampler`` for DataLoader.

    Every D x micro_batch_size consecutive samples are dealt to the D ranks in order, as Megatron's
    ``single`` sampler and GPT-NeoX do, so which samples make up an iteration depends on the global
    batch size alone. With 2 ranks and micro batches of 2, rank 0 reads 0 1, 4 5, … and rank 1
    reads 2 3, 6 7, …
    """

    num_samples: int
    """Samples to serve: those of all iterations. What does not fill a micro batch on every rank is
    not served, to any rank."""
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int
    consumed_samples: int = 0
    """Samples that were served, over all ranks, before this sampler starts."""

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1 or self.data_parallel_size < 1:
            raise InvalidArgument(
                "micro_batch_size and data_parallel_size must be at least 1, got "
                f"{self.micro_batch_size} and {self.data_parallel_size}"
            )
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise InvalidArgument(
                f"data_parallel_rank must be from 0 to {self.data_parallel_size - 1}, got "
                f"{self.data_parallel_rank}"
            )
        if not 0 <= self.consumed_samples <= self.num_samples:
            raise InvalidArgument(
                f"consumed_samples must be from 0 to num_samples = {self.num_samples}, got "
                f"{self.consumed_samples}"
            )

    @property
    def _stride(self) -> int:
        return self.micro_batch_size * self.data_parallel_size

    def __len__(self) -> int:
        return (self.num_samples - self.consumed_samples) // self._stride

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        for step in range(len(self)):
            start = first + step * self._stride
            yield list(range(start, start + self.micro_batch_size))
