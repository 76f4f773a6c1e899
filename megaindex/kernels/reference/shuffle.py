"""numpy's legacy stream, by numpy itself: what the other backends reproduce."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from megaindex._types import I32, U32, U64, IntArray
from megaindex.errors import InvalidArgument

STATE_WORDS = 625  # MT19937's 624 words and the read position


def seed_state(seed: int) -> U32:
    """State of ``numpy.random.RandomState(seed)`` as uint32[625]: 624 words, then the position."""
    return _pack(np.random.RandomState(seed))


def shuffle(state: U32, array: IntArray, num_threads: int = 1) -> None:
    """``RandomState.shuffle(array)``, in place; ``state`` moves on as the stream does."""
    stream = _unpack(state)
    stream.shuffle(array)
    state[:] = _pack(stream)


def shuffled_range(state: U32, first: int, out: IntArray, num_threads: int = 1) -> None:
    """``out`` becomes first, first+1, ... shuffled."""
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
    """``out`` becomes the documents, ``num_epochs`` times over, shuffled together.

    ``documents=None`` stands for first_document, first_document+1, ... of which there are
    ``out.size // num_epochs``.
    """
    count = out.size // num_epochs
    rows = out.reshape(num_epochs, count)
    rows[:] = np.arange(first_document, first_document + count) if documents is None else documents
    shuffle(state, out)


def draw_positions(state: U32, first: int, count: int) -> U64:
    """Positions of the Fisher-Yates steps ``first``, ``first-1``, ...: uniform on [0, step].

    32-bit words are masked to the next power of two and rejected above the step; from 2**32 on,
    64-bit words are.
    """
    stream = _unpack(state)
    positions = np.empty(count, np.uint64)
    for k in range(count):
        step = first - k
        wide = step > 0xFFFFFFFF
        mask = (1 << step.bit_length()) - 1
        value = _word(stream, wide) & mask
        while value > step:
            value = _word(stream, wide) & mask
        positions[k] = value
    state[:] = _pack(stream)
    return positions


def _word(stream: np.random.RandomState, wide: bool) -> int:
    word = int.from_bytes(stream.bytes(4), "little")
    if not wide:
        return word
    return word << 32 | int.from_bytes(stream.bytes(4), "little")


def _pack(stream: np.random.RandomState) -> U32:
    _, key, position, *_ = stream.get_state(legacy=True)
    return np.append(key, np.uint32(position)).astype(np.uint32)


def _unpack(state: U32) -> np.random.RandomState:
    stream = np.random.RandomState()
    stream.set_state(("MT19937", state[:-1], int(state[-1]), 0, 0.0))
    return stream


def sort_by_sample(shuffle_index: U32, samples: int, begin: int, out: U64) -> None:
    """Entries of a shuffle from ``begin`` on, as many as fit into ``out``, sorted by their samples.

    Each becomes ``sample << 32 | k``, where k counts entries from ``begin``. ``shuffle_index``
    holds each of ``samples`` samples at most once. Of shuffle 2 0 1 from 1 on, these are 0 << 32
    and 1 << 32 | 1.

    Raises:
        InvalidArgument: an entry is not a sample, or equals another: the array is damaged.
    """
    here = [(int(sample), k) for k, sample in enumerate(shuffle_index[begin : begin + out.size])]
    for sample, k in here:
        if sample >= samples:
            raise InvalidArgument(
                f"shuffle_index: entry {begin + k} is {sample}, sample_index holds {samples} "
                "samples; build the index again"
            )
    here.sort()
    for (sample, one), (other, two) in pairwise(here):
        if sample == other:
            raise InvalidArgument(
                f"shuffle_index: entries {begin + one} and {begin + two} are both {sample}; build "
                "the index again"
            )
    out[:] = [sample << 32 | k for sample, k in here]
