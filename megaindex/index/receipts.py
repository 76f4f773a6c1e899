"""Receipts: order-dependent checksums of served samples.

A receipt is the sum, modulo 2**128, of a hash of (position in training order, spans) over samples.
Addition commutes, so receipts of ranks and workers can be added in any order; the total equals the
planned receipt exactly if every position was served once (`megaindex.loader.Recorder`). A source is
identified by the fingerprint of its lengths and document bounds, not by path, number or tokens.
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
MASKED_KEY = np.uint64(0x9E3779B97F4A7C15)
"""Constant that changes both words of a source's key, by exclusive or, for masked spans."""


@dataclass(frozen=True)
class Receipt:
    """Checksum of a set of samples; ``+`` gives that of the union of disjoint sets.

    Attributes:
        words: high and low 64 bits of the sum.
        count: number of samples.
    """

    words: tuple[int, int] = (0, 0)
    count: int = 0

    @classmethod
    def of(cls, positions: I64, spans: Spans, keys: U64) -> Receipt:
        """Return the receipt of n samples.

        Args:
            positions: int64[n], positions in training order.
            spans: of the n samples.
            keys: uint64[sources, 2] of `fingerprint_keys`.
        """
        sums = np.zeros((1, 2), np.uint64)
        add_to_blocks(positions, spans, keys, np.zeros(positions.size, np.int64), sums)
        return cls((int(sums[0, 0]), int(sums[0, 1])), positions.size)

    @classmethod
    def from_rows(cls, rows: I64) -> Receipt:
        """Return the receipt of the samples of `sample_receipts`, int64[n, 3]."""
        words = rows[:, 1:].view(np.uint64).tolist()
        total = sum(high * WORD + low for high, low in words)
        return cls((total // WORD % WORD, total % WORD), len(words))

    def add(self, positions: I64, spans: Spans, keys: U64) -> Receipt:
        """Return the receipt with the samples of `Receipt.of` added."""
        return self + Receipt.of(positions, spans, keys)

    def __add__(self, other: Receipt) -> Receipt:
        low = self.words[1] + other.words[1]
        high = self.words[0] + other.words[0] + low // WORD
        return Receipt((high % WORD, low % WORD), self.count + other.count)

    def limbs(self) -> I64:
        """Return int64[5]: the sum in 32-bit limbs, lowest first, and the count.

        `torch.distributed.all_reduce` can add these arrays over up to 2**31 ranks; `from_limbs`
        converts the result into the receipt of all ranks.
        """
        high, low = self.words
        parts = [low % 2**32, low >> 32, high % 2**32, high >> 32, self.count]
        return np.array(parts, np.int64)

    @classmethod
    def from_limbs(cls, limbs: I64) -> Receipt:
        """Return the receipt of an array, or a sum of arrays, of `limbs`."""
        *parts, count = limbs.tolist()
        total = sum(part << 32 * k for k, part in enumerate(parts))
        return cls((total // WORD % WORD, total % WORD), count)

    def __str__(self) -> str:
        return f"{self.words[0]:016x}{self.words[1]:016x}"

    def to_dict(self) -> dict[str, Any]:
        """Return the receipt as 32 hex digits, and the number of samples."""
        return {"receipt": str(self), "samples": self.count}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Receipt:
        """Return the receipt in the result of `to_dict`; FormatError if it is another."""
        given = CheckpointReader("a receipt, 32 hex digits and a number of samples", stored)
        return cls(_words(given.hashed("receipt")), given.integer("samples"))


def fingerprint_keys(fingerprints: Sequence[str]) -> U64:
    """Return fingerprints of the sources, 32 hex digits each, as uint64[sources, 2].

    Raises:
        InvalidArgument: the list is empty, or an element is not 32 hex digits.
    """
    try:
        rows = [_words(text) for text in fingerprints]
    except (ValueError, TypeError):
        rows = []
    if not rows or isinstance(fingerprints, str):
        raise InvalidArgument(
            "fingerprints must be a list with 32 hex digits for each source, the results of "
            f"corpus_fingerprint, got {fingerprints!r}"
        )
    return np.array(rows, np.uint64)


def sample_receipts(positions: I64, spans: Spans, keys: U64) -> I64:
    """Return int64[n, 3]: the position of each sample and both words of its hash.

    Rows can be collated with their samples and added by `Receipt.from_rows`.
    """
    hashes = np.zeros((positions.size, 2), np.uint64)
    add_to_blocks(positions, spans, keys, np.arange(positions.size), hashes)
    return np.column_stack((positions, hashes.view(np.int64)))


def add_to_blocks(positions: I64, spans: Spans, keys: U64, blocks: I64, sums: U64) -> None:
    """Add the hash of each sample to its row of ``sums``, uint64[blocks, 2].

    Masked spans have a key of their own, so that two receipts differ by exactly what was masked.
    """
    source = spans.source
    if spans.masked is not None and spans.masked.any():
        source = source + len(keys) * spans.masked.astype(source.dtype)
        keys = np.concatenate((keys, keys ^ MASKED_KEY))
    active().receipt_add(
        positions,
        source,
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
