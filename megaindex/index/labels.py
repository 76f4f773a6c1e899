"""Labels and reference values, one for each token of a text, stored as datasets of their own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megaindex._types import I64
from megaindex.arithmetic import ceil_div
from megaindex.errors import FormatError
from megaindex.format import IndexedDataset

IGNORED_LABEL = -100
"""Label of a token that carries no loss."""

_MOST_LABELS = 1 << 22  # labels read in one step, which bounds the memory


def check_same_lengths(text: IndexedDataset, other: IndexedDataset, role: str) -> None:
    """Raise FormatError unless both datasets have the same sequence lengths."""
    if len(text) != len(other):
        raise FormatError(
            f"{other.path_prefix}.idx: the {role} of {text.path_prefix} must have {len(text)} "
            f"sequences, one for each of the text, got {len(other)}; write it again from the same "
            "text"
        )
    differ = text.sequence_lengths != other.sequence_lengths
    if differ.any():
        first = int(differ.argmax())
        raise FormatError(
            f"{other.path_prefix}.idx: the {role} of {text.path_prefix} must have one entry for "
            f"each token; sequence {first} has {int(other.sequence_lengths[first])} and "
            f"{int(text.sequence_lengths[first])} tokens in the text; write it again from the same "
            "text"
        )


def documents_with_labels(
    labels: IndexedDataset, documents: I64, limit: int
) -> npt.NDArray[np.bool_]:
    """Return bool[n]: documents with a label other than -100 among their first ``limit``.

    Reads each document up to its first label, in growing windows.
    """
    labels.validate()
    begin = labels.sequence_pointers[documents] // labels.dtype.itemsize
    end = begin + np.minimum(labels.sequence_lengths[documents], limit)
    found = np.zeros(documents.size, bool)
    open_ones, window = np.flatnonzero(begin < end), 16
    while open_ones.size:
        for part in np.array_split(open_ones, ceil_div(open_ones.size * window, _MOST_LABELS)):
            at = np.minimum(begin[part, None] + np.arange(window), end[part, None] - 1)
            found[part] = (labels.tokens[at] != IGNORED_LABEL).any(axis=1)
        begin[open_ones] += window
        open_ones = open_ones[~found[open_ones] & (begin[open_ones] < end[open_ones])]
        window = min(2 * window, _MOST_LABELS)
    return found
