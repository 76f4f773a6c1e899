"""Time that a training loop waited for its data, by steps."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from megaindex.validation import check_between

Batch = TypeVar("Batch")

WAIT_BOUNDS = (0.001, 0.01, 0.1, 1.0, 10.0)
"""Seconds between the classes of a histogram of waits; from the first on a step waited, since a
batch that is ready takes less to hand out."""


@dataclass
class Waits:
    """Seconds that a loop waited for its batches, and how many of its steps waited.

    A step is one optimizer update; its wait is the sum over its micro batches. The first batch of
    an iteration is counted apart, since none can be ready before it.

    Attributes:
        seconds: seconds waited, also in a step that is not complete; without ``start_seconds``.
        start_seconds: seconds waited for the first batch of each iteration.
        histogram: number of steps that waited less than 1 ms, 10 ms, 0.1 s, 1 s, 10 s, or longer.
    """

    seconds: float = 0.0
    start_seconds: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BOUNDS) + 1))

    @property
    def steps(self) -> int:
        """Number of steps all of whose batches were returned."""
        return sum(self.histogram)

    @property
    def steps_waited(self) -> int:
        """Number of those that waited a millisecond or longer."""
        return sum(self.histogram[1:])

    @property
    def share(self) -> float:
        """Share of the steps that waited, 0 to 1; 0.0 before the first."""
        return self.steps_waited / self.steps if self.steps else 0.0

    def take(self) -> Waits:
        """Return the sums, and begin new ones."""
        taken = replace(self)
        self.__init__()  # type: ignore[misc]
        return taken

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as JSON values."""
        derived = ("steps", "steps_waited", "share")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def timed(self, batches: Iterable[Batch], micro_batches_per_step: int = 1) -> Iterator[Batch]:
        """Iterate over the batches of another loader, and add the time of each.

        Args:
            batches: any loader, such as a DataLoader; its iteration begins here.
            micro_batches_per_step: batches of one optimizer update.

        Raises:
            InvalidArgument: ``micro_batches_per_step`` is below 1.
        """
        size = check_between("micro_batches_per_step", micro_batches_per_step, 1)
        return TimedBatches(iter(batches), self, lambda: size)

    def __str__(self) -> str:
        return (
            f"{self.steps_waited:,} of {self.steps:,} steps waited ({self.share:.1%}), "
            f"{self.seconds:.2f} s in all, and {self.start_seconds:.2f} s to start"
        )


class TimedBatches(Iterator[Batch]):
    """Iterator over batches that adds the time of each to `Waits`.

    Args:
        batches: iterator of them.
        waits: sums to add to.
        batches_left: function that returns the number of batches left of the step, this one
            included, called before the first batch of each step.
    """

    def __init__(
        self, batches: Iterator[Batch], waits: Waits, batches_left: Callable[[], int]
    ) -> None:
        self._batches, self._waits, self._batches_left = batches, waits, batches_left
        self._left, self._of_step, self._is_first = 0, 0.0, True

    def __next__(self) -> Batch:
        if self._left == 0:
            self._left, self._of_step = max(1, self._batches_left()), 0.0
        begin = time.perf_counter()
        batch = next(self._batches)
        seconds = time.perf_counter() - begin
        waits = self._waits
        if self._is_first:
            self._is_first = False
            waits.start_seconds += seconds
        else:
            self._of_step += seconds
            waits.seconds += seconds
        self._left -= 1
        if self._left == 0:
            waits.histogram[bisect_right(WAIT_BOUNDS, self._of_step)] += 1
        return batch
