"""Positional reads against the mapping, and the errors of failing reads."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.files import open_below

from megaindex._types import I64
from megaindex.errors import FormatError, InvalidArgument, MissingFile, OutOfRange, StorageError
from megaindex.format import IndexedDataset
from megaindex.index.spans import Spans
from megaindex.io.mapping import DescriptorCache, Pread, RangeReader
from megaindex.loader.positional_reader import PositionalOptions, PositionalTokens
from megaindex.loader.token_readers import RunBytes, merge, row_groups

DTYPES = (np.uint16, np.int32, np.uint8, np.uint16)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[IndexedDataset]:
    directory = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(5)
    return [
        write_corpus(directory / str(k), rng.integers(1, 90, 40), dtype)
        if dtype is not np.uint8
        else write_bytes(directory / str(k), rng.integers(1, 90, 40))
        for k, dtype in enumerate(DTYPES)
    ]


def write_bytes(prefix: Path, lengths: I64) -> IndexedDataset:
    from megaindex import IndexedDatasetWriter

    with IndexedDatasetWriter(str(prefix), np.uint8) as writer:
        for length in lengths:
            writer.add_document(np.arange(length) % 251)
    return IndexedDataset(str(prefix))


def spans_of(rows: list[list[tuple[int, int, int, int]]]) -> Spans:
    """Spans from the (source, document, offset, length) of each row's runs."""
    runs = [run for row in rows for run in row]
    columns = np.array(runs, np.int64).reshape(-1, 4).T
    return Spans(
        source=columns[0].astype(np.int32),
        document=np.ascontiguousarray(columns[1]),
        offset=np.ascontiguousarray(columns[2]),
        length=np.ascontiguousarray(columns[3]),
        row_splits=np.cumsum([0] + [len(row) for row in rows]),
    )


def expected(
    datasets: list[IndexedDataset], rows: list[list[tuple[int, int, int, int]]], width: int
) -> tuple[I64, I64]:
    out = np.full((len(rows), width), -7)
    labels = out.copy()
    for k, row in enumerate(rows):
        text = np.concatenate(
            [np.empty(0, np.int64)]
            + [datasets[s].get(d, offset, length).astype(np.int64) for s, d, offset, length in row]
        )
        out[k, : min(text.size, width)] = text[:width]
        labels[k, : min(max(text.size - 1, 0), width)] = text[1 : width + 1]
    return out, labels


def read(
    reader: PositionalTokens, rows: list[list[tuple[int, int, int, int]]], width: int = 40
) -> tuple[I64, I64]:
    out, labels = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
    reader.read(spans_of(rows), out, labels, pad_id=-7)
    return out, labels


