"""Writers of .bin/.idx pairs in constant memory, published whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError, InvalidArgument
from megaindex.format.cast import CHUNK, integer_array, token_array
from megaindex.format.header import code_of_dtype, get_dialect
from megaindex.format.pair import MappedPair, PairSink, check_not_a_half, map_pair, pair_paths
from megaindex.io.filesystem import Progress, ignore

_LONGEST = np.iinfo(np.int32).max  # lengths are int32 in the .idx
_CHUNK = 1 << 17  # sequences or document bounds looked at together
_KERNEL_BYTES = 1 << 16  # shorter stretches are sooner copied than asked for


class IndexedDatasetWriter:
    """Write documents to `<path_prefix>.bin` and `.idx`; the same bytes as Megatron's builder.

        with IndexedDatasetWriter("train", np.uint16) as writer:
            writer.add_document([5, 6, 7])                  # one sequence
            writer.add_document([1, 2, 3], lengths=[2, 1])  # two sequences

    Both files appear when the `with` block ends, synced to disk; if it raises, neither does and
    nothing is left behind. What add_* refuses with InvalidArgument is not written at all, and the
    writer goes on; after any other failure it publishes nothing.

    Args:
        path_prefix: the common path of both files, without `.bin` or `.idx`.
        dtype: token type; values that do not fit are refused, never wrapped.
        multimodal: store a mode (int8) with each sequence.
        dialect: whose dtype codes to write: "megatron", "neox" or "paddlenlp".
        overwrite: replace an existing pair. Without it, existing files are refused.

    Raises:
        InvalidArgument: a suffix in `path_prefix`, or a `dtype` the dialect has no code for.
        StorageError: on entering, writing and leaving: names the file and the remedy.
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
        check_not_a_half(self._path_prefix)
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
                f"{self._path_prefix}: the writer is already in use; make another"
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
            lengths: the tokens of each sequence; None makes one sequence of all tokens, and an
                empty list with no tokens a document without sequences.
            modes: one int8 per sequence, default 0; multimodal writers only.
        """
        sink = self._entered()
        array = token_array(tokens, self._dtype)
        if lengths is None and modes is None and not self._multimodal and array.size <= _LONGEST:
            with sink:  # by far the most frequent call, kept short
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
            document_lengths: the tokens of each document.
            modes: one int8 per document, default 0; multimodal writers only.
        """
        array = token_array(tokens, self._dtype)
        sizes = self._checked_lengths(document_lengths, array, "document_lengths")
        ends = np.arange(1, len(sizes) + 1, dtype=np.int64)
        self._append(array, sizes, ends, self._checked_modes(modes, len(sizes)))

    def add_index(self, path_prefix: str | os.PathLike[str]) -> None:
        """Append all documents of another pair, in constant memory; dtype and modes must match.

        Raises:
            InvalidArgument: its dtype differs, or only one of the two is multimodal.
            FormatError: the pair is damaged, or its documents do not cover all its sequences.
        """
        sink = self._entered()
        source = map_pair(os.fspath(path_prefix), self._dialect.name, multimodal=False)
        self._check_like(source)
        source.check_everything()
        append_pair(source, sink)

    def _entered(self) -> PairSink:
        if self._sink is None:
            raise InvalidArgument(
                f"{self._path_prefix}: the writer is not open; use it inside `with "
                f"IndexedDatasetWriter(...) as writer:`"
            )
        return self._sink

    def _check_like(self, source: MappedPair) -> None:
        if source.dtype != self._dtype:
            raise InvalidArgument(
                f"{source.idx_path}: holds {source.dtype} and {self._path_prefix} is written as "
                f"{self._dtype}; both must be the same"
            )
        with_modes = source.modes is not None
        if with_modes != self._multimodal and source.header.num_sequences:
            has, takes = ("has", "none") if with_modes else ("has no", "them")
            raise InvalidArgument(
                f"{source.idx_path}: {has} sequence modes and {self._path_prefix} takes "
                f"{takes}; pass multimodal={with_modes} to the writer"
            )

    def _append(
        self,
        tokens: npt.NDArray[Any],
        lengths: npt.NDArray[np.int64],
        document_ends: npt.NDArray[np.int64],
        modes: npt.NDArray[np.int64] | None,
    ) -> None:
        """`document_ends` count sequences from the first of these."""
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
                f"{name}: add up to {int(sizes.sum())}, and there are {tokens.size} tokens; both "
                f"must agree"
            )
        return sizes

    def _checked_modes(
        self, modes: npt.ArrayLike | None, count: int
    ) -> npt.NDArray[np.int64] | None:
        if not self._multimodal:
            if modes is not None:
                raise InvalidArgument(
                    f"modes: {self._path_prefix} stores none; pass multimodal=True to the writer"
                )
            return None
        if modes is None:
            return np.zeros(count, dtype=np.int64)
        checked = integer_array(modes, "modes", -128, 127)
        if len(checked) != count:
            raise InvalidArgument(
                f"modes: {len(checked)} given for {count} sequences; give one for each"
            )
        return checked


def append_pair(source: MappedPair, sink: PairSink, progress: Progress = ignore) -> None:
    """Append all documents of a fully checked pair; see `append_documents`."""
    append_documents(source, sink, 0, len(source.bounds) - 1, progress)


def append_documents(
    source: MappedPair, sink: PairSink, first: int, stop: int, progress: Progress = ignore
) -> None:
    """Append documents first..stop of a fully checked pair; constant memory.

    The copy follows the pointers, so gaps and surplus bytes of the source are left behind. The
    sink's token type must hold every value of the source's: nothing is checked again.

    Raises:
        FormatError: the pair's documents do not cover all its sequences.
        StorageError: reading or writing failed.
    """
    _ = source.tokens  # refuses what is not here, before anything is written
    count, bounds = source.header.num_sequences, source.bounds
    if bounds[-1] != count:
        raise FormatError(
            f"{source.idx_path}: its documents end at sequence {bounds[-1]} of {count}, and the "
            f"rest belongs to none; write it again with document bounds"
        )
    begin, end = int(bounds[first]), int(bounds[stop])
    shift = sink.index.num_sequences - begin
    with sink:
        for run_begin, run_end in _runs(source, begin, end):
            _append_tokens(source, sink, run_begin, run_end, progress)
        for start in range(begin, end, _CHUNK):
            chunk = slice(start, min(start + _CHUNK, end))
            modes = None if source.modes is None else source.modes[chunk]
            sink.index.add_sequences(source.lengths[chunk], modes)
        for start in range(first + 1, stop + 1, _CHUNK):  # bound `first` is there already
            sink.index.add_bounds(bounds[start : min(start + _CHUNK, stop + 1)] + shift)


def _runs(source: MappedPair, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Stretches of the .bin, in tokens, that sequences start..stop fill without a gap.

    Usually that is one. Pointers 0, 12, 40 of lengths 3, 2, 1 (4 bytes a token) make two: tokens
    0 to 5 and 10 to 11.
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
    if source.dtype == sink.dtype and (end - begin) * itemsize >= _KERNEL_BYTES:
        path, size = source.bin_path, source.bin_nbytes
        sink.copy_bytes(path, size, begin * itemsize, (end - begin) * itemsize, progress)
        return
    for start in range(begin, end, CHUNK):
        tokens = source.tokens[start : min(start + CHUNK, end)]
        sink.write_tokens(tokens)
        progress(tokens.nbytes)
