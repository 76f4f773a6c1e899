"""Megatron's IndexedDatasetBuilder: the same bytes, without its loop over all sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.adapters.megatron.core import core
from megaindex.errors import InvalidArgument

_LONGEST = np.iinfo(np.int32).max


def write_index(
    self: Any, sequence_lengths: Any, sequence_modes: Any, document_indices: Any
) -> None:
    """``_IndexWriter.write``.

    Raises:
        InvalidArgument: a sequence is too long for the format, which Megatron lets wrap.
    """
    lengths = np.asarray(sequence_lengths, np.int64)
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= _LONGEST:
        raise InvalidArgument(
            f"{self.idx_path}: sequences hold 0 to {_LONGEST} tokens, got {int(lengths.min())} to "
            f"{int(lengths.max())}; divide longer documents into several sequences"
        )
    bounds = np.asarray(document_indices, np.int64)
    pointers = np.zeros(lengths.size, np.int64)
    np.cumsum(lengths[:-1], out=pointers[1:])
    pointers *= np.dtype(self.dtype).itemsize
    parts: list[npt.NDArray[Any]] = [
        np.array([lengths.size, bounds.size], "<u8"),
        lengths.astype("<i4"),
        pointers,
        bounds,
    ]
    if sequence_modes is not None:
        parts.append(np.asarray(sequence_modes, np.int8))
    for part in parts:
        self.idx_writer.write(part.tobytes())


def add_document(self: Any, tensor: Any, lengths: Any, modes: Any = None) -> None:
    """``IndexedDatasetBuilder.add_document``, with a mode 0 for each sequence where none is given,
    as it is documented."""
    if self.multimodal and modes is None:
        modes = [0] * len(lengths)
    core().originals["IndexedDatasetBuilder", "add_document"](self, tensor, lengths, modes)
