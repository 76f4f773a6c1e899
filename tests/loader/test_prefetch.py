"""Order, bounds and errors of prefetching, and the end of its threads."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.corpora import write_corpus

from megaindex import IndexedDataset, build_index
from megaindex.errors import InvalidArgument
from megaindex.loader import token_readers
from megaindex.loader.batch_reader import ReadAhead


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    left = [t for t in threading.enumerate() if t.name.startswith("megaindex-ahead")]
    if left:
        gc.collect()
    for thread in left:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize(("depth", "threads"), [(1, 1), (3, 1), (2, 2), (7, 4), (4, 9)])
def test_results_come_in_order(depth: int, threads: int) -> None:
    def prepare(task: int) -> int:
        time.sleep(0.001 * (task * 7 % 3))  # the later are often ready first
        return task * task

    with ReadAhead(iter(range(60)), prepare, depth=depth, threads=threads) as ahead:
        assert list(ahead) == [task * task for task in range(60)]
        assert list(ahead) == []


def test_no_more_than_the_depth_is_ahead() -> None:
    begun: list[int] = []
    enough = threading.Event()

    def prepare(task: int) -> int:
        begun.append(task)
        if len(begun) == 3:
            enough.set()
        return task

    with ReadAhead(iter(range(100)), prepare, depth=3, threads=2) as ahead:
        assert enough.wait(10)
        for taken in range(50):
            assert next(ahead) == taken
            assert len(begun) <= taken + 1 + 3


def test_no_task_begins_after_the_end() -> None:
    begun: list[int] = []

    def prepare(task: int) -> int:
        begun.append(task)
        time.sleep(0.001)
        return task

    with ReadAhead(iter(range(3000)), prepare, depth=3, threads=2) as ahead:
        assert [next(ahead), next(ahead)] == [0, 1]
    assert len(begun) <= 2 + 3
    time.sleep(0.02)
    assert len(begun) <= 2 + 3


@pytest.mark.parametrize("at", [0, 1, 7, 30])
def test_an_error_is_raised_in_its_place(at: int) -> None:
    release = threading.Event()

    def prepare(task: int) -> int:
        if task == at:
            release.set()
            raise ValueError(f"task {task}")
        if task < at and task >= at - 3:
            release.wait(0.05)  # those before it are still in preparation when it fails
        return task

    with ReadAhead(iter(range(40)), prepare, depth=6, threads=4) as ahead:
        assert [next(ahead) for _ in range(at)] == list(range(at))
        for _ in range(2):
            with pytest.raises(ValueError, match=f"task {at}"):
                next(ahead)


def test_an_error_of_the_order_is_raised_in_its_place() -> None:
    def tasks() -> Iterator[int]:
        yield from (5, 6)
        raise KeyError("the sampler")

    ahead = ReadAhead(tasks(), str, depth=4, threads=3)
    assert [next(ahead), next(ahead)] == ["5", "6"]
    with pytest.raises(KeyError, match="the sampler"):
        next(ahead)
    ahead.close()


def test_nothing_further_is_begun_after_an_error() -> None:
    begun: list[int] = []

    def prepare(task: int) -> int:
        begun.append(task)
        raise ValueError("first")

    ahead = ReadAhead(iter(range(1000)), prepare, depth=100, threads=2)
    with pytest.raises(ValueError, match="first"):
        next(ahead)
    ahead.close()
    assert len(begun) <= 2


def test_dropping_it_ends_the_threads() -> None:
    ahead = ReadAhead(iter(range(1000)), str, depth=2, threads=2)
    assert next(ahead) == "0"
    threads = ahead._threads
    del ahead
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_closing_wakes_a_waiting_consumer() -> None:
    release = threading.Event()
    ahead = ReadAhead(iter(range(3)), lambda task: release.wait(10) and task, depth=1, threads=1)
    got: list[object] = []
    consumer = threading.Thread(target=lambda: got.append(next(ahead, "nothing")))
    consumer.start()
    ahead._queue.stop()
    release.set()
    consumer.join(10)
    ahead.close()
    assert got in ([0], ["nothing"])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_use_in_a_forked_child_is_refused() -> None:
    ahead = ReadAhead(iter(range(1000)), str, depth=2, threads=2)
    next(ahead)
    holds, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with ahead._queue._lock:
            holds.set()
            forked.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    holds.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # the lock has an owner that the child lacks
        try:
            next(ahead)
        except InvalidArgument as error:
            ahead.close()
            with ReadAhead(iter(range(5)), str, depth=2, threads=2) as own:
                fine = list(own) == list("01234") and "got a forked child" in str(error)
            os._exit(0 if fine else 1)
        os._exit(2)
    forked.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert next(ahead) == "1"
    ahead.close()


@pytest.mark.slow
def test_the_interpreter_exits_with_threads_at_work() -> None:
    """Three interpreters: forks of one that imported the loader, which takes seconds."""
    code = """
import os, time
from megaindex.loader.batch_reader import ReadAhead
for end in ("", "raise SystemExit(0)", "os.kill(os.getpid(), 15)"):
    child = os.fork()
    if not child:
        ahead = ReadAhead(iter(range(10**9)), lambda task: time.sleep(0.001), depth=3, threads=3)
        next(ahead)
        exec(end)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        capture_output=True,
        timeout=90,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"0\n0\n-15\n", b"")


@pytest.mark.parametrize(("depth", "threads"), [(0, 1), (1, 0)])
def test_sizes_are_checked(depth: int, threads: int) -> None:
    with pytest.raises(InvalidArgument, match="must be at least 1"):
        ReadAhead(iter(()), str, depth=depth, threads=threads)


@pytest.mark.parametrize(("there", "is_warm"), [(5, True), (4, False), (0, False)])
def test_pages_are_requested_unless_all_are_in_memory(
    there: int, is_warm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "web", [40] * 100)
    dataset = IndexedDataset(tmp_path / "web")
    spans = build_index(dataset, sequence_length=16, order="window").locate([3, 90])
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(token_readers, "_MERGE_GAP", 0)
    monkeypatch.setattr(token_readers, "resident_pages", lambda *_: (there, 5))
    monkeypatch.setattr(token_readers, "will_need", lambda *place: asked.append(place))
    assert token_readers.PrefetchingTokens((dataset,)).prefetch(spans) == is_warm
    begin = int(dataset.tokens.__array_interface__["data"][0])
    found = sorted((address - begin, address - begin + nbytes) for address, nbytes in asked)
    first = spans.row_splits[:-1]
    places = (spans.document[first] * 40 + spans.offset[first]).tolist()
    size = dataset.dtype.itemsize
    rows = sorted((place * size, (place + 17) * size) for place in places)
    assert found == ([] if is_warm else rows)
