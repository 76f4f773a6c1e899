"""Conversion of tokens and lengths to arrays, with values that do not fit refused, not wrapped."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument

CHUNK = 1 << 18  # tokens checked or converted at once, which bounds temporaries


def token_array(tokens: npt.ArrayLike, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return `tokens` as a one-dimensional array of its own dtype, whose values all fit `dtype`.

    Raises:
        InvalidArgument: not one-dimensional, not numbers, or a value does not fit.
    """
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"tokens must be an array of numbers: {error}") from error
    if array.ndim != 1:
        raise InvalidArgument(
            f"tokens must be one-dimensional, got shape {array.shape}; flatten them"
        )
    if array.dtype == dtype or array.size == 0:
        return array
    if array.dtype.kind not in "iuf":
        raise InvalidArgument(
            f"tokens must be numbers that fit {dtype}, got {array.dtype}; convert them first"
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
    """Return `values` as int64[k], each in lowest..highest; InvalidArgument otherwise."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{name} must be a list of integers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"{name} must be a list of integers, got shape {array.shape}, dtype {array.dtype}"
        )
    if array.size and (array.min() < lowest or array.max() > highest):
        i = int(np.flatnonzero((array < lowest) | (array > highest))[0])
        raise InvalidArgument(
            f"{name}[{i}] must be from {lowest} to {highest}, the range of the format, got "
            f"{array[i]}"
        )
    return array.astype(np.int64, copy=False)


def _first_misfit(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> int | None:
    """Return the index of the first value that does not fit `dtype`; `values` is not empty."""
    if dtype.kind == "f":
        bad = _misfits_float(values, dtype)
    elif values.dtype.kind == "f":
        bad = _misfits_integer(values, dtype)
    else:
        lowest, highest = _integer_limits(dtype)
        if lowest <= int(values.min()) and int(values.max()) <= highest:
            return None
        # Python integers, since uint64 and int64 have no common dtype in which to compare.
        return next(i for i, v in enumerate(values.tolist()) if not lowest <= v <= highest)
    return int(bad.argmax()) if bad.any() else None


def _misfits_float(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    bad: npt.NDArray[np.bool_]
    if values.dtype.kind == "f":  # rounding is accepted, overflow to infinity is not
        with np.errstate(over="ignore"):
            bad = np.isfinite(values) & ~np.isfinite(values.astype(dtype))
        return bad
    # Integers are token ids and must stay exact: in float32 up to 2^24, in float64 up to 2^53.
    limit = 2 ** (np.finfo(dtype).nmant + 1)
    bad = values > limit
    if values.dtype.kind == "i":
        bad |= values < -limit
    return bad


def _misfits_integer(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the floats that are not integers in the range of `dtype`."""
    lowest, highest = _integer_limits(dtype)
    wide = values.astype(np.float64)
    above = float(highest + 1)  # a power of two, exact; float(highest) may round up to it
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
    """Return the cached limits: np.iinfo takes longer than the check of a short document."""
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)
