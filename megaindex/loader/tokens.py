"""Reads the tokens of located samples into rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.format import IndexedDataset
from megaindex.index.on_demand import Tables
from megaindex.index.spans import Spans
from megaindex.kernels import active
from megaindex.kernels.types import IntArray


class TokenReader(Protocol):
    """Where tokens come from: mapped files, positional reads."""

    @property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        """The sources, in the order of the index."""
        ...

    def read(
        self,
        spans: Spans,
        out: IntArray,
        labels: IntArray | None = None,
        *,
        pad_id: int,
        num_threads: int = 1,
    ) -> None:
        """Fill row k of ``out`` with the tokens of the k-th sample of ``spans``.

        A row shorter than ``out`` is wide is filled up with ``pad_id``, of a longer one the first
        tokens are taken. ``labels[k, j]`` is the token after ``out[k, j]``, also where that is the
        first one beyond the row; ``pad_id`` where there is none.

        Args:
            spans: of n samples, the sources numbered as the reader's datasets.
            out: int64, int32 or float32 [n, width], the cells of a row side by side.
            labels: None, or another array like ``out``.
            pad_id: a value of ``out``'s dtype.
            num_threads: most threads to copy with; few tokens are copied by one.

        Raises:
            InvalidArgument: ``out`` does not hold every token of the datasets.
            OutOfRange: a run is not one of the datasets'.
            FormatError: a file is damaged.
            StorageError: a file cannot be read.
        """
        ...


class MappedTokens:
    """The tokens of ``datasets`` through their mappings; safe to share between threads.

    Datasets that are not open yet are opened when a batch first reads them.

    Where the reads are cold, each page waits for the one before it: see `PositionalTokens`.
    """

    def __init__(self, datasets: Sequence[IndexedDataset]) -> None:
        self._datasets = tuple(datasets)
        self._tables = Tables(
            len(self._datasets),
            lambda number: source_arrays(self._datasets[number]),
            active().token_table,
            ready=all(dataset.is_open for dataset in self._datasets),
        )

    @property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        return self._datasets

    def read(
        self,
        spans: Spans,
        out: IntArray,
        labels: IntArray | None = None,
        *,
        pad_id: int,
        num_threads: int = 1,
    ) -> None:
        """As `TokenReader.read`."""
        table, source = self._tables.holding(spans.source)
        bad = active().gather(
            table,
            spans.source if source is None else source,
            spans.document,
            spans.offset,
            spans.length,
            spans.row_splits,
            out,
            labels,
            pad_id,
            num_threads,
        )
        if bad >= 0:
            refuse_run(self._datasets, spans, bad)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedTokens, (self._datasets,)


def source_arrays(dataset: IndexedDataset) -> tuple[IntArray, IntArray, IntArray]:
    """The tokens, pointers and lengths of a dataset, as the kernels take them.

    Raises:
        InvalidArgument: its tokens are of a dtype that no batch holds.
    """
    if dataset.dtype.kind not in "iuf" or not dataset.dtype.isnative:
        raise InvalidArgument(
            f"{dataset.path_prefix}: tokens are {dataset.dtype}; batches are made of integers and "
            "floats of this machine's byte order"
        )
    return dataset.tokens, dataset.sequence_pointers, dataset.sequence_lengths


def refuse_run(datasets: Sequence[IndexedDataset], spans: Spans, run: int) -> None:
    """Raise what is wrong with a run that a kernel refused.

    Raises:
        OutOfRange: there is no such dataset or sequence, or the run leaves its sequence.
        FormatError: the sequence is not one of the ``.bin``'s.
    """
    source, document, offset, length = (int(column[run]) for column in spans)
    if not 0 <= source < len(datasets):
        raise OutOfRange(
            f"a sample reads source {source}, and there are {len(datasets)} datasets; give the "
            "datasets that the index was built from, in its order"
        )
    dataset = datasets[source]
    if not 0 <= document < len(dataset):
        raise OutOfRange(
            f"{dataset.path_prefix}: a sample reads sequence {document}, and there are "
            f"{len(dataset)}; give the dataset that the index was built from"
        )
    dataset.get(document, offset, length)
    raise AssertionError("a kernel refused a run that the dataset reads")
