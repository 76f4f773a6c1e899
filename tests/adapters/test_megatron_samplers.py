"""Megatron's pretraining samplers, against the plain loops they stand for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megaindex.adapters.megatron as adapter
from megaindex.adapters.megatron.patches import SAMPLER_MODULES, iterate_cyclic, iterate_single


class Dataset:
    epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def sampler(total: int, consumed: int, micro: int, rank: int, size: int, **more: Any) -> Any:
    """An object with the attributes of Megatron's samplers."""
    return SimpleNamespace(
        dataset=Dataset(),
        total_samples=total,
        consumed_samples=consumed,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=size,
        micro_batch_times_data_parallel_size=micro * size,
        last_batch_size=total % (micro * size),
        get_start_end_idx=lambda: (rank * micro, (rank + 1) * micro),
        **more,
    )


def single(s: Any) -> Iterator[list[int]]:
    """Round by round: every sample goes into a round, of which each rank takes its part."""
    round_: list[int] = []
    begin, end = s.get_start_end_idx()
    for sample in range(s.consumed_samples, s.total_samples):
        round_.append(sample)
        if len(round_) == s.micro_batch_times_data_parallel_size:
            yield round_[begin:end]
            round_ = []
    if round_ and not s.drop_last:
        yield round_[begin:end]


@given(
    total=st.integers(1, 200),
    consumed=st.integers(0, 199),
    micro=st.integers(1, 7),
    size=st.integers(1, 5),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_single(
    total: int, consumed: int, micro: int, size: int, drop_last: bool, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    s = sampler(total, min(consumed, total - 1), micro, rank, size, drop_last=drop_last)
    assert list(iterate_single(s)) == list(single(s))


def cyclic(s: Any) -> Iterator[tuple[list[int], int]]:
    """One epoch: micro batches, and the samples consumed after each."""
    import torch

    whole = s.total_samples - s.last_batch_size
    epoch, consumed = divmod(s.consumed_samples, whole)
    generator = torch.Generator()
    generator.manual_seed(epoch)
    if s.data_sharding:
        part = whole // s.data_parallel_size
        order = torch.randperm(part, generator=generator).tolist()
        order = [s.data_parallel_rank * part + i for i in order[consumed // s.data_parallel_size :]]
    else:
        part = s.total_samples // s.micro_batch_size * s.micro_batch_size
        order = torch.randperm(part, generator=generator).tolist()[consumed:]
        order = order[s.data_parallel_rank :: s.data_parallel_size]
    batch: list[int] = []
    for sample in order:
        batch.append(sample)
        if len(batch) == s.micro_batch_size:
            yield batch, batch and s.micro_batch_times_data_parallel_size
            batch = []


@given(
    rounds=st.integers(1, 12),
    over=st.integers(0, 30),
    done=st.integers(0, 30),
    micro=st.integers(1, 5),
    size=st.integers(1, 4),
    sharding=st.booleans(),
    data=st.data(),
)
def test_cyclic(
    megatron_datasets: Any,
    rounds: int,
    over: int,
    done: int,
    micro: int,
    size: int,
    sharding: bool,
    data: st.DataObject,
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    stride = micro * size
    s = sampler(rounds * stride + over % stride, done * stride, micro, rank, size)
    s.data_sharding = sharding
    expected = list(cyclic(s))
    consumed = s.consumed_samples
    for batch, (theirs, step) in zip(iterate_cyclic(s), expected, strict=True):
        consumed += step
        assert batch == theirs
        assert s.consumed_samples == consumed
    assert s.dataset.epoch == s.epoch == done // rounds


@pytest.mark.parametrize("already", [True, False])
def test_samplers_are_patched_when_they_are_imported(
    megatron_datasets: Any, monkeypatch: pytest.MonkeyPatch, already: bool
) -> None:
    module = ModuleType(SAMPLER_MODULES[0])
    module.MegatronPretrainingSampler = type("Sampler", (), {"__iter__": single})  # type: ignore[attr-defined]
    if already:
        monkeypatch.setitem(sys.modules, SAMPLER_MODULES[0], module)
    finders = list(sys.meta_path)
    adapter.install()
    try:
        patched = module.MegatronPretrainingSampler.__iter__ is iterate_single  # type: ignore[attr-defined]
        assert patched == already
    finally:
        adapter.uninstall()
    assert module.MegatronPretrainingSampler.__iter__ is single  # type: ignore[attr-defined]
    assert sys.meta_path == finders
