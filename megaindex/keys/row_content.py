"""Content of rows, without the pass that the key of a row holds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from megaindex._types import I64
from megaindex.errors import InvalidArgument
from megaindex.kernels.reference.row_keys import content_of
from megaindex.validation import shown

if TYPE_CHECKING:
    import torch


@overload
def content(
    key: torch.Tensor, exposure: torch.Tensor, key_high: torch.Tensor | None = None
) -> torch.Tensor: ...
@overload
def content(
    key: npt.ArrayLike, exposure: npt.ArrayLike, key_high: npt.ArrayLike | None = None
) -> I64: ...
def content(key: Any, exposure: Any, key_high: Any = None) -> Any:
    """Return the part of row keys that is the same in every pass, for joins over passes.

    Rows with the same tokens of the same source have the same content; another pass gives another
    key. Rows of padding have content 0.

    Args:
        key: int64[n], the field ``key``; arrays, numbers or tensors of any shape.
        exposure: int[n], the field ``exposure``.
        key_high: int64[n], the field ``key_high`` of ``SampleOptions(keys="wide")``, for contents
            of 128 bits.

    Returns:
        int64[n]; with ``key_high`` int64[n, 2], as `megaindex.keys.Store` takes them.

    Raises:
        InvalidArgument: a field does not hold integers, or fields are of other rows.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(key, torch.Tensor):
        given = {"key": key, "exposure": exposure, "key_high": key_high}
        for name, values in given.items():
            if values is not None and not isinstance(values, torch.Tensor):
                given[name] = torch.as_tensor(values, device=key.device)
            if values is not None and (given[name].is_floating_point() or given[name].is_complex()):
                raise InvalidArgument(
                    f"{name} must hold integers, as the field {name} of a batch, got "
                    f"{given[name].dtype}"
                )
        tensors = [each.to(torch.int64) for each in given.values() if each is not None]
        try:
            tensors = list(torch.broadcast_tensors(*tensors))
        except RuntimeError:
            raise _of_other_rows(tensors) from None
        low = _low(*tensors[:2])
        return low if key_high is None else torch.stack((low, tensors[2]), -1)
    rows = [_int64("key", key), _int64("exposure", exposure)]
    if key_high is not None:
        rows.append(_int64("key_high", key_high))
    try:
        rows = list(np.broadcast_arrays(*rows))
    except ValueError:
        raise _of_other_rows(rows) from None
    with np.errstate(over="ignore"):
        low = np.asarray(_low(*rows[:2]))
    return low if key_high is None else np.stack((low, rows[2]), -1)


def _of_other_rows(fields: Sequence[Any]) -> InvalidArgument:
    shapes = ", ".join(str(tuple(each.shape)) for each in fields)
    return InvalidArgument(
        f"key, exposure and key_high must be of the same rows, got shapes {shapes}"
    )


def _low(key: Any, exposure: Any) -> Any:
    return content_of(key, exposure) * (exposure >= 0)


def _int64(name: str, values: npt.ArrayLike) -> I64:
    given = np.asarray(values)
    given = given if given.size else given.astype(np.int64)  # an empty list is of float64
    if given.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{name} must hold integers, as the field {name} of a batch, got {given.dtype}: "
            f"{shown(values)}"
        )
    return given.astype(np.int64)  # unsigned ones wrap around
