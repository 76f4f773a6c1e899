"""A module in the place of Megatron's data loaders, its samplers, and its training data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.megatron_dataset import megatron_dataset

import megaindex.adapters.megatron as adapter
from megaindex.adapters.megatron.patches import SAMPLER_MODULES


class MegatronPretrainingSampler:
    """The attributes and the loop of Megatron's sampler."""

    def __init__(self, total: int, consumed: int, micro: int, rank: int, size: int) -> None:
        self.total_samples = total
        self.consumed_samples = consumed
        self.micro_batch_size = micro
        self.data_parallel_rank = rank
        self.micro_batch_times_data_parallel_size = micro * size
        self.drop_last = True

    def get_start_end_idx(self) -> tuple[int, int]:
        begin = self.data_parallel_rank * self.micro_batch_size
        return begin, begin + self.micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for sample in range(self.consumed_samples, self.total_samples):
            batch.append(sample)
            if len(batch) == self.micro_batch_times_data_parallel_size:
                begin, end = self.get_start_end_idx()
                yield batch[begin:end]
                batch = []


class MegatronPretrainingRandomSampler(MegatronPretrainingSampler):
    pass


@pytest.fixture
def training(megatron_datasets: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module in the place of Megatron's, whose loaders are those of the rank in ``args``."""
    from megatron.core import num_microbatches_calculator as calculators

    args = SimpleNamespace(micro=1, rank=0, size=1, cls=MegatronPretrainingSampler)
    module: Any = ModuleType(SAMPLER_MODULES[0])
    module.args, module.calculators, module.core = args, calculators, megatron_datasets
    module.MegatronPretrainingSampler = MegatronPretrainingSampler
    module.get_args = lambda: args
    source = (
        "def build_pretraining_data_loader(dataset, consumed_samples):\n"
        "    if dataset is None:\n"
        "        return None\n"
        "    made = args.cls(len(dataset), consumed_samples, args.micro, args.rank, args.size)\n"
        "    return SimpleNamespace(dataset=dataset, batch_sampler=made)\n"
    )
    module.SimpleNamespace = SimpleNamespace
    exec(source, vars(module))
    importer: Any = ModuleType("megatron.training.training_stand_in")
    importer.build_pretraining_data_loader = module.build_pretraining_data_loader
    monkeypatch.setitem(sys.modules, SAMPLER_MODULES[0], module)
    monkeypatch.setitem(sys.modules, importer.__name__, importer)
    module.importer = importer
    yield module
    adapter.uninstall()
    calculators.destroy_num_microbatches_calculator()


def start(training: Any, batch: int, ramp: list[int] | str | None = None, **more: Any) -> None:
    """Megatron's calculator for the ranks in ``args``. A ``ramp`` is that of --rampup-batch-size,
    or the text of --step-batch-size-schedule; the test is skipped if the release lacks it."""
    kind = "Step" if isinstance(ramp, str) else "Rampup"
    if ramp and not hasattr(training.calculators, f"{kind}BatchsizeNumMicroBatchesCalculator"):
        pytest.skip(f"this release has no {kind} schedule")
    if isinstance(ramp, str):
        ramp, more = None, {**more, "step_batch_size_schedule": ramp}
    training.calculators.destroy_num_microbatches_calculator()
    training.calculators.init_num_microbatches_calculator(
        1, ramp, batch, training.args.micro, training.args.size, **more
    )


def ranks(training: Any, dataset: Any, consumed: int = 0) -> list[list[list[int]]]:
    """The micro batches of all ranks, side by side."""
    found = []
    for rank in range(training.args.size):
        training.args.rank = rank
        loader = training.importer.build_pretraining_data_loader(dataset, consumed)
        found.append(list(loader.batch_sampler))
    return [list(each) for each in zip(*found, strict=True)]


def dataset_of(training: Any, folder: Path, documents: int = 80, **config: Any) -> Any:
    lengths = np.random.default_rng(4).integers(1, 40, documents)
    write_corpus(folder / "c", lengths)
    return megatron_dataset(
        training.core, str(folder / "c"), num_samples=100, sequence_length=16, seed=3, **config
    )
