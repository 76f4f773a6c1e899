"""Receipts of blocks of positions, planned receipts of an index, and the first difference of two.

One receipt for every ``stride`` positions narrows a difference to a block of samples even if the
inputs of the earlier run no longer exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaindex._types import I64, U64
from megaindex.arithmetic import INT64_MAX
from megaindex.errors import InvalidArgument
from megaindex.index.receipts import Receipt, add_to_blocks, sample_receipts
from megaindex.index.spans import Index, Spans, check_range, iterate_spans
from megaindex.kernels import num_threads
from megaindex.validation import CheckpointReader, check_integer, make_plain

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
            if str(number) != key or number * stride > INT64_MAX:
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
    """
    return planned_block_receipts(index, begin, end, keys, stride=LONGEST_STRIDE).total


def planned_block_receipts(
    index: Index, begin: int, end: int, keys: U64, *, stride: int = DEFAULT_STRIDE
) -> BlockReceipts:
    """Return the receipts of blocks of ``stride`` positions, see `planned_receipt`.

    Raises:
        OutOfRange: the range is outside the index.
        InvalidArgument: ``stride`` is not a power of two.
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
        index: any index.
        bounds: rising sample ids, at least two.
        keys: uint64[sources, 2] of `fingerprint_keys`.
        progress: called with (done, total) samples.

    Raises:
        OutOfRange: a bound is outside the index.
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
    threads = num_threads() if end - begin >= _WORTH_THREADS else 1
    done = [0] * threads

    def share(part: int) -> tuple[U64, I64]:
        sums, counts = np.zeros((count, 2), np.uint64), np.zeros(count, np.int64)
        for positions, spans in iterate_spans(index, begin, end, part, threads):
            numbers = block_of(positions)
            add_to_blocks(positions, spans, keys, numbers, sums)
            np.add.at(counts, numbers, 1)
            done[part] += positions.size
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
    for positions in _chunks(index_a, begin, end):
        a, b = index_a.locate(positions), index_b.locate(positions)
        if Receipt.of(positions, a, keys_a) == Receipt.of(positions, b, keys_b):
            continue
        differs = sample_receipts(positions, a, keys_a) != sample_receipts(positions, b, keys_b)
        k = int(np.flatnonzero(differs.any(axis=1))[0])
        return FirstDifference(position=int(positions[k]), ours=_row(a, k), theirs=_row(b, k))
    return None


def _chunks(index: Index, begin: int, end: int) -> Iterator[I64]:
    begin, end = check_range(index, begin, end)
    for start in range(begin, end, _CHUNK):
        yield np.arange(start, min(end, start + _CHUNK))


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
