"""Samples of sentence corpora in Numba; reference/mapping.py documents the functions."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from megaindex._types import I32, I64, U64, IntArray
from megaindex.kernels.reference.mapping import (
    MT19937,
    MT19937_64,
    Rules,
    Twister,
    cut,
    row_dtype,
    short_seq_ratio,
    shuffle_seed,
    takes_part,
)

_CHUNK = 1024
_takes_part = numba.njit(cache=True, nogil=True)(takes_part)
_cut = numba.njit(cache=True, nogil=True)(cut)


class _Targets(NamedTuple):
    """Target lengths of samples: drawn, or for blocks ``longest`` less a document's title."""

    blocks: bool
    longest: int
    ratio: np.uint64  # one drawn target in `ratio` is short; 0 for none


def _twister(kind: Twister, seed: int) -> tuple[U64, U64]:
    """Return a stream (state words, read position, tempered words) and the engine's parameters.

    Both engines use 64-bit words; the masks of the 32-bit one keep the upper halves 0.
    """
    u, d, s, b, t, c, low = kind.tempering
    numbers = (kind.size, kind.middle, kind.matrix, u, d, s, b, t, c, low)
    stream = np.zeros(2 * kind.size + 1, np.uint64)
    _seed(stream, np.uint64(seed % 2**kind.bits), np.uint64(kind.multiplier), kind.bits)
    return stream, np.array(numbers, np.uint64)


@numba.njit(cache=True, nogil=True)
def _seed(stream, seed, multiplier, bits):  # type: ignore[no-untyped-def]
    size = stream.size // 2
    mask = ~np.uint64(0) >> np.uint64(64 - bits)
    stream[0] = seed
    for i in range(1, size):
        previous = stream[i - 1]
        mixed = previous ^ (previous >> np.uint64(bits - 2))
        stream[i] = (multiplier * mixed + np.uint64(i)) & mask
    stream[size] = size


@numba.njit(cache=True, nogil=True)
def _twist(stream, i, following, far, matrix):  # type: ignore[no-untyped-def]
    lower = np.uint64(0x7FFFFFFF)
    y = (stream[i] & ~lower) | (stream[following] & lower)
    odd = np.uint64(0) - (y & np.uint64(1))
    stream[i] = stream[far] ^ (y >> np.uint64(1)) ^ (odd & matrix)


@numba.njit(cache=True, nogil=True)
def _refill(stream, kind):  # type: ignore[no-untyped-def]
    size, middle, matrix = np.int64(kind[0]), np.int64(kind[1]), kind[2]
    u, d, s, b, t, c, low = kind[3], kind[4], kind[5], kind[6], kind[7], kind[8], kind[9]
    for i in range(size - middle):
        _twist(stream, i, i + 1, i + middle, matrix)
    for i in range(size - middle, size - 1):
        _twist(stream, i, i + 1, i + middle - size, matrix)
    _twist(stream, size - 1, 0, middle - 1, matrix)
    stream[size] = 0
    for i in range(size):
        y = stream[i]
        y ^= (y >> u) & d
        y ^= (y << s) & b
        y ^= (y << t) & c
        stream[size + 1 + i] = y ^ (y >> low)


@numba.njit(cache=True, nogil=True)
def _next(stream, kind):  # type: ignore[no-untyped-def]
    size = stream.size // 2
    if stream[size] == np.uint64(size):
        _refill(stream, kind)
    word = stream[size + 1 + np.int64(stream[size])]
    stream[size] += np.uint64(1)
    return word


@numba.njit(cache=True, nogil=True)
def _kept_documents(docs, sizes, rules):  # type: ignore[no-untyped-def]
    kept = np.empty(docs.size - 1, np.bool_)
    for doc in range(kept.size):
        kept[doc] = _takes_part(sizes[docs[doc] : docs[doc + 1]], rules)
    return kept


@numba.njit(cache=True, nogil=True)
def _target(stream, kind, ratio, longest):  # type: ignore[no-untyped-def]
    if ratio == 0:
        return longest
    word = _next(stream, kind)
    if word % ratio == 0:
        return np.int64(np.uint64(2) + word % np.uint64(longest - 1))
    return longest


