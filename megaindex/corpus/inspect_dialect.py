"""Who may have written a pair: nothing in the file says so, but some things speak for or against.

Codes 6 and 7 are float64 and float32 to Megatron and PaddleNLP, and the reverse to GPT-NeoX. A pair
of code 6 whose pointers advance by 4 bytes a token is GPT-NeoX's.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaindex.format.dtypes import DIALECTS, Dialect
from megaindex.format.pair import IndexArrays

_WIDEST = 8  # bytes of a token
_LOOKED_AT = 4096  # sequences


@dataclass(frozen=True, kw_only=True)
class DialectGuess:
    """What the pair would be in one dialect."""

    dialect: str
    dtype: str | None
    """None where the dialect has no such code."""
    possible: bool
    reason: str


def guess_dialects(
    code: int, arrays: IndexArrays, bin_nbytes: int | None
) -> tuple[DialectGuess, ...]:
    """Each dialect, whether the pair can be of it, and why."""
    itemsize = bytes_per_token(arrays, bin_nbytes)
    short = len(arrays.bounds) > 0 and 0 <= arrays.bounds[-1] < len(arrays.lengths)
    return tuple(_guess(dialect, code, itemsize, short) for dialect in DIALECTS.values())


def _guess(dialect: Dialect, code: int, itemsize: int | None, short: bool) -> DialectGuess:
    dtype = dialect.dtypes.get(code)
    possible, reasons = True, []
    if dtype is None:
        possible, reasons = False, [f"has no dtype code {code}"]
    elif itemsize is not None and dtype.itemsize != itemsize:
        possible = False
        reasons = [f"{dtype} takes {dtype.itemsize} bytes, pointers advance by {itemsize} a token"]
    elif itemsize is not None and len({d.dtypes.get(code) for d in DIALECTS.values()}) > 1:
        reasons = [f"pointers advance by {itemsize} bytes a token"]
    if short and not dialect.bounds_may_stop_short:
        possible = False
        reasons.append("document bounds end before the sequences do")
    elif short:
        reasons.append("document bounds end early, as after its merge tool")
    return DialectGuess(
        dialect=dialect.name,
        dtype=None if dtype is None else str(dtype),
        possible=possible,
        reason="; ".join(reasons) or "nothing speaks against it",
    )


def bytes_per_token(arrays: IndexArrays, bin_nbytes: int | None) -> int | None:
    """From the first sequence that another one follows; None where the file does not tell.

    No token is wider than 8 bytes: where pointers advance by more, something lies in between, or
    the file is damaged.
    """
    count = min(len(arrays.lengths), len(arrays.pointers), _LOOKED_AT)
    # as Python's integers, which damage cannot make overflow
    sizes, begins = arrays.lengths[:count].tolist(), arrays.pointers[:count].tolist()
    for size, begin, end in zip(sizes, begins, begins[1:], strict=False):
        if size > 0 and end > begin and (end - begin) % size == 0:
            return _width((end - begin) // size)
    if count == 1 and sizes[0] > 0 and bin_nbytes and bin_nbytes % sizes[0] == 0:
        return _width(bin_nbytes // sizes[0])
    return None


def _width(nbytes: int) -> int | None:
    return nbytes if nbytes <= _WIDEST else None
