"""sample_index, packed documents, and NumPy's legacy random stream and shuffles in Numba.

reference/samples.py documents the functions.
"""

from __future__ import annotations

import numba
import numpy as np

from megaindex._types import I32, U16, U32, IntArray
from megaindex.errors import InvalidArgument
from megaindex.kernels.reference.samples import STATE_WORDS, _last_partial

_NEGATIVE, _NO_LENGTH = -1, -2
_LONG = 2**16 - 1
_BLOCK = 1024


@numba.njit(cache=True, nogil=True)
def _fetch(lengths, short, document_index, begin, block):  # type: ignore[no-untyped-def]
    """Fill ``block`` with the lengths of documents from ``begin`` on; return their number.

    A negative result is the code of an error. The loads of the first loop depend on document_index
    alone, so that many cache misses overlap.
    """
    count = min(block.size, document_index.size - begin)
    size = np.uint64(lengths.size)
    missing = False
    for i in range(count):
        # as unsigned, a negative id is too large
        document = np.uint64(np.int64(document_index[begin + i]))
        exists = document < size
        missing |= not exists
        at = document if exists else np.uint64(0)
        block[i] = short[at] if short.size else lengths[at]
    if missing:
        return _NO_LENGTH
    lowest = np.int32(0)
    for i in range(count):
        if short.size and block[i] == _LONG:
            block[i] = lengths[document_index[begin + i]]
        lowest = min(lowest, block[i])
    return _NEGATIVE if lowest < 0 else count


@numba.njit(cache=True, nogil=True)
def _cut(lengths, short, document_index, S, extra, num_samples, out):  # type: ignore[no-untyped-def]
    """Return the tokens of all documents, or the negative code of an error."""
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
            # later documents are only counted, for the check of their sum
            if row > num_samples:
                continue
            # A row is always written and kept if its token is in this document: a branch on that
            # would be mispredicted. A long document has more rows, S tokens apart.
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
    """Return the lengths in 16 bits, which fit a cache, if each is read several times, else none.

    The value 2**16 - 1 stands for lengths that are larger or negative.
    """
    # a copy pays off only if it is read often and the lengths do not fit a cache
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
    extra = int(extra)  # of a bool Numba would compile another version
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
def pack_documents(lengths, capacity, tokens, begins):  # type: ignore[no-untyped-def]
    samples = np.int64(0)
    for d in range(lengths.size):
        if samples == begins.size:
            break
        length = np.int64(lengths[d])
        opens = tokens == 0 or length > capacity - tokens
        begins[samples] = d  # kept if the document begins a sample, which cannot be predicted
        samples += opens
        tokens = length if opens else tokens + length
    return samples, tokens


_WORDS = STATE_WORDS - 1
_SHIFT = 397
_CHUNK = 4096


@numba.njit(cache=True, nogil=True, inline="always")
def _twist(upper, lower, far):  # type: ignore[no-untyped-def]
    y = (upper & np.uint32(0x80000000)) | (lower & np.uint32(0x7FFFFFFF))
    odd = np.uint32(0) - (y & np.uint32(1))
    return np.uint32(far ^ (y >> np.uint32(1)) ^ (odd & np.uint32(0x9908B0DF)))


@numba.njit(cache=True, nogil=True)
def _refill(key):  # type: ignore[no-untyped-def]
    for i in range(_WORDS - _SHIFT):
        key[i] = _twist(key[i], key[i + 1], key[i + _SHIFT])
    for i in range(_WORDS - _SHIFT, _WORDS - 1):
        key[i] = _twist(key[i], key[i + 1], key[i + _SHIFT - _WORDS])
    key[_WORDS - 1] = _twist(key[_WORDS - 1], key[0], key[_SHIFT - 1])
    key[_WORDS] = 0


@numba.njit(cache=True, nogil=True)
def _temper(key, words):  # type: ignore[no-untyped-def]
    for i in range(_WORDS):
        y = key[i]
        y ^= y >> np.uint32(11)
        y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
        y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
        words[i] = y ^ (y >> np.uint32(18))


@numba.njit(cache=True, nogil=True)
def _next32(key, words):  # type: ignore[no-untyped-def]
    if key[_WORDS] == _WORDS:
        _refill(key)
        _temper(key, words)
    word = np.uint64(words[key[_WORDS]])
    key[_WORDS] += np.uint32(1)
    return word


@numba.njit(cache=True, nogil=True)
def _mask_for(step):  # type: ignore[no-untyped-def]
    mask = np.uint64(step)
    for shift in (1, 2, 4, 8, 16, 32):
        mask |= mask >> np.uint64(shift)
    return mask


@numba.njit(cache=True, nogil=True)
def _draw_narrow(key, words, first, positions, count):  # type: ignore[no-untyped-def]
    """Draw for steps below 2**32; a rejected word is overwritten by the next one, not skipped."""
    done = np.int64(0)
    while done < count:
        step = first - done
        mask = np.int64(_mask_for(step))
        # the mask stays the same as long as the step has as many bits
        stop = min(count, done + step - (mask >> 1))
        while done < stop:
            if key[_WORDS] == _WORDS:
                _refill(key)
                _temper(key, words)
            at = np.int64(key[_WORDS])
            end = at + min(_WORDS - at, stop - done)
            for i in range(at, end):
                value = np.int64(words[i]) & mask
                positions[done] = value
                done += np.int64(value <= first - done)
            key[_WORDS] = end


@numba.njit(cache=True, nogil=True)
def _draw_wide(key, words, first, positions, count):  # type: ignore[no-untyped-def]
    for k in range(count):
        step = np.uint64(first - k)
        mask = _mask_for(step)
        while True:
            value = _next32(key, words)
            if step > np.uint64(0xFFFFFFFF):
                value = (value << np.uint64(32)) | _next32(key, words)
            value &= mask
            if value <= step:
                break
        positions[k] = np.int64(value)


@numba.njit(cache=True, nogil=True)
def _draw(key, words, first, positions, count):  # type: ignore[no-untyped-def]
    if first <= 0xFFFFFFFF:
        _draw_narrow(key, words, first, positions, count)
    else:
        _draw_wide(key, words, first, positions, count)


@numba.njit(cache=True, nogil=True)
def _shuffle(key, x):  # type: ignore[no-untyped-def]
    words = np.empty(_WORDS, np.uint32)
    _temper(key, words)
    positions = np.empty(_CHUNK + 1, np.int64)
    # returned, or the compiler would drop the reads that fill the cache
    touched = np.int64(0)
    first = x.size - 1
    while first > 0:
        count = min(_CHUNK, first)
        _draw(key, words, first, positions, count)
        # reads all cells of a chunk before swapping any, so that their cache misses overlap
        for k in range(count):
            touched += np.int64(x[positions[k]])
        for k in range(count):
            i, j = first - k, positions[k]
            x[i], x[j] = x[j], x[i]
        first -= count
    return touched


def shuffle(state: U32, array: IntArray, num_threads: int = 1) -> None:
    _shuffle(state, array)


def shuffled_range(state: U32, first: int, out: IntArray, num_threads: int = 1) -> None:
    out[:] = np.arange(first, first + out.size, dtype=out.dtype)
    _shuffle(state, out)


def shuffled_documents(
    state: U32,
    documents: I32 | None,
    first_document: int,
    num_epochs: int,
    out: I32,
    num_threads: int = 1,
) -> None:
    count = out.size // num_epochs
    rows = out.reshape(num_epochs, count)
    rows[:] = (
        np.arange(first_document, first_document + count, dtype=np.int32)
        if documents is None
        else documents
    )
    _shuffle(state, out)
