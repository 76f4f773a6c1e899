"""Receipts: a proof of what was served, and where it first differs from what was planned.

A receipt is the sum, modulo 2**128, of a hash of (position in the training order, runs of tokens
served there) over samples. Sums commute: ranks and workers add what they served, in any order, and
the total equals the planned one exactly if every sample was served once, at its position. A source
enters by the fingerprint of its content, never by path or number.

A ladder keeps one receipt for every ``stride`` positions, so that a difference can be narrowed to a
block of samples even where the old inputs are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaindex.errors import FormatError, InvalidArgument, OutOfRange
from megaindex.index.spans import Index, Spans
from megaindex.kernels import active
from megaindex.kernels.types import I64, U64

WORD = 2**64
DEFAULT_STRIDE = 2**20
_WHOLE = 2**63  # a stride above every position
_CHUNK = 2**15  # samples located at once


@dataclass(frozen=True)
class Receipt:
    """The sum over some samples, and how many there were; ``+`` joins disjoint sets of samples."""

    words: tuple[int, int] = (0, 0)
    """High and low 64 bits of the sum."""
    count: int = 0

    @classmethod
    def of(cls, positions: I64, spans: Spans, keys: U64) -> Receipt:
        """The receipt of samples at ``positions``, int64[n], that read ``spans``.

        ``keys`` are the sources' fingerprints, see `fingerprint_keys`.
        """
        sums = np.zeros((1, 2), np.uint64)
        _add(positions, spans, keys, np.zeros(positions.size, np.int64), sums)
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
        try:
            text, count = str(stored["receipt"]), int(stored["samples"])
            high, low = _words(text)
        except (KeyError, TypeError, ValueError):
            raise FormatError(
                f"a stored receipt holds 32 hex digits and a number of samples, got {stored!r}; "
                "take it from an intact checkpoint"
            ) from None
        return cls((high, low), count)


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """One receipt for each block of ``stride`` positions in which samples were served."""

    stride: int
    """Positions of a block, a power of two: block b is positions b*stride ... (b+1)*stride - 1."""
    blocks: Mapping[int, Receipt]

    def __post_init__(self) -> None:
        _shift(self.stride)

    @property
    def total(self) -> Receipt:
        return sum(self.blocks.values(), Receipt())

    def __add__(self, other: Ladder) -> Ladder:
        """Both together, as where ranks are summed.

        Raises:
            InvalidArgument: their strides differ.
        """
        self._check_stride(other)
        joined = dict(self.blocks)
        for number, receipt in other.blocks.items():
            joined[number] = joined.get(number, Receipt()) + receipt
        return Ladder(stride=self.stride, blocks=joined)

    def first_difference(self, other: Ladder) -> tuple[int, int] | None:
        """Positions [begin, end) of the first block that differs; None where all agree."""
        self._check_stride(other)
        for number in sorted(self.blocks.keys() | other.blocks.keys()):
            if self.blocks.get(number) != other.blocks.get(number):
                return number * self.stride, (number + 1) * self.stride
        return None

    def _check_stride(self, other: Ladder) -> None:
        if self.stride != other.stride:
            raise InvalidArgument(
                f"ladders of stride {self.stride} and {other.stride} do not compare; make both "
                "with the same stride"
            )

    def to_dict(self) -> dict[str, Any]:
        """A few dozen bytes a block, for a checkpoint."""
        blocks = {str(b): [str(r), r.count] for b, r in sorted(self.blocks.items())}
        return {"stride": self.stride, "blocks": blocks}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Ladder:
        """
        Raises:
            FormatError: not what `to_dict` gives.
        """
        try:
            rows = [(int(b), str(text), count) for b, (text, count) in stored["blocks"].items()]
            stride = int(stored["stride"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise FormatError(
                "a stored ladder holds a stride and blocks of a receipt and a number of samples; "
                "take it from an intact checkpoint"
            ) from None
        blocks = {b: Receipt.from_dict({"receipt": t, "samples": n}) for b, t, n in rows}
        return cls(stride=stride, blocks=blocks)


def fingerprint_keys(fingerprints: Sequence[str]) -> U64:
    """Fingerprints of the sources, 32 hex digits each, as uint64[sources, 2] for the kernels.

    Raises:
        InvalidArgument: none, or one that is not 32 hex digits.
    """
    try:
        rows = [_words(text) for text in fingerprints]
    except ValueError:
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
    _add(positions, spans, keys, np.arange(positions.size), hashes)
    return np.column_stack((positions, hashes.view(np.int64)))


def planned_receipt(index: Index, begin: int, end: int, keys: U64) -> Receipt:
    """The receipt of samples begin ... end - 1, recomputed from the index in constant memory.

    Raises:
        OutOfRange: the index does not hold them.
    """
    return planned_ladder(index, begin, end, keys, stride=_WHOLE).total


def planned_ladder(
    index: Index, begin: int, end: int, keys: U64, *, stride: int = DEFAULT_STRIDE
) -> Ladder:
    """The ladder of samples begin ... end - 1, recomputed from the index.

    Raises:
        OutOfRange: the index does not hold them.
        InvalidArgument: ``stride`` is not a power of two.
    """
    shift = _shift(stride)
    first, last = begin >> shift, max(begin, end - 1) >> shift
    sums = np.zeros((last - first + 1, 2), np.uint64)
    for positions in _chunks(index, begin, end):
        _add(positions, index.locate(positions), keys, (positions >> shift) - first, sums)
    blocks = {}
    for number, (high, low) in enumerate(sums.tolist(), first):
        count = min(end, (number + 1) << shift) - max(begin, number << shift)
        if count > 0:
            blocks[number] = Receipt((high, low), count)
    return Ladder(stride=stride, blocks=blocks)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first sample of two indices that differs."""

    position: int
    ours: list[tuple[int, int, int, int]]
    """Runs there in the first index: source, document, offset, length."""
    theirs: list[tuple[int, int, int, int]]
    """Runs there in the second."""

    def __str__(self) -> str:
        return (
            f"sample {self.position}: {_runs(self.ours)} in one, {_runs(self.theirs)} in the other"
        )


