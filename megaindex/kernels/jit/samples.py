"""sample_index and packed documents in Numba; see reference/samples.py."""

from __future__ import annotations

import numba
import numpy as np

from megaindex._types import I32, I64, U16, IntArray
from megaindex.errors import InvalidArgument
from megaindex.kernels.reference.samples import _last_partial

_NEGATIVE, _NO_LENGTH = -1, -2
_LONG = 2**16 - 1
_BLOCK = 1024


@numba.njit(cache=True, nogil=True)
def _fetch(lengths, short, document_index, begin, block):  # type: ignore[no-untyped-def]
    """Lengths of the documents from ``begin`` on, as many as ``block`` holds; a code if one is bad.

    A loop of loads that depend on nothing but document_index: many wait for memory at once.
    """
    count = min(block.size, document_index.size - begin)
    size = np.uint64(lengths.size)
    unknown = False
    for i in range(count):
        document = np.uint64(
            np.int64(document_index[begin + i])
        )  # a negative id is a very high one
        known = document < size
        unknown |= not known
        at = document if known else np.uint64(0)
        block[i] = short[at] if short.size else lengths[at]
    if unknown:
        return _NO_LENGTH
    lowest = np.int32(0)
    for i in range(count):
        if short.size and block[i] == _LONG:
            block[i] = lengths[document_index[begin + i]]
        lowest = min(lowest, block[i])
    return _NEGATIVE if lowest < 0 else count


@numba.njit(cache=True, nogil=True)
def _cut(lengths, short, document_index, S, extra, num_samples, out):  # type: ignore[no-untyped-def]
    """Returns the tokens of all documents, or a negative code for what is wrong."""
    block = np.empty(_BLOCK, np.int32)
    row = np.int64(1)
    position = np.int64(0)
    ahead = S - 1 + extra  # tokens from here to the next row's token
    for begin in range(0, document_index.size, _BLOCK):
        count = _fetch(lengths, short, document_index, begin, block)
        if count < 0:
            return count
        for i in range(count):
            length = np.int64(block[i])
            position += length
            if row > num_samples:
                continue
            # Written always and kept if the token is in this document: whether it is cannot be
            # predicted. A long document holds more rows, S tokens apart.
            out[row, 0] = begin + i
            out[row, 1] = ahead + 1 - extra
            hit = np.int64(ahead < length)
            row += hit
            ahead += S * hit - length
            while ahead < 0 and row <= num_samples:
                out[row, 0] = begin + i
                out[row, 1] = ahead + length + 1 - extra
                row += 1
                ahead += S
    return position


def _short_lengths(lengths: I32, document_index: I32) -> U16:
    """The lengths in 16 bits where each is looked up several times, else none: they fit a cache.

    What does not fit in 16 bits, or is negative, is looked up in ``lengths``.
    """
    if document_index.size < 3 * lengths.size or lengths.size < 2**20:
        return np.empty(0, np.uint16)
    return np.minimum(lengths.view(np.uint32), _LONG).astype(np.uint16)


def cut_samples(
    lengths: I32,
    document_index: I32,
    sequence_length: int,
    extra: int,
    num_samples: int,
    total_tokens: int,
    out: IntArray,
    num_threads: int = 1,
) -> None:
    out[0] = 0
    short = _short_lengths(lengths, document_index)
    tokens = int(_cut(lengths, short, document_index, sequence_length, extra, num_samples, out))
    if tokens == _NO_LENGTH:
        raise InvalidArgument("document_index names a sequence that has no length")
    if tokens == _NEGATIVE:
        raise InvalidArgument("a length is negative")
    needed = num_samples * sequence_length + extra
    if tokens < min(needed, total_tokens):
        raise InvalidArgument("the documents hold fewer tokens than num_epochs * tokens_per_epoch")
    if tokens < needed and num_samples > 0:
        out[num_samples] = _last_partial(lengths, document_index, extra)


@numba.njit(cache=True, nogil=True)
def _pack(lengths, capacity, tokens, begins):  # type: ignore[no-untyped-def]
    samples = 0
    for d in range(lengths.size):
        if samples == begins.size:
            break
        length = np.int64(lengths[d])
        opens = tokens == 0 or length > capacity - tokens
        begins[samples] = d
        samples += opens
        tokens = length if opens else tokens + length
    return samples, tokens


def pack_documents(lengths: I32, capacity: int, tokens: int, begins: I64) -> tuple[int, int]:
    samples, left = _pack(lengths, np.int64(capacity), np.int64(tokens), begins)
    return int(samples), int(left)
