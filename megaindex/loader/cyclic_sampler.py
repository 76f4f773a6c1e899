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
    """The micro batches of one rank as Megatron's ``--dataloader-type cyclic`` orders them.

    Equal to MegatronPretrainingRandomSampler, which shuffles with torch's generator seeded by the
    number of the epoch. Micro batch and number of ranks enter its order in three ways: an epoch is
    cut to whole rounds, the samples that are shuffled are cut too, and with ``data_sharding`` each
    rank shuffles a part of its own. So a run can go on only with the same, unless it is allowed by
    name. `MicroBatchSampler` over a shuffled order has none of this.

    Without ``data_sharding`` Megatron's ranks can disagree about the end of an epoch: 5 samples, 2
    ranks and micro batches of 1 give rank 0 a third micro batch while rank 1 starts the next epoch,
    unless the run was resumed there. Here every rank ends it after 2, as the resumed ones do.

    Needs torch.

    Args:
        num_samples: samples of the dataset, ids 0 ... num_samples - 1.
        micro_batch_size: rows a rank reads at once.
        data_parallel_rank: which rank this is.
        data_parallel_size: how many there are.
        train_samples: samples to serve in all, ``consumed_samples`` included, over any number of
            epochs; what does not fill a last micro batch on every rank is not served.
        consumed_samples: samples that were served, over all ranks, before this sampler starts.
        data_sharding: each rank reads from a part of its own, as Megatron does by default.
        fingerprint: of the dataset, kept in the state, where it must be equal to go on.

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
                "num_samples must fill a micro batch on every rank, "
                f"{self._ranks.rows_per_round} samples, got {num_samples}"
            )
        self._start = self._place = LoaderPosition(consumed_samples)
        self._check_place(self._start)

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
            self._place = LoaderPosition(consumed + stride)
            yield order[begin : begin + size].tolist()

    def _epoch(self, epoch: int) -> I64:
        """The samples this rank reads in an epoch, int64, in order."""
        ranks, micro = self._ranks, self._ranks.micro_batch_size
        if self._data_sharding:
            part = self._epoch_samples // ranks.data_parallel_size
            return ranks.data_parallel_rank * part + _permutation(part, epoch)
        shuffled = _permutation(self._num_samples // micro * micro, epoch)
        return shuffled[ranks.data_parallel_rank : self._epoch_samples : ranks.data_parallel_size]

    def _place_after(self, micro_batches: int) -> LoaderPosition:
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
        stored.integer("rows_left", most=0)  # it has no steps

    def _check_place(self, place: LoaderPosition) -> None:
        consumed, stride = place.consumed_samples, self._ranks.rows_per_round
        if consumed % self._epoch_samples % stride or place.rows_left % stride:
            raise InvalidArgument(
                f"{consumed} samples are not a whole number of rounds of {stride} in epochs of "
                f"{self._epoch_samples}; keep the micro batch and the number of ranks they were "
                "consumed with"
            )

    def _refusals(
        self, place: LoaderPosition, stored: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        for name in ("num_samples", "micro_batch_size", "world_size", "data_sharding"):
            theirs, ours = stored.get(name), self._order[name]
            if theirs != ours:
                yield (
                    name,
                    f"the order of a cyclic sampler depends on {name}, which was {theirs} and is "
                    f"{ours} here",
                )
        if place.consumed_samples > self._train_samples:
            yield (
                "train_samples",
                f"the checkpoint stands at {place.consumed_samples} samples, past "
                f"{self._train_samples}, where this run ends",
            )


def _permutation(size: int, seed: int) -> I64:
    import torch

    order: I64 = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).numpy()
    return order
