"""Benchmark of random reads of a corpus outside the page cache, against GPTDataset."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import megaindex
from benchmarks.timing import Comparison

SEQUENCE_LENGTH = 2048
MICRO_BATCH = 8
_NBYTES = 2 << 30
_MEAN_TOKENS = 1000
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def compare(
    reader: str, workers: int, directory: Path, rounds: int, *, as_it_is: bool = False
) -> Comparison:
    """Time the same samples on both sides with a cold file; every batch is compared.

    At each page fault the kernel reads ahead up to megabytes for a sample of 4 KB. Unless
    ``as_it_is``, the peer's mapping gets MADV_RANDOM, the best case of page faults, which the peer
    does not set itself.
    """
    prefix = write_corpus(directory)
    sides = _Sides(prefix, directory)
    samples = 128 if as_it_is else 1024
    stayed = 0.0  # largest share of pages in memory before a run
    ours: list[float] = []
    peer: list[float] = []
    for number in range(rounds + 1):
        ids = (np.arange(samples) + number * samples) % sides.num_samples
        batches = ids.reshape(-1, MICRO_BATCH).tolist()
        seconds, sums = _timed(prefix, partial(sides.ours, batches, reader), mmap.MADV_NORMAL)
        advice = mmap.MADV_NORMAL if as_it_is else mmap.MADV_RANDOM
        peer_seconds, peer_sums = _timed(prefix, partial(sides.peer, batches, workers), advice)
        if sums != peer_sums:
            raise SystemExit(f"cold reads, {reader}: the batches differ from the peer's")
        stayed = max(stayed, make_cold(prefix))
        if number:  # the first of each is not measured
            ours.append(seconds)
            peer.append(peer_seconds)
    advised = "" if as_it_is else ", spared read-around"
    state = "cold" if stayed < 0.02 else f"NOT cold ({100 * stayed:.0f} % stayed in memory)"
    return Comparison(
        what=f"{state} random reads, S 2048, {reader}, against {workers} workers{advised}",
        ours=ours,
        peer=peer,
        items=samples,
        unit="sample",
        asked=3.0,
        output_bytes=samples * SEQUENCE_LENGTH * 8 * 2,
    )


def describe_device(directory: Path) -> str:
    """Return the sequential read rate, and the share of pages that cannot be dropped."""
    prefix = write_corpus(directory)
    resident = make_cold(prefix)
    buffer = bytearray(8 << 20)
    nbytes = _NBYTES // 4
    with open(f"{prefix}.bin", "rb", buffering=0) as file:
        start = time.perf_counter()
        for offset in range(0, nbytes, len(buffer)):
            os.preadv(file.fileno(), [buffer], offset)
        speed = nbytes / (time.perf_counter() - start)
    state = "cold" if resident < 0.01 else f"NOT cold: {100 * resident:.0f} % stayed in memory"
    return f"device, in sequence: {speed / 1e6:,.0f} MB/s; the file was {state}"


@cache
def write_corpus(directory: Path) -> Path:
    """Write a corpus of random tokens; a sparse file would not be read from the device."""
    prefix = directory / "cold"
    rng = np.random.default_rng(1)
    drawn = rng.lognormal(np.log(_MEAN_TOKENS) - 0.5, 1.0, _NBYTES // 2 // _MEAN_TOKENS)
    lengths = np.clip(drawn, 1, 1 << 20).astype(np.int32)
    pointers = np.zeros(lengths.size, np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    left = int(lengths.sum(dtype=np.int64))
    with open(f"{prefix}.bin", "wb") as file:
        block = rng.integers(0, 50_000, 1 << 24, dtype=np.uint16)
        while left:
            block = np.roll(block, 12_347)[:left]
            block.tofile(file)
            left -= block.size
        file.flush()
        os.fsync(file.fileno())
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, lengths.size, lengths.size + 1))
        for array in (lengths, pointers * 2, np.arange(lengths.size + 1, dtype=np.int64)):
            array.tofile(file)
    return prefix


def make_cold(prefix: Path) -> float:
    """Drop the pages of the .bin from memory and return the share that stayed.

    Pages in a process's page table are not dropped, so those of this process are unmapped first.
    """
    _advise(prefix, mmap.MADV_DONTNEED)
    with open(f"{prefix}.bin", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with contextlib.closing(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)) as mapping:
            pages = np.frombuffer(mapping, np.uint8)
            flags = np.zeros(-(-pages.size // mmap.PAGESIZE), np.uint8)
            failed = _libc.mincore(pages.ctypes.data, pages.size, flags.ctypes.data)
            del pages
    return 1.0 if failed else float((flags & 1).mean())


class _Sides:
    """Both sides over the same corpus, in the same order."""

    def __init__(self, prefix: Path, directory: Path) -> None:
        from benchmarks import peer

        self._corpus = megaindex.IndexedDataset(prefix)
        self._index = megaindex.build_index(
            self._corpus, sequence_length=SEQUENCE_LENGTH, seed=1, epochs=1
        )
        self.num_samples = self._index.num_samples
        self._theirs = peer.megatron_index(
            peer.open_megatron(prefix), None, SEQUENCE_LENGTH, 1, directory / "peer-cache"
        )
        # four megabytes a sample, on by default, on neither side
        self._theirs.config.create_attention_mask = False

    def ours(self, batches: list[list[int]], reader: str) -> Iterator[Any]:
        from megaindex.loader import Loader

        return iter(
            Loader(self._index, self._corpus, batches, reader=reader, read_ahead=8, num_threads=4)
        )

    def peer(self, batches: list[list[int]], workers: int) -> Iterator[Any]:
        from torch.utils.data import DataLoader

        return iter(DataLoader(self._theirs, batch_sampler=batches, num_workers=workers))


def _advise(prefix: Path, advice: int) -> None:
    """Advise the kernel on every mapping of the .bin in this process."""
    path = os.path.realpath(f"{prefix}.bin")
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(path):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            _libc.madvise(begin, end - begin, advice)


def _timed(
    prefix: Path, begin: Callable[[], Iterator[Any]], advice: int
) -> tuple[float, list[int]]:
    """Return the seconds after the first batch, when workers have started, and sums of tokens."""
    make_cold(prefix)
    _advise(prefix, advice)
    batches = begin()
    sums = [int(next(batches)["tokens"].sum())]
    start = time.perf_counter()
    sums += [int(batch["tokens"].sum()) for batch in batches]
    return time.perf_counter() - start, sums
