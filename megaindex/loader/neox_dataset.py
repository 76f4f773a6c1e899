"""Map-style datasets with the samples of GPT-NeoX's: dicts of NumPy rows, without PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex._types import I64
from megaindex.errors import FormatError, MegaIndexError
from megaindex.format import IndexedDataset
from megaindex.index.blended_index import BlendedIndex, arrays_of, has_arrays
from megaindex.index.skips import refuse_removal
from megaindex.index.spans import IGNORED_LABEL, Index, Spans, check_same_lengths
from megaindex.io.mapping import DescriptorCache, RangeReader
from megaindex.kernels import active
from megaindex.loader.positional_reader import PositionalTokens, any_remote, plain_reader
from megaindex.loader.token_readers import source_arrays

logger = logging.getLogger("megaindex")

Rows = dict[str, npt.NDArray[Any]]


class TextRows:
    """Samples of an index over text as arrays [n, S + 1], short ones filled up with 0.

    One kernel call reads a batch. It needs all sources open, which takes longer than a first batch:
    sources are opened by the samples that need them until two samples of each were read, after
    which 86 % of equally weighted sources are open; then the others are.

    Args:
        index: the samples.
        datasets: the sources, in the order of the index.
    """

    def __init__(self, index: Index, datasets: Sequence[IndexedDataset]) -> None:
        self.index = index
        self._datasets = datasets
        self._reader = plain_reader(datasets)
        self._width = index.sequence_length + 1
        self._left = _OPENED_SINGLY * len(datasets)  # samples until all sources are opened
        self._table: Any = None
        self._read_rows = active().read_rows

    def read(self, sample_ids: list[Any]) -> I64:
        """Return int64[n, S + 1].

        Raises:
            OutOfRange: the index, or a source of a blend, does not hold a sample.
            FormatError: a file is damaged.
            StorageError: a file cannot be read.
        """
        if self._table is not None:
            rows = self._read_rows(self._table, sample_ids, self._width, 0)
            if rows is not None:
                return rows
        return self._read_in_steps(sample_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return TextRows, (self.index, self._datasets)

    def _read_in_steps(self, sample_ids: list[Any]) -> I64:
        spans = self.index.locate(sample_ids)
        rows: I64 = np.empty((len(sample_ids), self._width), np.int64)
        self._reader.read(spans, rows, pad_id=0)
        if self._left > 0:
            self._left -= len(sample_ids)
            if self._left <= 0:
                self._open_all()
        return rows

    def _open_all(self) -> None:
        blend = self.index if isinstance(self.index, BlendedIndex) else None
        indices = (self.index,) if blend is None else blend.indices
        if any_remote(self._datasets) or not all(map(has_arrays, indices)):
            return
        try:
            descriptors = self._open_files()
            self._table = active().row_table(
                [arrays_of(index) for index in indices],
                [source_arrays(dataset) for dataset in self._datasets],
                None if blend is None else blend.dataset_index,
                None if blend is None else blend.dataset_sample_index,
                descriptors,
            )
        except MegaIndexError as error:  # raised again by the first sample of that source
            logger.info("samples are located and read in two steps: %s", error)

    def _open_files(self) -> list[int]:
        """Return a descriptor of each .bin, for positional reads; none if there are many.

        The reader then reads by position too: where the kernel cannot, as in a file that was cut
        short, it tries again, or raises the error.
        """
        if len(self._datasets) > _most_files():
            return []
        files = DescriptorCache(len(self._datasets))
        # entered and never left: open as long as the cache
        descriptors = [files.lease(*each.bin_info).__enter__() for each in self._datasets]
        self._reader = PositionalTokens(self._datasets, reader=RangeReader(descriptors=files))
        return descriptors


_OPENED_SINGLY = 2  # samples per source


def _most_files() -> int:
    """Return the number of files that one reader keeps open, of those that a process may open."""
    try:
        import resource
    except ImportError:
        return 64
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4096 if limit == resource.RLIM_INFINITY else min(4096, limit // 8)


class NeoxDataset:
    """Samples of an index with the fields of GPT-NeoX's GPT2Dataset (main ea7aefd8).

    ``text`` and ``label`` are int64[S + 1], ``ref`` and ``reward`` float32[S + 1]; a field is
    present if its dataset is given. Short samples are filled up with 0, labels with -100. The
    reward of a document is repeated at each of its tokens.

    Args:
        index: the samples of the text.
        dataset: the text.
        label_dataset: one label for each token of the text.
        reward_dataset: one number for each document.
        ref_dataset: one number for each token, such as a reference model's log-probability.

    Raises:
        FormatError: the lengths of a label, reward or reference dataset do not fit the text.
        InvalidArgument: the index removes documents.
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
        refuse_removal(index, "NeoxDataset reads every token", "give GPTDataset, or Loader")
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

    def __getitem__(self, sample_id: int) -> Rows:
        return self.__getitems__([sample_id])[0]

    def __getitems__(self, sample_ids: Sequence[int] | I64) -> list[Rows]:
        """Return the samples of one batch, read together; raises as `read`."""
        rows = self.read(sample_ids)
        return [{name: values[k] for name, values in rows.items()} for k in range(len(sample_ids))]

    def read(self, sample_ids: npt.ArrayLike) -> Rows:
        """Return n samples as arrays [n, S + 1] by name.

        Raises:
            OutOfRange: the index does not hold a sample id.
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


_ORDER = ("text", "label", "reward", "ref")  # the order of fields in GPT-NeoX's samples


def _first_of_each(rewards: IndexedDataset, text: IndexedDataset) -> npt.NDArray[np.float32]:
    """Return the first value of each sequence, float32[sequences]."""
    rewards.validate()
    if len(rewards) != len(text) or not (rewards.sequence_lengths > 0).all():
        raise FormatError(
            f"{rewards.path_prefix}.idx: must have {len(text)} sequences of at least one reward, "
            f"as many as {text.path_prefix} has sequences, got {len(rewards)}, of which "
            f"{int((rewards.sequence_lengths < 1).sum())} are empty; write it again"
        )
    first = rewards.tokens[rewards.sequence_pointers // rewards.dtype.itemsize]
    return first.astype(np.float32)


def _spread(
    values: npt.NDArray[np.float32], spans: Spans, shape: tuple[int, int]
) -> npt.NDArray[np.float32]:
    """Return [rows, width]: each span's value at all of its tokens, 0 elsewhere."""
    out = np.zeros(shape, np.float32)
    out[spans.covered(shape[1])] = np.repeat(values, spans.length)
    return out
