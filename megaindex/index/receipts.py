"""Receipts: order-dependent checksums of served samples, of blocks and of whole indices.

A receipt is the sum, modulo 2**128, of a hash of (position in training order, spans) over samples.
Addition commutes, so receipts of ranks and workers can be added in any order; the total equals the
planned receipt exactly if every position was served once (`megaindex.loader.Recorder`). A source is
identified by the fingerprint of its lengths and document bounds, not by path, number or tokens.

One receipt for every ``stride`` positions narrows a difference to a block of samples even if the
inputs of the earlier run no longer exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaindex._types import I64, U64
from megaindex.arithmetic import INT64_MAX
from megaindex.errors import InvalidArgument
from megaindex.index.spans import (
    Index,
    Spans,
    check_range,
    iterate_spans,
    separates_documents,
)
from megaindex.kernels import active, num_threads
from megaindex.validation import CheckpointReader, check_integer, count_of, make_plain

WORD = 2**64
MASKED_KEY = np.uint64(0x9E3779B97F4A7C15)
"""Constant that changes both words of a source's key, by exclusive or, for masked spans."""
REMOVED_KEY = np.uint64(0xC2B2AE3D27D4EB4F)
"""The same for removed spans."""


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


def keys_for(index: Index, fingerprints: Sequence[str]) -> U64:
    """Return the keys of the sources of an index by fingerprints of another run.

    Sources that this run does not have get zeros, so that no receipt with their samples is equal.
    """
    keys = fingerprint_keys(fingerprints)
    missing = max(0, len(separates_documents(index)) - len(keys))
    return np.concatenate((keys, np.zeros((missing, 2), np.uint64)))


def sample_receipts(positions: I64, spans: Spans, keys: U64) -> I64:
    """Return int64[n, 3]: the position of each sample and both words of its hash.

    Rows can be collated with their samples and added by `Receipt.from_rows`.
    """
    hashes = np.zeros((positions.size, 2), np.uint64)
    add_to_blocks(positions, spans, keys, np.arange(positions.size), hashes)
    return np.column_stack((positions, hashes.view(np.int64)))


def add_to_blocks(positions: I64, spans: Spans, keys: U64, blocks: I64, sums: U64) -> None:
    """Add the hash of each sample to its row of ``sums``, uint64[blocks, 2].

    Masked and removed spans have keys of their own, so that two receipts differ by exactly these.
    The padding before a span is hashed as 2**32 times it, added to the length.
    """
    source, length = spans.source, spans.length
    if spans.padding is not None:
        # lengths are below 2**32, so the two cannot be confused
        length = length + (spans.padding << 32)
    if spans.masked is not None and spans.masked.any():
        kind = spans.masked.astype(source.dtype)
        if spans.removed is not None:
            kind += spans.removed
        # masked spans of source k count as those of source k + len(keys), removed ones as the next
        source = source + len(keys) * kind
        keys = np.concatenate((keys, keys ^ MASKED_KEY, keys ^ REMOVED_KEY))
    active().receipt_add(
        positions,
        source,
        spans.document,
        spans.offset,
        length,
        spans.row_splits,
        keys,
        blocks,
        sums,
    )


def _words(text: str) -> tuple[int, int]:
    if len(text) != 32:
        raise ValueError(text)
    return int(text[:16], 16), int(text[16:], 16)


DEFAULT_STRIDE = 2**20
LONGEST_STRIDE = 2**63  # above every position
_CHUNK = 2**15  # samples compared at once
_WORTH_THREADS = 2**16  # samples


