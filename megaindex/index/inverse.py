"""Inverse look-up: the samples that read given documents, of every order.

Orders that are computed invert their bijections; arrays, blends and stages are searched for the
samples that matter. Any other index is scanned. The result is that of a scan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megaindex._types import I64, IntArray
from megaindex.index.spans import Index, Spans, iterate_spans, sequence_lengths_at
from megaindex.io.threads import map_interruptibly
from megaindex.kernels import num_threads

_AT_ONCE = 1 << 16  # entries of an array
_LOCATED = 1 << 16  # samples


class ServedTokens(NamedTuple):
    """Tokens of documents that are input of samples, int64[n] each, in any order."""

    sample: I64
    document: I64
    """Sequence ids in the source."""
    offset: I64
    length: I64

    def select(self, which: IntArray | npt.NDArray[np.bool_]) -> ServedTokens:
        """Return some of them."""
        return ServedTokens(*(column[which] for column in self))


@runtime_checkable
class InvertibleIndex(Protocol):
    """Index that finds the samples of documents without a scan."""

    def served_tokens(self, documents: I64, source: int) -> ServedTokens:
        """Return the input tokens of documents, sorted sequence ids of one source."""


def served_tokens(index: Index, documents: I64, source: int = 0) -> ServedTokens:
    """Return where an index reads documents as input.

    Args:
        index: any index.
        documents: sequence ids of the source, sorted and distinct.
        source: number of the source in ``Spans.source``.
    """
    if isinstance(index, InvertibleIndex):
        return index.served_tokens(documents, source)
    return scan(index, documents, source)


def scan(index: Index, documents: I64, source: int = 0) -> ServedTokens:
    """Return the same by reading every sample of the index."""
    chunks = iterate_spans(index, 0, index.num_samples)
    wanted = membership(documents)
    found = [_of_chunk(index, *chunk, wanted, source) for chunk in chunks]
    return join_served(found)


def served_in(index: Index, samples: I64, documents: I64, source: int = 0) -> ServedTokens:
    """Return the same for some samples only, each given once."""
    wanted = membership(documents)

    def find(first: int) -> ServedTokens:
        ids = samples[first : first + _LOCATED]
        return _of_chunk(index, ids, index.locate(ids), wanted, source)

    return join_served(map_interruptibly(find, range(0, samples.size, _LOCATED), num_threads()))


def _of_chunk(
    index: Index, positions: I64, spans: Spans, wanted: npt.NDArray[np.bool_], source: int
) -> ServedTokens:
    length = spans.input_lengths(sequence_lengths_at(index, positions))
    kept = (length > 0) & (spans.source == source) & contains(wanted, spans.document)
    sample = np.repeat(positions, np.diff(spans.row_splits))[kept]
    return ServedTokens(sample, spans.document[kept], spans.offset[kept], length[kept])


def join_blocks(find: Callable[[int], ServedTokens], blocks: int) -> ServedTokens:
    """Return what ``find`` finds in each block, such as an epoch, several of them at once."""
    return join_served(map_interruptibly(find, range(blocks), num_threads()))


def join_served(pieces: list[ServedTokens]) -> ServedTokens:
    """Return all in one."""
    nothing = np.empty(0, np.int64)
    pieces = [ServedTokens(nothing, nothing, nothing, nothing), *pieces]
    return ServedTokens(*(np.concatenate(column) for column in zip(*pieces, strict=True)))


def distinct(numbers: I64) -> I64:
    """Return the distinct numbers in rising order, for millions faster than `numpy.unique`."""
    ordered = np.sort(numbers)
    first = np.ones(ordered.size, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def membership(numbers: I64, bound: int = 0) -> npt.NDArray[np.bool_]:
    """Return bool[max(bound, max + 1)]: True at these numbers, none negative."""
    member = np.zeros(max(bound, int(numbers.max(initial=-1)) + 1), bool)
    member[numbers] = True
    return member


def contains(member: npt.NDArray[np.bool_], numbers: IntArray) -> npt.NDArray[np.bool_]:
    """Return which numbers, none negative, are members."""
    if not member.size:
        return np.zeros(numbers.size, bool)
    inside = numbers < member.size
    found: npt.NDArray[np.bool_] = member[np.minimum(numbers, member.size - 1)] & inside
    return found


def places_of(array: IntArray, numbers: I64, bound: int) -> I64:
    """Return the places of an array, whose values lie in [0, bound), that hold any of the numbers.

    Numbers from ``bound`` on are in no place.
    """
    member = membership(numbers[numbers < bound], bound)
    bits = np.packbits(member, bitorder="little")  # which fit a cache

    def find(first: int) -> I64:
        chunk = np.asarray(array[first : first + _AT_ONCE])
        places = np.flatnonzero(bits.take(chunk >> 3))
        likely = chunk[places]
        found = bits.take(likely >> 3) >> (likely & 7).astype(np.uint8) & np.uint8(1)
        hits: I64 = places[found.view(bool)] + first
        return hits

    chunks = range(0, array.size, _AT_ONCE)
    nothing = np.empty(0, np.int64)
    return np.concatenate([nothing, *map_interruptibly(find, chunks, num_threads())])


def serve(found: ServedTokens, samples: I64, positions: I64) -> ServedTokens:
    """Return tokens of an inner index at the positions that serve its samples.

    Args:
        found: tokens in samples of the inner index.
        samples: sample of the inner index at each position, any number of times.
        positions: of the outer index.
    """
    order = np.argsort(samples, kind="stable")
    ordered = samples[order]
    low = np.searchsorted(ordered, found.sample)
    times = np.searchsorted(ordered, found.sample, "right") - low
    which = np.repeat(np.arange(times.size), times)
    within = np.arange(which.size) - np.repeat(np.cumsum(times) - times, times)
    return found.select(which)._replace(sample=positions[order[low[which] + within]])


def cut_in_samples(begins: I64, lengths: I64, sequence_length: int) -> tuple[I64, I64, I64, I64]:
    """Cut runs of tokens where a sample of ``sequence_length`` tokens ends.

    Tokens 6 to 17 are, with samples of 8, in samples 0 to 2: 6 to 7, 8 to 15, 16 and 17.

    Returns:
        Number of the run, number of the sample, first token in the run, and tokens.
    """
    first = begins // sequence_length
    count = np.where(lengths > 0, (begins + lengths - 1) // sequence_length - first + 1, 0)
    run = np.repeat(np.arange(begins.size), count)
    sample = first[run] + np.arange(run.size) - np.repeat(np.cumsum(count) - count, count)
    begin, end = begins[run], (begins + lengths)[run]
    low = np.maximum(begin, sample * sequence_length)
    high = np.minimum(end, (sample + 1) * sequence_length)
    return run, sample, low - begin, high - low
