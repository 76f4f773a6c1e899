"""Masks and document bounds in Numba; see reference/masks.py for what they are."""

from __future__ import annotations

import numba
import numpy as np

from megaindex.kernels.types import F32, I32, I64, IntArray

__all__ = ["documents_by_run", "documents_by_token", "mask_loss"]


@numba.njit(cache=True, nogil=True)
def _mask_loss(tokens, labels, pad_id, has_eod, eod_id, loss_mask):  # type: ignore[no-untyped-def]
    for k in range(tokens.shape[0]):
        for j in range(tokens.shape[1]):
            token, label = tokens[k, j], labels[k, j]
            masked = label == pad_id or (has_eod and token == eod_id)
            loss_mask[k, j] = 0 if masked else 1
            tokens[k, j] = 0 if token == pad_id else token
            labels[k, j] = 0 if label == pad_id else label


def mask_loss(
    tokens: IntArray, labels: IntArray, pad_id: int, eod_id: int | None, loss_mask: F32
) -> None:
    _mask_loss(tokens, labels, pad_id, eod_id is not None, eod_id or 0, loss_mask)


@numba.njit(cache=True, nogil=True)
def _row(k, ends, width, position_ids, cu_seqlens, max_seqlen):  # type: ignore[no-untyped-def]
    """Row k, whose documents end at ``ends``; what is left belongs to one more."""
    begin, documents, longest = 0, 0, 0
    for i in range(ends.size + 1):
        end = min(ends[i], width) if i < ends.size else width
        if end <= begin:
            continue
        if position_ids is not None:
            position_ids[k, begin:end] = np.arange(end - begin)
        if cu_seqlens is not None:
            cu_seqlens[k, documents] = begin
        documents += 1
        longest = max(longest, end - begin)
        begin = end
    if cu_seqlens is not None:
        cu_seqlens[k, documents:] = width
    if max_seqlen is not None:
        max_seqlen[k] = longest


@numba.njit(cache=True, nogil=True)
def _by_token(tokens, eod_id, position_ids, cu_seqlens, max_seqlen):  # type: ignore[no-untyped-def]
    for k in range(tokens.shape[0]):
        ends = np.flatnonzero(tokens[k] == eod_id) + 1
        _row(k, ends, tokens.shape[1], position_ids, cu_seqlens, max_seqlen)


def documents_by_token(
    tokens: IntArray,
    eod_id: int,
    position_ids: I64 | None,
    cu_seqlens: I32 | None,
    max_seqlen: I32 | None,
) -> None:
    _by_token(tokens, eod_id, position_ids, cu_seqlens, max_seqlen)


@numba.njit(cache=True, nogil=True)
def _by_run(length, splits, width, position_ids, cu_seqlens, max_seqlen):  # type: ignore[no-untyped-def]
    for k in range(splits.size - 1):
        sizes = length[splits[k] : splits[k + 1]]
        ends = np.cumsum(sizes[sizes > 0])[:-1]
        _row(k, ends, width, position_ids, cu_seqlens, max_seqlen)


def documents_by_run(
    length: I64,
    row_splits: I64,
    width: int,
    position_ids: I64 | None,
    cu_seqlens: I32 | None,
    max_seqlen: I32 | None,
) -> None:
    _by_run(length, row_splits, width, position_ids, cu_seqlens, max_seqlen)