@given(data=st.data())
def test_reads_what_the_mapping_holds(datasets: list[IndexedDataset], data: st.DataObject) -> None:
    def runs() -> st.SearchStrategy[tuple[int, int, int, int]]:
        return st.tuples(*[st.integers(0, 10**6)] * 4).map(existing)

    def existing(drawn: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        source = drawn[0] % len(datasets)
        document = drawn[1] % len(datasets[source])
        size = int(datasets[source].sequence_lengths[document])
        offset = drawn[2] % size
        return source, document, offset, drawn[3] % (size - offset) + 1

    rows = data.draw(st.lists(st.lists(runs(), max_size=4), min_size=1, max_size=8))
    options = PositionalOptions(
        threads=data.draw(st.integers(1, 5)),
        merge_gap=data.draw(st.sampled_from([0, 8, 100, 1 << 20])),
        bytes_in_flight=data.draw(st.sampled_from([1, 200, 1 << 20])),
    )
    reader = PositionalTokens(datasets, options)
    for _ in range(2):  # the second time in a buffer that was used
        for got, right in zip(read(reader, rows), expected(datasets, rows, 40), strict=True):
            np.testing.assert_array_equal(got, right)
    reader.close()


def test_ranges_close_together_are_merged() -> None:
    runs = RunBytes(
        source=np.array([0, 0, 1, 0, 0]),
        begin=np.array([100, 0, 15, 15, 104]),
        nbytes=np.array([20, 10, 5, 6, 2]),
    )
    ranges = merge(runs, 10)
    assert ranges.source.tolist() == [0, 0, 1]
    assert ranges.begin.tolist() == [0, 100, 15]
    assert ranges.nbytes.tolist() == [21, 20, 5]
    assert ranges.at.tolist() == [0, 64, 128]
    assert ranges.run_at.tolist() == [64, 0, 128, 15, 68]
    assert ranges.staging_nbytes == 192
    assert merge(runs, 4).begin.tolist() == [0, 15, 100, 15]


def test_rows_are_grouped_within_the_bound() -> None:
    spans = spans_of([[(0, 0, 0, 1)] * 2, [], [(0, 0, 0, 1)], [(0, 0, 0, 1)] * 3])
    nbytes = np.array([10, 10, 30, 5, 5, 5])
    assert list(row_groups(spans, nbytes, 50)) == [(0, 3), (3, 4)]
    assert list(row_groups(spans, nbytes, 1)) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_what_the_files_do_not_hold_is_refused(datasets: list[IndexedDataset]) -> None:
    reader = PositionalTokens(datasets)
    size = int(datasets[1].sequence_lengths[3])
    for run, message in [
        ((4, 0, 0, 1), "reads source 4, and there are 4"),
        ((-1, 0, 0, 1), "reads source -1"),
        ((1, 40, 0, 1), "reads sequence 40, and there are 40"),
        ((1, -1, 0, 1), "reads sequence -1"),
        (
            (1, 3, 0, size + 1),
            f"tokens of sequence 3 must be within 0 to {size}, got 0 to {size + 1}",
        ),
        ((1, 3, -1, 1), "tokens of sequence 3 must be .* got -1 to 0"),
        ((1, 3, 2**62, 2**62), "tokens of sequence 3 must be within"),
    ]:
        with pytest.raises(OutOfRange, match=message):
            read(reader, [[(0, 0, 0, 1)], [run]])


@pytest.mark.parametrize("pointer", [-4, 2, 4 * 79, 2**62])
def test_a_pointer_outside_the_bin_is_refused(tmp_path: Path, pointer: int) -> None:
    write_corpus(tmp_path / "c", [40, 40])
    raw = bytearray((tmp_path / "c.idx").read_bytes())
    raw[34 + 8 : 34 + 16] = pointer.to_bytes(8, "little", signed=True)
    (tmp_path / "c.idx").write_bytes(raw)
    reader = PositionalTokens([IndexedDataset(str(tmp_path / "c"))])
    with pytest.raises(FormatError, match=f"sequence 0 .* byte.* {pointer}"):
        read(reader, [[(0, 0, 0, 8)]])


class Faulty:
    """os.preadv with faults at chosen offsets of a file."""

    def __init__(self, faults: dict[int, list[str]]) -> None:
        self.faults = faults

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        fault = self.faults.get(offset)
        if fault:
            number = getattr(errno, fault.pop(0))
            raise OSError(number, os.strerror(number))
        return os.preadv(descriptor, [buffers[0][:33]], offset)  # short ones too


def faulty_reader(
    datasets: list[IndexedDataset], pread: Pread, timeout: float = 60.0, threads: int = 3
) -> PositionalTokens:
    return PositionalTokens(
        datasets,
        PositionalOptions(threads=threads, merge_gap=0, timeout=timeout),
        reader=RangeReader(
            descriptors=DescriptorCache(2), retries=2, first_pause=0.001, pread=pread
        ),
    )


def whole(datasets: list[IndexedDataset], source: int) -> list[list[tuple[int, int, int, int]]]:
    """A row for every second sequence of a source, so that no two are read together."""
    lengths = datasets[source].sequence_lengths
    return [[(source, k, 0, int(lengths[k]))] for k in range(0, 40, 2)]


def test_transient_errors_are_retried(datasets: list[IndexedDataset]) -> None:
    offsets = datasets[1].sequence_pointers.tolist()
    faults = {offset: ["EIO", "ESTALE"] for offset in offsets[::4]}
    rows = whole(datasets, 1)
    got = read(faulty_reader(datasets, Faulty(faults)), rows)
    np.testing.assert_array_equal(got[0], expected(datasets, rows, 40)[0])
    assert sum(map(len, faults.values())) == 0


def test_permanent_errors_name_file_and_offset(datasets: list[IndexedDataset]) -> None:
    offset = int(datasets[1].sequence_pointers[12])
    reader = faulty_reader(datasets, Faulty({offset: ["EIO"] * 3}))
    with pytest.raises(StorageError, match=f"1.bin: cannot read .* bytes at {offset}: Input"):
        read(reader, whole(datasets, 1))
    rows = whole(datasets, 1)  # it is as good as new
    np.testing.assert_array_equal(read(reader, rows)[0], expected(datasets, rows, 40)[0])


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()  # the threads that were left behind end


@pytest.mark.parametrize("hanging", [1, 3])
def test_a_read_that_hangs_is_reported_and_left(
    datasets: list[IndexedDataset], gate: threading.Event, hanging: int
) -> None:
    offsets = datasets[1].sequence_pointers[:40:16].tolist()[:hanging]

    def pread(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith("1.bin") and offset in offsets:
            assert gate.wait(60)
        return os.preadv(descriptor, buffers, offset)

    reader = faulty_reader(datasets, pread, timeout=1.0)
    rows = whole(datasets, 1)
    with pytest.raises(
        StorageError,
        match=rf"1.bin: a read at byte {offsets[0]} has not returned",
    ):
        read(reader, rows)
    others = whole(datasets, 3)  # with threads in the place of those that hang
    np.testing.assert_array_equal(read(reader, others)[0], expected(datasets, others, 40)[0])
    gate.set()
    np.testing.assert_array_equal(read(reader, rows)[0], expected(datasets, rows, 40)[0])


@pytest.mark.slow
def test_the_interpreter_exits_while_reads_hang(datasets: list[IndexedDataset]) -> None:
    code = f"""
import threading
from megaindex.format import IndexedDataset
from megaindex.io.mapping import DescriptorCache
from megaindex.io.mapping import RangeReader
from megaindex.loader.positional_reader import PositionalTokens
from megaindex.loader.batch_reader import ReadAhead
import numpy as np
from megaindex.index.spans import Spans

begun = threading.Event()

def pread(descriptor, buffers, offset):
    begun.set()
    threading.Event().wait()

files = RangeReader(descriptors=DescriptorCache(), pread=pread)
reader = PositionalTokens([IndexedDataset({datasets[0].path_prefix!r})], reader=files)
zero = np.zeros(1, np.int64)
spans = Spans(zero.astype(np.int32), zero, zero, zero + 1, np.array([0, 1]))
prepare = lambda k: reader.read(spans, np.zeros((1, 4), np.int64), pad_id=0)
ahead = ReadAhead(iter(range(9)), prepare, depth=3, threads=3)
assert begun.wait(30)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.slow
def test_a_slow_file_server_is_no_failure(datasets: list[IndexedDataset]) -> None:
    pause = threading.Event()

    def pread(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        pause.wait(0.07)
        return os.preadv(descriptor, buffers, offset)

    rows = whole(datasets, 1)  # more than the timeout in all, each in time
    reader = faulty_reader(datasets, pread, timeout=1.0, threads=1)
    np.testing.assert_array_equal(read(reader, rows)[0], expected(datasets, rows, 40)[0])


def test_files_that_change_under_a_running_job(tmp_path: Path) -> None:
    files = [write_corpus(tmp_path / str(k), [30] * 40) for k in range(4)]
    reader = PositionalTokens(files, reader=RangeReader(descriptors=DescriptorCache(1)))
    for source in range(4):
        read(reader, [[(source, 0, 0, 30)]])
    os.rename(tmp_path / "0.bin", tmp_path / "x.bin")
    with pytest.raises(MissingFile, match="0.bin: cannot open again"):
        read(reader, [[(0, 0, 0, 30)]])
    os.truncate(tmp_path / "3.bin", 30 * 4 * 39)  # still open
    with pytest.raises(StorageError, match="3.bin: must hold bytes"):
        read(reader, [[(3, 39, 0, 30)]])
    os.truncate(tmp_path / "1.bin", 100)
    with pytest.raises(StorageError, match="1.bin: changed since"):
        read(reader, [[(1, 39, 0, 30)]])
    (tmp_path / "y").write_bytes((tmp_path / "2.bin").read_bytes())
    os.replace(tmp_path / "y", tmp_path / "2.bin")
    with pytest.raises(StorageError, match="2.bin: changed since"):
        read(reader, [[(2, 0, 0, 30)]])


def test_many_threads_read_at_once(datasets: list[IndexedDataset]) -> None:
    reader = faulty_reader(datasets, Faulty({}))
    wrong: list[BaseException] = []

    def work(source: int) -> None:
        rows = whole(datasets, source)
        right = expected(datasets, rows, 40)[0]
        try:
            for _ in range(10):
                np.testing.assert_array_equal(read(reader, rows)[0], right)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k % 4,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("when", ["before the first read", "in a worker"])
def test_another_pair_of_the_same_sizes_is_not_read(tmp_path: Path, when: str) -> None:
    """Its tokens would be cut where documents of the first one end."""
    datasets = [write_corpus(tmp_path / "x", [10, 30], np.uint16)]
    reader = PositionalTokens(datasets)
    pickled = pickle.dumps(reader)
    write_corpus(tmp_path / "y", [30, 10], np.uint16)
    for suffix in (".bin", ".idx"):
        os.utime(tmp_path / f"y{suffix}", ns=(0, 1))  # two pairs may be made in a tick of the clock
        os.replace(tmp_path / f"y{suffix}", tmp_path / f"x{suffix}")
    rows = [[(0, 0, 0, 10)]]
    with pytest.raises(StorageError, match=r"x(\.bin)?: changed since it was"):
        read(pickle.loads(pickled) if when == "in a worker" else reader, rows)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_it_works_in_a_forked_child_and_pickled(datasets: list[IndexedDataset]) -> None:
    reader = PositionalTokens(datasets)
    rows = whole(datasets, 0)
    right = expected(datasets, rows, 40)[0]
    np.testing.assert_array_equal(read(reader, rows)[0], right)
    np.testing.assert_array_equal(read(pickle.loads(pickle.dumps(reader)), rows)[0], right)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(read(reader, rows)[0], right) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_closing_ends_threads_and_closes_files(
    datasets: list[IndexedDataset], tmp_path: Path
) -> None:
    folder = tmp_path / "own"  # of which no reader of another test is still open
    shutil.copytree(os.path.dirname(datasets[0].path_prefix), folder)
    datasets = [IndexedDataset(folder / str(number)) for number in range(4)]
    names = {thread.name for thread in threading.enumerate()}
    reader = PositionalTokens(datasets)
    for source in range(4):
        read(reader, whole(datasets, source))
    assert len(open_below(folder)) == 4
    reader.close()
    assert open_below(folder) == []
    for thread in threading.enumerate():
        if thread.name == "megaindex-read" and thread.name not in names:
            thread.join(10)
            assert not thread.is_alive()


def test_options_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="threads=0"):
        PositionalOptions(threads=0)
