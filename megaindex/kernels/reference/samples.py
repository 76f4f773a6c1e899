"""sample_index, packed documents, the check of an .idx against its .bin, and NumPy's shuffles.

The legacy random stream of NumPy (MT19937) is the specification of all framework orders.
"""

from __future__ import annotations

import numpy as np

from megaindex._types import I32, I64, U32, IntArray
from megaindex.errors import InvalidArgument


def tokens_within(pointers: I64, lengths: I32, item_size: int, nbytes: int) -> int:
    """Return the tokens of all sequences, or -1 if one does not lie in the .bin.

    A sequence has a length that is not negative, lies within the first ``nbytes`` of the .bin, and
    begins at a multiple of ``item_size``, which is 1, 2, 4 or 8 bytes. ``pointers`` are in bytes,
    ``lengths`` in items. With items of 2 bytes, pointers 0 6 and lengths 3 1 are 4 tokens in 8
    bytes.
    """
    begins, sizes = pointers.astype(np.int64), lengths.astype(np.int64)
    if begins.size == 0:
        return 0
    # pointers beyond the .bin are refused first, so that the sum below cannot wrap
    if sizes.min() < 0 or begins.min() < 0 or begins.max() > nbytes:
        return -1
    if (begins + sizes * item_size).max() > nbytes or (begins % item_size).any():
        return -1
    return int(sizes.sum())


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
    """Fill ``out`` with sample_index: rows (position in document_index, offset in the document).

    Row k is the beginning of sample k: the last token of sample k - 1 if samples share a token for
    the shifted label (``extra=1``), else the token after it. With lengths 3 0 4, S = 2 and extra 1,
    tokens ``a b c | | d e f g`` are cut into ``a b c``, ``c d e``, ``e f g``: rows (0, 0) (0, 2)
    (2, 1) (2, 3).

    Args:
        lengths: int32[sequences], tokens of each; may be unaligned.
        document_index: int32[documents], sequence ids in reading order.
        sequence_length: tokens per sample, at least 1.
        extra: 0 or 1.
        num_samples: samples to cut; if it was rounded up, the last row is the last token.
        total_tokens: tokens of all documents.
        out: int32 or int64 [num_samples + 1, 2].
        num_threads: threads of the native kernel; the result does not depend on it.

    Raises:
        InvalidArgument: a sequence does not exist, a length is negative, or tokens are missing.
    """
    out[0] = 0, 0
    row, position = 1, 0
    boundary = sequence_length - 1 + extra  # the token that row 1 points at
    for d, document in enumerate(document_index.tolist()):
        if not 0 <= document < lengths.size:
            raise InvalidArgument("document_index names a sequence that has no length")
        length = int(lengths[document])
        if length < 0:
            raise InvalidArgument("a length is negative")
        while row <= num_samples and boundary < position + length:
            out[row] = d, boundary - position + 1 - extra
            row += 1
            boundary += sequence_length
        position += length
    needed = num_samples * sequence_length + extra
    if position < min(needed, total_tokens):
        raise InvalidArgument("the documents hold fewer tokens than num_epochs * tokens_per_epoch")
    if position < needed and num_samples > 0:
        out[num_samples] = _last_partial(lengths, document_index, extra)


def _last_partial(lengths: I32, document_index: I32, extra: int) -> tuple[int, int]:
    """Return the row of the last token; empty documents have no token to share."""
    d = document_index.size - 1
    while extra == 1 and d > 0 and lengths[document_index[d]] == 0:
        d -= 1
    return d, int(lengths[document_index[d]]) - extra


def pack_documents(lengths: I32, capacity: int, tokens: int, begins: I64) -> tuple[int, int]:
    """Pack whole documents into samples, each until the next document would not fit.

    With lengths 3 4 9 1 and a capacity of 8, documents 0 and 1 make a sample, document 2, too long
    for any, begins one, and so does document 3: begins 0 2 3.

    Args:
        lengths: int32[n], tokens of the documents in reading order, none negative.
        capacity: tokens that a sample of several documents may hold.
        tokens: tokens of the sample that is not complete; 0 begins a new one.
        begins: int64[m], filled with the documents at which samples begin; packing stops after m.

    Returns:
        The number of samples begun, and the tokens of the last one.
    """
    samples = 0
    for d, length in enumerate(lengths.tolist()):
        if samples == begins.size:
            break
        if tokens == 0 or tokens + length > capacity:
            begins[samples] = d
            samples += 1
            tokens = length
        else:
            tokens += length
    return samples, tokens


STATE_WORDS = 625  # MT19937's 624 words and the read position


def seed_state(seed: int) -> U32:
    """Return the state of ``RandomState(seed)`` as uint32[625]: 624 words, then the position."""
    return _pack(np.random.RandomState(seed))


def shuffle(state: U32, array: IntArray, num_threads: int = 1) -> None:
    """Shuffle an integer array in place as ``RandomState.shuffle`` does, and advance ``state``."""
    stream = _unpack(state)
    stream.shuffle(array)
    state[:] = _pack(stream)


def shuffled_range(state: U32, first: int, out: IntArray, num_threads: int = 1) -> None:
    """Fill ``out`` with first, first + 1, … in shuffled order."""
    out[:] = np.arange(first, first + out.size, dtype=out.dtype)
    shuffle(state, out)


def shuffled_documents(
    state: U32,
    documents: I32 | None,
    first_document: int,
    num_epochs: int,
    out: I32,
    num_threads: int = 1,
) -> None:
    """Fill ``out`` with ``num_epochs`` copies of the documents, shuffled together.

    ``documents=None`` stands for the ``out.size // num_epochs`` documents from ``first_document``.
    """
    count = out.size // num_epochs
    rows = out.reshape(num_epochs, count)
    rows[:] = np.arange(first_document, first_document + count) if documents is None else documents
    shuffle(state, out)


def _pack(stream: np.random.RandomState) -> U32:
    _, key, position, *_ = stream.get_state(legacy=True)
    return np.append(key, np.uint32(position)).astype(np.uint32)


def _unpack(state: U32) -> np.random.RandomState:
    stream = np.random.RandomState()
    stream.set_state(("MT19937", state[:-1], int(state[-1]), 0, 0.0))
    return stream
