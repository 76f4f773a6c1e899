"""Packing of whole documents in Numba.

reference/packing.py documents the functions.
"""

from __future__ import annotations

import numba
import numpy as np

from megaindex._types import I32, I64, U64
from megaindex.errors import InvalidArgument
from megaindex.kernels.jit.bijection import run_network
from megaindex.kernels.reference.bijection import ROUNDS, TABLE_BELOW, key_word
from megaindex.kernels.reference.packing import (
    ROUND_WORDS,
    SKIP,
    SPLIT,
    STRIDE,
    SWAP_ROUNDS,
    check_counts,
    check_cutting,
    check_sorted,
    foreign,
    missing_bin,
)

_BAD_BIN, _BAD_ARRAYS = 1, 2
_ODD_FACTORS = np.array([0, 1], np.uint32)


@numba.njit(cache=True, nogil=True, inline="always")
def _used(length, capacity, rule):  # type: ignore[no-untyped-def]
    if length <= capacity or rule == SPLIT:
        return length
    return 0 if rule == SKIP else capacity


@numba.njit(cache=True, nogil=True)
def _count(lengths, capacity, rule, counts):  # type: ignore[no-untyped-def]
    for d in range(lengths.size):
        if lengths[d] < 0:
            return lengths[d]
        used = np.int64(_used(lengths[d], capacity, rule))
        whole = used // capacity
        counts[capacity] += whole
        counts[used - whole * capacity] += 1
    # documents that fill whole samples leave a rest of no tokens
    counts[0] = 0
    return 0


def count_pieces(lengths: I32, capacity: int, long_documents: int, num_threads: int = 1) -> I64:
    check_cutting(capacity, long_documents)
    counts = np.zeros(capacity + 1, np.int64)
    if _count(lengths, capacity, long_documents, counts) < 0:
        raise InvalidArgument("lengths: must not be negative")
    return counts


