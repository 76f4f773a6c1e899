"""The samples of one batch as a list of dicts, and a collate function that finds the batch again.

``__getitems__`` reads a whole batch into one set of arrays. PyTorch's default collate function
would take its rows, four tensors a sample, and copy them together again. A `Samples` makes its rows
when they are first looked at, and `default_collate` returns the batch itself as long as nobody
changed them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

Batch = dict[str, Any]
_NUMBERS = ("dataset_id",)  # fields that a sample holds as a NumPy number, as in BlendedDataset


class Sample(dict[str, Any]):
    """One sample: a dict of its own type, by which PyTorch finds `collate_samples`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class Samples(list[Sample]):
    """A list of the samples of ``batch``, which are views of it.

    All that can be done with a list can be done with it.
    """

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.batch = batch
        """The fields, stacked."""
        self._is_filled = False
        self._first: Sample | None = None
        self._first_values: list[Any] = []

    @property
    def is_whole(self) -> bool:
        """Whether the samples are still those of the batch, as far as anyone could tell."""
        first = self._first
        return not self._is_filled and (
            first is None
            or (
                len(first) == len(self._first_values)
                and all(a is b for a, b in zip(first.values(), self._first_values, strict=True))
            )
        )

    def __len__(self) -> int:
        return super().__len__() if self._is_filled else len(self.batch["tokens"])

    def __getitem__(self, at: Any) -> Any:
        if self._is_filled or at != 0 or not len(self):
            self._fill()
            return super().__getitem__(at)
        if self._first is None:  # all that a collate function looks at
            row = [_first(name, field) for name, field in self.batch.items()]
            self._first_values = row
            self._first = Sample(zip(self.batch, row, strict=True))
        return self._first

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def _fill(self) -> None:
        if self._is_filled:
            return
        self._is_filled = True
        columns = [_values(name, field) for name, field in self.batch.items()]
        rows = [Sample(zip(self.batch, row, strict=True)) for row in zip(*columns, strict=True)]
        if self._first is not None:
            rows[0] = self._first
        super().extend(rows)


def _values(name: str, field: Any) -> Sequence[Any]:
    return list(field.numpy()) if name in _NUMBERS else field.unbind()


def _first(name: str, field: Any) -> Any:
    return field.numpy()[0] if name in _NUMBERS else field.select(0, 0)


def _after_filling(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Samples, *args: Any, **kwargs: Any) -> Any:
        for each in (self, *args):
            if isinstance(each, Samples):
                each._fill()
        return method(self, *args, **kwargs)

    return call


def _methods_that_look() -> Iterable[str]:
    """Methods of list that see its elements, and not through another method."""
    own = {"__new__", "__init__", "__getattribute__", "__class_getitem__", "__sizeof__"}
    return (name for name in vars(list) if name not in own | vars(Samples).keys())


for _name in list(_methods_that_look()):
    if callable(getattr(list, _name)):
        setattr(Samples, _name, _after_filling(getattr(list, _name)))


def collate_samples(samples: Sequence[Sample], *, collate_fn_map: Any = None) -> Batch:
    """The batch that samples were read as, without a copy; else what `default_collate` makes of
    dicts."""
    if isinstance(samples, Samples) and samples.is_whole:
        return samples.batch
    return {
        name: torch_collate([sample[name] for sample in samples], collate_fn_map=collate_fn_map)
        for name in samples[0]
    }


default_collate_fn_map[Sample] = collate_samples
