"""Reads that fail, stop short or come back empty."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from megaindex.errors import MissingFile, StorageError
from megaindex.io.mapping import DescriptorCache, Pread, RangeReader, resident_pages
from megaindex.io.paths import FileInfo

CONTENT = bytes(range(256)) * 16


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "x.bin").write_bytes(CONTENT)
    return str(tmp_path / "x.bin")


class Faulty:
    """os.preadv that first does what ``script`` says: an errno, or how many bytes to read."""

    def __init__(self, script: list[int | str]) -> None:
        self.script = script
        self.calls = 0

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        self.calls += 1
        if not self.script:
            return os.preadv(descriptor, buffers, offset)
        step = self.script.pop(0)
        if isinstance(step, str):
            number = getattr(errno, step)
            raise OSError(number, os.strerror(number))
        return os.preadv(descriptor, [buffers[0][:step]], offset)


def reader(pread: Pread = os.preadv, retries: int = 2) -> RangeReader:
    return RangeReader(
        descriptors=DescriptorCache(), retries=retries, first_pause=0.001, pread=pread
    )


def read(path: str, offset: int, nbytes: int, by: RangeReader) -> bytes:
    into = bytearray(nbytes)
    by.read(FileInfo(path, len(CONTENT)), offset, memoryview(into))
    return bytes(into)


@pytest.mark.parametrize(
    "script",
    [
        [],
        [10, 1, 100],
        ["EIO"],
        ["EIO", "ESTALE"],
        [7, "EIO", 9, "ESTALE", 3],
        ["EAGAIN", "ETIMEDOUT"],
        [0, 5, 0],
    ],
)
def test_what_passes_is_read_completely(path: str, script: list[int | str]) -> None:
    assert read(path, 300, 700, reader(Faulty(script))) == CONTENT[300:1000]


def test_many_ranges_of_a_file(path: str) -> None:
    into = [bytearray(50), bytearray(1), bytearray(200)]
    ranges = [(0, memoryview(into[0])), (4000, memoryview(into[1])), (777, memoryview(into[2]))]
    steps = reader(Faulty([3, "EIO"])).read_each(FileInfo(path, len(CONTENT)), ranges)
    assert len(list(steps)) == 3
    assert into == [CONTENT[:50], CONTENT[4000:4001], CONTENT[777:977]]


def test_retries_are_bounded(path: str) -> None:
    faulty = Faulty(["EIO"] * 10)
    with pytest.raises(
        StorageError, match="700 bytes at 300: Input/output error.*after 3 att"
    ) as e:
        read(path, 300, 700, reader(faulty))
    assert e.value.errno == errno.EIO
    assert str(e.value).startswith(path)
    assert faulty.calls == 3


def test_a_read_that_returns_nothing_is_not_tried_forever(path: str) -> None:
    with pytest.raises(StorageError, match="a read at 300 returned nothing"):
        read(path, 300, 700, reader(Faulty([0] * 10)))


def test_what_does_not_pass_is_not_tried_again(path: str) -> None:
    faulty = Faulty(["EISDIR"])
    with pytest.raises(StorageError, match="cannot read 700 bytes at 300: Is a directory"):
        read(path, 300, 700, reader(faulty))
    assert faulty.calls == 1


def test_a_file_cut_short_while_open(path: str) -> None:
    by = reader()
    assert read(path, 0, 10, by) == CONTENT[:10]
    os.truncate(path, 500)
    assert read(path, 400, 100, by) == CONTENT[400:500]  # what is there is read
    with pytest.raises(StorageError, match=r"must hold bytes 500 to 1000"):
        read(path, 300, 700, by)


def test_a_stale_handle_is_opened_anew_and_must_be_the_same_file(path: str) -> None:
    by = reader(Faulty([5, "ESTALE"]))
    assert read(path, 0, 5, by) == CONTENT[:5]
    os.rename(path, path + ".moved")
    with pytest.raises(MissingFile, match="cannot open again"):
        read(path, 0, 5, by)


def test_pages_in_memory_are_counted_from_the_first_byte_to_the_last() -> None:
    page = mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, 5 * page), np.uint8)
    memory[: 4 * page] = 1
    begin = memory.ctypes.data
    for offset, nbytes, found in (
        (0, 5 * page, (4, 5)),
        (0, 1, (1, 1)),
        (1, page, (2, 2)),
        (page - 1, 2, (2, 2)),
        (3 * page + 5, page, (1, 2)),
    ):
        assert resident_pages(begin + offset, nbytes) == found
