"""The documents of an epoch: a range of sequence ids, ids in any order, or a subset of a range.

A subset is those documents of a range whose word, a keyed hash of their number in the whole source,
lies in a `WordRange`; docs/lock-format.md specifies it. It holds a bit for each document and the
members before every 512th, 1.06 bits a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, Union

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64, U8, U64
from megaindex.io.threads import map_interruptibly
from megaindex.kernels import num_threads
from megaindex.keys.numbers import GAMMA, key_of, mix_in_place

LAST_WORD = 2**64 - 1
_MIXED = 1 << 15  # words that stay in a processor's cache while they are mixed
_PART = 1 << 22  # documents of a thread's task
_RANKED = 1 << 9  # documents between two counts of the members before them
_FOUND = 1 << 12  # members found at once
_DECODED = 1 << 8  # documents whose bits are decoded in the time in which a member is found

Documents: TypeAlias = Union[range, I32, "DocumentSubset"]


@dataclass(frozen=True)
class WordRange:
    """The documents of a source whose words are from ``first`` to ``last``."""

    seed: int
    name: str
    """Name of the source in the key: the one by which it is shuffled."""
    first: int = 0
    last: int = LAST_WORD

    @cached_property
    def _key(self) -> U64:
        return key_of(f"megaindex/{self.seed}/subset/{self.name}")

    def chunks(self, documents: range) -> Iterator[tuple[int, int, U64]]:
        """Yield (begin, end, their words) of chunks of consecutive documents.

        Words are uint64[end - begin], no two of a source equal; the next chunk overwrites them.
        """
        low, high = self._key
        steps = np.arange(1, _MIXED + 1, dtype=np.uint64) * np.uint64(GAMMA)
        words, spare = np.empty_like(steps), np.empty_like(steps)
        for begin in range(documents.start, documents.stop, _MIXED):
            first = np.uint64((int(low) + begin * GAMMA) & LAST_WORD)
            np.add(steps, first, out=words)
            mix_in_place(words, spare)
            words ^= high
            mix_in_place(words, spare)
            end = min(begin + _MIXED, documents.stop)
            yield begin, end, words[: end - begin]

    def contains(self, words: U64) -> npt.NDArray[np.bool_]:
        """Return which words are in the range."""
        inside: npt.NDArray[np.bool_] = words <= np.uint64(self.last)
        if self.first:
            inside &= words >= np.uint64(self.first)
        return inside

    def to_json(self) -> dict[str, Any]:
        """Return the field ``members`` of a lock's node."""
        first, last = word_text(self.first), word_text(self.last)
        return {"seed": self.seed, "name": self.name, "first": first, "last": last}

    @classmethod
    def of_json(cls, members: Mapping[str, Any]) -> WordRange:
        """Return the range of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: the value is another.
        """
        first, last = (int(members[name], 16) for name in ("first", "last"))
        if not 0 <= first <= last <= LAST_WORD:
            raise ValueError(f"words must be from 0 to 2**64 - 1 and in order, got {members}")
        return cls(int(members["seed"]), str(members["name"]), first, last)


def word_text(word: int) -> str:
    """Return a word as text: ``0x`` and 16 hexadecimal digits."""
    return f"0x{word:016x}"


def parts_of_range(documents: range) -> Sequence[range]:
    """Return consecutive parts of a range, the tasks of threads."""
    begins = range(documents.start, documents.stop, _PART)
    return [range(begin, min(begin + _PART, documents.stop)) for begin in begins]


