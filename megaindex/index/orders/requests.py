"""Runs of tokens asked of several blocks, and their spans put back into the order of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megaindex.index.spans import Spans
from megaindex.kernels.types import I64


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """Tokens ``begin`` to ``end`` of ``block``, in the order in which samples read them."""

    block: I64
    begin: I64
    end: I64
    row_splits: I64
    """int64[samples + 1]: the requests of each sample."""

    @classmethod
    def split(cls, block: I64, begin: I64, end: I64, tokens_per_block: int) -> Requests:
        """One request per sample; two where ``begin`` is negative, in the block before.

        With blocks of 10 tokens, block 1, tokens -2 to 3 become block 0, 8 to 10 and block 1, 0 to
        3.
        """
        carried = begin < 0
        if not carried.any():
            return cls(block=block, begin=begin, end=end, row_splits=np.arange(block.size + 1))
        row_splits = np.concatenate(([0], np.cumsum(1 + carried)))
        sample = np.repeat(np.arange(block.size), 1 + carried)
        head = np.zeros(sample.size, bool)
        head[row_splits[:-1][carried]] = True
        return cls(
            block=block[sample] - head,
            begin=np.where(head, tokens_per_block + begin[sample], np.maximum(begin[sample], 0)),
            end=np.where(head, tokens_per_block, end[sample]),
            row_splits=row_splits,
        )


def in_order(parts: Sequence[tuple[I64, tuple[I64, I64, I64, I64]]], row_splits: I64) -> Spans:
    """One `Spans` from the answers to groups of requests.

    Args:
        parts: for each group the numbers of its requests, and (sequence, offset, length, splits).
        row_splits: the requests of each sample.
    """
    if len(parts) == 1:
        sequence, offset, length, splits = parts[0][1]
        return spans_of(sequence, offset, length, splits[row_splits])
    runs_of = np.zeros(int(row_splits[-1]), np.int64)
    for numbers, (_, _, _, splits) in parts:
        runs_of[numbers] = np.diff(splits)
    request = np.concatenate([np.repeat(numbers, runs_of[numbers]) for numbers, _ in parts])
    order = np.argsort(request, kind="stable")
    sequence, offset, length = (
        np.concatenate([answer[field] for _, answer in parts])[order] for field in range(3)
    )
    return spans_of(sequence, offset, length, np.concatenate(([0], np.cumsum(runs_of)))[row_splits])


def distinct(blocks: I64) -> list[int]:
    """The blocks there are, in order: most batches lie in one."""
    lowest = int(blocks.min())
    return [lowest] if lowest == blocks.max() else [int(block) for block in np.unique(blocks)]


def spans_of(sequence: I64, offset: I64, length: I64, row_splits: I64) -> Spans:
    """Spans of the only source."""
    return Spans(
        source=np.zeros(sequence.size, np.int32),
        document=sequence,
        offset=offset,
        length=length,
        row_splits=row_splits,
    )


def without_runs() -> Spans:
    """The spans of no samples."""
    nothing = np.zeros(0, np.int64)
    return spans_of(nothing, nothing, nothing, np.zeros(1, np.int64))
