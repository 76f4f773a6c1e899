"""Receipts: a proof of what was served.

A receipt is the sum, modulo 2**128, of a hash of (position in the training order, runs of tokens
served there) over samples. Sums commute: ranks and workers add what they served, in any order, and
the total equals the planned one exactly if every position was served once, whenever it was: see
`megaindex.loader.Recorder`. A source enters by the fingerprint of its lengths and document bounds,
never by path or number, nor by its tokens: see `megaindex.cache.fingerprint.content_fingerprint`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaindex._types import I64, U64
from megaindex.errors import InvalidArgument
from megaindex.index.spans import Spans
from megaindex.kernels import active
from megaindex.validation import CheckpointReader

WORD = 2**64


@dataclass(frozen=True)
class Receipt:
    """The sum over some samples, and how many there were; ``+`` joins disjoint sets of samples."""

    words: tuple[int, int] = (0, 0)
    """High and low 64 bits of the sum."""
    count: int = 0

    @classmethod
    def of(cls, positions: I64, spans: Spans, keys: U64) -> Receipt:
        """Return the receipt of samples at ``positions``, int64[n], that read ``spans``.

        ``keys`` are the sources' fingerprints, see `fingerprint_keys`.
        """
        sums = np.zeros((1, 2), np.uint64)
        add_to_blocks(positions, spans, keys, np.zeros(positions.size, np.int64), sums)
        return cls((int(sums[0, 0]), int(sums[0, 1])), positions.size)

    @classmethod
    def from_rows(cls, rows: I64) -> Receipt:
        """Of what `sample_receipts` gave, int64[n, 3]."""
        words = rows[:, 1:].view(np.uint64).tolist()
        total = sum(high * WORD + low for high, low in words)
        return cls((total // WORD % WORD, total % WORD), len(words))

    def add(self, positions: I64, spans: Spans, keys: U64) -> Receipt:
        """This receipt with more samples."""
        return self + Receipt.of(positions, spans, keys)

    def __add__(self, other: Receipt) -> Receipt:
        low = self.words[1] + other.words[1]
        high = self.words[0] + other.words[0] + low // WORD
        return Receipt((high % WORD, low % WORD), self.count + other.count)

    def limbs(self) -> I64:
        """int64[5]: the sum in 32-bit limbs, lowest first, and the count.

        What `torch.distributed.all_reduce` makes of it by addition, over up to 2**31 ranks, is what
        `from_limbs` turns into the receipt of all ranks together.
        """
        high, low = self.words
        parts = [low % 2**32, low >> 32, high % 2**32, high >> 32, self.count]
        return np.array(parts, np.int64)

    @classmethod
    def from_limbs(cls, limbs: I64) -> Receipt:
        *parts, count = limbs.tolist()
        total = sum(part << 32 * k for k, part in enumerate(parts))
        return cls((total // WORD % WORD, total % WORD), count)

    def __str__(self) -> str:
        return f"{self.words[0]:016x}{self.words[1]:016x}"

    def to_dict(self) -> dict[str, Any]:
        return {"receipt": str(self), "samples": self.count}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Receipt:
        """
        Raises:
            FormatError: not what `to_dict` gives.
        """
        given = CheckpointReader("a receipt, 32 hex digits and a number of samples", stored)
        return cls(_words(given.hashed("receipt")), given.integer("samples"))


def fingerprint_keys(fingerprints: Sequence[str]) -> U64:
    """Fingerprints of the sources, 32 hex digits each, as uint64[sources, 2] for the kernels.

    Raises:
        InvalidArgument: none, or one that is not 32 hex digits.
    """
    try:
        rows = [_words(text) for text in fingerprints]
    except (ValueError, TypeError):
        rows = []
    if not rows or isinstance(fingerprints, str):
        raise InvalidArgument(
            "fingerprints must be a list with 32 hex digits for each source, as "
            f"corpus_fingerprint gives, got {fingerprints!r}"
        )
    return np.array(rows, np.uint64)


def sample_receipts(positions: I64, spans: Spans, keys: U64) -> I64:
    """One row for each sample, int64[n, 3]: its position, and the words of its hash (as int64).

    For where samples travel on one by one: rows can be collated, and `Receipt.from_rows` adds them.
    """
    hashes = np.zeros((positions.size, 2), np.uint64)
    add_to_blocks(positions, spans, keys, np.arange(positions.size), hashes)
    return np.column_stack((positions, hashes.view(np.int64)))


def add_to_blocks(positions: I64, spans: Spans, keys: U64, blocks: I64, sums: U64) -> None:
    """Add the hash of each sample to its row of ``sums``, uint64[blocks, 2]."""
    active().receipt_add(
        positions,
        spans.source,
        spans.document,
        spans.offset,
        spans.length,
        spans.row_splits,
        keys,
        blocks,
        sums,
    )


def _words(text: str) -> tuple[int, int]:
    if len(text) != 32:
        raise ValueError(text)
    return int(text[:16], 16), int(text[16:], 16)