def _rows_of(bits: U8) -> Iterator[U8]:
    """Yield parts of the bits, in rows of those between two counts."""
    rows = bits.reshape(-1, _RANKED // 8)
    return (rows[first : first + _FOUND] for first in range(0, len(rows), _FOUND))


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ONES = _BITS.sum(axis=1, dtype=np.uint8)
_SUM = np.uint64(0x0101010101010101)
# place of the k-th bit of a byte that is set
_PLACES = np.argsort(1 - _BITS, axis=1, kind="stable").astype(np.uint8)


def _ones_of(words: U64) -> I64:
    """Return the number of bits of each word that are set."""
    counts: U64 = _ONES[words.view(np.uint8)].view(np.uint64) * _SUM >> np.uint64(56)
    return counts.astype(np.int64)


def _step(ones: I64, left: I64) -> tuple[I64, I64]:
    """Return in which column of each row bit number ``left`` is, and its number there."""
    ends = np.cumsum(ones, axis=1)
    column = np.count_nonzero(ends <= left[:, None], axis=1)
    at = np.arange(left.size)
    return column, left - ends[at, column] + ones[at, column]


@dataclass(frozen=True, eq=False, repr=False)
class DocumentSubset:
    """Documents of a range whose words lie in a range, as the documents of an epoch.

    `megaindex.index.subset_rule` finds them; `build_index` takes one as ``documents``.
    """

    words: WordRange
    within: range
    """Sequence ids among which they are."""
    bits: U8
    """A bit for each sequence of ``within``, least significant first, and zeros behind them."""
    ranks: I32
    """int32[n]: members before every 512th sequence, and all."""
    held_from: int | None = None
    """Least word of what a rule holds out of training; None: nothing, or it is not known."""
    of_tokens: int | None = None
    """Tokens of all documents of ``within``, as far as they are known."""

    @classmethod
    def of(cls, words: WordRange, within: range) -> DocumentSubset:
        """Return the documents of ``within`` whose words are in ``words``."""
        size = -(-len(within) // _RANKED)
        bits = np.zeros(size * _RANKED // 8, np.uint8)

        def fill(part: range) -> None:
            for begin, _, chunk in words.chunks(part):
                packed = np.packbits(words.contains(chunk), bitorder="little")
                at = (begin - within.start) // 8
                bits[at : at + packed.size] = packed

        map_interruptibly(fill, parts_of_range(within), num_threads())
        counts = [_ONES[part].sum(axis=1, dtype=np.int64) for part in _rows_of(bits)]
        return cls(words, within, bits, np.concatenate([[0], *counts]).cumsum().astype(np.int32))

    def __repr__(self) -> str:
        return f"DocumentSubset({len(self)} of {self.within})"

    def __len__(self) -> int:
        return int(self.ranks[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.bits.nbytes + self.ranks.nbytes

    def sequence_ids(self, local: I64) -> I64:
        """Return the sequence ids of members, numbered in their order, int64[n]."""
        if local.size * _DECODED > len(self.within):
            every = np.flatnonzero(np.unpackbits(self.bits, bitorder="little"))
            return every[local] + self.within.start
        parts = range(0, local.size, _FOUND)
        found = [self._find(local[first : first + _FOUND]) for first in parts]
        return np.concatenate([np.empty(0, np.int64), *found])

    def _find(self, local: I64) -> I64:
        at = np.arange(local.size)
        rank = np.searchsorted(self.ranks, local, "right") - 1
        words = self.bits.view(np.uint64).reshape(-1, _RANKED // 64)[rank]
        word, left = _step(_ones_of(words), local - self.ranks[rank])
        own = words[at, word].view(np.uint8).reshape(-1, 8)
        byte, left = _step(_ONES[own].astype(np.int64), left)
        ids: I64 = rank * _RANKED + word * 64 + byte * 8 + _PLACES[own[at, byte], left]
        ids += self.within.start
        return ids

    def places(self, ids: I64) -> I64:
        """Return the numbers of those sequence ids that are members, in the order of the ids."""
        local = ids[(ids >= self.within.start) & (ids < self.within.stop)] - self.within.start
        byte, bit = local >> 3, (local & 7).astype(np.uint8)
        local = local[(self.bits[byte] >> bit & 1).view(bool)]
        found = [self._rank(local[k : k + _FOUND]) for k in range(0, local.size, _FOUND)]
        return np.concatenate([np.empty(0, np.int64), *found])

    def _rank(self, local: I64) -> I64:
        rank, rest = np.divmod(local, _RANKED)
        words = self.bits.view(np.uint64).reshape(-1, _RANKED // 64)[rank]
        # in each word the bits before the document
        kept = np.clip(rest[:, None] - 64 * np.arange(_RANKED // 64), 0, 64).astype(np.uint64)
        masks = np.where(
            kept == 64, np.uint64(LAST_WORD), (np.uint64(1) << kept % 64) - np.uint64(1)
        )
        places: I64 = self.ranks[rank] + _ones_of(words & masks).sum(axis=1)
        return places

    def lengths(self, lengths: I32) -> I32:
        """Return the lengths of the members, int32[n]."""
        chosen = np.empty(len(self), np.int32)
        for first in range(0, len(self.ranks) - 1, _FOUND):
            last = min(first + _FOUND, len(self.ranks) - 1)
            bits = self.bits[first * _RANKED // 8 : last * _RANKED // 8]
            begin = self.within.start + first * _RANKED
            of = lengths[begin : min(begin + bits.size * 8, self.within.stop)]
            member = np.unpackbits(bits, count=of.size, bitorder="little").view(bool)
            chosen[self.ranks[first] : self.ranks[last]] = of[member]
        return chosen


def lengths_of(lengths: I32, documents: Documents) -> I32:
    """Return the lengths of documents, of a range as a view."""
    if isinstance(documents, range):
        return lengths[documents.start : documents.stop]
    if isinstance(documents, DocumentSubset):
        return documents.lengths(lengths)
    return lengths[documents]


def lengths_within(lengths: I32, documents: range | DocumentSubset) -> I32:
    """Return the lengths of a range of documents, 0 for those that a subset leaves out."""
    if isinstance(documents, range):
        return lengths[documents.start : documents.stop]
    within = documents.within
    bits = np.unpackbits(documents.bits, count=len(within), bitorder="little")
    found: I32 = lengths[within.start : within.stop] * bits.astype(np.int32)
    return found


def count_tokens(lengths: I32, documents: Documents) -> int:
    """Return the number of tokens of one epoch."""
    return int(lengths_of(lengths, documents).sum(dtype=np.int64))


def sequence_ids(documents: Documents, local: I64) -> I64:
    """Return the sequence ids of documents, numbered in their order, int64[n]."""
    if isinstance(documents, range):
        return local + documents.start if documents.start else local
    if isinstance(documents, DocumentSubset):
        return documents.sequence_ids(local)
    return documents[local].astype(np.int64)


def members_of(index: object) -> DocumentSubset | None:
    """Return the documents of an index of one source if they are a subset, else None."""
    documents = getattr(index, "documents", None)
    return documents if isinstance(documents, DocumentSubset) else None
