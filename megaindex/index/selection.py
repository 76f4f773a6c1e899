"""Which sequences of a dataset make up one epoch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument
from megaindex.index.arithmetic import INT32_MAX
from megaindex.index.dialect import SPLITS, Dialect
from megaindex.index.plain import check_choice
from megaindex.kernels.types import I32


def select_documents(
    num_sequences: int,
    name: str,
    row: Dialect,
    *,
    documents: npt.ArrayLike | range | None = None,
    split: str | None = None,
    subset: str = "train",
) -> range | I32:
    """Sequence ids of one epoch: a range where possible, since it costs no memory.

    Args:
        num_sequences: sequences of the dataset.
        name: of the dataset, for messages.
        row: the dialect, which decides how a split is rounded.
        documents: the ids themselves; or
        split: ``"969,30,1"``, of which ``subset`` names the part.

    Raises:
        InvalidArgument: both given, ids out of range or not integers, or nothing selected.
    """
    chosen: range | I32
    if split is not None and documents is not None:
        raise InvalidArgument("documents and split both choose documents; give one of them")
    check_choice("subset", subset, SPLITS)
    if split is not None:
        chosen = range(*row.split_bounds(split, num_sequences)[SPLITS.index(subset)])
    elif documents is None:
        chosen = range(num_sequences)
    elif isinstance(documents, range) and documents.step == 1:
        chosen = documents
    else:
        chosen = _as_ids(documents)
    _check_inside(chosen, num_sequences, name, f"the {subset} part of split {split}")
    return chosen


def count_tokens(lengths: I32, documents: range | I32) -> int:
    """Tokens of one epoch."""
    if isinstance(documents, range):
        return int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
    return int(lengths[documents].sum(dtype=np.int64))


def _as_ids(documents: npt.ArrayLike) -> I32:
    ids = np.asarray(documents)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"documents must be integers in one dimension, got {ids.dtype} of shape {ids.shape}"
        )
    if ids.size and int(ids.max()) > INT32_MAX:
        raise InvalidArgument(f"documents must be below 2**31, got {int(ids.max())}")
    return np.ascontiguousarray(ids, np.int32)


def _check_inside(chosen: range | I32, num_sequences: int, name: str, part: str) -> None:
    if len(chosen) == 0:
        raise InvalidArgument(
            f"{name}: {part} holds none of the {num_sequences} sequences; choose more of them"
        )
    low, high = (
        (chosen.start, chosen.stop - 1)
        if isinstance(chosen, range)
        else (int(chosen.min()), int(chosen.max()))
    )
    if low < 0 or high >= num_sequences:
        raise InvalidArgument(
            f"{name}: documents must be from 0 to {num_sequences - 1}, its sequences, got "
            f"{low if low < 0 else high}"
        )
