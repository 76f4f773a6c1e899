"""Copy a whole pair behind what a sink already holds."""

from __future__ import annotations

import numpy as np

from megaindex.errors import FormatError
from megaindex.format.pair import MappedPair
from megaindex.format.sink import PairSink

_CHUNK = 1 << 17  # sequences or document bounds looked at together


def append_pair(source: MappedPair, sink: PairSink) -> None:
    """Append the sequences and documents of a fully checked pair; constant memory.

    The copy follows the pointers, so gaps and surplus bytes of the source are left behind.
    """
    count, bounds = source.header.num_sequences, source.bounds
    if bounds[-1] != count:
        raise FormatError(
            f"{source.idx_path}: its documents end at sequence {bounds[-1]} of {count}, and the "
            f"rest belongs to none; write it again with document bounds"
        )
    first_sequence = sink.index.num_sequences
    with sink:
        for start in range(0, count, _CHUNK):
            _append_sequences(source, start, min(start + _CHUNK, count), sink)
        for start in range(1, len(bounds), _CHUNK):  # bound 0 is the end of what is there already
            sink.index.add_bounds(bounds[start : start + _CHUNK] + first_sequence)


def _append_sequences(source: MappedPair, start: int, stop: int, sink: PairSink) -> None:
    lengths = source.lengths[start:stop].astype(np.int64)
    begins = source.pointers[start:stop] // source.dtype.itemsize
    ends = begins + lengths
    # Sequences that lie one behind the other go in one piece; usually that is all of them.
    breaks = np.flatnonzero(begins[1:] != ends[:-1])
    first_of_run = np.concatenate(([0], breaks + 1))
    last_of_run = np.concatenate((breaks, [len(begins) - 1]))
    for begin, end in zip(begins[first_of_run], ends[last_of_run], strict=True):
        sink.write_tokens(source.tokens[begin:end])
    sink.index.add_sequences(lengths, None if source.modes is None else source.modes[start:stop])