@dataclass(frozen=True, kw_only=True)
class BlockReceipts:
    """Receipts of blocks of ``stride`` positions, by block number."""

    stride: int
    """Positions per block, a power of two: block b is positions b*stride to (b+1)*stride - 1."""
    blocks: Mapping[int, Receipt]
    """Of the blocks in which samples were served."""

    def __post_init__(self) -> None:
        make_plain(self, "stride")
        _shift(self.stride)

    @property
    def total(self) -> Receipt:
        return sum(self.blocks.values(), Receipt())

    def __add__(self, other: BlockReceipts) -> BlockReceipts:
        """Return the sum of two ranks' receipts; InvalidArgument if their strides differ."""
        self._check_stride(other)
        joined = dict(self.blocks)
        for number, receipt in other.blocks.items():
            joined[number] = joined.get(number, Receipt()) + receipt
        return BlockReceipts(stride=self.stride, blocks=joined)

    def first_difference(self, other: BlockReceipts) -> tuple[int, int] | None:
        """Return positions [begin, end) of the first block that differs, or None."""
        self._check_stride(other)
        for number in sorted(self.blocks.keys() | other.blocks.keys()):
            if self.blocks.get(number) != other.blocks.get(number):
                return number * self.stride, (number + 1) * self.stride
        return None

    def _check_stride(self, other: BlockReceipts) -> None:
        if self.stride != other.stride:
            raise InvalidArgument(
                f"block receipts must have the same stride to be combined or compared, got "
                f"{self.stride} and {other.stride}; compute both with one stride"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object for a checkpoint."""
        blocks = {str(b): [str(r), r.count] for b, r in sorted(self.blocks.items())}
        return {"stride": self.stride, "blocks": blocks}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> BlockReceipts:
        """Return the block receipts in the result of `to_dict`; FormatError if it is another."""
        given = CheckpointReader("block receipts, a stride and blocks of positions", stored)
        stride = given.integer("stride", least=1, most=LONGEST_STRIDE)
        if stride & (stride - 1):
            raise given.error("stride must be a power of two", stride)
        blocks = {}
        for key, pair in given.part("blocks", "the blocks of block receipts").values.items():
            number = int(key) if key.isdecimal() and len(key) <= 19 else -1
            if number < 0 or str(number) != key or number * stride > INT64_MAX:
                raise given.error("the keys of blocks must be block numbers", key)
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise given.error(f"block {key} must be a receipt and a number of samples", pair)
            blocks[number] = Receipt.from_dict({"receipt": pair[0], "samples": pair[1]})
        return cls(stride=stride, blocks=blocks)


def planned_receipt(index: Index, begin: int, end: int, keys: U64) -> Receipt:
    """Return the receipt of samples ``begin`` to ``end - 1``, computed from the index.

    Uses all threads and constant memory. It equals the sum of all ranks' receipts exactly if every
    sample of the range was served once.

    Args:
        index: any index.
        begin: first sample id.
        end: last sample id + 1.
        keys: uint64[sources, 2] of `fingerprint_keys`.

    Raises:
        OutOfRange: the range is outside the index.
        InvalidArgument: the index has more sources than ``keys``.
    """
    return planned_block_receipts(index, begin, end, keys, stride=LONGEST_STRIDE).total


def planned_block_receipts(
    index: Index, begin: int, end: int, keys: U64, *, stride: int = DEFAULT_STRIDE
) -> BlockReceipts:
    """Return the receipts of blocks of ``stride`` positions, see `planned_receipt`.

    Raises:
        OutOfRange: the range is outside the index.
        InvalidArgument: ``stride`` is not a power of two, or the index has more sources.
    """
    begin, end = check_range(index, begin, end)
    stride = check_integer("stride", stride)
    shift = _shift(stride)
    first, last = begin >> shift, max(begin, end - 1) >> shift
    found = _sums(index, begin, end, keys, last - first + 1, lambda ids: (ids >> shift) - first)
    blocks = {number: receipt for number, receipt in enumerate(found, first) if receipt.count}
    return BlockReceipts(stride=stride, blocks=blocks)


def receipts_between(
    index: Index,
    bounds: Sequence[int],
    keys: U64,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Receipt]:
    """Return the receipts of samples ``bounds[k]`` to ``bounds[k + 1] - 1``, computed together.

    Args:
        bounds: rising sample ids, at least two.
        keys: uint64[sources, 2] of `fingerprint_keys`.
        progress: called with (done, total) samples.
    """
    begin, end = check_range(index, bounds[0], bounds[-1])
    inner = np.array(bounds[1:-1], np.int64)
    size = bounds[1] - bounds[0]

    def block_of(ids: I64) -> I64:
        if is_even:
            return np.minimum((ids - begin) // size, last)
        return np.searchsorted(inner, ids, "right")

    is_even = size > 0 and bool((np.diff(bounds[:-1]) == size).all())
    last = len(bounds) - 2
    return _sums(index, begin, end, keys, len(bounds) - 1, block_of, progress)


def _sums(
    index: Index,
    begin: int,
    end: int,
    keys: U64,
    count: int,
    block_of: Callable[[I64], I64],
    progress: Callable[[int, int], None] | None = None,
) -> list[Receipt]:
    """Return the receipt of the samples of each block, by their number."""
    sources = len(separates_documents(index))
    if len(keys) < sources:
        raise InvalidArgument(
            f"keys: must be of the {count_of(sources, 'source')} of the index, got {len(keys)}"
        )
    # fewer samples take less time than starting threads
    threads = num_threads() if end - begin >= _WORTH_THREADS else 1
    done = [0] * threads

    def share(part: int) -> tuple[U64, I64]:
        sums, counts = np.zeros((count, 2), np.uint64), np.zeros(count, np.int64)
        for positions, spans in iterate_spans(index, begin, end, part, threads):
            numbers = block_of(positions)
            add_to_blocks(positions, spans, keys, numbers, sums)
            np.add.at(counts, numbers, 1)
            done[part] += positions.size
            # one thread reports for all, so that the callback need not be safe between threads
            if progress is not None and part == 0:
                progress(sum(done), end - begin)
        return sums, counts

    with ThreadPoolExecutor(threads, "megaindex-receipt") as pool:
        shares = list(pool.map(share, range(threads)))
    total = _total([sums for sums, _ in shares])
    served = np.sum([counts for _, counts in shares], axis=0)  # positions without holes
    return [
        Receipt((high, low), number)
        for (high, low), number in zip(total.tolist(), served.tolist(), strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """First sample that differs between two indices."""

    position: int
    ours: list[tuple[int, int, int, int]]
    """Spans of the sample in the first index: source, document, offset, length."""
    theirs: list[tuple[int, int, int, int]]
    """Spans of the sample in the second index."""

    def __str__(self) -> str:
        return (
            f"sample {self.position}: {_text(self.ours)} in one, {_text(self.theirs)} in the other"
        )


def explain(
    index_a: Index, index_b: Index, begin: int, end: int, keys_a: U64, keys_b: U64 | None = None
) -> FirstDifference | None:
    """Return the first of samples ``begin`` to ``end - 1`` that differs, or None.

    Args:
        keys_a: `fingerprint_keys` of the sources of ``index_a``.
        keys_b: of ``index_b``. Default: ``keys_a``.
    """
    keys_b = keys_a if keys_b is None else keys_b
    begin, end = check_range(index_a, begin, end)
    for start in range(begin, end, _CHUNK):
        positions = np.arange(start, min(end, start + _CHUNK))
        a, b = index_a.locate(positions), index_b.locate(positions)
        # sums of a chunk first: the hash of each sample is needed in one chunk at most
        if Receipt.of(positions, a, keys_a) == Receipt.of(positions, b, keys_b):
            continue
        differs = sample_receipts(positions, a, keys_a) != sample_receipts(positions, b, keys_b)
        k = int(np.flatnonzero(differs.any(axis=1))[0])
        return FirstDifference(position=int(positions[k]), ours=_row(a, k), theirs=_row(b, k))
    return None


def _total(parts: list[U64]) -> U64:
    """Return the sums of (high, low) rows, modulo 2**128."""
    total, *others = parts
    for part in others:
        total[:, 1] += part[:, 1]
        total[:, 0] += part[:, 0] + (total[:, 1] < part[:, 1])  # the carry
    return total


def _shift(stride: int) -> int:
    shift = stride.bit_length() - 1
    if stride < 1 or stride != 1 << shift or stride > LONGEST_STRIDE:
        raise InvalidArgument(f"stride must be a power of two up to 2**63, got {stride}")
    return shift


def _row(spans: Spans, k: int) -> list[tuple[int, int, int, int]]:
    row = slice(spans.row_splits[k], spans.row_splits[k + 1])
    source, document, offset, length = (part[row].tolist() for part in spans)
    return list(zip(source, document, offset, length, strict=True))


def _text(spans: list[tuple[int, int, int, int]]) -> str:
    return ", ".join(
        f"tokens {offset} to {offset + length} of sequence {document} (source {source})"
        for source, document, offset, length in spans
    )
