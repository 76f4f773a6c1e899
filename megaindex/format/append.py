"""Copy documents of a pair behind what a sink already holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megaindex.errors import FormatError
from megaindex.format.cast import CHUNK
from megaindex.format.pair import MappedPair
from megaindex.format.sink import PairSink
from megaindex.io.copying import Progress, ignore

_CHUNK = 1 << 17  # sequences or document bounds looked at together
_KERNEL_BYTES = 1 << 16  # shorter stretches are sooner copied than asked for


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
