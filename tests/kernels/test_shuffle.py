"""The legacy stream of numpy.random.RandomState, on every backend."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.kernels import load

# around chunk sizes and powers of two
SIZES = (0, 1, 2, 3, 4, 5, 255, 256, 257, 4095, 4097, 8191, 8193, 65537, 140_000)
SHARED = (1 << 21) + 12_345  # elements; from 2**21 on threads share the swaps


@pytest.mark.slow_cases("reference")
@for_each("dtype", [np.int32, np.uint32, np.int64])
@for_each("threads", [1, 3])
def test_two_shuffles_of_one_stream_are_numpys(backend: Any, dtype: type, threads: int) -> None:
    for size in SIZES:
        stream = np.random.RandomState(size + 5)
        state = backend.seed_state(size + 5)
        for _ in range(2):
            expected = np.arange(size, dtype=dtype)
            actual = expected.copy()
            stream.shuffle(expected)
            backend.shuffle(state, actual, threads)
            np.testing.assert_array_equal(actual, expected)
        key, position = stream.get_state(legacy=True)[1:3]
        np.testing.assert_array_equal(state[:-1], key)
        assert state[-1] == position


def test_a_word_that_only_the_first_steps_of_a_block_accept(backend: Any) -> None:
    """The 48th word is one above the limit of its step, and 46 below that of the first step."""
    expected = np.arange(4096)
    actual = expected.copy()
    np.random.RandomState(7150).shuffle(expected)
    backend.shuffle(backend.seed_state(7150), actual, 1)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.slow
@for_each(("dtype", "threads"), [(np.int32, 2), (np.uint32, 5), (np.int64, 2), (np.int32, 40)])
def test_threads_share_the_swaps_of_a_large_array(dtype: type, threads: int) -> None:
    native, stream = load("native"), np.random.RandomState(threads)
    state = native.seed_state(threads)
    actual = np.empty(SHARED, dtype)
    native.shuffled_range(state, 7, actual, threads)
    expected = np.arange(7, SHARED + 7, dtype=dtype)
    stream.shuffle(expected)
    np.testing.assert_array_equal(actual, expected)
    key, position = stream.get_state(legacy=True)[1:3]
    assert state.tolist() == [*key.tolist(), position]


@given(seed=st.integers(0, 2**32 - 1), words=st.integers(0, 1300), size=st.integers(0, 700))
def test_a_stream_is_taken_over_from_numpy_and_given_back(
    backend: Any, seed: int, words: int, size: int
) -> None:
    ours, numpys = np.random.RandomState(seed), np.random.RandomState(seed)
    for stream in (ours, numpys):
        stream.bytes(4 * words)
    key, position = ours.get_state(legacy=True)[1:3]
    state = np.append(key, np.uint32(position)).astype(np.uint32)
    actual = np.arange(size, dtype=np.int64)
    expected = actual.copy()
    backend.shuffle(state, actual)
    numpys.shuffle(expected)
    np.testing.assert_array_equal(actual, expected)
    ours.set_state(("MT19937", state[:-1], int(state[-1])))
    assert ours.bytes(64) == numpys.bytes(64)


@for_each("first", [1, 2, 700, 2**31, 2**32 - 2, 2**32 + 300, 2**33, 2**52 + 1])
def test_numba_draws_numpys_positions_below_and_above_32_bits(first: int) -> None:
    """Steps from 2**32 on draw 64-bit words; no test has room for an array of that size."""
    from megaindex.kernels.jit.samples import _draw, _temper

    count = min(first, 600)
    state = load("reference").seed_state(11)
    words, positions = np.empty(624, np.uint32), np.empty(count + 1, np.int64)
    _temper(state, words)
    _draw(state, words, first, positions, count)
    # NumPy's masked rejection draws the same words for randint(0, step + 1)
    stream = np.random.RandomState(11)
    expected = [
        int(stream.randint(0, step + 1, dtype=np.int64 if step >= 2**32 else np.uint32))
        for step in range(first, first - count, -1)
    ]
    assert positions[:count].tolist() == expected
    key, position = stream.get_state(legacy=True)[1:3]
    assert state.tolist() == [*key.tolist(), position]


def test_a_shuffled_range_starts_where_asked(backend: Any) -> None:
    state, stream = backend.seed_state(3), np.random.RandomState(3)
    out = np.empty(1000, np.uint32)
    backend.shuffled_range(state, 50, out)
    expected = np.arange(50, 1050, dtype=np.uint32)
    stream.shuffle(expected)
    np.testing.assert_array_equal(out, expected)


@for_each("as_array", [False, True])
def test_documents_of_several_epochs_are_shuffled_together(backend: Any, as_array: bool) -> None:
    documents = np.arange(20, 170, dtype=np.int32)
    out = np.empty(3 * documents.size, np.int32)
    state = backend.seed_state(9)
    backend.shuffled_documents(state, documents if as_array else None, 20, 3, out)
    expected = np.tile(documents, 3)
    np.random.RandomState(9).shuffle(expected)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.slow
@for_each("as_array", [False, True])
def test_threads_fill_in_the_documents_of_several_epochs(as_array: bool) -> None:
    native = load("native")
    documents = np.arange(20, 20 + SHARED // 3, dtype=np.int32)
    out = np.empty(3 * documents.size, np.int32)
    native.shuffled_documents(native.seed_state(9), documents if as_array else None, 20, 3, out, 5)
    expected = np.tile(documents, 3)
    np.random.RandomState(9).shuffle(expected)
    np.testing.assert_array_equal(out, expected)


def test_the_native_core_refuses_what_it_cannot_use() -> None:
    native = load("native")
    state = native.seed_state(1)
    with pytest.raises(InvalidArgument, match="seed"):
        native.seed_state(2**32)
    with pytest.raises(InvalidArgument, match="array: expected a 1-dimensional int64 array"):
        native.shuffle(state, np.zeros(3, np.float64))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="contiguous"):
        native.shuffle(state, np.zeros(6, np.int32)[::2])
    frozen = np.zeros(3, np.int32)
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgument, match="read-only"):
        native.shuffle(state, frozen)
    with pytest.raises(InvalidArgument, match="state"):
        native.shuffle(np.full(625, 700, np.uint32), np.zeros(3, np.int32))


WRITTEN_MEANWHILE = """
import threading
import numpy as np
from megaindex.errors import InvalidArgument
from megaindex.kernels import load

native = load("native")
state = native.seed_state(1)
array = np.arange(1000, dtype=np.int32)
ended = threading.Event()


def write():
    # NumPy writes the last word again and again, without the lock of the interpreter
    both = np.lib.stride_tricks.as_strided(np.array([0, 1000], np.uint32), (10**6, 2), (0, 4))
    word = np.lib.stride_tricks.as_strided(state[-1:], (10**6, 2), (0, 0))
    while not ended.is_set():
        np.copyto(word, both)


writer = threading.Thread(target=write)
writer.start()
for _ in range(60_000):
    try:
        native.shuffle(state, array, 1)
    except InvalidArgument as error:
        assert "at most 624" in str(error)
ended.set()
writer.join()
assert sorted(array.tolist()) == list(range(1000))
"""


@pytest.mark.slow
def test_a_state_that_another_thread_writes_is_copied_before_it_is_checked() -> None:
    """A position beyond the words once made the stream read on for ever."""
    load("native")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", WRITTEN_MEANWHILE], check=True, timeout=120, env=env)
