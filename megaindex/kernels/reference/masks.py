"""What a model is told about a batch besides its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaindex.kernels.types import F32, I32, I64, IntArray


def mask_loss(
    tokens: IntArray, labels: IntArray, pad_id: int, eod_id: int | None, loss_mask: F32
) -> None:
    """Fill ``loss_mask``, and replace padding by id 0, which every embedding has.

    The mask is 0 where the label is ``pad_id`` or the token is ``eod_id``, else 1. Then tokens and
    labels that are ``pad_id`` become 0. All three are [samples, width]; the first two int64 or
    int32.
    """
    loss_mask[:] = 1
    loss_mask[labels == pad_id] = 0
    if eod_id is not None:
        loss_mask[tokens == eod_id] = 0
    tokens[tokens == pad_id] = 0
    labels[labels == pad_id] = 0


def documents_by_token(
    tokens: IntArray,
    eod_id: int,
    position_ids: I64 | None,
    cu_seqlens: I32 | None,
    max_seqlen: I32 | None,
) -> None:
    """Tell the documents of each row apart, each ending with the token ``eod_id``.

    Args:
        tokens: int64 or int32 [samples, width].
        position_ids: int64 [samples, width], filled with positions counted from the start of the
            document.
        cu_seqlens: int32 [samples, width + 1], filled with where documents begin and the last one
            ends, then with ``width``. Documents of 2 and 3 tokens give 0 2 5 5 5 5.
        max_seqlen: int32 [samples], filled with the tokens of the longest document.
    """
    width = tokens.shape[1]
    for k, row in enumerate(tokens):
        ends = [*(np.flatnonzero(row == eod_id) + 1).tolist(), width]
        _fill(k, ends, width, position_ids, cu_seqlens, max_seqlen)


def documents_by_run(
    length: I64,
    row_splits: I64,
    width: int,
    position_ids: I64 | None,
    cu_seqlens: I32 | None,
    max_seqlen: I32 | None,
) -> None:
    """The same where each run ``row_splits[k]:row_splits[k + 1]`` of row k is a document.

    What the runs leave of a row belongs to its last document; empty runs count for nothing.
    """
    for k in range(row_splits.size - 1):
        sizes = [size for size in length[row_splits[k] : row_splits[k + 1]].tolist() if size]
        ends = [*np.cumsum(sizes[:-1], dtype=np.int64).tolist(), width]
        _fill(k, ends, width, position_ids, cu_seqlens, max_seqlen)


def _fill(
    k: int,
    ends: Sequence[int],
    width: int,
    position_ids: I64 | None,
    cu_seqlens: I32 | None,
    max_seqlen: I32 | None,
) -> None:
    bounds = sorted({0, *(end for end in ends if end < width), width})
    sizes = np.diff(bounds)
    if position_ids is not None:
        position_ids[k] = np.arange(width) - np.repeat(bounds[:-1], sizes)
    if cu_seqlens is not None:
        cu_seqlens[k] = width
        cu_seqlens[k, : len(bounds)] = bounds
    if max_seqlen is not None:
        max_seqlen[k] = sizes.max(initial=0)
