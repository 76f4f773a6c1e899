"""Which number stands for which token type in the header of an .idx: one table per dialect.

The frameworks agree on 1–5 and 8. GPT-NeoX has 6 and 7 the other way round than everyone else, and
PaddleNLP adds 9 and 10. Nothing in a file says who wrote it, so the caller names the dialect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument
from megaindex.format.faults import Fault

_SHARED = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one family of frameworks writes .bin/.idx pairs."""

    name: str
    dtypes: Mapping[int, np.dtype[Any]]
    """Token type of each code."""
    bounds_may_stop_short: bool = False
    """GPT-NeoX's merge tool copies sequences but not document bounds, and its training reads only
    sequences: its merged files end with bounds that do not reach the last sequence."""


def _dialect(name: str, own: Mapping[int, str], *, bounds_may_stop_short: bool = False) -> Dialect:
    names = {**_SHARED, **own}
    dtypes = {code: np.dtype(names[code]) for code in sorted(names)}
    return Dialect(name=name, dtypes=dtypes, bounds_may_stop_short=bounds_may_stop_short)


DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        _dialect("megatron", {6: "float64", 7: "float32"}),
        _dialect("neox", {6: "float32", 7: "float64"}, bounds_may_stop_short=True),
        _dialect("paddlenlp", {6: "float64", 7: "float32", 9: "uint32", 10: "uint64"}),
    )
}


def get_dialect(name: str) -> Dialect:
    """The dialect called `name`; InvalidArgument if there is none."""
    if name not in DIALECTS:
        raise InvalidArgument(f"dialect={name!r}: unknown; choose one of {', '.join(DIALECTS)}")
    return DIALECTS[name]


def dtype_of_code(code: int, dialect: Dialect, idx_path: str) -> np.dtype[Any]:
    """The token type that `code` in the header of `idx_path` means in `dialect`."""
    fault = code_fault(code, dialect)
    if fault is not None:
        raise fault.error(idx_path)
    return dialect.dtypes[code]


def code_fault(code: int, dialect: Dialect) -> Fault | None:
    """Whether `dialect` knows the dtype code."""
    if code in dialect.dtypes:
        return None
    others = [other.name for other in DIALECTS.values() if code in other.dtypes]
    remedy = (
        f"open it with dialect={others[0]!r} if that is who wrote it"
        if others
        else "the header is damaged; restore the file or write it again"
    )
    return Fault(
        rule="dtype-code",
        where="byte 17",
        found=str(code),
        expected=f"one of {_listing(dialect)}",
        text=f"dtype code {code} is unknown in the {dialect.name} dialect "
        f"(known: {_listing(dialect)})",
        remedy=remedy,
    )


def code_of_dtype(dtype: npt.DTypeLike, dialect: Dialect) -> int:
    """The code that stands for `dtype` in `dialect`; InvalidArgument if none does."""
    try:
        wanted = np.dtype(dtype)
    except TypeError:
        raise InvalidArgument(f"dtype={dtype!r}: not a NumPy dtype; pass e.g. np.int32") from None
    for code, known in dialect.dtypes.items():
        if known == wanted:
            return code
    raise InvalidArgument(
        f"dtype={wanted}: the {dialect.name} dialect has no code for it; "
        f"choose one of {_listing(dialect)}"
    )


def _listing(dialect: Dialect) -> str:
    return ", ".join(f"{code} {dtype}" for code, dtype in dialect.dtypes.items())
