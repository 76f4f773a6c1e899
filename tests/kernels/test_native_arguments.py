"""Arguments that once led the native core outside its arrays, or to an error of no type."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.kernels import load

pytest.importorskip("megaindex.kernels._native")
native: Any = load("native")
ONE = np.ones(1)


@for_each("function", ["token_table", "span_table"])
@for_each("sources", [[1], [(ONE,)], [(ONE, ONE, "x")], [None]])
def test_tables_of_what_are_no_arrays(function: str, sources: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match="expected a"):
        getattr(native, function)(sources)


@pytest.mark.parametrize("epochs", [2**62, 2**40])
def test_more_samples_than_any_array_holds(epochs: int) -> None:
    """Epochs times samples of an epoch: 2^62 times 2 is negative."""
    docs, sizes = np.array([0, 2, 4]), np.full(4, 9, np.int32)
    titles = np.ones(2, np.int32)
    for call in (
        lambda most: native.map_sentences(docs, sizes, epochs, most, 9, 0.0, 1),
        lambda most: native.map_blocks(docs, sizes, titles, epochs, most, 9, 1, True),
    ):
        with pytest.raises(InvalidArgument, match="at most 2\\*\\*40 samples"):
            call(2**64 - 1)
        assert len(call(7)) >= 7


def test_samples_whose_tokens_no_integer_counts() -> None:
    """The token after the last row has a number: with a length of 2^63 - 1 it was negative."""
    lengths, documents, rows = np.array([5], np.int32), np.zeros(1, np.int32), np.zeros((2, 2), int)
    for length in (2**62 - 3, 2**63 - 1):
        with pytest.raises(InvalidArgument, match="must be less than 2"):
            native.cut_samples(lengths, documents, length, 1, 1, 5, rows)
    native.cut_samples(lengths, documents, 2**62 - 4, 1, 1, 5, rows)
    assert rows.tolist() == [[0, 0], [0, 4]]


class Interrupted(Exception):
    """Raised by the signal handler, as KeyboardInterrupt is by Ctrl-C."""


@pytest.fixture
def interrupted_soon() -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.05)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


def counts() -> tuple[Any, None, None]:
    return np.zeros(20, np.int64), None, None


def starts_of_a_pass(threads: int) -> None:
    native.epoch_starts(
        KEY, np.full(10, 3, np.int32), 2**32, 2**20, np.zeros(10 * 2**12 + 1, np.int64), threads
    )


def cut(threads: int) -> None:
    """2**28 documents of a token: a second, in pages that are never written."""
    size, documents = 2**20, np.zeros(2**28, np.int32)
    rows = np.empty((documents.size // size, 2), np.int64)
    tokens = documents.size
    native.cut_samples(ONE_TOKEN, documents, size, 1, len(rows) - 1, tokens, rows, threads)


KEY = np.array([1, 2], np.uint64)
ONE_TOKEN = np.ones(1, np.int32)
WEIGHTS = np.arange(1, 21)
HOURS = 2**41
LONG = {
    "greedy": lambda: native.blend_greedy(WEIGHTS / 210, 0, HOURS, *counts()),
    "greedy, one takes all": lambda: native.blend_greedy(
        WEIGHTS * 1e9**WEIGHTS, 0, HOURS, *counts()
    ),
    "divisor": lambda: native.divisor_fill(WEIGHTS.astype(np.uint64), 0, HOURS, *counts()),
    "exhaustive": lambda: native.blend_exhaustive(WEIGHTS * HOURS, 0, HOURS, *counts()),
    "epoch starts": lambda: starts_of_a_pass(1),
    "epoch starts, two threads": lambda: starts_of_a_pass(2),
    "samples": lambda: cut(1),
    "samples, three threads": lambda: cut(3),
    "mapping": lambda: native.map_sentences(
        np.array([0, 1000]), np.full(1000, 9, np.int32), 2**31 - 1, 2**60, 30, 0.1, 1
    ),
}


@pytest.mark.usefixtures("interrupted_soon")
@pytest.mark.parametrize("call", LONG)
def test_a_signal_ends_what_would_take_hours(call: str) -> None:
    with pytest.raises(Interrupted):
        LONG[call]()


@pytest.mark.usefixtures("interrupted_soon")
def test_no_document_however_often_is_no_work() -> None:
    """It was looped over, and no signal came through."""
    state = native.seed_state(1)
    native.shuffled_documents(state, None, 0, 2**62 - 1, np.zeros(0, np.int32), 1)
    np.testing.assert_array_equal(state, native.seed_state(1))


def in_one_place(*parts: Any) -> list[Any]:
    """Arrays that begin at the same byte."""
    room = np.zeros(max(part.nbytes for part in parts), np.uint8)
    views = [room[: part.nbytes].view(part.dtype).reshape(part.shape) for part in parts]
    for view, part in zip(views, parts, strict=True):
        view[...] = part
    return views


I64 = partial(np.array, dtype=np.int64)
I32 = partial(np.array, dtype=np.int32)


def order_over_its_splits() -> None:
    """Counting what was seen moved the splits: 1.5 million mutations found what lay behind them."""
    splits = I64([0, 2, 3, 4, 4])
    runs = I64([4, 1, 5, 1]), I64([5, 3, 5, 4])
    native.least_seen(*runs, splits, I64([4, 9, 8, 4, 6]), splits, 4)


def batch_over_its_runs() -> None:
    table = native.token_table([(np.arange(9), I64([0]), I32([9]))])
    out, length = in_one_place(np.zeros((1, 4), np.int64), I64([4]))
    native.gather(table, I32([0]), I64([0]), I64([0]), length, I64([0, 1]), out, None, 0, 1)


def labels_over_their_runs() -> None:
    table = native.token_table([(np.arange(9), I64([0]), I32([9]))])
    labels, length = in_one_place(np.zeros((1, 4), np.int64), I64([4]))
    out = np.zeros((1, 4), np.int64)
    native.gather(table, I32([0]), I64([0]), I64([0]), length, I64([0, 1]), out, labels, 0, 1)


def samples_over_their_documents() -> None:
    rows, documents = in_one_place(np.zeros((3, 2), np.int32), I32([0, 1, 0]))
    native.cut_samples(I32([3, 5]), documents, 4, 0, 2, 11, rows, 1)


def starts_over_their_lengths() -> None:
    starts, lengths = in_one_place(np.zeros(2, np.int64), I32([3, 5]))
    native.epoch_starts(KEY, lengths, 1, 2, starts, 1)


def positions_over_their_lengths() -> None:
    places, length = in_one_place(np.zeros((1, 4), np.int64), I64([4]))
    native.documents_by_run(length, I64([0, 1]), 4, places, None, None)


def draws_over_their_sizes() -> None:
    rows, sizes = in_one_place(np.zeros(3, np.int64), I64([2, 2]))
    native.blend_exhaustive(sizes, 0, 3, np.zeros(2, np.int64), None, rows)


def counts_over_their_draws() -> None:
    counts = np.zeros(3, np.int64)
    native.blend_greedy(np.ones(3) / 3, 0, 3, counts, None, counts)


def documents_over_themselves() -> None:
    ids = I32([3, 1, 2])
    native.shuffled_documents(native.seed_state(1), ids, 0, 1, ids, 1)


def numbers_over_their_stream() -> None:
    state = native.seed_state(1)
    native.shuffled_range(state, 0, state[600:], 1)


@for_each(
    "call",
    [
        order_over_its_splits,
        batch_over_its_runs,
        labels_over_their_runs,
        samples_over_their_documents,
        starts_over_their_lengths,
        positions_over_their_lengths,
        draws_over_their_sizes,
        counts_over_their_draws,
        documents_over_themselves,
        numbers_over_their_stream,
    ],
)
def test_what_is_written_lies_apart_from_what_is_read(call: Callable[[], None]) -> None:
    with pytest.raises(InvalidArgument, match="shares memory with another argument"):
        call()


@pytest.mark.parametrize("table", [[1], [(ONE,)], [None], []])
def test_row_tables_of_what_are_no_arrays(table: list[Any]) -> None:
    with pytest.raises(InvalidArgument):
        native.row_table(table, table, None, None, [])


def test_ids_that_change_their_list_while_they_are_read() -> None:
    index = (np.arange(3), np.array([[0, 0], [0, 3], [0, 6], [0, 9]]), I32([0]), I32([10]), 1)
    table = native.row_table([index], [(np.arange(10), I64([0]), I32([10]))], None, None, [])
    ids: list[Any] = []

    class Clearing:
        def __index__(self) -> int:
            ids.clear()
            return 1

    ids += [Clearing(), 0, 0]
    rows = native.read_rows(table, ids, 4, 0)
    assert rows.tolist() == [[3, 4, 5, 6]]


@pytest.mark.parametrize("width", [-1, 2**40, 2**63 - 1])
def test_rows_that_no_memory_holds(width: int) -> None:
    index = (np.arange(1), np.array([[0, 0], [0, 3]]), I32([0]), I32([10]), 1)
    table = native.row_table([index], [(np.arange(10), I64([0]), I32([10]))], None, None, [])
    with pytest.raises((InvalidArgument, MemoryError)):
        native.read_rows(table, [0], width, 0)
