"""Samplers under the DataLoaders of torch and torchdata, which read ahead."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.loader import CyclicSampler, MicroBatchSampler

torch = pytest.importorskip("torch")

# torchdata 0.11 calls what torch 2.13 warns about
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.usefixtures("short_waits"),
]
KINDS = {"single": MicroBatchSampler, "cyclic": CyclicSampler}


def sampler(kind: str = "single", rank: int = 0, **changes: Any) -> Any:
    settings = {
        "num_samples": 100, "train_samples": 96, "micro_batch_size": 2, "data_parallel_rank": rank,
        "data_parallel_size": 2, "fingerprint": "order 1",
    }  # fmt: skip
    return KINDS[kind](**{**settings, **changes})


class Rows(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
    """Gives back what it is asked for."""

    def __getitem__(self, row: int | None) -> int | None:
        return row

    def __getitems__(self, rows: list[int | None]) -> list[int | None]:
        return rows


def loader(cls: Any, batches: Any, workers: int, **more: Any) -> Any:
    return cls(Rows(), batch_sampler=batches, num_workers=workers, collate_fn=list, **more)


@pytest.fixture(scope="module")
def stateful_loader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_prefetching_dataloader_continues_after_the_last_batch(workers: int) -> None:
    settings = {"global_batch_size": 12, "tail": "pad", "train_samples": 61}
    whole = list(sampler(**settings))
    for handed in (7, len(whole)) if workers else (0, 1, 7, len(whole)):
        running = sampler(**settings)
        batches = iter(loader(torch.utils.data.DataLoader, running, workers))
        assert list(itertools.islice(batches, handed)) == whole[:handed]
        resumed = sampler(**settings)
        resumed.load_state_dict(running.state_after(handed))
        assert list(loader(torch.utils.data.DataLoader, resumed, workers)) == whole[handed:]


@pytest.mark.slow
@for_each("workers", [0, 2])
@for_each(("kind", "every"), [("single", 1), ("single", 3), ("cyclic", 1)])
def test_a_stateful_dataloader_goes_on_exactly(
    stateful_loader: Any, workers: int, kind: str, every: int
) -> None:
    settings = {"train_samples": 96 if kind == "single" else 160}
    whole = list(sampler(kind, **settings))
    for handed in (8, len(whole)) if workers else (0, 1, 8, 23, len(whole)):
        first = loader(
            stateful_loader, sampler(kind, **settings), workers, snapshot_every_n_steps=every
        )
        batches = iter(first)
        assert list(itertools.islice(batches, handed)) == whole[:handed]
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second = loader(
            stateful_loader, sampler(kind, **settings), workers, snapshot_every_n_steps=every
        )
        second.load_state_dict(torch.load(file, weights_only=True))
        assert list(second) == whole[handed:]


def test_a_stateful_dataloader_goes_on_with_other_ranks(stateful_loader: Any) -> None:
    first = loader(stateful_loader, sampler(rank=1), 2)
    assert len(list(itertools.islice(first, 6))) == 6
    served: list[int] = []
    for rank in range(3):
        batches = sampler(rank=rank, data_parallel_size=3, micro_batch_size=4)
        second = loader(stateful_loader, batches, 2)
        second.load_state_dict(first.state_dict())
        served += itertools.chain.from_iterable(second)
    assert sorted(served) == list(range(24, 96))


@pytest.mark.slow
def test_other_workers_go_on_from_the_samplers_own_state(stateful_loader: Any) -> None:
    """A StatefulDataLoader takes back its state with the same number of workers only."""
    running = sampler()
    first = loader(stateful_loader, running, 2)
    assert len(list(itertools.islice(first, 6))) == 6
    with pytest.raises(AssertionError):
        iter(_loaded(loader(stateful_loader, sampler(), 1), first.state_dict()))
    resumed = sampler()
    resumed.load_state_dict(running.state_after(6))
    assert list(loader(stateful_loader, resumed, 0)) == list(sampler())[6:]


def _loaded(stateful: Any, state: Any) -> Any:
    stateful.load_state_dict(state)
    return stateful


def test_a_stateful_dataloader_refuses_another_order(stateful_loader: Any) -> None:
    first = loader(stateful_loader, sampler(), 0)
    next(iter(first))
    other = _loaded(loader(stateful_loader, sampler(fingerprint="order 2"), 0), first.state_dict())
    with pytest.raises(InvalidArgument, match="order must be 'order 1'"):
        iter(other)
