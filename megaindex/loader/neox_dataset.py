"""Samples as GPT-NeoX's datasets give them: dicts of NumPy rows of sequence_length + 1 entries.

A map-style dataset for PyTorch's DataLoader, without PyTorch: whole batches are read at once
(``__getitems__``), and a sample id that the index does not hold raises OutOfRange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex._types import I64
from megaindex.errors import FormatError
from megaindex.format import IndexedDataset
from megaindex.index.labels import IGNORED_LABEL, check_same_lengths
from megaindex.index.spans import Index, Spans
from megaindex.loader.reader_choice import plain_reader
from megaindex.loader.token_readers import row_tokens

Rows = dict[str, npt.NDArray[Any]]


class _ReadsBatches(ABC):
    """Single samples and lists of them, of a dataset that reads a batch as arrays."""

    def __getitem__(self, sample_id: int) -> Rows:
        return self.__getitems__([sample_id])[0]

    def __getitems__(self, sample_ids: Sequence[int] | I64) -> list[Rows]:
        """The samples of one batch, read together."""
        rows = self.read(sample_ids)
        return [{name: values[k] for name, values in rows.items()} for k in range(len(sample_ids))]

    @abstractmethod
    def read(self, sample_ids: npt.ArrayLike) -> Rows:
        """The samples as arrays [n, S + 1], by name."""


class NeoxDataset(_ReadsBatches):
    """Text, and what goes with it, of the samples of ``index``.

    ``text`` and ``label`` are int64[S + 1], ``ref`` and ``reward`` float32[S + 1]. Where a sample
    ends before, text, ref and reward are filled up with 0, labels with -100. The reward of a
    document stands at each of its tokens.

    Args:
        index: of the text.
        dataset: the text.
        label_dataset: one label for each token.
        reward_dataset: one number for each document.
        ref_dataset: one number for each token, such as a reference model's log-probability.

    Raises:
        FormatError: a companion does not belong to the text.
    """

    def __init__(
        self,
        index: Index,
        dataset: IndexedDataset,
        *,
        label_dataset: IndexedDataset | None = None,
        reward_dataset: IndexedDataset | None = None,
        ref_dataset: IndexedDataset | None = None,
    ) -> None:
        self.index = index
        self._readers = {"text": plain_reader([dataset])}
        for name, companion in (("label", label_dataset), ("ref", ref_dataset)):
            if companion is not None:
                check_same_lengths(dataset, companion, name)
                self._readers[name] = plain_reader([companion])
        self._rewards = None
        if reward_dataset is not None:
            self._rewards = _first_of_each(reward_dataset, dataset)

    def __len__(self) -> int:
        return self.index.num_samples

    def read(self, sample_ids: npt.ArrayLike) -> Rows:
        """The samples as arrays [n, S + 1], by name.

        Raises:
            OutOfRange: an id that the index does not hold.
        """
        spans = self.index.locate(sample_ids)
        shape = (spans.row_splits.size - 1, self.index.sequence_length + 1)
        rows = {}
        for name, reader in self._readers.items():
            rows[name] = np.empty(shape, np.float32 if name == "ref" else np.int64)
            pad = IGNORED_LABEL if name == "label" else 0
            reader.read(spans, rows[name], pad_id=pad)
        if self._rewards is not None:
            rows["reward"] = _spread(self._rewards[spans.document], spans, shape)
        return {name: rows[name] for name in _ORDER if name in rows}


_ORDER = ("text", "label", "reward", "ref")  # of the fields in GPT-NeoX's samples


class NeoxPairwiseDataset(_ReadsBatches):
    """The two sides of pairwise data: ``pos`` and ``neg``, each with its ``_label`` and ``_ref``.

    Args:
        pos: the samples of the one side.
        neg: of the other, over an index of the same arrays
            (`megaindex.builders.single.build_pairs`).
    """

    def __init__(self, pos: NeoxDataset, neg: NeoxDataset) -> None:
        self._sides = {"pos": pos, "neg": neg}

    @property
    def index(self) -> Index:
        """Of pos; that of neg has the same arrays."""
        return self._sides["pos"].index

    def __len__(self) -> int:
        return len(self._sides["pos"])

    def read(self, sample_ids: npt.ArrayLike) -> Rows:
        """The samples as arrays [n, S + 1], by name; see `NeoxDataset.read`."""
        sides = {side: dataset.read(sample_ids) for side, dataset in self._sides.items()}
        return {  # in GPT-NeoX's order: each kind of both sides
            side if name == "text" else f"{side}_{name}": rows[name]
            for name in sides["pos"]
            for side, rows in sides.items()
        }


def _first_of_each(rewards: IndexedDataset, text: IndexedDataset) -> npt.NDArray[np.float32]:
    """float32[sequences]: the first value of each sequence."""
    rewards.validate()
    if len(rewards) != len(text) or not (rewards.sequence_lengths > 0).all():
        raise FormatError(
            f"{rewards.path_prefix}.idx: the rewards of {text.path_prefix} must be one value or "
            f"more for each of its {len(text)} sequences; it has {len(rewards)} sequences, "
            f"{int((rewards.sequence_lengths < 1).sum())} of them empty; write it again"
        )
    first = rewards.tokens[rewards.sequence_pointers // rewards.dtype.itemsize]
    return first.astype(np.float32)


def _spread(
    values: npt.NDArray[np.float32], spans: Spans, shape: tuple[int, int]
) -> npt.NDArray[np.float32]:
    """Each run's value at all of its tokens, 0 where a row has none."""
    out = np.zeros(shape, np.float32)
    out[np.arange(shape[1]) < row_tokens(spans)[:, None]] = np.repeat(values, spans.length)
    return out
