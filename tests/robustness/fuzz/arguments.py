"""Arguments for the native core: arrays as they should be, and spoiled in every way."""

from __future__ import annotations

from typing import Any

import numpy as np
from choices import EXTREMES, Choices

_NUMBERS = (
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float32", "float64", "complex128", "bool"),
)
_OTHERS = ("U2", "M8[s]", "object", "i4,i4", ">i4")


def spoiled(choices: Choices, value: Any) -> Any:
    """Another dtype, shape, layout or kind of thing; for a number, an extreme."""
    if not isinstance(value, np.ndarray):
        return choices.one_of([*EXTREMES, None, 1.5, float("nan"), "x", [], np.int32(3)])
    wide = np.zeros(value.nbytes + 16, np.uint8)
    unaligned = wide[1 : 1 + value.nbytes].view(value.dtype).reshape(value.shape)
    unaligned[...] = value
    frozen = value.copy()
    frozen.flags.writeable = False
    return choices.one_of(
        [
            lambda: value.astype(choices.one_of(_NUMBERS)),
            lambda: np.zeros(value.shape, choices.one_of(_OTHERS)),
            lambda: np.repeat(value, 2, axis=0)[::2],
            lambda: value[::-1],
            lambda: np.asfortranarray(np.ones((3, 2)).astype(value.dtype)),
            lambda: value[:0],
            lambda: value[: max(0, len(value) - 1)] if value.ndim else value,
            lambda: value.reshape(-1),
            lambda: value[None],
            lambda: np.array(7, value.dtype),
            lambda: np.broadcast_to(np.zeros(1, value.dtype), value.shape),
            lambda: unaligned,
            lambda: frozen,
            value.tolist,
            lambda: memoryview(value),
            lambda: None,
        ]
    )()


def overlapping(choices: Choices, one: Any, other: Any) -> tuple[Any, Any]:
    """The same thing twice, or two arrays of which each holds bytes of the other."""
    plain = all(isinstance(a, np.ndarray) and not a.dtype.hasobject for a in (one, other))
    if not plain or choices.below(2):
        return other, other
    room = np.zeros(one.nbytes + other.nbytes + 64, np.uint8)
    at = 8 * choices.below(8)
    views = [
        room[begin : begin + a.nbytes].view(a.dtype).reshape(a.shape)
        for begin, a in ((0, one), (at, other))
    ]
    for view, values in zip(views, (one, other), strict=True):
        view[...] = values
    return views[0], views[1]


def array(choices: Choices, dtype: str, count: int, most: int = 9) -> np.ndarray:
    """Values 0 ... most; at times an extreme, wrapped into the dtype."""
    values = [choices.integer(most) for _ in range(count)]
    return np.array([v % 2**64 for v in values], np.uint64).astype(dtype)


def rising(choices: Choices, count: int, step: int = 4) -> np.ndarray:
    steps = [choices.integer(step) % 2**63 if k else 0 for k in range(count)]
    return np.cumsum(np.array(steps, np.int64))
