"""Balanced steps under Megatron's ``single`` sampler, for ``install(balance=…)``.

The sampler yields the same samples in each step, whose boundaries are those of Megatron's
calculator of microbatches, but assigns them to the ranks by their work.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megaindex.adapters.megatron.batches import samples_index
from megaindex.adapters.megatron.core import core, microbatch_calculator
from megaindex.adapters.megatron.skips import skipped
from megaindex.adapters.reports import MEGATRON
from megaindex.adapters.skipped_dataset import SkippedDataset
from megaindex.errors import InvalidArgument
from megaindex.index.balance import check_sum
from megaindex.index.spans import Index
from megaindex.loader.sampler_state import RankLayout, Step
from megaindex.loader.samplers import assign_by_work

LOADER = "build_pretraining_data_loader"
"""Megatron's function that makes a sampler and a DataLoader of a dataset."""
_ATTRIBUTE = "megaindex_balance"
_SINGLE = "MegatronPretrainingSampler"


@dataclass(frozen=True, kw_only=True)
class BalancedSteps:
    """Samples and step boundaries of a training sampler."""

    index: Index
    offset: int
    """Samples consumed in earlier phases of the run, which the sampler does not count."""

    def micro_batches(self, sampler: Any) -> Iterator[list[int]]:
        """Yield this rank's micro batches, of all whole rounds that the sampler has left."""
        stride = sampler.micro_batch_times_data_parallel_size
        ranks = RankLayout(
            micro_batch_size=sampler.micro_batch_size,
            data_parallel_rank=sampler.data_parallel_rank,
            data_parallel_size=stride // sampler.micro_batch_size,
        )
        first = sampler.consumed_samples
        while rounds := (sampler.total_samples - first) // stride:
            rows = min(rounds, self._micro_batches_at(first)) * stride
            check_sum(rows, self.index.sequence_length)
            step = Step(first=first, samples=rows, rows=rows)
            for batch in assign_by_work(step, ranks, self.index, sampler.total_samples):
                yield [position for position in batch if position is not None]
            first += rows

    def _micro_batches_at(self, consumed_samples: int) -> int:
        """Return the micro batches of a rank in the step that begins there."""
        # a copy, since loaders read ahead of the training whose state this is
        calculator = copy.copy(microbatch_calculator())
        calculator.update(consumed_samples + self.offset, False)
        count = int(calculator.get())
        if count < 1:
            raise InvalidArgument(
                f"balance: Megatron's calculator gives {count} micro batches after "
                f"{consumed_samples + self.offset} samples, at least 1 is needed; change the batch "
                "size or its schedule"
            )
        return count


def build_data_loader(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``build_pretraining_data_loader``, which skips and balances training data if `install`
    was called with ``skip`` or ``balance``."""

    @functools.wraps(original)
    def build(dataset: Any, consumed_samples: int, *args: Any, **kwargs: Any) -> Any:
        if dataset is not None and core().policy.skip and is_training(dataset):
            dataset = skipped(dataset, original)
        loader = original(dataset, consumed_samples, *args, **kwargs)
        sampler: Any = getattr(loader, "batch_sampler", None)
        if isinstance(dataset, SkippedDataset) and type(sampler).__name__ != _SINGLE:
            raise InvalidArgument(
                "skip needs --dataloader-type single, whose samples are served in order, got a "
                f"loader with {type(sampler).__name__}; use it, or install without skip"
            )
        balance = core().policy.balance
        if balance is None or loader is None or not is_training(dataset):
            return loader
        if type(sampler).__name__ != _SINGLE:
            raise InvalidArgument(
                "balance needs --dataloader-type single, whose samples are served in order, got a "
                f"loader with {type(sampler).__name__}; use it, or install without balance"
            )
        if not balance.attention:
            MEGATRON.leave_in_order()
            return loader
        steps = BalancedSteps(
            index=samples_index(dataset), offset=_earlier_phases(original, consumed_samples)
        )
        setattr(sampler, _ATTRIBUTE, steps)
        ranks = sampler.micro_batch_times_data_parallel_size // sampler.micro_batch_size
        MEGATRON.balance(sampler.total_samples, ranks, balance)
        return loader

    return build


def _earlier_phases(original: Callable[..., Any], consumed_samples: int) -> int:
    """Return the samples consumed before the current ``--phase-transition-iterations`` phase."""
    get_args = getattr(original, "__globals__", {}).get("get_args")
    args = None if get_args is None else get_args()
    return int(getattr(args, "consumed_train_samples", consumed_samples)) - consumed_samples


def is_training(dataset: Any) -> bool:
    """Return whether a dataset is of the training split."""
    split = getattr(dataset, "split", getattr(dataset, "index_split", None))
    return getattr(split, "name", "train") == "train"


def balanced_steps(sampler: Any) -> BalancedSteps | None:
    """Return the steps of a sampler that balances; None for another."""
    steps: BalancedSteps | None = getattr(sampler, _ATTRIBUTE, None)
    return steps
