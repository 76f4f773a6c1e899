"""NumPy's legacy random stream and its shuffles, which the other backends reproduce."""

from __future__ import annotations

import numpy as np

from megaindex._types import I32, U32, IntArray

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
