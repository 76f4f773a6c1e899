"""Training data of a framework with skips.

Frameworks count the samples that they read, so sample n of this dataset is the n-th that is served:
skipped steps are left out, moved ones follow at the end. Steps are those of the run without skips.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.adapters.reports import on_rank_0
from megaindex.errors import InvalidArgument
from megaindex.index.skips import (
    Skip,
    Skips,
    StoredSkips,
    masked_labels,
    resolve_skips,
    skip_difference,
    source_number,
    with_skips,
    without_holes,
)
from megaindex.index.spans import Index
from megaindex.settings.batch_schedule import BatchSchedule

logger = logging.getLogger("megaindex")

_ITERATIONS = "megaindex_train_iters"
"""Attribute of a framework's arguments: ``train_iters`` before it was lowered."""

RECORD = "megaindex_skip"
"""Name of the skips in a framework's checkpoints."""

Places = npt.NDArray[np.bool_]
MaskLabels = Callable[[Any, Places, Places | None], Any]
"""Function that returns the samples of a batch without loss at labels, bool[n, S], and with the end
token in the places of removed tokens, bool[n, S + 1] or None."""


def skips_of_run(skip: Sequence[Skip], *, train_iters: int, global_batch_size: int) -> Skips:
    """Return the skips of a framework's run of ``train_iters`` steps without them, in positions.

    Raises:
        InvalidArgument: a skip does not fit the run.
        MissingFile, StorageError: a file of documents cannot be read.
    """
    skips = resolve_skips(
        skip,
        BatchSchedule.constant(global_batch_size),
        num_samples=train_iters * global_batch_size,
    )
    assert skips is not None, "there are skips"
    return skips


def whole_iterations(args: Any) -> Any:
    """Return ``train_iters`` of a framework's arguments, of the run without skips."""
    return getattr(args, _ITERATIONS, getattr(args, "train_iters", None))


def lower_iterations(args: Any, skips: Skips, global_batch_size: int) -> None:
    """Lower ``train_iters`` by the steps dropped, and keep its value for later calls."""
    setattr(args, _ITERATIONS, whole_iterations(args))
    args.train_iters = skips.served_before(skips.run_end) // global_batch_size


def end_token(args: Any) -> int:
    """Return the end token of a framework's arguments, which takes the places of removed documents.

    Raises:
        InvalidArgument: their tokenizer has none.
    """
    try:
        return int(args.tokenizer.eod)
    except (AttributeError, NotImplementedError, TypeError):
        raise InvalidArgument(
            "skip: remove: the end token takes the places of removed documents, and the tokenizer "
            "has no eod; use one that has it"
        ) from None


def check_resumed(
    record: Mapping[str, Any] | None, dataset: object, served: int, where: str
) -> None:
    """Check that a run goes on after the ``served`` samples of a checkpoint, which holds the skips
    of `SkippedDataset.record`, or None, and is called ``where`` in messages.

    Raises:
        InvalidArgument: the run skips, or does not skip, samples that were served.
        FormatError: the record is damaged.
    """
    ours = dataset.record if isinstance(dataset, SkippedDataset) else None
    old, new = (None if each is None else StoredSkips.read({"skip": each})
                for each in (record, ours))  # fmt: skip
    position = served if old is None else old.position_of(served)
    reason = skip_difference(old, new, served, position)
    if served and reason:
        raise InvalidArgument(f"{where}: {reason}")


class SkippedDataset:
    """Samples that a run serves, by their number; other attributes are those of the dataset.

    Args:
        dataset: the framework's training data, in order of training.
        skips: skips of the run.
        make_index: function that returns the index of the dataset, which masks need.
        mask_labels: function that takes loss and tokens from samples.
        names: name of each source, as in skips.
        documents: number of sequences of each source.

    Raises:
        InvalidArgument: the dataset has fewer samples than the run, or the source of a skip is
            unknown.
    """

    def __init__(
        self,
        dataset: Any,
        skips: Skips,
        make_index: Callable[[Any], Index],
        mask_labels: MaskLabels,
        *,
        names: Sequence[str],
        documents: Sequence[int],
    ) -> None:
        if skips.end > len(dataset):
            raise InvalidArgument(
                f"skip: the run reads {skips.end} samples and its data has {len(dataset)}, which "
                "are read again; build more, or lower the iterations"
            )
        self._dataset = dataset
        self._skips = skips
        self._make_index = make_index
        self._mask_labels = mask_labels
        self._names, self._documents = list(names), list(documents)
        self._length = skips.served_before(skips.run_end)
        masked = [  # sources may be named by path or by number
            {**mask.record, "source": str(source_number(mask.source, self._names))}
            for mask in skips.masks
        ]
        self.record = {**skips.to_dict(), "masked": masked}
        """The skips as JSON values, for checkpoints."""
        self._index: Index | None = None
        if skips.masks:
            _ = self.index

    @property
    def index(self) -> Index:
        """Index of the dataset by positions, with the skips."""
        if self._index is None:
            index = self._make_index(self._dataset)
            self._index = with_skips(index, self._skips, self._names, self._documents)
        return self._index

    def positions_of(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the positions in the run of the samples served, by their numbers."""
        return np.asarray(self._skips.positions_of(numbers), np.int64)

    def log(self) -> SkippedDataset:
        """Log what is served, on rank 0, and return the dataset."""
        if on_rank_0():
            logger.info(
                "skip: %d of %d samples are served, %d positions are skipped and %d moved behind "
                "the end", len(self), self._skips.end, self._skips.num_skipped,
                self._skips.num_moved,
            )  # fmt: skip
        return self

    def served_index(self) -> Index:
        """Return the index of the samples served, by their numbers."""
        return without_holes(self.index, 0, self._skips.run_end)

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_index": None}

    def __getitem__(self, number: int | None) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int | None]) -> Any:
        """Return the samples of a batch; None is a row of padding.

        Raises:
            InvalidArgument: the framework cannot take the loss from a place of a removed document.
        """
        positions = [None if n is None else int(self._skips.positions_of(n)) for n in numbers]
        places = [row for row, position in enumerate(positions) if position is not None]
        at = np.array([positions[row] for row in places], np.int64)
        ids: list[int | None] = [None] * len(positions)
        for row, sample in zip(places, self._skips.samples_at(at).tolist(), strict=True):
            ids[row] = sample
        read = getattr(self._dataset, "__getitems__", None)
        samples = [self._dataset[i] for i in ids] if read is None else read(ids)
        if not self._skips.masks or not places:
            return samples
        spans = self.index.locate(at)
        if spans.masked is None or not spans.masked.any():
            return samples
        width = self.index.sequence_length
        mask, removed = np.zeros((len(positions), width), bool), None
        mask[places] = masked_labels(spans, width)
        if spans.removed is not None:
            removed = np.zeros((len(positions), width + 1), bool)
            removed[places] = spans.tokens_removed(width + 1)
        return self._mask_labels(samples, mask, removed)
