"""Megatron's ``cyclic`` sampler: a new random order of the samples in every epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from megaindex._types import I64
from megaindex.errors import InvalidArgument
from megaindex.loader.sampler_state import LoaderPosition, RankLayout, Resumable
from megaindex.validation import CheckpointReader, check_between, check_integer


class CyclicSampler(Resumable):
    """Micro batches of one rank in the order of Megatron's ``--dataloader-type cyclic``.

    Equal to Megatron-LM's MegatronPretrainingRandomSampler, which shuffles with torch's generator,
    seeded by the number of the epoch. Its order depends on the micro batch size and the number of
    ranks: an epoch is cut to whole rounds, the samples that are shuffled are cut too, and with
    ``data_sharding`` each rank shuffles a part of its own. So a run can continue only with the
    same, unless the difference is allowed by name. `MicroBatchSampler` over a shuffled order has
    no such dependence.

    Without ``data_sharding``, Megatron's ranks can differ in the end of an epoch: 5 samples, 2
    ranks and micro batches of 1 give rank 0 a third micro batch while rank 1 starts the next epoch,
    unless the run was resumed there. Here every rank ends it after 2, as the resumed ones do.

    Requires torch.

    Args:
        num_samples: samples of the dataset, with ids 0 ... num_samples - 1.
        micro_batch_size: rows of one micro batch of a rank.
        data_parallel_rank: rank of this process, from 0.
        data_parallel_size: number of ranks.
        train_samples: samples to serve in all, ``consumed_samples`` included, over any number of
            epochs; those that do not fill a last round are not served.
        consumed_samples: samples served before the start, over all ranks.
        data_sharding: each rank reads from a part of its own, Megatron's default.
        fingerprint: fingerprint of the dataset; a state with another one is refused.

    Raises:
        InvalidArgument: a size is out of range, or a run cannot start at ``consumed_samples``.
    """

    kind = "cyclic"

    def __init__(
        self,
        *,
        num_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        train_samples: int,
        consumed_samples: int = 0,
        data_sharding: bool = True,
        fingerprint: str | None = None,
    ) -> None:
        self._ranks = RankLayout(
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )
        self._num_samples = num_samples = check_integer("num_samples", num_samples)
        self._train_samples = train_samples = check_integer("train_samples", train_samples)
        consumed_samples = check_between(
            "consumed_samples", consumed_samples, 0, train_samples, most_is="train_samples"
        )
        self._data_sharding = bool(data_sharding)
        self._fingerprint = fingerprint
        self._epoch_samples = num_samples // self._ranks.rows_per_round * self._ranks.rows_per_round
        if self._epoch_samples < 1:
            raise InvalidArgument(
                f"num_samples must be at least {self._ranks.rows_per_round}, a micro batch on "
                f"every rank, got {num_samples}"
            )
        self._start = self._position = LoaderPosition(consumed_samples)
        self._check_position(self._start)

    def __len__(self) -> int:
        left = self._train_samples - self._start.consumed_samples
        return max(0, left) // self._ranks.rows_per_round

    def _micro_batches(self) -> Iterator[list[int | None]]:
        size, stride = self._ranks.micro_batch_size, self._ranks.rows_per_round
        epoch, order = -1, np.empty(0, np.int64)
        first = self._start.consumed_samples
        for consumed in range(first, first + len(self) * stride, stride):
            if consumed // self._epoch_samples != epoch:
                epoch = consumed // self._epoch_samples
                order = self._epoch(epoch)
            begin = consumed % self._epoch_samples // stride * size
            self._position = LoaderPosition(consumed + stride)
            yield order[begin : begin + size].tolist()

    def _epoch(self, epoch: int) -> I64:
        """Return the samples of this rank in an epoch, int64."""
        ranks, micro = self._ranks, self._ranks.micro_batch_size
        if self._data_sharding:
            part = self._epoch_samples // ranks.data_parallel_size
            return ranks.data_parallel_rank * part + _permutation(part, epoch)
        shuffled = _permutation(self._num_samples // micro * micro, epoch)
        return shuffled[ranks.data_parallel_rank : self._epoch_samples : ranks.data_parallel_size]

    def _position_after(self, micro_batches: int) -> LoaderPosition:
        return LoaderPosition(
            self._start.consumed_samples + micro_batches * self._ranks.rows_per_round
        )

    @property
    def _order(self) -> dict[str, Any]:
        return {
            "fingerprint": self._fingerprint,
            "num_samples": self._num_samples,
            "micro_batch_size": self._ranks.micro_batch_size,
            "world_size": self._ranks.data_parallel_size,
            "data_sharding": self._data_sharding,
            "train_samples": self._train_samples,
        }

    def _check_fields(self, stored: CheckpointReader) -> None:
        stored.integer("micro_batch_size", least=1)
        stored.integer("world_size", least=1)
        stored.flag("data_sharding")
        stored.integer("rows_left", most=0)  # positions within a step do not occur

    def _check_position(self, position: LoaderPosition) -> None:
        consumed, stride = position.consumed_samples, self._ranks.rows_per_round
        if consumed % self._epoch_samples % stride or position.rows_left % stride:
            raise InvalidArgument(
                f"consumed_samples must be whole rounds of {stride} samples in epochs of "
                f"{self._epoch_samples}, got {consumed}; use the micro batch size and number of "
                "ranks with which they were consumed"
            )

    def _refusals(
        self, position: LoaderPosition, stored: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        for name in ("num_samples", "micro_batch_size", "world_size", "data_sharding"):
            theirs, ours = stored.get(name), self._order[name]
            if theirs != ours:
                yield (
                    name,
                    f"{name} must be {theirs}, as in the checkpoint, since the order of a cyclic "
                    f"sampler depends on it, got {ours}",
                )
        if position.consumed_samples > self._train_samples:
            yield (
                "train_samples",
                f"the checkpoint is at {position.consumed_samples} samples, past the end of this "
                f"run, {self._train_samples}",
            )


def _permutation(size: int, seed: int) -> I64:
    import torch

    order: I64 = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).numpy()
    return order
