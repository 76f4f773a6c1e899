"""Loss targets of instruction data: labels and loss masks.

A blend mixes rows of text, in which every token carries loss (of order packed, all but the first of
each document), with rows of instruction data. For
the latter, a companion dataset marks the targets token by token: labels (-100: not a target) or a
loss mask (0: not a target). A row of two documents of 3 and 2 tokens, with the mask 0 1 1 | 0 1:

    tokens      a b c | d e
    labels      b c - | e -        the token after each, within its document
    loss_mask   1 1 0 | 1 0        1 where that token is a target
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megaindex._types import F32, I64, IntArray
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.index.source_targets import SourceTargets
from megaindex.index.spans import IGNORED_LABEL, Index, Spans, separates_documents
from megaindex.loader.positional_reader import plain_reader

if TYPE_CHECKING:
    from megaindex.builders.recipe import OpenRecipe, OpenSource
    from megaindex.run.run import Run, RunSource


class Targets:
    """Loss targets of all sources of an index; safe to share between threads.

    Args:
        sources: targets of each source, in the order of the index; None for text.
    """

    def __init__(self, sources: Sequence[SourceTargets | None]) -> None:
        self.sources = tuple(sources)
        kinds = [None if source is None else source.kind for source in sources]
        self._is_text = np.array([kind is None for kind in kinds])
        self._is_labels = np.array([kind == "labels" for kind in kinds])
        self._is_mask = np.array([kind == "loss_mask" for kind in kinds])
        companions = [s.companion for s in sources if s is not None and s.companion is not None]
        self._reader = plain_reader(companions) if companions else None
        # the number of each source's companion
        has = self._is_labels | self._is_mask
        self._companion = np.where(has, np.cumsum(has) - 1, -1).astype(np.int32)

    def apply(self, spans: Spans, labels: IntArray, loss_mask: F32) -> bool:
        """Set labels and loss mask of the rows of instruction data; return True if there are any.

        Args:
            spans: spans of the rows.
            labels: int[rows, S], the token after each; set to 0 where it is not a target.
            loss_mask: float32[rows, S]; set to 1 at targets, else to 0; of kind all, a target that
                is 0 stays 0. Rows of text are not changed.

        Raises:
            OutOfRange, FormatError, StorageError: a companion cannot be read.
        """
        rows, source = self._instructed(spans)
        if rows.size == 0:
            return False
        part = _rows_of(spans, rows)
        target = labels_within_documents(part, labels.shape[1])
        labelled, masked = self._is_labels[source], self._is_mask[source]
        if (labelled | masked).any():
            entries = self._companion_entries(part, labels.shape[1])
            target[labelled] &= entries[labelled] != IGNORED_LABEL
            target[masked] &= entries[masked] > 0
            changed = labels[rows]
            changed[labelled] = entries[labelled]
            labels[rows] = changed
        every = ~(labelled | masked)  # other rules of the options stay, such as eod_mask_loss
        target[every] &= loss_mask[rows[every]] > 0
        loss_mask[rows] = target
        kept = labels[rows]
        kept[~target] = 0
        labels[rows] = kept
        return True

    def _instructed(self, spans: Spans) -> tuple[I64, I64]:
        """Return the rows of instruction data and their sources."""
        filled = np.flatnonzero(np.diff(spans.row_splits))
        source = spans.source[spans.row_splits[filled]]
        chosen = ~self._is_text[source]
        return filled[chosen], source[chosen]

    def _companion_entries(self, part: Spans, width: int) -> IntArray:
        """Return the companion's entry of each label, int64[rows, width]."""
        assert self._reader is not None, "SourceTargets requires a companion"
        companion = self._companion[part.source]
        ours = _rows_of(part, np.arange(part.row_splits.size - 1), keep=companion >= 0)
        numbered = replace(ours, source=self._companion[ours.source])
        entries = np.empty((part.row_splits.size - 1, width), np.int64)
        following = np.empty_like(entries)
        self._reader.read(numbered, entries, following, pad_id=IGNORED_LABEL)
        return following


def labels_within_documents(spans: Spans, width: int) -> npt.NDArray[np.bool_]:
    """Return bool[rows, width]: True at each token that the next one of its document follows."""
    begins, ends = spans.bounds_in_samples()
    return spans.ranges(begins, ends - 1, width)


def _rows_of(spans: Spans, rows: I64, keep: npt.NDArray[np.bool_] | None = None) -> Spans:
    """Return the spans of some rows, of these the spans where ``keep`` is True."""
    counts = np.diff(spans.row_splits)[rows]
    splits = np.concatenate(([0], np.cumsum(counts)))
    run = np.repeat(spans.row_splits[rows] - splits[:-1], counts) + np.arange(splits[-1])
    if keep is not None:
        kept_before = np.concatenate(([0], np.cumsum(keep[run])))
        run, splits = run[keep[run]], kept_before[splits]
    return Spans(
        source=spans.source[run],
        document=spans.document[run],
        offset=spans.offset[run],
        length=spans.length[run],
        row_splits=splits,
        padding=None if spans.padding is None else spans.padding[run],
    )


def targets_within_documents(index: Index, targets: Targets | None) -> Targets | None:
    """Return the targets with those of sources of order packed that have none: all tokens but the
    first of each document. None if no source has targets."""
    within = separates_documents(index)
    given = (None,) * len(within) if targets is None else targets.sources
    if not any(within) or len(given) != len(within):
        return targets
    sources = [
        SourceTargets(kind="all") if each and source is None else source
        for source, each in zip(given, within, strict=True)
    ]
    return Targets(sources)


def targets_of(run: Run | OpenRecipe) -> Targets | None:
    """Return the loss targets of the sources of a run or an open recipe.

    None if those of all sources follow from their orders.
    """
    targets = [source.targets for source in run.sources]
    return Targets(targets) if any(target is not None for target in targets) else None


def targets_text(source: RunSource | OpenSource) -> str:
    """Return text that identifies the tokens of a source that carry loss."""
    targets = source.targets
    if targets is None or targets.companion is None:
        return "all tokens"
    return f"{targets.kind.replace('_', ' ')} {corpus_fingerprint(targets.companion)}"