def explain(
    index_a: Index, index_b: Index, begin: int, end: int, keys_a: U64, keys_b: U64 | None = None
) -> Difference | None:
    """The first of the samples begin ... end - 1 that differs, or None where none does.

    Compares the receipts of blocks, then those of the samples of the first block that differs.

    Args:
        keys_a: fingerprints of the sources of ``index_a``.
        keys_b: of ``index_b``. Default: the same.
    """
    keys_b = keys_a if keys_b is None else keys_b
    for positions in _chunks(index_a, begin, end):
        a, b = index_a.locate(positions), index_b.locate(positions)
        if Receipt.of(positions, a, keys_a) == Receipt.of(positions, b, keys_b):
            continue
        differs = sample_receipts(positions, a, keys_a) != sample_receipts(positions, b, keys_b)
        k = int(np.flatnonzero(differs.any(axis=1))[0])
        return Difference(position=int(positions[k]), ours=_of(a, k), theirs=_of(b, k))
    return None


def _chunks(index: Index, begin: int, end: int) -> Iterator[I64]:
    if not 0 <= begin <= end <= index.num_samples:
        raise OutOfRange(
            f"samples {begin} to {end} were asked for, the index holds samples 0 to "
            f"{index.num_samples}; ask for a range inside"
        )
    for start in range(begin, end, _CHUNK):
        yield np.arange(start, min(end, start + _CHUNK))


def _add(positions: I64, spans: Spans, keys: U64, blocks: I64, sums: U64) -> None:
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


def _shift(stride: int) -> int:
    shift = stride.bit_length() - 1
    if stride < 1 or stride != 1 << shift or stride > _WHOLE:
        raise InvalidArgument(f"stride must be a power of two up to 2**63, got {stride}")
    return shift


def _words(text: str) -> tuple[int, int]:
    if len(text) != 32:
        raise ValueError(text)
    return int(text[:16], 16), int(text[16:], 16)


def _of(spans: Spans, k: int) -> list[tuple[int, int, int, int]]:
    runs = slice(spans.row_splits[k], spans.row_splits[k + 1])
    source, document, offset, length = (part[runs].tolist() for part in spans)
    return list(zip(source, document, offset, length, strict=True))


def _runs(runs: list[tuple[int, int, int, int]]) -> str:
    return ", ".join(
        f"tokens {offset} to {offset + length} of sequence {document} (source {source})"
        for source, document, offset, length in runs
    )