@numba.njit(cache=True, nogil=True)
def _cut_epoch(corpus, rules, targets, stream, kind, out):  # type: ignore[no-untyped-def]
    """Return the number of one epoch's samples, and write them if ``out`` has rows."""
    docs, sizes, titles, kept = corpus
    samples = 0
    for doc in range(kept.size):
        if not kept[doc]:
            continue
        start, last = docs[doc], docs[doc + 1]
        while True:
            if targets.blocks:
                target = targets.longest - np.int64(titles[doc])
            else:
                target = _target(stream, kind, targets.ratio, targets.longest)
            if start == last:
                break
            end = _cut(sizes, start, last, target, rules)
            if out.shape[0] > 0:
                out[samples, 0] = start
                out[samples, 1] = end
                out[samples, 2] = doc if targets.blocks else target
                if targets.blocks:
                    out[samples, 3] = samples
            samples += 1
            start = end
    return samples


@numba.njit(cache=True, nogil=True)
def _count(corpus, rules, targets, stream, kind, nothing, num_epochs, max_num_samples):  # type: ignore[no-untyped-def]
    """Return the number of samples and of epochs."""
    samples = epochs = np.int64(0)
    while epochs < num_epochs and samples < max_num_samples:
        in_epoch = _cut_epoch(corpus, rules, targets, stream, kind, nothing)
        if in_epoch == 0:
            break  # further epochs are empty too
        more = np.int64(1)
        if targets.blocks or targets.ratio == 0:  # all epochs have the same samples
            more = min(num_epochs, (max_num_samples - 1) // in_epoch + 1)
        epochs += more
        samples += more * in_epoch
    return samples, epochs


@numba.njit(cache=True, nogil=True)
def _fill(corpus, rules, targets, stream, kind, rows, num_epochs):  # type: ignore[no-untyped-def]
    end = 0
    for epoch in range(num_epochs):
        if epoch > 0 and (targets.blocks or targets.ratio == 0):
            in_epoch = rows.shape[0] // num_epochs
            rows[end : end + in_epoch] = rows[:in_epoch]
            end += in_epoch
        else:
            end += _cut_epoch(corpus, rules, targets, stream, kind, rows[end:])


@numba.njit(cache=True, nogil=True)
def _shuffle(stream, kind, rows):  # type: ignore[no-untyped-def]
    positions = np.empty(_CHUNK, np.int64)
    touched = np.uint64(0)
    last = rows.shape[0] - 1
    while last > 0:
        count = min(_CHUNK, last)
        for k in range(count):
            positions[k] = np.int64(_next(stream, kind) % np.uint64(last - k + 1))
        # reads all rows of a chunk before swapping any, so that their cache misses overlap
        for k in range(count):
            touched += np.uint64(rows[positions[k], 0])
        for k in range(count):
            i, j = last - k, positions[k]
            for column in range(rows.shape[1]):
                rows[i, column], rows[j, column] = rows[j, column], rows[i, column]
        last -= count
    return touched


def _build(
    docs: I64,
    sizes: I32,
    titles: I32,
    rules: Rules,
    targets: _Targets,
    num_epochs: int,
    max_num_samples: int,
    seed: int,
) -> IntArray:
    corpus = (docs, sizes, titles, _kept_documents(docs, sizes, rules))
    nothing = np.empty((0, 4 if targets.blocks else 3), row_dtype(sizes))
    # samples are counted first and then drawn again, so that only the result is allocated
    stream, kind = _twister(MT19937, seed)
    enough = min(max_num_samples, 2**63 - 1)
    samples, epochs = _count(corpus, rules, targets, stream, kind, nothing, num_epochs, enough)
    rows = np.empty((samples, nothing.shape[1]), nothing.dtype)
    stream, kind = _twister(MT19937, seed)
    _fill(corpus, rules, targets, stream, kind, rows, epochs)
    _shuffle(*_twister(MT19937_64, shuffle_seed(seed)), rows)
    return rows


def map_sentences(
    docs: I64,
    sizes: I32,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    min_num_sent: int = 2,
) -> IntArray:
    rules = Rules(min_num_sent, min_left=2, keep_long_alone=True)
    targets = _Targets(False, max_seq_length, np.uint64(short_seq_ratio(short_seq_prob)))
    no_titles = np.empty(0, np.int32)
    return _build(docs, sizes, no_titles, rules, targets, num_epochs, max_num_samples, seed)


def map_blocks(
    docs: I64,
    sizes: I32,
    titles_sizes: I32,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    seed: int,
    use_one_sent_blocks: bool,
) -> IntArray:
    least = 1 if use_one_sent_blocks else 2
    rules = Rules(least, min_left=least, keep_long_alone=False)
    targets = _Targets(True, max_seq_length, np.uint64(0))
    return _build(docs, sizes, titles_sizes, rules, targets, num_epochs, max_num_samples, seed)
