"""`Waits`: seconds and steps in which a loop waited for its batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.corpora import write_corpus

pytest.importorskip("torch")
import torch

from megaindex import build_index
from megaindex.errors import InvalidArgument
from megaindex.loader import Loader, MicroBatchSampler, Waits, waits


class Clock:
    """A clock that batches move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now

    def batches(self, *seconds: float) -> Iterator[int]:
        for number, each in enumerate(seconds):
            self.now += each
            yield number


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(waits.time, "perf_counter", made.read)
    return made


def test_the_wait_of_a_step_is_that_of_its_micro_batches(clock: Clock) -> None:
    found = Waits()
    batches = clock.batches(5, 0.0625, 0, 0, 0.03125, 0.03125, 2)
    assert list(found.timed(batches, 2)) == list(range(7))
    assert (found.steps, found.steps_waited) == (3, 2)  # the last step is not complete
    assert (found.start_seconds, found.seconds) == (5, 2.125)
    assert found.histogram == [1, 0, 2, 0, 0, 0]
    assert found.share == pytest.approx(2 / 3)


@pytest.mark.parametrize("number", range(len(waits.WAIT_BOUNDS)))
def test_both_sides_of_each_bound(clock: Clock, number: int) -> None:
    bound = waits.WAIT_BOUNDS[number]
    for seconds, place in ((np.nextafter(bound, 0), number), (bound, number + 1)):
        clock.now = 0.0
        found = Waits()
        for _ in found.timed(clock.batches(0)):  # the first of an iteration is no wait of a step
            pass
        found = Waits()
        timed = waits.TimedBatches(clock.batches(0, seconds), found, lambda: 1)
        list(timed)
        assert found.histogram[place] == 1 + (place == 0)
        assert found.steps_waited == (seconds >= waits.WAIT_BOUNDS[0])


def test_sums_are_taken(clock: Clock) -> None:
    found = Waits()
    list(found.timed(clock.batches(1, 1)))
    taken = found.take()
    assert (taken.steps, taken.seconds, taken.share) == (2, 1, 0.5)
    assert found == Waits()
    assert (Waits().share, Waits().to_dict()["histogram"]) == (0.0, [0] * 6)
    assert taken.to_dict()["share"] == 0.5
    assert "1 of 2 steps waited (50.0%), 1.00 s" in str(taken)
    with pytest.raises(InvalidArgument, match="micro_batches_per_step"):
        found.timed([], 0)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Loader]:
    prefix = tmp_path_factory.mktemp("waits") / "c"
    write_corpus(prefix, np.random.default_rng(0).integers(5, 60, 100).tolist())
    index = build_index(prefix, sequence_length=16, order="epoch", epochs=1)

    def loader(read_ahead: int = 2, **settings: int) -> Loader:
        given = {"micro_batch_size": 2, "data_parallel_size": 2, "global_batch_size": 12}
        sampler = MicroBatchSampler(num_samples=96, data_parallel_rank=0, **{**given, **settings})
        return Loader(index, sampler, read_ahead=read_ahead)

    return loader


@pytest.mark.parametrize("read_ahead", [0, 2])
def test_a_loader_counts_its_steps(make: Callable[..., Loader], read_ahead: int) -> None:
    loader = make(read_ahead)
    first = next(iter(loader))
    assert set(first) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert loader.wait.steps == 0
    for _ in loader:
        pass
    # what is left of the step whose first batch was taken counts as a step
    assert loader.wait.steps == sum(loader.wait.histogram) == 8
    assert loader.wait.start_seconds > 0
    plain = Loader(loader.index, [[0, 1], [2, 3]])
    assert len(list(plain)) == plain.wait.steps == 2


def test_a_resumed_loader_counts_the_rest_of_its_step(make: Callable[..., Loader]) -> None:
    before = make()
    for _ in itertools.islice(before, 4):  # the first of the second step
        pass
    assert before.wait.steps == 1
    for size, left in ((1, 4), (2, 2)):
        after = make(micro_batch_size=size)
        after.load_state_dict(before.state_dict())
        assert after.wait == Waits()
        assert after.sampler.batches_left_of_step(0) == left
        batches = iter(after)
        for _ in range(left - 1):
            next(batches)
        assert after.wait.steps == 0
        next(batches)
        assert after.wait.steps == 1


def test_a_data_loader_is_timed() -> None:
    found = Waits()
    loader = torch.utils.data.DataLoader(list(range(12)), batch_size=2)  # type: ignore[arg-type]
    assert len(list(found.timed(loader, 3))) == 6
    assert found.steps == 2