@numba.njit(cache=True, nogil=True)
def _sort(lengths, capacity, rule, starts, documents, sample_starts):  # type: ignore[no-untyped-def]
    samples = 0
    for d in range(lengths.size):
        if d % STRIDE == 0:
            sample_starts[d // STRIDE] = samples
        used = np.int64(_used(lengths[d], capacity, rule))
        whole = used // capacity
        samples += whole
        rest = used - whole * capacity
        if rest > 0:
            documents[starts[rest]] = d
            starts[rest] += 1
    sample_starts[-1] = samples


def sort_pieces(
    lengths: I32,
    capacity: int,
    long_documents: int,
    counts: I64,
    documents: I32,
    sample_starts: I64,
    num_threads: int = 1,
) -> None:
    found = count_pieces(lengths, capacity, long_documents, num_threads)
    check_sorted(lengths, found, counts, documents, sample_starts)
    starts = np.cumsum(counts) - counts
    _sort(lengths, capacity, long_documents, starts, documents, sample_starts)


@numba.njit(cache=True, nogil=True)
def _insert(heads, tails, held, following, words, room, layer):  # type: ignore[no-untyped-def]
    """Insert a layer into the list of its room, behind those with as many pieces or fewer."""
    after = tails[room]
    # the end of the list is nearly always the place
    if after >= 0 and held[after] > held[layer]:
        after = -1
        at = heads[room]
        while held[at] <= held[layer]:
            after = at
            at = following[at]
    if after < 0:
        following[layer] = heads[room]
        heads[room] = layer
    else:
        following[layer] = following[after]
        following[after] = layer
    if after == tails[room]:
        tails[room] = layer
    words[room >> 6] |= np.uint64(1) << np.uint64(room & 63)


@numba.njit(cache=True, nogil=True)
def _least_room(words, heads, least):  # type: ignore[no-untyped-def]
    """Return the least room of open bins from ``least`` on, or -1."""
    # 64 rooms a word: most rooms have no open bin, and are passed at once
    word = least >> 6
    for room in range(least, min(heads.size, (word + 1) << 6)):
        if heads[room] >= 0:
            return room
    for at in range(word + 1, words.size):
        if words[at] != 0:
            for room in range(at << 6, min(heads.size, (at + 1) << 6)):
                if heads[room] >= 0:
                    return room
    return -1


@numba.njit(cache=True, nogil=True)
def _runs(layers, covered):  # type: ignore[no-untyped-def]
    """Return what no layer covers, with the number of bins in the last row."""
    runs = np.empty((len(layers) + 1, 3), np.int64)
    found, first = 0, 0
    for layer in range(len(layers)):
        bins = layers[layer, 5] - covered[layer]
        if bins > 0:
            runs[found, 0], runs[found, 1], runs[found, 2] = layer, covered[layer], first
            found += 1
            first += bins
    runs[found, 0], runs[found, 1], runs[found, 2] = len(layers), 0, first
    return runs[: found + 1].copy()


@numba.njit(cache=True, nogil=True)
def _pack(counts, max_pieces, least_room, stacked):  # type: ignore[no-untyped-def]
    capacity = counts.size - 1
    layers = np.empty((1024, 6), np.int64)
    covered = np.empty(1024, np.int64)
    held = np.empty(1024, np.int64)
    following = np.empty(1024, np.int64)
    heads = np.full(capacity + 1, -1, np.int64)
    tails = np.full(capacity + 1, -1, np.int64)
    words = np.zeros((capacity >> 6) + 1, np.uint64)
    size = 0
    for length in range(capacity, 0, -1):
        left, rank = counts[length], 0
        while left > 0:
            if size == covered.size:
                layers = np.concatenate((layers, np.empty_like(layers)))
                covered = np.concatenate((covered, np.empty_like(covered)))
                held = np.concatenate((held, np.empty_like(held)))
                following = np.concatenate((following, np.empty_like(following)))
            found = _least_room(words, heads, length)
            is_new = found < 0
            room = capacity if is_new else found
            below = -1 if is_new else heads[found]
            holds = 0 if is_new else held[below]
            each = room // length if stacked or is_new else 1
            if max_pieces > 0:
                each = min(each, max_pieces - holds)
            each = min(each, left)
            before = 0 if is_new else covered[below]
            free = left if is_new else layers[below, 5] - before
            bins = min(free, left // each)
            layers[size, 0], layers[size, 1], layers[size, 2] = below, before, length
            layers[size, 3], layers[size, 4], layers[size, 5] = each, rank, bins
            covered[size] = 0
            held[size] = holds + each if max_pieces > 0 else 0
            if not is_new:
                covered[below] += bins
                if covered[below] == layers[below, 5]:
                    heads[room] = following[below]
                    if heads[room] < 0:
                        tails[room] = -1
                        words[room >> 6] &= ~(np.uint64(1) << np.uint64(room & 63))
            rank += bins * each
            left -= bins * each
            rest = room - each * length
            if rest >= least_room and (max_pieces == 0 or held[size] < max_pieces):
                _insert(heads, tails, held, following, words, rest, size)
            size += 1
    return layers[:size].copy(), _runs(layers[:size], covered)


def pack_pieces(counts: I64, max_pieces: int, least_room: int, stacked: bool) -> tuple[I64, I64]:
    check_counts(counts, max_pieces, least_room)
    layers, runs = _pack(counts, max_pieces, least_room, stacked)
    return layers, runs


@numba.njit(cache=True, nogil=True)
def _add_pieces(layers, runs, capacity, samples, starts, bins, pieces, splits):  # type: ignore[no-untyped-def]
    """Fill (length, rank) of the pieces as far as there is room; return a fault or 0."""
    at = 0
    for k in range(bins.size):
        if bins[k] < 0 or bins[k] >= runs[-1, 2]:
            return _BAD_BIN
        run = max(0, np.searchsorted(runs[:-1, 2], bins[k], side="right") - 1)
        layer, place, room, begin = (
            runs[run, 0],
            runs[run, 1] + bins[k] - runs[run, 2],
            capacity,
            at,
        )
        while layer >= 0:
            if layer >= layers.shape[0]:
                return _BAD_ARRAYS
            below, before, length, each, rank, count = layers[layer]
            if place < 0 or place >= count or below >= layer or before < 0:
                return _BAD_ARRAYS
            if length < 1 or each < 1 or length > capacity or each > room // length:
                return _BAD_ARRAYS
            size = samples if length == capacity else starts[length + 1] - starts[length]
            if rank < 0 or rank > size or count > (size - rank) // each:
                return _BAD_ARRAYS
            room -= each * length
            for i in range(each):
                if at < pieces.shape[1]:
                    pieces[0, at] = length
                    pieces[1, at] = rank + (place + 1) * each - 1 - i
                at += 1
            place += before
            layer = below
        if at <= pieces.shape[1]:  # longer pieces first
            pieces[:, begin:at] = pieces[:, begin:at][:, ::-1].copy()
        splits[k + 1] = at
    return 0


@numba.njit(cache=True, nogil=True, inline="always")
def _hash(x):  # type: ignore[no-untyped-def]
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32((x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ (x >> np.uint32(16)))


@numba.njit(cache=True, nogil=True)
def _swap_or_not(ranks, sizes, words, rounds, back):  # type: ignore[no-untyped-def]
    for k in range(ranks.size):
        low = np.uint32(words[k] & np.uint64(0xFFFFFFFF))
        high = np.uint32(words[k] >> np.uint64(32))
        rank, n = np.int64(ranks[k]), np.int64(sizes[k])
        for step in range(rounds.size):
            r = rounds.size - 1 - step if back else step
            pair = np.uint32(rounds[r] & np.uint64(0xFFFFFFFF))
            swap = np.uint32(rounds[r] >> np.uint64(32))
            drawn = np.int64(_hash(np.uint32(low ^ pair)) >> np.uint32(12))
            partner = (drawn * n >> 20) - rank
            if partner < 0:
                partner += n
            larger = np.uint32(max(rank, partner))
            if _hash(np.uint32(larger ^ high ^ swap)) >> np.uint32(31):
                rank = partner
        ranks[k] = rank


def _permute(key: U64, lengths: I64, sizes: I64, ranks: I64, back: bool = False) -> None:
    """Replace each rank by its place in document order, or with ``back`` each place by its rank."""
    distinct, which = np.unique(lengths, return_inverse=True)
    words = np.array([key_word(key, length) for length in distinct.tolist()], np.uint64)
    few = np.flatnonzero((sizes > 1) & (sizes < TABLE_BELOW))
    rounds = np.array([key_word(key, ROUND_WORDS + r) for r in range(SWAP_ROUNDS)], np.uint64)
    chosen = ranks[few]
    _swap_or_not(chosen, sizes[few], words[which[few]], rounds, back)
    ranks[few] = chosen
    many = np.flatnonzero(sizes >= TABLE_BELOW)
    for of in np.unique(which[many]).tolist():
        places = many[which[many] == of]
        network = (words[of] ^ rounds[:ROUNDS]).view(np.uint32).reshape(-1, 2) | _ODD_FACTORS
        shuffled = np.empty(places.size, np.int64)
        run_network(network, int(sizes[places[0]]), 0, ranks[places], shuffled, back)
        ranks[places] = shuffled


@numba.njit(cache=True, nogil=True)
def _fill(lengths, rule, extra, capacity, starts, documents, sample_starts, pieces, places, runs):  # type: ignore[no-untyped-def]
    """Fill the runs of the pieces; return a fault or 0."""
    for k in range(pieces.shape[1]):
        length = pieces[0, k]
        if length < capacity:
            document = documents[starts[length] + places[k]]
            if document < 0 or document >= lengths.size:
                return _BAD_ARRAYS
            used = _used(lengths[document], capacity, rule)
            if used < length:
                return _BAD_ARRAYS
            runs[0, k], runs[1, k], runs[2, k] = document, used - length, length
            continue
        block = np.searchsorted(sample_starts, places[k], side="right") - 1
        if block < 0 or block == sample_starts.size - 1:
            return _BAD_ARRAYS
        part = places[k] - sample_starts[block]
        document = block * STRIDE
        stop = min(document + STRIDE, lengths.size)
        while document < stop:
            whole = np.int64(_used(lengths[document], capacity, rule)) // capacity
            if part < whole:
                break
            part -= whole
            document += 1
        if document == stop:
            return _BAD_ARRAYS
        goes_on = (part + 1) * capacity < lengths[document]
        runs[0, k], runs[1, k] = document, part * capacity
        runs[2, k] = capacity + (extra if goes_on else 0)
    return 0


def packed_spans(
    key: U64,
    lengths: I32,
    long_documents: int,
    extra: int,
    piece_starts: I64,
    documents: I32,
    sample_starts: I64,
    layers: I64,
    runs: I64,
    bins: I64,
) -> tuple[I64, I64, I64, I64]:
    capacity, samples = piece_starts.size - 1, int(sample_starts[-1])
    splits = np.zeros(bins.size + 1, np.int64)
    pieces = np.empty((2, 2 * bins.size + 16), np.int64)
    given = (layers, runs, capacity, samples, piece_starts, bins)
    fault = _add_pieces(*given, pieces, splits)
    if fault == 0 and splits[-1] > pieces.shape[1]:
        pieces = np.empty((2, int(splits[-1])), np.int64)
        _add_pieces(*given, pieces, splits)
    if fault:
        raise missing_bin(runs, bins) if fault == _BAD_BIN else foreign()
    pieces = np.ascontiguousarray(pieces[:, : splits[-1]])
    of, places = pieces[0], pieces[1].copy()
    sizes = piece_starts[np.minimum(of + 1, capacity)] - piece_starts[of]
    sizes[of == capacity] = 1  # whole samples are not permuted
    _permute(key, of, sizes, places)
    found = np.empty((3, of.size), np.int64)
    if _fill(
        lengths, long_documents, extra, capacity, piece_starts, documents, sample_starts, pieces,
        places, found,
    ):  # fmt: skip
        raise foreign()
    return found[0], found[1], found[2], splits


@numba.njit(cache=True, nogil=True)
def _find_bins(layers, first, above, ends, runs, run_of, lengths, ranks, bins):  # type: ignore[no-untyped-def]
    """Fill the bins of pieces; return False if the arrays do not belong together."""
    for k in range(ranks.size):
        begin, stop = first[lengths[k]], first[lengths[k] - 1]
        layer = begin + np.searchsorted(layers[begin:stop, 4], ranks[k], side="right") - 1
        if layer < begin:
            return False
        place = (ranks[k] - layers[layer, 4]) // layers[layer, 3]
        if place >= layers[layer, 5]:
            return False
        rising = True
        while rising:
            rising = False
            low, high = ends[layer], ends[layer + 1]
            while low < high:  # the last one that begins at or before the place
                middle = (low + high) // 2
                if layers[above[middle], 1] <= place:
                    low = middle + 1
                else:
                    high = middle
            if low > ends[layer]:
                over = above[low - 1]
                if place - layers[over, 1] < layers[over, 5]:
                    layer, place, rising = over, place - layers[over, 1], True
        run = run_of[layer]
        if run < 0 or place < runs[run, 1]:
            return False
        bins[k] = runs[run, 2] + place - runs[run, 1]
    return True


def packed_bins(
    key: U64,
    piece_starts: I64,
    layers: I64,
    runs: I64,
    lengths: I64,
    places: I64,
    num_threads: int = 1,
) -> I64:
    capacity, count = piece_starts.size - 1, len(layers)
    below = layers[:, 0]
    numbers = np.arange(count)
    in_order = (np.diff(layers[:, 2]) <= 0).all() and (below < numbers).all()
    if not in_order or (runs[:-1, 0] >= count).any() or (layers[:, 2:4] < 1).any():
        raise foreign()
    sizes = piece_starts[np.minimum(lengths + 1, capacity)] - piece_starts[lengths]
    if (places >= sizes)[lengths < capacity].any():
        raise foreign()
    sizes[lengths == capacity] = 1  # whole samples are not permuted
    ranks = places.copy()
    _permute(key, lengths, sizes, ranks, back=True)
    first = np.searchsorted(-layers[:, 2], -np.arange(capacity + 1))
    first[0] = count
    above = np.argsort(below, kind="stable")[np.count_nonzero(below < 0) :]
    ends = np.searchsorted(below[above], np.arange(count + 1))
    run_of = np.full(count, -1)
    run_of[runs[:-1, 0]] = np.arange(len(runs) - 1)
    bins = np.empty(ranks.size, np.int64)
    if not _find_bins(layers, first, above, ends, runs, run_of, lengths, ranks, bins):
        raise foreign()
    return bins
