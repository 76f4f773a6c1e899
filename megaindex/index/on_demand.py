"""What is opened only when it is first needed: indices, and the kernels' tables of them.

A blend of thousands of sources is ready at once; a batch opens the few that it reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from megaindex.errors import StorageError
from megaindex.index.spans import Index, Spans
from megaindex.kernels.types import I32, IntArray

Entry = TypeVar("Entry")


@dataclass(frozen=True, kw_only=True, eq=False)
class LaterIndex:
    """An index of which the sizes are known, opened when its samples are first located."""

    name: str
    """For messages."""
    num_samples: int
    num_epochs: int
    tokens_per_epoch: int
    sequence_length: int
    add_extra_token: int
    has_arrays: bool
    """Whether it is an ArrayIndex."""
    open: Callable[[], Index]
    """Opens it; must pickle for the index to."""

    @cached_property
    def index(self) -> Index:
        """The index itself.

        Raises:
            StorageError: it is not of the size that was known.
        """
        index = self.open()
        if index.num_samples != self.num_samples:
            raise StorageError(
                f"{self.name}: its index holds {index.num_samples} samples, it held "
                f"{self.num_samples} when the blend was built; build the blend anew"
            )
        return index

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        return self.index.locate(sample_ids)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "index"}


class Tables(Generic[Entry]):
    """A kernel's table of the sources that were needed so far. Safe to share between threads.

    Args:
        count: sources in all.
        entry: what the table holds of a source; opens it if need be.
        build: makes a table of entries.
    """

    def __init__(
        self,
        count: int,
        entry: Callable[[int], Entry],
        build: Callable[[Sequence[Entry]], Any],
        *,
        ready: bool,
    ) -> None:
        self._entry = entry
        self._build = build
        self._lock = threading.Lock()
        self._entries = [entry(number) for number in range(count)] if ready else []
        # for each source its place in the table, -1 where it has none yet; None where all have
        # their own number
        slots = None if ready else np.full(count, -1, np.int32)
        self._state: tuple[Any, I32 | None] = (build(self._entries), slots)

    def holding(self, sources: IntArray) -> tuple[Any, I32 | None]:
        """A table that holds these sources, and the place of each; None where it is its number.

        Numbers that are no source's stay as they are, for the kernel to refuse.
        """
        table, slots = self._state
        if slots is None:
            return table, None
        known = (sources >= 0) & (sources < slots.size)
        if not known.all():
            return table, np.where(known, -1, sources).astype(np.int32)
        if (slots[sources] < 0).any():
            table, slots = self._grown(np.unique(sources).tolist())
        return table, None if slots is None else slots[sources]

    def _grown(self, sources: Sequence[int]) -> tuple[Any, I32 | None]:
        with self._lock:
            table, slots = self._state
            if slots is None:  # another thread has added the last ones
                return table, None
            missing = [source for source in sources if slots[source] < 0]
            if missing:
                slots = slots.copy()  # others may be reading the old ones
                for source in missing:
                    self._entries.append(self._entry(source))
                    slots[source] = len(self._entries) - 1
                if len(self._entries) == slots.size:  # all: each under its own number from now on
                    self._entries = [self._entries[slot] for slot in slots.tolist()]
                    slots = None
                table = self._build(self._entries)
                self._state = table, slots
        return table, slots
