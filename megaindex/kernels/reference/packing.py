"""Whole documents into samples, one after another, as GPT-NeoX's pack_until_overflow does."""

from __future__ import annotations

from megaindex.kernels.types import I32, I64


def pack_documents(lengths: I32, capacity: int, tokens: int, begins: I64) -> tuple[int, int]:
    """Where samples begin when documents are packed whole until the next would not fit.

    With lengths 3 4 9 1 and a capacity of 8, documents 0 and 1 make a sample, document 2, too long
    for any, begins one, and so does document 3: begins 0 2 3.

    Args:
        lengths: int32[n], tokens of the documents in reading order, none negative.
        capacity: tokens that a sample of several documents may hold.
        tokens: what the open sample holds already; 0 where there is none, and the next document
            opens one.
        begins: int64[m], filled from its start; packing stops when m samples have begun.

    Returns:
        How many samples began, and the tokens of the one that is still open.
    """
    samples = 0
    for d, length in enumerate(lengths.tolist()):
        if samples == begins.size:
            break
        if tokens == 0 or tokens + length > capacity:
            begins[samples] = d
            samples += 1
            tokens = length
        else:
            tokens += length
    return samples, tokens
