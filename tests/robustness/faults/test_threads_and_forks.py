"""Builds from several threads, use after a fork, workers of every kind, and Ctrl-C."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

import megaindex
from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.errors import StorageError
from megaindex.index.orders import epoch
from megaindex.index.orders import framework as shuffled
from megaindex.loader.positional_reader import PositionalTokens
from megaindex.verify.verify import verify_all

# From Python 3.12 on, forking warns once anything has started a thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

ORDERS = ("megatron", "epoch", "window")


@pytest.fixture
def corpus(tmp_path: Path) -> IndexedDataset:
    return write_corpus(tmp_path / "corpus", np.arange(300) % 61)


def build(corpus: Any, order: str, cache: Path | None = None) -> Any:
    return megaindex.build_index(
        corpus, sequence_length=16, seed=1, epochs=3, order=order, cache_dir=cache
    )


def located(index: Any) -> list[list[int]]:
    spans = index.locate(np.arange(index.num_samples))
    return [np.asarray(column).tolist() for column in spans]


def test_threads_that_want_one_entry_build_it_once(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    real = shuffled.build

    def slowly(*arguments: Any) -> None:
        built.append(1)
        time.sleep(0.2)
        real(*arguments)

    monkeypatch.setattr(shuffled, "build", slowly)
    barrier = threading.Barrier(8)

    def want(_: int) -> Any:
        barrier.wait()
        return located(build(corpus, "megatron", tmp_path / "cache"))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(want, range(8)))
    assert len(built) == 1
    assert results == [located(build(corpus, "megatron"))] * 8
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_threads_share_one_index(
    corpus: IndexedDataset, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch, "WORTH_PREPARING", 0)  # tables made in the background
    index, expected = build(corpus, order), located(build(corpus, order))
    runs = np.diff(index.locate(np.arange(index.num_samples)).row_splits)

    def want(seed: int) -> bool:
        ids = np.random.default_rng(seed).permutation(index.num_samples)
        lengths = np.diff(index.locate(ids).row_splits)
        return bool((lengths == runs[ids]).all()) and located(index) == expected

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(want, range(24)))


def in_child(function: Callable[[], bool]) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if function() else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("order", ORDERS)
def test_a_forked_child_reads_and_builds(
    corpus: IndexedDataset, tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While threads of the parent, which the child has not, make tables and sync entries."""
    monkeypatch.setattr(epoch, "WORTH_PREPARING", 0)
    index = build(corpus, order, tmp_path / "cache")
    expected = located(build(corpus, order))
    index.locate([0])

    def child() -> bool:
        same = located(index) == expected
        found = located(build(corpus, order, tmp_path / "cache")) == expected
        made = located(build(corpus, order, tmp_path / "other")) == expected
        return same and found and made

    in_child(child)
    assert located(index) == expected


def test_a_fork_in_the_middle_of_a_build(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child waits for its parent's claim and takes what the parent publishes."""
    real = shuffled.build
    children: list[int] = []

    def forking(*arguments: Any) -> None:
        if not children:
            children.append(os.fork())
            if children[0] == 0:
                status = 1
                try:
                    monkeypatch.setattr(shuffled, "build", _never)
                    build(corpus, "megatron", tmp_path / "cache")
                    status = 0
                finally:
                    os._exit(status)
            time.sleep(0.2)
        real(*arguments)

    monkeypatch.setattr(shuffled, "build", forking)
    build(corpus, "megatron", tmp_path / "cache")
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    "method",
    [
        "fork",
        "pickled",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver")),
    ],
)
def test_workers_of_a_dataloader(corpus: IndexedDataset, tmp_path: Path, method: str) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    from megaindex.loader import GPTDataset

    dataset = GPTDataset(build(corpus, "megatron", tmp_path / "cache"), [corpus])
    if method == "pickled":  # what the others send to their workers
        loader = torch_data.DataLoader(pickle.loads(pickle.dumps(dataset)), batch_size=8)
    else:
        workers = 2 if method == "fork" else 1  # any other imports what this process has imported
        loader = torch_data.DataLoader(
            dataset, batch_size=8, num_workers=workers, multiprocessing_context=method
        )
    served = [row for batch in loader for row in batch["tokens"].tolist()]
    assert served == [dataset[k]["tokens"].tolist() for k in range(len(dataset))]


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_file_cut_short_is_an_error_of_the_workers(
    corpus: IndexedDataset, tmp_path: Path, method: str
) -> None:
    """Read by position, a short read is an error; through a mapping it would end the process."""
    torch_data = pytest.importorskip("torch.utils.data")
    from megaindex.loader import GPTDataset

    dataset = GPTDataset(build(corpus, "window"), PositionalTokens([corpus]))
    loader = torch_data.DataLoader(
        dataset, batch_size=4, num_workers=2, multiprocessing_context=method, prefetch_factor=1
    )
    batches = iter(loader)
    for _ in range(2):  # each of the workers has begun
        next(batches)
    os.truncate(f"{corpus.path_prefix}.bin", 4000)  # of a file that is being read
    with pytest.raises(StorageError, match=r"corpus\.bin"):
        list(batches)


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_half_done(tmp_path: Path) -> None:
    """At moments further and further into a build, whose kernels run for a while."""
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint8) as writer:
        writer.add_documents(np.zeros(1_600_000, np.uint8), np.full(400_000, 4))
    cache, said = tmp_path / "cache", []
    while len(said) < 5:
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            _until_interrupted(tmp_path / "corpus", cache, send)
        os.close(send)
        with os.fdopen(receive, "rb", buffering=0) as stream:
            stream.read(1)  # it has begun
            time.sleep(0.03 * len(said) ** 2)
            os.kill(child, signal.SIGINT)
            os.waitpid(child, 0)
            said.append(stream.read().decode())
        names = [path.name for path in cache.iterdir()]
        if names:  # it may have been published and interrupted in this order
            assert [report.findings for report in verify_all(cache, full=True)] == [()]
            break
        assert said[-1] == "interrupted"
    assert set(said) <= {"interrupted", "built"}
    assert len(names) <= 1
    assert said[0] == "interrupted"


def _never(*arguments: Any) -> None:
    raise AssertionError("somebody else builds this")


def _until_interrupted(corpus: Path, cache: Path, send: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        real = shuffled.build

        def announced(*arguments: Any) -> None:
            os.write(send, b".")
            real(*arguments)

        shuffled.build = announced
        megaindex.build_index(corpus, sequence_length=64, seed=1, epochs=20, cache_dir=cache)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.write(send, b"built")
    except KeyboardInterrupt:
        os.write(send, b"interrupted")
    finally:
        os._exit(0)
