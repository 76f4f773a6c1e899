"""Rows of the micro batches of a framework's training loader, by the ids that its sampler draws.

Megatron and GPT-NeoX send named fields of a batch from one rank to others and drop the rest, so the
batches stay as they are: rows are computed where a process asks for those of its micro batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megaindex._types import I64
from megaindex.adapters.reports import wrap_iterations
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.spans import Index
from megaindex.loader.row_fields import RowFields, check_keys

if TYPE_CHECKING:
    import torch


_MOST_RETURNED = 1 << 16  # micro batches of one step


class LoaderRows:
    """Rows of a DataLoader of torch, whose class and that of its batch sampler become subclasses.

    Args:
        loader: the loader of the training data.
        open_index: function that returns the index and its datasets, called for the first rows.
        first_id: function that returns the first sample id of the iteration that begins.
        first_position: position in the run of the first sample of the first iteration.
        rows_per_round: rows of a micro batch of all ranks together.
        positions: function of sample ids that returns those in the index.
        wide: add ``key_high``.
    """

    def __init__(
        self,
        loader: Any,
        open_index: Callable[[], tuple[Index, Sequence[IndexedDataset]]],
        *,
        first_id: Callable[[], int],
        first_position: int,
        rows_per_round: int,
        positions: Callable[[I64], I64] | None = None,
        wide: bool = False,
    ) -> None:
        self._open_index, self._first_id = open_index, first_id
        self._next_position, self._size = first_position, rows_per_round
        self._positions, self._wide = positions, wide
        self._drawn: deque[tuple[int, list[int]]] = deque()
        self._now: tuple[int, list[int]] | None = None
        self._returned: dict[int, tuple[int, list[int]]] = {}  # by the identity of the batch
        self._fields: tuple[RowFields, int] | None = None
        wrap_iterations(loader.batch_sampler, self._record)
        wrap_iterations(loader, self._follow)

    def _record(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the ids of a sampler's iteration, and keep them with their shift to positions."""
        self._drawn.clear()
        begin, shift = self._next_position, self._next_position - self._first_id()
        for number, ids in enumerate(batches, 1):
            self._next_position = begin + number * self._size
            self._drawn.append((shift, list(ids)))
            yield ids

    def _follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        return _Followed(batches, self._begin)

    def _begin(self, batch: object) -> None:
        self._now = self._drawn.popleft()
        if len(self._returned) >= _MOST_RETURNED:
            del self._returned[next(iter(self._returned))]
        self._returned.pop(id(batch), None)
        self._returned[id(batch)] = self._now

    def forget(self) -> None:
        """Take micro batches returned before as unknown."""
        self._now = None
        self._returned.clear()

    def replay(self, batch: object) -> None:
        """Take a micro batch, which was returned before and kept since, as that returned last."""
        self._now = self._returned.get(id(batch))

    def rows(self) -> dict[str, torch.Tensor]:
        """Return the rows of the micro batch that was returned last, on the CPU.

        Raises:
            InvalidArgument: no micro batch was returned, or one of a checkpoint.
        """
        import torch

        if self._now is None:
            raise _no_rows()
        if self._fields is None:
            index, datasets = self._open_index()
            self._fields = RowFields(index, datasets), index.sequence_length
        fields, width = self._fields
        shift, ids = self._now
        own = np.array(ids, np.int64)
        served = own if self._positions is None else self._positions(own)
        arrays = fields.rows(served.tolist(), width, wide=self._wide)
        if shift:
            arrays["sample"] += shift
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def rows_of(rows: LoaderRows | None) -> dict[str, torch.Tensor]:
    """Return the rows of the current micro batch of a process.

    Raises:
        InvalidArgument: the process reads no training data, or without keys.
    """
    if rows is None:
        raise _no_rows()
    return rows.rows()


def check_install(keys: object, *, exact: bool, amend: object) -> None:
    """Check the setting ``keys`` of `install`.

    Raises:
        InvalidArgument: it is unknown, or its rows would not be those of the run.
    """
    check_keys(keys)
    for name, given in (("amend", amend is not None), ("exact=True", exact)):
        if keys and given:
            raise InvalidArgument(
                f"keys and {name} exclude each other: the framework's arrays do not say which pass "
                "of a source a sample belongs to; leave one of them out"
            )


def _no_rows() -> InvalidArgument:
    return InvalidArgument(
        "rows need install(keys=True) before the loaders are made, and a micro batch that this "
        "process has read; other tensor-parallel ranks and inner pipeline stages read none"
    )


class _Followed(Iterator[Any]):
    """Iterator that calls a function with each of its values."""

    def __init__(self, values: Iterator[Any], taken: Callable[[Any], None]) -> None:
        self._values, self._taken = values, taken

    def __next__(self) -> Any:
        value = next(self._values)
        self._taken(value)
        return value
