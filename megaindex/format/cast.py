"""Accept tokens as callers have them, and refuse what a token type cannot hold: never wrap."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument

CHUNK = 1 << 18  # tokens looked at or converted at once: temporaries stay small


def token_array(tokens: npt.ArrayLike, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """`tokens` as a one-dimensional array in its own type, every value of which `dtype` can hold.

    Raises:
        InvalidArgument: not one-dimensional, not numbers, or a value does not fit.
    """
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"tokens: cannot become an array: {error}; pass numbers") from error
    if array.ndim != 1:
        raise InvalidArgument(
            f"tokens: must be one-dimensional, and has shape {array.shape}; flatten it"
        )
    if array.dtype == dtype or array.size == 0:
        return array
    if array.dtype.kind not in "iuf":
        raise InvalidArgument(
            f"tokens: must be numbers that fit {dtype}, and are {array.dtype}; convert them first"
        )
    for start in range(0, array.size, CHUNK):
        chunk = array[start : start + CHUNK]
        misfit = _first_misfit(chunk, dtype)
        if misfit is not None:
            raise InvalidArgument(
                f"tokens[{start + misfit}]={chunk[misfit]}: does not fit {dtype}, which holds "
                f"{_range_of(dtype)}; choose a wider dtype for the writer"
            )
    return array


def integer_array(values: npt.ArrayLike, name: str, lowest: int, highest: int) -> npt.NDArray[Any]:
    """`values` as int64[k], each in lowest..highest; InvalidArgument otherwise."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{name}: cannot become an array: {error}; pass integers") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"{name}: must be a list of integers, and has shape {array.shape}, type {array.dtype}"
        )
    if array.size and (array.min() < lowest or array.max() > highest):
        i = int(np.flatnonzero((array < lowest) | (array > highest))[0])
        raise InvalidArgument(
            f"{name}[{i}]={array[i]}: must be in {lowest}..{highest}; the format has no room for "
            f"more"
        )
    return array.astype(np.int64, copy=False)


def _first_misfit(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> int | None:
    """Position of the first value `dtype` cannot hold; `values` is not empty."""
    if dtype.kind == "f":
        bad = _misfits_float(values, dtype)
    elif values.dtype.kind == "f":
        bad = _misfits_integer(values, dtype)
    else:
        lowest, highest = _integer_limits(dtype)
        if lowest <= int(values.min()) and int(values.max()) <= highest:
            return None
        # Python integers: uint64 and int64 have no common type in which to compare.
        return next(i for i, v in enumerate(values.tolist()) if not lowest <= v <= highest)
    return int(bad.argmax()) if bad.any() else None


def _misfits_float(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    bad: npt.NDArray[np.bool_]
    if values.dtype.kind == "f":  # rounding is what floats do; becoming infinite is not
        with np.errstate(over="ignore"):
            bad = np.isfinite(values) & ~np.isfinite(values.astype(dtype))
        return bad
    # Integers are token ids and must stay exact: float32 does so up to 2^24, float64 up to 2^53.
    limit = 2 ** (np.finfo(dtype).nmant + 1)
    bad = values > limit
    if values.dtype.kind == "i":
        bad |= values < -limit
    return bad


def _misfits_integer(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    """Floats for an integer type: whole numbers within its range fit; NaN fits nowhere."""
    lowest, highest = _integer_limits(dtype)
    wide = values.astype(np.float64)
    above = float(highest + 1)  # a power of two, exact; float(highest) would round up to it
    bad: npt.NDArray[np.bool_] = np.trunc(wide) != wide
    bad |= ~((wide >= float(lowest)) & (wide < above))
    return bad


def _range_of(dtype: np.dtype[Any]) -> str:
    if dtype.kind == "f":
        exact = np.finfo(dtype).nmant + 1
        return f"integers up to 2^{exact} and fractions up to {np.finfo(dtype).max}"
    lowest, highest = _integer_limits(dtype)
    return f"{lowest}..{highest}"


@functools.cache
def _integer_limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    """np.iinfo, which costs more than checking a short document."""
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)
