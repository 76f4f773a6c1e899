"""Megatron's pretraining samplers, without a loop over the samples that other ranks read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MODULES = ("megatron.training.datasets.data_samplers", "megatron.legacy.data.data_samplers")


def iterate_single(self: Any) -> Iterator[list[int]]:
    """``MegatronPretrainingSampler.__iter__``: this rank's part of each round of micro batches."""
    stride = self.micro_batch_times_data_parallel_size
    begin, end = self.get_start_end_idx()
    whole = (self.total_samples - self.consumed_samples) // stride
    first = self.consumed_samples
    for start in range(first, first + whole * stride, stride):
        yield list(range(start + begin, start + end))
    start = first + whole * stride
    if start < self.total_samples and not self.drop_last:
        rest = range(start, self.total_samples)
        yield list(rest[begin:end])


def iterate_cyclic(self: Any) -> Iterator[list[int]]:
    """``MegatronPretrainingRandomSampler.__iter__``: one epoch, or what is left of it."""
    import torch

    stride, size = self.micro_batch_times_data_parallel_size, self.micro_batch_size
    epoch_samples = self.total_samples - self.last_batch_size
    self.epoch, done = divmod(self.consumed_samples, epoch_samples)
    assert done % stride == 0
    if hasattr(self.dataset, "set_epoch"):
        self.dataset.set_epoch(self.epoch)
    generator = torch.Generator()
    generator.manual_seed(self.epoch)
    if self.data_sharding:
        part = self.total_samples // stride * size
        order = torch.randperm(part, generator=generator).add_(self.data_parallel_rank * part)
        order = order[done // self.data_parallel_size :]
    else:
        part = self.total_samples // size * size
        order = torch.randperm(part, generator=generator)
        order = order[done:][self.data_parallel_rank :: self.data_parallel_size]
    for start in range(0, order.numel() - size + 1, size):
        self.consumed_samples += stride
        yield order[start : start + size].tolist()
