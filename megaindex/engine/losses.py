"""How often tasks may lose their workers, and what is said of it."""

from __future__ import annotations

import logging
from collections import Counter

from megaindex.errors import EngineError

logger = logging.getLogger("megaindex")

ATTEMPTS = 3
"""A task that was begun so often and lost its worker each time is not begun again."""


class Losses:
    """Counts the workers that each task lost."""

    def __init__(self) -> None:
        self._count: Counter[int] = Counter()

    def add(self, number: int, task: object, how: str) -> None:
        """Task ``number`` lost a worker, which ended as ``how`` says.

        Raises:
            EngineError: it was the last attempt.
        """
        self._count[number] += 1
        if self._count[number] == ATTEMPTS:
            raise EngineError(
                f"{task}: lost its worker {ATTEMPTS} times, the last one {how}; run it alone to "
                "see why, and with fewer workers if memory ran out"
            )
        logger.warning("%s: its worker was lost (%s); it is run again", task, how)
