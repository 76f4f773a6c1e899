"""Writer of .bin/.idx pairs in constant memory, published atomically."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument
from megaindex.format.header import CHUNK, code_of_dtype, get_dialect, integer_array, token_array
from megaindex.format.pair import MappedPair, check_output_prefix, map_pair, pair_paths
from megaindex.format.sink import PairSink
from megaindex.io.paths import Progress, ignore

_LONGEST = np.iinfo(np.int32).max  # lengths are int32 in the .idx
_CHUNK = 1 << 17  # sequences or document bounds processed together
_KERNEL_BYTES = 1 << 16  # shorter ranges are copied faster through memory than by the kernel


class IndexedDatasetWriter:
    """Writer of `<path_prefix>.bin` and `.idx`, the same bytes as Megatron's IndexedDatasetBuilder.

        with IndexedDatasetWriter("train", np.uint16) as writer:
            writer.add_document([5, 6, 7])                  # one sequence
            writer.add_document([1, 2, 3], lengths=[2, 1])  # two sequences

    Both files appear when the `with` block ends, synced to disk; if it raises, no file is left.
    Arguments refused with InvalidArgument are not written, and the writer remains usable; after any
    other error it publishes nothing. Memory use is constant.

    Args:
        path_prefix: common path of both files, without `.bin` or `.idx`.
        dtype: dtype of the tokens; values that do not fit are refused, never wrapped.
        multimodal: store a mode (int8) with each sequence.
        dialect: framework of the dtype codes: "megatron", "neox" or "paddlenlp".
        overwrite: replace an existing pair; otherwise existing files are refused.

    Raises:
        InvalidArgument: `path_prefix` has a suffix, or `dtype` has no code in the dialect.
        StorageError: on entering, writing and leaving, if a file exists or cannot be written.
    """

    def __init__(
        self,
        path_prefix: str | os.PathLike[str],
        dtype: npt.DTypeLike = np.int32,
        *,
        multimodal: bool = False,
        dialect: str = "megatron",
        overwrite: bool = False,
    ) -> None:
        self._path_prefix = os.fspath(path_prefix)
        check_output_prefix(self._path_prefix)
        self._dialect = get_dialect(dialect)
        self._dtype_code = code_of_dtype(dtype, self._dialect)
        self._dtype = self._dialect.dtypes[self._dtype_code]
        self._multimodal = multimodal
        self._overwrite = overwrite
        self._bin_path, self._idx_path = pair_paths(self._path_prefix)
        self._sink: PairSink | None = None

    def __enter__(self) -> IndexedDatasetWriter:
        if self._sink is not None:
            raise InvalidArgument(
                f"{self._path_prefix}: the writer is already entered; make another"
            )
        self._sink = PairSink(
            self._bin_path,
            self._idx_path,
            self._dtype,
            multimodal=self._multimodal,
            overwrite=self._overwrite,
        )
        try:
            self._sink.open()
        except BaseException:
            self._sink.discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sink = self._entered()
        self._sink = None
        try:
            if kind is None:
                sink.publish(self._dtype_code)
        finally:
            sink.discard()

    def add_document(
        self,
        tokens: npt.ArrayLike,
        lengths: npt.ArrayLike | None = None,
        modes: npt.ArrayLike | None = None,
    ) -> None:
        """Append one document.

        Args:
            tokens: one-dimensional; the tokens of all its sequences, in order.
            lengths: number of tokens of each sequence. None: one sequence of all tokens; an empty
                list, with no tokens: a document without sequences.
            modes: one int8 per sequence, default 0; multimodal writers only.

        Raises:
            InvalidArgument: a value does not fit, or lengths, modes and tokens do not match.
            StorageError: a file cannot be written.
        """
        sink = self._entered()
        array = token_array(tokens, self._dtype)
        if lengths is None and modes is None and not self._multimodal and array.size <= _LONGEST:
            with sink:  # the most frequent case, kept short
                sink.write_tokens(array)
                sink.index.add_one(array.size)
            return
        sizes = self._checked_lengths(
            [array.size] if lengths is None else lengths, array, "lengths"
        )
        ends = np.array([len(sizes)], dtype=np.int64)
        self._append(array, sizes, ends, self._checked_modes(modes, len(sizes)))

    def add_documents(
        self,
        tokens: npt.ArrayLike,
        document_lengths: npt.ArrayLike,
        modes: npt.ArrayLike | None = None,
    ) -> None:
        """Append many documents of one sequence each, without a Python loop.

        Args:
            tokens: one-dimensional; the tokens of all documents, in order.
            document_lengths: number of tokens of each document.
            modes: one int8 per document, default 0; multimodal writers only.

        Raises:
            InvalidArgument, StorageError: as `add_document`.
        """
        array = token_array(tokens, self._dtype)
        sizes = self._checked_lengths(document_lengths, array, "document_lengths")
        ends = np.arange(1, len(sizes) + 1, dtype=np.int64)
        self._append(array, sizes, ends, self._checked_modes(modes, len(sizes)))

    def add_index(self, path_prefix: str | os.PathLike[str]) -> None:
        """Append all documents of another pair, in constant memory.

        Raises:
            InvalidArgument: its dtype differs, or only one of the two is multimodal.
            FormatError: the pair is damaged, or its documents do not cover all its sequences.
            StorageError: a file cannot be read or written.
        """
        sink = self._entered()
        source = map_pair(os.fspath(path_prefix), self._dialect.name, multimodal=False)
        self._check_like(source)
        source.check_everything()
        append_pair(source, sink)

    def _entered(self) -> PairSink:
        if self._sink is None:
            raise InvalidArgument(
                f"{self._path_prefix}: the writer must be used inside `with "
                "IndexedDatasetWriter(...) as writer:`"
            )
        return self._sink

    def _check_like(self, source: MappedPair) -> None:
        if source.dtype != self._dtype:
            raise InvalidArgument(
                f"{source.idx_path}: must hold {self._dtype}, as {self._path_prefix} does, got "
                f"{source.dtype}"
            )
        with_modes = source.modes is not None
        if with_modes != self._multimodal and source.header.num_sequences:
            has, takes = ("has", "does not") if with_modes else ("has no", "does")
            raise InvalidArgument(
                f"{source.idx_path}: {has} sequence modes, but {self._path_prefix} {takes} store "
                f"them; pass multimodal={with_modes} to the writer"
            )

    def _append(
        self,
        tokens: npt.NDArray[Any],
        lengths: npt.NDArray[np.int64],
        document_ends: npt.NDArray[np.int64],
        modes: npt.NDArray[np.int64] | None,
    ) -> None:
        """Append documents whose ends count sequences from the first of these."""
        with self._entered() as sink:
            sink.write_tokens(tokens)
            bounds = document_ends + sink.index.num_sequences
            sink.index.add_sequences(lengths, modes)
            sink.index.add_bounds(bounds)

    def _checked_lengths(
        self, lengths: npt.ArrayLike, tokens: npt.NDArray[Any], name: str
    ) -> npt.NDArray[np.int64]:
        sizes = integer_array(lengths, name, 0, _LONGEST)
        if int(sizes.sum()) != tokens.size:
            raise InvalidArgument(
                f"{name} must sum to {tokens.size}, the number of tokens, got {int(sizes.sum())}"
            )
        return sizes

    def _checked_modes(
        self, modes: npt.ArrayLike | None, count: int
    ) -> npt.NDArray[np.int64] | None:
        if not self._multimodal:
            if modes is not None:
                raise InvalidArgument(
                    f"modes cannot be stored in {self._path_prefix}; pass multimodal=True to the "
                    "writer"
                )
            return None
        if modes is None:
            return np.zeros(count, dtype=np.int64)
        checked = integer_array(modes, "modes", -128, 127)
        if len(checked) != count:
            raise InvalidArgument(
                f"modes must be {count}, one for each sequence, got {len(checked)}"
            )
        return checked


def append_pair(source: MappedPair, sink: PairSink, progress: Progress = ignore) -> None:
    """Append all documents of a fully checked pair, as `append_documents`."""
    append_documents(source, sink, 0, len(source.bounds) - 1, progress)


def append_documents(
    source: MappedPair, sink: PairSink, first: int, stop: int, progress: Progress = ignore
) -> None:
    """Append documents first..stop of a fully checked pair, in constant memory.

    The copy follows the pointers, so gaps and trailing bytes of the source are not copied. Every
    value of the source must fit the sink's dtype, which is not checked.

    Raises:
        FormatError: the documents of the pair do not cover all its sequences.
        StorageError: a file cannot be read or written.
    """
    source.check_documents()
    bounds = source.bounds
    begin, end = int(bounds[first]), int(bounds[stop])
    # bounds count sequences of the whole pair that they are written to
    shift = sink.index.num_sequences - begin
    with sink:
        for run_begin, run_end in _runs(source, begin, end):
            _append_tokens(source, sink, run_begin, run_end, progress)
        for start in range(begin, end, _CHUNK):
            chunk = slice(start, min(start + _CHUNK, end))
            modes = None if source.modes is None else source.modes[chunk]
            sink.index.add_sequences(source.lengths[chunk], modes)
        for start in range(first + 1, stop + 1, _CHUNK):  # bound `first` is already stored
            sink.index.add_bounds(bounds[start : min(start + _CHUNK, stop + 1)] + shift)


def _runs(source: MappedPair, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of the .bin, in tokens, that sequences start..stop fill without a gap.

    Pointers 0, 12, 40 of lengths 3, 2, 1 (4 bytes a token) make tokens 0 to 5 and 10 to 11.
    """
    run_begin = run_end = 0
    for first in range(start, stop, _CHUNK):
        chunk = slice(first, min(first + _CHUNK, stop))
        begins = source.pointers[chunk] // source.dtype.itemsize
        ends = begins + source.lengths[chunk]
        breaks = np.flatnonzero(begins[1:] != ends[:-1]) + 1
        heads, tails = np.append(0, breaks), np.append(breaks, len(begins)) - 1
        for begin, end in zip(begins[heads].tolist(), ends[tails].tolist(), strict=True):
            if begin != run_end:
                if run_end > run_begin:
                    yield run_begin, run_end
                run_begin = begin
            run_end = end
    if run_end > run_begin:
        yield run_begin, run_end


def _append_tokens(
    source: MappedPair, sink: PairSink, begin: int, end: int, progress: Progress
) -> None:
    itemsize = source.dtype.itemsize
    # a copy by the kernel has a fixed cost, which short runs do not repay
    if source.dtype == sink.dtype and (end - begin) * itemsize >= _KERNEL_BYTES:
        path, size = source.bin_path, source.bin_nbytes
        sink.copy_bytes(path, size, begin * itemsize, (end - begin) * itemsize, progress)
        return
    for start in range(begin, end, CHUNK):
        tokens = source.tokens[start : min(start + CHUNK, end)]
        sink.write_tokens(tokens)
        progress(tokens.nbytes)
