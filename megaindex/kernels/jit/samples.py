"""sample_index in Numba; see reference/samples.py for what it computes."""

from __future__ import annotations

import numba
import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.kernels.reference.samples import _last_partial
from megaindex.kernels.types import I32, IntArray

_NEGATIVE, _NO_LENGTH = -1, -2


@numba.njit(cache=True, nogil=True, inline="always")
def _length(lengths, document_index, d):  # type: ignore[no-untyped-def]
    document = document_index[d]
    if document < 0 or document >= lengths.size:
        return np.int64(_NO_LENGTH)
    return max(np.int64(lengths[document]), np.int64(_NEGATIVE))


@numba.njit(cache=True, nogil=True)
def _cut(lengths, document_index, S, extra, num_samples, out):  # type: ignore[no-untyped-def]
    """Returns the tokens of all documents, or a negative code for what is wrong."""
    row = np.int64(1)
    position = np.int64(0)
    ahead = S - 1 + extra  # tokens from here to the next row's token
    d = 0
    while d < document_index.size and row <= num_samples:
        length = _length(lengths, document_index, d)
        if length < 0:
            return length
        position += length
        # Written always and kept if the token is in this document: whether it is cannot be
        # predicted. A long document holds more rows, S tokens apart.
        out[row, 0] = d
        out[row, 1] = ahead + 1 - extra
        hit = np.int64(ahead < length)
        row += hit
        ahead += S * hit - length
        while ahead < 0 and row <= num_samples:
            out[row, 0] = d
            out[row, 1] = ahead + length + 1 - extra
            row += 1
            ahead += S
        d += 1
    for rest in range(d, document_index.size):
        length = _length(lengths, document_index, rest)
        if length < 0:
            return length
        position += length
    return position


def cut_samples(
    lengths: I32,
    document_index: I32,
    sequence_length: int,
    extra: int,
    num_samples: int,
    total_tokens: int,
    out: IntArray,
    num_threads: int = 1,
) -> None:
    out[0] = 0
    tokens = int(_cut(lengths, document_index, sequence_length, extra, num_samples, out))
    if tokens == _NO_LENGTH:
        raise InvalidArgument("document_index names a sequence that has no length")
    if tokens == _NEGATIVE:
        raise InvalidArgument("a length is negative")
    needed = num_samples * sequence_length + extra
    if tokens < min(needed, total_tokens):
        raise InvalidArgument("the documents hold fewer tokens than num_epochs * tokens_per_epoch")
    if tokens < needed and num_samples > 0:
        out[num_samples] = _last_partial(lengths, document_index, extra)
