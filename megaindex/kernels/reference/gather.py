"""Batches: the tokens of located samples, copied into rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.kernels.types import I32, I64, IntArray, TokenSource


def token_table(sources: Sequence[TokenSource]) -> list[TokenSource]:
    """What `gather` reads from: for each source its tokens, pointers and lengths.

    Tokens are the whole ``.bin``, one-dimensional and of its dtype; pointers int64[n] in bytes and
    lengths int32[n] in tokens, as the ``.idx`` has them, at odd addresses too. The table keeps them
    alive; what else it is, is each backend's own matter.
    """
    return list(sources)


def gather(
    table: list[TokenSource],
    source: I32,
    document: I64,
    offset: I64,
    length: I64,
    row_splits: I64,
    out: IntArray,
    labels: IntArray | None,
    pad_id: int,
    num_threads: int = 1,
) -> int:
    """Fill row k of ``out`` with the tokens of the runs ``row_splits[k]:row_splits[k + 1]``.

    ``out[k, j]`` is the j-th token of their concatenation, and ``labels[k, j]`` the one after it;
    each is ``pad_id`` where there is none. With runs of 5 6 7 and 8 and a width of 3, out is 5 6 7
    and labels 6 7 8.

    Args:
        out: int64, int32 or float32 [samples, width]; the cells of a row lie side by side. Its
            dtype holds every token of every source; float32 takes any, rounded.
        labels: None, or another array like ``out``.

    Returns:
        -1; or the number of the first run that leaves its sequence or the ``.bin``, or names none,
        or begins between two tokens, and then nothing was written.

    Raises:
        InvalidArgument: the dtype of ``out`` does not hold every token of the sources.
    """
    check_holds(table, out)
    runs = list(zip(*(a.tolist() for a in (source, document, offset, length)), strict=True))
    for number, run in enumerate(runs):
        if not _inside(table, *run):
            return number
    for k in range(row_splits.size - 1):
        parts = [_tokens(table, *run) for run in runs[row_splits[k] : row_splits[k + 1]]]
        text = np.concatenate([np.zeros(0, out.dtype), *(part.astype(out.dtype) for part in parts)])
        for row, words in ((out, text), (labels, text[1:])):
            if row is not None:
                row[k] = pad_id
                row[k, : words.size] = words[: row.shape[1]]
    return -1


def check_holds(table: Sequence[TokenSource], out: IntArray) -> None:
    """InvalidArgument unless every token of the sources is a value of ``out``'s dtype."""
    for tokens, _, _ in table:
        if out.dtype != np.float32 and not np.can_cast(tokens.dtype, out.dtype):
            raise InvalidArgument(
                f"out: {out.dtype} does not hold every token of a source of {tokens.dtype}; use "
                "int64, or float32 for floats"
            )


def _inside(table: list[TokenSource], source: int, document: int, offset: int, size: int) -> bool:
    if not 0 <= source < len(table):
        return False
    tokens, pointers, lengths = table[source]
    if not 0 <= document < lengths.size or offset < 0 or size < 0:
        return False
    pointer, whole = int(pointers[document]), int(lengths[document])
    begin, between = divmod(pointer, tokens.itemsize)
    return (
        pointer >= 0
        and not between
        and offset + size <= whole
        and begin + offset + size <= tokens.size
    )


def _tokens(
    table: list[TokenSource], source: int, document: int, offset: int, size: int
) -> IntArray:
    tokens, pointers, _ = table[source]
    begin = int(pointers[document]) // tokens.itemsize + offset
    return tokens[begin : begin + size]
