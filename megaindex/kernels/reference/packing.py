"""Packing of whole documents by best-fit decreasing, computed from the histogram of their lengths.

A sample holds at most ``capacity`` tokens. A document is cut into pieces: whole samples of
``capacity`` tokens, and one shorter piece of the remaining tokens. Pieces are placed by decreasing
length, each into the bin with the least sufficient room; among bins of equal room into the one
that got its room first or, where the pieces of a bin are limited, into one with the fewest pieces.
Pieces of equal length are interchangeable, so a bin is described by the lengths of its pieces and
their ranks among those of their length:

    pieces of 5 3 3 2 tokens, capacity 8      bins 5 3 | 3 2
    as runs of bins       bins  pieces each   room left
    length 5              1     1             3
    length 3              1     1             0           on the bin with 5
    length 3              1     1             5           a new bin
    length 2              1     1             3           on the bin with 3

Which document has a rank is decided by a keyed bijection of each length, another one in each epoch.

``long_documents``, the treatment of documents longer than ``capacity``: 0 keeps their first
``capacity`` tokens (truncate), 1 cuts them into pieces (split), 2 omits them (skip).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np

from megaindex._types import I32, I64, U64
from megaindex.errors import InvalidArgument
from megaindex.kernels.reference.bijection import ROUNDS, TABLE_BELOW, Network, key_word

TRUNCATE, SPLIT, SKIP = range(3)
STRIDE = 64
"""Documents between two entries of ``sample_starts``."""
SWAP_ROUNDS = 48
"""Rounds of the permutation of fewer than 4096 ranks."""
MOST_CAPACITY = 2**24
MOST_PIECES = 2**37  # of a length
ROUND_WORDS = 2**32
"""Round r uses word 2**32 + r of the stream of the key, length l word l."""
_HALF = 2**32 - 1


def used_length(length: int, capacity: int, long_documents: int) -> int:
    """Return the tokens of a document that are placed."""
    if length <= capacity or long_documents == SPLIT:
        return length
    return capacity if long_documents == TRUNCATE else 0


def count_pieces(lengths: I32, capacity: int, long_documents: int, num_threads: int = 1) -> I64:
    """Return the number of pieces of each length, int64[capacity + 1].

    With lengths 3 9 0 4 and a capacity of 4, split: 0 1 0 1 3; documents without tokens have no
    piece.

    Args:
        lengths: int32[n], tokens of the documents, none negative.
        capacity: 1 to 2**24.
        long_documents: 0, 1 or 2, see above.
        num_threads: at most so many; the result does not depend on it.
    """
    check_cutting(capacity, long_documents)
    counts = np.zeros(capacity + 1, np.int64)
    for length in lengths.tolist():
        if length < 0:
            raise InvalidArgument(f"lengths: must not be negative, got {length}")
        whole, rest = divmod(used_length(length, capacity, long_documents), capacity)
        counts[capacity] += whole
        if rest:
            counts[rest] += 1
    return counts


def sort_pieces(
    lengths: I32,
    capacity: int,
    long_documents: int,
    counts: I64,
    documents: I32,
    sample_starts: I64,
    num_threads: int = 1,
) -> None:
    """Sort the pieces shorter than a sample by length, those of a length in document order.

    Args:
        lengths, capacity, long_documents: as for `count_pieces`.
        counts: the result of `count_pieces`.
        documents: int32[counts[:capacity].sum()], filled with the documents of the pieces.
        sample_starts: int64[ceil(n / 64) + 1], filled with the whole samples of the documents
            before document 0, 64, 128, …, and of all.
        num_threads: at most so many; the result does not depend on it.

    Raises:
        InvalidArgument: the counts or a size are not those of the lengths.
    """
    found = count_pieces(lengths, capacity, long_documents, num_threads)
    check_sorted(lengths, found, counts, documents, sample_starts)
    pieces: list[list[int]] = [[] for _ in range(capacity)]
    whole_before = 0
    for document, length in enumerate(lengths.tolist()):
        if document % STRIDE == 0:
            sample_starts[document // STRIDE] = whole_before
        whole, rest = divmod(used_length(length, capacity, long_documents), capacity)
        whole_before += whole
        if rest:
            pieces[rest].append(document)
    sample_starts[-1] = whole_before
    documents[:] = [document for of_length in pieces for document in of_length]


def pack_pieces(counts: I64, max_pieces: int, least_room: int, stacked: bool) -> tuple[I64, I64]:
    """Return runs of bins that are packed alike, as best-fit decreasing places the pieces.

    Args:
        counts: int64[capacity + 1], the number of pieces of each length; ``counts[0]`` is 0.
        max_pieces: most pieces of a bin; 0 for no limit.
        least_room: bins with less room than this are full, at least 1.
        stacked: True places each piece by itself, as in the textbook: pieces of equal length go
            into the same bin as long as they fit. False places pieces of equal length together, one
            into each bin of equal room; only new bins get several.

    Returns:
        ``layers``, int64[n, 6], and ``runs``, int64[m + 1, 3]. A layer puts pieces of one length
        onto consecutive bins: (layer below or -1, bins of that layer before these, length, pieces
        in each bin, rank of the first piece, number of bins). The i-th bin of a layer has the ranks
        from ``rank + i * pieces`` on. A run is what no other layer covers: (layer, bins of the
        layer before these, number of the first bin), with the number of all bins in the last row.
    """
    check_counts(counts, max_pieces, least_room)
    capacity = counts.size - 1
    layers: list[tuple[int, int, int, int, int, int]] = []
    covered: list[int] = []  # bins of each layer below another
    waiting: dict[tuple[int, int], list[int]] = {}  # (room, pieces) -> layers, first come first
    rooms: list[tuple[int, int]] = []  # sorted keys of `waiting`
    # pieces of one length are placed together: bins, not pieces, bound the work
    for length in range(capacity, 0, -1):
        left, rank = int(counts[length]), 0
        while left:
            at = bisect_left(rooms, (length, 0))
            is_new = at == len(rooms)
            room, held = (capacity, 0) if is_new else rooms[at]
            below = -1 if is_new else waiting[rooms[at]][0]
            each = room // length if stacked or is_new else 1
            if max_pieces:
                each = min(each, max_pieces - held)
            # the last bin takes what is left
            each = min(each, left)
            # only bins of the first layer with this room: the next one may have other pieces
            free = left if is_new else layers[below][5] - covered[below]
            bins = min(free, left // each)
            layers.append((below, 0 if is_new else covered[below], length, each, rank, bins))
            covered.append(0)
            if not is_new:
                covered[below] += bins
                if covered[below] == layers[below][5]:
                    waiting[rooms[at]].pop(0)
                    if not waiting[rooms[at]]:
                        del waiting[rooms.pop(at)]
            rank, left = rank + bins * each, left - bins * each
            key = room - each * length, held + each if max_pieces else 0
            if key[0] >= least_room and (key[1] < max_pieces or not max_pieces):
                if key not in waiting:
                    waiting[key] = []
                    insort(rooms, key)
                waiting[key].append(len(layers) - 1)
    runs, first = [], 0
    for layer, (*_, bins) in enumerate(layers):
        if covered[layer] < bins:
            runs.append((layer, covered[layer], first))
            first += bins - covered[layer]
    runs.append((len(layers), 0, first))
    return np.array(layers, np.int64).reshape(-1, 6), np.array(runs, np.int64)


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
    """Return the spans of bins in an epoch.

    Args:
        key: uint64[2], of the epoch.
        lengths, long_documents: as for `count_pieces`.
        extra: 1 if a whole sample of a document that goes on reads one more token, else 0.
        piece_starts: int64[capacity + 1], the first entry of each length in ``documents``, and at
            the end their number.
        documents, sample_starts: the results of `sort_pieces`.
        layers, runs: the result of `pack_pieces`.
        bins: int64[n], numbers of bins.

    Returns:
        ``document``, ``offset`` and ``length`` of each span, int64, and ``row_splits``,
        int64[n + 1]. Longer pieces come first.

    Raises:
        InvalidArgument: a bin does not exist, or the arrays do not belong together.
    """
    capacity = piece_starts.size - 1
    firsts = runs[:, 2].tolist()
    spans: list[tuple[int, int, int]] = []
    splits = [0]
    for number in bins.tolist():
        if not 0 <= number < firsts[-1]:
            raise missing_bin(runs, bins)
        run = bisect_right(firsts, number) - 1
        layer, place = int(runs[run, 0]), int(runs[run, 1]) + number - firsts[run]
        found: list[tuple[int, int, int]] = []
        while layer >= 0:
            below, before, length, each, rank, _ = layers[layer].tolist()
            # reversed here and once more below, so that the longest piece comes first
            for r in reversed(range(rank + place * each, rank + (place + 1) * each)):
                if length == capacity:
                    document, part = _whole_sample(
                        lengths, long_documents, sample_starts, r, capacity
                    )
                    goes_on = (part + 1) * capacity < lengths[document]
                    found.append((document, part * capacity, capacity + extra * goes_on))
                    continue
                first, end = piece_starts[length : length + 2].tolist()
                at = permuted_rank(key, length, end - first, r)
                document = int(documents[first + at])
                used = used_length(int(lengths[document]), capacity, long_documents)
                found.append((document, used - length, length))
            layer, place = below, place + before
        spans.extend(reversed(found))
        splits.append(len(spans))
    table = np.array(spans, np.int64).reshape(-1, 3).T
    return table[0].copy(), table[1].copy(), table[2].copy(), np.array(splits, np.int64)


def permuted_rank(key: U64, length: int, n: int, rank: int, *, back: bool = False) -> int:
    """Return the place, in document order, of the piece that has a rank among n of its length.

    With ``back`` the rank of the piece at a place.

    From n = 4096 on it is decided by the network of a bijection, which would not be uniform on
    fewer; below, where a table would cost O(n) for one rank, by a swap-or-not shuffle (Hoang,
    Morris and Rogaway, 2012): each round pairs x with K - x modulo n, and swaps the two if a hash
    of the larger one says so. The words of the rounds are those of the epoch, combined with that of
    the length.
    """
    low, high = _halves(key_word(key, length))
    if n >= TABLE_BELOW:
        words = [_halves(key_word(key, ROUND_WORDS + r)) for r in range(ROUNDS)]
        network = Network([(low ^ pair, high ^ swap | 1) for pair, swap in words], n)
        return network.cycle(rank, network.backward if back else network.forward)
    rounds = range(SWAP_ROUNDS if n > 1 else 0)
    for r in reversed(rounds) if back else rounds:  # each round is its own inverse
        rank = _swapped(key, low, high, r, n, rank)
    return rank


def packed_bins(
    key: U64,
    piece_starts: I64,
    layers: I64,
    runs: I64,
    lengths: I64,
    places: I64,
    num_threads: int = 1,
) -> I64:
    """Return the bins of pieces in an epoch, int64[n]: the inverse of `packed_spans`.

    Args:
        key, piece_starts, layers, runs: as for `packed_spans`.
        lengths: int64[n], lengths of the pieces; the capacity for a whole sample.
        places: int64[n], number of the piece among those of its length, in document order.
        num_threads: at most so many; the result does not depend on it.

    Raises:
        InvalidArgument: a piece does not exist, or the arrays do not belong together.
    """
    capacity = piece_starts.size - 1
    above: dict[int, list[int]] = {}
    for layer, below in enumerate(layers[:, 0].tolist()):
        above.setdefault(below, []).append(layer)
    run_of = {layer: (before, first) for layer, before, first in runs[:-1].tolist()}
    found = []
    for length, place in zip(lengths.tolist(), places.tolist(), strict=True):
        rank = place
        if length < capacity:
            first, end = piece_starts[length : length + 2].tolist()
            if place >= end - first:
                raise foreign()
            rank = permuted_rank(key, length, end - first, place, back=True)
        own = np.flatnonzero(layers[:, 2] == length).tolist()
        layer = max((n for n in own if layers[n, 4] <= rank), default=-1)
        if layer < 0 or rank >= layers[layer, 4] + layers[layer, 3] * layers[layer, 5]:
            raise foreign()
        place = (rank - int(layers[layer, 4])) // int(layers[layer, 3])
        while True:
            over = [n for n in above.get(layer, []) if 0 <= place - layers[n, 1] < layers[n, 5]]
            if not over:
                break
            layer = over[0]
            place -= int(layers[layer, 1])
        before, first = run_of[layer]
        found.append(first + place - before)
    return np.array(found, np.int64)


def _swapped(key: U64, low: int, high: int, r: int, n: int, rank: int) -> int:
    """Return a rank after round r of the swap-or-not shuffle."""
    pair, swap = _halves(key_word(key, ROUND_WORDS + r))
    partner = ((_hash(low ^ pair) >> 12) * n >> 20) - rank
    # K - x modulo n without a division, as both are below n
    partner += n if partner < 0 else 0
    return partner if _hash(max(rank, partner) ^ high ^ swap) >> 31 else rank


def _halves(word: int) -> tuple[int, int]:
    return word & _HALF, word >> 32


def _hash(x: int) -> int:
    """Return the finaliser of MurmurHash3 of 32 bits."""
    x = (x ^ x >> 16) * 0x85EBCA6B & _HALF
    x = (x ^ x >> 13) * 0xC2B2AE35 & _HALF
    return x ^ x >> 16


def _whole_sample(
    lengths: I32, long_documents: int, sample_starts: I64, rank: int, capacity: int
) -> tuple[int, int]:
    """Return the document of a whole sample, and its number in the document."""
    block = bisect_right(sample_starts.tolist(), rank) - 1
    rank -= int(sample_starts[block])
    for document in range(block * STRIDE, lengths.size):
        whole = used_length(int(lengths[document]), capacity, long_documents) // capacity
        if rank < whole:
            return document, rank
        rank -= whole
    raise foreign()


def check_cutting(capacity: int, long_documents: int) -> None:
    """Raise InvalidArgument unless both are in their range."""
    if not 1 <= capacity <= MOST_CAPACITY or long_documents not in (TRUNCATE, SPLIT, SKIP):
        raise InvalidArgument("capacity must be from 1 to 2**24 and long_documents 0, 1 or 2")


def check_counts(counts: I64, max_pieces: int, least_room: int) -> None:
    """Raise InvalidArgument unless `pack_pieces` can take these arguments."""
    check_cutting(counts.size - 1, SPLIT)
    if counts[0] != 0 or (counts < 0).any() or (counts > MOST_PIECES).any():
        raise InvalidArgument("counts: must be 0 for pieces of no tokens, and from 0 to 2**37")
    if max_pieces < 0 or least_room < 1:
        raise InvalidArgument("max_pieces, least_room: out of range")


def check_sorted(lengths: I32, found: I64, counts: I64, documents: I32, sample_starts: I64) -> None:
    """Raise InvalidArgument unless the counts are those found, and the sizes belong to them."""
    if not np.array_equal(found, counts):
        raise InvalidArgument("counts: must be those of these lengths; take them from count_pieces")
    if documents.size != counts[:-1].sum():
        raise InvalidArgument("counts, documents: the pieces must fill documents")
    if sample_starts.size != -(-lengths.size // STRIDE) + 1:
        raise InvalidArgument(
            "sample_starts: expected an entry for every 64 documents and one more"
        )


def missing_bin(runs: I64, bins: I64) -> InvalidArgument:
    """Return the error of the first bin that does not exist."""
    end = int(runs[-1, 2])
    wrong = bins[(bins < 0) | (bins >= end)]
    return InvalidArgument(f"bins: bin {int(wrong[0])} of {end}")


def foreign() -> InvalidArgument:
    """Return the error of arrays that do not belong together."""
    return InvalidArgument("the arrays do not belong together; sort and pack the pieces again")
