"""One world and one random operation after another."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from robustness.soak.operations import OPERATIONS, write
from robustness.soak.world import World


def soak(
    folder: Path, seed: int, *, seconds: float | None = None, operations: int | None = None
) -> Counter[str]:
    """Until so much time has passed, or after so many operations; counts what was done.

    Raises:
        AssertionError: megaindex and the model differ; the message says after what.
    """
    world = World(folder, seed)
    done: list[str] = []
    end = None if seconds is None else time.monotonic() + seconds
    while (end is None or time.monotonic() < end) and len(done) != operations:
        choice = world.random.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
        operation = choice if world.known else write
        done.append(operation.__name__)
        try:
            operation(world)
        except Exception as error:
            raise AssertionError(
                f"seed {seed}, operation {len(done)}, after {done[-12:]}: {error!r}"
            ) from error
        world.counts[operation.__name__] += 1
        world.counts["operations"] += 1
    return world.counts
